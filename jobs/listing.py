"""What a run reads: the frozen listing of its input files, and the work units that they are cut into.

A prefix may hold 100,000 objects. The listing opens a few of each group of files and every file that will be
cut; of the others it guesses the kind, and whoever reads them looks again (`formats.kind.as_found`).
"""

import hashlib
import json
import logging
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import islice
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import unquote

from fsspec.utils import glob_translate

from jobs.config import Config, ReadConfig
from jobs.errors import ConfigError, JobError
from jobs.formats import read_rows
from jobs.formats.kind import Compression, Format, Kind, find_kind, group_of
from jobs.formats.parquet import read_row_groups
from jobs.storage import Object, Storage, mask

MAX_SLICES = 16
"""Slices of one Parquet row group: each decodes the group again up to its end."""
MAX_FILES = 256
"""Small files in one unit: opening them may take longer than reading them."""

_UNFINISHED = (".crc", ".partial", ".tmp", ".inprogress")
_PARTITION_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")
_CONCURRENT_READS = 16  # looks into files wait for the store, not for the CPU
_LOOKED_AT = 4  # small files of a group
_AT_ONCE = 64 * _CONCURRENT_READS  # futures are larger than what they wait for

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class InputFile:
    """One object to read, as it was when the run was planned. `partitions` are its Hive folders."""

    url: str
    size: int
    etag: str
    format: Format
    compression: Compression | None
    partitions: dict[str, str]
    system: str | None = None
    """The tracing system whose spans it holds (a key of SYSTEMS); None: rows of one answer each."""
    guessed: bool = False
    """Its kind is that of its neighbours: nobody has looked into it yet."""


@dataclass(frozen=True, slots=True)
class WorkUnit:
    """A slice of one file, or several small files: what one worker reads, and does again when it fails.

    `start:stop` are byte offsets in plain JSONL (the unit owns the lines that start there), rows of
    `row_group` in Parquet, and the whole file elsewhere and wherever there are spans. `row_group` is None in
    a Parquet file that is read whole: it is small, or holds spans, or its footer could not be read.
    `max_rows` is set where `read.limit` ends in this unit.
    """

    unit_id: str
    url: str
    etag: str
    format: Format
    compression: Compression | None
    partitions: dict[str, str]
    start: int
    stop: int
    row_group: int | None = None
    max_rows: int | None = None
    system: str | None = None
    guessed: bool = False
    """The kind of some of its files is that of their neighbours: their reader looks again."""
    more: tuple[tuple[str, str, int], ...] = ()
    """URL, etag and size of the files behind the first; all are whole and have the same partitions."""

    def to_json(self) -> dict[str, Any]:
        """A tree for json.dumps."""
        return asdict(self)

    @classmethod
    def from_json(cls, tree: dict[str, Any]) -> "WorkUnit":
        """The unit that `to_json` wrote."""
        return cls(**tree | {"more": tuple((url, etag, size) for url, etag, size in tree["more"])})

    def files(self) -> "Iterator[WorkUnit]":
        """Each file as a unit of its own, in order; they share the id, and `max_rows` is for all of them."""
        yield replace(self, more=())
        for url, etag, size in self.more:
            yield replace(self, url=url, etag=etag, start=0, stop=size, more=())

    def check_unchanged(self, storage: Storage) -> None:
        """Raise JobError for a file that is not what was listed, FileNotFoundError for one that is gone."""
        with ThreadPoolExecutor(_CONCURRENT_READS) as pool:
            for file, found in pool.map(lambda file: (file, storage.stat(file.url)), self.files()):
                if found.etag != file.etag:
                    raise JobError(
                        f"{mask(file.url)}: changed since the run began; start anew with another --out"
                    )


