"""The most hits any policy could have had, knowing the whole trace."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from kvrecall.block import BlockKey
from kvrecall.simulate.trace import Trace


def clairvoyant_hits(
    trace: Trace, capacity: int, advance: Callable[[], None] = lambda: None
) -> int:
    """Strict-prefix block hits of the best possible cache of ``capacity`` blocks. Exact.

    Rules of the game: blocks appear only by being computed (no prefetch); after each request the
    cache keeps any ``capacity`` of the blocks it had and the blocks of the request, so a block
    may be bypassed; a request hits block i if blocks 0..i are all there.

    Keeping a block from one use to the next is an interval; a choice of intervals is feasible if
    no more than ``capacity`` overlap anywhere. Giving up the interval that ends last whenever
    there are too many is optimal (Belady 1966, with bypass: McFarling 1992; as a schedule of
    intervals on k machines: Faigle & Nawijn 1995). That ignores the prefix rule, so it bounds
    from above; and since a prefix is used again no later than what hangs on it, breaking ties at
    the deeper block keeps the cache closed under prefixes, so the bound is reached.

    ``advance`` is called once a request (progress).
    """
    rows = _next_uses(trace)
    resident: dict[BlockKey, int] = {}  # block -> request that uses it next
    farthest: list[tuple[int, int, BlockKey]] = []  # heap of (-next use, -depth, block), lazy
    hits = 0
    for request, nexts in zip(trace.requests, rows, strict=True):
        advance()
        prefix = True
        for depth, (key, following) in enumerate(zip(request.chain, nexts, strict=True)):
            prefix = resident.pop(key, -1) >= 0 and prefix
            hits += prefix
            if following >= 0:
                resident[key] = following
                heapq.heappush(farthest, (-following, -depth, key))
        while len(resident) > capacity:
            following, _, key = heapq.heappop(farthest)
            if resident.get(key) == -following:
                del resident[key]
    return hits


def _next_uses(trace: Trace) -> list[list[int]]:
    """For each block of each request the index of the next request with it, -1 if none."""
    upcoming: dict[BlockKey, int] = {}
    rows: list[list[int]] = []
    for index in range(len(trace.requests) - 1, -1, -1):
        chain = trace.requests[index].chain
        rows.append([upcoming.get(key, -1) for key in chain])
        for key in chain:
            upcoming[key] = index
    rows.reverse()
    return rows
