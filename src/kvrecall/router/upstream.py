"""HTTP requests to instances, and their failures.

An instance is not trusted to answer sensibly: each wait has an end, each reply a size; redirects
are not followed. Replies are asked for without an encoding; gzip and deflate are undone all the
same, and another one passes on unread.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import zlib
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass

import msgspec

from kvrecall.router.bodies import Body, aside, fields_of, value_of
from kvrecall.router.connections import KEPT_S, BrokenReplyError, Connections, Headers, Reply
from kvrecall.router.fleet import Instance
from kvrecall.router.prefixes import Prompt, is_text, question_of

log = logging.getLogger("kvrecall.router")

LOOP = "cdn-loop"
"""Request header that names the routers on the way (RFC 8586). With Via, an engine would take the
request for one of another host."""
NAME = f"kvrecall-{secrets.token_hex(6)}"
"""Of this router there, and in the Via of its /health: the routers on its way to an engine."""

_END = re.compile(rb"\n\r?\n|\r\r")
_DATA = re.compile(rb"(?:^|[\r\n])data:[ ]?([^\r\n]*)")
_OTHERS_MAY_SERVE = frozenset({500, 502, 503, 504, 508})
_MOST_REPLY = 64 << 20  # bytes of a whole reply
_PIECE = 256 << 10  # bytes that are decompressed at once
_MOST_EVENT = 16 << 20  # bytes of an event of a stream
_SMALL = 1 << 20  # bytes of /health and /v1/models
_LONGEST_REASON = 300
_LONGEST_WAY = 1024
_CONNECT_S = 5.0  # an overloaded machine accepts late
_PROBE_S = 5.0  # for /health; an overloaded machine answers late
_TOKENIZE_S = 5.0
_LOOK_UP_S = 10.0  # for other small requests
_OF_THE_CONNECTION = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer "
    b"transfer-encoding upgrade content-length date server".split()
)
"""Headers of a reply that are the connection's, or that the router's server writes itself."""


class _ListedModel(msgspec.Struct):
    id: str
    parent: str | None = None


class _ModelList(msgspec.Struct):
    data: list[_ListedModel]


class _TokenIds(msgspec.Struct):
    tokens: tuple[int, ...]


_models = msgspec.json.Decoder(_ModelList)
_tokens = msgspec.json.Decoder(_TokenIds)


class InstanceFailedError(Exception):
    """An instance failed before its reply began; a retry at another is possible.

    ``gone``: the connection failed; the instance counts as down until probed.
    ``reply``: the instance's reply, if any.
    """

    def __init__(self, why: str, gone: bool, reply: InstanceReply | None = None) -> None:
        shown = "".join(letter if letter.isprintable() else " " for letter in why[:_LONGEST_REASON])
        super().__init__(shown)
        self.gone = gone
        self.reply = reply


@dataclass(frozen=True, slots=True)
class InstanceReply:
    """A whole reply. ``headers``: those that are meant for the client."""

    status: int
    content: bytes
    headers: Headers


@dataclass(frozen=True, slots=True)
class ReplyStream:
    """A streamed reply whose first event has arrived. ``events``: those after it; they raise
    InstanceFailedError if the connection is lost, or one has no end."""

    response: Reply
    first: bytes
    events: AsyncGenerator[bytes, None]
    headers: Headers

    async def close(self) -> None:
        """Aborts it at the instance."""
        await self.events.aclose()
        self.response.close()


class Upstream:
    """The router's HTTP client for all instances."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._connections = Connections(_CONNECT_S)

    async def aclose(self) -> None:
        """Closes all connections that are kept."""
        self._connections.close()

    async def probe(self, instance: Instance) -> bool:
        """Whether the instance reports that it is healthy, or is too busy to and answers others; a
        router that needs this one to reach an engine does not count as healthy."""
        heard, known = instance.heard, instance.way
        try:
            answer = await self.get(instance, "/health", {}, _PROBE_S)
        except InstanceFailedError:
            return instance.heard > heard
        way = b", ".join(value for name, value in answer.headers if name == b"via")
        instance.way = way[:_LONGEST_WAY].decode("latin-1")
        if NAME in instance.way and NAME not in known:
            why = "it leads back to this router, and gets no requests while it does; list engines"
            log.warning("%s instance %s: %s", instance.role, instance.url, why)
        return answer.status == 200 and NAME not in instance.way

    def tidy(self) -> None:
        """Closes connections that are kept too long, as to an instance that left."""
        self._connections.close(KEPT_S)

    async def models(
        self, instance: Instance, api_key: str | None
    ) -> tuple[frozenset[str], frozenset[str]]:
        """Names of the models and adapters that an instance serves, and of the models alone; none
        if it does not say."""
        headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        try:
            answer = await self.get(instance, "/v1/models", headers, _PROBE_S)
            listed = _models.decode(answer.content).data
        except (InstanceFailedError, ValueError, RecursionError):
            return frozenset(), frozenset()
        models = frozenset(one.id for one in listed if not one.parent)
        return frozenset(one.id for one in listed), models

    async def get(
        self,
        instance: Instance,
        path: str,
        headers: Mapping[str, str],
        limit_s: float = _LOOK_UP_S,
    ) -> InstanceReply:
        """GET. Raises InstanceFailedError. ``limit_s``: for the reply after its head, which has
        twice as long from the connection on."""
        response = await self._send(instance, b"GET", path, headers, b"", 2 * limit_s)
        return await _whole(instance, response, limit_s, _SMALL)

    async def tokens(
        self, instance: Instance, body: Body, prompt: Prompt, headers: Mapping[str, str]
    ) -> tuple[int, ...] | None:
        """The tokens of a request with one prompt, as the instance's own /tokenize cuts it: exact,
        with chat template and tools, and without a model at the router. None if they cannot be
        known."""
        if prompt.given is not None:
            return prompt.given if await aside(body.nbytes, is_text, body) else None
        question = await aside(body.nbytes, question_of, body)
        if question is None:
            return None
        try:
            answer = await self.ask(instance, "/tokenize", question, headers, _TOKENIZE_S)
            if answer.status != 200:
                return None
            return (await aside(len(answer.content), _tokens.decode, answer.content)).tokens
        except (InstanceFailedError, ValueError, RecursionError):
            return None

    async def ask(
        self,
        instance: Instance,
        path: str,
        content: bytes,
        headers: Mapping[str, str],
        limit_s: float | None = None,
    ) -> InstanceReply:
        """POST for a whole reply. Raises InstanceFailedError for failures worth a retry.
        ``limit_s``: for its head, and again for the rest; None: the client's timeout."""
        limit_s = limit_s or self._timeout_s
        response = await self._post(instance, path, content, headers, limit_s)
        return _usable(instance, await _whole(instance, response, limit_s))

    async def stream(
        self, instance: Instance, path: str, content: bytes, headers: Mapping[str, str]
    ) -> ReplyStream | InstanceReply:
        """POST for a stream, whose first event has arrived, or a whole reply if the instance
        refuses, or answers with one. Raises InstanceFailedError."""
        limit_s = self._timeout_s
        response = await self._post(instance, path, content, headers, limit_s)
        kind = _header(response, b"content-type")
        if response.status != 200 or not kind.startswith(b"text/event-stream"):
            # also to ``"stream": "false"``, which vLLM takes for false
            return _usable(instance, await _whole(instance, response, limit_s))
        events = _all_events(instance, response, limit_s)
        try:
            with _Failures(instance):
                async with asyncio.timeout(limit_s):
                    first = await anext(events, b"")
            if error := _error_of(first) if first else "ended without an event":
                raise InstanceFailedError(error, gone=False)
        except BaseException:
            await events.aclose()
            response.close()
            raise
        return ReplyStream(response, first, events, _end_to_end(response))

    async def _post(
        self,
        instance: Instance,
        path: str,
        content: bytes,
        headers: Mapping[str, str],
        limit_s: float,
    ) -> Reply:
        headers = {**headers, "content-type": "application/json"}
        response = await self._send(instance, b"POST", path, headers, content, limit_s)
        instance.heard += 1
        return response

    async def _send(
        self,
        instance: Instance,
        method: bytes,
        path: str,
        headers: Mapping[str, str],
        content: bytes,
        limit_s: float,
    ) -> Reply:
        """The head of the reply, whatever precedes it. Raises InstanceFailedError."""
        # the bytes that the client sent, which need not be ASCII
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        with _Failures(instance):
            connections = self._connections
            response = await connections.send(method, instance.url, path, raw, content, limit_s)
        if 300 <= response.status < 400:
            response.close()
            message = f"{instance.name} answered {response.status}, and redirects are not followed"
            raise InstanceFailedError(message, gone=False)
        return response


