"""A night of logs in a bucket, some of its rows bad, of which is known what an audit must find."""

import gzip
import io
import json
from collections import Counter
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq

from jobs.storage import Storage, join
from tests.runs import row

_BROKEN = '{"response_id": "half'
_BAD = {
    7: ("missing_answer", {"answer": None}),
    23: ("no_passages", {"passages": []}),
    41: ("malformed_row", {}),  # _BROKEN takes the place of the row
    59: ("duplicate", {"response_id": "r0"}),
    83: ("passage_text_missing", {"passages": [{"id": "p", "text": None}]}),
}
"""Of a hundred rows, the reason why it is a reject and what makes it one."""
_DAYS = 3


@dataclass(frozen=True, slots=True)
class Night:
    """Where the logs are and what is in them."""

    url: str
    n_rows: int
    rejects: dict[str, int]
    """Rows by the reason for which they must be rejected; all others must be audited."""
    file_bytes: int
    """Of a plain file."""


def write_night(storage: Storage, url: str, n_files: int, n_rows: int) -> Night:
    """Write `n_rows` rows in `n_files` files below `url`: a file is a day's, plain, gzip or Parquet."""
    rejects: Counter[str] = Counter()
    largest = 0
    for index in range(n_files):
        as_parquet = index % 10 == 8
        day = f"2026-10-0{index % _DAYS + 1}T02:00:00+00:00"
        reasons, rows = [], []
        for number in range(index * n_rows // n_files, (index + 1) * n_rows // n_files):
            reason, changes = _BAD.get(number % 100, (None, {}))
            broken = reason == "malformed_row"
            reasons += [reason] if reason and not (broken and as_parquet) else []
            rows.append(_BROKEN if broken and not as_parquet else row(number, timestamp=day, **changes))
        rejects.update(reasons)
        name = join(url, f"part-{index:05d}")
        if as_parquet:
            sink = io.BytesIO()
            pq.write_table(pa.Table.from_pylist(rows), sink, row_group_size=max(1, len(rows) // 2))
            storage.write(f"{name}.parquet", sink.getvalue())
            continue
        lines = "".join((one if one == _BROKEN else json.dumps(one)) + "\n" for one in rows)
        if index % 10 == 4:
            storage.write(f"{name}.jsonl.gz", gzip.compress(lines.encode(), mtime=0))
        else:
            storage.write(f"{name}.jsonl", lines.encode())
            largest = max(largest, len(lines))
    return Night(url, n_rows, dict(rejects), largest)
