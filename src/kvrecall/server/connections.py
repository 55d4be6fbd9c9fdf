"""uvicorn's HTTP protocol with an end to silence: a connection without a request is closed after
seconds, and so is one whose client does not read."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

from uvicorn.protocols.http.auto import AutoHTTPProtocol

_SILENCE_S = 10.0  # until the headers of a request are complete
_UNREAD_S = 60.0  # while the client takes nothing of a reply
_LONGEST_HEADERS = 64 << 10
_MOST_WAITING = 1024


class PromptProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """Ends a connection whose request does not begin in time, whose headers are too long or whose
    client does not read, and the one that has waited longest if too many have no request."""

    _waiting: ClassVar[dict[PromptProtocol, asyncio.TimerHandle]] = {}
    """Connections without a request, of all listeners, the longest waiting first."""
    _unread: asyncio.TimerHandle | None = None
    _header_bytes = 0

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._has_request():
            self._wait_no_more()
        elif self in self._waiting:
            self._header_bytes += len(data)
            if self._header_bytes > _LONGEST_HEADERS:
                self.transport.abort()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self._has_request() and not self.transport.is_closing():
            self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._wait_no_more()
        self._end_unread()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self.loop.call_later(_UNREAD_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._end_unread()

    def _has_request(self) -> bool:
        """Whether one is being served, or the connection became a WebSocket's."""
        if self not in self.connections:
            return True
        return self.cycle is not None and not self.cycle.response_complete

    def _wait(self) -> None:
        self._wait_no_more()
        self._header_bytes = 0
        self._waiting[self] = self.loop.call_later(_SILENCE_S, self.transport.abort)
        if len(self._waiting) > _MOST_WAITING:
            longest = next(iter(self._waiting))
            longest._wait_no_more()
            longest.transport.abort()

    def _wait_no_more(self) -> None:
        timer = self._waiting.pop(self, None)
        if timer is not None:
            timer.cancel()

    def _end_unread(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None
