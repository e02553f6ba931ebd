"""Peak memory of the vocabulary step beyond its inputs and results, in fresh processes.

    python -m tests.figures.vocabulary_memory

In brackets: what keeping all logits in float32 at once would take.
"""

import resource
import subprocess
import sys

import torch

from detector.vocabulary import BLOCK_BYTES, Head, reduce_vocabulary

SHAPES = [(256, 20, 152_000), (64, 20, 152_000), (256, 5, 152_000), (256, 20, 49_152), (16, 60, 300_000)]
WIDTH = 64  # narrow, so that the head's own weights do not hide the step


def peak_mebibytes(n_rows: int, n_passages: int, n_vocabulary: int) -> float:
    """Run the step once in this process; growth of the high-water mark, in MiB."""
    torch.manual_seed(0)
    hidden = torch.randn(n_passages + 2, n_rows, WIDTH)
    head = Head(torch.randn(n_vocabulary, WIDTH) / 8)
    targets = torch.randint(n_vocabulary, (n_rows,))
    reduce_vocabulary(hidden[:, :1, :8], targets[:1], Head(head.weight[:512, :8]))  # first-use allocations
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with torch.inference_mode():
        reduce_vocabulary(hidden, targets, head)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def main() -> None:
    """One line per shape."""
    if len(sys.argv) > 1:
        print(peak_mebibytes(*(int(value) for value in sys.argv[1:])))
        return
    print(f"block of {BLOCK_BYTES >> 20} MiB")
    for n_rows, n_passages, n_vocabulary in SHAPES:
        command = [sys.executable, "-m", "tests.figures.vocabulary_memory"]
        shape = [str(n_rows), str(n_passages), str(n_vocabulary)]
        done = subprocess.run([*command, *shape], capture_output=True, text=True, check=True)
        everything = (n_passages + 2) * n_rows * n_vocabulary * 4 / 2**20
        print(
            f"A = {n_rows}, K = {n_passages}, V = {n_vocabulary}: {float(done.stdout):.0f} MiB "
            f"(all logits at once: {everything:.0f} MiB)"
        )


if __name__ == "__main__":
    main()
