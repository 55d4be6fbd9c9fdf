"""Replays a trace against tiers under a policy and counts strict-prefix hits and blocks moved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvrecall.block import BlockKey
from kvrecall.pool.eviction import EvictionPolicy, make_policy
from kvrecall.simulate.trace import Trace


@dataclass(frozen=True, slots=True)
class TierSpec:
    """A tier of the replay: a name for people and its room in blocks."""

    name: str
    capacity: int


@dataclass(frozen=True, slots=True)
class TierCount:
    """What a tier did, in blocks. ``hits`` are the blocks served from here (nearest tier first),
    ``bypassed`` those that the policy did not admit."""

    name: str
    capacity: int
    hits: int
    reads: int
    writes: int
    evictions: int
    bypassed: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a replay; ``accesses`` counts blocks, repeats included."""

    policy: str
    requests: int
    accesses: int
    tiers: tuple[TierCount, ...]

    @property
    def hits(self) -> int:
        return sum(tier.hits for tier in self.tiers)

    @property
    def hit_rate(self) -> float:
        return self.hits / self.accesses if self.accesses else 0.0


@dataclass(slots=True)
class _Tier:
    """Residents of one tier and its counters."""

    spec: TierSpec
    policy_name: str
    picky: bool  # whether the policy may refuse new blocks
    policy: EvictionPolicy = field(init=False)
    resident: set[BlockKey] = field(default_factory=set)
    hits: int = 0
    reads: int = 0
    writes: int = 0
    evictions: int = 0
    bypassed: int = 0

    def __post_init__(self) -> None:
        self.policy = make_policy(self.policy_name, self.spec.capacity)

    def fill(self, chain: Sequence[BlockKey], now: float) -> None:
        """Stores what is missing of ``chain``, prefix first, until there is no room for more.
        The chain's own blocks are leased meanwhile: they are not evicted for each other."""
        resident, policy = self.resident, self.policy
        leased = frozenset(chain)
        parent: BlockKey | None = None
        for depth, key in enumerate(chain):
            if key not in resident:
                if len(resident) >= self.spec.capacity and not self._make_room(
                    key, parent, depth, now, leased
                ):
                    self.bypassed += sum(1 for left in chain[depth:] if left not in resident)
                    return
                resident.add(key)
                policy.insert(key, parent, depth, now)
                self.writes += 1
            parent = key

    def _make_room(
        self,
        key: BlockKey,
        parent: BlockKey | None,
        depth: int,
        now: float,
        leased: frozenset[BlockKey],
    ) -> bool:
        if self.picky and not self.policy.admit(key, parent, depth, now):
            return False
        victims = self.policy.victims(1, lambda block: block not in leased, now)
        for victim in victims:
            self.policy.remove(victim)
            self.resident.remove(victim)
            self.evictions += 1
        return bool(victims)

    def count(self) -> TierCount:
        return TierCount(
            self.spec.name,
            self.spec.capacity,
            self.hits,
            self.reads,
            self.writes,
            self.evictions,
            self.bypassed,
        )


def replay(
    trace: Trace,
    tiers: Sequence[TierSpec],
    policy: str,
    advance: Callable[[], None] = lambda: None,
) -> Outcome:
    """Replays ``trace``, nearest tier first. Unknown policy or no room: ConfigError.

    Per request: the longest prefix of which every block lies in some tier is hit, each block from
    the nearest tier that has it; every tier sees the access; then every tier stores what it lacks
    of the chain (write-through down, promotion up). As in the pool only the last tier's policy may
    refuse blocks: the others are on the blocks' way down and take all.
    ``advance`` is called once a request (progress).
    """
    rooms = [_Tier(spec, policy, picky=spec is tiers[-1]) for spec in tiers]
    accesses = 0
    for request in trace.requests:
        advance()
        chain = request.chain
        accesses += len(chain)
        for key in chain:
            room = next((room for room in rooms if key in room.resident), None)
            if room is None:
                break
            room.hits += 1
            room.reads += 1
        for room in rooms:
            room.policy.access(chain, request.now)
            room.fill(chain, request.now)
    return Outcome(policy, len(trace.requests), accesses, tuple(room.count() for room in rooms))
