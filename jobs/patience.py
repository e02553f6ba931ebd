"""An error of a remote store: tried again for a while, or told in one line with what to do about it."""

import itertools
import random
import time
from collections.abc import Callable
from http.client import HTTPException
from typing import Any, TypeVar

from jobs.errors import JobError

T = TypeVar("T")

PATIENCE_SECONDS = 60.0
"""How long a call is repeated: longer than a throttled prefix or a fail-over takes, shorter than a lease."""

_FIRST_WAIT_SECONDS = 0.5
_LONGEST_WAIT_SECONDS = 10.0
_LONGEST_LINE = 300

_BUSY = {"SlowDown", "RequestTimeout", "Throttling", "ThrottlingException", "TooManyRequests"}
_BUSY |= {"OperationAborted", "ConditionalRequestConflict"}
_EXPIRED = "the credentials have expired; renew them and run the same command again, what was done is kept"
_UNKNOWN = "the store does not know these credentials; check AWS_PROFILE or the AWS_ keys, and the endpoint"
_DENIED = "access denied, or expired credentials; the role must list the bucket and get, put and delete in it"
_CURES = {
    "ExpiredToken": _EXPIRED,
    "TokenRefreshRequired": _EXPIRED,
    "InvalidAccessKeyId": _UNKNOWN,
    "InvalidToken": _UNKNOWN,
    "SignatureDoesNotMatch": _UNKNOWN,
    "RequestTimeTooSkewed": "the clock of this machine is wrong; set it",
    "NoSuchBucket": "there is no such bucket; create it, or correct the URL",
    "AccessDenied": _DENIED,
    "403": _DENIED,
}


def persist(
    call: Callable[[], T],
    where: str,
    *,
    sleep: Callable[[float], None] = time.sleep,
    ticks: Callable[[], float] = time.monotonic,
) -> T:
    """What `call` returns, which may be tried several times: its errors must leave nothing half done.

    `where`: the masked URL, for messages. A store that is busy or out of reach is asked again, with growing
    waits of random length, for PATIENCE_SECONDS. Raises JobError when it stays so and, at once, for what time
    does not mend (access, credentials, bucket); other errors, FileNotFoundError first, as they are.
    """
    began = ticks()
    for attempt in itertools.count():
        try:
            return call()
        except _failures() as error:
            wait = min(_FIRST_WAIT_SECONDS * 2**attempt, _LONGEST_WAIT_SECONDS) * random.uniform(0.5, 1)
            if not _is_transient(error):
                cure = _cure(error)
                if cure is None:
                    raise
                raise JobError(f"{where}: {cure}") from None
            if ticks() - began + wait > PATIENCE_SECONDS:
                raise JobError(
                    f"{where}: the store could not be used for {PATIENCE_SECONDS:.0f} s ({_line(error)}); "
                    "run the same command again when it is well, what was done is kept"
                ) from None
        sleep(wait)
    raise AssertionError("count() does not end")


def refused(error: BaseException) -> bool:
    """Whether a conditional put failed because its condition did not hold."""
    code, status = _answer(error)
    return isinstance(error, FileExistsError) or code == "PreconditionFailed" or status == 412


def _failures() -> tuple[type[BaseException], ...]:
    # Imported where a remote store is used: it takes longer than all else in a run on local files.
    from aiohttp import ClientError as HttpError
    from botocore.exceptions import BotoCoreError, ClientError

    return OSError, HTTPException, HttpError, BotoCoreError, ClientError


def _answer(error: BaseException) -> tuple[str | None, int]:
    """The store's own code and the HTTP status behind an error; (None, 0) where it did not answer."""
    for one in (error, error.__cause__):
        answer: Any = getattr(one, "response", None)
        if isinstance(answer, dict):
            status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
            return answer.get("Error", {}).get("Code"), status
    return None, 0


def _is_transient(error: BaseException) -> bool:
    from aiohttp import ClientError as HttpError
    from botocore.exceptions import ConnectionError as Unreachable
    from botocore.exceptions import HTTPClientError, IncompleteReadError
    from botocore.parsers import ResponseParserError

    code, status = _answer(error)
    if code is not None:
        return code in _BUSY or status == 429 or (status >= 500 and status != 501)
    cut = (ConnectionError, TimeoutError, HTTPException, HttpError)
    return isinstance(error, (*cut, Unreachable, HTTPClientError, IncompleteReadError, ResponseParserError))


def _cure(error: BaseException) -> str | None:
    """What to do about a permanent error, or None where its own type says more to the caller."""
    from botocore.exceptions import BotoCoreError, NoCredentialsError, PartialCredentialsError

    code, status = _answer(error)
    if code in _CURES:
        return _CURES[code]
    if isinstance(error, (NoCredentialsError, PartialCredentialsError)):
        return "no credentials found; set AWS_PROFILE or the AWS_ keys, or give the machine a role"
    if isinstance(error, BotoCoreError):
        return f"{_line(error)}; check the AWS settings of this machine"
    return f"{_DENIED} ({code})" if status in (401, 403) else None


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:_LONGEST_LINE] or type(error).__name__
