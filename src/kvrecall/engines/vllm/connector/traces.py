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
from typing import TYPE_CHECKING, Any

from kvrecall.block import TierName
from kvrecall.engines.vllm.connector.handover import Handover
from kvrecall.engines.vllm.connector.hit import Hit, Lookup
from kvrecall.engines.vllm.connector.load import PrefixLoad
from kvrecall.engines.vllm.connector.observers import SchedulerEvents
from kvrecall.engines.vllm.connector.request import RequestState
from kvrecall.engines.vllm.device.base import Copy
from kvrecall.engines.vllm.wire import (
    EngineFacts,
)
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


@dataclass(frozen=True, slots=True)
class _Batch:
    """Spans for the thread. ``began_ns``: of the request, since the epoch. ``ended``: when it
    ended, if it has."""

    span: Span
    began_ns: int
    epoch_s: float
    parts: Sequence[SpanPart]
    first_token: float | None = None
    ended: float | None = None
    attributes: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class RequestTrace:
    """What is noted of one request. ``span``: the request's, which has begun. ``epoch_s``: seconds
    between the epoch and the clock's zero. ``parts``: to be sent next; the others are those that
    still change. ``first_token``: when it was there."""

    request: Any
    span: Span
    epoch_s: float
    parts: list[SpanPart] = field(default_factory=list)
    is_queued: bool = True
    wait: SpanPart | None = None
    lookup: SpanPart | None = None
    call: SpanPart | None = None
    copy: SpanPart | None = None
    compute: SpanPart | None = None
    save: SpanPart | None = None
    first_token: float | None = None
    has_ended: bool = False

    def add(self, part: SpanPart) -> SpanPart:
        if self.first_token is None and len(self.parts) < _MOST_PARTS:
            self.parts.append(part)
        return part


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
        if trace.wait is None:
            trace.wait = trace.add(SpanPart("wait", now, now))
        trace.wait.ended = now
        trace.wait.attributes = {"wait.tokens": tokens, "wait.outcome": outcome.value}

    @_traced
    def looked_up(self, trace: RequestTrace, began: float, blocks: int, search: Lookup) -> None:
        now = self._now()
        part, hit = trace.lookup, search.hit
        if part is None:
            part = trace.lookup = trace.add(SpanPart("lookup", began, now))
        found = Counter(tier for run in hit.runs for tier in run.tiers) if hit else Counter()
        part.ended = now
        part.attributes = {
            "lookup.blocks": blocks,
            "lookup.found": 0 if hit is None else hit.blocks,
            **{f"lookup.found.{tier}": found[tier] for tier in TierName if found[tier]},
            "lookup.rounds": part.attributes.get("lookup.rounds", 0) + 1,
            "lookup.unanswered": search.is_pending,
        }
        self._calls(part, "find", began, now)
        if not search.is_pending:
            trace.lookup = None

    @_traced
    def declined(self, trace: RequestTrace, hit: Hit, shorter: Hit | None, plan: object) -> None:
        lookups = [part for part in trace.parts if part.name == "lookup"]
        blocks = hit.blocks - (0 if shorter is None else shorter.blocks)
        if blocks and lookups:
            lookups[-1].attributes["lookup.declined"] = blocks

    @_traced
    def acquired(self, trace: RequestTrace, load: PrefixLoad) -> None:
        trace.lookup = None
        trace.call = SpanPart("acquire", load.mark.seconds, self._now())

    @_traced
    def load_over(self, trace: RequestTrace, load: PrefixLoad) -> None:
        now = self._now()
        wanted: Counter[TierName] = Counter()
        arrived: Counter[TierName] = Counter()
        nbytes: Counter[TierName] = Counter()
        last: dict[TierName, float] = {}
        for run in load.hit.runs:
            wanted.update(run.tiers)
            size = self._facts.groups[run.group].block_bytes
            for tier in run.tiers:
                nbytes[tier] += size
        for recall, seconds in zip(load.whole, load.came, strict=True):
            arrived.update(recall.tiers)
            last |= dict.fromkeys(recall.tiers, load.mark.seconds + seconds)
        for tier in filter(wanted.__getitem__, TierName):
            missing = wanted[tier] - arrived[tier]
            outcome = "whole"
            if load.offsets is None:
                outcome = "dropped"
            elif missing > 0 and now - load.mark.seconds >= self._load_deadline_s:
                outcome = "late"
            elif missing > 0:
                outcome = "given_up" if load.given_up else "lost"
            share = 1.0 if missing <= 0 else arrived[tier] / wanted[tier]
            ended = now if missing > 0 else last.get(tier, now)
            part = trace.add(SpanPart("load", load.mark.seconds, max(ended, load.mark.seconds)))
            part.attributes = {
                "load.tier": str(tier),
                "load.blocks": min(arrived[tier], wanted[tier]),
                "load.bytes": round(nbytes[tier] * share),
                "load.missing": max(0, missing),
                "load.outcome": outcome,
            }
            call, trace.call = trace.call, None
            if call is not None:
                self._calls(part, "acquire", call.began, min(call.ended, part.ended))

    @_traced
    def load_ordered(self, trace: RequestTrace, copies: Sequence[Copy]) -> None:
        now, groups = self._now(), self._facts.groups
        counts = [(len(copy.block_ids), groups[copy.group].record_bytes) for copy in copies]
        trace.copy = trace.add(SpanPart("copy", now, now))
        trace.copy.attributes = {
            "copy.blocks": sum(blocks for blocks, _ in counts),
            "copy.bytes": sum(blocks * nbytes for blocks, nbytes in counts),
            "copy.device": self._device,
        }

    @_traced
    def load_done(
        self, trace: RequestTrace, load: object, failed: bool, copied_s: float | None
    ) -> None:
        part, trace.copy = trace.copy, None
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
            part, request = trace.compute, state.request
            if part is None:
                part = trace.compute = trace.add(SpanPart("compute", now, now))
                part.attributes = {"compute.tokens": 0, "compute.steps": 0}
            left = max(0, int(request.num_prompt_tokens) - int(request.num_computed_tokens))
            part.ended = now
            part.attributes["compute.tokens"] += min(scheduled[state.id], left)
            part.attributes["compute.steps"] += 1
            self._computing[state.id] = trace

    def step_ended(self) -> None:
        """vLLM has the results of a step."""
        for request_id, trace in list(self._computing.items()):
            if self._has_first_token(trace):
                del self._computing[request_id]

    @_traced
    def store_ordered(self, trace: RequestTrace, group: int, blocks: int) -> None:
        now = self._now()
        if trace.save is None:
            trace.save = SpanPart("save", now, now)
            trace.save.attributes = {"save.blocks": 0, "save.bytes": 0, "save.failed": 0}
        trace.save.attributes["save.blocks"] += blocks
        trace.save.attributes["save.bytes"] += blocks * self._facts.groups[group].record_bytes

    def store_done(self, state: RequestState, failed: bool) -> None:
        trace = self.open.get(state.id)
        if trace is not None and trace.save is not None:
            trace.save.ended = self._now()
            trace.save.attributes["save.failed"] += failed
        if trace is not None and trace.has_ended:
            self._close_saved(state, trace)

    def finished(self, state: RequestState, final: int) -> None:
        trace, request = self.open.get(state.id), state.request
        if trace is None:
            return
        self._computing.pop(state.id, None)
        if trace.first_token is None and not self._has_first_token(trace) and trace.compute:
            trace.compute.ended = self._now()
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
        """The scheduler considers the request."""
        if trace.is_queued:
            trace.is_queued = False
            arrived = float(trace.request.arrival_time) - trace.epoch_s
            trace.add(SpanPart("queue", min(arrived, now), now))

    def _has_first_token(self, trace: RequestTrace) -> bool:
        if not trace.request.num_output_tokens:
            return False
        now = trace.first_token = self._now()
        if trace.compute is not None:
            trace.compute.ended = now
        self._send(trace, now)
        return True

    def _close_saved(self, state: RequestState, trace: RequestTrace) -> None:
        """The request has ended: its last span is sent once no store of it is open."""
        if not state.saving.open:
            del self.open[state.id]
            trace.parts = [] if trace.save is None else [trace.save]
            if trace.parts:
                self._send(trace)

    def _calls(self, part: SpanPart, name: str, began: float, ended: float) -> None:
        """A call of the pool within ``part``, where the pool is a service's."""
        if self._is_service and len(part.calls) < _MOST_PARTS:
            part.calls.append(SpanPart(f"pool.{name}", began, ended))

    def _send(self, trace: RequestTrace, *more: Any) -> None:
        """Hands the parts since the last call to the thread, and what else belongs to a batch;
        drops them if the thread is far behind."""
        parts, trace.parts = trace.parts, []
        began_ns = int(trace.request.arrival_time * 1e9)
        if self._batches.qsize() < _MOST_UNSENT:
            self._batches.put(_Batch(trace.span, began_ns, trace.epoch_s, parts, *more))
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

        def at(seconds: float) -> int:
            return max(batch.began_ns, int((seconds + batch.epoch_s) * 1e9))

        def make(part: SpanPart, parent: Span, kind: SpanKind = SpanKind.INTERNAL) -> None:
            span = self._tracer.start_span(
                _PREFIX + part.name,
                set_span_in_context(parent),
                kind,
                {_PREFIX + name: value for name, value in part.attributes.items()},
                start_time=at(part.began),
            )
            for call in part.calls:
                make(call, span, SpanKind.CLIENT)
            span.end(at(part.ended))

        for part in batch.parts:
            make(part, batch.span)
        if batch.first_token is not None:
            batch.span.add_event("first token", timestamp=at(batch.first_token))
        if batch.ended is not None:
            batch.span.set_attributes(
                {_PREFIX + name: value for name, value in batch.attributes.items()}
            )
            batch.span.end(at(batch.ended))
