"""`exact` against K + 2 separate passes of the unmodified model, and both against float64 on a tiny model.

python -m tests.figures.exact_equals_separate [--answers 20] [--seed 0]
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np
import torch

from detector import Record, Scorer, attention
from detector.identity import ScorerInfo
from tests.detector.reference import separate_passes
from tests.figures.ragtruth import sample
from tests.tiny_scorer import save_tiny_scorer


def compare(scorer: Scorer, record: Record, dtype: torch.dtype) -> tuple[float, float]:
    """Largest difference of any per-token log-probability and of any JSD, in nats."""
    reading, traces = scorer.trace(record)
    (window,) = reading.windows
    trace = traces[0]
    logprob, jsd = separate_passes(
        scorer.model, (window.full, window.none, *window.without), reading.answer_ids, dtype
    )
    ours = np.concatenate([trace.logprob[None], trace.logprob_no_context[None], trace.logprob_without])
    divergences = np.concatenate([trace.jsd_no_context[None], trace.jsd_without])
    return float(np.abs(ours - logprob).max()), float(np.abs(divergences - jsd).max())


def main() -> None:
    """Print the largest differences."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--answers", type=int, default=20)
    arguments.add_argument("--seed", type=int, default=0)
    chosen = arguments.parse_args()
    answers = [labelled.record for labelled in sample(chosen.answers, chosen.seed)]
    scorer = Scorer.load("smollm2-135m")
    pairs = [compare(scorer, record, torch.float32) for record in answers]
    print(
        f"float32, {scorer.name}, {len(answers)} answers: largest difference of a log-probability "
        f"{max(p for p, _ in pairs):.1e} nats, of a JSD {max(j for _, j in pairs):.1e} nats"
    )
    with tempfile.TemporaryDirectory() as folder:
        tiny = tiny_float64(save_tiny_scorer(Path(folder)))
        pairs = [compare(tiny, record, torch.float64) for record in answers]
    print(
        f"float64, tiny model, {len(answers)} answers: {max(p for p, _ in pairs):.1e} and "
        f"{max(j for _, j in pairs):.1e} nats"
    )


def tiny_float64(folder: Path) -> Scorer:
    """The tiny scorer in double precision, with a window that any of these answers fits."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from detector.prompts import PROFILES

    attention.register()
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation=attention.NAME
    ).eval()
    info = ScorerInfo("tiny", "0" * 12, 100_000, "float64", True)
    return Scorer(model, AutoTokenizer.from_pretrained(folder), info, PROFILES["plain"])


if __name__ == "__main__":
    main()
