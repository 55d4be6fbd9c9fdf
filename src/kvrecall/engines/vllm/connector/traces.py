"""Spans of requests: what a prompt waited for until its first token.

The scheduler side notes moments while it works (seconds of its clock, plain values); a thread makes
OpenTelemetry's spans of them once the first token is there, and when the request has ended. Without
vLLM's ``--otlp-traces-endpoint`` there is no ``Traces``, and the scheduler side tests for that.
"""

from __future__ import annotations

import logging
import queue
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvrecall.block import TierName
from kvrecall.engines.base import Miss
from kvrecall.engines.vllm.connector.hit import Hit
from kvrecall.engines.vllm.connector.load import PrefixLoad
from kvrecall.engines.vllm.connector.pages import Copy
from kvrecall.engines.vllm.connector.request import Handover
from kvrecall.engines.vllm.connector.wire import EngineFacts
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
class Part:
    """A span to be made. ``began``, ``ended``: seconds of the scheduler side's clock.
    ``attributes``: without the prefix. ``calls``: into another process, within it."""

    name: str
    began: float
    ended: float
    attributes: dict[str, Any] = field(default_factory=dict)
    calls: list[Part] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Batch:
    """Spans for the thread. ``began_ns``: of the request, since the epoch. ``ended``: when it
    ended, if it has."""

    span: Span
    began_ns: int
    epoch_s: float
    parts: Sequence[Part]
    first_token: float | None = None
    ended: float | None = None
    attributes: dict[str, Any] = field(default_factory=dict)


