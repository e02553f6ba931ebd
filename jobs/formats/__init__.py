"""Log files to records: every raw row becomes exactly one Accepted or one Reject.

In a file of spans a row is a trace (`jobs.formats.spans`), else a line, item or table row.
"""

import logging
from collections import Counter
from collections.abc import Iterator
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

from detector.errors import RecordRejected, RejectReason
from jobs.config import Config
from jobs.formats import csv_table, json_document, jsonl, parquet
from jobs.formats.aliases import check_fields, fold
from jobs.formats.aliases import resolved_mapping as _resolved_mapping
from jobs.formats.kind import as_found
from jobs.formats.labels import Labels, place_id, read_labels, record_date
from jobs.formats.outcome import Accepted, Incomplete, Malformed, Reject
from jobs.formats.paths import Row
from jobs.formats.spans import read_traces, too_large
from jobs.formats.systems import SYSTEMS
from jobs.storage import Storage, mask

if TYPE_CHECKING:
    from jobs.listing import WorkUnit

__all__ = [
    "SYSTEMS",
    "Accepted",
    "Incomplete",
    "Malformed",
    "Reject",
    "read_rows",
    "read_unit",
    "record_date",
    "resolved_mapping",
]

log = logging.getLogger(__name__)


def read_unit(
    unit: "WorkUnit", storage: Storage, config: Config, counts: Counter[str] | None = None
) -> Iterator[Accepted | Reject]:
    """The unit's rows in order, file by file, each as a record or as a reject with its reason.

    Of a file of spans it adds to `counts` what `read_traces` says.

    Content never raises: where a file breaks off, the rows before it come first and then one reject. Raises
    OSError (and what else the store raises) when bytes cannot be had; reading again from the start is safe.
    """
    fields = check_fields(config.fields)
    for url, position, values in _read_files(unit, storage, config, counts):
        path = mask(url)
        row = Row(values if isinstance(values, dict) else getattr(values, "values", {}))
        labels = read_labels(row, unit.partitions, fields)
        if isinstance(values, Malformed):
            yield _reject(RejectReason.MALFORMED_ROW, values.detail, path, position, labels)
            continue
        if isinstance(values, Incomplete):
            yield _reject(values.reason, values.detail, path, position, labels)
            continue
        try:
            record = fold(
                row,
                labels,
                unit.partitions,
                fields,
                allow_missing_question=config.read.allow_missing_question,
                own_id=place_id(url, position),
            )
        except RecordRejected as rejected:
            yield _reject(rejected.reason, rejected.detail, path, position, labels)
        else:
            yield Accepted(record, path, position)


def read_rows(
    unit: "WorkUnit", storage: Storage, config: Config, counts: Counter[str] | None = None
) -> Iterator[tuple[int, dict[str, Any] | Malformed | Incomplete]]:
    """The unit's raw rows with their positions, before any name is looked up; traces in our names."""
    return ((position, values) for _, position, values in _read_files(unit, storage, config, counts))


def _read_files(
    unit: "WorkUnit", storage: Storage, config: Config, counts: Counter[str] | None
) -> Iterator[tuple[str, int, dict[str, Any] | Malformed | Incomplete]]:
    """`read_rows` with the URL that each row is from."""

    def read_file(file: "WorkUnit") -> Iterator[tuple[str, int, dict[str, Any] | Malformed | Incomplete]]:
        file = as_found(file, storage, config.read)
        rows = _raw_rows(file, storage, config)
        if file.system is not None:
            rows = _folded(file, rows, config, Counter() if counts is None else counts)
        for position, values in rows:
            yield file.url, position, values

    return islice(chain.from_iterable(map(read_file, unit.files())), unit.max_rows)


def _folded(
    unit: "WorkUnit",
    rows: Iterator[tuple[int, dict[str, Any] | Malformed]],
    config: Config,
    counts: Counter[str],
) -> Iterator[tuple[int, dict[str, Any] | Malformed | Incomplete]]:
    assert unit.system is not None
    if unit.stop - unit.start > config.read.max_file_bytes:
        yield 0, too_large(config.read)
        return
    own: Counter[str] = Counter()
    traces = read_traces(rows, SYSTEMS[unit.system], check_fields(config.fields), config.read, own)
    first = next(traces, None)  # the whole file is read by then
    counts.update(own)
    if own["other_spans"] or own["repeated_spans"]:
        log.info(
            "%s: %d spans, %d of them repeated, %d in %d traces without retrieval or answer (no rows)",
            *(mask(unit.url), own["spans"], own["repeated_spans"], own["other_spans"], own["other_traces"]),
        )
    if first is not None:
        yield first
        yield from traces


def _raw_rows(
    unit: "WorkUnit", storage: Storage, config: Config
) -> Iterator[tuple[int, dict[str, Any] | Malformed]]:
    match unit.format:
        case "parquet":
            more = frozenset() if unit.system is None else SYSTEMS[unit.system].columns
            rows = parquet.read_rows(unit, storage, config.read, check_fields(config.fields), more)
        case "csv":
            rows = csv_table.read_rows(unit, storage, config.read)
        case "json":
            rows = json_document.read_rows(unit, storage, config.read)
        case _:
            rows = jsonl.read_rows(unit, storage, config.read)
    return rows


def resolved_mapping(rows: list[dict[str, Any]], config: Config) -> dict[str, str]:
    """Our field -> the path in these rows it is read from; fields that were found nowhere are left out."""
    return _resolved_mapping(rows, config.fields)


def _reject(reason: RejectReason, detail: str, path: str, position: int, labels: Labels) -> Reject:
    return Reject(
        reason=reason,
        detail=detail,
        path=path,
        position=position,
        response_id=labels.response_id or labels.weak_id,
        **labels.passed_on(),
    )
