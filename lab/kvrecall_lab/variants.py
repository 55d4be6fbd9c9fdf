"""Variants of a given trace, for evaluation outside of the tuning set."""

from __future__ import annotations

import random
from collections import Counter

from kvrecall.simulate.trace import Trace, TraceRequest


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
