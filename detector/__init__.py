"""Which sentences of an answer rest on the retrieved passages, on which one, and which on nothing.

>>> from detector import Record, Scorer
>>> scorer = Scorer.load("smollm2-135m")                                          # doctest: +SKIP
>>> record = Record(question="...", passages=["..."], answer="...")
>>> for finding in scorer.audit(record).sentences:                                # doctest: +SKIP
...     print(finding.text, finding.score, finding.evidence)
"""

from typing import TYPE_CHECKING, Any

from detector.errors import DetectorError, ProfileError, RecordRejected, RejectReason, ScorerError
from detector.record import Passage, Record

if TYPE_CHECKING:
    from detector.scorer import Scorer

__all__ = [
    "DetectorError",
    "Passage",
    "ProfileError",
    "Record",
    "RecordRejected",
    "RejectReason",
    "Scorer",
    "ScorerError",
]


def __getattr__(name: str) -> Any:
    """Import `Scorer` when it is first used: readers of records and findings need neither torch nor time."""
    if name == "Scorer":
        from detector.scorer import Scorer

        return Scorer
    raise AttributeError(f"module 'detector' has no attribute {name!r}")
