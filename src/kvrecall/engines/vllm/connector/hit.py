"""A hit: the blocks of each KV group that a request needs from the pool to continue at a boundary.

An engine with one group of full attention needs every block of the prefix, so any prefix of a hit
is one. With several groups a hit ends where all of them can serve: full attention needs the whole
prefix, a window the blocks that its last tokens attend to, a recurrent layer the state at that very
boundary. Which blocks those are is vLLM's own rule (``get_num_skipped_tokens`` of each group's
manager), so that a recalled prefix occupies the device blocks that a hit on the device does.

Where hits may end inside a block (``EngineFacts.match_unit``), the hit's last block is either a
*tail*, a record of a block that was saved when it had KV up to that very token, or a block that was
saved whole and begins with the same tokens. What is behind the hit's end has no weight: attention
ends with a sequence's last token, and the tokens behind are computed into their places first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from kvrecall.block import BlockKey, TierName
from kvrecall.engines.vllm.compat.config import GroupKind
from kvrecall.engines.vllm.connector.request import Missing, RequestState
from kvrecall.engines.vllm.wire import EngineFacts
from kvrecall.pool.base import PoolClient

_MOST_PROBED = 256  # boundaries inside blocks, from the end of the chain back
_MOST_INSIDE = 65536  # ends inside whole blocks that are known

FirstNeeded = Callable[[int, int], int]
"""``(group, tokens)``: the group's first block that so long a prefix needs on the device."""

_Tiers = tuple[TierName | None, ...]
_Located = tuple[BlockKey, TierName]


@dataclass(frozen=True, slots=True)
class BlockRun:
    """Adjacent blocks of a KV group. ``first``: index of the first one in the request's blocks of
    that group. ``tiers``: where they were found. ``parents``: of each key, if they are not a chain
    behind ``parent``. ``weight``: bytes of a block, as a share of those of a block of the chain in
    all groups. ``tail``: tokens at the end of the last block, if it is a tail."""

    group: int
    first: int
    keys: tuple[BlockKey, ...]
    tiers: tuple[TierName, ...]
    parent: BlockKey | None
    parents: tuple[BlockKey | None, ...] | None = None
    weight: float = 1.0
    tail: int | None = None

    def part(self, start: int, stop: int) -> BlockRun:
        """Blocks ``[start, stop)`` of the run."""
        return replace(
            self,
            first=self.first + start,
            keys=self.keys[start:stop],
            tiers=self.tiers[start:stop],
            parent=self.keys[start - 1] if start and self.parents is None else self.parent,
            parents=None if self.parents is None else self.parents[start:stop],
            tail=self.tail if start < len(self.keys) <= stop else None,
        )

    def whole(self) -> BlockRun:
        return self if self.tail is None else self.part(0, len(self.keys) - 1)

    def acquire(self, pool: PoolClient, deadline_s: float, state: RequestState) -> int:
        """Acquires the blocks; returns the ticket."""
        return pool.acquire(self.keys, deadline_s, self.parent, state.tenant, self.parents)


