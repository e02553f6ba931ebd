"""How far the measuring of a run is: counted from markers, told to whoever watches."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime

from jobs.commit import Marker, Run, write_progress
from jobs.storage import Storage

log = logging.getLogger("leadline")

_TELL_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the measuring is. Counts of rows cover the whole run; the rate is this driver's alone."""

    run_id: str
    at: str
    n_units: int
    n_units_done: int
    n_units_running: int
    n_workers: int
    """Workers whose scorer is loaded or loading."""
    n_read: int
    n_audited: int
    n_rejected: int
    rejects: dict[str, int]
    tokens_per_second: float
    eta_seconds: float | None
    failed: dict[str, str]
    """Unit id -> last error, of the units that were given up."""


class Tally:
    """The counts of a run's committed units, and when they were last told.

    `markers`: of the units that were committed before this driver. `on_progress` is called at every `tell`.
    """

    def __init__(
        self,
        storage: Storage,
        out: str,
        run: Run,
        markers: Iterable[Marker],
        on_progress: Callable[[Progress], None] | None,
    ) -> None:
        self._storage, self._out, self._run = storage, out, run
        self._on_progress = on_progress
        self._rejects: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()
        for marker in markers:
            self.count(marker)
        self._before = self._counts.copy()
        self._started = time.monotonic()
        self._told = float("-inf")

    def count(self, marker: Marker) -> None:
        """Add a committed unit."""
        self._counts["n_units"] += 1
        for name in ("n_read", "n_audited", "n_rejected", "n_tokens"):
            self._counts[name] += marker[name]
        self._rejects.update(marker["rejects"])

    def tell(self, n_running: int, n_workers: int, failed: dict[str, str]) -> None:
        """Call `on_progress`; twice a minute also write progress.json and one line to the log."""
        progress = self._progress(n_running, n_workers, failed)
        if self._on_progress is not None:
            self._on_progress(progress)
        finished = progress.n_units_done + len(progress.failed) == progress.n_units
        if not finished and time.monotonic() - self._told < _TELL_SECONDS:
            return
        self._told = time.monotonic()
        write_progress(self._storage, self._out, asdict(progress))
        eta = progress.eta_seconds
        log.info(
            "%d of %d units, %d rows read, %d rejected, %d of %d workers busy, %.0f tokens/s, %s",
            progress.n_units_done,
            progress.n_units,
            progress.n_read,
            progress.n_rejected,
            progress.n_units_running,
            progress.n_workers,
            progress.tokens_per_second,
            "time left unknown" if eta is None else f"{eta / 60:.0f} min left",
        )

    def _progress(self, n_running: int, n_workers: int, failed: dict[str, str]) -> Progress:
        elapsed = time.monotonic() - self._started
        done, here = self._counts["n_units"], self._counts - self._before
        left = self._run.n_units - done
        return Progress(
            run_id=self._run.run_id,
            at=datetime.now(UTC).isoformat(timespec="seconds"),
            n_units=self._run.n_units,
            n_units_done=done,
            n_units_running=n_running,
            n_workers=n_workers,
            n_read=self._counts["n_read"],
            n_audited=self._counts["n_audited"],
            n_rejected=self._counts["n_rejected"],
            rejects=dict(self._rejects),
            tokens_per_second=round(here["n_tokens"] / elapsed, 1),
            eta_seconds=round(elapsed / here["n_units"] * left, 1) if here["n_units"] else None,
            failed=dict(failed),
        )
