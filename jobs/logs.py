"""The form of log lines, and the ids that tie together what driver and workers say about one unit."""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, Literal

LogFormat = Literal["text", "json"]

LOGGERS = ("leadline", "jobs", "detector")
"""Names of the loggers whose lines are shown."""

_ids: ContextVar[dict[str, Any] | None] = ContextVar("ids", default=None)


@contextmanager
def bound(**ids: Any) -> Iterator[None]:
    """Give every line that is logged inside these fields: run_id, unit_id, attempt."""
    token = _ids.set((_ids.get() or {}) | ids)
    try:
        yield
    finally:
        _ids.reset(token)


class JsonLines(logging.Formatter):
    """One JSON object a line: time (UTC), level, message, run_id, unit_id, attempt; the last three where they
    are known. A traceback becomes a field too, so that a line stays a record.
    """

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
            **(_ids.get() or {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def line_handler(form: LogFormat) -> logging.Handler:
    """A handler that writes lines of this form to stderr."""
    handler = logging.StreamHandler()
    text = logging.Formatter("%(asctime)s leadline: %(message)s", "%Y-%m-%d %H:%M:%S")
    handler.setFormatter(JsonLines() if form == "json" else text)
    return handler


@contextmanager
def logging_to(handler: logging.Handler) -> Iterator[None]:
    """Send the lines of LOGGERS to `handler`."""
    loggers = [logging.getLogger(name) for name in LOGGERS]
    for log in loggers:
        log.setLevel(logging.INFO)
        log.addHandler(handler)
    try:
        yield
    finally:
        for log in loggers:
            log.removeHandler(handler)
