"""Verifiers beside the methods of a comparison: `nli:MODEL` and `tokens:MODEL`, a hub id or a local folder.

They learn nothing here and read the answers once, whatever the folds.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from detector.errors import RecordRejected
from detector.heads import F64, Labelled, spread
from jobs.config import Config
from jobs.errors import ConfigError
from jobs.evaluate import Fit, Score
from jobs.labelled import LabelledRecord

KINDS = ("nli", "tokens")


def check(verifiers: Sequence[str]) -> None:
    """Raises ConfigError for what does not name a kind and a model."""
    for verifier in verifiers:
        kind, colon, model = verifier.partition(":")
        if kind not in KINDS or not colon or not model:
            raise ConfigError(
                f"--verifier {verifier}: write it as nli:MODEL or tokens:MODEL (a hub id or a local folder)"
            )


def verify(
    verifier: str,
    examples: Sequence[Labelled],
    answers: Sequence[LabelledRecord],
    config: Config,
    on_progress: Callable[[str], None],
) -> Fit:
    """Read every answer, and give the scores back to whatever fold asks for them. Higher = less grounded.

    Raises ScorerError for a model that is none of its kind, ConfigError where it cannot read an answer: a
    comparison on other answers than the rest would be none.
    """
    from detector.verifiers import NLIVerifier, TokenClassifier

    kind, _, model = verifier.partition(":")
    load = NLIVerifier.load if kind == "nli" else TokenClassifier.load
    loaded = load(model, device=config.scorer.device, dtype=config.scorer.dtype)
    read: dict[int, tuple[F64, F64, float | None]] = {}
    for index, (example, answer) in enumerate(zip(examples, answers, strict=True)):
        if index % 20 == 0:
            on_progress(f"{verifier}: {index} of {len(examples)} answers")
        try:
            tokens, sentences = _scores(loaded, example, answer)
        except RecordRejected as rejected:
            raise ConfigError(
                f"--verifier {verifier}: cannot read answer {answer.record.response_id} "
                f"({rejected.reason.value}: {rejected.detail}); leave one of the two out"
            ) from None
        read[id(example)] = tokens, sentences, None
    score: Score = lambda example: read[id(example)]  # noqa: E731
    return lambda _: score


def _scores(verifier: Any, example: Labelled, answer: LabelledRecord) -> tuple[F64, F64]:
    record, offsets = answer.record, example.trace.offsets
    spans = []
    for members in example.sentences:
        start, end = int(offsets[members[0], 0]), int(offsets[members[-1], 1])
        spans.append((end - len(record.answer[start:end].lstrip()), end))
    sentences = np.asarray(verifier.sentences(record, spans), dtype=np.float64)
    if not hasattr(verifier, "tokens"):
        return spread(sentences, example.sentences, len(offsets)), sentences
    places, chances = verifier.tokens(record)
    characters = np.zeros(len(record.answer) + 1)
    for (start, end), chance in zip(places.tolist(), chances.tolist(), strict=True):
        characters[start:end] = np.maximum(characters[start:end], chance)
    tokens = [characters[start:end].max(initial=0.0) for start, end in offsets.tolist()]
    return np.array(tokens, dtype=np.float64), sentences
