"""Where bytes come from and go to: any fsspec URL, one whole put per object."""

import errno
import os
import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, TypeVar
from urllib.parse import urlsplit, urlunsplit

import fsspec
from fsspec.implementations.local import LocalFileSystem

from jobs.errors import ConfigError, JobError
from jobs.patience import persist, refused

T = TypeVar("T")

_S3 = ("s3", "s3a")
# Three layers try again. botocore knows every answer that asks for it, and waits for random times; s3fs also
# takes up a body that breaks off; `persist` goes on where both have given up. With their own settings (5
# times 5 times 5 for a read) a dead server would be found out in minutes.
_BOTOCORE_RETRIES = {"mode": "standard", "total_max_attempts": 5}
_S3FS_TRIES = 3


@dataclass(frozen=True, slots=True)
class Object:
    """One listed object. `etag` changes when its bytes do (size and mtime where the store has no ETag)."""

    url: str
    size: int
    etag: str


@dataclass(frozen=True)
class Storage:
    """Access to local folders, S3 and every other fsspec protocol.

    Small and picklable: it holds options, and makes the filesystem where it is used, because an S3 session
    must not cross a process. Credentials come from the ordinary chain of the store, never from a URL.

    What fails for a while is tried again (`jobs.patience`). Every method raises JobError where a remote store
    stays out of reach, refuses access or has no such bucket, and where a local disk is full.
    """

    options: dict[str, Any] = field(default_factory=dict)
    permit: Callable[[], None] | None = field(default=None, compare=False, repr=False)
    """Called before anything is written or deleted; what it raises forbids it. Does not cross a process."""

    def filesystem(self, url: str) -> tuple[Any, str]:
        """The fsspec filesystem of `url` and the path in it. Raises ConfigError for an unknown protocol."""
        protocol = url.split("://", 1)[0] if "://" in url else "file"
        options = {} if protocol == "file" else dict(self.options)
        if protocol in _S3:
            options.setdefault("use_listings_cache", False)
            options["config_kwargs"] = {"retries": _BOTOCORE_RETRIES} | options.get("config_kwargs", {})
            # The AWS spelling works for every S3 server, e.g. a test server on loopback.
            if "endpoint_url" not in options and os.environ.get("AWS_ENDPOINT_URL"):
                options["endpoint_url"] = os.environ["AWS_ENDPOINT_URL"]
        try:
            fs, path = fsspec.core.url_to_fs(url, **options)
        except (ValueError, ImportError) as error:
            raise ConfigError(f"{mask(url)}: {protocol}:// cannot be opened here ({error})") from None
        if protocol in _S3:
            fs.retries = _S3FS_TRIES
        return fs, path

    def list(self, prefix: str) -> Iterator[Object]:
        """Every object at or below `prefix`, sorted by URL. Yields nothing when there is none."""
        fs, found = self._call(prefix, lambda fs, path: (fs, fs.find(path, withdirs=False, detail=True)))
        for name in sorted(found):
            info = found[name]
            yield Object(fs.unstrip_protocol(name) if _is_remote(fs) else name, info["size"], _etag(info))

    def stat(self, url: str) -> Object:
        """Size and etag of one object. Raises FileNotFoundError."""
        info = self._call(url, lambda fs, path: fs.info(path))
        return Object(url, info["size"], _etag(info))

    def open(self, url: str, block_bytes: int | None = None) -> BinaryIO:
        """Open for reading, seekable. Never used for writing: a failed write would publish half a file.

        `block_bytes` is what a remote store fetches ahead; None leaves it to the store (50 MB on S3).
        """
        options = {} if block_bytes is None else {"block_size": block_bytes}
        file = self._call(url, lambda fs, path: fs.open(path, "rb", **options))
        cache = getattr(file, "cache", None)
        if cache is not None:  # fsspec's, which all reads of a remote file go through
            fetch = cache.fetcher
            cache.fetcher = lambda start, end: persist(lambda: fetch(start, end), mask(url))
        return file

    def read(self, url: str, size: int | None = None) -> bytes:
        """The whole object. Raises FileNotFoundError.

        `size`: how many bytes it was listed with; fewer are taken for a broken connection.
        """

        def read_whole(fs: Any, path: str) -> bytes:
            # One GET and no HEAD before it: the answer to a HEAD does not say why it was refused.
            data = fs.cat_file(path, **({"max_concurrency": 1} if _is_s3(fs) else {}))
            if size is not None and len(data) < size:
                raise ConnectionError(f"{len(data)} of {size} bytes arrived")
            return data

        return self._call(url, read_whole)

    def write(self, url: str, data: bytes) -> None:
        """Publish `data` at `url` in one step: readers see all of it or nothing."""
        self._permit()

        def put(fs: Any, path: str) -> None:
            if _is_remote(fs):
                fs.pipe_file(path, data)
            else:
                with _partial(Path(path), data) as partial:
                    partial.replace(path)

        self._call(url, put)

    def create(self, url: str, data: bytes) -> bool:
        """Publish `data` at `url` if nothing is there. Returns whether `data` is what is there now.

        Of several callers at once with different data one gets True, on a disk with hard links and on an S3
        server that honours If-None-Match. Elsewhere the last of them may replace what the first has put:
        callers must live with that, by putting what is as good as the other's, or by looking again.
        """
        self._permit()

        def put(fs: Any, path: str) -> bool:
            if _is_s3(fs):
                try:
                    fs.pipe_file(path, data, mode="create")
                except OSError as error:
                    if not refused(error):
                        raise
                    return False
            elif _is_remote(fs):
                if fs.exists(path):
                    return False
                fs.pipe_file(path, data)
            else:
                return _create_file(Path(path), data)
            return True

        # Refused may also mean that our own put had succeeded and its answer was lost.
        return self._call(url, put) or self.read(url) == data

    def creates_atomically(self, url: str) -> bool:
        """Whether `create` can be relied on at this URL to let one of several callers win."""
        fs, _ = self.filesystem(url)
        return _is_s3(fs) or not _is_remote(fs)

    def exists(self, url: str) -> bool:
        """Whether there is an object at exactly this URL."""
        try:
            # Not fs.isfile(): it takes every error for "no".
            return self._call(url, lambda fs, path: fs.info(path)["type"] == "file")
        except FileNotFoundError:
            return False

    def delete(self, url: str) -> None:
        """Remove one object; not being there is fine."""
        self._permit()
        try:
            self._call(url, lambda fs, path: fs.rm_file(path))
        except FileNotFoundError:
            return

    def _permit(self) -> None:
        if self.permit is not None:
            self.permit()

    def _call(self, url: str, call: Callable[[Any, str], T]) -> T:
        fs, path = self.filesystem(url)
        fs.invalidate_cache()
        if _is_remote(fs):
            return persist(lambda: call(fs, path), mask(url))
        try:
            return call(fs, path)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise JobError(
                f"{path}: the disk is full; make room and run the same command again, what was done is kept"
            ) from None


