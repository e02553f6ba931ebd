"""Errors of a remote store: which are waited out and for how long, which are told at once and how."""

import pytest
from aiohttp import ClientPayloadError
from botocore.exceptions import (
    ClientError,
    EndpointConnectionError,
    IncompleteReadError,
    NoCredentialsError,
    ReadTimeoutError,
)
from s3fs.errors import translate_boto_error

from jobs.errors import JobError
from jobs.patience import PATIENCE_SECONDS, persist

WHERE = "s3://bucket/key"


def answered(code, status):
    """What s3fs makes of such an answer."""
    answer = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return translate_boto_error(ClientError(answer, "GetObject"))


class Time:
    def __init__(self):
        self.seconds, self.waits = 0.0, []

    def sleep(self, seconds):
        self.waits.append(seconds)
        self.seconds += seconds


def call_with(errors, time=None):
    """Call what raises these errors, one after the other, and then succeeds."""
    left, time = iter(errors), time or Time()

    def call():
        for error in left:
            raise error
        return "done"

    return persist(call, WHERE, sleep=time.sleep, ticks=lambda: time.seconds)


TRANSIENT = [
    answered("SlowDown", 503),
    answered("ServiceUnavailable", 503),
    answered("InternalError", 500),
    answered("502", 502),
    answered("RequestTimeout", 400),
    answered("ConditionalRequestConflict", 409),
    answered("TooManyRequests", 429),
    ConnectionResetError(104, "reset"),
    TimeoutError(),
    ClientPayloadError("cut"),
    EndpointConnectionError(endpoint_url="http://host"),
    IncompleteReadError(actual_bytes=1, expected_bytes=2),
    ReadTimeoutError(endpoint_url="http://host"),
]


@pytest.mark.parametrize("error", TRANSIENT, ids=lambda error: type(error).__name__)
def test_what_passes_is_tried_again_with_growing_waits_of_random_length(error):
    time = Time()
    assert call_with([error] * 4, time) == "done"
    assert len(set(time.waits)) == 4
    for wait, longest in zip(time.waits, (0.5, 1.0, 2.0, 4.0), strict=True):
        assert longest / 2 <= wait <= longest


def test_patience_ends_with_one_line_that_names_the_last_error():
    time = Time()
    with pytest.raises(
        JobError, match=r"s3://bucket/key: .*for 60 s \(.*SlowDown.*run the same command"
    ) as caught:
        call_with([answered("SlowDown", 503)] * 1000, time)
    assert PATIENCE_SECONDS / 2 < time.seconds <= PATIENCE_SECONDS
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("error", "cure"),
    [
        (answered("ExpiredToken", 400), "expired; renew them"),
        (answered("InvalidAccessKeyId", 403), "does not know these credentials"),
        (answered("SignatureDoesNotMatch", 403), "does not know these credentials"),
        (answered("AccessDenied", 403), "the role must list the bucket"),
        (answered("403", 403), "or expired credentials"),
        (answered("AccountProblem", 403), r"AccountProblem"),
        (answered("NoSuchBucket", 404), "no such bucket; create it"),
        (answered("RequestTimeTooSkewed", 403), "clock"),
        (NoCredentialsError(), "set AWS_PROFILE"),
    ],
)
def test_what_time_does_not_mend_is_told_at_once_with_what_to_do(error, cure):
    time = Time()
    with pytest.raises(JobError, match=rf"s3://bucket/key: .*{cure}"):
        call_with([error], time)
    assert time.waits == []


@pytest.mark.parametrize("error", [answered("NoSuchKey", 404), answered("InvalidRange", 416), KeyError()])
def test_what_says_more_to_the_caller_passes_as_it_is(error):
    with pytest.raises(type(error)) as caught:
        call_with([error])
    assert caught.value is error
