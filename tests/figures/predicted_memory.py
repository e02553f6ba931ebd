"""Predicted against measured peak memory of one record, over the loaded default scorer on a CPU.

    OMP_NUM_THREADS=1 python -m tests.figures.predicted_memory [--shapes 300/100/3 ...] [--loo exact masked]

A shape is C/A/K. Each is measured in a fresh process (VmHWM over the loaded model, `jobs.bench_meters`), one
after the other. Linux only.
"""

import argparse
import json

import torch
from transformers import AutoTokenizer

from detector.identity import locate
from detector.memory import Extent, Sizes, predict_peak
from detector.prompts import PROFILES, read_record
from detector.scorers import EMBEDDED
from jobs.bench_meters import extra_peak_bytes
from jobs.bench_peers import MODES, ScorerSpec, keep_of
from jobs.bench_shapes import Shape, generate

SHAPES = ("300/100/3", "700/200/5", "2000/200/10", "6000/200/20")
_WINDOW_TOKENS = 8192


def main() -> None:
    """One line per shape and mode."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--shapes", nargs="+", default=SHAPES, metavar="C/A/K")
    arguments.add_argument("--loo", nargs="+", default=["masked", "exact"], choices=MODES)
    chosen = arguments.parse_args()
    folder, profile = locate(EMBEDDED, None), PROFILES["plain"]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    sizes = Sizes.of(json.loads((folder / "config.json").read_text()), "float32")
    spec = ScorerSpec(EMBEDDED, device="cpu", dtype="float32")
    print(f"{'C/A/K':>12} {'loo':>7} {'predicted':>10} {'measured':>10} {'off by':>7}  MiB")
    for text in chosen.shapes:
        shape = Shape(*map(int, text.split("/")))
        (record,) = generate(shape, 1, tokenizer, profile.separator)
        extent = Extent.of(read_record(record, tokenizer, profile, _WINDOW_TOKENS))
        for loo in chosen.loo:
            predicted = predict_peak(sizes, extent, keep_of(loo)).n_bytes
            # The child process measures; on a CPU it needs nothing from here but the names.
            measured = extra_peak_bytes(loo, spec, None, record, torch.device("cpu"))
            if measured is None:
                raise SystemExit("this system cannot set back its high-water mark")
            off = predicted / measured - 1
            line = f"{predicted / 2**20:>10.0f} {measured / 2**20:>10.0f} {off:>+7.0%}"
            print(f"{text:>12} {loo:>7} {line}", flush=True)


if __name__ == "__main__":
    main()
