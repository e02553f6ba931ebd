"""The vocabulary kernel against torch: time, peak memory, and error against float64, on random numbers.

    python -m jobs.bench_kernel [--repeats N] [--json FILE]

Needs torch, transformers, numpy and triton, and a GPU. Without one a tiny case runs in Triton's interpreter:
it shows that everything is in place, and nothing else.
"""

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from detector.vocabulary import Head, Reduction, reduce_vocabulary
from jobs.console import guard
from jobs.errors import ConfigError

_NUMBERS = ("logprob", "entropy", "jsd", "top", "bottom")
_TOLERANCE_NATS = 1e-6


@dataclass(frozen=True, slots=True)
class Step:
    """One vocabulary step: C conditions of A rows, D wide, against V tokens."""

    vocabulary: int
    width: int
    rows: int
    conditions: int
    dtype: torch.dtype
    timed: bool = True


HEADS = {49_152: 576, 151_936: 896, 262_144: 1152}
"""Vocabulary and width of SmolLM2-135M, Qwen2.5-0.5B and Gemma 3 1B."""

TIMED = [
    Step(vocabulary, width, 200, n_pieces + 2, torch.bfloat16)
    for vocabulary, width in HEADS.items()
    for n_pieces in (5, 20)
]
CHECKED = [
    Step(vocabulary, width, rows, n_pieces + 2, dtype, timed=False)
    for vocabulary, width in HEADS.items()
    for rows in (1, 7, 256)
    for n_pieces in (0, 1, 20)
    for dtype in (torch.bfloat16, torch.float32)
]
DRY = [Step(389, 32, 3, 3, torch.float32), Step(389, 32, 3, 3, torch.bfloat16, timed=False)]

TILINGS: dict[str, dict[str, int]] = {
    "kernel": {},
    "kernel, 64 columns": {"columns": 64},
    "kernel, 4 stages": {"stages": 4},
    "kernel, 128 rows": {"rows": 128},
}
"""The tiling that is used, and others that may be faster than it: only a GPU can tell."""


