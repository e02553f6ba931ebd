"""The proxy in front of a real S3 server: what is signed survives it, and each fault is what it is called."""

import time
from collections import Counter

import botocore.session
import pytest
from botocore.config import Config
from botocore.exceptions import (
    ClientError,
    ConnectionClosedError,
    IncompleteReadError,
    ResponseStreamingError,
)

from jobs.storage import Storage, join
from tests.chaos.plan import Fault, Kind, Plan, draw
from tests.chaos.proxy import run_proxy

pytestmark = pytest.mark.s3


@pytest.fixture(scope="module")
def started(_seaweed_server):
    """A proxy, and a client behind it that tries everything once."""
    session = botocore.session.get_session()
    session.set_credentials(_seaweed_server.access_key, _seaweed_server.secret_key)
    with run_proxy(_seaweed_server.endpoint) as proxy:
        client = session.create_client(
            "s3",
            region_name="us-east-1",
            endpoint_url=proxy.endpoint,
            config=Config(retries={"total_max_attempts": 1}, s3={"addressing_style": "path"}),
        )
        yield proxy, client, _seaweed_server.url().removeprefix("s3://")
        client.close()


@pytest.fixture
def scene(started, seaweed):
    """Both without a fault, a bucket, and a storage that knows no proxy."""
    proxy, client, bucket = started
    proxy.plan = Plan()
    yield proxy, client, bucket, Storage({"endpoint_url": seaweed.endpoint})
    for found in client.list_objects_v2(Bucket=bucket).get("Contents", ()):
        client.delete_object(Bucket=bucket, Key=found["Key"])


def test_a_signed_put_a_get_and_a_listing_pass_through(scene):
    proxy, client, bucket, direct = scene
    client.put_object(Bucket=bucket, Key="a/b c.bin", Body=b"x" * 300_000)
    assert direct.read(f"s3://{bucket}/a/b c.bin") == b"x" * 300_000
    assert client.get_object(Bucket=bucket, Key="a/b c.bin", Range="bytes=5-7")["Body"].read() == b"xxx"
    assert [found["Size"] for found in client.list_objects_v2(Bucket=bucket)["Contents"]] == [300_000]
    assert client.head_object(Bucket=bucket, Key="a/b c.bin")["ContentLength"] == 300_000
    with pytest.raises(ClientError, match="PreconditionFailed"):
        client.put_object(Bucket=bucket, Key="a/b c.bin", Body=b"y", IfNoneMatch="*")
    with pytest.raises(ClientError, match="404"):
        client.head_object(Bucket=bucket, Key="nowhere")
    assert proxy.plan.n_requests == 6 and not proxy.plan.happened


def test_the_storage_of_the_jobs_goes_through_it_too(scene):
    proxy, _, bucket, direct = scene
    through, url = Storage({"endpoint_url": proxy.endpoint}), f"s3://{bucket}/some.json"
    through.write(url, b"{}" * 50_000)
    assert through.read(url) == direct.read(url) == b"{}" * 50_000
    assert [found.url for found in through.list(f"s3://{bucket}")] == [url]
    assert through.stat(url) == direct.stat(url) and proxy.plan.n_requests >= 4


@pytest.mark.parametrize("kind", [Kind.TRUNCATED, Kind.SLOW_DOWN, Kind.RESET_BEFORE])
def test_an_opened_object_is_read_whole_though_its_store_fails_for_a_while(scene, kind):
    proxy, _, bucket, direct = scene
    url, content = f"s3://{bucket}/log.jsonl", bytes(range(250)) * 40
    direct.write(url, content)
    with Storage({"endpoint_url": proxy.endpoint}).open(url, 4096) as file:
        proxy.plan = Plan([Fault(kind, at=1, times=4)])
        assert file.read() == content
    assert proxy.plan.happened[kind] == 1 and proxy.plan.n_requests > 4


@pytest.mark.parametrize(
    ("kind", "error", "is_there"),
    [
        (Kind.SLOW_DOWN, "SlowDown", False),
        (Kind.RESET_BEFORE, "closed", False),
        (Kind.RESET_AFTER, "closed", True),
    ],
)
def test_a_put_meets_its_fault(scene, kind, error, is_there):
    proxy, client, bucket, direct = scene
    proxy.plan = Plan([Fault(kind, at=1, times=2)])
    for _ in range(2):
        with pytest.raises((ClientError, ConnectionClosedError), match=error):
            client.put_object(Bucket=bucket, Key="one", Body=b"1")
        assert direct.exists(join(f"s3://{bucket}", "one")) == is_there
    client.put_object(Bucket=bucket, Key="one", Body=b"1")
    assert proxy.plan.happened == Counter([kind])


def test_a_truncated_answer_promises_more_than_it_holds(scene):
    proxy, client, bucket, direct = scene
    direct.write(f"s3://{bucket}/one", b"x" * 10_000)
    proxy.plan = Plan([Fault(Kind.TRUNCATED, at=1)])
    client.head_object(Bucket=bucket, Key="one")  # not this one
    answer = client.get_object(Bucket=bucket, Key="one")
    assert answer["ContentLength"] == 10_000
    with pytest.raises((IncompleteReadError, ResponseStreamingError)):
        answer["Body"].read()


def test_a_slow_answer_is_a_right_one(scene):
    proxy, client, bucket, direct = scene
    direct.write(f"s3://{bucket}/one", b"1")
    proxy.plan = Plan([Fault(Kind.SLOW, at=1, seconds=0.3)])
    began = time.monotonic()
    assert client.get_object(Bucket=bucket, Key="one")["Body"].read() == b"1"
    assert time.monotonic() - began >= 0.3


def test_a_seed_always_draws_the_same_faults_and_every_kind():
    faults = draw(3, 40, 2000)
    assert faults == draw(3, 40, 2000) != draw(4, 40, 2000)
    assert len(faults) == 40 and {fault.kind for fault in faults} == set(Kind)
    assert all(0 <= fault.at < 1700 for fault in faults)


def test_a_process_is_due_from_its_moment_on_until_it_is_dead():
    plan = Plan([Fault(Kind.WORKER, at=2), Fault(Kind.NODE, at=2)])
    plan.meet("GET", "/a")
    assert plan.due() == []
    plan.meet("GET", "/a")
    first, second = plan.due()
    assert plan.due() == [first, second]
    plan.settle(first)
    assert plan.due() == [second]
