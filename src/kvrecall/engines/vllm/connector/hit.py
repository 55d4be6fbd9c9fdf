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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kvrecall.block import BlockKey, TierName
from kvrecall.engines.vllm.compat.config import GroupKind
from kvrecall.engines.vllm.compat.scheduler import keep_boundary
from kvrecall.engines.vllm.connector.request import RequestState
from kvrecall.engines.vllm.connector.wire import EngineFacts
from kvrecall.pool.base import Found, PoolClient

_MOST_PROBED = 256  # boundaries inside blocks, from the end of the chain back
_MOST_INSIDE = 65536  # ends inside whole blocks that are known

FirstNeeded = Callable[[int, int], int]
"""``(group, tokens)``: index of the first block of the group that a prefix of so many tokens needs
on the device."""


@dataclass(frozen=True, slots=True)
class Run:
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

    def part(self, start: int, stop: int) -> Run:
        """Blocks ``[start, stop)`` of the run."""
        tail = self.tail if start < len(self.keys) <= stop else None
        parents = None if self.parents is None else self.parents[start:stop]
        parent = self.keys[start - 1] if start and parents is None else self.parent
        keys, tiers = self.keys[start:stop], self.tiers[start:stop]
        return replace(
            self,
            first=self.first + start,
            keys=keys,
            tiers=tiers,
            parent=parent,
            parents=parents,
            tail=tail,
        )

    def whole(self) -> Run:
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
    runs: tuple[Run, ...]
    is_chain: bool
    block_size: int

    @property
    def chain(self) -> Run:
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


