"""Days in the names of logs and of runs: `s3://logs/dt={yesterday}/` makes one command line fit every night.

Days are UTC, like the partitions that log shippers write and like `date` in the tables.
"""

import re
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta

from jobs.errors import ConfigError

_DAYS_BACK = {"today": 0, "date": 0, "yesterday": 1}
_PLACEHOLDER = re.compile(r"\{([A-Za-z_]\w*)(?::([^{}]*))?\}")
# Parts of a day that are digits: names of months would depend on the machine's language.
_DIRECTIVES = "YymdjGVu"


def read_day(text: str) -> date:
    """The day of `--date YYYY-MM-DD`. Raises ConfigError."""
    try:
        if re.fullmatch(r"\d{4}-\d\d-\d\d", text, re.ASCII):
            return date.fromisoformat(text)
    except ValueError:
        pass
    raise ConfigError(f"--date {text}: no day; write it as 2026-11-30")


def expand(url: str, day: Callable[[], date]) -> str:
    """`url` with `{today}`, `{date}` (the same) and `{yesterday}` written out as 2026-11-30.

    `{yesterday:%Y/%m/%d}` writes it otherwise. `day` says which day is today and is asked only where it
    matters. Braces around anything but a word stay as they are. Raises ConfigError for a word that is not
    known: a prefix that is read literally would hold no logs, and an OUT would get every night's.
    """

    def write(found: re.Match[str]) -> str:
        word, form = found[1], "%Y-%m-%d" if found[2] is None else found[2]
        if word not in _DAYS_BACK:
            known = ", ".join(f"{{{name}}}" for name in _DAYS_BACK)
            raise ConfigError(f"{found[0]}: not known; days are written {known} or {{date:%Y/%m/%d}}")
        directives = re.findall("%(.?)", form)
        if not directives or not set(directives) <= set(_DIRECTIVES):
            usable = ", ".join(f"%{letter}" for letter in _DIRECTIVES)
            raise ConfigError(f"{found[0]}: after the colon goes how to write the day, of {usable}")
        return (day() - timedelta(days=_DAYS_BACK[word])).strftime(form)

    return _PLACEHOLDER.sub(write, url)


def utc_today() -> date:
    """The day that it is in UTC."""
    return datetime.now(UTC).date()
