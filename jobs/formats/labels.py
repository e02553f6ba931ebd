"""What a row says about itself beside the texts: ids, time, dimensions, metadata."""

import hashlib
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

from detector.record import Record
from jobs.formats.json_text import embedded
from jobs.formats.outcome import Reject
from jobs.formats.paths import Path, Row, paths
from jobs.tables import DIMENSIONS

ID_CHARS = 512
LABEL_CHARS = 256
METADATA_ENTRIES = 32
METADATA_KEY_CHARS = 64

STRONG_IDS = paths(
    *("response_id", "id", "record_id", "span_id", "gen_ai.response.id", "trace_id"),
    *("context.span_id", "context.trace_id", "trace.span_id", "trace.trace_id"),
    *("ai.observability.record_id", "uuid"),
)
"""These name one answer."""

WEAK_IDS = paths(
    *("query_id", "request_id", "client_request_id", "question_id"),
    *("task_id", "input_id", "example_id", "sample_id"),
)
"""These name a question or a task, which several answers of a file may share."""

LABELS: dict[str, tuple[Path, ...]] = {
    "trace_id": paths("trace_id", "context.trace_id", "trace.trace_id"),
    "span_id": paths("span_id", "context.span_id", "trace.span_id", "observation_id"),
    "timestamp": paths(
        *("timestamp", "start_time", "created_at", "request_time", "ts", "time"),
        *("datetime", "start_timestamp", "event_time", "end_time"),
    ),
    "app": paths(
        *("app", "app_name", "application", "application_name"),
        *("service.name", "service_name", "ai.observability.app_name"),
    ),
    "model": paths(
        *("model", "model_name", "llm.model_name", "attributes.llm.model_name"),
        *("gen_ai.response.model", "gen_ai.request.model", "provided_model_name", "model_id"),
    ),
    "retriever": paths("retriever", "retriever_name", "retrieval_method", "gen_ai.data_source.id"),
    "prompt_version": paths(
        "prompt_version", "llm.prompt_template.version", "attributes.llm.prompt_template.version"
    ),
    "language": paths("language", "lang", "locale", "language_code"),
}

METADATA = paths("metadata", "attributes.metadata", "extra.metadata", "additional_metadata")
"""Where rows keep labels of their own; searched after the row itself."""

_DIMENSIONS = {
    name: (*LABELS[name], *(outer + path for outer in METADATA for path in LABELS[name]))
    for name in ("app", "model", "retriever", "prompt_version", "language")
}

_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_SURROGATES = re.compile(r"[\ud800-\udfff]")


_PASSED_ON = ("trace_id", "span_id", "timestamp", *DIMENSIONS)


@dataclass(frozen=True, slots=True)
class Labels:
    """The ids and dimensions of one row; None where the row does not say."""

    response_id: str | None = None
    weak_id: str | None = None
    trace_id: str | None = None
    span_id: str | None = None
    timestamp: datetime | None = None
    app: str | None = None
    model: str | None = None
    retriever: str | None = None
    prompt_version: str | None = None
    language: str | None = None

    def passed_on(self) -> dict[str, Any]:
        """What a Record or a Reject takes over as it is, by field name: everything but the answer's id."""
        return {name: getattr(self, name) for name in _PASSED_ON}


def read_labels(row: Row, partitions: Mapping[str, str], fields: Mapping[str, Path]) -> Labels:
    """Ids come from the row alone; dimensions also from its metadata and Hive folders."""

    def first(name: str, aliases: tuple[Path, ...], convert: Any) -> Any:
        for path in row.within(paths_of(name, aliases, fields)):
            found = row.find(path)
            value = None if found is None else convert(found.value)
            if value is not None:
                return value
        return None

    def dimension(name: str, convert: Any) -> str | None:
        value = first(name, _DIMENSIONS[name], convert)
        if value is not None or not partitions:
            return value
        names = (".".join(path) for path in paths_of(name, LABELS[name], fields))
        folders = (convert(partitions[each]) for each in names if each in partitions)
        return next((folder for folder in folders if folder is not None), None)

    return Labels(
        response_id=first("response_id", STRONG_IDS, identifier),
        weak_id=first("weak_id", WEAK_IDS, identifier),
        trace_id=first("trace_id", LABELS["trace_id"], identifier),
        span_id=first("span_id", LABELS["span_id"], identifier),
        timestamp=first("timestamp", LABELS["timestamp"], parse_time),
        app=dimension("app", label),
        model=dimension("model", label),
        retriever=dimension("retriever", label),
        prompt_version=dimension("prompt_version", label),
        language=dimension("language", parse_language),
    )


def paths_of(name: str, aliases: tuple[Path, ...], fields: Mapping[str, Path]) -> tuple[Path, ...]:
    """The user's own path for this field first, then the aliases."""
    return (fields[name], *aliases) if name in fields else aliases


def plain_text(value: Any) -> str | None:
    """A scalar as text, with lone surrogates replaced one for one so that code points keep their places.

    None for null, blank text, booleans, NaN, and everything that is not a scalar. Raises UnicodeDecodeError
    for bytes that are not UTF-8.
    """
    if isinstance(value, bytes):
        value = value.decode()
    if isinstance(value, str):
        if not value or value.isspace():
            return None
        return value if value.isascii() else _SURROGATES.sub("\ufffd", value)
    if isinstance(value, bool) or not isinstance(value, (int, float, Decimal)):
        return None
    return None if isinstance(value, float) and not math.isfinite(value) else str(value)


