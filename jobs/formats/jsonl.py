"""JSON lines: one row a line, read in blocks, cut anywhere."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from jobs.config import ReadConfig
from jobs.formats.json_text import BOM, loads
from jobs.formats.outcome import Malformed
from jobs.formats.source import BLOCK_BYTES, BROKEN, Read, decoded, one_line, open_source
from jobs.storage import Storage

if TYPE_CHECKING:
    from jobs.listing import WorkUnit

Line = tuple[int, bytes | None, int]
"""Offset, content without the newline (None: longer than allowed), length in bytes."""


def read_rows(
    unit: "WorkUnit", storage: Storage, read: ReadConfig
) -> Iterator[tuple[int, dict[str, Any] | Malformed]]:
    """The rows of the lines that start in [unit.start, unit.stop), by byte offset; blank lines are no rows.

    A compressed object is one unit and read to its end. Raises what the store raises.
    """
    with open_source(storage, unit.url) as source:
        position = unit.start
        try:
            if unit.compression is None:
                lines = slice_lines(source, unit.start, unit.stop, read.max_record_bytes)
            else:
                lines = split_lines(decoded(source), 0, None, read.max_record_bytes)
            for start, line, length in lines:
                position = start + length + 1
                if line is None:
                    yield start, too_long(length, read)
                elif line.removeprefix(BOM).strip():
                    yield start, parse_row(line)
        except BROKEN as error:
            if source.failed:
                raise
            yield position, Malformed(f"the compressed stream breaks off here ({one_line(error)})")
            return
        if position == 0:
            yield 0, Malformed("the file is empty")


def parse_row(line: bytes) -> dict[str, Any] | Malformed:
    """One line to one row."""
    try:
        row = loads(line)
    except ValueError as error:
        return Malformed(str(error))
    if not isinstance(row, dict):
        return Malformed(f"the row is a JSON {_kind(row)}, not an object")
    return row


def too_long(length: int, read: ReadConfig) -> Malformed:
    """What to say about a line or row over the limit."""
    limit = read.max_record_bytes
    return Malformed(f"{length} bytes, over read.max_record_bytes = {limit}; raise it to read this row")


def slice_lines(source: Any, start: int, stop: int, max_bytes: int) -> Iterator[Line]:
    """The lines of a seekable file that start in [start, stop)."""
    if start == 0:
        yield from split_lines(source.read, 0, stop, max_bytes)
        return
    source.seek(start - 1)
    # The byte before `start` tells whether a line starts there. No newline before `stop` means that one
    # long line covers the whole slice; its owner reads it, so reading on would only repeat that work.
    at = start - 1
    while at < stop - 1:
        block = source.read(min(BLOCK_BYTES, stop - 1 - at))
        if not block:
            return
        newline = block.find(b"\n")
        if newline >= 0:
            source.seek(at + newline + 1)
            yield from split_lines(source.read, at + newline + 1, stop, max_bytes)
            return
        at += len(block)


def split_lines(read: Read, offset: int, stop: int | None, max_bytes: int) -> Iterator[Line]:
    r"""Lines of a stream whose next byte has this `offset`, until one would start at `stop` (None: the end).

    Only b"\n" ends a line: U+2028 and a bare carriage return may stand inside JSON strings. A line over
    `max_bytes` is passed over without being held.
    """
    start, length = offset, 0
    held: list[bytes] = []
    while stop is None or start < stop:
        block = read(BLOCK_BYTES)
        if not block:
            break
        begin = 0
        while (end := block.find(b"\n", begin)) >= 0:
            length += end - begin
            if length <= max_bytes:
                held.append(block[begin:end])
                yield start, b"".join(held), length
            else:
                yield start, None, length
            held.clear()
            start, length, begin = start + length + 1, 0, end + 1
            if stop is not None and start >= stop:
                return
        length += len(block) - begin
        if length <= max_bytes:
            held.append(block[begin:])
        else:
            held.clear()
    if length:
        yield start, b"".join(held) if length <= max_bytes else None, length


def _kind(value: Any) -> str:
    names = {list: "list", str: "string", bool: "boolean", int: "number", float: "number"}
    return names.get(type(value), "null")
