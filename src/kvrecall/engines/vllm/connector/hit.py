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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from kvrecall.block import BlockKey, TierName
from kvrecall.engines.vllm.compat.config import GroupKind
from kvrecall.engines.vllm.connector.request import Missing, RequestState
from kvrecall.engines.vllm.wire import EngineFacts
from kvrecall.pool.base import PoolClient

_MOST_PROBED = 256  # boundaries inside blocks, from the end of the chain back
_MOST_INSIDE = 65536  # ends inside whole blocks that are known

FirstNeeded = Callable[[int, int], int]
"""``(group, tokens)``: index of the first block of the group that a prefix of so many tokens needs
on the device."""

_Tiers = tuple[TierName | None, ...]


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
        """The run without the tail."""
        return self if self.tail is None else self.part(0, len(self.keys) - 1)

    def acquire(self, pool: PoolClient, deadline_s: float, state: RequestState) -> int:
        """Acquires the blocks; returns the ticket."""
        if self.parents is None:
            return pool.acquire(self.keys, deadline_s, self.parent, state.tenant)
        return pool.acquire(self.keys, deadline_s, tenant=state.tenant, parents=self.parents)


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
    answered yet. ``reach``: how far the chain would let a hit go; ``missing``: why it does not, a
    block of another group. Once all is answered, ``boundary``: where such blocks should be kept
    from now on, because other requests share the prefix so far; ``used``: those that the request
    uses, or would have used had they been there."""

    hit: Hit | None
    is_pending: bool
    reach: int = 0
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
        located = self._pool.locate(keys)
        self.is_pending |= located.pending
        return located.tiers


class HitFinder:
    """Finds the longest hit of a request. Does not wait, and changes nothing."""

    def __init__(self, pool: PoolClient, facts: EngineFacts, first_needed: FirstNeeded) -> None:
        self._pool = pool
        self._facts = facts
        self._first_needed = first_needed
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
        if self._is_chain:
            return Lookup(self._find_chain(ask, state, start, limit), ask.is_pending)
        find = self._find_aligned if self._facts.match_unit is None else self._find_finer
        hit, reach, missing = find(ask, state, start, limit)
        if ask.is_pending:
            return Lookup(hit, True, reach, missing)
        end = start if hit is None else hit.end
        used = tuple(
            key
            for group in self._beside
            for boundary in {end, reach} - {start}
            for key in self._keys_needed(state, group, start, boundary)
        )
        is_shared = end < reach and bool(self._full)
        return Lookup(hit, False, reach, missing, reach if is_shared else None, used)

    # ---- one group of full attention -----------------------------------------------------

    def _find_chain(self, ask: _Queries, state: RequestState, start: int, limit: int) -> Hit | None:
        size = self._facts.block_size
        first = start // size
        chain = state.keys(-(-limit // size))
        tiers = ask.find(chain[first:])
        stop, tail = first + len(tiers), None
        keys = chain[first:stop]
        if not ask.is_pending and stop * size < limit and self._facts.unit < size:
            tails = self._tails(ask, state, self._facts.chain, stop, limit)
            if tails:
                tail = max(tails)
                keys.append(tails[tail][0])
                tiers = (*tiers, tails[tail][1])
        if not keys:
            return None
        end = min(stop * size, limit) if tail is None else tail
        parent = chain[first - 1] if first else None
        run = BlockRun(self._facts.chain, first, tuple(keys), tiers, parent, tail=tail)
        return Hit(start, end, (run,), True, size)

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

    def _tails(
        self, ask: _Queries, state: RequestState, group: int, block: int, limit: int
    ) -> dict[int, tuple[BlockKey, TierName]]:
        """The tails of a block of a group, by the tokens at their ends, up to ``limit``: key and
        tier."""
        size, unit = self._facts.groups[group].block_size, self._facts.unit
        ends = range(block * size + unit, min((block + 1) * size - 1, limit) + 1, unit)
        known = [(end, key) for end in ends if (key := state.key_at(end, group)) is not None]
        known += [(end, self._inside[key]) for end, key in known if key in self._inside]
        located = zip(known, ask.locate([key for _, key in known]), strict=True)
        return {end: (key, tier) for (end, key), tier in located if tier}

    # ---- hits that may end inside blocks -------------------------------------------------

    def _find_finer(
        self, ask: _Queries, state: RequestState, start: int, limit: int
    ) -> tuple[Hit | None, int, Missing | None]:
        """Of groups of full attention and of recurrent layers. The hit, and ``reach`` and
        ``missing`` of a ``Lookup``."""
        whole: dict[int, tuple[TierName, ...]] = {}
        ends: dict[int, int] = {}  # of the whole blocks, in tokens
        tails: dict[int, dict[int, tuple[BlockKey, TierName]]] = {}
        for group in self._full:
            size = self._facts.groups[group].block_size
            whole[group] = ask.find(state.keys(-(-limit // size), group)[start // size :])
            ends[group] = start + len(whole[group]) * size
        for group in self._full:
            block = ends[group] // self._facts.groups[group].block_size
            tails[group] = self._tails(ask, state, group, block, limit)
        reach = min([limit, *ends.values()])
        inside = {
            end
            for end in set[int]().union(*tails.values())
            if all(end in tails[i] or end <= ends[i] for i in self._full)
        }
        end, states, missing = self._last_states(ask, state, start, reach, sorted(inside)[::-1])
        boundary = self._aligned(reach)
        if end <= start:
            return None, boundary, missing if end < boundary else None
        runs = [
            self._run(state, group, (tier,), start, end, state.key_at(end, group))
            for group, tier in zip(self._sparse, states, strict=True)
        ]
        for group in self._full:
            tiers, key = whole[group], None
            if end > ends[group]:
                key, tier = tails[group][end]
                tiers = (*tiers, tier)
            runs.append(self._run(state, group, tiers, start, end, key))
        hit = Hit(start, end, tuple(runs), False, self._facts.block_size)
        return hit, boundary, missing if end < boundary else None

    def _last_states(
        self, ask: _Queries, state: RequestState, start: int, reach: int, tails: Iterable[int]
    ) -> tuple[int, tuple[TierName, ...], Missing | None]:
        """The last boundary behind ``start`` at which every recurrent group has its state: one of
        ``tails``, the last first, or one up to ``reach``; ``start`` if there is none. With the
        tiers of the states, by group, and one that is missing at the last whole block."""
        unit, alignment = self._facts.unit, self._facts.alignment
        aligned = range(self._aligned(start) + alignment, reach + 1, alignment)
        end, tiers, missing = self._last_state(ask, state, [*tails, *reversed(aligned)])
        if end < reach:  # states inside blocks are kept where prompts ended, which is not known
            nearest = range(reach // unit * unit, max(start, end), -unit)[:_MOST_PROBED]
            inside = [one for one in nearest if one % alignment]
            deeper, found, _ = self._last_state(ask, state, inside)
            end, tiers = (deeper, found) if deeper else (end, tiers)
        return end or start, tiers, missing

    def _last_state(
        self, ask: _Queries, state: RequestState, ends: Sequence[int]
    ) -> tuple[int, tuple[TierName, ...], Missing | None]:
        """The first of ``ends`` at which every recurrent group has its state (0: none), and as
        ``_last_states``."""
        found: dict[int, tuple[TierName, ...]] = dict.fromkeys(ends, ())
        boundary = max((end for end in ends if end % self._facts.alignment == 0), default=0)
        missing = None
        for group in self._sparse:
            keys = {end: key for end in found if (key := state.key_at(end, group)) is not None}
            tiers = zip(keys, ask.locate([*keys.values()]), strict=True)
            kept = {end: (*found[end], tier) for end, tier in tiers if tier}
            if boundary in found and boundary not in kept and boundary in keys:
                missing = Missing(keys[boundary], str(self._facts.groups[group].kind))
            found = kept
        end = next(iter(found), 0)
        return end, found.get(end, ()), missing

    # ---- hits that end where the blocks of all groups do ---------------------------------

    def _find_aligned(
        self, ask: _Queries, state: RequestState, start: int, limit: int
    ) -> tuple[Hit | None, int, Missing | None]:
        """As ``_find_finer``, of any groups."""
        reach = limit
        tiers: dict[int, _Tiers] = {}
        for group in self._full:
            size = self._facts.groups[group].block_size
            tiers[group] = ask.find(state.keys(reach // size, group)[start // size :])
            reach = min(reach, self._aligned(start + len(tiers[group]) * size))
        for group in self._sparse:
            size = self._facts.groups[group].block_size
            # Every boundary up to the end is a candidate, and needs blocks from here on.
            first = max(start // size, self._first_needed(group, start + 1))
            located = ask.locate(state.keys(reach // size, group)[first:])
            tiers[group] = (None,) * (first - start // size) + located
        end, missing = self._boundary(state, tiers, start, reach)
        if end <= start:
            return None, reach, missing
        runs = []
        for group in (*self._sparse, *self._full):
            base = start // self._facts.groups[group].block_size
            first, stop = self._needed(group, start, end)
            found_at = tuple(tier for tier in tiers[group][first - base : stop - base] if tier)
            runs.append(self._run(state, group, found_at, start, end))
        needed = tuple(run for run in runs if run.keys)
        return Hit(start, end, needed, False, self._facts.block_size), reach, missing

    def _boundary(
        self, state: RequestState, tiers: dict[int, _Tiers], start: int, end: int
    ) -> tuple[int, Missing | None]:
        """The last boundary up to ``end`` at which the sparse groups have all they need; and a
        block that is missing for one at ``end``."""
        missing = None
        while end > start:
            gaps = [gap for group in self._sparse for gap in self._gaps(tiers, group, start, end)]
            if not gaps:
                break
            if missing is None:
                group, place = gaps[0]
                key = next(iter(state.keys(place + 1, group, place)), None)
                if key is not None:
                    missing = Missing(key, str(self._facts.groups[group].kind))
            sizes = self._facts.groups
            end = self._aligned(min(place * sizes[group].block_size for group, place in gaps))
        return max(end, start), missing

    def _gaps(
        self, tiers: dict[int, _Tiers], group: int, start: int, end: int
    ) -> list[tuple[int, int]]:
        """Blocks of a group (with it) that a hit at ``end`` needs and the pool lacks."""
        there, base = tiers[group], start // self._facts.groups[group].block_size
        needed = range(*self._needed(group, start, end))
        return [(group, place) for place in needed if there[place - base] is None]

    # ---- what a boundary needs -----------------------------------------------------------

    def _aligned(self, tokens: int) -> int:
        return tokens // self._facts.alignment * self._facts.alignment

    def _needed(self, group: int, start: int, end: int) -> tuple[int, int]:
        """The blocks of a group that must come from the pool for a hit at ``end``: the first, and
        the one behind the last."""
        size = self._facts.groups[group].block_size
        return max(start // size, self._first_needed(group, end)), -(-end // size)

    def _run(
        self,
        state: RequestState,
        group: int,
        tiers: tuple[TierName, ...],
        start: int,
        end: int,
        last: BlockKey | None = None,
    ) -> BlockRun:
        """The blocks of a group that a hit at ``end`` needs, in these tiers. ``last``: key of the
        last one, if it is not that of the whole block."""
        facts = self._facts.groups[group]
        first, stop = self._needed(group, start, end)
        keys = tuple(state.keys(stop if last is None else stop - 1, group)[first:])
        tail = None
        if last is not None:
            keys, tail = (*keys, last), end if end % facts.block_size else None
        weight = facts.block_bytes / self._facts.block_bytes
        tiers = tiers[: len(keys)]
        if group == self._facts.chain:
            before = state.keys(first, group)
            parent = before[-1] if before else None
            return BlockRun(group, first, keys, tiers, parent, None, weight, tail)
        parents = tuple(self.parents(state, group, range(first, stop), end))
        return BlockRun(group, first, keys, tiers, None, parents, weight, tail)

    def needed(self, group: int, tokens: int) -> range:
        """The blocks of a group that a hit needs which ends at the last boundary of all groups'
        blocks within the first ``tokens`` tokens."""
        return range(*self._needed(group, 0, self._aligned(tokens)))

    def ending(self, state: RequestState, tokens: int) -> list[BlockKey]:
        """The blocks beside the chain at the end of ``tokens`` tokens, which a request that goes on
        from there will need."""
        end = tokens // self._facts.unit * self._facts.unit
        return [key for group in self._beside for key in self._keys_needed(state, group, 0, end)]

    def _keys_needed(
        self, state: RequestState, group: int, start: int, end: int
    ) -> Sequence[BlockKey]:
        """Keys of the blocks beside the chain that must come from the pool for a hit at ``end``."""
        if end % self._facts.groups[group].block_size:
            key = state.key_at(end, group)
            return () if key is None else (key,)
        first, stop = self._needed(group, start, end)
        return state.keys(stop, group)[first:stop]

    def parents(
        self, state: RequestState, group: int, places: Sequence[int], end: int
    ) -> list[BlockKey | None]:
        """Parents of blocks of a group beside the chain, in the first ``end`` tokens: the block of
        the chain that ends with each, or the last one that ends before it."""
        size = self._facts.groups[group].block_size
        ends = [min((place + 1) * size, end) // self._facts.block_size for place in places]
        chain = state.keys(max(ends, default=0))
        return [chain[end - 1] if end else None for end in ends]
