import threading
import time
from contextlib import closing
from contextvars import ContextVar

import pytest

from detector.record import Passage, Record
from jobs.formats import Accepted
from jobs.read_ahead import batches, read_ahead, text_bytes

UNIT = ContextVar("UNIT", default=None)


def weigh(row):
    return 1


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "read-ahead"]


def wait_for(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


class Rows:
    """Numbers from 0, which remember how far they were read and whether they were closed."""

    def __init__(self, n, failure=None):
        self.n_read, self.closed = 0, False
        self._n, self._failure = n, failure

    def read(self):
        try:
            while self.n_read < self._n:
                self.n_read += 1
                yield self.n_read - 1
            if self._failure is not None:
                raise self._failure
        finally:
            self.closed = True


@pytest.mark.parametrize("n", [0, 1, 1000])
def test_rows_come_all_and_in_order(n):
    assert list(read_ahead(Rows(n).read(), weigh, max_rows=3)) == list(range(n))
    assert not threads()


def test_an_error_comes_after_the_rows_before_it():
    error = ConnectionResetError("the store is gone")
    seen = []
    with pytest.raises(ConnectionResetError) as caught:
        seen.extend(read_ahead(Rows(5, error).read(), weigh))
    assert seen == [0, 1, 2, 3, 4] and caught.value is error
    assert not threads()


def test_rows_are_read_while_the_consumer_works():
    rows = Rows(100)
    with closing(read_ahead(rows.read(), weigh, max_rows=10)) as ahead:
        assert next(ahead) == 0
        wait_for(lambda: rows.n_read == 12)  # given, ten ahead, and one in the thread's hand


def test_no_more_rows_are_held_than_allowed():
    rows = Rows(100)
    for row in read_ahead(rows.read(), weigh, max_rows=4):
        time.sleep(0.0005)
        assert rows.n_read <= row + 6


def test_no_more_bytes_are_held_than_allowed():
    rows = Rows(100)
    for row in read_ahead(rows.read(), lambda row: 10, max_bytes=25):
        time.sleep(0.0005)
        assert rows.n_read <= row + 4


def test_a_row_heavier_than_allowed_is_held_alone():
    assert list(read_ahead(Rows(20).read(), lambda row: 10, max_bytes=5)) == list(range(20))


def test_reading_ends_when_the_consumer_stops():
    rows = Rows(1000)
    with closing(read_ahead(rows.read(), weigh, max_rows=2)) as ahead:
        next(ahead)
    assert rows.closed and rows.n_read < 10
    assert not threads()


def test_what_is_read_ahead_keeps_its_context():
    def rows():
        yield UNIT.get()

    token = UNIT.set("000007")
    assert list(read_ahead(rows(), weigh)) == ["000007"]
    UNIT.reset(token)


def test_a_row_weighs_its_texts():
    record = Record(question="q" * 10, passages=(Passage(id="p", text="t" * 100),), answer="a" * 1000)
    assert 1110 <= text_bytes(Accepted(record, "log", 0)) <= 1110 + 1024
    assert text_bytes(None) > 0


@pytest.mark.parametrize(
    ("max_rows", "max_bytes", "expected"),
    [
        (1, 100, [[3], [4], [9], [1], [1], [1]]),
        (2, 100, [[3, 4], [9, 1], [1, 1]]),
        (9, 7, [[3, 4], [9], [1, 1, 1]]),
        (9, 100, [[3, 4, 9, 1, 1, 1]]),
    ],
)
def test_batches_keep_the_order_and_both_bounds(max_rows, max_bytes, expected):
    found = list(batches([3, 4, 9, 1, 1, 1], max_rows, weigh=int, max_bytes=max_bytes))
    assert found == expected


def test_a_batch_that_is_full_does_not_wait_for_the_next_row():
    rows = Rows(9)
    found = batches(rows.read(), 3, weigh, 100)
    assert next(found) == [0, 1, 2] and rows.n_read == 3
