"""Sends a request to a decode instance, and its reply to the client."""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import httpx
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from kvrecall.router.accounts import Account
from kvrecall.router.asked import Asked
from kvrecall.router.instance import Instance
from kvrecall.router.parts import Parts
from kvrecall.router.prefixes import Prompt
from kvrecall.router.upstream import Answer, InstanceFailedError, Stream

log = logging.getLogger("kvrecall.router")

RECALL_HEADER = "x-kvrecall"


def error_response(status: int, message: str, kind: str = "router_error") -> Response:
    """An error in OpenAI's form."""
    body = {"error": {"message": message, "type": kind, "code": status}}
    headers = {"retry-after": "1"} if status == 503 else {}
    return Response(json.dumps(body), status, headers, "application/json")


class _Relayed(StreamingResponse):
    """A stream that gives back what it holds however it ends, even before it began."""

    def __init__(self, events: AsyncIterator[bytes], stream: Stream, **kwargs: Any) -> None:
        super().__init__(events, media_type="text/event-stream", **kwargs)
        self._stream = stream
        self.held = contextlib.ExitStack()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self.held:
            try:
                await super().__call__(scope, receive, send)
            finally:
                await self._stream.close()


class Relay:
    """The decode half of a request."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    async def reply(
        self,
        asked: Asked,
        account: Account,
        held: contextlib.ExitStack,
    ) -> Response:
        """The reply for the client. Instances that fail before the first byte are passed over,
        ``retries`` times. ``held`` is closed when the reply has ended."""
        began = time.monotonic()
        failure: InstanceFailedError | None = None
        candidates = self._parts.chooser.for_decode(asked.prompt)[
            : self._parts.settings.retries + 1
        ]
        for place, instance in enumerate(candidates):
            if place:
                self._parts.metrics.retries.labels("decode").inc()
            busy = contextlib.ExitStack()
            busy.enter_context(instance.busy())
            try:
                with busy:
                    got = await self._ask(instance, asked)
                    kept = busy.pop_all()
            except InstanceFailedError as error:
                self._failed(instance, error)
                failure = error
                continue
            held.push(kept)
            self._took(instance, asked.prompt, account)
            self._parts.metrics.first_byte_seconds.observe(time.monotonic() - began)
            if isinstance(got, Stream):
                return self._streamed(instance, got, account, held)
            return self._whole(got, account)
        return self._none(failure)

    async def _ask(self, instance: Instance, asked: Asked) -> Stream | Answer:
        upstream = self._parts.upstream
        ask = upstream.stream if asked.body.get("stream") else upstream.ask
        return await ask(instance, asked.path, asked.body, asked.headers)

    def _failed(self, instance: Instance, error: InstanceFailedError) -> None:
        self._parts.metrics.failures.labels("decode", instance.name).inc()
        if error.gone:
            self._parts.prober.lost(instance, str(error))
        else:
            log.warning("decode instance %s: %s", instance.url, error)

    def _took(self, instance: Instance, prompt: Prompt | None, account: Account) -> None:
        held = self._parts.prefixes.held(prompt, [instance])[instance]
        self._parts.metrics.affinity.labels("decode", "held" if held else "new").inc()
        self._parts.prefixes.note(prompt, instance)
        account.decode = instance

    def _whole(self, answer: Answer, account: Account) -> Response:
        content = answer.content
        body = answer.json()
        if answer.status == 200 and isinstance(body.get("usage"), dict):
            account.complete(body["usage"])
            self._parts.metrics.count_tokens("decode", account.decode_split)
            content = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
        self._parts.metrics.requests.labels("ok" if answer.status == 200 else "refused").inc()
        headers = {RECALL_HEADER: account.header()}
        return Response(content, answer.status, headers, answer.media_type)

    def _streamed(
        self, instance: Instance, stream: Stream, account: Account, held: contextlib.ExitStack
    ) -> Response:
        headers = {RECALL_HEADER: account.header(), "cache-control": "no-cache"}
        response = _Relayed(self._events(instance, stream, account), stream, headers=headers)
        response.held = held.pop_all()
        response.held.callback(self._count_stream, account)
        return response

    async def _events(
        self, instance: Instance, stream: Stream, account: Account
    ) -> AsyncGenerator[bytes, None]:
        try:
            yield account.complete_event(stream.first)
            async for event in stream.rest():
                yield account.complete_event(event)
            account.outcome = "ok"
        except httpx.HTTPError as error:
            account.outcome = "broken"
            self._parts.metrics.failures.labels("decode", instance.name).inc()
            self._parts.prober.lost(instance, str(error) or type(error).__name__)
            yield _broken(instance)

    def _count_stream(self, account: Account) -> None:
        self._parts.metrics.requests.labels(account.outcome).inc()
        self._parts.metrics.count_tokens("decode", account.decode_split)

    def _none(self, failure: InstanceFailedError | None) -> Response:
        self._parts.metrics.requests.labels("failed").inc()
        if failure is None:
            return error_response(503, "no instance is up", "service_unavailable")
        if failure.reply is not None:
            return Response(failure.reply.content, failure.reply.status, None, "application/json")
        return error_response(502, f"no instance could serve the request: {failure}")


def _broken(instance: Instance) -> bytes:
    error = {"message": f"{instance.name} broke off", "type": "router_error", "code": 502}
    return f"data: {json.dumps({'error': error})}\n\n".encode()
