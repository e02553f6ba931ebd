"""An HTTP/1.1 proxy in front of an S3 server that does to requests what a plan says.

Clients are pointed at the proxy and sign its host and port. The Host header is passed on as it came: SigV4
covers it, and the server behind checks the signature against the header, not against its own address. Expect
is not signed and is answered here, or the client would wait for the server before it sends a body.

Requests and answers are held whole: what a fault does to them must not depend on how they were cut on
the way.
"""

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

from tests.chaos.plan import Kind, Plan

_HEAD_BYTES = 1 << 20  # longest header section; a listing's query fits many times
_NO_LINGER = struct.pack("ii", 1, 0)  # close with a reset (RST), not with an end (FIN)
_SLOW_DOWN = (
    b'<?xml version="1.0" encoding="UTF-8"?>\n'
    b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
)


@dataclass(frozen=True, slots=True)
class _Message:
    """A request or an answer: the lines before the empty one, and the body as it was sent."""

    start: bytes
    headers: tuple[bytes, ...]
    body: bytes = b""

    def header(self, name: bytes) -> bytes | None:
        """The value of a header, or None. `name` in lower case."""
        for line in self.headers:
            key, _, value = line.partition(b":")
            if key.strip().lower() == name:
                return value.strip()
        return None

    @property
    def head(self) -> bytes:
        """Everything before the body."""
        return b"\r\n".join((self.start, *self.headers, b"", b""))


class Proxy:
    """Forwards requests to `upstream` (http://host:port). `plan` may be exchanged between two runs."""

    def __init__(self, upstream: str) -> None:
        self._upstream = urlsplit(upstream)
        self.plan = Plan()
        self.endpoint = ""
        """Where it listens, once it does."""

    async def serve(self, started: threading.Event) -> None:
        """Listen on a free port of loopback until `stop` is called; then hang up on everybody."""
        self._loop, self._stopped = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._converse, "127.0.0.1", 0, limit=_HEAD_BYTES)
        self.endpoint = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        started.set()
        await self._stopped.wait()
        server.close()

    def stop(self) -> None:
        """End `serve`, from another thread."""
        self._loop.call_soon_threadsafe(self._stopped.set)

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Everything that one client says on one connection."""
        # The client was killed or has hung up, or a test is over.
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while await self._exchange(reader, writer):
                pass
        writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """One request and its answer, or what the plan makes of them. Whether the connection goes on."""
        request = await _read_request(reader, writer)
        method, target, _ = request.start.decode("latin-1").split(" ", 2)
        fault = self.plan.meet(method, target)
        kind = fault and fault.kind
        if kind == Kind.RESET_BEFORE:
            _reset(writer)
            return False
        if kind == Kind.SLOW_DOWN:
            writer.write(_slow_down(with_body=method != "HEAD"))
            await writer.drain()
            return True
        answer = await self._forward(request, method)
        if kind == Kind.RESET_AFTER:
            _reset(writer)
            return False
        if kind == Kind.SLOW:
            await asyncio.sleep(fault.seconds)
        cut = kind == Kind.TRUNCATED
        writer.write(answer.head + (answer.body[: len(answer.body) // 2] if cut else answer.body))
        await writer.drain()
        return not cut and (answer.header(b"connection") or b"").lower() != b"close"

    async def _forward(self, request: _Message, method: str) -> _Message:
        """The server's answer, on a connection of its own: an idle one could be closed at any time."""
        where = self._upstream.hostname, self._upstream.port
        reader, writer = await asyncio.open_connection(*where, limit=_HEAD_BYTES)
        try:
            writer.write(request.head + request.body)
            await writer.drain()
            return await _read_answer(reader, method)
        finally:
            writer.close()


@contextlib.contextmanager
def run_proxy(upstream: str) -> Iterator[Proxy]:
    """A proxy in front of `upstream`, in a thread of its own."""
    proxy, started = Proxy(upstream), threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(proxy.serve(started)), daemon=True)
    thread.start()
    started.wait()
    try:
        yield proxy
    finally:
        proxy.stop()
        thread.join()


async def _read_request(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> _Message:
    message = await _read_head(reader)
    if (message.header(b"expect") or b"").lower() == b"100-continue":
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        kept = tuple(line for line in message.headers if not line.lower().startswith(b"expect:"))
        message = _Message(message.start, kept)
    return _Message(message.start, message.headers, await _read_body(message, reader))


async def _read_answer(reader: asyncio.StreamReader, method: str) -> _Message:
    message = await _read_head(reader)
    status = int(message.start.split(b" ", 2)[1])
    if method == "HEAD" or status in (204, 304):
        return message
    return _Message(message.start, message.headers, await _read_body(message, reader))


async def _read_head(reader: asyncio.StreamReader) -> _Message:
    start, *headers = (await reader.readuntil(b"\r\n\r\n"))[:-4].split(b"\r\n")
    return _Message(start, tuple(headers))


async def _read_body(message: _Message, reader: asyncio.StreamReader) -> bytes:
    """The body as it is on the wire: chunks keep their sizes. Neither header means that there is none."""
    if (message.header(b"transfer-encoding") or b"").lower() != b"chunked":
        return await reader.readexactly(int(message.header(b"content-length") or 0))
    body, size = bytearray(), -1
    while size != 0:
        line = await reader.readline()
        size = int(line.split(b";")[0], 16)
        body += line
        if size:
            body += await reader.readexactly(size + 2)
    while line != b"\r\n":  # trailers
        line = await reader.readline()
        body += line
    return bytes(body)


def _slow_down(*, with_body: bool) -> bytes:
    head = (
        "HTTP/1.1 503 Slow Down\r\nContent-Type: application/xml\r\n"
        f"Content-Length: {len(_SLOW_DOWN) if with_body else 0}\r\n\r\n"
    )
    return head.encode() + (_SLOW_DOWN if with_body else b"")


def _reset(writer: asyncio.StreamWriter) -> None:
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
    writer.transport.abort()
