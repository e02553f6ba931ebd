"""What an OUT holds when a run says that it is finished, and how two of them differ."""

import hashlib
import io
import json
import re
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from jobs.storage import Storage

_STEM = re.compile(r"(.+)-[0-9a-f]{12}\.parquet")
_OF_THE_RUN = ("run_id",)
_READERS = 16


@dataclass(frozen=True, slots=True)
class Outcome:
    """Everything in OUT that must not depend on what happened on the way."""

    tables: dict[str, pa.Table]
    """Kind of table -> all its rows in a fixed order, with the stem of their file as the column `file`."""
    files: dict[str, str]
    """Path in OUT -> SHA-256, of Parquet files and the profile."""
    markers: dict[str, dict[str, Any]]
    totals: dict[str, Any]
    leftovers: tuple[str, ...]
    """Files that a finished run has no use for."""


def read_outcome(storage: Storage, out: str) -> Outcome:
    """Read the whole of OUT. A run that is not finished has no totals."""
    urls = [found.url for found in storage.list(out)]
    with ThreadPoolExecutor(_READERS) as readers:
        contents = readers.map(storage.read, urls)
        objects = {url.removeprefix(f"{out}/"): content for url, content in zip(urls, contents, strict=True)}
    kinds: dict[str, list[pa.Table]] = defaultdict(list)
    files, markers, leftovers = {}, {}, []
    for path, content in sorted(objects.items()):
        if path.endswith(".parquet"):
            kind = path.split("/date=")[0]
            table = pq.ParquetFile(io.BytesIO(content)).read()
            kept = [name for name in table.column_names if name not in _OF_THE_RUN]
            stem = _STEM.fullmatch(path.rpartition("/")[2])
            column = pa.array([stem[1] if stem else path] * table.num_rows, pa.string())
            kinds[kind].append(table.select(kept).append_column("file", column))
        elif path.startswith("units/"):
            marker = json.loads(content)
            markers[marker["unit_id"]] = marker
        elif path not in ("run.json", "_SUCCESS", "profile.json") and not path.startswith("report/"):
            leftovers.append(path)
        if path.endswith(".parquet") or path == "profile.json":
            files[path] = hashlib.sha256(content).hexdigest()
    return Outcome(
        tables={kind: _in_order(pa.concat_tables(parts)) for kind, parts in sorted(kinds.items())},
        files=files,
        markers=markers,
        totals=json.loads(objects["_SUCCESS"])["totals"] if "_SUCCESS" in objects else {},
        leftovers=tuple(leftovers),
    )


def contradictions(found: Outcome, n_rows: int, rejects: dict[str, int]) -> list[str]:
    """What cannot be true of a finished run over `n_rows` rows.

    `rejects`: how many of them must be rejected for each reason.
    """
    if not found.totals:
        return ["no _SUCCESS"]
    wrong, totals = [], found.totals
    expected = {"n_read": n_rows, "n_rejected": sum(rejects.values())}
    expected |= {f"n_{reason}": count for reason, count in rejects.items()}
    expected |= {"n_audited": n_rows - expected["n_rejected"]}
    wrong += [
        f"{name} is {totals[name]}, not {count}" for name, count in expected.items() if totals[name] != count
    ]
    read = sum(marker["n_read"] for marker in found.markers.values())
    if read != n_rows:
        wrong.append(f"the markers count {read} rows read, not {n_rows}")
    for kind, keys in (
        ("findings/responses", ["response_id"]),
        ("findings/sentences", ["response_id", "sentence_index"]),
        ("measurements/responses", ["path", "position"]),
        ("measurements/rejects", ["path", "position"]),
    ):
        table = found.tables[kind]
        if kind == "measurements/rejects":  # what the judge adds stands among the responses too
            table = table.filter(pa.compute.invert(pa.compute.starts_with(table["file"], "duplicates")))
        n_distinct = table.group_by(keys).aggregate([]).num_rows
        if n_distinct != table.num_rows:
            wrong.append(f"{kind} holds {table.num_rows - n_distinct} rows twice")
    named = {part["url_suffix"] for marker in found.markers.values() for part in marker["parts"]}
    stored = {path for path in found.files if path.startswith("measurements/")}
    judged = {path for path in stored if path.rpartition("/")[2].startswith("duplicates-")}
    wrong += [f"{path} is no unit's part" for path in sorted(stored - named - judged)]
    wrong += [f"{path} is missing" for path in sorted(named - stored)]
    wrong += [f"{path} is left over" for path in found.leftovers]
    return wrong


def differences(found: Outcome, expected: Outcome) -> list[str]:
    """How `found` differs from `expected`, a line for each table, set of files or total."""
    different = []
    for kind in sorted(found.tables.keys() | expected.tables.keys()):
        here, there = found.tables.get(kind), expected.tables.get(kind)
        if here is None or there is None:
            different.append(f"{kind}: only {'there' if here is None else 'here'}")
        elif not here.equals(there):
            different.append(f"{kind}: {_explain(here, there)}")
    for what in ("files", "totals"):
        mine, theirs = getattr(found, what), getattr(expected, what)
        names = [name for name in sorted(mine.keys() | theirs.keys()) if mine.get(name) != theirs.get(name)]
        if names:
            different.append(f"{what}: {len(names)} differ, the first is {names[0]}")
    if found.markers.keys() != expected.markers.keys():
        different.append(f"markers: {len(found.markers)} units here, {len(expected.markers)} there")
    return different


def _in_order(table: pa.Table) -> pa.Table:
    """The same rows sorted by every column that can be compared, the file first."""
    flat = [field.name for field in table.schema if not pa.types.is_nested(field.type)]
    keys = ["file", *(name for name in flat if name != "file")]
    return table.combine_chunks().sort_by([(name, "ascending") for name in keys])


def _explain(here: pa.Table, there: pa.Table) -> str:
    if here.num_rows != there.num_rows:
        return f"{here.num_rows} rows here, {there.num_rows} there"
    if here.schema != there.schema:
        return "another schema"
    for name in here.column_names:
        mine, theirs = here[name].to_pylist(), there[name].to_pylist()
        for index, pair in enumerate(zip(mine, theirs, strict=True)):
            if pair[0] != pair[1] and pair[0] == pair[0]:
                return f"row {index} has {name} {str(pair[0])[:60]!r} here and {str(pair[1])[:60]!r} there"
    return "equal but for NaN"
