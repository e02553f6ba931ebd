"""Which worker measures which unit: the queue between the driver and its workers."""

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from jobs.commit import Marker, Run
from jobs.config import Config
from jobs.errors import JobError
from jobs.fleet import DEPTH, Fleet, TaskError, WorkerLost
from jobs.logs import bound
from jobs.pieces import Hired, Piece
from jobs.poison import NO_ROWS, Bisection, HopelessError, Rows
from jobs.progress import Progress, Tally
from jobs.storage import Storage

log = logging.getLogger("leadline")

_TICK_SECONDS = 1.0
_FAILED_SHOWN = 5
_DEATHS_TO_SEARCH = 2  # one may be a lost machine
_STRAGGLER_SECONDS = 60.0
_STRAGGLER_MEDIANS = 3.0


@dataclass(slots=True)
class _Search:
    """A unit whose workers die, while the rows that kill them are looked for."""

    piece: Piece
    bisection: Bisection
    n_errors: int = 0


class Dispatch:
    """The queue of units and the workers that empty it.

    A worker has one unit and, while there are many, one more that it reads ahead; it gets the next when a
    marker is back. So its device waits for nobody, a worker that is still waiting for its machine holds
    nothing up, and one with nothing left to do is given back to the cluster. Two units of a worker that died
    are blamed for nothing; each is alone with a worker from then on, so that it shows which of them kills.

    A unit that killed two workers is halved until the rows that did it are known (`jobs.poison`); they become
    rejects. At the end, where workers are free, a unit that takes much longer than the others did is given to
    a second worker: the first marker wins.
    """

    def __init__(
        self,
        storage: Storage,
        out: str,
        run: Run,
        config: Config,
        load: Callable[[Config], Any] | None,
        on_progress: Callable[[Progress], None] | None,
        markers: dict[str, Marker],
        fleet: Any = None,
    ) -> None:
        self._run, self._config = run, config
        self._fleet = fleet or Fleet(out, config, run, load)
        self._waiting: deque[Piece] = deque()
        self._workers: list[Hired] = []
        self._searches: dict[str, _Search] = {}
        self._searched: set[str] = set()
        self._doubled: set[str] = set()
        self._deaths: Counter[str] = Counter()
        self._failed: dict[str, str] = {}
        self._dtypes = {marker["dtype"] for marker in markers.values()}
        self._seconds = [marker["seconds"] for marker in markers.values()]
        self._lost_starts = 0
        self._tally = Tally(storage, out, run, markers.values(), on_progress)

    def measure(self, units: Iterable[Any]) -> None:
        """Measure every unit or raise JobError that names those that failed, after all others are done."""
        self._waiting.extend(Piece(unit) for unit in units)
        try:
            self._tell()
            while self._waiting or any(worker.pieces for worker in self._workers):
                self._hire()
                tickets = [ticket for worker in self._workers for ticket in worker.asked]
                for ticket in self._fleet.wait(tickets, _TICK_SECONDS):
                    self._take(ticket)
                self._double_stragglers()
                self._tell()
        finally:
            # Also on Ctrl-C and SIGTERM: what they had begun is measured again, what is committed stays.
            for worker in self._workers:
                self._fleet.kill(worker.handle)
        if self._failed:
            shown = [f"{unit} ({error})" for unit, error in list(self._failed.items())[:_FAILED_SHOWN]]
            more = f" and {len(self._failed) - len(shown)} more" if len(self._failed) > len(shown) else ""
            raise JobError(
                f"{len(self._failed)} of {self._run.n_units} units failed every one of "
                f"{self._config.workers.max_attempts} attempts: {'; '.join(shown)}{more}; "
                "the others are kept, run again to retry these"
            )

    def _tell(self) -> None:
        n_busy = sum(bool(worker.pieces) for worker in self._workers)
        self._tally.tell(n_busy, len(self._workers), self._failed)

    def _hire(self) -> None:
        starting = sum(None in worker.asked.values() for worker in self._workers)
        while len(self._workers) < self._fleet.size and starting < len(self._waiting):
            handle, ticket = self._fleet.start()
            self._workers.append(Hired(handle, {ticket: None}, time.monotonic()))
            starting += 1

    def _end(self, worker: Hired) -> list[Piece]:
        """Let a worker go, dead or alive, and return what it was still asked for."""
        self._fleet.kill(worker.handle)
        self._workers.remove(worker)
        return worker.pieces

    def _take(self, ticket: Any) -> None:
        """Settle one answer and give its worker the next piece."""
        worker = next(worker for worker in self._workers if ticket in worker.asked)
        was_first = ticket is next(iter(worker.asked))
        piece = worker.asked.pop(ticket)
        with bound(**({"unit_id": piece.unit_id, "attempt": piece.attempt} if piece else {})):
            try:
                value = self._fleet.answer(ticket)
            except WorkerLost as lost:
                beside = self._end(worker)
                if piece is None:
                    self._lose_start(lost)
                elif beside:
                    self._part([piece, *beside], lost)
                else:
                    self._lose(piece, lost)
                return
            except TaskError as error:
                self._fail(piece, str(error))
            else:
                self._settle(worker, piece, value)
        if was_first:
            worker.since = time.monotonic()
        if worker in self._workers:  # not where the unit was forgotten, and this one with it
            self._feed(worker, fresh=piece is None)

    def _feed(self, worker: Hired, *, fresh: bool) -> None:
        """Give a worker as much as it may hold; one for which there is nothing is let go."""
        while len(worker.asked) < DEPTH:
            piece = next((each for each in self._waiting if fresh or not each.needs_fresh_worker), None)
            if worker.asked:
                both_share = piece is not None and piece.shares and all(p.shares for p in worker.pieces)
                # Near the end another worker would have the time for it sooner.
                if not both_share or len(self._waiting) <= self._fleet.size:
                    return
            elif piece is None:
                self._end(worker)  # an idle worker would keep its machine alive and paid for
                return
            self._waiting.remove(piece)
            self._ask(worker, piece)

    def _ask(self, worker: Hired, piece: Piece) -> None:
        if piece.probe is None:
            ticket = self._fleet.audit(worker.handle, piece.unit, piece.attempt, piece.aside)
        else:
            ticket = self._fleet.probe(worker.handle, piece.unit, piece.probe)
        if not worker.asked:
            worker.since = time.monotonic()
        worker.asked[ticket] = piece

    def _settle(self, worker: Hired, piece: Piece | None, value: Any) -> None:
        if piece is None:
            self._check_dtype(value)
        elif piece.probe is not None:
            search = self._searches[piece.unit_id]
            self._continue(search, search.bisection.survive(piece.probe, value))
        else:
            self._seconds.append(time.monotonic() - worker.since)
            self._tally.count(value)
            if piece.unit_id in self._doubled:
                self._forget(piece.unit_id)  # the other worker on it has lost the race

    def _check_dtype(self, dtype: str) -> None:
        self._lost_starts = 0
        self._dtypes.add(dtype)
        if len(self._dtypes) > 1:
            raise JobError(
                f"workers of one run compute in {' and in '.join(sorted(self._dtypes))}, which do not mix; "
                "set scorer.dtype, or finish the run on the kind of machine that began it"
            )

    def _lose_start(self, lost: WorkerLost) -> None:
        self._lost_starts += 1
        if self._lost_starts >= self._config.workers.max_attempts * self._fleet.size:
            raise JobError(f"no worker can load the scorer {self._run.scorer['name']}: {lost}") from None

    def _part(self, pieces: list[Piece], lost: WorkerLost) -> None:
        """Put back what a dead worker held together."""
        log.warning("units %s: %s", " and ".join(piece.unit_id for piece in pieces), lost)
        alone = not lost.blameless
        self._put_back([replace(piece, alone=alone or piece.alone) for piece in pieces])

    def _put_back(self, pieces: list[Piece]) -> None:
        for piece in pieces:
            if not self._is_elsewhere(piece.unit_id):
                self._waiting.appendleft(piece)

    def _lose(self, piece: Piece, lost: WorkerLost) -> None:
        """Decide about a piece whose worker died."""
        unit_id = piece.unit_id
        if lost.blameless:
            self._waiting.appendleft(piece)
            log.warning("unit %s: %s; it is given to another worker", unit_id, lost)
        elif piece.probe is not None:
            search = self._searches[unit_id]
            try:
                self._continue(search, search.bisection.die(piece.probe))
            except HopelessError as hopeless:
                self._give_up(unit_id, f"{lost}; {hopeless}")
        else:
            self._deaths[unit_id] += 1
            twice = self._deaths[unit_id] >= _DEATHS_TO_SEARCH
            if twice and unit_id not in self._searched and not self._is_elsewhere(unit_id):
                self._search(piece, lost)
            else:
                self._retry(piece, str(lost))

    def _fail(self, piece: Piece, error: str) -> None:
        """Decide about a piece that a worker answered with an error: storage, most of the time."""
        if piece.probe is None:
            self._retry(piece, error)
            return
        search = self._searches[piece.unit_id]
        search.n_errors += 1
        if search.n_errors < self._config.workers.max_attempts:
            self._waiting.append(piece)
        else:
            self._give_up(piece.unit_id, error)

    def _retry(self, piece: Piece, error: str) -> None:
        if self._is_elsewhere(piece.unit_id):
            return  # that worker's fate decides
        # What is left of a unit when its killers are known is as good as another unit.
        allowed = self._config.workers.max_attempts * (2 if piece.unit_id in self._searched else 1)
        if piece.attempt < allowed:
            self._waiting.append(replace(piece, attempt=piece.attempt + 1))
            log.warning("unit %s, attempt %d: %s", piece.unit_id, piece.attempt, error)
        else:
            self._give_up(piece.unit_id, error)

    def _give_up(self, unit_id: str, error: str) -> None:
        self._forget(unit_id)
        self._failed[unit_id] = error
        log.error("unit %s is given up: %s", unit_id, error)

    def _forget(self, unit_id: str) -> None:
        """Drop everything that is still asked for of a unit, and the workers that are busy with it."""
        self._searches.pop(unit_id, None)
        self._waiting = deque(piece for piece in self._waiting if piece.unit_id != unit_id)
        for worker in list(self._workers):
            if worker.holds(unit_id):
                self._put_back([piece for piece in self._end(worker) if piece.unit_id != unit_id])

    def _search(self, piece: Piece, lost: WorkerLost) -> None:
        log.warning(
            "unit %s killed %d workers (%s); looking for the rows that do it",
            piece.unit_id,
            self._deaths[piece.unit_id],
            lost,
        )
        self._searched.add(piece.unit_id)
        search = self._searches[piece.unit_id] = _Search(piece, Bisection())
        self._continue(search, [NO_ROWS])

    def _continue(self, search: _Search, ranges: list[Rows]) -> None:
        """Ask for these ranges; when none is open any more, for the unit without its killers."""
        piece = search.piece
        # In front of all units: a search is a chain of answers, at the end of a run everybody waited for it.
        self._waiting.extendleft(replace(piece, probe=rows) for rows in reversed(ranges))
        if search.bisection.open:
            return
        del self._searches[piece.unit_id]
        killers = tuple(sorted(search.bisection.killers))
        log.warning("unit %s: %d of its rows kill a worker and are set aside", piece.unit_id, len(killers))
        self._waiting.appendleft(replace(piece, attempt=piece.attempt + 1, aside=killers))

    def _is_elsewhere(self, unit_id: str) -> bool:
        """Whether a unit waits or is with a worker, beside the one that just answered."""
        return any(piece.unit_id == unit_id for piece in self._waiting) or any(
            worker.holds(unit_id) for worker in self._workers
        )

    def _double_stragglers(self) -> None:
        """Queue a second copy of units that take too long, where a worker is to be had for it."""
        free = self._fleet.size - len(self._workers)
        if self._waiting or free <= 0 or not self._seconds:
            return
        limit = max(_STRAGGLER_SECONDS, _STRAGGLER_MEDIANS * median(self._seconds))
        now = time.monotonic()
        copies = Counter(piece.unit_id for worker in self._workers for piece in worker.pieces)
        late = [
            (piece, now - worker.since)
            for worker in self._workers
            for piece in worker.pieces
            if piece.probe is None and now - worker.since > limit and copies[piece.unit_id] == 1
        ]
        for piece, seconds in late[:free]:
            log.warning(
                "unit %s runs for %.0f s, others took %.0f: a second worker gets it too",
                piece.unit_id,
                seconds,
                median(self._seconds),
            )
            self._doubled.add(piece.unit_id)
            self._waiting.append(piece)
