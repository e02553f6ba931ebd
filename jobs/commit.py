"""The durability protocol, in one place: what is written to OUT, in which order, and what that proves.

    lease/<n>.json        while a driver runs (`jobs.lease`): a second one is refused
    run.json              first: frozen listing, settings, scorer: what a resumed run must share
    measurements/...      parts, named by their content: two attempts at a unit cannot overwrite each other
    units/<unit>.json     the marker, after the unit's parts and only if there is none. A unit with a marker
                          is never measured again; of two attempts the first marker counts, and its parts
    progress.json         while measuring: for `leadline status`, rewritten every half minute, gone at the end
    _SUCCESS              last, with totals that were recounted from the parts

A process may die between any two of these. What it leaves is a part without a marker, which no reader of
markers sees and `sweep` deletes. Where a store cannot put only if absent, two attempts may both take theirs
for the first; the one whose marker is read at the end counts then, and its parts are all there, too.
"""

import json
import os
import platform
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any, Protocol

from jobs.config import Config, fingerprint
from jobs.errors import ConfigError, JobError
from jobs.lease import LEASE
from jobs.storage import Storage, join, mask

RUN = "run.json"
PROGRESS = "progress.json"
SUCCESS = "_SUCCESS"
UNITS = "units"
MEASUREMENTS = "measurements"
REPORT = "report/index.html"

Marker = dict[str, Any]
"""One unit's marker: unit_id, parts, n_read, n_audited, n_rejected, rejects (reason -> count), n_tokens,
seconds, attempt, dtype."""

_PARTIAL = re.compile(r"\.(.+)\.[^.]+\.partial")  # of which file: `Storage.write`
_READERS = 16  # small objects fetched at once: a marker is one round trip


class Listed(Protocol):
    """An input file as it is listed: what says that its bytes are still the same."""

    url: str
    size: int
    etag: str


@dataclass(frozen=True, slots=True)
class Run:
    """run.json. Holds no credentials: it is copied into pages and tickets."""

    run_id: str
    date: str
    """UTC day of the first start; where a record carries no date of its own."""
    started_at: str
    leadline_version: str
    logs: list[str]
    files: list[dict[str, Any]]
    """url, size, etag, format, compression, partitions of every input file, in the order they are read."""
    n_units: int
    config: dict[str, Any]
    measured_by: dict[str, Any]
    scorer: dict[str, Any]
    """name, fingerprint, window_tokens, dtype, reads_attention; the bundle, where one is used."""
    versions: dict[str, str]


def resume_run(
    storage: Storage, out: str, logs: list[str], config: Config, scorer: dict[str, Any]
) -> Run | None:
    """The run in OUT that this command continues, or None where OUT is empty. Reads no log.

    Raises ConfigError when OUT holds another run (other logs, settings that measurements depend on, another
    scorer), with every difference, or anything that is no run.
    """
    for url in (*logs, out):
        _refuse_credentials(url)
    found = find_run(storage, out)
    if found is not None:
        _refuse_another(found, out, _named(logs), config, scorer)
    elif _holds_anything(storage, out):
        raise ConfigError(f"{mask(out)}: not empty and no {RUN} in it, so it is no run; choose another --out")
    return found


def create_run(
    storage: Storage,
    out: str,
    logs: list[str],
    config: Config,
    scorer: dict[str, Any],
    files: list[dict[str, Any]],
    n_units: int,
    now: datetime | None = None,
) -> Run:
    """Write run.json into an empty OUT: from here on the listing is frozen.

    `files` as JSON trees with at least url, size and etag. The same files, settings and scorer give the same
    run_id, wherever and whenever.
    """
    started = now or datetime.now(UTC)
    measured_by = _as_json(config.measured_by())
    run = Run(
        run_id=fingerprint([files, measured_by, scorer["fingerprint"]]),
        date=f"{started:%Y-%m-%d}",
        started_at=started.isoformat(timespec="seconds"),
        leadline_version=version("leadline"),
        logs=_named(logs),
        files=files,
        n_units=n_units,
        config=_without_secrets(_as_json(config.model_dump(mode="json"))),
        measured_by=measured_by,
        scorer=scorer,
        versions={"python": platform.python_version()}
        | {name: version(name) for name in ("torch", "transformers", "ray", "pyarrow")},
    )
    _write_json(storage, join(out, RUN), asdict(run))
    return run