def join(prefix: str, *parts: str) -> str:
    """Append path parts to a URL or a local folder."""
    return "/".join([prefix.rstrip("/"), *parts])


def mask(url: str) -> str:
    """The URL without credentials and query, fit for a log, a manifest or a page."""
    return "::".join(map(_mask_link, url.split("::"))) if "://" in url else url


def _mask_link(url: str) -> str:
    if "://" not in url:
        return url
    scheme, host, path, _, _ = urlsplit(url)
    return urlunsplit((scheme, re.sub(r"^.*@", "***@", host), path, "", ""))


def _is_remote(fs: Any) -> bool:
    return not isinstance(fs, LocalFileSystem)


def _is_s3(fs: Any) -> bool:
    return "s3" in fs.protocol


@contextmanager
def _partial(target: Path, data: bytes) -> Iterator[Path]:
    """A complete file beside `target` that is not yet it, and is gone afterwards."""
    target.parent.mkdir(parents=True, exist_ok=True)
    # Random: on a shared disk two containers may both be process 1.
    partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}.partial")
    try:
        with partial.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        yield partial
    finally:
        partial.unlink(missing_ok=True)


def _create_file(target: Path, data: bytes) -> bool:
    if target.exists():
        return False
    with _partial(target, data) as partial:
        try:
            os.link(partial, target)  # unlike a rename it fails where there is a file
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS):
                raise
            partial.replace(target)  # a mounted bucket has no links: as good as a store without `create`
    return True


def _etag(info: dict[str, Any]) -> str:
    for key in ("ETag", "etag", "e_tag", "md5Hash", "content_md5"):
        if info.get(key):
            return str(info[key]).strip('"')
    return f"{info['size']}-{info.get('mtime', info.get('LastModified', ''))}"
