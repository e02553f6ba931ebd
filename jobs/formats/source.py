"""Bytes of one stored object: decompressed on the way, and with store failures told from broken content."""

import gzip
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import BinaryIO

import pyarrow as pa

from jobs.storage import Storage

BLOCK_BYTES = 256 << 10
"""How much is read at a time, and about how much a remote store fetches ahead."""

MAX_EXPANSION = 200
"""How many times its size a compressed object may expand to, beyond FREE_EXPANSION_BYTES: logs come to 5 to
50, and what comes to more was made to fill a memory."""

FREE_EXPANSION_BYTES = 4 << 20

BROKEN = (OSError, EOFError, zlib.error, pa.ArrowException, UnicodeDecodeError)
"""What the decoders raise for broken content. Arrow says OSError too, hence `Source.failed`."""

Read = Callable[[int], bytes]


class Source:
    """An open object that remembers whether the last exception came from the store.

    Decoders call it as a plain file; who catches a decoder's error asks `failed` whether the bytes were
    wrong (a reject) or could not be had (raised on, because another try may succeed).
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.failed = False
        self.n_read = 0
        """Bytes that were read so far."""

    def read(self, size: int = -1) -> bytes:
        """At most `size` bytes (-1: all)."""
        self.failed = True
        data = self._file.read(size)
        self.failed = False
        self.n_read += len(data)
        return data

    def seek(self, offset: int, whence: int = 0) -> int:
        """Move to `offset`."""
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        """Where the next read starts."""
        return self._file.tell()

    def close(self) -> None:
        """Give the object back to the store."""
        self._file.close()

    @property
    def closed(self) -> bool:
        """Whether it was given back."""
        return self._file.closed

    def readable(self) -> bool:
        """Always."""
        return True

    def writable(self) -> bool:
        """Never."""
        return False

    def seekable(self) -> bool:
        """Always."""
        return True


@contextmanager
def open_source(storage: Storage, url: str, block_bytes: int = BLOCK_BYTES) -> Iterator[Source]:
    """Open one object. Raises what the store raises."""
    with closing(Source(storage.open(url, block_bytes=block_bytes))) as source:
        yield source


def compression_of(head: bytes) -> str | None:
    """Which compression the first bytes of an object show."""
    if head.startswith(b"\x1f\x8b"):
        return "gzip"
    return "zstd" if head.startswith(b"\x28\xb5\x2f\xfd") else None


def decoded(source: Source) -> Read:
    """A read function over the decompressed content, in bounded memory.

    The first bytes decide, not the name: stores and clients decompress `.gz` objects on their own at times.
    It may return less than it was asked for. Reading raises one of `BROKEN` where the content breaks off, or
    expands beyond all measure.
    """
    compression = compression_of(source.read(4))
    source.seek(0)
    if compression == "gzip":
        # Not `read`: it would lose what it has already decoded when it meets the break.
        return _bounded(gzip.GzipFile(fileobj=source, mode="rb").read1, source)
    if compression == "zstd":
        stream = pa.input_stream(source, compression="zstd")
        return _bounded(lambda size: stream.read(min(size, 4096)), source)  # what a break costs at most
    return source.read


def _bounded(read: Read, source: Source) -> Read:
    n_out = 0

    def read_on(size: int) -> bytes:
        nonlocal n_out
        data = read(size)
        n_out += len(data)
        if n_out > max(FREE_EXPANSION_BYTES, MAX_EXPANSION * source.n_read):
            raise EOFError(f"it expands to over {MAX_EXPANSION} times its size; unpack it to read it")
        return data

    return read_on


def one_line(error: BaseException, limit: int = 200) -> str:
    """An exception's message fit for a reject's detail."""
    return " ".join(str(error).split())[:limit] or type(error).__name__