def check_resumable(out: str, run: Run, present: Iterable[Listed]) -> None:
    """Hold the frozen listing of a run with units still to measure against the files that are `present`.

    Files that have arrived since belong to the next run. Raises JobError for one that changed or vanished,
    ConfigError when another version of Leadline began the run.
    """
    if run.leadline_version != version("leadline"):
        # Numbers of two versions in one table could not be explained to anybody.
        raise ConfigError(
            f"{mask(out)}: this unfinished run was begun by leadline {run.leadline_version}, this is "
            f"{version('leadline')}; finish it with that version or choose another --out"
        )
    there = {found.url: (found.size, found.etag) for found in present}
    for file in run.files:
        found = there.get(file["url"])
        if found != (file["size"], file["etag"]):
            raise JobError(
                f"{mask(file['url'])}: {'changed' if found else 'vanished'} since the run began, {run.date}; "
                "put it back, or start a new run with another --out"
            )


def check_measured(out: str, run: Run, config: Config) -> None:
    """Refuse settings that a judgement cannot change. Raises ConfigError with every difference."""
    _refuse_differences(out, _flat(run.measured_by), _flat(_as_json(config.measured_by())))


def find_run(storage: Storage, out: str) -> Run | None:
    """The run in OUT, or None. Raises ConfigError for a run.json that Leadline did not write."""
    try:
        tree = json.loads(storage.read(join(out, RUN)))
    except FileNotFoundError:
        return None
    except ValueError:
        raise ConfigError(f"{mask(out)}/{RUN}: not valid JSON; delete this OUT or choose another") from None
    try:
        return Run(**tree)
    except TypeError:
        raise ConfigError(f"{mask(out)}/{RUN}: written by another version; choose another --out") from None


def read_run(storage: Storage, out: str) -> Run:
    """The run in OUT. Raises ConfigError when there is none."""
    run = find_run(storage, out)
    if run is None:
        raise ConfigError(f"{mask(out)}: no {RUN} here, so it is not the OUT of a run; check the path")
    return run


def absolute(url: str) -> str:
    """The same place, spelled for every process: a worker has a working directory of its own."""
    # Not resolve(): a link such as logs/latest is what the user named.
    return url.rstrip("/") if "://" in url else os.path.abspath(url)  # noqa: PTH100


def marker_url(out: str, unit_id: str) -> str:
    """Where the marker of a unit lies."""
    return join(out, UNITS, f"{unit_id}.json")


def write_marker(storage: Storage, out: str, marker: Marker) -> Marker:
    """Declare a unit done, only after all its parts are written. Returns the marker that stands in OUT.

    That is another's where another attempt was faster: two workers at one unit count once.
    """
    url = marker_url(out, marker["unit_id"])
    return marker if storage.create(url, _encode(marker)) else json.loads(storage.read(url))


def read_markers(storage: Storage, out: str) -> dict[str, Marker]:
    """Every marker by unit id, from one listing. A half-written marker does not exist: puts are whole."""
    listed = [found for found in storage.list(join(out, UNITS)) if found.url.endswith(".json")]
    with ThreadPoolExecutor(_READERS) as readers:
        read = readers.map(lambda found: storage.read(found.url, found.size), listed)
        markers = [json.loads(data) for data in read]
    return {marker["unit_id"]: marker for marker in sorted(markers, key=lambda marker: marker["unit_id"])}


def write_progress(storage: Storage, out: str, progress: dict[str, Any]) -> None:
    """Say how far the run is, for `leadline status`. Nothing else reads it."""
    _write_json(storage, join(out, PROGRESS), progress)


def read_success(storage: Storage, out: str) -> dict[str, Any] | None:
    """_SUCCESS of a finished run, or None."""
    try:
        return json.loads(storage.read(join(out, SUCCESS)))
    except FileNotFoundError:
        return None


