"""uvicorn's HTTP protocol with an end to silence and to noise: a connection without a request is
closed after seconds, and so is one whose client does not read, or sends more than is kept of it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_SILENCE_S = 10.0  # until the headers of a request are complete
_KEPT_S = 120.0  # the same after a reply: clients that keep connections for 5 to 90 end them first
_TURN_S = 0.1  # to read what came while the process did not run
_UNREAD_S = 60.0  # while the client takes nothing of a reply
_LONGEST_HEADERS = 64 << 10  # of a request, trailers included
_HEADER_BYTES = 32  # that a header takes besides its text
_MOST_QUEUED = 16  # requests of a client that does not wait for replies
_MOST_WAITING = 1024


class _ToTheEnd(int):
    """What is left of a reply that ends with its connection: any more fits, none need come."""

    def __lt__(self, _: object) -> bool:
        return False

    def __sub__(self, _: object) -> _ToTheEnd:
        return self


class Limit:
    """Calls ``end`` after ``seconds``, and not before what has arrived by then is read: timers come
    first in a process that was stopped."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, seconds: float, end: Callable[[], None]
    ) -> None:
        self._timer = loop.call_later(seconds, self._due, loop, end)

    def _due(self, loop: asyncio.AbstractEventLoop, end: Callable[[], None]) -> None:
        self._timer = loop.call_later(_TURN_S, end)

    def cancel(self) -> None:
        self._timer.cancel()


class PromptProtocol(HttpToolsProtocol):
    """Ends a connection whose request does not begin in time, whose headers are too long, whose
    client does not read or sends too many requests at once, and the one that has waited longest if
    too many have no request."""

    _waiting: ClassVar[dict[PromptProtocol, Limit]] = {}
    """Connections without a request, of all listeners, the longest waiting first."""
    _unread: Limit | None = None
    _is_kept = False  # after a reply, and nothing has come since
    _header_bytes = 0
    _untold = 0  # bytes that the parser has taken and may keep, because it told of nothing since

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._unanswered: deque[Any] = deque()  # requests, the oldest first

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.wait(transport)

    def data_received(self, data: bytes) -> None:
        self._untold += len(data)
        super().data_received(data)
        if self._has_request():
            self.wait_no_more()
        elif self._is_kept:  # the next request begins
            self._is_kept = False
            self.wait(self.transport)
        if self._header_bytes + self._untold > _LONGEST_HEADERS:
            self._end()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._header_bytes = self._untold = 0
        if len(self.pipeline) >= _MOST_QUEUED:
            self._refuse()

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._untold = 0
        self._header_bytes += len(name) + len(value) + _HEADER_BYTES
        if self._header_bytes > _LONGEST_HEADERS:
            self._refuse()

    def on_headers_complete(self) -> None:
        before = self.cycle
        super().on_headers_complete()
        if self.cycle is not before:
            self._unanswered.append(self.cycle)
            if self.scope["http_version"] == "1.0":  # which knows no chunks, and no 100
                self.cycle.waiting_for_100_continue = False
                self.cycle.chunked_encoding, self.cycle.expected_content_length = False, _ToTheEnd()

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        if self._has_request():
            self._untold = 0

    def _refuse(self) -> None:
        """Ends the connection; the parser reads no further."""
        self._end()
        raise ValueError("more than is kept of a request")

    def _end(self) -> None:
        self._tell_all()
        self.transport.abort()

    def _tell_all(self) -> None:
        """Ends all requests of the connection, of which uvicorn ends the last one."""
        for cycle in self._unanswered:
            cycle.disconnected = True
            cycle.message_event.set()

    def on_response_complete(self) -> None:
        self._unanswered.popleft()
        super().on_response_complete()
        if not self._has_request() and not self.transport.is_closing():
            self._unset_keepalive_if_required()  # uvicorn's 5 s, which httpx's clients have, too
            self._is_kept = True
            self.wait(self.transport, max(_KEPT_S, self.timeout_keep_alive))

    def connection_lost(self, exc: Exception | None) -> None:
        self.wait_no_more()
        self._end_unread()
        self._tell_all()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = Limit(self.loop, _UNREAD_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._end_unread()

    def _has_request(self) -> bool:
        """Whether one is being served, or the connection became a WebSocket's."""
        if self not in self.connections:
            return True
        return self.cycle is not None and not self.cycle.response_complete

    def wait(self, transport: Any, seconds: float | None = None) -> None:
        """Ends the connection unless a request begins, or its TLS handshake ends, in time."""
        self.wait_no_more()
        self.transport = transport
        self._waiting[self] = Limit(self.loop, seconds or _SILENCE_S, transport.abort)
        if len(self._waiting) > _MOST_WAITING:
            longest = next(iter(self._waiting))
            longest.wait_no_more()
            longest.transport.abort()

    def wait_no_more(self) -> None:
        timer = self._waiting.pop(self, None)
        if timer is not None:
            timer.cancel()

    def _end_unread(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None
