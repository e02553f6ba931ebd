"""Survey: what a run as a whole looks like, before any of it is judged."""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import pyarrow as pa

from detector.calibration import FEATURES, Moments, Scale
from jobs.commit import Marker
from jobs.duplicates import Duplicates, Seen
from jobs.errors import JobError
from jobs.tables import only_records

T = TypeVar("T")
R = TypeVar("R")

THREADS = 8
"""That read units; they mostly wait for storage."""


def in_order(pool: ThreadPoolExecutor, read: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    """What `read` gives for each item, in order, and few of them ahead: what nobody took would pile up."""
    ahead: deque[Future[R]] = deque()
    for item in items:
        ahead.append(pool.submit(read, item))
        if len(ahead) > 2 * THREADS:
            yield ahead.popleft().result()
    while ahead:
        yield ahead.popleft().result()


class Survey:
    """What the first pass over a run learns about it as a whole."""

    def __init__(self) -> None:
        self.duplicates = Duplicates.none()
        """By the number of their unit."""
        self.n_sentences = 0
        self.n_responses = 0
        self._moments: defaultdict[tuple[str, str], Moments] = defaultdict(Moments)

    def add(self, unit_id: str, responses: pa.Table, sentences: pa.Table) -> None:
        """Take in a unit, duplicates included: which are, is not known before the last one."""
        try:
            self._count(responses, sentences, sign=1)
        except ValueError as error:
            raise JobError(
                f"unit {unit_id}: {error}; delete OUT/units/{unit_id}.json and run the audit again"
            ) from None

    def take_out(self, responses: pa.Table, sentences: pa.Table) -> None:
        """Forget rows that were added: the sums are exact, so it is as if they never had been."""
        self._count(responses, sentences, sign=-1)

    def scales(self, grain: str) -> dict[str, Scale]:
        """Mean and sd per feature, over "sentences" or "responses"; only of features that were measured."""
        return {name: self._moments[grain, name].scale() for name in FEATURES if self._moments[grain, name].n}

    def _count(self, responses: pa.Table, sentences: pa.Table, sign: int) -> None:
        self.n_responses += sign * responses.num_rows
        self.n_sentences += sign * sentences.num_rows
        for grain, table in (("responses", responses), ("sentences", sentences)):
            for name in (name for name in FEATURES if name in table.column_names):
                try:
                    found = Moments.of(table[name].drop_null().to_numpy())
                except ValueError:
                    raise ValueError(f"a measured {name} is not finite") from None
                total = self._moments[grain, name]
                self._moments[grain, name] = total + found if sign > 0 else total - found


def take_survey(
    pool: ThreadPoolExecutor,
    read: Callable[[Marker], tuple[pa.Table, pa.Table]],
    units: Sequence[Marker],
) -> Survey:
    """Read all units, and those that hold duplicates once more.

    `read`: the responses of a unit, in the order in which they were read, and its sentences. Raises
    JobError for a number that is not finite.
    """
    survey = Survey()
    with Seen() as seen:
        for number, (responses, sentences) in enumerate(in_order(pool, read, units)):
            seen.add(number, responses)
            survey.add(units[number]["unit_id"], responses, sentences)
        survey.duplicates = seen.find()
    numbers = survey.duplicates.units
    again = in_order(pool, read, (units[number] for number in numbers))
    for number, tables in zip(numbers, again, strict=True):
        later = survey.duplicates.of(number)
        survey.take_out(*(only_records(table, later) for table in tables))
    return survey
