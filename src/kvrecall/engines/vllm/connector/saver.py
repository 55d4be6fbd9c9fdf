"""Saving: chooses the blocks that the workers copy to the arena, and commits or abandons them."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvrecall.block import NAMESPACE_BYTES, BlockKey, Tenant
from kvrecall.engines.vllm.compat.config import GroupKind
from kvrecall.engines.vllm.connector.hit import HitFinder
from kvrecall.engines.vllm.connector.metrics import SchedulerEvents
from kvrecall.engines.vllm.connector.request import RequestState
from kvrecall.engines.vllm.device.base import Copy
from kvrecall.engines.vllm.wire import EngineFacts, StoreOrder
from kvrecall.pool.base import PoolClient, Reservation, Verdict

logger = logging.getLogger("vllm.kvrecall")

_MOST_PASSED_OVER = 15  # steps in which a request that was refused room is not saved
_REFUSED, _RESERVED = Verdict.REFUSED, Verdict.RESERVED  # read once for each block of a step
Reachable = Callable[[Any, int, int, int], Sequence[bool] | None]
"""``(request, group, start, stop)``: which of these blocks a hit can need; None: all."""

FLUSH_DEADLINE_S = 30.0
"""Longest wait of a reply for its blocks to be durable when ``async_write`` is off."""


_Row = tuple[BlockKey, int, int]


@dataclass(slots=True)
class _OpenStore:
    """``rows``: keys, device blocks, offsets. ``states``: of the requests it saves blocks of, each
    with the number of the request's preemptions when they were ordered."""

    ranks_left: int
    rows: list[_Row] = field(default_factory=list)
    states: list[tuple[RequestState, int]] = field(default_factory=list)
    failed: bool = False


Tables = Sequence[Sequence[int] | dict[int, int]]
"""By KV group, the device blocks of a request in order, 0 for one that is no longer on the device;
of a recurrent group the blocks that hold a state to be saved in this step, by its tokens."""


BoundaryState = tuple[int, int, int]
"""Of recurrent layers, at a boundary: KV group, device block, tokens up to it."""


class Computed(msgspec.Struct, frozen=True, eq=False):
    """The first ``tokens`` tokens of a request, whose KV the device has after the step. ``tables``:
    its device blocks by KV group, asked for if some may have to be saved. ``states``: those that
    the step completes, or that are still there. ``ended``: it computes no more."""

    state: RequestState
    tokens: int
    tables: Callable[[], Sequence[Sequence[int]]]
    states: Sequence[BoundaryState] = ()
    ended: bool = False


class _Wanted(msgspec.Struct, frozen=True, eq=False):
    """Blocks of a request that the pool may lack, with their parents; ``places``: their indexes."""

    of: Computed
    keys: list[BlockKey]
    parents: list[BlockKey | None]
    places: Sequence[int]


def block_at(table: Sequence[int] | dict[int, int], index: int, end: int) -> int:
    """A device block of a table by its index, or that of a state by its ``end``; 0: none."""
    if isinstance(table, dict):
        return table.get(end, 0)
    return table[index] if index < len(table) else 0


