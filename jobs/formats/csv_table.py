"""CSV and its cousins: comma, semicolon, tab or bar; a header line; one row a record."""

import csv
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from jobs.config import ReadConfig
from jobs.formats.json_text import BOM
from jobs.formats.jsonl import Line, split_lines, too_long
from jobs.formats.outcome import Malformed
from jobs.formats.source import BROKEN, decoded, one_line, open_source
from jobs.storage import Storage

if TYPE_CHECKING:
    from jobs.listing import WorkUnit

DELIMITERS = ",;\t|"


def read_rows(
    unit: "WorkUnit", storage: Storage, read: ReadConfig
) -> Iterator[tuple[int, dict[str, Any] | Malformed]]:
    """The rows below the header, numbered from 0; cells are strings. Streamed, one unit per file."""
    # Global to the process. `_Lines` holds rows to the same size, so csv itself never breaks one off.
    csv.field_size_limit(read.max_record_bytes)
    with open_source(storage, unit.url) as source:
        position = 0
        try:
            lines = split_lines(decoded(source), 0, None, read.max_record_bytes)
            first = next((line for line in lines if not _is_blank(line)), None)
            if first is None:
                yield 0, Malformed("the file is empty")
                return
            if first[1] is None:
                yield 0, too_long(first[2], read)
                return
            feed = _Lines(first, lines, read)
            table = csv.reader(feed, delimiter=_delimiter(first[1]), strict=True)
            header = [name.strip() for name in next(table)]
            while True:
                feed.row_bytes = 0
                try:
                    cells = next(table)
                except StopIteration:
                    return
                except _RowTooLong as error:
                    yield position, error.malformed
                except csv.Error as error:
                    yield position, Malformed(f"not CSV: {one_line(error)}")
                else:
                    if not cells:
                        continue
                    yield position, _row(header, cells)
                position += 1
        except (csv.Error, _RowTooLong) as error:
            yield position, Malformed(f"the header line is not CSV: {one_line(error)}")
        except BROKEN as error:
            if source.failed:
                raise
            yield position, Malformed(f"the compressed stream breaks off here ({one_line(error)})")


def _row(header: list[str], cells: list[str]) -> dict[str, Any] | Malformed:
    if len(cells) != len(header):
        return Malformed(f"{len(cells)} cells, the header names {len(header)}")
    if not all(_is_utf8(cell) for cell in cells):
        return Malformed("not UTF-8")
    row: dict[str, Any] = {}
    for name, cell in zip(header, cells, strict=True):
        if name:
            row.setdefault(name, cell)
    return row


def _is_utf8(text: str) -> bool:
    # Undecodable bytes were let through as lone surrogates, so that one bad cell costs one row.
    return text.isascii() or not any("\udc80" <= character <= "\udcff" for character in text)


def _is_blank(line: Line) -> bool:
    return line[1] is not None and not line[1].removeprefix(BOM).strip()


def _delimiter(header: bytes) -> str:
    text = header.decode(errors="replace")
    counts = {delimiter: len(next(csv.reader([text], delimiter=delimiter))) for delimiter in DELIMITERS}
    return max(DELIMITERS, key=lambda delimiter: counts[delimiter])


class _RowTooLong(Exception):  # noqa: N818 - travels through csv.reader to the row it ends
    def __init__(self, malformed: Malformed) -> None:
        super().__init__(malformed.detail)
        self.malformed = malformed


class _Lines:
    """Feeds csv.reader and bounds its rows, which quotes can stretch over any number of lines.

    `row_bytes` is set to 0 before each row. Not a generator: it must survive the exceptions that pass it.
    """

    def __init__(self, first: Line, rest: Iterator[Line], read: ReadConfig) -> None:
        self.row_bytes = 0
        self._first: Line | None = first
        self._rest = rest
        self._read = read

    def __iter__(self) -> "_Lines":
        return self

    def __next__(self) -> str:
        line, self._first = self._first or next(self._rest), None
        inside_quotes = self.row_bytes > 0  # or csv.reader would have been content with the lines so far
        self.row_bytes += line[2] + 1
        if self.row_bytes > self._read.max_record_bytes + 1:
            if inside_quotes:
                self._skip_past_closing_quote(line)
            raise _RowTooLong(too_long(self.row_bytes, self._read))
        assert line[1] is not None  # split_lines holds every line up to the limit
        return line[1].removeprefix(BOM).decode("utf-8", "surrogateescape") + "\n"

    def _skip_past_closing_quote(self, line: Line) -> None:
        while line[1] is None or line[1].count(b'"') % 2 == 0:
            try:
                line = next(self._rest)
            except StopIteration:
                return
            self.row_bytes += line[2] + 1
