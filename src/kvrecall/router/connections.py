"""Connections to instances, kept between requests: HTTP/1.1 and 1.0, one request at a time on each.

A general client took 1.1 of the 3.8 ms that a request of 100 KB cost the router.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections import deque
from collections.abc import AsyncGenerator
from functools import cached_property, partial
from typing import Any

import httptools
import httpx

from kvrecall.server.connections import Limit

_LONGEST_HEAD = 100 << 10  # bytes of a reply before its body, behind it, and between its chunks
_LONGEST_HEADER = 64 << 10
_MOST_BUFFERED = 256 << 10  # bytes of a reply that the client has not taken
KEPT_S = 4.0  # servers close a silent connection after 5 and more
_MOST_KEPT = 256  # to an instance

Headers = list[tuple[bytes, bytes]]


class BrokenReplyError(Exception):
    """What an instance sent is no HTTP, or ended early."""


class Reply:
    """A reply whose head has arrived. ``headers``: their names in lower case."""

    def __init__(self, connection: _Connection) -> None:
        self.status = 0
        self.headers: Headers = []
        self.begun = False
        self._connection = connection
        self._parser: Any = httptools.HttpResponseParser(self)  # a circle, until it has ended
        self._chunks: deque[bytes] = deque()
        self._bytes = 0  # not taken
        self._untold = 0  # bytes that are none of its body, since the last that were
        self.ended = False
        self._stays = False  # the connection, for the next request
        self._error: Exception | None = None
        self._waits: asyncio.Future[None] | None = None

    def feed(self, data: bytes) -> None:
        """Called by the connection."""
        self.begun = True
        self._untold += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._stays = False
            if not self.ended:
                is_upgrade = isinstance(error, httptools.HttpParserUpgrade)
                why = "it switches protocols" if is_upgrade else str(error.__context__ or error)
                self.fail(BrokenReplyError(why))
        if self.ended:
            self._parser = None
            self._connection.answered(self._stays)
            self._wake()
        elif self._untold > _LONGEST_HEAD:
            self.fail(BrokenReplyError(f"headers of more than {_LONGEST_HEAD} bytes"))

    def on_message_begin(self) -> None:
        self._stays = False  # a reply behind this one answers no request

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.status:  # not of what follows
            self.headers.append((name.lower(), value))
        if len(value) > _LONGEST_HEADER:
            raise ValueError(f"{name[:40]!r} of more than {_LONGEST_HEADER} bytes")

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status > 599:
            raise ValueError(f"status {status}")
        if status >= 200 and not self.ended:
            self.status = status
            self._wake()

    def on_body(self, data: bytes) -> None:
        self._untold = 0
        if self.ended:
            return
        self._chunks.append(data)
        self._bytes += len(data)
        if self._bytes > _MOST_BUFFERED:
            self._connection.transport.pause_reading()
        self._wake()

    def on_message_complete(self) -> None:
        if not self.status:  # 100 or 103, and another head follows
            self.headers.clear()
        elif not self.ended:
            self.ended, self._stays = True, self._parser.should_keep_alive()

    def lost(self, error: Exception | None) -> None:
        """The connection has ended: so has a body without another end."""
        names = {
            name
            for name, value in self.headers
            if name != b"transfer-encoding" or value.lower().endswith(b"chunked")
        }
        if error is None and self.status and not names & {b"content-length", b"transfer-encoding"}:
            self.ended = True
        elif not self.ended:
            self.fail(error or BrokenReplyError("it closed the connection before its reply ended"))
        self._wake()

    def fail(self, error: Exception) -> None:
        self._error, self._parser = self._error or error, None
        self._connection.transport.abort()
        self._wake()

    def close(self) -> None:
        """Ends it at the instance unless it has ended."""
        if not self.ended:
            self._connection.transport.abort()

    async def head(self) -> None:
        """Returns when it has arrived. Raises OSError and BrokenReplyError."""
        while not self.status:
            await self._more()

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """The body as it comes. Raises OSError and BrokenReplyError."""
        while self._chunks or not self.ended:
            if not self._chunks:
                await self._more()
                continue
            yield self.taken()

    def taken(self) -> bytes:
        """What has come of the body since the last time."""
        data = b"".join(self._chunks)
        self._chunks.clear()
        self._bytes = 0
        if not self.ended:
            self._connection.transport.resume_reading()
        return data

    async def _more(self) -> None:
        if self._error is not None:
            raise self._error
        self._waits = asyncio.get_running_loop().create_future()
        try:
            await self._waits
        finally:
            self._waits = None

    def _wake(self) -> None:
        if self._waits is not None and not self._waits.done():
            self._waits.set_result(None)


class _Connection(asyncio.Protocol):
    """``kept``: those of its instance without a request, itself among them now and then."""

    transport: Any
    _reply: Reply | None = None
    since = 0.0

    def __init__(self, kept: deque[_Connection]) -> None:
        self._kept = kept

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def ask(self, head: bytes, content: bytes) -> Reply:
        self._reply = Reply(self)
        self.transport.writelines((head, content))
        return self._reply

    def data_received(self, data: bytes) -> None:
        if self._reply is None:
            self.transport.abort()  # nothing was asked
        else:
            self._reply.feed(data)

    def answered(self, stays: bool) -> None:
        self._reply = None
        # what it answered before it had read all of the request, it reads no further
        if stays and len(self._kept) < _MOST_KEPT and not self.transport.get_write_buffer_size():
            self.since = time.monotonic()
            self._kept.append(self)
        else:
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if self in self._kept:
            self._kept.remove(self)
        if self._reply is not None:
            self._reply.lost(exc)


class _Origin:
    """Where the requests to a URL go."""

    def __init__(self, url: str) -> None:
        parsed = httpx.URL(url)
        self.host, self.netloc = parsed.raw_host.decode(), parsed.netloc
        self.is_tls = parsed.scheme == "https"
        self.port = parsed.port or (443 if self.is_tls else 80)
        self.kept: deque[_Connection] = deque()

    def close(self, before: float) -> None:
        """Those that are kept since then, or longer."""
        while self.kept and self.kept[0].since <= before:
            self.kept.popleft().transport.close()


class Connections:
    """To any number of instances. ``connect_s``: seconds until one counts as unreachable."""

    def __init__(self, connect_s: float) -> None:
        self._connect_s = connect_s
        self._origins: dict[str, _Origin] = {}

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        return httpx.create_ssl_context(trust_env=False)

    async def send(
        self, method: bytes, url: str, path: str, headers: Headers, content: bytes, limit_s: float
    ) -> Reply:
        """The head of the reply, which has ``limit_s``. Raises OSError and BrokenReplyError."""
        loop = asyncio.get_running_loop()
        origin = self._origins.get(url) or self._origins.setdefault(url, _Origin(url))
        lines = [method + b" " + path.encode() + b" HTTP/1.1", b"host: " + origin.netloc]
        lines += [name + b": " + value for name, value in headers]
        if content or method == b"POST":
            lines.append(b"content-length: %d" % len(content))
        head = b"\r\n".join([*lines, b"accept-encoding: identity", b"", b""])
        while True:
            origin.close(time.monotonic() - KEPT_S)
            kept = origin.kept.pop() if origin.kept else None
            reply = (kept or await self._connected(origin)).ask(head, content)
            limit = Limit(loop, limit_s, partial(reply.fail, TimeoutError()))
            try:
                await reply.head()
            except BaseException as error:
                reply.close()
                is_stale = kept is not None and not reply.begun and isinstance(error, Exception)
                if is_stale and not isinstance(error, TimeoutError):
                    continue  # it was closed as the request left
                raise
            finally:
                limit.cancel()
            return reply

    async def _connected(self, origin: _Origin) -> _Connection:
        try:
            async with asyncio.timeout(self._connect_s):
                _, made = await asyncio.get_running_loop().create_connection(
                    lambda: _Connection(origin.kept),
                    origin.host,
                    origin.port,
                    ssl=self._tls if origin.is_tls else None,
                )
        except TimeoutError:
            raise ConnectionError(f"no connection in {self._connect_s:g} s") from None
        return made

    def close(self, kept_s: float = 0.0) -> None:
        """Those that are kept for so long."""
        for origin in self._origins.values():
            origin.close(time.monotonic() - kept_s)
