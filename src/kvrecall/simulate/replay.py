"""Replays a trace against tiers under a policy, and bounds what any policy could have hit."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from kvrecall.block import BlockKey
from kvrecall.config import parse_size
from kvrecall.errors import ConfigError
from kvrecall.modelconfig import CacheKind
from kvrecall.pool.eviction import KeyedPolicy, make_policy
from kvrecall.pool.hints import Advice
from kvrecall.simulate.trace import BLOCK_TOKENS, Trace

_STEP_TOKENS = 8192
_UNITS = {"MiB": 1 << 20, "KiB": 1 << 10, "B": 1}
_COUNTS = {"full": (1,), "window": (2,), "chunk": (2,), "state": (1, 2)}  # of what follows


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """The records of the layers of one ``kind``. ``tokens``: of a window or chunk, how far it
    reaches; of a recurrent state, between two that are kept. ``nbytes``: of a block of the trace,
    or of one state."""

    kind: CacheKind
    tokens: int
    nbytes: int

    def __str__(self) -> str:
        """As in ``--groups``."""
        reach = "" if self.kind is CacheKind.FULL else f":{self.tokens}"
        unit = next((u for u in _UNITS if self.nbytes % _UNITS[u] == 0), "B")
        return f"{self.kind}{reach}:{self.nbytes // _UNITS[unit]}{unit}"

    def needed(self, boundary: int) -> range:
        """The places whose records a hit of ``boundary`` blocks needs."""
        return self.kind.needed(self.tokens, boundary * BLOCK_TOKENS, BLOCK_TOKENS)

    def kept(self, start: int, length: int) -> range | list[int]:
        """The places whose records a request saves that computes blocks from ``start`` on. A state
        is kept at the end of each step, and of the prompt."""
        if self.kind is not CacheKind.STATE:
            return range(start, length)
        step = max(1, self.tokens // BLOCK_TOKENS)
        places = list(range(start + step - 1, length, step))
        if length > start and (not places or places[-1] != length - 1):
            places.append(length - 1)
        return places


BLOCKS = (GroupSpec(CacheKind.FULL, 0, 1),)
"""A model of one group, counted in blocks instead of bytes."""


def parse_groups(text: str) -> tuple[GroupSpec, ...]:
    """Groups of ``full:SIZE,window:TOKENS:SIZE,chunk:TOKENS:SIZE,state[:TOKENS]:SIZE``; the first
    is the chain, on which the others hang: the full one, or the first window or chunk. Raises
    ConfigError."""
    groups: list[GroupSpec] = []
    for item in text.split(","):
        kind, *more = (part.strip() for part in item.split(":"))
        counts = _COUNTS.get(kind)
        if counts is None or len(more) not in counts:
            raise ConfigError(
                f"--groups: {item!r} is not full:SIZE, window:TOKENS:SIZE, chunk:TOKENS:SIZE or "
                "state:TOKENS:SIZE"
            )
        tokens = 0 if kind == CacheKind.FULL else _STEP_TOKENS
        if len(more) == 2:
            if not more[0].isdecimal() or not 0 < int(more[0]) < 1 << 40:
                raise ConfigError(f"--groups: {item!r}: {more[0]!r} is not a number of tokens")
            tokens = int(more[0])
        nbytes = parse_size(more[-1], f"--groups: {kind}", 1)
        if nbytes <= 0:
            raise ConfigError(f"--groups: {item!r}: the size must be more than 0")
        groups.append(GroupSpec(CacheKind(kind), tokens, nbytes))
    kinds = [group.kind for group in groups]
    if kinds.count(CacheKind.FULL) > 1 or set(kinds) == {CacheKind.STATE}:
        raise ConfigError(
            f"--groups: {text!r} must name one full group, on which the others hang, or none and a "
            "window or chunk"
        )
    return tuple(sorted(groups, key=lambda group: list(CacheKind).index(group.kind)))


@dataclass(frozen=True, slots=True)
class TierSpec:
    """A tier of the replay: a name for people and its capacity, in blocks or, of a model with
    groups, in bytes."""

    name: str
    capacity: int


@dataclass(slots=True)
class TierCount:
    """A tier, and what went through it, in the units of its capacity. ``bypassed``: what the policy
    did not admit, or had no room for."""

    name: str
    capacity: int
    read: int = 0
    written: int = 0
    evicted: int = 0
    bypassed: int = 0


@dataclass(slots=True)
class ReplayOutcome:
    """Result of a replay: blocks that requests asked for, repeats included, those that they hit,
    and the tiers. ``moved``: what hits read, by kind of group, in the units of the tiers."""

    accesses: int = 0
    hits: int = 0
    tiers: list[TierCount] = field(default_factory=list)
    moved: Mapping[str, int] = field(default_factory=dict)

    @property
    def hit_rate(self) -> float:
        return self.hits / self.accesses if self.accesses else 0.0


PolicyMaker = Callable[[int], KeyedPolicy]
"""A policy that has no name, for a tier of so many blocks."""


class GroupRecord(NamedTuple):
    """A block of a group. ``hangs``: it is of another group than the chain."""

    key: BlockKey
    parent: BlockKey | None
    nbytes: int
    hangs: bool


class SimulatedTier:
    """Residents and counts of one tier. ``picky``: the policy may refuse new blocks.
    ``record``: the usual size of a record."""

    def __init__(
        self, spec: TierSpec, policy: str | PolicyMaker, picky: bool, record: int = 1
    ) -> None:
        make = partial(make_policy, policy) if isinstance(policy, str) else policy
        self.policy = make(spec.capacity // record)
        self.resident: dict[BlockKey, int] = {}  # and its size
        self.count = TierCount(spec.name, spec.capacity)
        self._picky = picky
        self._used = 0

    def fill(self, records: Sequence[GroupRecord], now: float) -> None:
        """Stores the missing ones, each after its parent, as far as there is space. The records
        are leased meanwhile: they are not evicted for each other."""
        resident, count = self.resident, self.count
        leased = frozenset(record.key for record in records)
        refused: set[BlockKey | None] = set()
        for record in records:
            key, parent, nbytes, hangs = record
            if key in resident:
                continue
            if parent in refused or not self._make_room(record, leased, now):
                refused.add(key)
                count.bypassed += nbytes
                continue
            resident[key] = nbytes
            self._used += nbytes
            count.written += nbytes
            self.policy.insert(key, parent, now, hangs)

    def _make_room(self, record: GroupRecord, leased: frozenset[BlockKey], now: float) -> bool:
        key, parent, nbytes, hangs = record
        capacity, policy = self.count.capacity, self.policy
        if self._used + nbytes <= capacity:
            return True
        if self._picky and not policy.admit(key, parent, now, hangs):
            return False
        while self._used + nbytes > capacity:
            victims = policy.victims(1, lambda block: block not in leased, now)
            if not victims:
                return False
            policy.remove(victims[0])
            freed = self.resident.pop(victims[0])
            self._used -= freed
            self.count.evicted += freed
        return True


def tiers_of(
    specs: Sequence[TierSpec], policy: str | PolicyMaker, record: int = 1
) -> list[SimulatedTier]:
    """Empty tiers, of which the last one's policy may refuse blocks."""
    return [SimulatedTier(spec, policy, spec is specs[-1], record) for spec in specs]


