"""Variants of a given trace, for evaluation outside of the tuning set."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

from kvrecall.block import BlockKey
from kvrecall.simulate.trace import Trace, TraceRequest, block_key


def silent(trace: Trace) -> Trace:
    """The trace whose clients say nothing."""
    return Trace(trace.name, tuple(replace(request, hint=None) for request in trace.requests))


def part(trace: Trace, first: float, last: float) -> Trace:
    """The requests between two shares of the trace's length, by count."""
    count = len(trace.requests)
    requests = trace.requests[int(first * count) : int(last * count)]
    return Trace(f"{trace.name}[{first:g}:{last:g}]", requests)


def thinned(trace: Trace, every: int) -> Trace:
    """One session in ``every``. A session is known by the first of its blocks that less than one
    request in fifty has: what comes before are prompts that sessions share."""
    uses = Counter(key for request in trace.requests for key in request.chain)
    common = len(trace.requests) / 50

    def is_kept(request: TraceRequest) -> bool:
        own = next((key for key in request.chain if uses[key] < common), request.chain[-1])
        return random.Random(own).randrange(1 << 30) % every == 0

    kept = (request for request in trace.requests if request.chain and is_kept(request))
    return Trace(f"{trace.name}/{every}", tuple(kept))


def doubled(trace: Trace, later: float) -> Trace:
    """The trace laid over itself, ``later`` seconds apart: twice the load, nothing shared but
    the first block of each request."""
    twins: dict[BlockKey, BlockKey] = {}

    def twin(request: TraceRequest) -> TraceRequest:
        for key in request.chain[1:]:
            twins.setdefault(key, block_key(-1 - len(twins)))
        chain = request.chain[:1] + tuple(twins[key] for key in request.chain[1:])
        return TraceRequest(request.now + later, chain, request.is_partial)

    both = [*trace.requests, *map(twin, trace.requests)]
    return Trace(f"{trace.name}x2", tuple(sorted(both, key=lambda request: request.now)))