class HitFinder:
    """Finds the longest hit of a request. Does not wait."""

    def __init__(self, pool: PoolClient, facts: EngineFacts, first_needed: FirstNeeded) -> None:
        self._pool = pool
        self._facts = facts
        self._first_needed = first_needed
        kinds = [group.kind for group in facts.groups]
        self._full = [i for i, kind in enumerate(kinds) if kind is GroupKind.FULL]
        self._sparse = [i for i, kind in enumerate(kinds) if kind is not GroupKind.FULL]
        self._is_chain = len(kinds) == 1 and not self._sparse
        # Of ends inside whole blocks, by the key that a tail would have: the block's key.
        self._inside: OrderedDict[BlockKey, BlockKey] = OrderedDict()

    def find(self, state: RequestState, start: int, limit: int) -> tuple[Hit | None, bool]:
        """The longest hit between ``start`` and ``limit`` (tokens); whether a tier beyond this host
        has not answered yet."""
        if self._is_chain:
            return self._find_chain(state, start, limit)
        if self._facts.match_unit is None:
            return self._find_aligned(state, start, limit)
        return self._find_finer(state, start, limit)

    def _find_chain(self, state: RequestState, start: int, limit: int) -> tuple[Hit | None, bool]:
        size = self._facts.block_size
        first = start // size
        chain = state.keys(-(-limit // size))
        keys = chain[first:]
        found = self._pool.find(keys) if keys else Found(())
        stop, tail = first + found.blocks, None
        tiers, is_pending = found.tiers, found.pending
        keys = keys[: found.blocks]
        if not is_pending and stop * size < limit and self._facts.unit < size:
            group = self._facts.chain
            tails, is_pending = self._tails(state, group, stop, limit)
            if tails:
                tail = max(tails)
                keys.append(tails[tail][0])
                tiers = (*tiers, tails[tail][1])
        if not keys:
            return None, is_pending
        end = min(stop * size, limit) if tail is None else tail
        parent = chain[first - 1] if first else None
        run = Run(self._facts.chain, first, tuple(keys), tiers, parent, tail=tail)
        return Hit(start, end, (run,), True, size), is_pending

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
        self, state: RequestState, group: int, block: int, limit: int
    ) -> tuple[dict[int, tuple[BlockKey, TierName]], bool]:
        """The tails of a block of a group, by the tokens at their ends, up to ``limit``: key and
        tier. And whether a tier beyond this host has not answered yet."""
        size, unit = self._facts.groups[group].block_size, self._facts.unit
        ends = range(block * size + unit, min((block + 1) * size - 1, limit) + 1, unit)
        known = [(end, key) for end in ends if (key := state.key_at(end, group)) is not None]
        known += [(end, self._inside[key]) for end, key in known if key in self._inside]
        located = self._pool.locate([key for _, key in known])
        pairs = zip(known, located.tiers, strict=True)
        return {end: (key, tier) for (end, key), tier in pairs if tier}, located.pending

    def _find_finer(self, state: RequestState, start: int, limit: int) -> tuple[Hit | None, bool]:
        """Of groups of full attention and of recurrent layers, ending inside a block or at its
        end."""
        is_pending = False
        whole: dict[int, tuple[TierName, ...]] = {}
        reach = limit
        for group in self._full:
            size = self._facts.groups[group].block_size
            found = self._pool.find(state.keys(-(-limit // size), group)[start // size :])
            whole[group] = found.tiers
            is_pending |= found.pending
            reach = min(reach, start + found.blocks * size)
        tails: dict[int, dict[int, tuple[BlockKey, TierName]]] = {}
        for group in self._full:
            size = self._facts.groups[group].block_size
            stop = start // size + len(whole[group])
            tails[group], more = self._tails(state, group, stop, limit)
            is_pending |= more
        ends = [
            end
            for end in {end for found in tails.values() for end in found}
            if all(end in tails[i] or end <= self._end(i, start, whole[i]) for i in self._full)
        ]
        state.lacks = None
        end, states, more = self._states(state, start, reach, sorted(ends, reverse=True))
        is_pending |= more
        if end >= self._aligned(reach):
            state.lacks = None
        if not is_pending:
            aligned = self._aligned(reach)
            self._touch(state, start, end, aligned)
            if end < aligned:
                keep_boundary(state.request, aligned)
        if end <= start:
            return None, is_pending
        runs = [
            self._run(state, group, (tier,), start, end, state.key_at(end, group))
            for group, tier in zip(self._sparse, states, strict=True)
        ]
        for group in self._full:
            tier_of, key = whole[group], None
            if end > self._end(group, start, tier_of):
                key, tier = tails[group][end]
                tier_of = (*tier_of, tier)
            runs.append(self._run(state, group, tier_of, start, end, key))
        return Hit(start, end, tuple(runs), False, self._facts.block_size), is_pending

    def _end(self, group: int, start: int, found: Sequence[TierName]) -> int:
        """Tokens up to the end of the whole blocks found."""
        return start + len(found) * self._facts.groups[group].block_size

    def _states(
        self, state: RequestState, start: int, reach: int, tails: Sequence[int]
    ) -> tuple[int, list[TierName], bool]:
        """The last boundary behind ``start`` at which every recurrent group has its state: one of
        ``tails``, the last first, or one up to ``reach``; ``start`` if there is none. With the
        tiers of the states, by group, and whether a tier beyond this host has not answered yet."""
        unit, alignment = self._facts.unit, self._facts.alignment
        ends = range(self._aligned(start) + alignment, reach + 1, alignment)
        boundary = self._aligned(reach)
        end, tiers, is_pending = self._last_state(state, [*tails, *reversed(ends)], boundary)
        if end < reach:  # states inside blocks are kept where prompts ended, which is not known
            nearest = range(reach // unit * unit, max(start, end), -unit)[:_MOST_PROBED]
            inside = [one for one in nearest if one % alignment]
            deeper, found, more = self._last_state(state, inside, -1)
            is_pending |= more
            if deeper:
                return deeper, found, is_pending
        return (end, tiers, is_pending) if end else (start, [], is_pending)

    def _last_state(
        self, state: RequestState, ends: Sequence[int], boundary: int
    ) -> tuple[int, list[TierName], bool]:
        """The first of ``ends`` at which every recurrent group has its state, and as ``_states``; 0
        if there is none. Notes which state is missing at ``boundary``, one of them."""
        found: dict[int, list[TierName]] = {end: [] for end in ends}
        is_pending = False
        for group in self._sparse:
            known = [(end, key) for end in found if (key := state.key_at(end, group)) is not None]
            located = self._pool.locate([key for _, key in known])
            is_pending |= located.pending
            pairs = zip(known, located.tiers, strict=True)
            is_candidate = boundary in found
            found = {end: [*found[end], tier] for (end, _), tier in pairs if tier}
            if is_candidate and boundary not in found:
                state.lacks = state.key_at(boundary, group)
                state.lacks_kind = str(self._facts.groups[group].kind)
        end = next(iter(found), 0)
        return end, found.get(end, []), is_pending

    def _find_aligned(self, state: RequestState, start: int, limit: int) -> tuple[Hit | None, bool]:
        """Ending where the blocks of all groups do."""
        end, is_pending = limit, False
        tiers: dict[int, tuple[TierName | None, ...]] = {}
        for group in self._full:
            size = self._facts.groups[group].block_size
            found = self._pool.find(state.keys(end // size, group)[start // size :])
            tiers[group] = found.tiers
            is_pending |= found.pending
            end = min(end, self._aligned(start + found.blocks * size))
        for group in self._sparse:
            size = self._facts.groups[group].block_size
            # Every boundary up to the end is a candidate, and needs blocks from here on.
            first = max(start // size, self._first_needed(group, start + 1))
            located = self._pool.locate(state.keys(end // size, group)[first:])
            tiers[group] = (None,) * (first - start // size) + located.tiers
            is_pending |= located.pending
        reach = end
        end = self._boundary(tiers, start, end)
        self._note_gap(state, tiers, start, end, reach)
        if not is_pending:
            self._touch(state, start, end, reach)
            if end < reach and self._full:
                keep_boundary(state.request, reach)
        if end <= start:
            return None, is_pending
        runs = []
        for group in (*self._sparse, *self._full):
            base = start // self._facts.groups[group].block_size
            first, stop = self._needed(group, start, end)
            found_at = tuple(tier for tier in tiers[group][first - base : stop - base] if tier)
            runs.append(self._run(state, group, found_at, start, end))
        needed = tuple(run for run in runs if run.keys)
        return Hit(start, end, needed, False, self._facts.block_size), is_pending

    def _aligned(self, tokens: int) -> int:
        return tokens // self._facts.alignment * self._facts.alignment

    def _needed(self, group: int, start: int, end: int) -> tuple[int, int]:
        """The blocks of a group that must come from the pool for a hit at ``end``: the first, and
        the one behind the last."""
        size = self._facts.groups[group].block_size
        return max(start // size, self._first_needed(group, end)), -(-end // size)

    def _boundary(self, tiers: dict[int, tuple[TierName | None, ...]], start: int, end: int) -> int:
        """The last boundary up to ``end`` at which the sparse groups have all they need."""
        while end > start:
            gaps = [gap for group in self._sparse for gap in self._gaps(tiers, group, start, end)]
            if not gaps:
                break
            end = self._aligned(min(gaps))  # any hit beyond needs that block
        return max(end, start)

    def _gaps(
        self, tiers: dict[int, tuple[TierName | None, ...]], group: int, start: int, end: int
    ) -> list[int]:
        """Where blocks begin (tokens) that a hit at ``end`` needs of a group and the pool lacks."""
        size = self._facts.groups[group].block_size
        there, base = tiers[group], start // size
        needed = range(*self._needed(group, start, end))
        return [place * size for place in needed if there[place - base] is None]

    def _note_gap(
        self,
        state: RequestState,
        tiers: dict[int, tuple[TierName | None, ...]],
        start: int,
        end: int,
        reach: int,
    ) -> None:
        """Notes which block beside the chain the hit would have needed to end at ``reach``."""
        state.lacks = None
        for group in self._sparse if end < reach else ():
            gaps = self._gaps(tiers, group, start, reach)
            if gaps:
                facts = self._facts.groups[group]
                place = gaps[0] // facts.block_size
                state.lacks = next(iter(state.keys(place + 1, group, place)), None)
                state.lacks_kind = str(facts.kind)
                return

    def _run(
        self,
        state: RequestState,
        group: int,
        tiers: tuple[TierName, ...],
        start: int,
        end: int,
        last: BlockKey | None = None,
    ) -> Run:
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
            return Run(group, first, keys, tiers, parent, None, weight, tail)
        parents = tuple(self.parents(state, group, range(first, stop), end))
        return Run(group, first, keys, tiers, None, parents, weight, tail)

    def needed(self, group: int, tokens: int) -> range:
        """The blocks of a group that a hit needs which ends at the last boundary of all groups'
        blocks within the first ``tokens`` tokens."""
        return range(*self._needed(group, 0, self._aligned(tokens)))

    def ending(self, state: RequestState, tokens: int) -> list[BlockKey]:
        """The blocks beside the chain at the end of ``tokens`` tokens, which a request that goes on
        from there will need."""
        end = tokens // self._facts.unit * self._facts.unit
        hanging = (group for group in self._sparse if group != self._facts.chain)
        return [key for group in hanging for key in self._keys_needed(state, group, 0, end)]

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

    def used(self, hit: Hit) -> None:
        """Tells the pool that a request uses the hit's tail, if it has one: no other request that
        uses the chain is bound to."""
        if hit.chain.tail is not None:
            self._pool.touch((), hanging=hit.chain.keys[-1:])

    def _touch(self, state: RequestState, start: int, end: int, reach: int) -> None:
        """Tells the pool which blocks beside the chain this request uses, or would have used had
        they been there. Not while it waits for a promise; the chain is touched first."""
        if state.hanging_touched or not state.touched:
            return
        state.hanging_touched = True
        keys: list[BlockKey] = []
        for group in self._sparse:
            if group != self._facts.chain:
                for boundary in {end, reach} - {start}:
                    keys += self._keys_needed(state, group, start, boundary)
        if keys:
            self._pool.touch((), hanging=keys)
