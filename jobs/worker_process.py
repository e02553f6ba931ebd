"""The worker as a process of Ray's: waits before it tries again, counts, logs, and ends with its device."""

import logging
import os
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from jobs.commit import Marker, Run
from jobs.config import Config
from jobs.logs import bound, line_handler, logging_to
from jobs.metrics import Meter
from jobs.poison import Rows
from jobs.watchdog import Watchdog
from jobs.worker import DeviceLost, Worker

log = logging.getLogger("leadline")

_LONGEST_WAIT_SECONDS = 30.0


class WorkerProcess:
    """A Worker as a Ray actor of two threads: one unit is measured, one is read or written meanwhile.

    No restarts and no retries of Ray's: the driver queues what was lost.
    """

    def __init__(self, out: str, config: Config, run: Run, load: Callable[[Config], Any]) -> None:
        self._run_id, self._form = run.run_id, config.log_format
        self._watchdog = Watchdog(config.workers.stall_seconds, sys.__stderr__)
        self._meter = Meter(run.run_id)
        self._n_at_work, self._changing = 0, threading.Lock()
        self._shared = ExitStack()
        with self._at_work():
            self._worker = Worker(out, config, run, load, self._watchdog.alive)

    def ready(self) -> str:
        """The dtype that the scorer computes in; answers once it is loaded."""
        return self._worker.dtype

    def audit_unit(self, unit_json: Any, attempt: int, aside: Collection[int] = ()) -> Marker:
        """`Worker.audit_unit`. A second attempt waits a little: what failed is probably the storage."""
        # Not all at once: workers that the storage refused together would be refused together again.
        time.sleep(min(2.0 ** (attempt - 1) - 1.0, _LONGEST_WAIT_SECONDS) * random.uniform(0.5, 1.0))
        with self._at_work(unit_id=unit_json["unit_id"], attempt=attempt):
            spent: Counter[str] = Counter()
            marker = self._worker.audit_unit(unit_json, attempt, aside, spent)
            self._meter.count(marker, spent)
            log.info(
                "unit %s: %d rows read, %d rejected; %s",
                marker["unit_id"],
                marker["n_read"],
                marker["n_rejected"],
                ", ".join(f"{stage} {seconds:.1f} s" for stage, seconds in spent.items()),
            )
        return marker

    def probe_unit(self, unit_json: Any, rows: Rows) -> int:
        """`Worker.probe_unit`."""
        with self._at_work(unit_id=unit_json["unit_id"]):
            log.info("unit %s: rows %d up to %d, to see whether they kill", unit_json["unit_id"], *rows)
            return self._worker.probe_unit(unit_json, rows)

    @contextmanager
    def _at_work(self, **ids: Any) -> Iterator[None]:
        """Log lines with these ids, a watchdog, and an end to the process that lost its device."""
        with self._handler_and_watchdog(), bound(run_id=self._run_id, **ids):
            try:
                yield
            except DeviceLost:
                # A dead process is replaced and its unit done again; this one would only make rejects.
                log.exception("the accelerator is lost; this process ends")
                os._exit(1)

    @contextmanager
    def _handler_and_watchdog(self) -> Iterator[None]:
        """Those of the process: there while any of its threads is at work."""
        with self._changing:
            if not self._n_at_work:
                self._shared.enter_context(logging_to(line_handler(self._form)))
                self._shared.callback(self._watchdog.rest)
            self._n_at_work += 1
            self._watchdog.alive()
        try:
            yield
        finally:
            with self._changing:
                self._n_at_work -= 1
                if not self._n_at_work:
                    self._shared.close()
