"""Serves a completion: an engine does, or a prefill instance computes the prompt and a decode
instance recalls its blocks from the pool and generates the answer."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import msgspec
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from kvrecall.engines.base import MISSED, RECALL_HEADER, REPORT, UNIT, Role
from kvrecall.errors import ConfigError
from kvrecall.events.subscriber import Subscriptions
from kvrecall.router.addresses import Roster
from kvrecall.router.bodies import Body, aside, fields_of, value_of
from kvrecall.router.connections import Headers
from kvrecall.router.fleet import Expected, Fleet, Instance
from kvrecall.router.metrics import RouterMetrics
from kvrecall.router.prefixes import Prompt
from kvrecall.router.traces import CompletionSpan, RouterTraces
from kvrecall.router.upstream import (
    InstanceFailedError,
    InstanceReply,
    ReplyStream,
    Upstream,
    data_of,
)
from kvrecall.server.access import Access

log = logging.getLogger("kvrecall.router")

RETRY_HEADER = "retry-after"
"""Reply header of the router with status 503: seconds until a retry is useful."""

_PROBE_EVERY_S = 2.0
_LIST_EVERY = 15  # probes, after which an instance's list of models is read again

SOURCES = ("device", "host", "disk", "remote", "unspecified", "computed")

_MANY = 1 << 48  # tokens: more is no count

_PREFILLED = ("/v1/completions", "/v1/chat/completions")
"""Routes whose replies have a prefill instance's receipt, and whose tokens /tokenize tells."""

_ANSWER_FIELDS = (
    "stream stream_options max_completion_tokens min_tokens n best_of use_beam_search logprobs "
    "top_logprobs prompt_logprobs echo suffix stop stop_token_ids include_stop_str_in_output "
    "response_format structured_outputs logit_bias kv_transfer_params"
).split()
"""Fields of a request that affect the answer, not the prompt."""

_HELD = {"do_remote_decode": True, "do_remote_prefill": False}
"""Asks vLLM's own connectors (NIXL, Mooncake) to hold a prompt's blocks for a decode instance."""


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """Settings from the command line. ``roster``: the instances, as the command line names them and
    as its file lists them from time to time.

    ``prefill_min_tokens``: prompts with fewer tokens that no instance holds go directly to a decode
    instance. ``imbalance``: requests in flight that an instance may have above the least busy one
    and still be chosen for the prefix it holds. ``retries``: further instances tried for a request,
    for each of the two roles. ``access``: who may use the router; its first key is the one that it
    itself uses at instances.
    """

    roster: Roster
    prefill_min_tokens: int
    imbalance: int
    retries: int
    max_requests: int
    timeout_s: float
    access: Access = field(default_factory=Access)
    traces_endpoint: str | None = None


