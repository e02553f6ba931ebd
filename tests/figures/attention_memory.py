"""Extra peak memory of reading attention, over the loaded scorer: ours against `output_attentions=True`.

    OMP_NUM_THREADS=2 python -m tests.figures.attention_memory [--tokens 2048 3072 8192] [--rows 200]

One pass over a prompt with an answer of `--rows` tokens, each in a fresh process:

    pass    the pass itself, scaled-dot-product attention, nothing read
    ours    the same, and the shares of every layer and head for the answer's rows
    eager   `output_attentions=True`, which holds every layer's map until the pass is over

Where the maps of `eager` would not fit this machine, their size (layers x heads x tokens^2 x 4 bytes) is
printed instead of a measurement. Linux only: the high-water mark is set back after loading, whose own peak
would otherwise hide a smaller one.
"""

import argparse
import subprocess
import sys
from pathlib import Path

import torch

from detector import Scorer
from detector.forward import last_rows
from detector.probe import Keep, Probe
from detector.scorers import EMBEDDED
from detector.windows import Layout

KINDS = ("pass", "ours", "eager")
_STATUS = Path("/proc/self/status")


def peak_mebibytes(kind: str, n_tokens: int, n_rows: int) -> float:
    """Run one pass in this process; growth of resident memory from loaded to its highest, in MiB."""
    scorer = Scorer.load(EMBEDDED)
    body = scorer.model.base_model
    ids = tuple(torch.randint(1000, 20_000, (n_tokens,), generator=torch.Generator().manual_seed(0)).tolist())
    last_rows(body, [ids[:64]], [1])  # first-use allocations
    if kind == "eager":
        scorer.model.set_attn_implementation("eager")
    first = n_tokens - n_rows
    layout = Layout((3, first - 30), first - 4)
    before = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark, set back to what is resident now
    if kind == "eager":
        with torch.inference_mode():
            out = body(input_ids=torch.tensor([ids]), use_cache=True, output_attentions=True)
            assert len(out.attentions) == scorer.model.config.num_hidden_layers
    else:
        probes = (
            [Probe(body, Keep(attention=True), layout, (), (first, n_tokens), 0)] if kind == "ours" else []
        )
        last_rows(body, [ids], [n_rows + 1], probes)
        for probe in probes:
            assert probe.attention()[0].shape[-1] == n_rows + 1
    return _resident("VmHWM") - before


def maps_mebibytes(n_tokens: int) -> float:
    """All attention maps of the embedded scorer in float32."""
    return 30 * 9 * n_tokens**2 * 4 / 2**20


def _resident(name: str) -> float:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) / 1024


def _available_mebibytes() -> float:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")) / 1024


def main() -> None:
    """One line per prompt length."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--tokens", type=int, nargs="+", default=[2048, 3072, 8192])
    arguments.add_argument("--rows", type=int, default=200)
    arguments.add_argument("--kind", choices=KINDS, help="measure this one in this process")
    chosen = arguments.parse_args()
    if chosen.kind:
        print(peak_mebibytes(chosen.kind, chosen.tokens[0], chosen.rows))
        return
    print(f"{EMBEDDED}, float32, {chosen.rows} answer rows; extra peak over the loaded scorer, MiB")
    print(f"{'tokens':>8} {'pass':>8} {'ours':>8} {'eager':>24}")
    for n_tokens in chosen.tokens:
        found = {}
        for kind in KINDS:
            # A layer at work holds a few maps more, and the scorer itself is half a gibibyte.
            if kind == "eager" and maps_mebibytes(n_tokens) * 1.2 + 1024 > _available_mebibytes():
                found[kind] = f"{maps_mebibytes(n_tokens):.0f} (computed: too large)"
                continue
            command = [sys.executable, "-m", "tests.figures.attention_memory", "--kind", kind]
            sizes = ["--tokens", str(n_tokens), "--rows", str(chosen.rows)]
            done = subprocess.run([*command, *sizes], capture_output=True, text=True, check=True)
            found[kind] = f"{float(done.stdout):.0f}"
        print(f"{n_tokens:>8} {found['pass']:>8} {found['ours']:>8} {found['eager']:>24}")


if __name__ == "__main__":
    main()
