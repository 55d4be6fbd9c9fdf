"""Replays a trace against many hosts with tiers of their own and a store that they share."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from kvrecall.block import BlockKey
from kvrecall.simulate.replay import (
    BLOCKS,
    ReplayOutcome,
    SimulatedPool,
    SimulatedTier,
    TierCount,
    TierSpec,
    tiers_of,
)
from kvrecall.simulate.trace import Trace, TraceRequest

Routing = Literal["sticky", "spread"]
"""``sticky``: all requests of a session go to one host; ``spread``: each goes to any."""

STORE_POLICY = "lru"
"""Mooncake's; object stores drop by age, which is similar."""

WINDOW_S = 60.0


@dataclass(frozen=True, slots=True)
class StoreTraffic:
    """Blocks that cross the network between hosts and store: all, and the most in any minute."""

    read: int
    written: int
    most_read: int
    most_written: int


@dataclass(slots=True)
class FleetOutcome(ReplayOutcome):
    """Result of a replay. ``tiers``: sums over all hosts, then the store, if there is one.
    ``sessions`` as the trace shows them; ``busiest``: share of the blocks that the busiest host was
    asked for, times the hosts (1: all are asked for the same)."""

    sessions: int = 0
    busiest: float = 0.0
    seconds: float = 0.0
    traffic: StoreTraffic = StoreTraffic(0, 0, 0, 0)


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
    shared = [] if store is None else [SimulatedTier(store, STORE_POLICY, picky=False)]
    network = TierCount("", 0) if store is None else shared[0].count
    pools = [SimulatedPool([*tiers_of(tiers, policy), *shared], BLOCKS) for _ in range(hosts)]
    rng = random.Random(1)
    home: dict[int, int] = {}
    requested, read, written = Counter[int](), Counter[int](), Counter[int]()
    outcome = FleetOutcome()
    for request, session in zip(trace.requests, sessions_of(trace.requests), strict=True):
        advance(1)
        outcome.sessions = max(outcome.sessions, session + 1)
        outcome.accesses += len(request.chain)
        host = rng.randrange(hosts)
        if routing == "sticky":
            host = home.setdefault(session, host)
        requested[host] += len(request.chain)
        before = network.read, network.written
        outcome.hits += pools[host].serve(request.chain, request.now)
        window = int(request.now // WINDOW_S)
        read[window] += network.read - before[0]
        written[window] += network.written - before[1]
    if outcome.accesses:
        outcome.busiest = max(requested.values()) * hosts / outcome.accesses
    outcome.seconds = trace.requests[-1].now - trace.requests[0].now
    for place, spec in enumerate(tiers):
        one = TierCount(spec.name, spec.capacity * hosts)
        for count in (pool.counts[place] for pool in pools):
            one.read += count.read
            one.written += count.written
            one.evicted += count.evicted
            one.bypassed += count.bypassed
        outcome.tiers.append(one)
    outcome.tiers += [tier.count for tier in shared]
    outcome.traffic = StoreTraffic(
        network.read, network.written, max(read.values()), max(written.values())
    )
    return outcome


def sessions_of(requests: Sequence[TraceRequest]) -> Iterator[int]:
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
