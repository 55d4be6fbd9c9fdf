"""Spans of requests: what a prompt waited for until its first token.

Moments are noted while the scheduler side works (seconds of its clock, plain values); a thread
makes OpenTelemetry's spans of them once the first token is there, and when the request has ended.
Without vLLM's ``--otlp-traces-endpoint`` there is no ``Traces``.
"""

from __future__ import annotations

import functools
import logging
import queue
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from kvrecall.block import TierName
from kvrecall.engines.vllm.connector.handover import Handover
from kvrecall.engines.vllm.connector.hit import Hit, Lookup
from kvrecall.engines.vllm.connector.load import PrefixLoad
from kvrecall.engines.vllm.connector.observers import SchedulerEvents
from kvrecall.engines.vllm.connector.request import RequestState
from kvrecall.engines.vllm.device.base import Copy
from kvrecall.engines.vllm.wire import EngineFacts
from kvrecall.nicety import niceties
from kvrecall.traces import FLUSH_S, REQUEST_ID, end_provider, headers_of, parent_of, provider_at

if TYPE_CHECKING:
    from opentelemetry.trace import Span

logger = logging.getLogger("vllm.kvrecall")

_MOST_UNSENT = 4096  # batches of spans that wait for the thread
_MOST_PARTS = 64  # spans of a request before its first token
_SUFFIX = re.compile(r"-[0-9a-f]{8}$")  # vLLM's own, behind the id that the API gave a request
_PREFIX = "kvrecall."


@dataclass(slots=True)
class SpanPart:
    """A span to be made. ``began``, ``ended``: seconds of the scheduler side's clock.
    ``attributes``: without the prefix. ``calls``: into another process, within it."""

    name: str
    began: float
    ended: float
    attributes: dict[str, Any] = field(default_factory=dict)
    calls: list[SpanPart] = field(default_factory=list)


@dataclass(slots=True)
class RequestTrace:
    """What is noted of one request. ``span``: the request's, which has begun. ``epoch_s``: seconds
    between the epoch and the clock's zero. ``parts``: to be sent next; ``current``: by name, those
    that still change. ``first_token``: when it was there."""

    request: Any
    span: Span
    epoch_s: float
    parts: list[SpanPart] = field(default_factory=list)
    current: dict[str, SpanPart] = field(default_factory=dict)
    is_queued: bool = True
    first_token: float | None = None
    has_ended: bool = False

    def add(self, name: str, began: float, ended: float) -> SpanPart:
        part = SpanPart(name, began, ended)
        if self.first_token is None and len(self.parts) < _MOST_PARTS:
            self.parts.append(part)
        return part

    def go_on(self, name: str, began: float, now: float) -> SpanPart:
        """The current span of that name, which lasts until now; a new one if there is none."""
        part = self.current.get(name)
        if part is None:
            part = self.current[name] = self.add(name, began, now)
        part.ended = now
        return part


class _Batch(NamedTuple):
    """Spans for the thread. ``first_token``: when it was there; ``ended``: when the trace did."""

    trace: RequestTrace
    parts: Sequence[SpanPart]
    first_token: float | None = None
    ended: float | None = None
    attributes: Mapping[str, Any] = MappingProxyType({})


def _traced(note: Callable[..., None]) -> Callable[..., None]:
    """An event of a request, which goes to its trace if it has one."""

    @functools.wraps(note)
    def event(traces: Traces, state: RequestState | None, *args: Any) -> None:
        trace = traces.open.get(state.id) if state is not None and traces.open else None
        if trace is not None:
            note(traces, trace, *args)

    return event


