"""What of a log's texts may be stored: as they are, or as a function of the user's own leaves them.

Measuring reads the logged text; what is written to OUT passes through here. Redacted are question, answer,
and text and source of each passage; the id of a passage that has none but its source is redacted like it.
Other ids, dimensions, dates and paths stay as they were logged, because findings are joined to the logs by
them. A function of the user's may be called by several threads at once.
"""

import importlib
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from detector.errors import RecordRejected, RejectReason
from detector.record import Record
from jobs.errors import ConfigError, first_line

Redact = Callable[[str], str]
"""A text to one of the same length, in which what must not be stored is painted over. Offsets in the tables
count characters of the logged answer, so they fit the redacted one, too."""

TEXTS = ("question", "answer", "passages")
"""The columns that hold text of the logs; null where none may be stored."""

_PROBE = "Write to ada@example.com or ring +44 20 7946 0018. Ünïcode, too: 猫."
_PERSONAL = re.compile(r"[\w.+-]{1,64}@[\w-]{1,63}(?:\.[\w-]{1,63}){1,8}|\d(?:[ ().-]{0,2}\d){6,}")


def mask_contacts(text: str) -> str:
    """Paint over e-mail addresses and runs of seven digits and more (phones, cards, accounts)."""
    return _PERSONAL.sub(lambda found: "*" * len(found[0]), text)


def load_redaction(place: str | None) -> Redact | None:
    """The function at `place`, `package.module:function`, tried on a text of ours; None for None.

    Raises ConfigError where it cannot be had, fails, or does not keep the length.
    """
    if place is None:
        return None
    module, colon, name = place.partition(":")
    if not (module and colon and name):
        raise ConfigError(f"setting redact: {place!r}: write it as package.module:function")
    try:
        redact = getattr(importlib.import_module(module), name)
    except Exception as error:  # importing runs their code
        raise ConfigError(
            f"setting redact: {place} cannot be imported ({type(error).__name__}: {first_line(error)}); "
            "install it where this runs and on every worker, or put its folder on PYTHONPATH"
        ) from None
    try:
        _redacted(_PROBE, redact)
    except RecordRejected as rejected:
        raise ConfigError(f"setting redact: {place}: {rejected.detail}") from None
    return redact


def stored_texts(record: Record, redact: Redact | None) -> dict[str, Any]:
    """The columns TEXTS of a record. Raises RecordRejected where the function fails on one of its texts or
    changes its length: nothing of such a record is stored.
    """

    def kept(text: str | None) -> str | None:
        return text if redact is None or text is None else _redacted(text, redact)

    passages = [
        {"id": p.id, "text": kept(p.text), "source": kept(p.source), "score": p.score}
        for p in with_stored_ids(record, redact).passages
    ]
    return {"question": kept(record.question), "answer": kept(record.answer), "passages": passages}


def with_stored_ids(record: Record, redact: Redact | None) -> Record:
    """The record with its passages' ids as they are stored: one that is also the source goes through `redact`
    as the source does. Raises RecordRejected as `stored_texts` does.
    """
    if redact is None:
        return record
    passages = [
        replace(p, id=_redacted(p.id, redact)) if p.id is not None and p.id == p.source else p
        for p in record.passages
    ]
    return replace(record, passages=tuple(passages))


def _redacted(text: str, redact: Redact) -> str:
    try:
        found = redact(text)
    except Exception as error:  # their code; its message may quote the text
        raise _failure(f"failed with {type(error).__name__}") from None
    if not isinstance(found, str):
        raise _failure(f"gave a {type(found).__name__}, not a text")
    if len(found) != len(text):
        raise _failure(f"made {len(found)} characters of {len(text)}; it must keep the length")
    if re.search("[\ud800-\udfff]", found):
        raise _failure("gave what cannot be written as UTF-8")
    return found


def _failure(what: str) -> RecordRejected:
    return RecordRejected(RejectReason.SCORING_FAILED, f"the redact function {what}")
