"""Parquet parts: bytes built first, named by their content, put once, checked when read again."""

import hashlib
import re
from collections.abc import Collection
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from jobs.errors import JobError
from jobs.storage import Storage, join, mask

Part = dict[str, Any]
"""Where a part is and what it holds: table, date, url_suffix (below OUT), rows, sha256. Goes into markers."""

_DATE = re.compile(r"\d{4}-\d\d-\d\d", re.ASCII)
_STEM = re.compile(r"[\w.-]+", re.ASCII)


def encode(table: pa.Table) -> bytes:
    """A zstd Parquet file, whole, in memory; the same rows and schema give the same bytes.

    The footer is read back, because a file that is named by its content is never looked at again before it
    is needed. Raises JobError when the row count in it is not the table's.
    """
    sink = pa.BufferOutputStream()
    # How a table was put together shows in its chunks, and chunks would show in the pages.
    pq.write_table(table.combine_chunks(), sink, compression="zstd")
    data = sink.getvalue()
    rows = pq.read_metadata(pa.BufferReader(data)).num_rows
    if rows != table.num_rows:
        raise JobError(f"Parquet file of {table.num_rows} rows reads back as {rows}: nothing was written")
    return data.to_pybytes()


def partition(date: str) -> str:
    """The folder name of a date. Raises JobError for anything but YYYY-MM-DD: it may come from a log."""
    if not _DATE.fullmatch(date):
        raise JobError(f"cannot name a partition after {date!r}: dates are written YYYY-MM-DD")
    return f"date={date}"


def put_table(storage: Storage, out: str, kind_path: str, date: str, stem: str, table: pa.Table) -> Part:
    """Write `OUT/<kind_path>/date=<date>/<stem>-<sha12>.parquet` in one put and return its part entry.

    `kind_path` is e.g. "findings/sentences". No attempt can overwrite another's: other rows, other name.
    Raises JobError for a `date` that is not YYYY-MM-DD, or a `stem` of anything but letters, digits, dot,
    dash and underscore: both become part of a path and may come from logs.
    """
    folder = f"{kind_path}/{partition(date)}"
    if not _STEM.fullmatch(stem):
        raise JobError(f"cannot name a part in {folder} after {stem!r}")
    data = encode(table)
    sha256 = hashlib.sha256(data).hexdigest()
    url_suffix = f"{folder}/{stem}-{sha256[:12]}.parquet"
    storage.write(join(out, url_suffix), data)
    return {
        "table": kind_path.rsplit("/", 1)[-1],
        "date": date,
        "url_suffix": url_suffix,
        "rows": table.num_rows,
        "sha256": sha256,
    }


def read_part(storage: Storage, out: str, part: Part, schema: pa.Schema) -> pa.Table:
    """The rows of a part with the columns of `schema`, which may be fewer than the file holds.

    Raises JobError when the part is gone, when its bytes are not the ones that the marker vouches for, or
    when it does not hold these columns.
    """
    url = join(out, part["url_suffix"])
    cure = "delete the marker of its unit in OUT/units and run the audit again"
    try:
        data = storage.read(url)
    except FileNotFoundError:
        raise JobError(f"{mask(url)}: part is missing; {cure}") from None
    if hashlib.sha256(data).hexdigest() != part["sha256"]:
        raise JobError(f"{mask(url)}: not the bytes that its marker names; {cure}")
    try:
        table = pq.ParquetFile(pa.BufferReader(data)).read(columns=schema.names)
        return table.select(schema.names).cast(schema)
    except (pa.ArrowException, KeyError) as error:
        raise JobError(f"{mask(url)}: not a part of this version ({error}); {cure}") from None


def delete_stale(storage: Storage, out: str, folder: str, pattern: str, keep: Collection[str]) -> None:
    """Delete what an earlier judgement left in `OUT/<folder>`: objects whose URL ends in `pattern` (a regular
    expression over the part below OUT) and whose match is not in `keep`. Other files there are left alone.
    """
    for stored in list(storage.list(join(out, folder))):
        ours = re.search(rf"{pattern}$", stored.url)
        if ours and ours[0] not in keep:
            storage.delete(stored.url)
