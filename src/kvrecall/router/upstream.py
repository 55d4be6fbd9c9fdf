"""HTTP requests to instances, and their failures."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from kvrecall.router.fleet import Instance

_END = b"\n\n"
_IS_JSON = {"content-type": "application/json"}
_OTHERS_MAY_SERVE = frozenset({500, 502, 503, 504})
_MAX_ERROR_BYTES = 1 << 20
_CONNECT_S = 5.0  # an overloaded machine accepts late
_PROBE_S = 5.0  # for /health; an overloaded machine answers late
_LOOK_UP_S = 10.0  # for other small requests


class InstanceFailedError(Exception):
    """An instance failed before its reply began; a retry at another is possible.

    ``gone``: the connection failed; the instance counts as down until probed.
    ``reply``: the instance's reply, if any.
    """

    def __init__(self, why: str, gone: bool, reply: Answer | None = None) -> None:
        super().__init__(why)
        self.gone = gone
        self.reply = reply


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole reply."""

    status: int
    content: bytes
    media_type: str

    def json(self) -> dict[str, Any]:
        """The body as an object; empty if it is not one."""
        try:
            value = json.loads(self.content)
        except ValueError:
            return {}
        return value if isinstance(value, dict) else {}


class Stream:
    """A streamed reply whose first event has arrived. ``close`` aborts it at the instance."""

    def __init__(self, response: httpx.Response, events: AsyncGenerator[bytes, None]) -> None:
        self._response = response
        self._events = events
        self.first = b""

    async def begin(self) -> None:
        """Waits for the first event. Raises InstanceFailedError if none arrives."""
        try:
            self.first = await anext(self._events)
        except StopAsyncIteration:
            raise InstanceFailedError("ended without an event", gone=False) from None
        if error := _error_of(self.first):
            raise InstanceFailedError(error, gone=False)

    async def rest(self) -> AsyncIterator[bytes]:
        """The events after the first. Raises httpx.HTTPError if the connection is lost."""
        async for event in self._events:
            yield event

    async def close(self) -> None:
        await self._events.aclose()
        await self._response.aclose()


class Upstream:
    """The router's HTTP client for all instances."""

    def __init__(self, timeout_s: float) -> None:
        timeout = httpx.Timeout(timeout_s, connect=_CONNECT_S)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
        self._client = httpx.AsyncClient(timeout=timeout, limits=limits, trust_env=False)

    async def __aenter__(self) -> Upstream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def probe(self, instance: Instance) -> bool:
        """Whether the instance reports that it is healthy."""
        try:
            reply = await self._client.get(f"{instance.url}/health", timeout=_PROBE_S)
        except (httpx.HTTPError, AttributeError):  # as of ``_failures``
            return False
        return reply.status_code == 200

    async def models(
        self, instance: Instance, api_key: str | None
    ) -> tuple[frozenset[str], frozenset[str]]:
        """Names of the models and adapters that an instance serves, and of the models alone; none
        if it does not say."""
        headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        try:
            reply = await self._client.get(
                f"{instance.url}/v1/models", headers=headers, timeout=_PROBE_S
            )
            listed = {one["id"]: one.get("parent") for one in reply.json()["data"]}
            return frozenset(listed), frozenset(n for n, parent in listed.items() if not parent)
        except (httpx.HTTPError, ValueError, KeyError, TypeError, AttributeError):
            return frozenset(), frozenset()

    async def get(self, instance: Instance, path: str, headers: Mapping[str, str]) -> Answer:
        """GET. Raises InstanceFailedError."""
        with _failures(instance):
            reply = await self._client.get(
                instance.url + path, headers=_raw(headers), timeout=_LOOK_UP_S
            )
            return _answer(reply, reply.content)

    async def ask(
        self,
        instance: Instance,
        path: str,
        body: Mapping[str, Any],
        headers: Mapping[str, str],
        timeout_s: float | None = None,
    ) -> Answer:
        """POST for a whole reply. Raises InstanceFailedError for failures worth a retry.
        ``timeout_s``: instead of the client's."""
        with _failures(instance):
            reply = await self._client.post(
                instance.url + path,
                content=_json(body),
                headers=_raw({**headers, **_IS_JSON}),
                timeout=httpx.USE_CLIENT_DEFAULT if timeout_s is None else timeout_s,
            )
        return _usable(instance, _answer(reply, reply.content))

    async def stream(
        self, instance: Instance, path: str, body: Mapping[str, Any], headers: Mapping[str, str]
    ) -> Stream | Answer:
        """POST for a stream, whose first event has arrived, or a whole reply if the instance
        refuses, or answers with one. Raises InstanceFailedError."""
        request = self._client.build_request(
            "POST", instance.url + path, content=_json(body), headers=_raw({**headers, **_IS_JSON})
        )
        with _failures(instance):
            response = await self._client.send(request, stream=True)
        stream = Stream(response, _events(response))
        try:
            with _failures(instance):
                if response.status_code != 200:
                    content = (await response.aread())[:_MAX_ERROR_BYTES]
                    await stream.close()
                    return _usable(instance, _answer(response, content))
                if not _is_stream(response):  # to ``"stream": "false"``, which vLLM takes for false
                    content = await response.aread()
                    await stream.close()
                    return _answer(response, content)
                await stream.begin()
            return stream
        except BaseException:
            await stream.close()
            raise


def _json(body: Mapping[str, Any]) -> bytes:
    """``body`` as an instance is sent it: what its own reader takes, and this one took, is passed
    on as it is, half surrogate pairs and NaN too; the instance says what is wrong with it."""
    try:
        return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:
        return json.dumps(body, separators=(",", ":")).encode()


def _raw(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    """Headers with the bytes that the client sent, which need not be ASCII."""
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]


def _is_stream(response: httpx.Response) -> bool:
    return bool(response.headers.get("content-type", "").startswith("text/event-stream"))


@contextmanager
def _failures(instance: Instance) -> Iterator[None]:
    """Translates httpx errors into InstanceFailedError."""
    try:
        yield
    except (httpx.ReadTimeout, httpx.WriteTimeout, httpx.PoolTimeout) as error:
        raise InstanceFailedError(f"{instance.name} did not answer in time", False) from error
    except (httpx.HTTPError, httpx.StreamError, AttributeError) as error:
        # AttributeError: anyio's, of a socket that the instance reset right after it accepted.
        why = str(error) or type(error).__name__
        raise InstanceFailedError(f"{instance.name}: {why}", True) from error


def _answer(reply: httpx.Response, content: bytes) -> Answer:
    return Answer(reply.status_code, content, reply.headers.get("content-type", "application/json"))


def _usable(instance: Instance, answer: Answer) -> Answer:
    if answer.status in _OTHERS_MAY_SERVE:
        raise InstanceFailedError(f"{instance.name} answered {answer.status}", False, answer)
    return answer


async def _events(response: httpx.Response) -> AsyncGenerator[bytes, None]:
    """Server-sent events, whole, with the empty line that ends each."""
    rest = b""
    async for chunk in response.aiter_raw():
        *whole, rest = (rest + chunk).split(_END)
        for event in whole:
            yield event + _END
    if rest:
        yield rest


def _error_of(event: bytes) -> str | None:
    """The error that an engine sends instead of a first event when it fails."""
    if not event.startswith(b'data: {"error"'):
        return None
    try:
        error = json.loads(event[6:])["error"]
        code = int(error.get("code") or 500) if isinstance(error, dict) else 500
    except (ValueError, KeyError, TypeError):
        return None
    return f"failed with {error}" if code in _OTHERS_MAY_SERVE else None
