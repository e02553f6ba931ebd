"""Who drives the run in OUT: one driver at a time, and what a second one is told.

A lease is an object `OUT/lease/<generation>.json` that its holder writes anew every 20 seconds. It is taken
by creating it, which the store lets one of several do. One that is no longer renewed is succeeded by creating
the next generation: only put-if-absent is relied on, because conditional overwriting is younger and was seen
to let two of sixteen writers win (SeaweedFS 4.48, If-Match).

What keeps two drivers apart, in seconds: a holder begins no write when its last sight of its own lease is
older than 40; nobody succeeds it before 90 without a renewal, by the clocks of both hosts, and then only
after 45 more in which the lease did not change, by one's own clock. So clocks may differ by anything: where
they do, a dead holder is respected or watched for longer. Not covered is a single put that was begun in time
and reaches a failing store minutes later; parts and markers bear that, and every judgement makes its tables
anew.
"""

import json
import logging
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Self

from jobs.errors import JobError
from jobs.storage import Storage, join, mask

log = logging.getLogger("leadline")

LEASE = "lease"
RENEW_SECONDS = 20.0
_TRUST_SECONDS = 40.0
_EXPIRE_SECONDS = 90.0
_WATCH_SECONDS = 45.0
_SETTLE_SECONDS = 2.0  # where creating is not atomic: by then a second creator has written, too


@dataclass(frozen=True, slots=True)
class Clock:
    """Where time comes from."""

    now: Callable[[], float] = time.time
    """Seconds since 1970, which other hosts may see otherwise."""
    ticks: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


@dataclass(frozen=True, slots=True)
class Holder:
    """A driver, and when it last said that it is there. What a lease holds."""

    token: str
    host: str
    pid: int
    machine: str | None
    """The kernel's boot and the process namespace that `pid` is one of; None where they are not known."""
    process_began: str | None
    """By the kernel's count: tells a process from a later one with its number."""
    since: str
    renewed_at: str

    @classmethod
    def this(cls, now: float) -> Self:
        """This process."""
        pid = os.getpid()
        began = _process_began(pid)
        at = _spell(now)
        return cls(secrets.token_hex(8), socket.gethostname(), pid, _machine(), began, at, at)

    def to_json(self) -> bytes:
        """The content of the lease."""
        return json.dumps(asdict(self), indent=1).encode() + b"\n"

    def is_dead(self) -> bool:
        """Whether it is known to run no more: it was a process of this machine and is none now."""
        if self.machine is None or self.machine != _machine():
            return False
        return _process_began(self.pid) != self.process_began

    def age_seconds(self, now: float) -> float:
        """How long ago it was heard of, if its clock is this one's."""
        return now - datetime.fromisoformat(self.renewed_at).timestamp()

    def __str__(self) -> str:
        return f"{self.host}, process {self.pid}, since {self.since}"


@contextmanager
def hold(storage: Storage, out: str, clock: Clock = Clock()) -> Iterator[Storage]:
    """Be the only driver of `out` in this block. Yields the storage to write with: it refuses to write when
    the lease was lost.

    Raises JobError where another driver holds OUT, or (out of whatever wrote) took it over meanwhile.
    """
    lease = _Lease(storage, out, clock)
    lease.take()
    ended = threading.Event()
    keeper = threading.Thread(target=lease.keep, args=(ended,), name="lease", daemon=True)
    keeper.start()
    try:
        yield replace(storage, permit=lease.check)
    finally:
        ended.set()
        lease.release()


