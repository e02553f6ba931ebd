"""What goes wrong in a run, and when: drawn from a seed, counted in requests to the store.

A run's own requests are its clock. They move with the work and not with the machine's speed, so that a fault
meets the same stage of a run here and on a machine that is ten times as fast.
"""

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """What can go wrong. The first five happen to a request, the others to a process."""

    SLOW_DOWN = "503"
    RESET_BEFORE = "reset before"
    RESET_AFTER = "answer lost"
    TRUNCATED = "truncated"
    SLOW = "slow"
    WORKER = "worker killed"
    DRIVER = "driver killed"
    NODE = "node lost"

    @property
    def is_of_storage(self) -> bool:
        """Whether it happens to a request."""
        return self not in (Kind.WORKER, Kind.DRIVER, Kind.NODE)


_WEIGHTS = {
    Kind.SLOW_DOWN: 8,
    Kind.RESET_BEFORE: 6,
    Kind.RESET_AFTER: 8,
    Kind.TRUNCATED: 6,
    Kind.SLOW: 5,
    Kind.WORKER: 4,
    Kind.DRIVER: 2,
    Kind.NODE: 1,
}
_TIMES = (1, 1, 1, 2, 6)  # botocore asks 5 times by itself: the last of these gets through to who called it
_SLOW_SECONDS = (1.0, 4.0, 17.0)  # s3fs waits 15 s for an answer
_LAST_MOMENT = 0.85  # faults cost requests of their own, and a fault after the last request is none
_LAST_WORKER = 0.35  # there are none while a run is judged and reported, which is the larger part of requests


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong."""

    kind: Kind
    at: int
    """It is due at the run's request of this number, and meets the first one from there on that it can."""
    times: int = 1
    """How often the same request meets it when it is tried again."""
    seconds: float = 0.0
    """How long a slow answer takes."""


def draw(seed: int, n_faults: int, n_requests: int) -> list[Fault]:
    """`n_faults` faults for a run that makes `n_requests` when nobody disturbs it, in order of their moments.

    One of each kind, as far as that goes, and then by weight: storage fails more often than machines do.
    """
    dice = random.Random(seed)
    kinds = list(Kind)
    dice.shuffle(kinds)
    kinds += dice.choices(list(_WEIGHTS), list(_WEIGHTS.values()), k=n_faults)
    faults = []
    for kind in kinds[:n_faults]:
        share = _LAST_WORKER if kind in (Kind.WORKER, Kind.NODE) else _LAST_MOMENT
        at = dice.randrange(max(1, int(share * n_requests)))
        times, seconds = dice.choice(_TIMES), dice.choice(_SLOW_SECONDS)
        if kind == Kind.SLOW:
            faults.append(Fault(kind, at, seconds=seconds))
        else:
            faults.append(Fault(kind, at, times if kind.is_of_storage else 1))
    return sorted(faults, key=lambda fault: fault.at)


class Plan:
    """The faults of one run that have not happened yet, and how many of each kind have.

    Requests are met in the proxy's thread, processes are ended in another: each has a list of its own.
    """

    def __init__(self, faults: Iterable[Fault] = ()) -> None:
        ordered = sorted(faults, key=lambda fault: fault.at)
        self._of_storage = [fault for fault in ordered if fault.kind.is_of_storage]
        self._of_processes = [fault for fault in ordered if not fault.kind.is_of_storage]
        self._again: dict[tuple[str, str], list[Fault]] = {}
        self.n_requests = 0
        """The run's requests so far."""
        self.happened: Counter[Kind] = Counter()

    def meet(self, method: str, target: str) -> Fault | None:
        """Count a request, and return the fault that it meets.

        Only a GET can be answered by half: other answers carry no data.
        """
        self.n_requests += 1
        again = self._again.get((method, target))
        if again:
            return again.pop()
        for fault in self._of_storage:
            if fault.at > self.n_requests:
                break
            if fault.kind != Kind.TRUNCATED or method == "GET":
                self._of_storage.remove(fault)
                self._again[method, target] = [fault] * (fault.times - 1)
                self.happened[fault.kind] += 1
                return fault
        return None

    def due(self) -> list[Fault]:
        """The faults of processes whose moment has come. They stay due until they are `settle`d."""
        return [fault for fault in self._of_processes if fault.at <= self.n_requests]

    def settle(self, fault: Fault) -> None:
        """The process is dead."""
        self._of_processes.remove(fault)
        self.happened[fault.kind] += 1
