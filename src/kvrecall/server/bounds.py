"""ASGI middleware that refuses bodies that are too large, links that are too many, and paths that
are served elsewhere."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvrecall.server.replies import ReplyError


class Closed:
    """Answers 404 to all that begins with one of ``prefixes``, which another address serves."""

    def __init__(self, app: ASGIApp, prefixes: tuple[str, ...]) -> None:
        self._app = app
        self._prefixes = prefixes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith(self._prefixes):
            error = ReplyError(404, f"{scope['path']} is on another address of this server")
            await error.response()(scope, receive, send)
            return
        await self._app(scope, receive, send)


class _TooLargeError(Exception):
    pass


class Bounds:
    """Answers 413 to a body of more than ``max_body_bytes`` and 503 to requests on more than
    ``max_links`` open connections. Bodies without a length are counted as they come."""

    def __init__(self, app: ASGIApp, owner: FastAPI, max_body_bytes: int, max_links: int) -> None:
        self._app = app
        self._owner = owner
        self._max_body = max_body_bytes
        self._max_links = max_links

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if self._links() > self._max_links:
            error = ReplyError(503, f"more than {self._max_links} open connections (maxLinkNum)")
            await error.response()(scope, receive, send)
            return
        length = dict(scope["headers"]).get(b"content-length", b"")
        if length.isdigit() and int(length) > self._max_body:
            await self._too_large().response()(scope, receive, send)
            return
        await self._bounded(scope, receive, send)

    async def _bounded(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Runs the application on a body that is cut off, with 413, when it grows too large."""
        received, started = 0, False

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            if message["type"] == "http.request":
                received += len(message.get("body", b""))
                if received > self._max_body:
                    raise _TooLargeError
            return message

        async def noted(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, counted, noted)
        except _TooLargeError:
            if started:
                raise
            await self._too_large().response()(scope, receive, send)

    def _links(self) -> int:
        """Open connections, this one included; 0 where the HTTP server does not say."""
        server = getattr(self._owner.state, "server", None)
        return len(server.server_state.connections) if server is not None else 0

    def _too_large(self) -> ReplyError:
        return ReplyError(
            413, f"the body is larger than {self._max_body / 2**20:g} MB (maxRequestLength)"
        )
