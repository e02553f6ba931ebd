"""Objects on a disk, in a bucket and elsewhere: whole puts, put-if-absent, and a network that fails."""

import errno
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

import jobs.storage
from jobs.errors import JobError
from jobs.storage import Storage, join
from tests.chaos.plan import Fault, Kind, Plan
from tests.chaos.proxy import run_proxy

STORAGE = Storage()


@pytest.fixture(scope="module")
def _bucket(_seaweed_server):
    return _seaweed_server.url()


@pytest.fixture
def bucket(_bucket, seaweed, tmp_path):
    """A folder in a bucket: to make a bucket takes SeaweedFS seconds."""
    return join(_bucket, tmp_path.name)


@pytest.fixture(params=["disk", "memory", pytest.param("bucket", marks=pytest.mark.s3)])
def place(request, tmp_path):
    if request.param == "memory":
        return f"memory://{tmp_path.name}"
    return str(tmp_path / "new") if request.param == "disk" else request.getfixturevalue("bucket")


def race(place, n=16):
    """So many callers at once with data of their own. Returns the winners."""
    barrier = threading.Barrier(n)

    def create(number):
        barrier.wait()
        return STORAGE.create(join(place, "one"), str(number).encode())

    with ThreadPoolExecutor(n) as callers:
        return [number for number, won in enumerate(callers.map(create, range(n))) if won]


def test_create_puts_what_is_not_there_and_leaves_what_is(place):
    url = join(place, "a/one.json")
    assert STORAGE.create(url, b"first")
    assert not STORAGE.create(url, b"second")
    assert STORAGE.create(url, b"first")  # as if the answer to the first had been lost
    assert STORAGE.read(url) == b"first"
    assert [found.size for found in STORAGE.list(place)] == [5]  # and nothing beside it


def test_of_sixteen_at_once_one_creates_it(tmp_path):
    for number in range(5):
        (winner,) = race(str(tmp_path / str(number)))
        assert STORAGE.read(str(tmp_path / str(number) / "one")) == str(winner).encode()
        assert os.listdir(tmp_path / str(number)) == ["one"]  # noqa: PTH208


@pytest.mark.s3
def test_of_sixteen_at_once_one_creates_it_in_a_bucket(bucket):
    (winner,) = race(bucket)
    assert STORAGE.read(join(bucket, "one")) == str(winner).encode()


def test_a_disk_without_links_creates_too(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    url = str(tmp_path / "one")
    assert STORAGE.create(url, b"first") and not STORAGE.create(url, b"second")
    assert os.listdir(tmp_path) == ["one"]  # noqa: PTH208


@pytest.mark.parametrize("call", ["write", "create"])
def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path, monkeypatch, call):
    def refuse(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(JobError, match=r"one: the disk is full; make room and run the same command"):
        getattr(STORAGE, call)(str(tmp_path / "one"), b"1")
    assert os.listdir(tmp_path) == []  # noqa: PTH208


def test_two_writers_of_one_object_do_not_share_a_half_written_file(tmp_path):
    data = [bytes([number]) * 100_000 for number in range(8)]
    with ThreadPoolExecutor(8) as writers:
        for _ in writers.map(lambda each: STORAGE.write(str(tmp_path / "one"), each), data * 4):
            assert STORAGE.read(str(tmp_path / "one")) in data


def test_nothing_is_changed_without_permit(place):
    url = join(place, "one")
    STORAGE.write(url, b"1")

    def refuse():
        raise JobError("not yours")

    forbidden = Storage(permit=refuse)
    for change in (
        lambda: forbidden.write(url, b"2"),
        lambda: forbidden.create(url + "2", b"2"),
        lambda: forbidden.delete(url),
    ):
        with pytest.raises(JobError, match="not yours"):
            change()
    assert forbidden.read(url) == b"1" and [found.size for found in forbidden.list(place)] == [1]


def test_fewer_bytes_than_were_listed_are_read_again(monkeypatch):
    url = "memory://short/one"
    STORAGE.write(url, b"12345")
    fs, _ = STORAGE.filesystem(url)
    answers, waits = iter([b"12", b"12345"]), []
    monkeypatch.setattr(type(fs), "cat_file", lambda *_, **__: next(answers))
    monkeypatch.setattr(jobs.storage, "persist", lambda call, where: _persist(call, where, waits))
    assert STORAGE.read(url, 5) == b"12345" and len(waits) == 1


def _persist(call, where, waits):
    from jobs.patience import persist

    return persist(call, where, sleep=waits.append)


# --- a network that fails


@pytest.fixture
def network(seaweed, bucket):
    """A proxy, a storage behind it, one that knows no proxy, and a folder in a bucket."""
    with run_proxy(seaweed.endpoint) as proxy:
        keys = {"key": seaweed.access_key, "secret": seaweed.secret_key}
        yield proxy, Storage({"endpoint_url": proxy.endpoint, **keys}), Storage(), bucket


@pytest.mark.s3
def test_a_lost_answer_to_our_own_create_is_not_taken_for_anothers(network):
    proxy, through, direct, bucket = network
    url = join(bucket, "one")
    proxy.plan = Plan([Fault(Kind.RESET_AFTER, at=1)])
    assert through.create(url, b"ours")
    assert proxy.plan.happened[Kind.RESET_AFTER] == 1 and direct.read(url) == b"ours"
    proxy.plan = Plan([Fault(Kind.RESET_AFTER, at=1)])
    assert not through.create(url, b"another's")
    assert direct.read(url) == b"ours"


@pytest.mark.s3
@pytest.mark.parametrize("kind", [Kind.SLOW_DOWN, Kind.RESET_BEFORE, Kind.TRUNCATED])
def test_a_fault_costs_time_and_nothing_else(network, kind):
    proxy, through, direct, bucket = network
    url = join(bucket, "one")
    direct.write(url, b"x" * 100_000)
    proxy.plan = Plan([Fault(kind, at=1, times=2)])
    assert through.read(url) == b"x" * 100_000
    assert proxy.plan.happened[kind] == 1


@pytest.mark.s3
def test_wrong_keys_are_told_at_once(seaweed, bucket):
    url = join(bucket, "one")
    wrong = Storage({"key": seaweed.access_key, "secret": "wrong"})
    began = time.monotonic()
    for call in (lambda: wrong.write(url, b"1"), lambda: wrong.create(url, b"1"), lambda: wrong.read(url)):
        with pytest.raises(JobError, match=rf"{url}: the store does not know these credentials"):
            call()
    assert time.monotonic() - began < 5
