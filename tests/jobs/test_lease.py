"""One driver at a time in OUT: who is refused, who may take over, and what the one that lost may still do."""

import json
import logging
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime

import pytest

from jobs.commit import resume_run, sweep
from jobs.config import Config
from jobs.errors import JobError
from jobs.lease import LEASE, Clock, hold
from jobs.storage import Storage

STORAGE = Storage()
FIRST = f"{LEASE}/000001.json"


@dataclass
class Hands:
    """A clock whose hands a test moves. Sleeping moves them, and may be the moment of something."""

    seconds: float = 1_700_000_000.0
    meanwhile: list = field(default_factory=list)

    @property
    def clock(self):
        return Clock(lambda: self.seconds, lambda: self.seconds, self.sleep)

    def sleep(self, seconds):
        self.seconds += seconds
        for happens in self.meanwhile:
            happens()


@pytest.fixture
def hands():
    return Hands()


@pytest.fixture
def out(tmp_path):
    return str(tmp_path / "out")


def leases(out, storage=STORAGE):
    listed = storage.list(f"{out}/{LEASE}")  # SeaweedFS lists an emptied folder
    return [found.url.removeprefix(f"{out}/") for found in listed if found.url.endswith(".json")]


def read(out, name=FIRST, storage=STORAGE):
    return json.loads(storage.read(f"{out}/{name}"))


def leave(out, storage=STORAGE, **changes):
    """A lease of this process as it was found, with changes: by default of another machine."""
    with hold(storage, out):
        found = read(out, storage=storage)
    changed = found | {"host": "gpu-3", "machine": "another", "token": "another"} | changes
    storage.write(f"{out}/{FIRST}", json.dumps(changed).encode())


def rewrite(out, **changes):
    STORAGE.write(f"{out}/{FIRST}", json.dumps(read(out) | changes).encode())


def at(seconds):
    return {"renewed_at": datetime.fromtimestamp(1_700_000_000 + seconds, UTC).isoformat()}


def test_out_is_held_in_the_block_and_free_after_it(out, hands):
    with hold(STORAGE, out, hands.clock) as storage:
        storage.write(f"{out}/table", b"1")
        holder = read(out)
        assert (holder["pid"], holder["since"]) == (os.getpid(), "2023-11-14T22:13:20+00:00")
    assert leases(out) == []
    with hold(STORAGE, out, hands.clock):
        assert leases(out) == [FIRST]


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, JobError])
def test_out_is_free_after_an_error(out, error):
    with pytest.raises(error):
        with hold(STORAGE, out):
            raise error
    assert leases(out) == []


def test_a_second_driver_is_refused_with_who_since_when_and_what_to_do(out, hands):
    with hold(STORAGE, out, hands.clock):
        rewrite(out, host="gpu-3")
        with pytest.raises(JobError) as caught:
            with hold(STORAGE, out, hands.clock):
                pass
        assert leases(out) == [FIRST]
    line = str(caught.value)
    assert f"gpu-3, process {os.getpid()}, since 2023-11-14T22:13:20" in line
    assert "expires at 22:14:50 UTC" in line and "end it and run the same command again" in line
    assert "\n" not in line


def test_of_sixteen_drivers_at_once_one_holds_out(out):
    barrier = threading.Barrier(16)
    with ExitStack() as held:

        def begin(_):
            barrier.wait()
            try:
                held.enter_context(hold(STORAGE, out))
            except JobError:
                return 0
            return 1

        with ThreadPoolExecutor(16) as drivers:
            assert sum(drivers.map(begin, range(16))) == 1
        assert leases(out) == [FIRST]


def test_a_dead_process_of_this_machine_is_succeeded_at_once(out, hands):
    script = (
        "import os, sys; from jobs.lease import hold; from jobs.storage import Storage\n"
        "with hold(Storage(), sys.argv[1]): os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", script, out]).returncode == -9
    assert leases(out) == [FIRST]
    hands.meanwhile.append(lambda: pytest.fail("waits"))
    with hold(STORAGE, out, hands.clock):
        assert leases(out) == [f"{LEASE}/000002.json"]
    assert leases(out) == []


def test_another_process_with_the_number_of_the_dead_one_is_not_taken_for_it(out):
    leave(out, machine=None)
    with hold(STORAGE, f"{out}/other"):
        mine = read(f"{out}/other")
    rewrite(out, machine=mine["machine"], process_began="1")  # this process, had it another beginning
    with hold(STORAGE, out):
        assert leases(out) == [f"{LEASE}/000002.json"]


@pytest.mark.parametrize("age", [-80, 0, 80])
def test_a_lease_of_another_machine_is_respected_until_it_expires(out, hands, age):
    leave(out, **at(-age))
    with pytest.raises(JobError, match="gpu-3"):
        with hold(STORAGE, out, hands.clock):
            pass


@pytest.mark.parametrize("age", [-3000, 100])  # a clock that is fifty minutes ahead says nothing
def test_an_expired_lease_is_succeeded_after_it_was_watched(out, hands, age):
    leave(out, **at(-age))
    began = hands.seconds
    with hold(STORAGE, out, hands.clock):
        assert hands.seconds - began >= 40
        assert leases(out) == [f"{LEASE}/000002.json"]


def test_a_lease_that_only_looks_expired_is_seen_to_be_renewed(out, hands):
    leave(out, **at(-100))
    hands.meanwhile.append(lambda: rewrite(out, **at(-60)))
    with pytest.raises(JobError, match="gpu-3"):
        with hold(STORAGE, out, hands.clock):
            pass
    assert leases(out) == [FIRST]