def freeze(logs: Sequence[str], storage: Storage, read: ReadConfig) -> list[InputFile]:
    """The files behind `logs` (objects, folders, prefixes or globs), unique and sorted by URL.

    Below a folder, hidden and underscored names, unfinished writes, Langfuse manifests and files that are no
    logs are left out (the last with a warning); a file named in full is always read. Raises ConfigError where
    an argument leads to nothing.
    """
    objects: dict[str, tuple[Object, bool]] = {}
    for argument in logs:
        listed, root = _list(argument, storage)
        if not listed:
            raise ConfigError(f"{mask(argument)}: nothing there; check the spelling and the credentials")
        paths = [storage.filesystem(found.url)[1] for found in listed]
        readable = 0
        for found, path in zip(listed, paths, strict=True):
            named = path == root
            if named or not _is_hidden(path.removeprefix(root)):
                objects[found.url] = (found, named or objects.get(found.url, (found, False))[1])
                readable += 1
        if not readable:
            raise ConfigError(
                f"{mask(argument)}: {len(listed)} objects, all of them hidden, unfinished or manifests; "
                "name a file in full to read it all the same"
            )

    names = sorted(objects)
    kinds = _find_kinds([objects[url] for url in names], storage, read)
    folders = cache(lambda folder: partitions_of(f"{folder}/*"))  # one for all files of a folder
    files: list[InputFile] = []
    strangers: list[str] = []
    for url in names:
        found, named = objects[url]
        kind, guessed = kinds[url]
        if kind is not None:
            partitions = folders(group_of(url)[0])
            what = (kind.format, kind.compression, partitions, kind.system)
            files.append(InputFile(url, found.size, found.etag, *what, guessed))
        elif named:
            raise ConfigError(
                f"{mask(url)}: neither JSON lines, JSON, CSV nor Parquet by its name or first bytes; "
                "say which with --set read.format=..."
            )
        else:
            strangers.append(url)
    if not files:
        raise ConfigError(
            f"{', '.join(map(mask, logs))}: {len(strangers)} objects, none of them JSON lines, JSON, CSV or "
            "Parquet by its name or first bytes; say which with --set read.format=..."
        )
    if strangers:
        log.warning(
            "%d files are no logs and are not read, the first is %s", len(strangers), mask(strangers[0])
        )
    return files


def cut(files: Sequence[InputFile], storage: Storage, read: ReadConfig) -> Iterator[WorkUnit]:
    """The work units of a frozen listing, in its order; the same listing gives the same units.

    Reads the footers of large Parquet files, and with `read.limit` the rows up to it. Raises what the store
    raises.
    """
    left = read.limit
    for sequence, unit in enumerate(_cut_all(files, storage, read, lazily=left is not None)):
        if left is None:
            yield _named(unit, sequence)
            continue
        capped = replace(unit, max_rows=left)
        n_rows = sum(1 for _ in read_rows(capped, storage, Config(read=read)))
        yield _named(capped if n_rows == left else unit, sequence)
        left -= n_rows
        if left == 0:
            return


def partitions_of(url: str) -> dict[str, str]:
    """The `name=value` folders of a URL, values decoded; the innermost of two with one name wins."""
    partitions: dict[str, str] = {}
    for folder in PurePosixPath(url.split("?", 1)[0]).parts[:-1]:
        name, equals, value = folder.partition("=")
        value = unquote(value)
        if equals and _PARTITION_NAME.fullmatch(name) and value.isprintable() and 0 < len(value) <= 256:
            partitions[name] = value
    return {name: value for name, value in partitions.items() if value != "__HIVE_DEFAULT_PARTITION__"}


def _list(argument: str, storage: Storage) -> tuple[list[Object], str]:
    """The objects behind one argument, and the fixed part of its path, below which names are judged."""
    fs_path = storage.filesystem(argument)[1].rstrip("/")
    wildcard = re.search(r"[*?\[]", argument)
    try:
        listed = list(storage.list(argument))
        if not listed and wildcard:
            # A glob may end at folders (`runs/day=*`): what is below them counts as well.
            patterns = [re.compile(glob_translate(fs_path + tail)) for tail in ("", "/**")]
            fixed = argument[: wildcard.start()].rpartition("/")[0] or argument[:1].strip("*?[") or "."
            fs_path = storage.filesystem(fixed)[1].rstrip("/")
            listed = [
                found
                for found in storage.list(fixed)
                if any(pattern.match(storage.filesystem(found.url)[1]) for pattern in patterns)
            ]
    except FileNotFoundError:
        listed = []
    except PermissionError as error:
        raise ConfigError(f"{mask(argument)}: access denied ({error}); check the credentials") from None
    return [found for found in listed if not found.url.endswith("/")], fs_path


def _is_hidden(below: str) -> bool:
    parts = [part for part in below.split("/") if part]
    return (
        any(part.startswith(".") or (part.startswith("_") and "=" not in part) for part in parts)
        or parts[-1].lower().endswith(_UNFINISHED)
        or (parts[-1].endswith(".json") and parts[-2:-1] == ["manifests"])
    )