@niceties("the traces of requests")
class Traces(SchedulerEvents):
    """The traced requests of an engine, and the thread that makes their spans. ``dropped`` counts
    batches of spans that the thread did not take in time."""

    def __init__(
        self,
        endpoint: str,
        facts: EngineFacts,
        device: str,
        is_service: bool,
        load_deadline_s: float,
        dropped: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``endpoint``: of an OTLP collector. ``device``: its kind. ``is_service``: the pool is in
        another process. ``clock``: the scheduler side's."""
        self._facts = facts
        self._device = device
        self._is_service = is_service
        self._load_deadline_s = load_deadline_s
        self._dropped = dropped
        self._has_dropped = False
        self._now = clock
        self.open: dict[str, RequestTrace] = {}  # of requests in the engine, or being saved
        self._computing: dict[str, RequestTrace] = {}  # without their first token
        self._provider = provider_at(endpoint, "engine")
        self._tracer = self._provider.get_tracer("kvrecall")
        self._batches: queue.SimpleQueue[_Batch | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._make, name="kvrecall-traces", daemon=True)
        self._thread.start()
        logger.info("kvrecall: spans of requests go to %s", endpoint)

    def admitted(self, state: RequestState) -> None:
        """Begins its span, unless its trace is not sampled.

        The span is a child of the client's, as vLLM's ``llm_request`` is. Without a client's, it
        begins a trace, and vLLM's span becomes its child: vLLM makes that at the request's end, in
        the API process, by the headers that come back with the request's outputs.
        """
        request = state.request
        parent = parent_of(request.trace_headers)
        span = self._tracer.start_span(
            f"{_PREFIX}request",
            parent,
            attributes={
                REQUEST_ID: _SUFFIX.sub("", request.request_id),
                f"{_PREFIX}prompt_tokens": request.num_prompt_tokens,
                f"{_PREFIX}salted": request.cache_salt is not None,  # by what salt, stays here
            },
            start_time=int(request.arrival_time * 1e9),
        )
        if not parent:
            request.trace_headers = headers_of(span.get_span_context())
        if span.is_recording():
            self.open[state.id] = RequestTrace(request, span, time.time() - self._now())

    @_traced
    def considered(self, trace: RequestTrace) -> None:
        self._taken(trace, self._now())

    @_traced
    def waited(self, trace: RequestTrace, outcome: Handover, tokens: int) -> None:
        now = self._now()
        part = trace.go_on("wait", now, now)
        part.attributes = {"wait.tokens": tokens, "wait.outcome": outcome.value}

    @_traced
    def looked_up(self, trace: RequestTrace, began: float, blocks: int, search: Lookup) -> None:
        now, hit = self._now(), search.hit
        part = trace.go_on("lookup", began, now)
        found = Counter(tier for run in hit.runs for tier in run.tiers) if hit else Counter()
        part.attributes = {
            "lookup.blocks": blocks,
            "lookup.found": 0 if hit is None else hit.blocks,
            **{f"lookup.found.{tier}": found[tier] for tier in TierName if found[tier]},
            "lookup.rounds": part.attributes.get("lookup.rounds", 0) + 1,
            "lookup.unanswered": search.is_pending,
        }
        self._calls(part, "find", began, now)
        if not search.is_pending:
            del trace.current["lookup"]

    @_traced
    def declined(self, trace: RequestTrace, hit: Hit, shorter: Hit | None, plan: object) -> None:
        lookups = [part for part in trace.parts if part.name == "lookup"]
        blocks = hit.blocks - (0 if shorter is None else shorter.blocks)
        if blocks and lookups:
            lookups[-1].attributes["lookup.declined"] = blocks

    @_traced
    def load_over(self, trace: RequestTrace, load: PrefixLoad) -> None:
        trace.current.pop("lookup", None)
        now, began, runs = self._now(), load.mark.seconds, load.hit.runs
        calls_end: float | None = began + load.acquired_s
        for tier in filter(lambda tier: any(tier in run.tiers for run in runs), TierName):
            counts = [(run.tiers.count(tier), self._facts.groups[run.group]) for run in runs]
            wanted = sum(count for count, _ in counts)
            came = min(wanted, sum(recall.tiers.count(tier) for recall in load.whole))
            seen = zip(load.whole, load.came, strict=True)
            last = max((seconds for recall, seconds in seen if tier in recall.tiers), default=0.0)
            outcome = "whole"
            if load.offsets is None:
                outcome = "dropped"
            elif came < wanted:
                is_late = now - began >= self._load_deadline_s
                outcome = "late" if is_late else "given_up" if load.given_up else "lost"
            part = trace.add("load", began, max(began, now if came < wanted else began + last))
            part.attributes = {
                "load.tier": str(tier),
                "load.blocks": came,
                "load.bytes": round(sum(n * of.block_bytes for n, of in counts) * came / wanted),
                "load.missing": wanted - came,
                "load.outcome": outcome,
            }
            if calls_end is not None:
                self._calls(part, "acquire", began, min(calls_end, part.ended))
                calls_end = None

    @_traced
    def load_ordered(self, trace: RequestTrace, copies: Sequence[Copy]) -> None:
        now, groups = self._now(), self._facts.groups
        counts = [(len(copy.block_ids), groups[copy.group].record_bytes) for copy in copies]
        trace.go_on("copy", now, now).attributes = {
            "copy.blocks": sum(blocks for blocks, _ in counts),
            "copy.bytes": sum(blocks * nbytes for blocks, nbytes in counts),
            "copy.device": self._device,
        }

    @_traced
    def load_done(
        self, trace: RequestTrace, load: object, failed: bool, copied_s: float | None
    ) -> None:
        part = trace.current.pop("copy", None)
        if part is not None:
            part.ended = self._now()
            part.attributes["copy.failed"] = failed
            if copied_s is not None:
                part.attributes["copy.device_seconds"] = copied_s

    def computes(self, states: Sequence[RequestState], scheduled: Mapping[str, int]) -> None:
        now = self._now()
        for state in states if self.open else ():
            trace = self.open.get(state.id)
            if trace is None or trace.first_token is not None:
                continue
            self._taken(trace, now)
            request, part = state.request, trace.go_on("compute", now, now)
            left = max(0, int(request.num_prompt_tokens) - int(request.num_computed_tokens))
            done = part.attributes
            done["compute.tokens"] = done.get("compute.tokens", 0) + min(scheduled[state.id], left)
            done["compute.steps"] = done.get("compute.steps", 0) + 1
            self._computing[state.id] = trace

    def step_ended(self) -> None:
        """vLLM has the results of a step."""
        for request_id, trace in list(self._computing.items()):
            if self._has_first_token(trace):
                del self._computing[request_id]

    @_traced
    def store_ordered(self, trace: RequestTrace, group: int, blocks: int) -> None:
        now = self._now()
        empty = {"save.blocks": 0, "save.bytes": 0, "save.failed": 0}
        part = trace.current.setdefault("save", SpanPart("save", now, now, empty))
        part.attributes["save.blocks"] += blocks
        part.attributes["save.bytes"] += blocks * self._facts.groups[group].record_bytes

    def store_done(self, state: RequestState, failed: bool) -> None:
        trace = self.open.get(state.id)
        if trace is not None and (part := trace.current.get("save")) is not None:
            part.ended = self._now()
            part.attributes["save.failed"] += failed
        if trace is not None and trace.has_ended:
            self._close_saved(state, trace)

    def finished(self, state: RequestState, final: int) -> None:
        trace, request = self.open.get(state.id), state.request
        if trace is None:
            return
        self._computing.pop(state.id, None)
        part = trace.current.get("compute")
        if trace.first_token is None and not self._has_first_token(trace) and part is not None:
            part.ended = self._now()
        attributes = {
            **{f"tokens.{source}": count for source, count in state.sources().items()},
            "output_tokens": request.num_output_tokens,
            "preemptions": request.num_preemptions,
            "outcome": request.status.name.removeprefix("FINISHED_").lower(),
        }
        miss = state.missed.miss
        if miss is not None:
            attributes |= {"missed": miss["reason"], "missed.tokens": miss["tokens"]}
            if "tier" in miss:
                attributes["missed.tier"] = miss["tier"]
        self._send(trace, None, self._now(), attributes)
        trace.has_ended = True
        self._close_saved(state, trace)

    # ---- within --------------------------------------------------------------------------

    def _taken(self, trace: RequestTrace, now: float) -> None:
        if trace.is_queued:
            trace.is_queued = False
            arrived = float(trace.request.arrival_time) - trace.epoch_s
            trace.add("queue", min(arrived, now), now)

    def _has_first_token(self, trace: RequestTrace) -> bool:
        if not trace.request.num_output_tokens:
            return False
        now = trace.first_token = self._now()
        if (part := trace.current.get("compute")) is not None:
            part.ended = now
        self._send(trace, now)
        return True

    def _close_saved(self, state: RequestState, trace: RequestTrace) -> None:
        """The request has ended: its last span is sent once no store of it is open."""
        if not state.saving.open:
            del self.open[state.id]
            if (part := trace.current.get("save")) is not None:
                trace.parts = [part]
                self._send(trace)

    def _calls(self, part: SpanPart, name: str, began: float, ended: float) -> None:
        """A call of the pool within ``part``, where the pool is a service's."""
        if self._is_service and len(part.calls) < _MOST_PARTS:
            part.calls.append(SpanPart(f"pool.{name}", began, ended))

    def _send(self, trace: RequestTrace, *more: Any) -> None:
        """Hands the parts since the last call to the thread, with the rest of a batch; drops them
        if it is far behind."""
        parts, trace.parts = trace.parts, []
        if self._batches.qsize() < _MOST_UNSENT:
            self._batches.put(_Batch(trace, parts, *more))
            return
        self._dropped()
        if not self._has_dropped:
            self._has_dropped = True
            logger.warning(
                "kvrecall: spans are dropped, because %d batches wait to be made; "
                "sample fewer requests (OTEL_TRACES_SAMPLER=parentbased_traceidratio, "
                "OTEL_TRACES_SAMPLER_ARG=0.1)",
                _MOST_UNSENT,
            )

    def close(self) -> None:
        """Ends the thread and sends what there is; waits for both, bounded."""
        self._batches.put(None)
        self._thread.join(FLUSH_S)
        end_provider(self._provider)

    def _make(self) -> None:
        while (batch := self._batches.get()) is not None:
            try:
                self._make_spans(batch)
            except Exception:
                logger.exception("kvrecall: the spans of a request could not be made")

    def _make_spans(self, batch: _Batch) -> None:
        from opentelemetry.trace import SpanKind, set_span_in_context

        trace, parts, first_token, ended, attributes = batch
        began_ns = int(trace.request.arrival_time * 1e9)

        def at(seconds: float) -> int:
            return max(began_ns, int((seconds + trace.epoch_s) * 1e9))

        def named(attributes: Mapping[str, Any]) -> dict[str, Any]:
            return {_PREFIX + name: value for name, value in attributes.items()}

        def make(part: SpanPart, parent: Span, kind: SpanKind = SpanKind.INTERNAL) -> None:
            context, name = set_span_in_context(parent), _PREFIX + part.name
            attributes, began = named(part.attributes), at(part.began)
            span = self._tracer.start_span(name, context, kind, attributes, start_time=began)
            for call in part.calls:
                make(call, span, SpanKind.CLIENT)
            span.end(at(part.ended))

        for part in parts:
            make(part, trace.span)
        if first_token is not None:
            trace.span.add_event("first token", timestamp=at(first_token))
        if ended is not None:
            trace.span.set_attributes(named(attributes))
            trace.span.end(at(ended))
