"""Where bytes come from and go to: any fsspec URL, one whole put per object."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import urlsplit, urlunsplit

import fsspec
from fsspec.implementations.local import LocalFileSystem

from jobs.errors import ConfigError


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
    """

    options: dict[str, Any] = field(default_factory=dict)

    def filesystem(self, url: str) -> tuple[Any, str]:
        """The fsspec filesystem of `url` and the path in it. Raises ConfigError for an unknown protocol."""
        protocol = url.split("://", 1)[0] if "://" in url else "file"
        options = {} if protocol == "file" else dict(self.options)
        if protocol in ("s3", "s3a"):
            options.setdefault("use_listings_cache", False)
            # The AWS spelling works for every S3 server, e.g. a test server on loopback.
            if "endpoint_url" not in options and os.environ.get("AWS_ENDPOINT_URL"):
                options["endpoint_url"] = os.environ["AWS_ENDPOINT_URL"]
        try:
            return fsspec.core.url_to_fs(url, **options)
        except (ValueError, ImportError) as error:
            raise ConfigError(f"{mask(url)}: {protocol}:// cannot be opened here ({error})") from None

    def list(self, prefix: str) -> Iterator[Object]:
        """Every object at or below `prefix`, sorted by URL. Yields nothing when there is none."""
        fs, path = self.filesystem(prefix)
        fs.invalidate_cache()
        found = fs.find(path, withdirs=False, detail=True)
        for name in sorted(found):
            info = found[name]
            yield Object(fs.unstrip_protocol(name) if _is_remote(fs) else name, info["size"], _etag(info))

    def stat(self, url: str) -> Object:
        """Size and etag of one object. Raises FileNotFoundError."""
        fs, path = self.filesystem(url)
        fs.invalidate_cache()
        info = fs.info(path)
        return Object(url, info["size"], _etag(info))

    def open(self, url: str, block_bytes: int | None = None) -> BinaryIO:
        """Open for reading, seekable. Never used for writing: a failed write would publish half a file.

        `block_bytes` is what a remote store fetches ahead; None leaves it to the store (50 MB on S3).
        """
        fs, path = self.filesystem(url)
        return fs.open(path, "rb", **({} if block_bytes is None else {"block_size": block_bytes}))

    def read(self, url: str) -> bytes:
        """The whole object. Raises FileNotFoundError."""
        fs, path = self.filesystem(url)
        return fs.cat_file(path)

    def write(self, url: str, data: bytes) -> None:
        """Publish `data` at `url` in one step: readers see all of it or nothing."""
        fs, path = self.filesystem(url)
        if _is_remote(fs):
            fs.pipe_file(path, data)
            return
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
        with partial.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(target)

    def exists(self, url: str) -> bool:
        """Whether there is an object at exactly this URL."""
        fs, path = self.filesystem(url)
        fs.invalidate_cache()
        return fs.isfile(path)

    def delete(self, url: str) -> None:
        """Remove one object; not being there is fine."""
        fs, path = self.filesystem(url)
        try:
            fs.rm_file(path)
        except FileNotFoundError:
            return


def join(prefix: str, *parts: str) -> str:
    """Append path parts to a URL or a local folder."""
    return "/".join([prefix.rstrip("/"), *parts])


def mask(url: str) -> str:
    """The URL without credentials and query, fit for a log, a manifest or a page."""
    if "://" not in url:
        return url
    scheme, host, path, _, _ = urlsplit(url)
    return urlunsplit((scheme, re.sub(r"^.*@", "***@", host), path, "", ""))


def _is_remote(fs: Any) -> bool:
    return not isinstance(fs, LocalFileSystem)


def _etag(info: dict[str, Any]) -> str:
    for key in ("ETag", "etag", "e_tag", "md5Hash", "content_md5"):
        if info.get(key):
            return str(info[key]).strip('"')
    return f"{info['size']}-{info.get('mtime', info.get('LastModified', ''))}"
