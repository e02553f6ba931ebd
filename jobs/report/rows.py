"""Rows of a run's Parquet parts. Memory is set by the parts in flight and the rows asked for."""

from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from jobs.errors import JobError
from jobs.storage import Storage, join, mask

_THREADS = 8  # reading parts is mostly waiting for the store
_AHEAD = 32  # parts whose rows may wait to be consumed

Stem = str
"""`date=<date>/<unit>`: what the parts of one unit and date share across tables."""


def read_rows(
    storage: Storage,
    out: str,
    table: str,
    columns: Collection[str],
    stems: Collection[Stem] | None = None,
    response_ids: Collection[str] | None = None,
) -> Iterator[tuple[Stem, pa.Table]]:
    """These columns of each part of `out`/`table`, in listing order, with the part's stem.

    Only parts with one of `stems` are opened and only rows of `response_ids` are returned, where given.
    """
    urls = [url for url in _list_parts(storage, out, table) if stems is None or _stem(url) in stems]
    wanted = None if response_ids is None else pa.array(sorted(response_ids), pa.string())
    with ThreadPoolExecutor(_THREADS) as pool:
        for start in range(0, len(urls), _AHEAD):
            ahead = urls[start : start + _AHEAD]
            read = pool.map(lambda url: _read_part(storage, url, list(columns), wanted), ahead)
            yield from zip(map(_stem, ahead), read, strict=True)


def find_methods(storage: Storage, out: str) -> tuple[str, ...]:
    """The methods that findings/sentences holds a score of, in column order; () where there is none."""
    for url in _list_parts(storage, out, "findings/sentences"):
        with storage.open(url) as file:
            names = _open_parquet(url, file).schema_arrow.names
        return tuple(name.removeprefix("score_") for name in names if name.startswith("score_"))
    return ()


def _list_parts(storage: Storage, out: str, table: str) -> list[str]:
    return [part.url for part in storage.list(join(out, table)) if part.url.endswith(".parquet")]


def _stem(url: str) -> Stem:
    return "/".join(url.split("/")[-2:]).rpartition("-")[0]


def _read_part(storage: Storage, url: str, columns: list[str], wanted: pa.Array | None) -> pa.Table:
    with storage.open(url) as file:
        parquet = _open_parquet(url, file)
        if wanted is None:
            return parquet.read(columns=columns)
        # The id column first: a row group without any of the answers on the page need not be decoded.
        found = [parquet.schema_arrow.empty_table().select(columns)]
        for group in range(parquet.num_row_groups):
            ids = parquet.read_row_group(group, columns=["response_id"])["response_id"]
            hit = pc.is_in(ids, value_set=wanted)
            if pc.any(hit).as_py():
                found.append(parquet.read_row_group(group, columns=columns).filter(hit).select(columns))
        return pa.concat_tables(found)


def _open_parquet(url: str, file: object) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(file)
    except pa.ArrowInvalid as error:
        raise JobError(
            f"{mask(url)}: not a whole Parquet file ({str(error).splitlines()[0]}); "
            "delete it and run the same `leadline audit` command again"
        ) from None
