"""Ends this process when it hangs, so that whoever waits for it sees a death and not silence."""

import faulthandler
import time
from typing import IO

_ARM_SECONDS = 1.0  # arming starts a thread: not for every row of a fast scorer


class Watchdog:
    """Ends the process `seconds` after the last sign of life, with the traceback of every thread in `log`.

    A thread of the interpreter's own (faulthandler) and not one in Python: code that hangs inside a kernel or
    a driver may hold the interpreter's lock for ever.
    """

    def __init__(self, seconds: float, log: IO[str]) -> None:
        self._seconds, self._log = seconds, log
        self._armed = float("-inf")

    def alive(self) -> None:
        """A sign of life: the time begins anew."""
        now = time.monotonic()
        if now - self._armed > min(_ARM_SECONDS, self._seconds / 10):
            self._armed = now
            faulthandler.dump_traceback_later(self._seconds, file=self._log, exit=True)

    def rest(self) -> None:
        """Nothing is going on that could hang, until the next sign of life."""
        self._armed = float("-inf")
        faulthandler.cancel_dump_traceback_later()
