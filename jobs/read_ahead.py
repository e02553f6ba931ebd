"""Reading ahead: rows are fetched and parsed in a thread while the device works on the one before."""

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextvars import copy_context
from typing import Any, TypeVar

from jobs.formats.outcome import Accepted

Item = TypeVar("Item")

MAX_ROWS = 64
"""Enough for the device while the next of many small files is opened."""
MAX_BYTES = 64 << 20


def text_bytes(row: Any) -> int:
    """About what a row of `read_unit` holds in memory: its texts, at a byte per character, and 1 KiB."""
    if not isinstance(row, Accepted):
        return 1024
    texts = (row.record.question, row.record.answer, *(passage.text for passage in row.record.passages))
    return 1024 + sum(map(len, texts))


def read_ahead(
    rows: Iterable[Item],
    weigh: Callable[[Item], int] = text_bytes,
    max_rows: int = MAX_ROWS,
    max_bytes: int = MAX_BYTES,
) -> Generator[Item, None, None]:
    """The same rows in the same order, at most `max_rows` and, by `weigh`, `max_bytes` of them ahead.

    A row heavier than that is held alone. One more may be ready in the thread. What `rows` raises comes after
    the rows before it. The thread starts with the first row that is asked for, and has ended, with `rows`
    closed, when this generator has: close it (contextlib.closing) where the loop may be left early.
    """
    ahead = _Ahead(max_rows, max_bytes)
    # In this context, so that what is logged there still says which unit it is about.
    work = copy_context().run
    thread = threading.Thread(target=work, args=(ahead.fill, rows, weigh), name="read-ahead", daemon=True)
    thread.start()
    try:
        while (entry := ahead.take()) is not None:
            yield entry[0]
    finally:
        ahead.stop()
        thread.join()
    if ahead.failure is not None:
        raise ahead.failure


def batches(
    rows: Iterable[Item],
    max_rows: int,
    weigh: Callable[[Item], int] = text_bytes,
    max_bytes: int = MAX_BYTES,
) -> Iterator[list[Item]]:
    """The same rows in lists of at most `max_rows` and, by `weigh`, `max_bytes`; one heavier is alone.

    The lists are a pure function of the rows.
    """
    batch: list[Item] = []
    n_bytes = 0
    for row in rows:
        weight = weigh(row)
        if batch and n_bytes + weight > max_bytes:
            yield batch
            batch, n_bytes = [], 0
        batch.append(row)
        n_bytes += weight
        if len(batch) == max_rows:
            yield batch
            batch, n_bytes = [], 0
    if batch:
        yield batch


class _Ahead:
    """Rows between the two threads, with their weights."""

    def __init__(self, max_rows: int, max_bytes: int) -> None:
        self.failure: BaseException | None = None
        self._max_rows, self._max_bytes = max_rows, max_bytes
        self._rows: deque[tuple[Any, int]] = deque()
        self._n_bytes = 0
        self._filled = self._stopped = False
        self._changed = threading.Condition()

    def fill(self, rows: Iterable[Any], weigh: Callable[[Any], int]) -> None:
        """The reading thread: until `rows` ends or raises, or the consumer stops."""
        source = iter(rows)
        try:
            while not self._stopped:
                row = next(source)
                self._put(row, weigh(row))
        except StopIteration:
            pass
        except BaseException as error:  # it is raised again where the rows are asked for
            self.failure = error
        finally:
            if isinstance(source, Generator):
                source.close()
            with self._changed:
                self._filled = True
                self._changed.notify_all()

    def take(self) -> tuple[Any, int] | None:
        """The next row, None behind the last."""
        with self._changed:
            self._changed.wait_for(lambda: self._rows or self._filled)
            if not self._rows:
                return None
            entry = self._rows.popleft()
            self._n_bytes -= entry[1]
            self._changed.notify_all()
            return entry

    def stop(self) -> None:
        """No row is wanted any more."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def _put(self, row: Any, weight: int) -> None:
        def has_room() -> bool:
            fits = len(self._rows) < self._max_rows and self._n_bytes + weight <= self._max_bytes
            return self._stopped or not self._rows or fits

        with self._changed:
            self._changed.wait_for(has_room)
            self._rows.append((row, weight))
            self._n_bytes += weight
            self._changed.notify_all()
