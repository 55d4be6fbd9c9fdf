"""Replays a trace for a model with several KV groups: a hit ends where every group can serve."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvrecall.block import BlockKey
from kvrecall.config import parse_size
from kvrecall.errors import ConfigError
from kvrecall.pool.eviction import make_policy
from kvrecall.simulate.trace import BLOCK_TOKENS, Trace

_STEP_TOKENS = 8192
_UNITS = {"MiB": 1 << 20, "KiB": 1 << 10, "B": 1}
_COUNTS = {"full": (1,), "window": (2,), "chunk": (2,), "state": (1, 2)}  # of what follows


class Kind(enum.StrEnum):
    """What a group's layers need of the tokens before: all, the last ones, those since the last
    multiple of a chunk's size, or a state."""

    FULL = "full"
    WINDOW = "window"
    CHUNK = "chunk"
    STATE = "state"


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """The records of the layers of one ``kind``. ``tokens``: of a window or chunk, how far it
    reaches; of a recurrent state, between two that are kept. ``nbytes``: of a block of the trace,
    or of one state."""

    kind: Kind
    tokens: int
    nbytes: int

    def __str__(self) -> str:
        """As in ``--groups``."""
        reach = "" if self.kind is Kind.FULL else f":{self.tokens}"
        unit = next((u for u in _UNITS if self.nbytes % _UNITS[u] == 0), "B")
        return f"{self.kind}{reach}:{self.nbytes // _UNITS[unit]}{unit}"

    def needed(self, boundary: int) -> range:
        """The places whose records a hit of ``boundary`` blocks needs."""
        match self.kind:
            case Kind.WINDOW:
                return range(
                    max(0, boundary * BLOCK_TOKENS - self.tokens + 1) // BLOCK_TOKENS, boundary
                )
            case Kind.CHUNK:
                begun = boundary * BLOCK_TOKENS // self.tokens * self.tokens
                return range(begun // BLOCK_TOKENS, boundary)
            case Kind.STATE:
                return range(max(0, boundary - 1), boundary)
        return range(boundary)

    def kept(self, start: int, length: int) -> range | list[int]:
        """The places whose records a request saves that computes blocks from ``start`` on. A state
        is kept at the end of each step, and of the prompt."""
        if self.kind is not Kind.STATE:
            return range(start, length)
        step = max(1, self.tokens // BLOCK_TOKENS)
        places = list(range(start + step - 1, length, step))
        if length > start and (not places or places[-1] != length - 1):
            places.append(length - 1)
        return places


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
        tokens = 0 if kind == Kind.FULL else _STEP_TOKENS
        if len(more) == 2:
            if not more[0].isdecimal() or not 0 < int(more[0]) < 1 << 40:
                raise ConfigError(f"--groups: {item!r}: {more[0]!r} is not a number of tokens")
            tokens = int(more[0])
        nbytes = parse_size(more[-1], f"--groups: {kind}", 1)
        if nbytes <= 0:
            raise ConfigError(f"--groups: {item!r}: the size must be more than 0")
        groups.append(GroupSpec(Kind(kind), tokens, nbytes))
    kinds = [group.kind for group in groups]
    if kinds.count(Kind.FULL) > 1 or set(kinds) == {Kind.STATE}:
        raise ConfigError(
            f"--groups: {text!r} must name one full group, on which the others hang, or none and a "
            "window or chunk"
        )
    order = (Kind.FULL, Kind.WINDOW, Kind.CHUNK, Kind.STATE)
    return tuple(sorted(groups, key=lambda group: order.index(group.kind)))


@dataclass(slots=True)
class TierBytes:
    """A tier, and what went through it, in bytes."""

    name: str
    capacity: int
    read: int = 0
    written: int = 0
    evicted: int = 0
    bypassed: int = 0


@dataclass(frozen=True, slots=True)
class GroupsOutcome:
    """Result of a replay: blocks of the trace asked for and hit (by every group), and the bytes
    that the hits moved, by kind of group."""

    policy: str
    requests: int
    accesses: int
    hits: int
    moved: dict[str, int]
    tiers: tuple[TierBytes, ...]

    @property
    def hit_rate(self) -> float:
        return self.hits / self.accesses if self.accesses else 0.0


@dataclass(slots=True)
class _Record:
    """A block of a group that is to be stored."""

    key: BlockKey
    parent: BlockKey | None
    depth: int
    nbytes: int
    hangs: bool


class _Tier:
    """Residents and counts of one tier. ``picky``: the policy may refuse new blocks."""

    def __init__(self, count: TierBytes, policy: str, nbytes: int, picky: bool) -> None:
        self.policy = make_policy(policy, max(1, count.capacity // nbytes))
        self.picky = picky
        self.resident: dict[BlockKey, int] = {}
        self.count = count
        self._used = 0

    def fill(self, records: Sequence[_Record], leased: frozenset[BlockKey], now: float) -> None:
        """Stores the missing ones, each after its parent, as far as there is space."""
        resident, policy, count = self.resident, self.policy, self.count
        refused: set[BlockKey] = set()
        for record in records:
            key, parent = record.key, record.parent
            if key in resident:
                continue
            if parent in refused or not self._make_room(record, leased, now):
                refused.add(key)
                count.bypassed += record.nbytes
                continue
            resident[key] = record.nbytes
            self._used += record.nbytes
            count.written += record.nbytes
            policy.insert(key, parent, record.depth, now, record.hangs)

    def _make_room(self, record: _Record, leased: frozenset[BlockKey], now: float) -> bool:
        over = self._used + record.nbytes - self.count.capacity
        if over <= 0:
            return True
        policy, resident = self.policy, self.resident
        if self.picky and not policy.admit(
            record.key, record.parent, record.depth, now, record.hangs
        ):
            return False
        while over > 0:
            victims = policy.victims(1, lambda block: block not in leased, now)
            if not victims:
                return False
            policy.remove(victims[0])
            nbytes = resident.pop(victims[0])
            self._used -= nbytes
            self.count.evicted += nbytes
            over -= nbytes
        return True


class _Model:
    """The groups' records, named by the keys of the trace: those of the chain, and of others."""

    def __init__(self, groups: Sequence[GroupSpec]) -> None:
        self.chain = groups[0]
        self.needs_whole_chain = self.chain.kind is Kind.FULL
        self._others = [(group, dict[BlockKey, BlockKey]()) for group in groups[1:]]

    def of_chain(self, chain: Sequence[BlockKey], boundary: int) -> Sequence[BlockKey]:
        """What a hit of ``boundary`` blocks needs of ``chain`` itself."""
        needed = self.chain.needed(boundary)
        return chain[needed.start : needed.stop]

    def beside(self, chain: Sequence[BlockKey], boundary: int) -> list[tuple[GroupSpec, BlockKey]]:
        """What a hit of ``boundary`` blocks of ``chain`` needs of the other groups."""
        return [
            (group, self._key(number, chain[place]))
            for number, (group, _) in enumerate(self._others)
            for place in group.needed(boundary)
        ]

    def missed(self, chain: Sequence[BlockKey], hit: int, reach: int) -> list[BlockKey]:
        """What would have let a request hit as far as the chain is present: the windows there, and
        any state that was there."""
        return [
            self._key(number, chain[place])
            for number, (group, _) in enumerate(self._others)
            for place in (range(hit, reach) if group.kind is Kind.STATE else group.needed(reach))
        ]

    def records(self, chain: Sequence[BlockKey], hit: int) -> Iterator[_Record]:
        """What a request leaves in the tiers, each after its parent: the chain, what its hit used,
        and what each group keeps of the rest."""
        places: dict[int, list[int]] = {}
        for number, (group, _) in enumerate(self._others):
            for place in (*group.needed(hit), *group.kept(hit, len(chain))):
                places.setdefault(place, []).append(number)
        parent: BlockKey | None = None
        first = self.chain.needed(hit).start
        for depth, key in enumerate(chain):
            if depth >= first:
                yield _Record(key, parent, depth, self.chain.nbytes, False)
            for number in places.get(depth, ()):
                nbytes = self._others[number][0].nbytes
                yield _Record(self._key(number, key), key, depth + 1, nbytes, True)
            parent = key

    def _key(self, number: int, key: BlockKey) -> BlockKey:
        made = self._others[number][1]
        if key not in made:
            made[key] = BlockKey(bytes([number]) + key)
        return made[key]


def replay_groups(
    trace: Trace,
    groups: Sequence[GroupSpec],
    tiers: Sequence[tuple[str, int]],
    policy: str,
    advance: Callable[[int], None] = lambda _: None,
) -> GroupsOutcome:
    """Replays ``trace`` against tiers of ``(name, bytes)``, nearest first, as ``replay`` does, but
    for a model whose layers form ``groups``, the chain first. Unknown policy or no room:
    ConfigError.

    Per request the longest boundary is hit at which every group has the records that it needs; the
    engine computes the rest and saves what each group keeps of it. Only full blocks count.
    """
    model = _Model(groups)
    rooms = [
        _Tier(TierBytes(name, nbytes), policy, groups[0].nbytes, number == len(tiers) - 1)
        for number, (name, nbytes) in enumerate(tiers)
    ]

    def room_of(key: BlockKey) -> _Tier | None:
        return next((room for room in rooms if key in room.resident), None)

    accesses = hits = 0
    moved = {str(group.kind): 0 for group in groups}
    for request in trace.requests:
        advance(1)
        chain = request.chain[:-1] if request.is_partial else request.chain
        accesses += len(chain)
        reach = len(chain)
        if model.needs_whole_chain:
            reach = next((n for n, key in enumerate(chain) if room_of(key) is None), reach)
        hit, used = reach, model.beside(chain, reach)
        while not all(room_of(key) for _, key in reversed(used)) or not (
            model.needs_whole_chain or all(map(room_of, model.of_chain(chain, hit)))
        ):
            hit -= 1
            used = model.beside(chain, hit)
        hits += hit
        for group, key in (*((model.chain, key) for key in model.of_chain(chain, hit)), *used):
            room = room_of(key)
            assert room is not None
            room.count.read += group.nbytes
            moved[group.kind] += group.nbytes
        hanging = [key for _, key in used]
        if hit < reach:
            hanging = list(dict.fromkeys((*hanging, *model.missed(chain, hit, reach))))
        ending = [key for _, key in model.beside(chain, len(chain))]
        records = list(model.records(chain, hit))
        leased = frozenset(record.key for record in records)
        for room in rooms:
            room.policy.access(chain, request.now, hanging, ending)
            room.fill(records, leased, request.now)
    return GroupsOutcome(
        policy, len(trace.requests), accesses, hits, moved, tuple(room.count for room in rooms)
    )
