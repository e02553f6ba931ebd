"""Findings of one record: its sentences with their scores and the passage each rests on."""

from dataclasses import dataclass

import numpy as np

from detector.aggregate import Measurement, SentenceMeasurement
from detector.bundle import Verdict
from detector.calibration import Reference, score
from detector.errors import ProfileError
from detector.methods import METHODS
from detector.record import Record

_LENGTHS = ("n_tokens", "log_tokens")


@dataclass(frozen=True, slots=True)
class Evidence:
    """The text whose removal costs a sentence most, and by how much."""

    passage_index: int
    passage_id: str | None
    drop_nats: float
    """Mean over the sentence's tokens; near or below 0 means that no single passage matters."""
    text: str


@dataclass(frozen=True, slots=True)
class Finding:
    """One sentence of the answer. `score`: higher = less grounded, a probability where a trained method
    judged; `flagged`: at or over the threshold."""

    text: str
    start: int
    end: int
    score: float
    flagged: bool
    evidence: Evidence | None
    verdict: Verdict | None = None
    """What the head of a bundle says, and which signals made it say so; None without a bundle."""


@dataclass(frozen=True, slots=True)
class Findings:
    """What `Scorer.audit` returns. Iterate `sentences`; `measurement` holds every number behind them."""

    sentences: tuple[Finding, ...]
    threshold: float | None
    measurement: Measurement


def find(record: Record, measurement: Measurement, reference: Reference, method: str) -> Findings:
    """Judge one measured record. Raises ProfileError for an unknown method or one without statistics."""
    if method not in METHODS:
        raise ProfileError(f"no method {method!r}; known: {', '.join(METHODS)}")
    sentences = measurement.sentences
    columns = {
        name: np.array([_feature(sentence, name) for sentence in sentences], dtype=np.float64)
        for name in METHODS[method].features
    }
    scores = score(columns, METHODS[method], reference.sentences).tolist()
    threshold = reference.threshold if method == reference.deciding_method else None
    return Findings(
        sentences=tuple(
            Finding(
                text=record.answer[sentence.start : sentence.end],
                start=sentence.start,
                end=sentence.end,
                score=value,
                flagged=threshold is not None and value >= threshold,
                evidence=_evidence(record, sentence),
                verdict=sentence.verdict,
            )
            for sentence, value in zip(sentences, scores, strict=True)
        ),
        threshold=threshold,
        measurement=measurement,
    )


def _feature(sentence: SentenceMeasurement, name: str) -> float:
    if name == "ensemble":
        if sentence.verdict is None:
            raise ProfileError(
                "ensemble was not measured: no bundle fits this scorer (`leadline fit` makes one)"
            )
        return sentence.verdict.probability
    value = getattr(sentence if name in _LENGTHS else sentence.features, name)
    if value is None:
        blind = name == "attention_share"
        why = "this scorer's attention cannot be read" if blind else "leave-one-out was off"
        raise ProfileError(f"{name} was not measured: {why}")
    return float(value)


def _evidence(record: Record, sentence: SentenceMeasurement) -> Evidence | None:
    piece, drop = sentence.evidence, sentence.features.max_drop
    if piece is None or drop is None:
        return None
    passage = record.passages[piece.passage_index]
    return Evidence(piece.passage_index, passage.id, drop, passage.text[piece.start : piece.end])
