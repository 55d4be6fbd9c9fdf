"""Replays a trace against many hosts with tiers of their own and a store that they share."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from kvrecall.block import BlockKey
from kvrecall.simulate.replay import Tier, TierCount, TierSpec
from kvrecall.simulate.trace import Request, Trace

Routing = Literal["sticky", "spread"]
"""``sticky``: all requests of a session go to one host; ``spread``: each goes to any."""

STORE_POLICY = "lru"
"""Mooncake's; object stores drop by age, which is similar."""

WINDOW_S = 60.0


@dataclass(frozen=True, slots=True)
class Traffic:
    """Blocks that cross the network between hosts and store: all, and the most in any minute."""

    read: int
    written: int
    most_read: int
    most_written: int


@dataclass(frozen=True, slots=True)
class FleetOutcome:
    """Result of a replay. ``tiers``: sums over all hosts, then the store, if there is one.
    ``sessions`` as the trace shows them; ``busiest``: share of the blocks that the busiest host was
    asked for, times the hosts (1: all are asked for the same)."""

    routing: Routing
    requests: int
    accesses: int
    sessions: int
    busiest: float
    seconds: float
    tiers: tuple[TierCount, ...]
    traffic: Traffic

    @property
    def hits(self) -> int:
        return sum(tier.hits for tier in self.tiers)

    @property
    def hit_rate(self) -> float:
        return self.hits / self.accesses if self.accesses else 0.0


def replay_fleet(
    trace: Trace,
    hosts: int,
    tiers: Sequence[TierSpec],
    store: TierSpec | None,
    routing: Routing,
    policy: str,
    advance: Callable[[int], None] = lambda _: None,
) -> FleetOutcome:
    """Replays ``trace`` against ``hosts`` with ``tiers`` each, and ``store`` behind all of them.

    Rules per host as in ``replay``; the store admits all blocks and evicts by ``STORE_POLICY``. A
    block is sent to the store when a host computes it and the store has it not. A new session (with
    ``spread``, each request) goes to a host drawn at random, always the same draw for a trace.
    ``advance(1)`` is called for each request. Raises ConfigError as ``replay``.
    """
    rooms = [[Tier(spec, policy, picky=spec is tiers[-1]) for spec in tiers] for _ in range(hosts)]
    shared = None if store is None else Tier(store, STORE_POLICY, picky=False)
    rng = random.Random(1)
    home: dict[int, int] = {}
    asked = Counter[int]()
    read, written = Counter[int](), Counter[int]()
    accesses = sessions = 0
    for request, session in zip(trace.requests, sessions_of(trace.requests), strict=True):
        advance(1)
        sessions = max(sessions, session + 1)
        chain = request.chain
        accesses += len(chain)
        host = rng.randrange(hosts)
        if routing == "sticky":
            host = home.setdefault(session, host)
        asked[host] += len(chain)
        mine = rooms[host] if shared is None else [*rooms[host], shared]
        for key in chain:
            room = next((room for room in mine if key in room.resident), None)
            if room is None:
                break
            room.count.hits += 1
            if room is shared:
                read[int(request.now // WINDOW_S)] += 1
        before = 0 if shared is None else shared.count.writes
        for room in mine:
            room.policy.access(chain, request.now)
            room.fill(chain, request.now)
        if shared is not None:
            written[int(request.now // WINDOW_S)] += shared.count.writes - before
    last = (shared.count,) if shared is not None else ()
    return FleetOutcome(
        routing,
        len(trace.requests),
        accesses,
        sessions,
        max(asked.values(), default=0) * hosts / accesses if accesses else 0.0,
        trace.requests[-1].now - trace.requests[0].now,
        (*(_sum([own[place].count for own in rooms]) for place in range(len(tiers))), *last),
        Traffic(
            read.total(),
            written.total(),
            max(read.values(), default=0),
            max(written.values(), default=0),
        ),
    )


def sessions_of(requests: Sequence[Request]) -> Iterator[int]:
    """The session of each request, numbered as they begin.

    Traces name none. A request continues the session whose last request it repeats to its last full
    block, the longest such one; others, also those that only share a beginning, begin a session.
    """
    ends: dict[BlockKey, int] = {}  # last full block of a session's last request
    last: dict[int, BlockKey] = {}
    count = 0
    for request in requests:
        session = next((ends[key] for key in reversed(request.chain) if key in ends), None)
        if session is None:
            session, count = count, count + 1
        full = request.chain[: len(request.chain) - request.is_partial]
        if full:
            ends.pop(last.pop(session, full[-1]), None)
            ends[full[-1]], last[session] = session, full[-1]
        yield session


def _sum(counts: Sequence[TierCount]) -> TierCount:
    """One tier of all hosts."""
    total = TierCount(counts[0].name, sum(count.capacity for count in counts))
    for count in counts:
        total.hits += count.hits
        total.writes += count.writes
        total.evictions += count.evictions
        total.bypassed += count.bypassed
    return total