def _find_kinds(
    entries: Sequence[tuple[Object, bool]], storage: Storage, read: ReadConfig
) -> dict[str, tuple[Kind | None, bool]]:
    """The kind of each object (None: no log), and whether it was guessed from its group.

    Looked into are what the user named, what is large enough to be cut, and a few of the other files of each
    group. Where these are not all of one kind, the whole group is looked into.
    """
    groups: defaultdict[tuple[str, str], list[Object]] = defaultdict(list)
    for found, _ in entries:
        groups[group_of(found.url)].append(found)
    named = {found.url for found, named in entries if named}
    kinds: dict[str, tuple[Kind | None, bool]] = {}

    def look(pool: ThreadPoolExecutor, some: Iterable[Object]) -> None:
        urls = (found.url for found in some)
        while now := list(islice(urls, _AT_ONCE)):
            for url, kind in zip(now, pool.map(lambda url: find_kind(url, storage, read), now), strict=True):
                kinds[url] = kind, False

    with ThreadPoolExecutor(_CONCURRENT_READS) as pool:
        for group in groups.values():
            look(pool, (found for found in group if found.url in named or found.size > read.unit_bytes))
            left = [found for found in group if found.url not in kinds]
            look(pool, _spread([found for found in left if found.size] or left))
            shown = {kinds[found.url][0] for found in group if found.url in kinds}
            left = [found for found in left if found.url not in kinds]
            if len(shown) > 1 or None in shown:
                look(pool, left)
            else:
                (kind,) = shown
                kinds |= dict.fromkeys((found.url for found in left), (kind, True))
    return kinds


def _spread(group: Sequence[Object]) -> list[Object]:
    """A few of them, the first and the last included: a writer's version may change in the middle."""
    last, n = len(group) - 1, min(_LOOKED_AT, len(group))
    return [group[i * last // max(n - 1, 1)] for i in range(n)]


def _cut_all(
    files: Sequence[InputFile], storage: Storage, read: ReadConfig, lazily: bool
) -> Iterator[WorkUnit]:
    remaining = _together(files, read)
    with ThreadPoolExecutor(_CONCURRENT_READS) as pool:
        while some := list(islice(remaining, 1 if lazily else 4 * _CONCURRENT_READS)):
            footers = pool.map(
                lambda group: read_row_groups(storage, group[0].url) if _by_groups(group[0], read) else None,
                some,
            )
            for (file, *others), row_groups in zip(some, footers, strict=True):
                where = (file.url, file.etag, file.format, file.compression, file.partitions)
                more = tuple((other.url, other.etag, other.size) for other in others)
                guessed = any(each.guessed for each in (file, *others))
                for start, stop, row_group in _ranges(file, row_groups, read):
                    yield WorkUnit(
                        "", *where, start, stop, row_group, system=file.system, guessed=guessed, more=more
                    )


def _together(files: Sequence[InputFile], read: ReadConfig) -> Iterator[list[InputFile]]:
    """Neighbours in the listing that are read alike, as long as they fit into one unit; others alone."""
    group: list[InputFile] = []
    n_bytes = 0
    for file in files:
        fits = n_bytes + file.size <= read.unit_bytes and len(group) < MAX_FILES
        if group and not (fits and _alike(file, group[0])):
            yield group
            group, n_bytes = [], 0
        group.append(file)
        n_bytes += file.size
    if group:
        yield group


def _alike(one: InputFile, other: InputFile) -> bool:
    names = ("format", "compression", "system", "partitions")
    return all(getattr(one, name) == getattr(other, name) for name in names)


def _by_groups(file: InputFile, read: ReadConfig) -> bool:
    # Spans of one trace may stand in any row group, so a file of them is read as one. So is a small one,
    # whose footer would be one more request.
    return file.format == "parquet" and file.system is None and file.size > read.unit_bytes


def _ranges(
    file: InputFile, row_groups: list[int] | None, read: ReadConfig
) -> Iterator[tuple[int, int, int | None]]:
    if row_groups is not None:
        for group, n_rows in enumerate(row_groups):
            n_slices = min(MAX_SLICES, -(-n_rows // read.unit_rows))
            for i in range(n_slices):
                yield i * n_rows // n_slices, (i + 1) * n_rows // n_slices, group
    elif file.format == "jsonl" and file.compression is None and file.size > 0 and file.system is None:
        for start in range(0, file.size, read.unit_bytes):
            yield start, min(start + read.unit_bytes, file.size), None
    else:
        yield 0, file.size, None


def _named(unit: WorkUnit, sequence: int) -> WorkUnit:
    what = [unit.url, unit.etag, unit.format, unit.start, unit.stop, unit.row_group, unit.max_rows]
    what += [part for part in (unit.system, unit.more) if part]
    digest = hashlib.sha256(json.dumps(what).encode()).hexdigest()
    return replace(unit, unit_id=f"{sequence:06d}-{digest[:8]}")
