"""What stands before every route of a server and of the router: who is let in, and how much of a
request is read before it is."""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import functools
import hashlib
import ipaddress
import re
import secrets
from collections.abc import Callable, Mapping
from urllib.parse import urlsplit

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvrecall.engines.base import LONGEST_ID
from kvrecall.server.access import DASHBOARD, OWN_HEADER, Access
from kvrecall.server.connections import Limit
from kvrecall.server.replies import ReplyError

ADMITTED = "kvrecall.admitted"
"""In the scope of a request to an open path: whether it would have been let in elsewhere, too."""
_SILENCE_S = 10.0  # until a body begins, and added to the time that its bytes may take
_DROPPING_S = 2.0  # for the rest of a body that is refused
_SLOWEST = 64 << 10  # bytes of a body a second
_BODIES = 8
"""Bodies of the largest size that may be on their way together; smaller ones may be more."""
_LARGE = 4096  # bytes of a body that takes a while to parse
_LARGEST_IDS = 1 << 20
_MOST_VALUES = 10_000
_IDS = re.compile(rb"\s*:\s*\[(?:[\d\s,]*|(?:[\s,]*\[[\d\s,]*\])*\s*)\]")
_ID_NAMES = "prompt prompt_token_ids token_ids tokens input input_id data allowed_token_ids"
_BY_PROXY = frozenset("forwarded via x-forwarded-for x-forwarded-host x-real-ip".split())
_ID_KEYS = tuple(f'"{name}"'.encode() for name in _ID_NAMES.split())

Headers = Mapping[str, str]  # by their names in lower case