def _header(response: Reply, name: bytes) -> bytes:
    return b",".join([value for given, value in response.headers if given == name]).strip().lower()


class _Failures:
    """Translates the errors of a connection into InstanceFailedError."""

    def __init__(self, instance: Instance) -> None:
        self._instance = instance

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError | BrokenReplyError | zlib.error):
            is_late = isinstance(error, TimeoutError)
            told = f": {str(error) or type(error).__name__}"
            why = " did not answer in time" if is_late else told
            raise InstanceFailedError(f"{self._instance.name}{why}", not is_late) from error


def _is_encoded(response: Reply) -> bool:
    """Whether it has an encoding that the router undoes."""
    return _header(response, b"content-encoding") in (b"gzip", b"x-gzip", b"deflate")


async def _decoded(response: Reply) -> AsyncGenerator[bytes, None]:
    """The body, in pieces of bounded size."""
    is_encoded, decoder = _is_encoded(response), None
    async for chunk in response.chunks():
        if not is_encoded:
            yield chunk
        while is_encoded and chunk:
            if decoder is not None and decoder.eof and chunk[0] != 0x1F:
                break  # padding, and no further member of gzip's
            if decoder is None or decoder.eof:
                is_bare = chunk[0] & 15 not in (8, 15)  # deflate as some send it, without a head
                decoder = zlib.decompressobj(-15 if is_bare else 32 + 15)
            if data := decoder.decompress(chunk, _PIECE):
                yield data
                await asyncio.sleep(0)  # others are served meanwhile
            chunk = decoder.unconsumed_tail or decoder.unused_data
    if decoder is not None and not decoder.eof:
        raise BrokenReplyError("its compressed reply has no end")


