"""What reading a row can come to: a record, or a reject that says why not."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from detector.errors import RejectReason
from detector.record import Record


@dataclass(frozen=True, slots=True)
class Malformed:
    """A row that could not even be taken apart. `detail` says what and where, and holds no log text."""

    detail: str


@dataclass(frozen=True, slots=True)
class Incomplete:
    """A trace that is no record, and why. `values` are the labels that its spans still told, in our names."""

    reason: RejectReason
    detail: str
    values: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Accepted:
    """One row that can be audited. `position` is the row number in Parquet, CSV and JSON (from 0), the
    byte offset of the (decompressed) line in JSONL, and that of the first span where a row is a trace; `path`
    is the object's URL without credentials.
    """

    record: Record
    path: str
    position: int


@dataclass(frozen=True, slots=True)
class Reject:
    """One row that cannot be audited, and whatever the row still told about itself (None: unknown)."""

    reason: RejectReason
    detail: str
    path: str
    position: int
    response_id: str | None = None
    trace_id: str | None = None
    span_id: str | None = None
    timestamp: datetime | None = None
    app: str | None = None
    model: str | None = None
    retriever: str | None = None
    prompt_version: str | None = None
    language: str | None = None
