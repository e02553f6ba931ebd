"""Parquet: one slice of one row group at a time, only the columns that are read."""

from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from jobs.config import ReadConfig
from jobs.formats.aliases import may_matter
from jobs.formats.jsonl import too_long
from jobs.formats.outcome import Malformed
from jobs.formats.paths import Path, snake
from jobs.formats.source import BROKEN, Source, one_line, open_source
from jobs.storage import Storage

if TYPE_CHECKING:
    from jobs.listing import WorkUnit

COLUMN_BYTES = 1 << 20
"""Read of one column at a time: its pages one after the other instead of the whole column chunk."""
FETCH_AHEAD_BYTES = 64 << 10
"""Little: the next read is another column's, somewhere else in the file."""
BATCH_ROWS = 64
BATCH_BYTES = 256 << 20
"""What decoding one batch may take. One dictionary entry can be as large as its whole column and stand in
every row, so a batch has as many rows as fit under this if each were as large as the row group.
"""
MAX_ROWS_PER_BYTE = 12
"""Of a file with more than FREE_ROWS: empty rows and equal ones take no room, and memory for each of them."""
FREE_ROWS = 250_000


def read_row_groups(storage: Storage, url: str) -> list[int] | None:
    """Rows in each row group, from the footer; None where there is no readable footer."""
    with open_source(storage, url, FETCH_AHEAD_BYTES) as source:
        try:
            with closing(_open(source)) as file:
                return [file.metadata.row_group(g).num_rows for g in range(file.metadata.num_row_groups)]
        except BROKEN:
            if source.failed:
                raise
            return None


def read_schema(storage: Storage, url: str) -> pa.Schema | None:
    """The columns, from the footer; None where there is no readable footer."""
    with open_source(storage, url, FETCH_AHEAD_BYTES) as source:
        try:
            with closing(_open(source)) as file:
                return file.schema_arrow
        except BROKEN:
            if source.failed:
                raise
            return None


def read_rows(
    unit: "WorkUnit",
    storage: Storage,
    read: ReadConfig,
    fields: Mapping[str, Path],
    more: frozenset[str] = frozenset(),
) -> Iterator[tuple[int, dict[str, Any] | Malformed]]:
    """Rows [unit.start, unit.stop) of the unit's row group, by row number in the file.

    `more`: first names of columns that are read beside those that may hold a field.

    Where a page cannot be decoded, the unit that owns the first lost row yields one reject and the units
    behind it nothing, so that a break counts once however the group is cut. Raises what the store raises.
    """
    with open_source(storage, unit.url, FETCH_AHEAD_BYTES) as source:
        try:
            file = _open(source)
        except BROKEN as error:
            if source.failed:
                raise
            yield 0, Malformed(f"the Parquet footer cannot be read, so no row can ({one_line(error)})")
            return
        with closing(file):
            n_groups, n_bytes = file.metadata.num_row_groups, source.seek(0, 2)
            n_rows = sum(file.metadata.row_group(group).num_rows for group in range(n_groups))
            if n_rows > max(FREE_ROWS, MAX_ROWS_PER_BYTE * n_bytes):
                if unit.row_group in (None, 0) and unit.start == 0:
                    yield 0, Malformed(f"{n_rows} rows in {n_bytes} bytes: it was made to fill a memory")
                return
            groups = range(n_groups) if unit.row_group is None else (unit.row_group,)
            for group in groups:
                if group >= n_groups:
                    yield 0, Malformed(f"row group {group} is gone: the file changed after it was listed")
                    return
                stop = file.metadata.row_group(group).num_rows if unit.row_group is None else unit.stop
                yield from _slice(file, source, group, unit.start, stop, read, fields, more)


def _open(source: Source) -> pq.ParquetFile:
    return pq.ParquetFile(source, pre_buffer=False, buffer_size=COLUMN_BYTES)


def _slice(
    file: pq.ParquetFile,
    source: Source,
    group: int,
    start: int,
    stop: int,
    read: ReadConfig,
    fields: Mapping[str, Path],
    more: frozenset[str],
) -> Iterator[tuple[int, dict[str, Any] | Malformed]]:
    metadata = file.metadata
    offset = sum(metadata.row_group(g).num_rows for g in range(group))
    n_rows = metadata.row_group(group).num_rows
    try:
        names = file.schema_arrow.names
        wanted = (name for name in names if may_matter(name, fields) or snake(name.split(".")[0]) in more)
        columns = list(wanted) or names[:1]
    except BROKEN as error:  # a footer can be read in parts only: here the names of columns were damaged
        lost = f"row group {group}: its columns cannot be told, its {n_rows} rows are lost"
        yield from [(offset, Malformed(f"{lost} ({one_line(error)})"))] if start == 0 else []
        return
    # As the footer states it, of all columns together. That of one column cannot be asked for: where its
    # metadata is damaged Arrow ends the process (pyarrow 26 hands no exception on from there), while reading
    # such a column fails in good order.
    width = metadata.row_group(group).total_byte_size
    if n_rows > 0 and width > n_rows * read.max_record_bytes:
        too_wide = Malformed(
            f"row group {group}: its {n_rows} rows have {width // n_rows} bytes each in all columns, over "
            f"read.max_record_bytes = {read.max_record_bytes}; raise it to read them"
        )
        yield from [(offset, too_wide)] if start == 0 else []
        return
    at = 0
    try:
        batches = file.iter_batches(
            batch_size=max(1, min(BATCH_ROWS, BATCH_BYTES // max(width, 1))),
            row_groups=[group],
            columns=columns,
            use_threads=False,
        )
        for batch in batches:
            for i in range(max(start - at, 0), min(len(batch), stop - at)):
                yield offset + at + i, _row(batch.slice(i, 1), read)
            at += len(batch)
            if at >= stop:
                return
    except BROKEN as error:
        if source.failed:
            raise
        if at < start:
            return
        lost = f"row group {group} breaks off here, its last {n_rows - at} rows are lost"
        yield offset + at, Malformed(f"{lost} ({one_line(error)})")


def _row(row: pa.RecordBatch, read: ReadConfig) -> dict[str, Any] | Malformed:
    if row.nbytes > read.max_record_bytes:
        return too_long(row.nbytes, read)
    try:
        return _in_microseconds(row).to_pylist(maps_as_pydicts="lossy")[0]
    except (ValueError, OverflowError, KeyError, pa.ArrowException) as error:
        # Also UnicodeDecodeError. The message may quote the text, hence only its kind.
        return Malformed(f"a value cannot be read ({type(error).__name__})")


def _in_microseconds(row: pa.RecordBatch) -> pa.RecordBatch:
    # Python's datetime has no nanoseconds, and a zone name may be unknown here.
    for i, field in enumerate(row.schema):
        if pa.types.is_timestamp(field.type):
            row = row.set_column(i, field.name, row.column(i).cast(pa.timestamp("us", tz="UTC"), safe=False))
    return row