def identifier(value: Any) -> str | None:
    """An id as logged. Where it is too long or holds control characters, cleaned, with a digest of the
    original behind it: two different ids stay different.
    """
    text = value if isinstance(value, str) and value.strip() else plain_text(_decoded(value))
    if text is None:
        return None
    clean = _UNPRINTABLE.sub("", text)
    return text if clean == text and len(text) <= ID_CHARS else _marked(clean, text, ID_CHARS)


def label(value: Any) -> str | None:
    """A dimension's value on one line; where it is too long, cut with a digest behind it."""
    text = plain_text(_decoded(value))
    if text is None:
        return None
    clean = _UNPRINTABLE.sub("", text).strip()
    return (clean or None) if len(clean) <= LABEL_CHARS else _marked(clean, text, LABEL_CHARS)


def parse_language(value: Any) -> str | None:
    """`en` for en, EN, en-US, en_GB; None for anything that does not begin with a two-letter code."""
    match = re.fullmatch(r"([A-Za-z]{2})([-_][A-Za-z0-9_-]{1,32})?", (label(value) or ""))
    return match[1].lower() if match else None


def parse_time(value: Any) -> datetime | None:
    """ISO text, epoch seconds to nanoseconds, or a datetime, in UTC. Naive means UTC, nonsense means None."""
    try:
        if isinstance(value, datetime):
            moment = value
        elif isinstance(value, date):
            moment = datetime(value.year, value.month, value.day)
        elif isinstance(value, str):
            text = value.strip().removesuffix(" UTC").removesuffix(" GMT")
            number = re.fullmatch(r"\d{9,19}(\.\d+)?", text)
            moment = _from_epoch(float(text)) if number else datetime.fromisoformat(text)
        elif isinstance(value, (int, float, Decimal)) and not isinstance(value, bool):
            moment = _from_epoch(float(value))
        else:
            return None
        moment = moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
    except (ValueError, OverflowError, OSError):
        return None
    return moment if 1990 <= moment.year < 2200 else None


def record_date(record: Record | Reject, partitions: Mapping[str, str]) -> str | None:
    """YYYY-MM-DD in UTC: of the row's time, else of Hive folders (date, dt, ds, day or year/month/day)."""
    if record.timestamp is not None:
        return record.timestamp.astimezone(UTC).date().isoformat()
    folders = {name.lower(): value for name, value in partitions.items()}
    candidates = [folders[name] for name in ("date", "dt", "ds", "day") if name in folders]
    if {"year", "month", "day"} <= folders.keys():
        candidates.append(f"{folders['year']}-{folders['month']:0>2}-{folders['day']:0>2}")
    for candidate in candidates:
        try:
            return date.fromisoformat(candidate[:10]).isoformat()
        except ValueError:
            continue
    return None


def read_metadata(row: Row, partitions: Mapping[str, str], used: Collection[str]) -> dict[str, str]:
    """Small scalars of the row's metadata, then of the row, then its Hive folders; the rest is left out.

    `used` are the paths that became question, passages and answer.
    """
    own = [found.value for found in map(row.find, row.within(METADATA)) if found is not None]
    own = [embedded(value) if isinstance(value, str) else value for value in own]
    sources = [value for value in own if isinstance(value, dict)]
    entries: dict[str, str] = {}
    for source in (*sources, row.values, partitions):
        for key, value in source.items():
            if len(entries) == METADATA_ENTRIES:
                return entries
            if not isinstance(key, str) or len(key) > METADATA_KEY_CHARS or isinstance(value, bytes):
                continue
            if source is row.values and any(path.split(".")[0] == key or path == key for path in used):
                continue
            text = str(value).lower() if isinstance(value, bool) else plain_text(value)
            if text is not None and len(text) <= LABEL_CHARS:
                entries.setdefault(_SURROGATES.sub("\ufffd", key), text)
    return entries


def content_id(weak_id: str, texts: Sequence[str]) -> str:
    """An id for one answer to the question that `weak_id` names."""
    return f"{weak_id}#{_digest(*texts)[:8]}"


def place_id(url: str, position: int) -> str:
    """An id for a row that brought none: the same object and position give the same id."""
    return f"{_digest(url)[:10]}-{position}"


def _marked(clean: str, original: str, limit: int) -> str:
    suffix = f"~{_digest(original)[:16]}"
    return clean[: limit - len(suffix)] + suffix


def _decoded(value: Any) -> Any:
    """Bytes as text; where they are none (binary trace ids), as hex digits."""
    if not isinstance(value, bytes):
        return value
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.hex()


def _digest(*texts: str) -> str:
    digest = hashlib.sha256()
    for text in texts:
        data = text.encode("utf-8", "surrogatepass")
        digest.update(b"%d:" % len(data) + data)  # lengths keep ("ab", "c") and ("a", "bc") apart
    return digest.hexdigest()


def _from_epoch(number: float) -> datetime:
    for unit in (1, 1e3, 1e6, 1e9):
        if abs(number) < 1e11 * unit:
            return datetime.fromtimestamp(number / unit, UTC)
    raise ValueError("no time")