def compare(repeats: int, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Measure every step: seconds (medians), bytes beyond the inputs, largest error of each number.

    Off a GPU the dry run. Raises ConfigError where triton is not there, or not set to interpret.
    """
    if find_spec("triton") is None:
        raise ConfigError("the vocabulary kernel needs triton, which is not here: pip install triton")
    gpu = torch.cuda.is_available()
    if not gpu and os.environ.get("TRITON_INTERPRET") != "1":
        raise ConfigError("no GPU here: set TRITON_INTERPRET=1 for a dry run of the vocabulary kernel")
    steps: Iterable[Step] = [*TIMED, *CHECKED] if gpu else DRY
    with torch.inference_mode():
        return [_measure(step, repeats if gpu else 1, say, "cuda" if gpu else "cpu") for step in steps]


def _measure(step: Step, repeats: int, say: Callable[[str], None], device: str) -> dict[str, Any]:
    from detector.vocabulary_kernel import Tiling, reduce_on_chip

    dtype = str(step.dtype).removeprefix("torch.")
    case = {"V": step.vocabulary, "D": step.width, "A": step.rows, "C": step.conditions, "dtype": dtype}
    say(", ".join(f"{name} = {value}" for name, value in case.items()))
    hidden, targets, head = _numbers(step, device)
    tasks: dict[str, Callable[[], Reduction]] = {
        "torch": partial(reduce_vocabulary, hidden, targets, head),
        "torch, 1 GiB": partial(reduce_vocabulary, hidden, targets, head, block_bytes=1 << 30),
    }
    timed = step.timed and device == "cuda"
    for name, sizes in TILINGS.items() if timed else [("kernel", {})]:
        tasks[name] = partial(reduce_on_chip, hidden, targets, head, tiling=Tiling(**sizes))
    exact = Head(head.weight.double())
    truth = reduce_vocabulary(hidden.double(), targets, exact)
    del exact
    ways: dict[str, dict[str, Any]] = {}
    for name, task in tasks.items():
        found, extra = _peak(task, device)  # its first call compiles, and counts for nothing
        errors = {number: _error(found, truth, number) for number in _NUMBERS}
        ways[name] = {"extra_bytes": extra, "errors_nats": errors, "rank_off": _error(found, truth, "rank")}
    if step.timed:
        seconds: dict[str, list[float]] = {name: [] for name in tasks}
        for _ in range(repeats):
            for name, task in tasks.items():
                seconds[name].append(_seconds(task, device))
        for name, rounds in seconds.items():
            ways[name]["seconds"] = statistics.median(rounds)
    plain, kernel = ways["torch"]["errors_nats"], ways["kernel"]["errors_nats"]
    right = all(kernel[number] <= plain[number] + _TOLERANCE_NATS for number in _NUMBERS)
    return {**case, "right": right, "ways": ways, "interpreted": device == "cpu"}


def _numbers(step: Step, device: str) -> tuple[torch.Tensor, torch.Tensor, Head]:
    """Logits with a deviation of 3, conditions that differ by a tenth of it. The same every time."""
    made = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, generator=made)

    shared = normal(1, step.rows, step.width)
    hidden = shared + 0.1 * normal(step.conditions, step.rows, step.width)
    weight = 3 / math.sqrt(step.width) * normal(step.vocabulary, step.width)
    targets = torch.randint(step.vocabulary, (step.rows,), device=device, generator=made)
    return hidden.to(step.dtype), targets, Head(weight.to(step.dtype))


def _error(found: Reduction, truth: Reduction, number: str) -> float:
    difference = (getattr(found, number) - getattr(truth, number)).abs()
    return difference.max().item() if difference.numel() else 0.0


def _peak(task: Callable[[], Reduction], device: str) -> tuple[Reduction, int | None]:
    found = task()
    if device == "cpu":
        return found, None
    del found
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = task()
    torch.cuda.synchronize()
    return found, torch.cuda.max_memory_allocated() - before


def _seconds(task: Callable[[], Reduction], device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    task()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def show(cases: list[dict[str, Any]]) -> None:
    """Print what `compare` found: a line per way where time was taken, else one for the case."""
    if any(case["interpreted"] for case in cases):
        print("dry run in Triton's interpreter on a CPU: no time or memory here says anything about a GPU")
    for case in cases:
        verdict = "no error above torch's" if case["right"] else "ERROR ABOVE TORCH'S"
        title = f"V = {case['V']:,}, D = {case['D']}, A = {case['A']}, C = {case['C']}, {case['dtype']}"
        print(f"{title}: {verdict}")
        for name, way in case["ways"].items():
            worst = ", ".join(f"{number} {error:.1e}" for number, error in way["errors_nats"].items())
            took = f"{way['seconds'] * 1e3:9.2f} ms" if "seconds" in way else ""
            extra = "" if way["extra_bytes"] is None else f"{way['extra_bytes'] / 2**20:8.1f} MiB"
            print(f"  {name:<20}{took}{extra}  off by {worst} nats, rank {way['rank_off']:g}")


def main() -> int:
    """`python -m jobs.bench_kernel [--repeats N] [--json FILE]`. Returns the exit code."""
    arguments = argparse.ArgumentParser(description="The vocabulary kernel against torch.")
    arguments.add_argument("--repeats", type=int, default=20)
    arguments.add_argument("--json", metavar="FILE")
    chosen = arguments.parse_args()

    def body() -> int:
        if not torch.cuda.is_available():
            os.environ.setdefault("TRITON_INTERPRET", "1")
        found = compare(chosen.repeats, lambda text: print(text, file=sys.stderr))
        show(found)
        if chosen.json is not None:
            Path(chosen.json).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
        return 0 if all(case["right"] for case in found) else 1

    return guard(body, debug=False)


if __name__ == "__main__":
    sys.exit(main())