class Guard:
    """ASGI middleware: answers 401 to requests without a key, 403 to those of foreign pages, 415 to
    what a page could send unasked, 408, 413 and 503 to bodies that come too slowly, are too large
    or too many.

    A request with a key is let in whatever its Host and Origin are: pages cannot send one that they
    do not know. ``refuse`` makes a reply of a status and a message. The application gets a body in
    one piece. ``max_requests``: complete requests in progress; those of open paths do not count.
    ``counts_values``: whether it parses a JSON body into objects, so that their number is bounded.
    """

    def __init__(
        self,
        app: ASGIApp,
        access: Access,
        refuse: Callable[[int, str], Response],
        max_body_bytes: int,
        max_requests: int,
        limit_name: str,
        counts_values: bool = True,
    ) -> None:
        self._app = app
        self._access = access
        self._digests = [hashlib.sha256(key.encode()).digest() for key in access.keys]
        self._refuse = refuse
        self._max_body = max_body_bytes
        self._max_requests = max_requests
        self._limit_name = limit_name
        self._counts_values = counts_values
        self._turn = asyncio.Lock()
        self._arriving = 0  # bytes of unfinished bodies
        self.running = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        headers, path = _headers_of(scope), _route_path(scope)
        method = scope.get("method", "GET")
        if method in ("GET", "HEAD") and path in self._access.open_paths:
            with contextlib.suppress(ReplyError):
                scope[ADMITTED] = False
                self._check(scope, headers, path, method)
                scope[ADMITTED] = True
            await self._app(scope, receive, send)
            return
        upload = _Upload(headers, receive)
        try:
            self._check(scope, headers, path, method)
            if scope["type"] == "http":
                body = await self._body(headers, upload)
                if body is None:
                    return
                receive = _repeating(body, receive)
                del body  # the application may be done with it long before its reply ends
            if self.running >= self._max_requests:
                full = f"{self._max_requests} requests are in progress ({self._limit_name})"
                raise ReplyError(503, full)
        except ReplyError as error:
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008, "reason": error.detail[:120]})
                return
            reply = self._refuse(error.status_code, error.detail)
            if error.status_code == 401:
                basic = path.startswith(DASHBOARD)
                reply.headers["www-authenticate"] = 'Basic realm="kvrecall"' if basic else "Bearer"
            if error.status_code == 408 or not await upload.ended():
                reply.headers["connection"] = "close"
            await reply(scope, receive, send)
            return
        self.running += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self.running -= 1

    def _check(self, scope: Scope, headers: Headers, path: str, method: str) -> None:
        """Raises ReplyError unless the request may reach its route."""
        if len(headers.get("x-request-id", "")) > LONGEST_ID:
            length = len(headers["x-request-id"])
            raise ReplyError(431, f"X-Request-Id: {length} characters; allowed: {LONGEST_ID}")
        scheme, _, value = headers.get("authorization", "").partition(" ")
        if self._digests and scheme.lower() == "bearer" and self._is_key(value.encode()):
            return
        origin = headers.get("origin")
        self._check_page(headers, origin, method)
        if method == "OPTIONS" and origin in self._access.origins:
            return  # asks what the page may send; CORS answers
        if self._digests:
            shown = path.startswith(DASHBOARD) and method == "GET" and scheme.lower() == "basic"
            if not (shown and self._is_key(_password(value))):
                raise ReplyError(401, "no API key, or a wrong one; send Authorization: Bearer KEY")
        elif (
            (public := self._access.public)
            and not public.fullmatch(path)
            and not _is_local(scope, headers)
        ):
            why = f"{path} needs an API key from other hosts, by a proxy too; this server has none"
            raise ReplyError(403, why)
        if method == "POST" and not (
            OWN_HEADER in headers or _is_json(headers.get("content-type", ""))
        ):
            cure = "add the header Content-Type: application/json or X-Kvrecall: 1"
            raise ReplyError(415, f"any page in a browser could send this; {cure}")

    def _check_page(self, headers: Headers, origin: str | None, method: str) -> None:
        """Raises ReplyError if a page of another origin sent the request, or one that reached
        this server under a name of its own."""
        host = headers.get("host", "").lower()
        if not self._is_ours(host):
            why = f"Host {host[:80]!r} is no name of this server"
            raise ReplyError(403, f"{why}; allow it with --allowed-host")
        if origin is not None and origin in self._access.origins:
            return
        if origin is not None and _authority(origin) != host:
            why = f"pages of {origin[:80]!r} may not use this server (--allowed-origins)"
            raise ReplyError(403, why)
        opened = method == "GET" and headers.get("sec-fetch-mode") == "navigate"
        if headers.get("sec-fetch-site") in ("cross-site", "same-site") and not opened:
            raise ReplyError(403, "pages of other origins may not use this server")

    def _is_ours(self, host: str) -> bool:
        """An attacker can point a name of his own at this server, but cannot make a browser take
        his page for one of an address that is not his."""
        try:
            name = _name_of(host).removesuffix(".")
            return name == "localhost" or name in self._access.hosts or bool(_address(name))
        except ValueError:
            return False

    def _is_key(self, given: bytes) -> bool:
        digest = hashlib.sha256(given.strip()).digest()
        return sum(secrets.compare_digest(digest, each) for each in self._digests) > 0

    async def _body(self, headers: Headers, upload: _Upload) -> bytes | None:
        """The whole body; None if the client disconnects. Raises ReplyError if it is too large or
        too slow, or if parsing it would take the event loop too long."""
        length = headers.get("content-length", "")
        too_large = ReplyError(413, f"the body is larger than {self._max_body / 2**20:g} MB")
        if length.isdecimal() and int(length) > self._max_body:
            raise too_large
        counted = _Values() if self._counts_values else None
        is_parts = headers.get("content-type", "").lower().startswith("multipart/")
        chunks: list[bytes] = []
        size = 0
        clock = asyncio.get_running_loop().time
        began = clock()
        try:
            while upload.more:
                try:
                    message = await upload.receive(began - clock() + _SILENCE_S + size / _SLOWEST)
                except TimeoutError:
                    raise ReplyError(408, f"the body came too slowly: {size} bytes") from None
                if message["type"] == "http.disconnect":
                    return None
                chunk = message.get("body", b"")
                chunks.append(chunk)
                size += len(chunk)
                self._arriving += len(chunk)
                if size > self._max_body:
                    raise too_large
                if self._arriving > _BODIES * self._max_body:
                    raise ReplyError(503, "too many large bodies are on their way")
                if is_parts and size == len(chunk) and chunk.lstrip()[:1] == b"-":
                    counted = None  # a boundary, which begins no list or object
                if counted is not None:
                    counted.add(chunk)
            body = b"".join(chunks)
            if counted is not None:
                counted.check(body)
            if size > _LARGE:  # other tasks run between two that are parsed
                await self._turn.acquire()
                asyncio.get_running_loop().call_soon(self._turn.release)
            return body
        finally:
            self._arriving -= size


