"""What a run reads: the frozen listing of its input files, and the work units that they are cut into."""

import hashlib
import json
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import islice
from pathlib import PurePosixPath
from typing import Any, Literal
from urllib.parse import unquote

from fsspec.utils import glob_translate

from jobs.config import Config, ReadConfig
from jobs.errors import ConfigError
from jobs.formats import SYSTEMS, read_rows
from jobs.formats.json_text import BOM
from jobs.formats.parquet import read_row_groups, read_schema
from jobs.formats.source import BLOCK_BYTES, BROKEN, compression_of, decoded, open_source
from jobs.formats.systems import recognise_schema, recognise_text
from jobs.storage import Object, Storage, mask

Format = Literal["jsonl", "json", "csv", "parquet"]
Compression = Literal["gzip", "zstd"]

SUFFIXES: dict[str, Format] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".jsonlines": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".parq": "parquet",
    ".pq": "parquet",
}
COMPRESSIONS: dict[str, Compression] = {".gz": "gzip", ".gzip": "gzip", ".zst": "zstd", ".zstd": "zstd"}
MAX_SLICES = 16
"""Slices of one Parquet row group: each decodes the group again up to its end."""

_UNFINISHED = (".crc", ".partial", ".tmp", ".inprogress")
_PARTITION_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")
_CONCURRENT_READS = 16  # looks into files wait for the store, not for the CPU

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


@dataclass(frozen=True, slots=True)
class WorkUnit:
    """A slice of one file: what one worker reads, and what is done again when it fails.

    `start:stop` are byte offsets in plain JSONL (the unit owns the lines that start there), rows of
    `row_group` in Parquet, and the whole file elsewhere and wherever there are spans. `row_group` is None in
    a Parquet file of spans, or whose footer could not be read. `max_rows` is set where `read.limit` ends in
    this unit.
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

    def to_json(self) -> dict[str, Any]:
        """A tree for json.dumps."""
        return asdict(self)

    @classmethod
    def from_json(cls, tree: dict[str, Any]) -> "WorkUnit":
        """The unit that `to_json` wrote."""
        return cls(**tree)


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

    def look(entry: tuple[Object, bool]) -> InputFile | None:
        found, named = entry
        head = cache(lambda: _head(found, storage, read))
        kind = _kind_of(found, head, read)
        if kind is None and not named:
            return None
        if kind is None:
            raise ConfigError(
                f"{mask(found.url)}: neither JSON lines, JSON, CSV nor Parquet by its name or first bytes; "
                "say which with --set read.format=..."
            )
        system = _system_of(found, kind[0], head, storage, read)
        return InputFile(found.url, found.size, found.etag, *kind, partitions_of(found.url), system)

    with ThreadPoolExecutor(_CONCURRENT_READS) as pool:
        looked = list(pool.map(look, [objects[url] for url in sorted(objects)]))
    files = [file for file in looked if file is not None]
    strangers = [url for url, file in zip(sorted(objects), looked, strict=True) if file is None]
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

    Reads Parquet footers, and with `read.limit` the rows up to it. Raises what the store raises.
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


Head = Callable[[], tuple[bytes, Compression | None]]
"""The beginning of a file (`_head`), fetched when it is first asked for."""


def _kind_of(found: Object, look: Head, read: ReadConfig) -> tuple[Format, Compression | None] | None:
    """Format and compression by name, and by the first bytes where the name does not tell; None: no log."""
    suffixes = [suffix.lower() for suffix in PurePosixPath(found.url.split("?", 1)[0]).suffixes]
    compression = COMPRESSIONS.get(suffixes[-1]) if suffixes else None
    if compression:
        suffixes.pop()
    by_name = SUFFIXES.get(suffixes[-1]) if suffixes else None
    forced: Format | None = None if read.format in ("auto", *SYSTEMS) else read.format
    if by_name is not None and forced:
        return forced, compression
    if by_name is not None and by_name != "json":
        return by_name, compression
    head, shown = look()
    if forced:
        return forced, shown
    if by_name == "json":
        return ("jsonl" if _is_lines(head) else "json"), shown or compression
    if head.startswith(b"PAR1"):
        return "parquet", None
    text = head.removeprefix(BOM).lstrip()
    if re.match(rb'\{\s*["}]', text):
        return ("jsonl" if _is_lines(head) else "json"), shown
    return ("json", shown) if re.match(rb"\[\s*[\{\]]", text) else None


def _system_of(found: Object, form: Format, look: Head, storage: Storage, read: ReadConfig) -> str | None:
    """The tracing system that the file's first rows, or columns, show; none where rows were asked for."""
    if read.format != "auto":
        return read.format if read.format in SYSTEMS else None
    if form == "parquet":
        schema = read_schema(storage, found.url)
        return None if schema is None else recognise_schema(schema)
    return recognise_text(look()[0], form)


def _head(found: Object, storage: Storage, read: ReadConfig) -> tuple[bytes, Compression | None]:
    """The decompressed beginning, long enough to hold the first line and the start of the second."""
    with open_source(storage, found.url) as source:
        compression = compression_of(source.read(4))
        source.seek(0)
        head = bytearray()
        try:
            pull = decoded(source)
            while len(head) <= read.max_record_bytes and (block := pull(BLOCK_BYTES)):
                head += block
                if b"\n" in block and b"\n" in head.strip():
                    break
        except BROKEN:
            if source.failed:
                raise
        return bytes(head), compression


def _is_lines(head: bytes) -> bool:
    """Whether a text that begins with `{` is one object a line, and not one object over several lines."""
    first, _, rest = head.removeprefix(BOM).lstrip().partition(b"\n")
    return first.startswith(b"{") and first.rstrip().endswith(b"}") and rest.lstrip().startswith(b"{")


def _cut_all(
    files: Sequence[InputFile], storage: Storage, read: ReadConfig, lazily: bool
) -> Iterator[WorkUnit]:
    remaining = iter(files)
    with ThreadPoolExecutor(_CONCURRENT_READS) as pool:
        while some := list(islice(remaining, 1 if lazily else 4 * _CONCURRENT_READS)):
            footers = pool.map(
                lambda file: read_row_groups(storage, file.url) if _by_groups(file) else None, some
            )
            for file, row_groups in zip(some, footers, strict=True):
                for start, stop, row_group in _ranges(file, row_groups, read):
                    where = (file.url, file.etag, file.format, file.compression, file.partitions)
                    yield WorkUnit("", *where, start, stop, row_group, system=file.system)


def _by_groups(file: InputFile) -> bool:
    # Spans of one trace may stand in any row group, so a file of them is read as one.
    return file.format == "parquet" and file.system is None


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
    what += [unit.system] if unit.system else []
    digest = hashlib.sha256(json.dumps(what).encode()).hexdigest()
    return replace(unit, unit_id=f"{sequence:06d}-{digest[:8]}")