@dataclass(slots=True)
class Completion:
    """A request in flight: the client's body, the instances that served it, and the prompt tokens
    of each by source.

    ``headers``: those to forward. ``prompt``: None if it cannot be compared with others.
    ``expected``: what the decode instance was expected to recall. ``handover``: what it is told of
    blocks that a prefill instance has. ``outcome``: how a stream ended.
    ``span``: None where nothing is traced. ``nbytes``: of the body, for which ``hold`` is called
    with as many less when no instance will be sent it again; it is not kept then.
    """

    path: str
    body: Body
    headers: Mapping[str, str]
    prompt: Prompt | None
    nbytes: int
    hold: Callable[[int], None]
    prefill: Instance | None = None
    decode: Instance | None = None
    prefill_split: dict[str, int] = field(default_factory=dict)
    decode_split: dict[str, int] = field(default_factory=dict)
    expected: Expected = field(default_factory=dict)
    handover: Mapping[str, Any] = field(default_factory=dict)
    outcome: str = "cancelled"
    span: CompletionSpan | None = None

    def forget(self) -> None:
        """An instance has begun to answer, or none will be asked."""
        self.body, self.prompt = Body({}), None
        self.hold(-self.nbytes)
        self.nbytes = 0

    def header(self) -> str:
        """``x-kvrecall``: the instances, and the prompt tokens by source as far as known."""
        words = []
        for instance, split in (
            (self.prefill, self.prefill_split),
            (self.decode, self.decode_split),
        ):
            if instance is not None:
                role = instance.word
                words.append(f"{role}={instance.name}")
                words += [f"{role}.{name}={count}" for name, count in split.items()]
        return ";".join(words)

    def complete_usage(self, usage: dict[str, Any]) -> None:
        """Completes the usage object of the decode instance's reply.

        ``cached_tokens`` becomes what no instance computed for this request: to the decode
        instance, everything the prefill instance has just computed looks cached.
        """
        details = usage.get("prompt_tokens_details")
        details = details if isinstance(details, dict) else {}
        self.decode_split = split_of(details.get("recall"))
        if self.prefill_split:
            cached = sum(self.prefill_split.values()) - self.prefill_split.get("computed", 0)
            details = {**details, "cached_tokens": cached, "prefill": dict(self.prefill_split)}
        if details:
            usage["prompt_tokens_details"] = details

    def complete_event(self, event: bytes) -> bytes:
        """``event`` of a stream, its usage completed if it has one."""
        if b'"usage"' not in event:
            return event
        begin, end = data_of(event)
        chunk: dict[str, Any] = dict(fields_of(event[begin:end]))
        usage = value_of(chunk.get("usage"), dict[str, Any])
        if usage is None:
            return event
        self.complete_usage(usage)
        return event[:begin] + msgspec.json.encode({**chunk, "usage": usage}) + event[end:]


def split_of(value: object) -> dict[str, int]:
    """Tokens by source as an instance reported them; empty if it did not."""
    if not isinstance(value, Mapping):
        return {}
    counts = {name: value.get(name) for name in SOURCES}
    return {n: count for n, count in counts.items() if type(count) is int and 0 <= count < _MANY}


def prompt_only(body: Body) -> Body:
    """``body`` for a prefill instance: the same prompt, one token of an answer."""
    short = {name: raw for name, raw in body.fields.items() if name not in _ANSWER_FIELDS}
    short |= {"max_tokens": 1, "temperature": 0.0, "kv_transfer_params": _HELD}
    if "messages" in short:
        short["max_completion_tokens"] = 1
    if bytes(body.raw("tool_choice")) not in (b"", b'"auto"', b'"none"'):
        short["tool_choice"] = "none"  # the answer is not used, so its form does not matter
    return Body(short)


def error_response(status: int, message: str, kind: str = "router_error") -> Response:
    """An error in OpenAI's form."""
    body = {"error": {"message": message, "type": kind, "code": status}}
    return Response(json.dumps(body), status, _retry_after(status), "application/json")


def _retry_after(status: int) -> dict[str, str]:
    return {RETRY_HEADER: "1"} if status == 503 else {}