def sweep(storage: Storage, out: str, markers: Iterable[Marker]) -> int:
    """Delete what killed attempts left: parts that no marker names, half-written local files. Counts them."""
    named = {part["url_suffix"] for marker in markers for part in marker["parts"]}
    orphans = []
    listed = list(storage.list(out))
    present = {found.url for found in listed}
    for found in listed:
        *_, top, kind, date, name = ["", "", "", *found.url.split("/")]
        # The list of duplicates is the judge's: it is made after the units, and the judge keeps it clean.
        measured = top == MEASUREMENTS and name.endswith(".parquet") and not name.startswith("duplicates-")
        partial = _PARTIAL.fullmatch(name)
        # This driver's lease may be written anew right now.
        if partial and date == LEASE and found.url.replace(name, partial[1]) in present:
            continue
        if (measured and "/".join((top, kind, date, name)) not in named) or partial:
            orphans.append(found.url)
    for url in orphans:
        storage.delete(url)
    return len(orphans)


def finish(storage: Storage, out: str, success: dict[str, Any]) -> None:
    """Write _SUCCESS, after everything else, and take progress.json away."""
    storage.delete(join(out, PROGRESS))
    _write_json(storage, join(out, SUCCESS), success)


def check_conservation(
    run: Run, markers: dict[str, Marker], counted: dict[str, Any], recounted: dict[str, Any]
) -> None:
    """Hold three countings against each other: rows read by the workers (markers), rows judged (`counted`)
    and rows in the files of OUT (`recounted`). read = audited + rejected in all of them.

    Raises JobError with the numbers when a row is missing or counted twice.
    """
    read = sum(marker["n_read"] for marker in markers.values())
    for counts in (counted, recounted):
        if read != counts["n_audited"] + counts["n_rejected"]:
            raise JobError(
                f"run {run.run_id}: {read} rows were read, but the tables hold {counts['n_audited']} audited "
                f"and {counts['n_rejected']} rejected; if files in OUT were deleted, choose another --out"
            )
    for name, count in recounted.items():
        if counted[name] != count:
            raise JobError(
                f"run {run.run_id}: {name} is {counted[name]} by the judge and {count} by the files in OUT; "
                "is another process writing there? Run it again"
            )


def _refuse_credentials(url: str) -> None:
    # URLs are stored with the run, printed and shown: neither user:password@ nor a signed link may be one.
    # Of a chain (`simplecache::s3://...`) each link.
    if re.search(r"(?:^|::)(?:[a-z0-9+.]+://[^/]*@|https?://.*\?)", url, re.IGNORECASE):
        raise ConfigError(
            f"{mask(url)}: a URL with credentials would be stored with the run; use the environment, "
            "a profile of the store, or the storage section of --config"
        )


def _refuse_another(found: Run, out: str, logs: list[str], config: Config, scorer: dict[str, Any]) -> None:
    then = {"logs": found.logs, "scorer.fingerprint": found.scorer["fingerprint"], **_flat(found.measured_by)}
    now = {
        "logs": logs,
        "scorer.fingerprint": scorer["fingerprint"],
        **_flat(_as_json(config.measured_by())),
    }
    _refuse_differences(out, then, now)


def _refuse_differences(out: str, then: dict[str, Any], now: dict[str, Any]) -> None:
    differences = [
        f"{key}: {json.dumps(then.get(key))} there, {json.dumps(now.get(key))} now"
        for key in sorted(then.keys() | now.keys())
        if then.get(key) != now.get(key)
    ]
    if differences:
        raise ConfigError(
            f"{mask(out)}: holds another run ({'; '.join(differences)}); "
            "choose another --out, delete this one, or repeat its settings"
        )


def _holds_anything(storage: Storage, out: str) -> bool:
    try:
        # A driver that died before it wrote run.json leaves its lease.
        return any(LEASE not in found.url.split("/")[-2:] for found in storage.list(out))
    except FileNotFoundError:
        return False


def _named(logs: list[str]) -> list[str]:
    return sorted({mask(absolute(log)) for log in logs})


def _as_json(tree: Any) -> Any:
    return json.loads(json.dumps(tree))


def _without_secrets(config: dict[str, Any]) -> dict[str, Any]:
    # Storage options may hold keys and tokens at any depth, so only what surely is none is kept.
    storage = {
        key: mask(value) if key == "endpoint_url" else "***" for key, value in config["storage"].items()
    }
    return {**config, "storage": storage}


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def _encode(tree: Any) -> bytes:
    return (json.dumps(tree, indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode()


def _write_json(storage: Storage, url: str, tree: Any) -> None:
    storage.write(url, _encode(tree))