@dataclass(slots=True)
class _Lease:
    storage: Storage
    out: str
    clock: Clock
    _number: int = 0
    _holder: Holder | None = None
    _seen: float = 0.0
    """By `clock.ticks`, before the last look at our own lease began."""
    _lost: str = ""
    _released: bool = False
    _one: threading.RLock = field(default_factory=threading.RLock)

    def take(self) -> None:
        """Become the holder. Raises JobError where another is."""
        found = self._numbers()
        last = self._url(found[-1]) if found else ""
        before = self._outlast(last) if found else None
        self._number = found[-1] + 1 if found else 1
        self._holder = Holder.this(self.clock.now())
        self._seen = self.clock.ticks()
        created = self.storage.create(self._url(), self._holder.to_json())
        if not self.storage.creates_atomically(self.out):
            self.clock.sleep(_SETTLE_SECONDS)
            created = self._is_mine()
        # The one that we saw may have left meanwhile, and its number may be another's now. Whoever creates a
        # lease after ours sees ours here, as we see those from before: of two, one at least goes back.
        alone = set(self._numbers()) - set(found) == {self._number}
        if not (created and alone and (not found or self._read(last) in (None, before))):
            if created:
                self.storage.delete(self._url())
            raise JobError(
                f"{mask(self.out)}: another driver began here at this moment; let it finish, and run the "
                "same command again"
            )
        for number in found:
            self.storage.delete(self._url(number))

    def keep(self, ended: threading.Event) -> None:
        """Renew until `ended`, or until there is nothing to renew."""
        while not (ended.wait(RENEW_SECONDS) or self._lost):
            try:
                self.renew()
            except (OSError, JobError) as error:
                log.warning("lease: not renewed (%s)", error)

    def check(self) -> None:
        """Raise JobError unless it is certain that this driver holds OUT."""
        if not self._lost and self.clock.ticks() - self._seen > _TRUST_SECONDS:
            self.renew()
        if self._lost:
            raise JobError(self._lost)

    def renew(self) -> None:
        """Look whether the lease is still ours, and say that we are there."""
        with self._one:
            if self._released or self._lost:
                return
            began = self.clock.ticks()
            if self._numbers()[-1:] != [self._number] or not self._is_mine():
                self._lost = self._tell_loss()
                return
            now = replace(self._holder, renewed_at=_spell(self.clock.now()))
            self.storage.write(self._url(), now.to_json())
            self._seen = began

    def release(self) -> None:
        """Make room for the next driver, if we are still the holder."""
        with self._one:
            self._released = True
            if self._lost:
                return
            try:
                if self._is_mine():
                    self.storage.delete(self._url())
            except (OSError, JobError) as error:
                log.warning("lease: not given back (%s); it expires in %.0f s", error, _EXPIRE_SECONDS)

    def _url(self, number: int | None = None) -> str:
        return join(self.out, LEASE, f"{number or self._number:06}.json")

    def _numbers(self) -> list[int]:
        """The generations that are there, the youngest last."""
        names = (found.url.rsplit("/", 1)[-1] for found in self.storage.list(join(self.out, LEASE)))
        return sorted(int(name[:-5]) for name in names if re.fullmatch(r"[0-9]+\.json", name))

    def _read(self, url: str) -> bytes | None:
        try:
            return self.storage.read(url)
        except FileNotFoundError:
            return None

    def _is_mine(self) -> bool:
        found = self._read(self._url())
        return found is not None and _parse(self._url(), found).token == self._holder.token

    def _outlast(self, url: str) -> bytes | None:
        """The last content of this lease, once its holder is gone. Raises JobError while it may be there."""
        content = self._read(url)
        if content is None:
            return None
        holder = _parse(url, content)
        if holder.is_dead():
            log.info("%s was held by %s, which is gone: taken over", mask(self.out), holder)
            return content
        age = holder.age_seconds(self.clock.now())
        if abs(age) <= _EXPIRE_SECONDS:
            raise JobError(self._tell_refusal(holder))
        log.info(
            "%s is held by %s, and was last heard of %.0f s ago: watching it for %.0f s",
            mask(self.out),
            holder,
            age,
            _WATCH_SECONDS,
        )
        self.clock.sleep(_WATCH_SECONDS)
        now = self._read(url)
        if now is not None and now != content:
            raise JobError(self._tell_refusal(_parse(url, now)))
        return content

    def _tell_refusal(self, holder: Holder) -> str:
        renewed = datetime.fromisoformat(holder.renewed_at)
        expires = renewed + timedelta(seconds=_EXPIRE_SECONDS)
        return (
            f"{mask(self.out)}: another driver is at work here ({holder}; last heard of at "
            f"{renewed:%H:%M:%S} UTC); let it finish, or end it and run the same command again; if it died "
            f"on another machine, its lease expires at {expires:%H:%M:%S} UTC"
        )

    def _tell_loss(self) -> str:
        url = self._url(max(self._numbers(), default=self._number))
        content = self._read(url)
        who = f"another took over ({_parse(url, content)})" if content else "its lease was deleted"
        return (
            f"{mask(self.out)}: this driver no longer holds it: {who}; nothing more is written from here, "
            "what was measured is kept"
        )


def _parse(url: str, content: bytes) -> Holder:
    try:
        return Holder(**json.loads(content))
    except (ValueError, TypeError):
        raise JobError(
            f"{mask(url)}: not a lease of this version; if no other driver runs, delete it"
        ) from None


def _spell(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def _machine() -> str | None:
    """Where a process number means the same process: two containers of one host do not share them."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:  # not Linux
        return None


def _process_began(pid: int) -> str | None:
    """When a process was started, or None where there is none (one that nobody has waited for is none)."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = status.rpartition(")")[2].split()  # the name before it may hold anything
    return None if fields[0] in "ZX" else fields[19]
