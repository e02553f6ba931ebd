"""Where the time of a unit went."""

import time
from collections import Counter
from collections.abc import Callable


class Stages:
    """Books the seconds of a unit to its stages, and calls `alive` at each."""

    def __init__(self, seconds: Counter[str], alive: Callable[[], None]) -> None:
        self._seconds, self._alive = seconds, alive
        self.begin()

    def begin(self) -> None:
        """What was before counts for nothing."""
        self._lapped = time.perf_counter()
        self._alive()

    def lap(self, stage: str) -> None:
        """Book the time since the last lap to a stage."""
        before, self._lapped = self._lapped, time.perf_counter()
        self._seconds[stage] += self._lapped - before
        self._alive()