class SimulatedPool:
    """Tiers that one host sees, nearest first, with the records of a model's groups. Those of the
    first group, the chain, have the keys of the trace; those of the others hang on them. ``moved``:
    what hits read, by kind of group."""

    def __init__(self, tiers: Sequence[SimulatedTier], groups: Sequence[GroupSpec]) -> None:
        self._tiers = tiers
        self._chain = groups[0]
        self._others = [(group, dict[BlockKey, BlockKey]()) for group in groups[1:]]
        self.counts = [tier.count for tier in tiers]
        self.moved = {str(group.kind): 0 for group in groups}

    def serve(self, chain: Sequence[BlockKey], now: float, advice: Advice | None = None) -> int:
        """Hits the longest boundary at which every group has the records that it needs, each from
        the nearest tier that has it; then every tier sees the access and stores what it lacks of
        what the request leaves (write-through down, promotion up). Returns the blocks hit."""
        holder = self._holder
        is_full = self._chain.kind is CacheKind.FULL
        reach = len(chain)
        if is_full:
            reach = next((n for n, key in enumerate(chain) if holder(key) is None), reach)
        hit, used = reach, self._beside(chain, reach)
        while not (
            all(holder(key) for _, key in reversed(used))
            and (is_full or all(holder(chain[place]) for place in self._chain.needed(hit)))
        ):
            hit -= 1
            used = self._beside(chain, hit)
        own = [(self._chain, chain[place]) for place in self._chain.needed(hit)]
        for group, key in (*own, *used):
            tier = holder(key)
            assert tier is not None
            tier.count.read += group.nbytes
            self.moved[group.kind] += group.nbytes
        hanging = [key for _, key in used]
        if hit < reach:  # what would have let it hit so far: the windows there, and any state
            for number, (group, _) in enumerate(self._others):
                is_state = group.kind is CacheKind.STATE
                places = range(hit, reach) if is_state else group.needed(reach)
                hanging += [self._key(number, chain[place]) for place in places]
        hanging = list(dict.fromkeys(hanging))
        ending = [key for _, key in self._beside(chain, len(chain))]
        records = list(self._left(chain, hit))
        for tier in self._tiers:
            tier.policy.access(chain, now, hanging, ending, advice)
            tier.fill(records, now)
        return hit

    def _holder(self, key: BlockKey) -> SimulatedTier | None:
        for tier in self._tiers:
            if key in tier.resident:
                return tier
        return None

    def _beside(self, chain: Sequence[BlockKey], boundary: int) -> list[tuple[GroupSpec, BlockKey]]:
        """What a hit of ``boundary`` blocks of ``chain`` needs of the other groups."""
        return [
            (group, self._key(number, chain[place]))
            for number, (group, _) in enumerate(self._others)
            for place in group.needed(boundary)
        ]

    def _left(self, chain: Sequence[BlockKey], hit: int) -> Iterator[GroupRecord]:
        """What a request leaves in the tiers, each after its parent: the chain, what its hit used,
        and what each group keeps of the rest."""
        places: dict[int, list[int]] = {}
        for number, (group, _) in enumerate(self._others):
            for place in (*group.needed(hit), *group.kept(hit, len(chain))):
                places.setdefault(place, []).append(number)
        parent: BlockKey | None = None
        first = self._chain.needed(hit).start
        for depth, key in enumerate(chain):
            if depth >= first:
                yield GroupRecord(key, parent, self._chain.nbytes, False)
            for number in places.get(depth, ()):
                nbytes = self._others[number][0].nbytes
                yield GroupRecord(self._key(number, key), key, nbytes, True)
            parent = key

    def _key(self, number: int, key: BlockKey) -> BlockKey:
        made = self._others[number][1]
        if key not in made:
            made[key] = BlockKey(bytes([number]) + key)
        return made[key]