class _Upload:
    """The body of a request as it arrives. ``more``: whether some of it is still to come."""

    def __init__(self, headers: Headers, receive: Receive) -> None:
        length = headers.get("content-length", "")
        self.more = length not in ("", "0") or "transfer-encoding" in headers
        self._is_asked_for = "expect" in headers
        self._receive = receive

    async def receive(self, limit_s: float = _DROPPING_S) -> Message:
        """Raises TimeoutError."""
        async with asyncio.timeout(None) as call:
            limit = Limit(asyncio.get_running_loop(), limit_s, lambda: call.reschedule(0))
            try:
                message = await self._receive()
            finally:
                limit.cancel()
        self.more = message.get("more_body", False)
        return message

    async def ended(self) -> bool:
        """Drops the rest of it: many clients read no reply before they have sent all. Returns
        whether that was so in time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_DROPPING_S):
                while self.more and not self._is_asked_for:
                    await self.receive()
        return not self.more


class _Values:
    """Counts the values of a JSON text as it arrives. A parser that validates them takes 10 us for
    each, on the event loop; token ids in their own arrays take a hundredth."""

    def __init__(self) -> None:
        self._commas = self._opened = 0
        self._inside = False  # of a string
        self._escaped = False  # the next byte

    def add(self, chunk: bytes) -> None:
        if b"\0" in chunk:
            raise ReplyError(415, "the body is not UTF-8")
        if chunk:
            bare = chunk[self._escaped :].replace(b"\\\\", b"").replace(b'\\"', b"")
            self._escaped = bare.endswith(b"\\")
            parts = bare.split(b'"')
            outside = b"".join(parts[self._inside :: 2])
            self._inside ^= len(parts) % 2 == 0
            self._commas += outside.count(b",")
            self._opened += outside.count(b"[") + outside.count(b"{")
        if self._opened > _MOST_VALUES or self._commas > _MOST_VALUES + _LARGEST_IDS:
            raise self._too_many()

    def check(self, body: bytes) -> None:
        """Raises ReplyError if there are too many values in ``body``, which has all been added.
        A quote without a backslash begins or ends a string, so keys are found by their text."""
        values = self._opened + self._commas
        if values <= _MOST_VALUES:
            return
        ids = 0
        for key in _ID_KEYS:
            at = body.find(key)
            while at >= 0 and ids <= _LARGEST_IDS:
                at += len(key)
                if found := _IDS.match(body, at):
                    at = found.end()
                    ids += body.count(b",", *found.span())
                at = body.find(key, at)
        if ids > _LARGEST_IDS or values - ids > _MOST_VALUES:
            raise self._too_many()

    @staticmethod
    def _too_many() -> ReplyError:
        values = f"{_MOST_VALUES} values (members, items) besides token ids"
        return ReplyError(413, f"the body has more than {values}, or {_LARGEST_IDS} of these")


def _headers_of(scope: Scope) -> dict[str, str]:
    """Of several with one name the first. Two that name the host are as good as none."""
    given = scope["headers"]
    found = {name.decode("latin-1"): value.decode("latin-1") for name, value in reversed(given)}
    if len(found) < len(given) and sum(name == b"host" for name, _ in given) > 1:
        found["host"] = ""
    return found


def _route_path(scope: Scope) -> str:
    """The path that routes are compared with: without the prefix at which the application is."""
    path: str = scope["path"]
    inside = path.removeprefix(scope.get("root_path", ""))
    return inside if inside[:1] in ("", "/") else path


def _repeating(body: bytes, receive: Receive) -> Receive:
    """``receive`` after a first message with the whole body."""
    first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def received() -> Message:
        return first.pop() if first else await receive()

    return received


def _password(basic: str) -> bytes:
    """Of HTTP's Basic scheme, under any user name."""
    try:
        return base64.b64decode(basic).partition(b":")[2]
    except (binascii.Error, ValueError):
        return b""


def _authority(origin: str) -> str:
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""


def _is_json(content_type: str) -> bool:
    kind = content_type.partition(";")[0].strip().lower()
    return kind == "application/json" or (
        kind.startswith("application/") and kind.endswith("+json")
    )


_address = functools.lru_cache(64)(ipaddress.ip_address)
_name_of = functools.lru_cache(64)(lambda host: urlsplit(f"//{host}").hostname or "")


def _is_local(scope: Scope, headers: Headers) -> bool:
    """Whether a process of this host sent it, and not a proxy for another one, or another one that
    has uvicorn believe what a proxy would say (FORWARDED_ALLOW_IPS)."""
    try:
        address = _address((scope.get("client") or ("",))[0])
    except ValueError:
        return False
    return address.is_loopback and _BY_PROXY.isdisjoint(headers)
