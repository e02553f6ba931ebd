"""JSON documents: a list of rows, one row, or an object that holds a list of rows."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from jobs.config import ReadConfig
from jobs.formats.aliases import holds_answer
from jobs.formats.json_text import BOM, loads
from jobs.formats.outcome import Malformed
from jobs.formats.source import BLOCK_BYTES, BROKEN, Read, decoded, one_line, open_source
from jobs.storage import Storage

if TYPE_CHECKING:
    from jobs.listing import WorkUnit

CONTAINERS = (
    "results",
    "testCases",
    "test_cases",
    "data",
    "records",
    "rows",
    "samples",
    "examples",
    "traces",
    "runs",
)
"""Keys under which tools keep their list of rows (RAGChecker: results, DeepEval: testCases)."""


def read_rows(
    unit: "WorkUnit", storage: Storage, read: ReadConfig
) -> Iterator[tuple[int, dict[str, Any] | Malformed]]:
    """The rows of one document, numbered from 0. Read whole, up to read.max_file_bytes."""
    with open_source(storage, unit.url) as source:
        try:
            document = _parse(decoded(source), read.max_file_bytes)
        except BROKEN as error:
            if source.failed:
                raise
            document = Malformed(f"the compressed document breaks off ({one_line(error)})")
    if isinstance(document, Malformed):
        yield 0, document
        return
    for position, row in enumerate(rows_of(document)):
        yield position, row if isinstance(row, dict) else Malformed("the item is not a JSON object")


def _parse(pull: Read, limit: int) -> Any:
    blocks: list[bytes] = []
    size = 0
    while size <= limit and (block := pull(BLOCK_BYTES)):
        blocks.append(block)
        size += len(block)
    if size > limit:
        return Malformed(f"over read.max_file_bytes = {limit}, JSON is read whole; write JSON lines")
    data = b"".join(blocks)
    if not data.removeprefix(BOM).strip():
        return Malformed("the file is empty")
    try:
        return loads(data)
    except ValueError as error:
        return Malformed(f"{error}; if there is one object a line, use --set read.format=jsonl")


def rows_of(document: Any) -> list[Any]:
    """The rows of a document: its items, those of the list that it holds, or itself."""
    if isinstance(document, list):
        return document
    if isinstance(document, dict) and not holds_answer(document):
        for key in CONTAINERS:
            rows = document.get(key)
            if isinstance(rows, list) and (not rows or any(isinstance(row, dict) for row in rows)):
                return rows
    return [document]
