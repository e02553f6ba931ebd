"""A context that is longer than the scorer's window: 50 passages of 200 tokens on the default scorer.

    OMP_NUM_THREADS=1 python -m tests.figures.long_context [--loo masked] [--shape 10000/200/50]

Prints windows, seconds, computed tokens, what one window of that size would compute, and the extra peak over
the loaded model, measured and predicted. One reading, minutes long (`exact` takes ten times as long). Linux
only: the high-water mark is set back after loading.
"""

import argparse
import ctypes
import time
from contextlib import suppress
from pathlib import Path

from detector import Scorer
from detector.aggregate import measure
from detector.memory import Extent, Sizes, predict_peak
from detector.prompts import read_record
from detector.scorers import EMBEDDED
from jobs.bench_meters import FIRST_USE
from jobs.bench_peers import MODES, keep_of
from jobs.bench_shapes import Shape, floor, generate

_ONE_WINDOW = 1 << 20
_STATUS = Path("/proc/self/status")


def main() -> None:
    """One reading."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--loo", choices=MODES, default="masked")
    arguments.add_argument("--shape", default="10000/200/50", metavar="C/A/K")
    chosen = arguments.parse_args()
    shape, keep = Shape(*map(int, chosen.shape.split("/"))), keep_of(chosen.loo)
    scorer = Scorer.load(EMBEDDED, device="cpu", bundle=None)
    tokenizer, profile = scorer.tokenizer, scorer.profile
    (record,) = generate(shape, 1, tokenizer, profile.separator)
    reading, whole = (read_record(record, tokenizer, profile, n) for n in (scorer.window_tokens, _ONE_WINDOW))
    print(f"{shape}; {EMBEDDED}, window of {scorer.window_tokens:,} tokens, {chosen.loo}", flush=True)

    scorer.trace(FIRST_USE, keep)
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    before = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark, set back to what is resident now
    started = time.perf_counter()
    found = measure(reading, record.answer, scorer.trace(record, keep)[1], len(record.passages))
    seconds, peak = time.perf_counter() - started, _resident("VmHWM") - before

    sizes = Sizes.of(scorer.model.config.to_dict(), scorer.dtype)
    predicted = predict_peak(sizes, Extent.of(reading), keep).n_bytes
    times = found.n_computed_tokens / floor(whole, chosen.loo).tokens
    n_passages = [len(window.piece_indices) for window in reading.windows]
    print(f"n_windows        {found.n_windows}, of {n_passages} passages")
    print(f"sentences        {len(found.sentences)}, each in its best window")
    print(f"computed tokens  {found.n_computed_tokens:,}, {times:.2f} times one window")
    print(f"seconds          {seconds:,.0f}")
    print(f"extra peak       {peak / 2**20:,.0f} MiB, predicted {predicted / 2**20:,.0f} MiB")


def _resident(name: str) -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    main()