def test_a_driver_that_was_succeeded_writes_and_deletes_nothing_more(out, hands):
    with hold(STORAGE, out, hands.clock) as first:
        rewrite(out, machine="another")
        hands.seconds += 100  # as if it had been suspended: the keeper's own clock stands still
        with hold(STORAGE, out, hands.clock) as second:
            second.write(f"{out}/table", b"new")
            for write in (first.write, first.create):
                with pytest.raises(JobError, match=r"another took over \(.*process \d+"):
                    write(f"{out}/table", b"old")
            with pytest.raises(JobError, match="nothing more is written from here"):
                first.delete(f"{out}/table")
            assert first.read(f"{out}/table") == b"new"
    assert STORAGE.read(f"{out}/table") == b"new" and leases(out) == []


def test_a_driver_that_was_succeeded_leaves_the_successors_lease(out, hands):
    with ExitStack() as outlives:
        with hold(STORAGE, out, hands.clock):
            rewrite(out, machine="another")
            hands.seconds += 100
            outlives.enter_context(hold(STORAGE, out, hands.clock))
        assert leases(out) == [f"{LEASE}/000002.json"]


def test_a_driver_whose_lease_was_deleted_stops(out, hands):
    with hold(STORAGE, out, hands.clock) as storage:
        STORAGE.delete(f"{out}/{FIRST}")
        hands.seconds += 100
        with pytest.raises(JobError, match="its lease was deleted"):
            storage.write(f"{out}/table", b"1")


def test_a_driver_whose_number_was_free_but_not_the_last_goes_back(out, hands, monkeypatch):
    leave(out, **at(-7200))
    create = Storage.create
    others = f"{LEASE}/000003.json"

    def create_late(self, url, data):
        # Two others came and the first of them went since this driver looked.
        STORAGE.write(f"{out}/{others}", json.dumps(read(out) | {"token": "third"} | at(0)).encode())
        return create(self, url, data)

    monkeypatch.setattr(Storage, "create", create_late)
    with pytest.raises(JobError, match="another driver began here at this moment"):
        with hold(STORAGE, out, hands.clock):
            raise AssertionError("two hold OUT")
    assert leases(out) == [FIRST, others]


def test_what_a_renewal_proves_counts_from_before_it_looked(out, hands, monkeypatch):
    looks = []
    with hold(STORAGE, out, hands.clock) as storage:
        write, listed = Storage.write, Storage.list

        def write_slowly(self, url, data):
            hands.seconds += 3600  # whoever came in this hour was not seen
            write(self, url, data)

        monkeypatch.setattr(Storage, "write", write_slowly)
        monkeypatch.setattr(Storage, "list", lambda self, url: looks.append(url) or listed(self, url))
        hands.seconds += 3600
        for _ in range(2):
            storage.permit()
        assert len(looks) == 2


def test_a_driver_that_was_merely_slow_goes_on_and_says_so(out, hands):
    with hold(STORAGE, out, hands.clock) as storage:
        hands.seconds += 100
        storage.write(f"{out}/table", b"1")
        assert read(out)["renewed_at"] == "2023-11-14T22:15:00+00:00"
        with pytest.raises(JobError):
            with hold(STORAGE, out, hands.clock):
                pass


def test_the_lease_is_renewed_while_its_driver_is_busy(out, hands, monkeypatch):
    monkeypatch.setattr("jobs.lease.RENEW_SECONDS", 0.01)
    with hold(STORAGE, out, hands.clock):
        hands.seconds += 30
        for _ in range(500):
            if read(out)["renewed_at"] == "2023-11-14T22:13:50+00:00":
                return
            threading.Event().wait(0.01)
        pytest.fail("not renewed")


def test_a_lease_that_cannot_be_read_is_refused(out):
    STORAGE.write(f"{out}/{FIRST}", b"{}")
    with pytest.raises(JobError, match="if no other driver runs, delete it"):
        with hold(STORAGE, out):
            pass


def test_a_lease_makes_no_run_and_a_sweep_leaves_it_alone(out, tmp_path):
    scorer = {"name": "fake", "fingerprint": "abc"}
    with hold(STORAGE, out):
        STORAGE.write(f"{out}/{LEASE}/.000001.json.ab.partial", b"being renewed")
        assert resume_run(STORAGE, out, [str(tmp_path)], Config(), scorer) is None
        assert sweep(STORAGE, out, []) == 0 and leases(out) == [FIRST]
    assert sweep(STORAGE, out, []) == 1  # what a killed driver left half-written


def test_where_creating_is_not_atomic_the_holder_looks_again(hands, caplog):
    out, storage = "memory://lease-settles", Storage()
    overwrite = lambda: leave_in_memory(storage, out)  # noqa: E731
    with hold(storage, out, hands.clock):
        assert hands.seconds > 1_700_000_001
    hands.meanwhile.append(overwrite)
    with pytest.raises(JobError, match="at this moment"):
        with hold(storage, out, hands.clock):
            pass
    assert read(out, storage=storage)["token"] == "faster"
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def leave_in_memory(storage, out):
    storage.write(f"{out}/{FIRST}", json.dumps(read(out, storage=storage) | {"token": "faster"}).encode())


@pytest.mark.s3
def test_a_bucket_is_held_and_succeeded_in_the_same_way(seaweed, hands):
    out, storage = seaweed.url() + "/out", Storage()
    with hold(storage, out, hands.clock) as first:
        with pytest.raises(JobError, match="another driver is at work"):
            with hold(storage, out, hands.clock):
                pass
        changed = read(out, storage=storage) | {"machine": "another"}
        storage.write(f"{out}/{FIRST}", json.dumps(changed).encode())
        hands.seconds += 100
        with hold(storage, out, hands.clock) as second:
            second.write(f"{out}/table", b"new")
            with pytest.raises(JobError, match="another took over"):
                first.write(f"{out}/table", b"old")
    assert leases(out, storage) == [] and storage.read(f"{out}/table") == b"new"
