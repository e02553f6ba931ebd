"""Small runs for tests: logs that exercise every path, settings, and what an OUT holds in the end."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from detector.record import Passage, Record
from jobs.config import Config

N_ROWS = 32
"""Rows of `write_logs`: 24 JSON lines (2 broken, 1 a duplicate) and 8 in Parquet (1 without passages)."""
N_REJECTED = 4


def row(number: int, **changes: Any) -> dict[str, Any]:
    """One answer in Leadline's own words, different for every number."""
    return {
        "response_id": f"r{number}",
        "timestamp": f"2026-10-0{number % 3 + 1}T0{number % 9}:00:00+00:00",
        "app": "shop" if number % 2 else "desk",
        "question": f"What is the answer to question {number}?",
        "passages": [
            {"id": f"p{number}a", "text": f"Number {number} was recorded on shelf {number * 7}."},
            {"id": f"p{number}b", "text": f"Shelf {number * 7} stands in hall {number * 3}."},
        ],
        "answer": f"Number {number} is on shelf {number * 7}. It was painted green in {1900 + number}.",
    } | changes


def record(logged: dict[str, Any]) -> Record:
    """What the detector gets to see of `row(...)`."""
    passages = tuple(Passage(**passage) for passage in logged["passages"])
    return Record(question=logged["question"], passages=passages, answer=logged["answer"])


def write_rows(path: Path, rows: list[dict[str, Any] | str]) -> str:
    """Write one JSON line per row, a string as it is. Returns the path."""
    path.write_text("".join((one if isinstance(one, str) else json.dumps(one)) + "\n" for one in rows))
    return str(path)


def write_logs(folder: Path) -> Path:
    """Two JSONL files and a Parquet file: N_ROWS rows, N_REJECTED of them rejects."""
    folder.mkdir()
    rows: list[dict[str, Any] | str] = [row(number) for number in range(24)]
    rows[5] = row(5, answer=None)
    rows[20] = row(20, response_id="r1")
    rows[9] = json.dumps(rows[9])[:50]
    write_rows(folder / "a.jsonl", rows[:14])
    write_rows(folder / "b.jsonl", rows[14:])
    more = [row(number) for number in range(100, 108)]
    more[3]["passages"] = []
    pq.write_table(pa.Table.from_pylist(more), folder / "c.parquet", row_group_size=4)
    return folder


def settings(scorer: Path | str, **more: Any) -> Config:
    """Settings that cut `write_logs` into about a dozen units for two workers."""
    tree = {
        "scorer": {"name": str(scorer), "device": "cpu"},
        "read": {"unit_bytes": 1024, "unit_rows": 4},
        "workers": {"count": 2, "device": "cpu"},
    }
    return Config.model_validate(tree | more)


def tables(out: Path) -> dict[str, str]:
    """SHA-256 of every table and of the profile, by path in `out`: equal means row for row."""
    return {
        str(path.relative_to(out)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(out.rglob("*"))
        if path.is_file() and (path.suffix == ".parquet" or path.name == "profile.json")
    }


def markers(out: Path) -> list[Path]:
    """The marker files in `out`."""
    return sorted(Path(out, "units").glob("[!.]*.json"))
