"""Write a log, read it the way a worker does, look at what came out."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

from jobs.config import Config, ReadConfig
from jobs.formats import Accepted, Reject, read_unit
from jobs.listing import WorkUnit, cut, freeze
from jobs.storage import Storage

STORAGE = Storage()
GOOD = {"question": "Who?", "passages": ["Ada wrote it."], "answer": "Ada."}


def settings(fields: dict[str, str] | None = None, **read: Any) -> Config:
    """Settings with these read options; unchecked, so that tests can cut very small units."""
    return Config(fields=fields or {}).model_copy(update={"read": ReadConfig().model_copy(update=read)})


def units_of(path: Path | str, config: Config | None = None) -> list[WorkUnit]:
    config = config or settings()
    return list(cut(freeze([str(path)], STORAGE, config.read), STORAGE, config.read))


def read(path: Path | str, config: Config | None = None) -> list[Accepted | Reject]:
    config = config or settings()
    return [row for unit in units_of(path, config) for row in read_unit(unit, STORAGE, config)]


def read_lines(
    folder: Path, *lines: bytes | str | dict[str, Any], **read_options: Any
) -> list[Accepted | Reject]:
    data = b"".join(to_bytes(line) + b"\n" for line in lines)
    (folder / "log.jsonl").write_bytes(data)
    return read(folder / "log.jsonl", settings(**read_options))


def read_row(folder: Path, row: dict[str, Any], **fields: str) -> Accepted | Reject:
    (folder / "log.jsonl").write_bytes(to_bytes(row) + b"\n")
    (only,) = read(folder / "log.jsonl", settings(fields))
    return only


def to_bytes(line: bytes | str | dict[str, Any]) -> bytes:
    if isinstance(line, bytes):
        return line
    return (line if isinstance(line, str) else json.dumps(line)).encode()


def summary(rows: list[Accepted | Reject]) -> dict[str, int]:
    """How often each thing came out: "accepted" and the reject reasons."""
    return dict(Counter("accepted" if isinstance(row, Accepted) else row.reason.value for row in rows))


def answers(rows: list[Accepted | Reject]) -> list[str | None]:
    """The answers in order, None for a reject."""
    return [row.record.answer if isinstance(row, Accepted) else None for row in rows]
