"""Replays a trace against tiers under a policy, and bounds what any policy could have hit."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kvrecall.block import BlockKey, Tenant
from kvrecall.pool.eviction import KeyedPolicy, make_policy
from kvrecall.pool.hints import HintCounts, HintRecord
from kvrecall.simulate.trace import Trace


@dataclass(frozen=True, slots=True)
class TierSpec:
    """A tier of the replay: a name for people and its capacity in blocks."""

    name: str
    capacity: int


@dataclass(slots=True)
class TierCount:
    """Counts of a tier, in blocks. ``hits`` are the blocks served from here (nearest tier first),
    ``bypassed`` those that the policy did not admit."""

    name: str
    capacity: int
    hits: int = 0
    writes: int = 0
    evictions: int = 0
    bypassed: int = 0


@dataclass(slots=True)
class TenantCount:
    """Blocks that a tenant's requests asked for, repeats included, and those that they hit."""

    accesses: int = 0
    hits: int = 0

    @property
    def hit_rate(self) -> float:
        return self.hits / self.accesses if self.accesses else 0.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a replay; ``accesses`` counts blocks, repeats included; ``client_hints``: the
    hints of the clients, and what came of them; ``tenants``: their shares, by name."""

    policy: str
    requests: int
    accesses: int
    tiers: tuple[TierCount, ...]
    client_hints: HintCounts = field(default_factory=HintCounts)
    tenants: Mapping[Tenant, TenantCount] = field(default_factory=dict)

    @property
    def hits(self) -> int:
        return sum(tier.hits for tier in self.tiers)

    @property
    def hit_rate(self) -> float:
        return self.hits / self.accesses if self.accesses else 0.0


PolicyMaker = Callable[[int], KeyedPolicy]
"""A policy that has no name, for a tier of so many blocks."""


class Tier:
    """Residents and counts of one tier. ``picky``: the policy may refuse new blocks."""

    def __init__(self, spec: TierSpec, policy: str | PolicyMaker, picky: bool) -> None:
        if isinstance(policy, str):
            self.policy = make_policy(policy, spec.capacity)
        else:
            self.policy = policy(spec.capacity)
        self.picky = picky
        self.resident: set[BlockKey] = set()
        self.count = TierCount(spec.name, spec.capacity)

    def fill(self, chain: Sequence[BlockKey], now: float) -> None:
        """Stores the missing blocks of ``chain``, prefix first, as far as there is space. The
        chain's own blocks are leased meanwhile: they are not evicted for each other."""
        resident, policy, count = self.resident, self.policy, self.count
        leased = frozenset(chain)
        parent: BlockKey | None = None
        for depth, key in enumerate(chain):
            if key not in resident:
                if len(resident) >= count.capacity:
                    admitted = not self.picky or policy.admit(key, parent, depth, now)
                    victims = (
                        policy.victims(1, lambda block: block not in leased, now)
                        if admitted
                        else []
                    )
                    if not victims:
                        count.bypassed += sum(1 for left in chain[depth:] if left not in resident)
                        return
                    policy.remove(victims[0])
                    resident.remove(victims[0])
                    count.evictions += 1
                resident.add(key)
                policy.insert(key, parent, depth, now)
                count.writes += 1
            parent = key


def replay(
    trace: Trace,
    tiers: Sequence[TierSpec],
    policy: str | PolicyMaker,
    advance: Callable[[int], None] = lambda _: None,
) -> Outcome:
    """Replays ``trace``, nearest tier first. Raises ConfigError for an unknown policy or a capacity
    of 0.

    Per request: the longest prefix of which every block lies in some tier is hit, each block from
    the nearest tier that has it; every tier sees the access; then every tier stores what it lacks
    of the chain (write-through down, promotion up). As in the pool, only the last tier's policy may
    refuse blocks; the others pass blocks on and admit all.
    ``advance(1)`` is called for each request (progress).
    """
    rooms = [Tier(spec, policy, picky=spec is tiers[-1]) for spec in tiers]
    tenants: dict[Tenant, TenantCount] = {}
    hints = HintRecord()
    for request in trace.requests:
        advance(1)
        chain = request.chain
        count = tenants.setdefault(request.tenant, TenantCount())
        count.accesses += len(chain)
        for key in chain:
            room = next((room for room in rooms if key in room.resident), None)
            if room is None:
                break
            room.count.hits += 1
            count.hits += 1
        advice = hints.used(chain, request.now, request.tenant, request.hint)
        for room in rooms:
            room.policy.access(chain, request.now, advice=advice)
            room.fill(chain, request.now)
    return Outcome(
        rooms[0].policy.name,
        len(trace.requests),
        sum(count.accesses for count in tenants.values()),
        tuple(room.count for room in rooms),
        hints.counts,
        tenants,
    )


def clairvoyant_hits(
    trace: Trace, capacity: int, advance: Callable[[int], None] = lambda _: None
) -> int:
    """Strict-prefix block hits of the best possible cache of ``capacity`` blocks. Exact.

    Rules: blocks appear only by being computed (no prefetch); after each request the
    cache keeps any ``capacity`` of the blocks it had and the blocks of the request, so a block
    may be bypassed; a request hits block i if blocks 0..i are all there.

    Keeping a block from one use to the next is an interval; a choice of intervals is feasible if
    no more than ``capacity`` overlap anywhere. Giving up the interval that ends last whenever
    there are too many is optimal (Belady 1966, with bypass: McFarling 1992; as a schedule of
    intervals on k machines: Faigle & Nawijn 1995). That ignores the prefix rule, so it bounds
    from above; and since a prefix is used again no later than what hangs on it, breaking ties at
    the deeper block keeps the cache closed under prefixes, so the bound is reached.

    ``advance(1)`` is called for each request (progress).
    """
    rows = _next_uses(trace)
    resident: dict[BlockKey, int] = {}  # block -> request that uses it next
    farthest: list[tuple[int, int, BlockKey]] = []  # heap of (-next use, -depth, block), lazy
    hits = 0
    for request, nexts in zip(trace.requests, rows, strict=True):
        advance(1)
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
