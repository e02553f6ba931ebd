"""Which rows of a unit end the process that measures them: found by halving the unit, within bounds."""

from collections import Counter

Rows = tuple[int, int]
"""Sequence numbers of rows in a unit, from the first up to and without the second."""

NO_ROWS: Rows = (0, 0)
"""Asks for the number of rows alone. The first question: who dies of it dies of reading, not of a row."""

MAX_KILLERS = 8
"""Rows of one unit that are set aside. More of them are no bad records but a bad machine or scorer."""

_DEATHS_TO_BLAME = 2  # one may be a lost machine


class HopelessError(Exception):
    """The unit cannot be saved by setting rows aside; the message says why."""


class Bisection:
    """The search in one unit: whoever runs it asks workers for `open` ranges and tells what became of them.

    A range that was survived is innocent, one that was not is halved, and a row is a killer when it killed
    twice alone. With k killers among n rows that is about 2 n measurements and k log2(n) deaths.
    """

    def __init__(self) -> None:
        self.open: set[Rows] = {NO_ROWS}
        """Ranges that are asked for and not answered; the search is over when there are none."""
        self.killers: list[int] = []
        self._n_rows = 0
        self._n_deaths = 0
        self._again: Counter[Rows] = Counter()

    def survive(self, rows: Rows, n_rows: int) -> list[Rows]:
        """What to ask for now that a worker survived `rows` of a unit of `n_rows`."""
        self.open.discard(rows)
        if rows != NO_ROWS:
            return []
        self._n_rows = n_rows
        return self._ask(_halves((0, n_rows)))

    def die(self, rows: Rows) -> list[Rows]:
        """What to ask for now that a worker died of `rows`.

        Raises HopelessError when reading alone kills, when more than MAX_KILLERS rows do, or when workers die
        of ever other rows.
        """
        self.open.discard(rows)
        self._n_deaths += 1
        self._again[rows] += 1
        if not is_single(rows) and rows != NO_ROWS:
            most = (MAX_KILLERS + 1) * (self._n_rows.bit_length() + 2)
            if self._n_deaths > most:
                raise HopelessError(f"its workers died {self._n_deaths} times, each time of other rows")
            return self._ask(_halves(rows))
        if self._again[rows] < _DEATHS_TO_BLAME:
            return self._ask([rows])
        if rows == NO_ROWS:
            raise HopelessError("a worker dies of reading it, before any record is measured")
        self.killers.append(rows[0])
        if len(self.killers) > MAX_KILLERS:
            raise HopelessError(f"more than {MAX_KILLERS} of its rows kill a worker each")
        return []

    def _ask(self, ranges: list[Rows]) -> list[Rows]:
        self.open.update(ranges)
        return ranges


def is_single(rows: Rows) -> bool:
    """Whether it is one row: then the worker must be a fresh one, or what came before might be to blame."""
    return rows[1] - rows[0] == 1


def _halves(rows: Rows) -> list[Rows]:
    first, stop = rows
    middle = (first + stop) // 2
    return [half for half in ((first, middle), (middle, stop)) if half[0] < half[1]]