async def _whole(
    instance: Instance, response: Reply, limit_s: float, most: int = _MOST_REPLY
) -> InstanceReply:
    """The reply within ``limit_s``. Raises InstanceFailedError."""
    if response.ended and not _is_encoded(response):  # all of it fits what is kept
        return InstanceReply(response.status, response.taken(), _end_to_end(response))
    content = bytearray()
    try:
        with _Failures(instance):
            async with asyncio.timeout(None if response.ended else limit_s):
                async for chunk in _decoded(response):
                    content += chunk
                    if len(content) > most:
                        message = f"{instance.name} answers with more than {most} bytes"
                        raise InstanceFailedError(message, gone=False)
    finally:
        response.close()
    return InstanceReply(response.status, bytes(content), _end_to_end(response))


def _usable(instance: Instance, answer: InstanceReply) -> InstanceReply:
    if answer.status in _OTHERS_MAY_SERVE:
        raise InstanceFailedError(f"{instance.name} answered {answer.status}", False, answer)
    return answer


def _end_to_end(response: Reply) -> Headers:
    named = _header(response, b"connection").split(b",")
    dropped = _OF_THE_CONNECTION.union(name.strip() for name in named)
    if _is_encoded(response):
        dropped |= {b"content-encoding"}
    return [(name, value) for name, value in response.headers if name not in dropped]


async def _all_events(
    instance: Instance, response: Reply, silence_s: float
) -> AsyncGenerator[bytes, None]:
    """Server-sent events, whole, with the empty line that ends each; of a stream in an encoding
    that the router cannot read, its pieces. ``silence_s``: between two pieces. Raises
    InstanceFailedError."""
    encoding = _header(response, b"content-encoding")
    is_unread = not _is_encoded(response) and encoding not in (b"", b"identity")
    buffer = bytearray()
    searched = 0
    pieces = _decoded(response)
    try:
        while True:
            with _Failures(instance):
                async with asyncio.timeout(silence_s):
                    chunk = await anext(pieces, b"")
            if not chunk:
                break
            if is_unread:
                yield chunk
                continue
            buffer += chunk
            begin = 0
            while found := _END.search(buffer, max(begin, searched - 3)):
                yield bytes(buffer[begin : found.end()])
                begin = found.end()
            del buffer[:begin]
            searched = len(buffer)
            if searched > _MOST_EVENT:
                message = f"{instance.name} sent an event of more than {_MOST_EVENT} bytes"
                raise InstanceFailedError(message, gone=False)
    finally:
        await pieces.aclose()
    if buffer:
        yield bytes(buffer)


def data_of(event: bytes) -> tuple[int, int]:
    """Where the JSON of a server-sent event is; nowhere if it is not on one line."""
    found = [one.span(1) for one in _DATA.finditer(event)]
    return found[0] if len(found) == 1 else (0, 0)


def _error_of(event: bytes) -> str | None:
    """The error that an engine sends instead of a first event when it fails."""
    if b'"error"' not in event:
        return None
    begin, end = data_of(event)
    error = value_of(fields_of(event[begin:end]).get("error"))
    code = error.get("code") if isinstance(error, dict) else None
    if error is None or (type(code) is int and code not in _OTHERS_MAY_SERVE):
        return None
    return f"failed with {error}"
