"""What kind of file a log is: format, compression and tracing system, told from its name and first bytes."""

import re
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Literal

from jobs.config import ReadConfig
from jobs.formats.json_text import BOM
from jobs.formats.parquet import read_schema
from jobs.formats.source import BLOCK_BYTES, BROKEN, compression_of, decoded, open_source
from jobs.formats.systems import SYSTEMS, recognise_schema, recognise_text
from jobs.storage import Storage

if TYPE_CHECKING:
    from jobs.listing import WorkUnit

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


@dataclass(frozen=True, slots=True)
class Kind:
    """How a file is read."""

    format: Format
    compression: Compression | None
    system: str | None
    """The tracing system whose spans it holds (a key of SYSTEMS); None: rows of one answer each."""


def find_kind(url: str, storage: Storage, read: ReadConfig) -> Kind | None:
    """The kind of one file; None where neither its name nor its first bytes are those of a log.

    Opens the file, unless name and settings say everything. Raises what the store raises.
    """
    by_name, compression = _by_name(url)
    forced: Format | None = None if read.format in ("auto", *SYSTEMS) else read.format
    system = read.format if read.format in SYSTEMS else None
    if by_name is not None and forced:
        return Kind(forced, compression, None)
    if by_name not in (None, "json") and system:
        return Kind(by_name, compression, system)
    if by_name == "parquet":
        return Kind("parquet", compression, _system_of_columns(url, storage))
    head, shown = _head(url, storage, read)
    if forced:
        return Kind(forced, shown, None)
    form: Format
    if by_name == "json":
        form, compression = "jsonl" if _is_lines(head) else "json", shown or compression
    elif by_name is not None:
        form = by_name
    elif head.startswith(b"PAR1"):
        return Kind("parquet", None, system or _system_of_columns(url, storage))
    elif re.match(rb"\{\s*[\"}]|\[\s*[{\]]", head.removeprefix(BOM).lstrip()):
        form, compression = "jsonl" if _is_lines(head) else "json", shown
    else:
        return None
    return Kind(form, compression, system or recognise_text(head, form))


def group_of(url: str) -> tuple[str, str]:
    """Folder and suffixes: files that share both were mostly written by one program, so are of one kind.

    Digits do not count: `log.1` and `log.2` are of one group.
    """
    folder, _, name = url.split("?", 1)[0].rpartition("/")
    suffixes = [suffix.lower() for suffix in PurePosixPath(name).suffixes]
    kept = suffixes[-2:] if suffixes and suffixes[-1] in COMPRESSIONS else suffixes[-1:]
    return folder, re.sub(r"\d+", "", "".join(kept))


def as_found(unit: "WorkUnit", storage: Storage, read: ReadConfig) -> "WorkUnit":
    """A unit of one whole file of a guessed kind, with the kind that the file itself shows.

    One that shows none keeps the guess: its reader says in a reject what is wrong with it. Raises what the
    store raises.
    """
    kind = find_kind(unit.url, storage, read) if unit.guessed else None
    if kind is None:
        return unit
    return replace(unit, format=kind.format, compression=kind.compression, system=kind.system)


def _by_name(url: str) -> tuple[Format | None, Compression | None]:
    suffixes = [suffix.lower() for suffix in PurePosixPath(url.split("?", 1)[0]).suffixes]
    compression = COMPRESSIONS.get(suffixes[-1]) if suffixes else None
    if compression:
        suffixes.pop()
    return (SUFFIXES.get(suffixes[-1]) if suffixes else None), compression


def _system_of_columns(url: str, storage: Storage) -> str | None:
    schema = read_schema(storage, url)
    return None if schema is None else recognise_schema(schema)


def _head(url: str, storage: Storage, read: ReadConfig) -> tuple[bytes, Compression | None]:
    """The decompressed beginning, long enough to hold the first line and the start of the second."""
    with open_source(storage, url) as source:
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
