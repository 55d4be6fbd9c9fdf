"""A hit: the blocks of each KV group that a request needs from the pool to continue at a boundary.

An engine with one group of full attention needs every block of the prefix, so any prefix of a hit
is one. With several groups a hit ends where all of them can serve: full attention needs the whole
prefix, a window the blocks that its last tokens attend to, a recurrent layer the state at that very
boundary. Which blocks those are is vLLM's own rule (``get_num_skipped_tokens`` of each group's
manager), so that a recalled prefix occupies the device blocks that a hit on the device does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kvrecall.block import BlockKey, TierName
from kvrecall.engines.vllm.compat.config import GroupKind
from kvrecall.engines.vllm.compat.scheduler import keep_boundary
from kvrecall.engines.vllm.connector.request import RequestState
from kvrecall.engines.vllm.connector.wire import EngineFacts
from kvrecall.pool.base import PoolClient

FirstNeeded = Callable[[int, int], int]
"""``(group, tokens)``: index of the first block of the group that a prefix of so many tokens needs
on the device."""


@dataclass(frozen=True, slots=True)
class Run:
    """Adjacent blocks of a KV group. ``first``: index of the first one in the request's blocks of
    that group. ``tiers``: where they were found. ``parents``: of each key, if they are not a chain
    behind ``parent``. ``weight``: bytes of a block, as a share of those of a block of the chain in
    all groups."""

    group: int
    first: int
    keys: tuple[BlockKey, ...]
    tiers: tuple[TierName, ...]
    parent: BlockKey | None
    parents: tuple[BlockKey | None, ...] | None = None
    weight: float = 1.0

    def part(self, start: int, stop: int) -> Run:
        """Blocks ``[start, stop)`` of the run."""
        parents = None if self.parents is None else self.parents[start:stop]
        parent = self.keys[start - 1] if start and parents is None else self.parent
        keys, tiers = self.keys[start:stop], self.tiers[start:stop]
        return replace(
            self, first=self.first + start, keys=keys, tiers=tiers, parent=parent, parents=parents
        )

    def acquire(self, pool: PoolClient, deadline_s: float, state: RequestState) -> int:
        """Acquires the blocks; returns the ticket."""
        if self.parents is None:
            return pool.acquire(self.keys, deadline_s, self.parent, state.tenant)
        return pool.acquire(self.keys, deadline_s, tenant=state.tenant, parents=self.parents)


@dataclass(frozen=True, slots=True)
class Hit:
    """A prefix of ``end`` tokens, of which the engine has ``start``. ``runs``: the blocks to load;
    the chain's, if there is one, is the last. ``is_chain``: any leading blocks of the one run are a
    hit, too."""

    start: int
    end: int
    runs: tuple[Run, ...]
    is_chain: bool

    @property
    def chain(self) -> Run:
        return self.runs[-1]


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

    def find(self, state: RequestState, start: int, limit: int) -> tuple[Hit | None, bool]:
        """The longest hit between ``start`` and ``limit`` (tokens); whether a tier beyond this host
        has not answered yet."""
        if self._is_chain:
            return self._find_chain(state, start, limit)
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
        if not is_pending:
            self._touch(state, start, end, reach)
            if end < reach and self._full:
                keep_boundary(state.request, reach)
        if end <= start:
            return None, is_pending
        order = [*self._sparse, *self._full]
        runs = (self._run(state, group, tiers[group], start, end) for group in order)
        return Hit(start, end, tuple(run for run in runs if run.keys), False), is_pending

    def _find_chain(self, state: RequestState, start: int, limit: int) -> tuple[Hit | None, bool]:
        size = self._facts.block_size
        first = start // size
        chain = state.keys(limit // size)
        keys = chain[first:]
        if not keys:
            return None, False
        found = self._pool.find(keys)
        if not found.blocks:
            return None, found.pending
        parent = chain[first - 1] if first else None
        run = Run(0, first, tuple(keys[: found.blocks]), found.tiers, parent)
        return Hit(start, start + found.blocks * size, (run,), True), found.pending

    def _aligned(self, tokens: int) -> int:
        return tokens // self._facts.alignment * self._facts.alignment

    def _needed(self, group: int, start: int, end: int) -> tuple[int, int]:
        """The blocks of a group that must come from the pool for a hit at ``end``: the first, and
        the one behind the last."""
        size = self._facts.groups[group].block_size
        return max(start // size, self._first_needed(group, end)), end // size

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

    def _run(
        self,
        state: RequestState,
        group: int,
        tiers: tuple[TierName | None, ...],
        start: int,
        end: int,
    ) -> Run:
        facts = self._facts.groups[group]
        size = facts.block_size
        first, stop = self._needed(group, start, end)
        keys = tuple(state.keys(stop, group)[first:stop])
        found = tuple(tier for tier in tiers[first - start // size : stop - start // size] if tier)
        weight = facts.block_bytes / self._facts.block_bytes
        before = state.keys(first, group)
        if group == self._facts.chain:
            return Run(group, first, keys, found, before[-1] if before else None, None, weight)
        parents = tuple(self.parents(state, group, range(first, stop)))
        return Run(group, first, keys, found, None, parents, weight)

    def tail(self, group: int, tokens: int) -> range:
        """The blocks of a group that a hit needs which ends at the last boundary within the first
        ``tokens`` tokens."""
        return range(*self._needed(group, 0, self._aligned(tokens)))

    def ending(self, state: RequestState, tokens: int) -> list[BlockKey]:
        """The blocks beside the chain at the end of ``tokens`` tokens, which a request that goes on
        from there will need."""
        return [
            key
            for group in self._sparse
            if group != self._facts.chain
            for places in (self.tail(group, tokens),)
            for key in state.keys(places.stop, group)[places.start :]
        ]

    def parents(
        self, state: RequestState, group: int, places: Sequence[int]
    ) -> list[BlockKey | None]:
        """Parents of blocks of a group beside the chain: the block of the chain that ends with
        each, or the last one that ends before it."""
        size = self._facts.groups[group].block_size
        ends = [(place + 1) * size // self._facts.block_size for place in places]
        chain = state.keys(max(ends, default=0))
        return [chain[end - 1] if end else None for end in ends]

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
                    first, stop = self._needed(group, start, boundary)
                    keys += state.keys(stop, group)[first:stop]
        if keys:
            self._pool.touch((), hanging=keys)