class Saver:
    """Reserves slots for blocks, orders their copies, and commits those that every rank has made.
    ``origin``: that of blocks written now. ``reachable``: of blocks ``[start, stop)`` of a
    group of a request, which can be needed by a hit; None: all. Only ``flush`` blocks."""

    def __init__(
        self,
        pool: PoolClient,
        facts: EngineFacts,
        finder: HitFinder,
        reachable: Reachable,
        origin: Callable[[], bytes],
        events: SchedulerEvents,
    ) -> None:
        self._pool = pool
        self.writes = True  # False: it saves nothing
        self._origin = origin
        self._written = b""  # origin of what the present ``save`` orders
        self._facts = facts
        self._finder = finder
        self._reachable = reachable
        self._events = events
        self._ordered: dict[tuple[bytes, int, bytes], int] = {}  # by namespace, group and origin
        self._open: dict[int, _OpenStore] = {}
        self._numbers = itertools.count()
        self._unflushed: list[Sequence[BlockKey]] = []
        chain = facts.chain
        self._has_chain = facts.groups[chain].kind is GroupKind.FULL
        self._sizes = {group.block_size for group in facts.groups}
        self._by_need = [chain, *(i for i in range(len(facts.groups)) if i != chain)]
        self._dependents = sorted(self._by_need[self._has_chain :])

    def save(self, computed: Sequence[Computed]) -> None:
        """Orders stores for the blocks of these requests that the pool lacks. After a refusal a
        request tries again after 1, 3, 7, then every 15 calls, and once more when it has ended.
        These blocks contain final tokens only: rejected speculation is beyond ``num_tokens``."""
        computed = [one for one in computed if self.writes and one.state.namespace is not None]
        self._written = self._origin()  # of one generation, or the audit doubts a part of a step
        if self._has_chain:
            self._save_chains(computed)
        if self._has_chain and self._facts.match_unit is not None:
            for one in computed:
                for end in self._tails(one):
                    self._save_tail(one, end)
        for group in self._dependents:
            self._save_dependents(computed, group)
        for one in [one for one in computed if one.ended]:
            aligned = self._reach(one) // self._facts.alignment * self._facts.alignment
            if ending := self._finder.ending(one.state, aligned):
                self._pool.touch((), ending=ending)

    def blocks(self, one: Computed) -> Tables:
        """The device blocks of a request, of recurrent groups those of its ``states``."""
        tables = one.tables()
        if not self._facts.has_states:
            return tables
        states: dict[int, dict[int, int]] = {}
        for group, block, tokens in one.states:
            states.setdefault(group, {})[tokens] = block
        return [
            states.get(i, {}) if facts.kind is GroupKind.STATE else table
            for i, (facts, table) in enumerate(zip(self._facts.groups, tables, strict=True))
        ]

    def _tails(self, one: Computed) -> list[int]:
        """Tokens inside a block up to which a request is saved, because a hit may end there. With
        recurrent layers where vLLM offers their states, else at its ends."""
        size, unit = self._facts.block_size, self._facts.unit
        ends = {tokens for _, _, tokens in one.states}
        if not self._facts.has_states:
            prompt = int(one.state.request.num_prompt_tokens)
            tail = (prompt - 1) // unit * unit
            is_open = tail // size == prompt // size  # else the prompt's last block is saved whole
            ends = {tail} if is_open else set()
            if one.ended:
                ends.add(one.tokens // unit * unit)
        return sorted(end for end in ends if end % size)

    def _reach(self, one: Computed) -> int:
        """Tokens of a request that can serve hits: without its chain a block serves none."""
        if not self._has_chain:
            return one.tokens
        return min(one.tokens, one.state.saving.blocks * self._facts.block_size)

    def tokens_until_due(self, state: RequestState, tokens: int) -> int:
        """Tokens that a request which has ``tokens`` computes before ``save`` has new work; 0 while
        blocks wait for room, whose tries are counted in calls."""
        saving = state.saving
        waits = saving.blocks < tokens // self._facts.block_size and not saving.closed
        if waits and self.writes and self._has_chain and state.namespace is not None:
            return 0
        return min([size - tokens % size for size in self._sizes])

    def _reserve(
        self, wanted: Iterable[_Wanted]
    ) -> Iterator[tuple[_Wanted, Sequence[Reservation]]]:
        """The pool's answers, asked for in one call for each tenant."""
        of_tenants: dict[Tenant, list[_Wanted]] = {}
        for each in wanted:
            of_tenants.setdefault(each.of.state.tenant, []).append(each)
        for tenant, of_tenant in of_tenants.items():
            keys = [key for each in of_tenant for key in each.keys]
            parents = [parent for each in of_tenant for parent in each.parents]
            answers = self._pool.reserve(keys, None, tenant, parents)
            left = iter(answers)
            for each in of_tenant:
                yield each, [*itertools.islice(left, len(each.keys))]

    def _save_chains(self, computed: Iterable[Computed]) -> None:
        """Blocks of the chain: each needs the one before it."""
        size, wanted = self._facts.block_size, list[_Wanted]()
        for one in computed:
            saving = one.state.saving
            upto, saved = one.tokens // size, saving.blocks
            if saving.closed or upto <= saved:
                continue
            if saving.passes and not one.ended:
                saving.passes -= 1
                continue
            keys = one.state.keys(upto, first=max(0, saved - 1))
            new = keys[1:] if saved else keys
            parents: list[BlockKey | None] = [*keys] if saved else [None, *keys]
            parents.pop()
            if new:
                wanted.append(_Wanted(one, new, parents, range(saved, saved + len(new))))
        for each, answers in self._reserve(wanted):
            self._save_chain(each, answers)

    def _save_chain(self, wanted: _Wanted, answers: Sequence[Reservation]) -> None:
        state, saving, chain = wanted.of.state, wanted.of.state.saving, self._facts.chain
        before, new = saving.blocks, wanted.keys
        table = self.blocks(wanted.of)[chain]
        assert not isinstance(table, dict), "only states are kept by their tokens"
        ids = table[before : before + len(new)]
        # What is behind a refused block, or behind one that is no longer on the device, serves no
        # hit; the latter ends the chain.
        rows: list[_Row] = []
        useless: list[BlockKey] = []
        done = 0
        for index, (key, answer) in enumerate(zip(new, answers, strict=True)):
            verdict = answer.verdict
            is_behind = index > done or verdict is _REFUSED
            done += not is_behind
            if verdict is not _RESERVED:
                continue
            block = ids[index] if index < len(ids) else 0
            saving.closed |= not block and not is_behind
            if is_behind or saving.closed:
                useless.append(key)
            else:
                rows.append((key, block, answer.offset))
        if useless:
            self._pool.abandon(useless)
        saving.blocks = before + done
        if done == len(new):
            saving.passes = saving.passes_next = 0
        else:
            saving.passes = saving.passes_next = min(2 * saving.passes_next + 1, _MOST_PASSED_OVER)
            self._events.counted("blocks_refused")
        if self._facts.match_unit is not None:
            size = self._facts.block_size
            self._finder.learn(state, before * size, saving.blocks * size)
        self._order(state, chain, rows)

    def _save_tail(self, one: Computed, end: int) -> None:
        """What a hit needs that ends at ``end``, inside a block of the chain: the chain's block
        first, as the others are worth nothing without it."""
        state, saving, size = one.state, one.state.saving, self._facts.block_size
        if end > one.tokens or end in saving.tails or saving.blocks < end // size:
            return
        saving.tails[end] = False
        found = self.blocks(one)
        for group in self._by_need:
            facts, is_chain = self._facts.groups[group], group == self._facts.chain
            place = (end - 1) // facts.block_size
            block = block_at(found[group], place, end)
            key = state.key_at(end, group)
            if not block or key is None or (is_chain and saving.closed):
                return
            (parent,) = self._finder.parents(state, group, [place], end)
            (answer,) = self._pool.reserve([key], None, state.tenant, [parent])
            if not self._is_kept(state, group, key, answer, end):
                return
            if answer.verdict is _RESERVED:
                self._order(state, group, [(key, block, answer.offset)])
        saving.tails[end] = True
        self._finder.learn(state, end // size * size, end)

    def _save_dependents(self, computed: Iterable[Computed], group: int) -> None:
        """Blocks of a group in which a hit needs only some: of those that became complete, the ones
        that are on the device and that a hit can need; at the end of a request also those that its
        continuation needs, such as a conversation's next turn."""
        size = self._facts.groups[group].block_size
        wanted: list[_Wanted] = []
        for one in computed:
            state, tokens = one.state, self._reach(one)
            places = self._places(one, group, tokens)
            if not places:
                continue
            keys = state.keys(tokens // size, group)
            places = [place for place in places if place < len(keys)]
            if group == self._facts.chain:
                parents = [keys[i - 1] if i else None for i in places]
            else:
                parents = self._finder.parents(state, group, places, tokens)
            wanted.append(_Wanted(one, [keys[i] for i in places], parents, places))
        for each, answers in self._reserve(wanted):
            state, table = each.of.state, self.blocks(each.of)[group]
            rows = []
            for place, key, answer in zip(each.places, each.keys, answers, strict=True):
                end = (place + 1) * size
                if self._is_kept(state, group, key, answer, end) and answer.verdict is _RESERVED:
                    rows.append((key, block_at(table, place, end), answer.offset))
            self._order(state, group, rows)

    def _is_kept(
        self, state: RequestState, group: int, key: BlockKey, answer: Reservation, end: int
    ) -> bool:
        """Records a block that is not of a whole chain, and ends at ``end``; False: no room."""
        if answer.verdict is _REFUSED:
            self._events.counted("blocks_refused")
            return False
        state.saving.dependents.append(key)
        if self._facts.groups[group].kind is GroupKind.STATE:
            state.saving.boundaries.setdefault(group, set()).add(end)
        return True

    def _places(self, one: Computed, group: int, tokens: int) -> list[int]:
        """Indexes of the blocks of a group beside the chain that are to be saved."""
        state, size = one.state, self._facts.groups[group].block_size
        seen = state.saving.seen
        done, upto = seen.get(group, 0), tokens // size
        if upto <= done and not one.ended:
            return []
        table = self.blocks(one)[group]
        places = [i for i in range(done, upto) if block_at(table, i, (i + 1) * size)]
        seen[group] = max(done, upto)
        wanted = self._reachable(state.request, group, done, upto) if places else None
        if wanted is not None:
            places = [i for i in places if wanted[i - done]]
        if one.ended:
            needed = self._finder.needed(group, tokens)
            places += (i for i in needed if block_at(table, i, (i + 1) * size))
        return sorted(set(places))

    def _order(self, state: RequestState, group: int, rows: Sequence[_Row]) -> None:
        """Orders the copy of reserved blocks, with others of its kind in the same step."""
        if not rows:
            return
        assert state.namespace is not None
        kind = state.namespace.digest, group, self._written
        number = self._ordered.get(kind)
        if number is None:
            number = self._ordered[kind] = next(self._numbers)
            self._open[number] = _OpenStore(self._facts.ranks)
        store = self._open[number]
        store.rows += rows
        store.states.append((state, state.request.num_preemptions))
        state.saving.open.add(number)
        self._events.store_ordered(state, group, len(rows))

    def is_reading(self, state: RequestState) -> bool:
        """Whether open stores, or those of the next step, read a request's device blocks."""
        ordered = state.saving.open.intersection(self._ordered.values())
        return bool(ordered) or (bool(state.saving.open) and not self._facts.copies_in_step)

    def promised(self, state: RequestState) -> int:
        """Leading tokens of a request that a hit can have once all its stores are made."""
        saving, groups = state.saving, self._facts.groups
        if self._has_chain:
            tokens = saving.blocks * self._facts.block_size
        else:
            tokens = min(done * groups[i].block_size for i, done in saving.seen.items())
        tokens -= tokens % self._facts.alignment
        tails = {end for end, is_saved in saving.tails.items() if is_saved}
        states = [
            saving.boundaries.get(i, set())
            for i, group in enumerate(groups)
            if group.kind is GroupKind.STATE
        ]
        if not states:
            return max(tokens, *tails) if tails else tokens
        common = set.intersection(*states)
        whole = (one for one in common if one <= tokens and one % self._facts.alignment == 0)
        return max((*whole, *(tails & common)), default=0)

    def take(self) -> list[StoreOrder]:
        """The stores ordered since the last call."""
        ordered, self._ordered = self._ordered, {}
        stores = []
        for (_, group, origin), number in ordered.items():
            _, blocks, offsets = zip(*self._open[number].rows, strict=True)
            stores.append(StoreOrder(number, Copy(blocks, offsets, group), origin))
        return stores

    def must_precede(self) -> bool:
        """Whether device blocks of open stores may be overwritten in this step: those of requests
        that were preempted since, whatever has become of them. vLLM can preempt all requests at
        once, outside a step, and resume or abort them before the next."""
        if self._facts.copies_in_step or not self._open:
            return False
        if self._facts.frees_while_running:
            return True
        return any(
            state.request.num_preemptions != preemptions
            for store in self._open.values()
            for state, preemptions in store.states
        )

    def made(self, ranks: Mapping[int, int], failed: Collection[int]) -> None:
        """By store, how many more ranks have finished it, and which failed: the last settles it."""
        copied: list[BlockKey] = []
        for store_id, count in ranks.items():
            store = self._open.get(store_id)
            if store is None:  # settled, or never ordered
                continue
            store.ranks_left -= count
            store.failed |= store_id in failed
            if store.ranks_left > 0:
                continue
            del self._open[store_id]
            for state, _ in store.states:
                state.saving.open.discard(store_id)
                state.saving.closed |= store.failed
                self._events.store_done(state, store.failed)
            keys = [key for key, _, _ in store.rows]
            if store.failed:
                self._pool.abandon(keys)
                self._events.counted("stores_failed")
            else:
                copied += keys
        if copied:
            self._pool.commit(copied)

    def invalidate(self, state: RequestState) -> None:
        """Blocks of a request that are being copied are not committed."""
        for store_id in state.saving.open:
            self._open[store_id].failed = True

    def discard(self, digests: set[bytes] | None) -> None:
        """Blocks being copied for these namespaces (all) are not committed."""
        for store in self._open.values():
            store.failed |= digests is None or any(
                key[:NAMESPACE_BYTES] in digests for key, _, _ in store.rows
            )

    def flush_later(self, state: RequestState) -> None:
        """The next ``flush`` waits for the blocks of a request."""
        if saved := self.saved(state):
            self._unflushed.append(saved)

    def saved(self, state: RequestState) -> tuple[BlockKey, ...]:
        """Blocks of a request in the pool or on their way: leading ones, and those beside."""
        return (*state.keys(state.saving.blocks), *state.saving.dependents)

    def flush(self) -> None:
        """Waits (bounded) until blocks of ``flush_later`` are durable, not those still copied."""
        if not self._unflushed:
            return
        chains, self._unflushed = self._unflushed, []
        copying = {key for store in self._open.values() for key, _, _ in store.rows}
        for chain in chains:
            keys = [key for key in chain if key not in copying]
            if len(keys) < len(chain):
                self._unflushed.append([key for key in chain if key in copying])
            if not self._pool.flush(keys, FLUSH_DEADLINE_S):
                self._events.counted("flushes_missed")
                logger.warning(
                    "kvrecall: a reply was sent before its blocks were durable (disk too slow, "
                    "full, or a store was shed)"
                )
