"""What was measured of an answer, as rows of the tables MEASURED_RESPONSES and MEASURED_SENTENCES."""

from collections.abc import Iterator
from dataclasses import astuple
from typing import Any

from detector.aggregate import Features, Measurement
from detector.bundle import Verdict
from detector.record import Record
from jobs.tables import FEATURES, VERDICT

Row = dict[str, Any]

_MEASURED_COUNTS = (
    "n_passages",
    "n_context_tokens",
    "n_answer_tokens",
    "n_computed_tokens",
    "n_windows",
    "truncated",
)


def response_row(measured: Measurement, record_index: int) -> Row:
    """The columns that were measured of an answer. `record_index`: its number among the unit's answers."""
    return {
        "record_index": record_index,
        **_features(measured.features),
        "ensemble": measured.ensemble,
        "n_sentences": len(measured.sentences),
        **{name: getattr(measured, name) for name in _MEASURED_COUNTS},
    }


def sentence_rows(record: Record, measured: Measurement, record_index: int) -> Iterator[Row]:
    """A row for each sentence of an answer. `record_index`: as in `response_row`."""
    for sentence in measured.sentences:
        piece = sentence.evidence
        yield {
            "record_index": record_index,
            "sentence_index": sentence.index,
            "start": sentence.start,
            "end": sentence.end,
            "n_tokens": sentence.n_tokens,
            "n_windows": sentence.n_windows,
            "truncated": sentence.truncated,
            **_features(sentence.features),
            **_verdict(sentence.verdict),
            "evidence_passage_index": piece and piece.passage_index,
            "evidence_passage_id": piece and record.passages[piece.passage_index].id,
            "evidence_start": piece and piece.start,
            "evidence_end": piece and piece.end,
        }


def _features(features: Features) -> Row:
    return {name: getattr(features, name) for name in (*FEATURES, "drops", "jsds")}


def _verdict(verdict: Verdict | None) -> Row:
    if verdict is None:
        return dict.fromkeys(VERDICT)
    return dict(zip(VERDICT, astuple(verdict), strict=True))