@niceties("the trace of a request")
class RequestTrace:
    """What is noted of one request. Called from the engine's thread only."""

    def __init__(self, traces: Traces, request: Any, span: Span, epoch_s: float) -> None:
        """``span``: the request's, which has begun. ``epoch_s``: seconds between the epoch and the
        clock's zero."""
        self._traces = traces
        self._request = request
        self._span = span
        self._began_ns = int(request.arrival_time * 1e9)
        self._epoch_s = epoch_s
        self._now = traces.clock
        self._parts: list[Part] = []
        self._is_queued = True
        self._wait: Part | None = None
        self._lookup: Part | None = None
        self._call: Part | None = None
        self._copy: Part | None = None
        self._compute: Part | None = None
        self._save: Part | None = None
        self._first_token: float | None = None
        self._ended = False

    @property
    def is_open(self) -> bool:
        """Whether the first token is still to come."""
        return self._first_token is None

    def taken(self) -> None:
        """The scheduler considers the request."""
        if self._is_queued:
            self._is_queued = False
            arrived = float(self._request.arrival_time) - self._epoch_s
            now = self._now()
            self._add(Part("queue", min(arrived, now), now))

    def waited(self, outcome: Handover, tokens: int) -> None:
        """The request looked for ``tokens`` tokens that a prefill instance promised."""
        now = self._now()
        if self._wait is None:
            self._wait = self._add(Part("wait", now, now))
        self._wait.ended = now
        self._wait.attributes = {"wait.tokens": tokens, "wait.outcome": outcome.value}

    def looked(self, began: float, blocks: int, hit: Hit | None, is_pending: bool) -> None:
        """The pool was asked for ``blocks`` blocks of the chain since ``began``. ``is_pending``: a
        tier beyond this host has not answered yet."""
        now = self._now()
        part = self._lookup
        if part is None:
            part = self._lookup = self._add(Part("lookup", began, now))
        asked = part.attributes.get("lookup.rounds", 0) + 1
        found = Counter(tier for run in hit.runs for tier in run.tiers) if hit else Counter()
        part.ended = now
        part.attributes = {
            "lookup.blocks": blocks,
            "lookup.found": 0 if hit is None else hit.blocks,
            **{f"lookup.found.{tier}": found[tier] for tier in TierName if found[tier]},
            "lookup.rounds": asked,
            "lookup.unanswered": is_pending,
        }
        self._calls(part, "find", began, now)
        if not is_pending:
            self._lookup = None

    def declined(self, blocks: int) -> None:
        """So many of the blocks found are computed: that is expected to be faster."""
        lookups = [part for part in self._parts if part.name == "lookup"]
        if blocks and lookups:
            lookups[-1].attributes["lookup.declined"] = blocks

    def acquired(self, load: PrefixLoad) -> None:
        """The pool was asked for the load's blocks since ``load.mark``."""
        self._lookup = None
        load.came = []
        now = self._now()
        self._call = Part("acquire", load.mark.seconds, now)

    def loaded(self, load: PrefixLoad, deadline_s: float) -> None:
        """Nothing more of the load is waited for; if ``load.offsets`` is None it was dropped."""
        now = self._now()
        came = load.came or []
        wanted: Counter[TierName] = Counter()
        arrived: Counter[TierName] = Counter()
        nbytes: Counter[TierName] = Counter()
        last: dict[TierName, float] = {}
        for run in load.hit.runs:
            wanted.update(run.tiers)
            size = self._traces.facts.groups[run.group].block_bytes
            for tier in run.tiers:
                nbytes[tier] += size
        for recall, seconds in zip(load.whole, came, strict=False):
            arrived.update(recall.tiers)
            last |= dict.fromkeys(recall.tiers, load.mark.seconds + seconds)
        for tier in TierName:
            missing = wanted[tier] - arrived[tier]
            if not wanted[tier]:
                continue
            outcome = "whole"
            if load.offsets is None:
                outcome = "dropped"
            elif missing > 0 and now - load.mark.seconds >= deadline_s:
                outcome = "late"
            elif missing > 0:
                outcome = "given_up" if load.given_up else "lost"
            share = 1.0 if missing <= 0 else arrived[tier] / wanted[tier]
            ended = now if missing > 0 else last.get(tier, now)
            attributes = {
                "load.tier": str(tier),
                "load.blocks": min(arrived[tier], wanted[tier]),
                "load.bytes": round(nbytes[tier] * share),
                "load.missing": max(0, missing),
                "load.outcome": outcome,
            }
            part = self._add(Part("load", load.mark.seconds, max(ended, load.mark.seconds)))
            part.attributes = attributes
            if self._call is not None:
                self._calls(part, "acquire", self._call.began, min(self._call.ended, part.ended))
                self._call = None

    def copies(self, copies: Sequence[Copy]) -> None:
        """The workers are to copy these blocks to the device."""
        now = self._now()
        groups = self._traces.facts.groups
        self._copy = self._add(Part("copy", now, now))
        self._copy.attributes = {
            "copy.blocks": sum(len(copy.block_ids) for copy in copies),
            "copy.bytes": sum(
                len(copy.block_ids) * groups[copy.group].record_bytes for copy in copies
            ),
            "copy.device": self._traces.device,
        }

    def copied(self, failed: bool, seconds: float | None) -> None:
        """Every rank has reported the copies. ``seconds``: of the device, the slowest rank's."""
        part, self._copy = self._copy, None
        if part is not None:
            part.ended = self._now()
            part.attributes["copy.failed"] = failed
            if seconds is not None:
                part.attributes["copy.device_seconds"] = seconds

    def computes(self, tokens: int) -> None:
        """A step computes so many tokens of the request, of its prompt or more."""
        self.taken()
        now = self._now()
        part = self._compute
        if part is None:
            part = self._compute = self._add(Part("compute", now, now))
            part.attributes = {"compute.tokens": 0, "compute.steps": 0}
        left = max(0, int(self._request.num_prompt_tokens) - int(self._request.num_computed_tokens))
        part.ended = now
        part.attributes["compute.tokens"] += min(tokens, left)
        part.attributes["compute.steps"] += 1
        self._traces.computing[self._request.request_id] = self

    def step_ended(self) -> bool:
        """Whether the first token is there."""
        if not self._request.num_output_tokens:
            return False
        now = self._now()
        self._first_token = now
        if self._compute is not None:
            self._compute.ended = now
        self._send(now)
        return True

    def saves(self, group: int, blocks: int) -> None:
        """The workers are to copy so many blocks of a KV group to the arena."""
        now = self._now()
        if self._save is None:
            self._save = Part("save", now, now)
            self._save.attributes = {"save.blocks": 0, "save.bytes": 0, "save.failed": 0}
        found = self._save.attributes
        found["save.blocks"] += blocks
        found["save.bytes"] += blocks * self._traces.facts.groups[group].record_bytes

    def saved(self, failed: bool, unsaved: int) -> None:
        """Every rank has reported a store. ``unsaved``: how many of the request are open."""
        if self._save is not None:
            self._save.ended = self._now()
            self._save.attributes["save.failed"] += failed
        if self._ended and not unsaved:
            self._send_save()

    def finished(self, sources: dict[str, int], unsaved: int, miss: Miss | None) -> None:
        """The request ended; ``sources``: tokens of its prompt; ``miss``: why the rest of it was
        computed. ``unsaved``: as of ``saved``."""
        request = self._request
        self._traces.computing.pop(request.request_id, None)
        if self.is_open and not self.step_ended() and self._compute is not None:
            self._compute.ended = self._now()
        now = self._now()
        attributes = {
            **{f"tokens.{source}": count for source, count in sources.items()},
            "output_tokens": request.num_output_tokens,
            "preemptions": request.num_preemptions,
            "outcome": request.status.name.removeprefix("FINISHED_").lower(),
        }
        if miss is not None:
            attributes |= {"missed": miss["reason"], "missed.tokens": miss["tokens"]}
            if "tier" in miss:
                attributes["missed.tier"] = miss["tier"]
        self._send(now, attributes)
        self._ended = True
        if not unsaved:
            self._send_save()

    # ---- within --------------------------------------------------------------------------

    def _add(self, part: Part) -> Part:
        if self.is_open and len(self._parts) < _MOST_PARTS:
            self._parts.append(part)
        return part

    def _calls(self, part: Part, name: str, began: float, ended: float) -> None:
        """A call of the pool within ``part``, where the pool is a service's."""
        if self._traces.is_service and len(part.calls) < _MOST_PARTS:
            part.calls.append(Part(f"pool.{name}", began, ended))

    def _send(self, now: float, attributes: dict[str, Any] | None = None) -> None:
        parts, self._parts = self._parts, []
        is_end = attributes is not None
        first = None if is_end else self._first_token
        ended = now if is_end else None
        self._traces.send(self._batch(parts, first, ended, attributes or {}))

    def _send_save(self) -> None:
        part, self._save = self._save, None
        if part is not None:
            self._traces.send(self._batch((part,)))

    def _batch(self, parts: Sequence[Part], *more: Any) -> _Batch:
        return _Batch(self._span, self._began_ns, self._epoch_s, parts, *more)


