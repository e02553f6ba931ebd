"""Everything the detector raises on purpose.

    DetectorError
    ├── ScorerError       the model cannot be used (not found, not a model, unsupported head)
    ├── ProfileError      a prompt profile or a reference profile does not fit what it is applied to
    └── RecordRejected    this one record cannot be audited; carries the reason that is counted

A message is one line: what, where, why, and what to do next.
"""

from enum import StrEnum


class RejectReason(StrEnum):
    """Why a row of the logs was not audited. Every row read is audited or carries one of these."""

    MALFORMED_ROW = "malformed_row"
    MISSING_ANSWER = "missing_answer"
    MISSING_QUESTION = "missing_question"
    NO_PASSAGES = "no_passages"
    PASSAGE_TEXT_MISSING = "passage_text_missing"
    ANSWER_TOO_SHORT = "answer_too_short"
    DUPLICATE = "duplicate"
    OVER_WINDOW = "over_window"
    SCORING_FAILED = "scoring_failed"


class DetectorError(Exception):
    """Base of all errors that the detector raises on purpose."""


class ScorerError(DetectorError):
    """The scorer model cannot be loaded or cannot be read the way Leadline reads models."""


class ProfileError(DetectorError):
    """A prompt profile or reference profile does not fit the scorer or the measurements."""


class RecordRejected(DetectorError):  # noqa: N818 - a verdict on a record, not a malfunction
    """One record cannot be audited.

    `reason` is counted, `detail` is for the reader of the rejects table and never holds log text.
    """

    def __init__(self, reason: RejectReason, detail: str) -> None:
        super().__init__(f"{reason.value}: {detail}")
        self.reason = reason
        self.detail = detail