@dataclass(frozen=True, slots=True)
class Hit:
    """A prefix of ``end`` tokens, of which the engine has ``start``. ``runs``: the blocks to load;
    the chain's, if there is one, is the last. ``is_chain``: any leading blocks of the one run are a
    hit, too. ``block_size``: tokens of a block of the chain."""

    start: int
    end: int
    runs: tuple[BlockRun, ...]
    is_chain: bool
    block_size: int

    @property
    def chain(self) -> BlockRun:
        return self.runs[-1]

    @property
    def blocks(self) -> int:
        """Blocks of the chain between ``start`` and ``end``, a tail among them."""
        return -(-(self.end - self.start) // self.block_size)

    def tokens(self, blocks: int) -> int:
        """Tokens that the first ``blocks`` of them give."""
        return min(self.start + blocks * self.block_size, self.end) - self.start

    def cut(self, blocks: int) -> Hit:
        """The hit, which is a chain, with its leading ``blocks`` only."""
        end = self.start + self.tokens(blocks)
        return replace(self, end=end, runs=(self.chain.part(0, blocks),))


@dataclass(frozen=True, slots=True)
class Lookup:
    """What a search found: the longest ``hit``. ``is_pending``: a tier beyond this host has not
    answered yet. ``missing``: a block of another group, without which the hit is shorter than the
    chain. Once all is answered, ``boundary``: where such blocks should be kept from now on, because
    other requests share the prefix so far; ``used``: those that the request uses, or would."""

    hit: Hit | None
    is_pending: bool
    missing: Missing | None = None
    boundary: int | None = None
    used: tuple[BlockKey, ...] = ()


class _Queries:
    """The questions of one search to the pool. ``is_pending``: one is not answered yet."""

    def __init__(self, pool: PoolClient) -> None:
        self._pool = pool
        self.is_pending = False

    def find(self, keys: Sequence[BlockKey]) -> tuple[TierName, ...]:
        if not keys:
            return ()
        found = self._pool.find(keys)
        self.is_pending |= found.pending
        return found.tiers

    def locate(self, keys: Sequence[BlockKey]) -> _Tiers:
        if not keys:
            return ()
        located = self._pool.locate(keys)
        self.is_pending |= located.pending
        return located.tiers


class HitFinder:
    """Finds the longest hit of a request. Does not wait, and changes nothing."""

    def __init__(self, pool: PoolClient, facts: EngineFacts, first_needed: FirstNeeded) -> None:
        self._pool = pool
        self._facts = facts
        self._first_needed = first_needed
        self._sizes = [group.block_size for group in facts.groups]
        kinds = [group.kind for group in facts.groups]
        self._full = [i for i, kind in enumerate(kinds) if kind is GroupKind.FULL]
        self._sparse = [i for i, kind in enumerate(kinds) if kind is not GroupKind.FULL]
        self._beside = [i for i in self._sparse if i != facts.chain]
        self._is_chain = len(kinds) == 1 and not self._sparse
        # Of ends inside whole blocks, by the key that a tail would have: the block's key.
        self._inside: OrderedDict[BlockKey, BlockKey] = OrderedDict()

    def find(self, state: RequestState, start: int, limit: int) -> Lookup:
        """The longest hit between ``start`` and ``limit`` (tokens)."""
        ask = _Queries(self._pool)
        tiers: dict[int, _Tiers] = {}
        ends: dict[int, int] = {}  # of the whole blocks, in tokens
        for group in self._full:
            size = self._sizes[group]
            tiers[group] = ask.find(state.keys(-(-limit // size), group)[start // size :])
            ends[group] = start + len(tiers[group]) * size
        reach = self._aligned(min([limit, *ends.values()]))
        for group in self._sparse:
            size = self._sizes[group]
            # Every boundary up to the end is a candidate, and needs blocks from here on.
            first = max(start // size, self._first_needed(group, start + 1))
            located = ask.locate(state.keys(reach // size, group)[first:])
            tiers[group] = (None,) * (first - start // size) + located
        end, missing = self._boundary(state, tiers, start, reach)
        last: dict[int, _Located] = {}
        if self._facts.match_unit is not None:
            end, last = self._inside_blocks(ask, state, end, ends, limit)
        hit = self._hit(state, tiers, start, end, last)
        missing = missing if end < reach else None
        if ask.is_pending:
            return Lookup(hit, True, missing)
        used = tuple(
            key
            for group in self._beside
            for boundary in {end, reach} - {start}
            for key in self._keys_needed(state, group, start, boundary)
        )
        return Lookup(hit, False, missing, reach if end < reach and self._full else None, used)

    def _hit(
        self,
        state: RequestState,
        tiers: Mapping[int, _Tiers],
        start: int,
        end: int,
        last: Mapping[int, _Located],
    ) -> Hit | None:
        if end <= start:
            return None
        groups = (*self._sparse, *self._full)
        runs = (self._run(state, i, tiers[i], start, end, last.get(i)) for i in groups)
        needed = tuple(run for run in runs if run.keys)
        return Hit(start, end, needed, self._is_chain, self._facts.block_size)

    def _boundary(
        self, state: RequestState, tiers: Mapping[int, _Tiers], start: int, end: int
    ) -> tuple[int, Missing | None]:
        """The last boundary up to ``end`` at which the sparse groups have all they need; and a
        block that is missing for one at ``end``."""
        missing = None
        while end > start:
            gaps = [  # blocks that a hit at ``end`` needs and the pool lacks, with their groups
                (group, place)
                for group in self._sparse
                for place in range(*self._needed(group, start, end))
                if tiers[group][place - start // self._sizes[group]] is None
            ]
            if not gaps:
                break
            if missing is None:
                group, place = gaps[0]
                key = next(iter(state.keys(place + 1, group, place)), None)
                if key is not None:
                    missing = Missing(key, str(self._facts.groups[group].kind))
            end = self._aligned(min(place * self._sizes[group] for group, place in gaps))
        return max(end, start), missing

    # ---- hits that end inside blocks -----------------------------------------------------

    def _inside_blocks(
        self, ask: _Queries, state: RequestState, end: int, ends: Mapping[int, int], limit: int
    ) -> tuple[int, dict[int, _Located]]:
        """The last boundary inside a block behind ``end`` (else that) at which full attention has
        all, in whole blocks up to ``ends`` and one more, and every recurrent group its state; and,
        by group, the blocks that end there if they are not whole ones of its run."""
        unit, alignment = self._facts.unit, self._facts.alignment
        tails: dict[int, dict[int, _Located]] = {}
        if not (self._is_chain and ask.is_pending):
            tails = {i: self._tails(ask, state, i, ends[i], limit) for i in self._full}
        beyond = {
            one
            for one in set[int]().union(*tails.values())
            if all(one in tails[i] or one <= ends[i] for i in self._full)
        }
        found, states = self._last_state(ask, state, sorted(beyond)[::-1])
        reach = min([limit, *ends.values()])
        if not found and end < reach:  # states are kept where prompts ended, which is not known
            nearest = range(reach // unit * unit, end, -unit)[:_MOST_PROBED]
            inside = [one for one in nearest if one % alignment]
            found, states = self._last_state(ask, state, inside)
        if not found:
            return end, {}
        return found, states | {i: tails[i][found] for i in self._full if found > ends[i]}

    def _last_state(
        self, ask: _Queries, state: RequestState, ends: Sequence[int]
    ) -> tuple[int, dict[int, _Located]]:
        """The first of ``ends`` with the states of all recurrent groups (0: none); by group."""
        found: dict[int, dict[int, _Located]] = {end: {} for end in ends}
        for group in self._sparse:
            keys = {end: key for end in found if (key := state.key_at(end, group)) is not None}
            tiers = zip(keys, ask.locate([*keys.values()]), strict=True)
            found = {end: {**found[end], group: (keys[end], tier)} for end, tier in tiers if tier}
        return next(iter(found.items()), (0, {}))

    def _tails(
        self, ask: _Queries, state: RequestState, group: int, start: int, limit: int
    ) -> dict[int, _Located]:
        """The tails of a group's block that begins at ``start``, by their ends, up to ``limit``."""
        size, unit = self._sizes[group], self._facts.unit
        ends = range(start + unit, min(start + size - 1, limit) + 1, unit)
        known = [(end, key) for end in ends if (key := state.key_at(end, group)) is not None]
        # Of one tier the tail counts, not the block filled since: that may be doubted longer.
        known[:0] = [(end, self._inside[key]) for end, key in known if key in self._inside]
        tiers = ask.locate([key for _, key in known])
        located = sorted(zip(known, tiers, strict=True), key=lambda one: one[1] is TierName.HOST)
        return {end: (key, tier) for (end, key), tier in located if tier}

    def learn(self, state: RequestState, start: int, end: int) -> None:
        """A chain's blocks between ``start`` (a block's) and ``end`` are in the pool, or on their
        way: a request that parts from them inside finds them up to the last unit before. Known to
        this engine, and of the latest blocks only."""
        size, unit = self._facts.block_size, self._facts.unit
        if not self._is_chain or unit == size:
            return
        for first in range(start, end, size):
            last = min(first + size, end)
            key = state.key_at(last)
            for inner in range(first + unit, last, unit):
                inside = state.key_at(inner)
                if inside is not None and key is not None:
                    self._inside[inside] = key
                    self._inside.move_to_end(inside)
        while len(self._inside) > _MOST_INSIDE:
            self._inside.popitem(last=False)

    # ---- what a boundary needs -----------------------------------------------------------

    def _aligned(self, tokens: int) -> int:
        return tokens // self._facts.alignment * self._facts.alignment

    def _needed(self, group: int, start: int, end: int) -> tuple[int, int]:
        """The blocks of a group that the pool must give for a hit at ``end``: first and stop."""
        size = self._sizes[group]
        needed = 0 if group in self._full else self._first_needed(group, end)
        return max(start // size, needed), -(-end // size)

    def _run(
        self,
        state: RequestState,
        group: int,
        tiers: _Tiers,
        start: int,
        end: int,
        last: _Located | None,
    ) -> BlockRun:
        """The blocks of a group that a hit at ``end`` needs. ``last``: if that is not whole."""
        size, facts = self._sizes[group], self._facts
        first, stop = self._needed(group, start, end)
        whole = stop if last is None else stop - 1
        keys = tuple(state.keys(whole, group)[first:])
        places = slice(first - start // size, whole - start // size)
        found_at = tuple(filter(None, tiers[places]))
        tail = None
        if last is not None:
            keys, found_at, tail = (
                (*keys, last[0]),
                (*found_at, last[1]),
                end if end % size else None,
            )
        weight = facts.groups[group].block_bytes / facts.block_bytes
        if group == facts.chain:
            parent = state.keys(first, group, first - 1)[0] if first else None
            return BlockRun(group, first, keys, found_at, parent, None, weight, tail)
        parents = tuple(self.parents(state, group, range(first, stop), end))
        return BlockRun(group, first, keys, found_at, None, parents, weight, tail)

    def needed(self, group: int, tokens: int) -> range:
        """The blocks of a group that a hit needs at the last boundary in ``tokens`` tokens."""
        return range(*self._needed(group, 0, self._aligned(tokens)))

    def ending(self, state: RequestState, tokens: int) -> list[BlockKey]:
        """The blocks beside the chain that a request which goes on from there will need."""
        end = tokens // self._facts.unit * self._facts.unit
        return [key for group in self._beside for key in self._keys_needed(state, group, 0, end)]

    def _keys_needed(
        self, state: RequestState, group: int, start: int, end: int
    ) -> Sequence[BlockKey]:
        """Keys of the blocks beside the chain that must come from the pool for a hit at ``end``."""
        if end % self._sizes[group]:
            key = state.key_at(end, group)
            return () if key is None else (key,)
        first, stop = self._needed(group, start, end)
        return state.keys(stop, group)[first:stop]

    def parents(
        self, state: RequestState, group: int, places: Sequence[int], end: int
    ) -> list[BlockKey | None]:
        """Parents of blocks of a group beside the chain, in the first ``end`` tokens: the block of
        the chain that ends with each, or the last one that ends before it."""
        size = self._sizes[group]
        ends = [min((place + 1) * size, end) // self._facts.block_size for place in places]
        chain = state.keys(max(ends, default=0))
        return [chain[end - 1] if end else None for end in ends]