@niceties("the traces of requests")
class Traces:
    """The traced requests of an engine, and the thread that makes their spans. ``dropped`` counts
    batches of spans that the thread did not take in time."""

    def __init__(
        self,
        endpoint: str,
        facts: EngineFacts,
        device: str,
        is_service: bool,
        dropped: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``endpoint``: of an OTLP collector. ``device``: its kind. ``is_service``: the pool is in
        another process. ``clock``: the scheduler side's."""
        self.facts = facts
        self.device = device
        self.is_service = is_service
        self.clock = clock
        self.computing: dict[str, RequestTrace] = {}
        self._dropped = dropped
        self._has_dropped = False
        self._provider = provider_at(endpoint, "engine")
        self._tracer = self._provider.get_tracer("kvrecall")
        self._batches: queue.SimpleQueue[_Batch | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._make, name="kvrecall-traces", daemon=True)
        self._thread.start()
        logger.info("kvrecall: spans of requests go to %s", endpoint)

    def begin(self, request: Any) -> RequestTrace | None:
        """A request entered the engine; None if its trace is not sampled.

        Its span is a child of the client's, as vLLM's ``llm_request`` is. Without a client's, it
        begins a trace, and vLLM's span becomes its child: vLLM makes that at the request's end, in
        the API process, by the headers that come back with the request's outputs.
        """
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
        if not span.is_recording():
            return None
        return RequestTrace(self, request, span, time.time() - self.clock())

    def computes(self, step: Iterable[tuple[RequestTrace | None, int]]) -> None:
        """A step computes so many tokens of each of these requests."""
        for trace, tokens in step:
            if trace is not None and trace.is_open:
                trace.computes(tokens)

    def step_ended(self) -> None:
        """vLLM has the results of a step."""
        for request_id in [one for one, trace in self.computing.items() if trace.step_ended()]:
            del self.computing[request_id]

    def send(self, batch: _Batch) -> None:
        """Hands spans to the thread; drops them if it is far behind."""
        if self._batches.qsize() < _MOST_UNSENT:
            self._batches.put(batch)
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

        def make(part: Part, parent: Span, kind: SpanKind = SpanKind.INTERNAL) -> None:
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