class Router:
    """Serves completions with the instances of a fleet."""

    def __init__(self, settings: RouterSettings, fleet_of: type[Fleet] = Fleet) -> None:
        """``fleet_of``: how it chooses among its instances."""
        self._settings = settings
        self._subscriptions = Subscriptions(lambda seconds: self.metrics.event_lag.observe(seconds))
        engines, prefill, decode = settings.roster.read()
        self.fleet = fleet_of(prefill, decode, settings.imbalance, engines, self._subscriptions)
        self._rounds = 0
        self._probes: dict[Instance, asyncio.Task[None]] = {}  # that are not answered yet
        self.metrics = RouterMetrics(self.fleet, self._subscriptions)
        self.upstream = Upstream(settings.timeout_s)
        self.traces = RouterTraces(settings.traces_endpoint)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncGenerator[None, None]:
        """Probes instances and follows their events while the context is open; enters once all have
        answered, or some, and the others hang."""
        async with contextlib.aclosing(self.upstream), self._subscriptions.running():
            await self._probe_all(0.0)
            if self._probes:
                await asyncio.wait(self._probes.values(), timeout=_PROBE_EVERY_S)
            while self._probes and not self.fleet.can_serve:
                await asyncio.wait(self._probes.values(), return_when=asyncio.FIRST_COMPLETED)
            task = asyncio.create_task(self._probe_on())
            try:
                yield
            finally:
                tasks = [task, *self._probes.values()]
                for one in tasks:
                    one.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                self.traces.close()

    async def _probe_on(self) -> None:
        while True:
            if self._settings.roster.has_changed():
                try:
                    engines, prefill, decode = self._settings.roster.read()
                except ConfigError as error:
                    log.warning("%s; the instances stay as they were", error)
                else:
                    self.fleet.consist_of(prefill, decode, engines)
            await self._probe_all(_PROBE_EVERY_S)
            self.upstream.tidy()

    async def _probe_all(self, during_s: float) -> None:
        """Probes one after another: a thousand at once would delay what is served by as much. Waits
        for no answer: an instance that hangs would delay what is known of all others."""
        lists_models = self._rounds % _LIST_EVERY == 0
        self._rounds += 1

        async def probe(instance: Instance) -> None:
            was_up = instance.healthy
            well = await self.upstream.probe(instance)
            if well and (lists_models or not instance.healthy):
                instance.serves, instance.models = await self.upstream.models(
                    instance, next(iter(self._settings.access.keys), None)
                )
            lost = well and was_up and not instance.healthy  # after it had answered
            if not (lost or instance.leaves):
                self.fleet.probed(instance, well)

        began, every = time.monotonic(), self.fleet.all
        for place, one in enumerate(every):
            await asyncio.sleep(began + during_s * place / len(every) - time.monotonic())
            if one not in self._probes:
                self._probes[one] = asyncio.create_task(probe(one))
                self._probes[one].add_done_callback(partial(self._probes.pop, one))
        await asyncio.sleep(began + during_s - time.monotonic())

    async def serve(self, request: Completion, held: contextlib.ExitStack) -> Response:
        """The reply for the client. Closes ``held`` when the reply has ended."""
        request.prompt = await self._tokenized(request)
        if self.fleet.prefill:
            outcome, request.handover = await self._prefill(request)
            self.metrics.prefills.labels(outcome).inc()
        return await self._decode(request, held)

    async def _tokenized(self, request: Completion) -> Prompt | None:
        """The prompt with its tokens, if any instance's events can be compared with them."""
        prompt, block = request.prompt, self.fleet.least_block
        if prompt is None or block is None:
            return prompt
        if request.path not in _PREFILLED:
            self.metrics.tokenized.labels("unknown").inc()
            return prompt
        if not request.body.raw("messages") and not prompt.given and prompt.most_tokens <= block:
            return prompt
        model = request.body.get("model")
        instance = self.fleet.least_busy(model)
        is_named = model is None or (isinstance(model, str) and model in self.fleet.models)
        if instance is None or not is_named:
            return prompt  # with an adapter, blocks have other hashes
        ids = await self.upstream.tokens(instance, request.body, prompt, request.headers)
        self.metrics.tokenized.labels("done" if ids is not None else "unknown").inc()
        if ids is None:
            return prompt
        return await aside(request.body.nbytes, prompt.with_ids, ids, self.fleet.rules)

    async def _prefill(self, request: Completion) -> tuple[str, Mapping[str, Any]]:
        """Has a prefill instance compute the prompt. Returns the outcome and what the decode
        instance is told of its blocks: a receipt, and what connectors beside kvrecall's add. If
        every prefill instance fails, the decode instance computes the prompt."""
        prompt = request.prompt
        if (
            request.path not in _PREFILLED
            or prompt is None
            or request.body.get("prompt_logprobs") is not None
        ):
            return "unsuitable", {}
        model = request.body.get("model")
        if self.fleet.new_tokens(prompt, model) < self._settings.prefill_min_tokens:
            return "short", {}
        candidates = self.fleet.best_for_prefill(prompt, model, self._settings.retries + 1)
        for attempt, instance in enumerate(candidates):
            if attempt:
                self.metrics.retries.labels("prefill").inc()
            began = time.monotonic()
            content = prompt_only(request.body).encoded()
            try:
                instance.inflight += 1
                answer = await self._ask(request, instance, "prefill", content)
            except InstanceFailedError:
                continue
            finally:
                instance.less_busy()
            self.metrics.prefill_seconds.observe(time.monotonic() - began)
            if answer.status != 200:
                return "refused", {}  # the decode instance reports the error
            params = fields_of(fields_of(answer.content).get("kv_transfer_params", b""))
            request.prefill = instance
            request.prefill_split = split_of(value_of(params.get(REPORT)))
            self._served(request, instance)
            self.metrics.count_tokens("prefill", request.prefill_split)
            told = {name: raw for name, raw in params.items() if bytes(raw) != b"null"}
            return "done", {one: told[one] for one in told.keys() - {REPORT, UNIT, MISSED}}
        return ("failed" if candidates else "none_up"), {}

    async def _decode(self, request: Completion, held: contextlib.ExitStack) -> Response:
        """The answer of a decode instance. A failure before the first byte is retried at another
        instance, up to ``retries`` times."""
        began = time.monotonic()
        failure: InstanceFailedError | None = None
        model, most = request.body.get("model"), self._settings.retries + 1
        candidates = self.fleet.best_for_decode(request.prompt, model, most)
        for attempt, instance in enumerate(candidates):
            if attempt:
                self.metrics.retries.labels(instance.word).inc()
            body, others = request.body, candidates[attempt + 1 :]
            if request.handover and instance.role is not Role.PREFILL:
                given = fields_of(body.fields.get("kv_transfer_params", b""))
                body = body.but(kv_transfer_params={**given, **request.handover})
            content = body.encoded()
            instance.inflight += 1
            try:
                got = await self._ask(request, instance, "decode", content, others)
            except BaseException as error:
                instance.less_busy()
                if not isinstance(error, InstanceFailedError):
                    raise
                failure = error
                continue
            held.callback(instance.less_busy)
            self._served(request, instance)
            request.forget()
            request.decode = instance
            self.metrics.first_byte_seconds.observe(time.monotonic() - began)
            if isinstance(got, ReplyStream):
                return self._streamed(request, instance, got, held)
            return self._whole(request, got)
        self.metrics.requests.labels("failed").inc()
        if failure is None:
            return error_response(503, "no instance is up", "service_unavailable")
        if failure.reply is not None:
            reply = failure.reply
            tells = any(name.decode("latin-1") == RETRY_HEADER for name, _ in reply.headers)
            return passed_on(reply, {} if tells else _retry_after(reply.status))
        return error_response(502, f"no instance could serve the request: {failure}")

    async def _ask(
        self,
        request: Completion,
        instance: Instance,
        part: str,
        content: bytes,
        others: Sequence[Instance] | None = None,
    ) -> Any:
        """What an instance answers to ``content``, its ``part`` of the request: an InstanceReply,
        or the ReplyStream that the client asked for. Raises InstanceFailedError, which is counted
        then, also if it hangs while any of ``others`` (None: another way) could answer."""
        request.expected = self.fleet.expected(instance, request.prompt)
        cost = self.fleet.cost_of(request.prompt, request.expected)
        self.fleet.sent(instance, request.prompt)
        streams = part == "decode" and request.body.get("stream")
        send = self.upstream.stream if streams else self.upstream.ask
        call: contextlib.AbstractContextManager[Mapping[str, str]]
        call = contextlib.nullcontext(request.headers)
        if request.span is not None:
            call = request.span.call(part, instance.name, request.headers)
        try:
            with call as headers:
                work = send(instance, request.path, content, headers)
                return await instance.answer(work, cost, others)
        except TimeoutError:
            message = f"{instance.name} does not answer, and neither does its /health"
            failure = InstanceFailedError(message, gone=False)
        except InstanceFailedError as error:
            failure = error
        self._failed(instance, failure)
        raise failure

    def _served(self, request: Completion, instance: Instance) -> None:
        unheld = "unread" if request.prompt is None else "new"
        outcome = "held" if request.expected else unheld
        self.metrics.affinity.labels(instance.word, outcome).inc()
        self.fleet.computed(instance, request.prompt)

    def _failed(self, instance: Instance, error: InstanceFailedError) -> None:
        self.metrics.failures.labels(instance.word, instance.name).inc()
        if error.gone:
            self.fleet.lost(instance, str(error))
        else:
            log.warning("%s instance %s: %s", instance.word, instance.url, error)

    def _whole(self, request: Completion, answer: InstanceReply) -> Response:
        fields: dict[str, Any] = dict(fields_of(answer.content))
        usage = value_of(fields.get("usage"), dict[str, Any])
        if answer.status == 200 and usage is not None:
            told = usage.get("prompt_tokens_details")
            request.complete_usage(usage)
            if not request.decode_split:  # of ``vllm serve``
                params = fields_of(fields.get("kv_transfer_params", b""))
                request.decode_split = split_of(value_of(params.get(REPORT)))
            self._count(request)
            if usage.get("prompt_tokens_details") != told:
                answer = replace(answer, content=msgspec.json.encode({**fields, "usage": usage}))
        self.metrics.requests.labels("ok" if answer.status == 200 else "refused").inc()
        return passed_on(answer, {RECALL_HEADER: request.header()})

    def _count(self, request: Completion) -> None:
        """Counts where the prompt came from, and where it was expected to."""
        if request.decode is not None and request.decode_split:
            role = request.decode.word
            self.metrics.count_tokens(role, request.decode_split)
            for tier, count in request.expected.items():
                self.metrics.expected.labels(role, tier).inc(count)

    def _streamed(
        self,
        request: Completion,
        instance: Instance,
        stream: ReplyStream,
        held: contextlib.ExitStack,
    ) -> Response:
        async def events() -> AsyncGenerator[bytes, None]:
            try:
                yield request.complete_event(stream.first)
                async for event in stream.events:
                    yield request.complete_event(event)
                request.outcome = "ok"
            except InstanceFailedError as error:
                request.outcome = "broken"
                self._failed(instance, InstanceFailedError(str(error), gone=True))
                broken = {"message": f"{instance.name} ended early", "type": "router_error"}
                yield f"data: {json.dumps({'error': broken | {'code': 502}})}\n\n".encode()

        def ended() -> None:
            self.metrics.requests.labels(request.outcome).inc()
            self._count(request)

        response = _StreamedReply(events(), stream, request.header())
        response.held = held.pop_all()
        response.held.callback(ended)
        return response


class _StreamedReply(StreamingResponse):
    """A stream that releases its resources however it ends, even before it began."""

    def __init__(self, events: AsyncIterator[bytes], stream: ReplyStream, header: str) -> None:
        super().__init__(events)
        self.raw_headers = _headers(stream.headers, {RECALL_HEADER: header})
        self._stream = stream
        self.held = contextlib.ExitStack()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self.held:
            try:
                await super().__call__(scope, receive, send)
            finally:
                await self._stream.close()


def _headers(given: Headers, own: Mapping[str, str]) -> Headers:
    """An instance's headers for the client, and the router's own, which come first."""
    made = [(name.encode(), value.encode("latin-1")) for name, value in own.items()]
    names = {name for name, _ in made}
    return made + [(name, value) for name, value in given if name not in names]


def passed_on(answer: InstanceReply, own: Mapping[str, str] | None = None) -> Response:
    """An instance's reply, with headers of the router's."""
    response = Response(answer.content, answer.status)
    response.raw_headers += _headers(answer.headers, own or {})
    return response
