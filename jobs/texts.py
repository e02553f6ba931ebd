"""Texts that are stored only where a sentence is flagged. Which those are is known after measuring, and until
then no text may lie in OUT: the judge reads the flagged answers from the logs again, by the reader that the
worker used. Where a log is gone or changed there is no text, and the table says so.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from detector.errors import RecordRejected
from jobs.commit import Marker
from jobs.config import Config
from jobs.formats import Accepted, read_unit
from jobs.listing import WorkUnit
from jobs.redaction import TEXTS, Redact, stored_texts
from jobs.storage import Storage, mask
from jobs.tables import FLAGGED_TEXTS

Texts = Mapping[int, Mapping[str, Any]]
"""record_index -> the columns TEXTS, and `withheld`: why they are null, or null."""

GONE = "its log is gone"
CHANGED = "its log has changed since"
LOST = "its row is not found in the log for certain"


def read_texts(
    marker: Marker, flagged: pa.Table, storage: Storage, config: Config, redact: Redact | None
) -> Texts:
    """The texts of these responses of a unit (`record_index`, `path`, `position`, `response_id`), redacted.

    A row is taken only where it is the only one with its path, position and id. Raises what the store raises.
    """
    wanted: dict[str, dict[tuple[int, str | None], int]] = {}
    for row in flagged.select(["record_index", "path", "position", "response_id"]).to_pylist():
        wanted.setdefault(row["path"], {})[row["position"], row["response_id"]] = row["record_index"]
    found: dict[int, dict[str, Any]] = {}
    for file in WorkUnit.from_json(marker["unit"]).files() if wanted else ():
        places = wanted.pop(mask(file.url), {})
        if places:
            found |= _read_file(file, places, storage, config, redact)
    return found | {index: _withheld(LOST) for places in wanted.values() for index in places.values()}


def with_texts(responses: pa.Table, texts: Texts) -> pa.Table:
    """Measured responses with these texts in their columns, null for the others."""
    rows = [texts.get(index, {}) for index in responses["record_index"].to_pylist()]
    for name in TEXTS:
        at = responses.schema.get_field_index(name)
        field = responses.schema.field(at)
        responses = responses.set_column(at, field, pa.array([row.get(name) for row in rows], field.type))
    return responses


def text_rows(responses: pa.Table, texts: Texts) -> pa.Table:
    """The rows of table `texts` for these responses, as `with_texts` gave them."""
    kept = responses.filter(pc.is_in(responses["record_index"], pa.array(list(texts), pa.int32())))
    withheld = [texts[index]["withheld"] for index in kept["record_index"].to_pylist()]
    kept = kept.append_column("withheld", pa.array(withheld, pa.string()))
    return kept.select(FLAGGED_TEXTS.names).cast(FLAGGED_TEXTS)


def _read_file(
    file: WorkUnit,
    places: Mapping[tuple[int, str | None], int],
    storage: Storage,
    config: Config,
    redact: Redact | None,
) -> dict[int, dict[str, Any]]:
    found: dict[int, dict[str, Any]] = {}
    times: Counter[int] = Counter()
    try:
        if storage.stat(file.url).etag != file.etag:
            return {index: _withheld(CHANGED) for index in places.values()}
        for row in read_unit(file, storage, config):
            index = places.get((row.position, row.record.response_id)) if isinstance(row, Accepted) else None
            if index is None:
                continue
            times[index] += 1
            found[index] = _redacted(row.record, redact) if times[index] == 1 else _withheld(LOST)
    except FileNotFoundError:
        return {index: _withheld(GONE) for index in places.values()}
    return {index: _withheld(LOST) for index in places.values()} | found


def _redacted(record: Any, redact: Redact | None) -> dict[str, Any]:
    try:
        return stored_texts(record, redact) | {"withheld": None}
    except RecordRejected as rejected:
        return _withheld(rejected.detail)


def _withheld(why: str) -> dict[str, Any]:
    return dict.fromkeys(TEXTS) | {"withheld": why}