def replay(
    trace: Trace,
    tiers: Sequence[TierSpec],
    policy: str | PolicyMaker,
    advance: Callable[[int], None] = lambda _: None,
    groups: Sequence[GroupSpec] = BLOCKS,
) -> ReplayOutcome:
    """Replays ``trace`` against tiers, nearest first, for a model whose layers form ``groups``, the
    chain first; with ``groups`` only full blocks count. As in the pool, only the last tier's policy
    may refuse blocks; the others pass blocks on and admit all. ``advance(1)`` is called for each
    request (progress). Raises ConfigError for an unknown policy or a capacity of 0.
    """
    pool = SimulatedPool(tiers_of(tiers, policy, groups[0].nbytes), groups)
    outcome = ReplayOutcome(tiers=pool.counts, moved=pool.moved)
    for request in trace.requests:
        advance(1)
        is_cut = request.is_partial and groups is not BLOCKS
        chain = request.chain[:-1] if is_cut else request.chain
        outcome.accesses += len(chain)
        outcome.hits += pool.serve(chain, request.now)
    return outcome


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
    upcoming: dict[BlockKey, int] = {}
    rows: list[list[int]] = []  # of each request: the next one with each of its blocks, or -1
    for index in range(len(trace.requests) - 1, -1, -1):
        chain = trace.requests[index].chain
        rows.append([upcoming.get(key, -1) for key in chain])
        upcoming.update(dict.fromkeys(chain, index))
    resident: dict[BlockKey, int] = {}  # block -> request that uses it next
    farthest: list[tuple[int, int, BlockKey]] = []  # heap of (-next use, -depth, block), lazy
    hits = 0
    for request, nexts in zip(trace.requests, reversed(rows), strict=True):
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
