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
from kvrecall.engines.vllm.connector.metrics import Tally
from kvrecall.engines.vllm.connector.pages import Copy
from kvrecall.engines.vllm.connector.request import RequestState
from kvrecall.engines.vllm.connector.wire import EngineFacts, Store
from kvrecall.pool.base import PoolClient, Reservation, Verdict

logger = logging.getLogger("vllm.kvrecall")

_MOST_PASSED_OVER = 15  # steps in which a request that was refused room is not saved
_REFUSED, _RESERVED = Verdict.REFUSED, Verdict.RESERVED  # read once for each block of a step
Reachable = Callable[[Any, int, int, int], Sequence[bool] | None]
"""``(request, group, start, stop)``: which of these blocks a hit can need; None: all."""

FLUSH_DEADLINE_S = 30.0
"""Longest wait of a reply for its blocks to be durable when ``async_write`` is off."""


@dataclass(slots=True)
class _OpenStore:
    """``states``: of the requests it saves blocks of, each with the number of the request's
    preemptions when they were ordered."""

    ranks_left: int
    keys: list[BlockKey] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    states: list[tuple[RequestState, int]] = field(default_factory=list)
    failed: bool = False


Tables = Sequence[Sequence[int] | dict[int, int]]
"""By KV group, the device blocks of a request in order, 0 for one that is no longer on the device;
of a recurrent group the blocks that hold a state to be saved in this step, by the tokens up to
it."""


class Computed(msgspec.Struct, frozen=True, eq=False):
    """The first ``tokens`` tokens of a request, whose KV the device has after the step. ``tables``
    is called if blocks may have to be saved. ``ended``: it computes no more. ``tails``: tokens
    inside a block at which a hit may end: what such a hit needs is saved, too."""

    state: RequestState
    tokens: int
    tables: Callable[[], Tables]
    ended: bool = False
    tails: Sequence[int] = ()


class _Wanted(msgspec.Struct, frozen=True, eq=False):
    """Blocks of a request that the pool may lack, with their parents; ``places``: their indexes."""

    of: Computed
    keys: list[BlockKey]
    parents: list[BlockKey | None]
    places: Sequence[int]


def block_at(table: Sequence[int] | dict[int, int], index: int, end: int) -> int:
    """A device block of a table by its index, or that of a state by the ``end`` of its tokens; 0:
    none."""
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
        tally: Tally,
    ) -> None:
        self._pool = pool
        self._origin = origin
        self._facts = facts
        self._finder = finder
        self._reachable = reachable
        self._tally = tally
        self._ordered: dict[tuple[bytes, int, bytes], int] = {}  # by namespace, group and origin
        self._open: dict[int, _OpenStore] = {}
        self._numbers = itertools.count()
        self._unflushed: list[Sequence[BlockKey]] = []
        chain = facts.chain
        self._has_chain = facts.groups[chain].kind is GroupKind.FULL
        groups = range(len(facts.groups))
        self._hanging = [i for i in groups if i != chain or not self._has_chain]
        self._sizes = {group.block_size for group in facts.groups}
        self._by_need = [chain, *(i for i in groups if i != chain)]

    def save(self, computed: Sequence[Computed]) -> bool:
        """Orders stores for the blocks of these requests that the pool lacks; returns whether there
        were any. After a refusal a request tries again after 1, 3, 7, then every 15 calls, and once
        more when it has ended. These blocks contain final tokens only: rejected speculation is
        beyond ``num_tokens``."""
        computed = [one for one in computed if one.state.namespace is not None]
        any_new = False
        if self._has_chain:
            any_new = self._save_chains(computed)
            size = self._facts.block_size
            for one in computed if self._facts.match_unit is not None else ():
                state = one.state
                for tail in one.tails:
                    if (
                        tail <= one.tokens
                        and tail not in state.tails
                        and state.saved >= tail // size
                    ):
                        any_new |= self._save_tail(state, tail, one.tables)
        for group in self._hanging:
            any_new |= self._save_hanging(computed, group)
        for one in computed:
            if one.ended:
                tokens = self._reach(one)
                aligned = tokens - tokens % self._facts.alignment
                if ending := self._finder.ending(one.state, aligned):
                    self._pool.touch((), ending=ending)
        return any_new

    def _reach(self, one: Computed) -> int:
        """Tokens of a request that can serve hits: without its chain a block serves none."""
        if not self._has_chain:
            return one.tokens
        return min(one.tokens, one.state.saved * self._facts.block_size)

    def due(self, state: RequestState, tokens: int) -> int:
        """Tokens that a request which has ``tokens`` computes before ``save`` has new work; 0 while
        blocks wait for room, whose tries are counted in calls."""
        if (
            state.saved < tokens // self._facts.block_size
            and self._has_chain
            and not state.closed
            and state.namespace is not None
        ):
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
            first = 0
            for each in of_tenant:
                stop = first + len(each.keys)
                yield each, answers[first:stop]
                first = stop

    def _save_chains(self, computed: Iterable[Computed]) -> bool:
        """Blocks of the chain: each needs the one before it."""
        size, wanted = self._facts.block_size, list[_Wanted]()
        for one in computed:
            state = one.state
            upto, saved = one.tokens // size, state.saved
            if state.closed or upto <= saved:
                continue
            if state.passes and not one.ended:
                state.passes -= 1
                continue
            keys = state.keys(upto, first=max(0, saved - 1))
            new = keys[1:] if saved else keys
            parents: list[BlockKey | None] = [*keys] if saved else [None, *keys]
            parents.pop()
            if new:
                wanted.append(_Wanted(one, new, parents, range(saved, saved + len(new))))
        any_new = False
        for each, answers in self._reserve(wanted):
            any_new |= self._save_chain(each, answers)
        return any_new

    def _save_chain(self, wanted: _Wanted, answers: Sequence[Reservation]) -> bool:
        state, new = wanted.of.state, wanted.keys
        before = state.saved
        table = wanted.of.tables()[self._facts.chain]
        assert not isinstance(table, dict), "only states are kept by their tokens"
        ids = table[before : before + len(new)]
        rows: list[tuple[BlockKey, int, int]] = []
        done = 0
        for key, answer in zip(new, answers, strict=True):
            verdict = answer.verdict
            if verdict is _REFUSED:
                break
            if verdict is _RESERVED:
                rows.append((key, ids[done] if done < len(ids) else 0, answer.offset))
            done += 1
        state.saved = saved = before + done
        if done == len(new):
            state.passes = state.passes_next = 0
        else:
            state.passes = state.passes_next = min(2 * state.passes_next + 1, _MOST_PASSED_OVER)
            self._tally.counts["blocks_refused"] += 1
            behind_gap = zip(new[done:], answers[done:], strict=True)
            self._pool.abandon([key for key, r in behind_gap if r.verdict is Verdict.RESERVED])
        if self._facts.match_unit is not None:
            size = self._facts.block_size
            self._finder.learn(state, before * size, saved * size)
        gone = next((i for i, row in enumerate(rows) if row[1] == 0), None)
        if gone is not None:  # no longer on the device: that ends the chain
            self._pool.abandon([row[0] for row in rows[gone:]])
            rows = rows[:gone]
            state.closed = True
        return self._order(state, self._facts.chain, rows)

    def _save_tail(self, state: RequestState, end: int, tables: Callable[[], Tables]) -> bool:
        """What a hit needs that ends at ``end``, inside a block of the chain: the chain's block
        first, as the others are worth nothing without it."""
        state.tails[end] = False
        found = tables()
        any_new = False
        for group in self._by_need:
            facts = self._facts.groups[group]
            place = (end - 1) // facts.block_size
            block = block_at(found[group], place, end)
            key = state.key_at(end, group)
            if not block or key is None or (group == self._facts.chain and state.closed):
                return any_new
            (parent,) = self._finder.parents(state, group, [place], end)
            linked = group == self._facts.chain
            (answer,) = (
                self._pool.reserve([key], parent, state.tenant)
                if linked
                else self._pool.reserve([key], tenant=state.tenant, parents=[parent])
            )
            if answer.verdict is Verdict.REFUSED:
                self._tally.counts["blocks_refused"] += 1
                return any_new
            state.hanging.append(key)
            if facts.kind is GroupKind.STATE:
                state.boundaries.setdefault(group, set()).add(end)
            if answer.verdict is Verdict.RESERVED:
                any_new |= self._order(state, group, [(key, block, answer.offset)])
        state.tails[end] = True
        self._finder.learn(state, end // self._facts.block_size * self._facts.block_size, end)
        return any_new

    def _save_hanging(self, computed: Iterable[Computed], group: int) -> bool:
        """Blocks of a group in which a hit needs only some: of those that became complete, the ones
        that are on the device and that a hit can need; at the end of a request also those that its
        continuation needs, such as a conversation's next turn."""
        size = self._facts.groups[group].block_size
        is_state = self._facts.groups[group].kind is GroupKind.STATE
        wanted: list[_Wanted] = []
        for one in computed:
            state, tokens = one.state, self._reach(one)
            places = self._places(one, group, tokens)
            if not places:
                continue
            chain = state.keys(tokens // size, group)
            places = [place for place in places if place < len(chain)]
            if group == self._facts.chain:
                parents = [chain[i - 1] if i else None for i in places]
            else:
                parents = self._finder.parents(state, group, places, tokens)
            wanted.append(_Wanted(one, [chain[i] for i in places], parents, places))
        any_new = False
        for each, answers in self._reserve(wanted):
            one = each.of
            table, rows = one.tables()[group], []
            for place, key, answer in zip(each.places, each.keys, answers, strict=True):
                if answer.verdict is Verdict.REFUSED:
                    self._tally.counts["blocks_refused"] += 1
                    continue
                one.state.hanging.append(key)
                if is_state:
                    one.state.boundaries.setdefault(group, set()).add((place + 1) * size)
                if answer.verdict is Verdict.RESERVED:
                    rows.append((key, block_at(table, place, (place + 1) * size), answer.offset))
            any_new |= self._order(one.state, group, rows)
        return any_new

    def _places(self, one: Computed, group: int, tokens: int) -> list[int]:
        """Indexes of the blocks of a group beside the chain that are to be saved."""
        state, size = one.state, self._facts.groups[group].block_size
        done, upto = state.seen.get(group, 0), tokens // size
        if upto <= done and not one.ended:
            return []
        table = one.tables()[group]
        places = [i for i in range(done, upto) if block_at(table, i, (i + 1) * size)]
        state.seen[group] = max(done, upto)
        wanted = self._reachable(state.request, group, done, upto) if places else None
        if wanted is not None:
            places = [i for i in places if wanted[i - done]]
        if one.ended:
            needed = self._finder.needed(group, tokens)
            places += (i for i in needed if block_at(table, i, (i + 1) * size))
        return sorted(set(places))

    def _order(
        self, state: RequestState, group: int, rows: Sequence[tuple[BlockKey, int, int]]
    ) -> bool:
        """Orders the copy of reserved blocks, with others of its kind in the same step."""
        if not rows:
            return False
        assert state.namespace is not None
        kind = state.namespace.digest, group, self._origin()
        number = self._ordered.get(kind)
        if number is None:
            number = self._ordered[kind] = next(self._numbers)
            self._open[number] = _OpenStore(self._facts.ranks)
        store = self._open[number]
        for key, block, offset in rows:
            store.keys.append(key)
            store.block_ids.append(block)
            store.offsets.append(offset)
        store.states.append((state, state.request.num_preemptions))
        state.open_stores.add(number)
        if state.trace is not None:
            state.trace.saves(group, len(rows))
        return True

    def promised(self, state: RequestState) -> int:
        """Leading tokens of a request that a hit can have once all its stores are made."""
        if self._has_chain:
            tokens = state.saved * self._facts.block_size
        else:
            tokens = min(done * self._facts.groups[i].block_size for i, done in state.seen.items())
        tokens -= tokens % self._facts.alignment
        tails = {end for end, is_saved in state.tails.items() if is_saved}
        states = [
            state.boundaries.get(i, set())
            for i, group in enumerate(self._facts.groups)
            if group.kind is GroupKind.STATE
        ]
        if not states:
            return max(tokens, *tails) if tails else tokens
        common = set.intersection(*states)
        whole = (one for one in common if one <= tokens and one % self._facts.alignment == 0)
        return max((*whole, *(tails & common)), default=0)

    def take(self) -> list[Store]:
        """The stores ordered since the last call."""
        ordered, self._ordered = self._ordered, {}
        stores = []
        for (_, group, origin), number in ordered.items():
            store = self._open[number]
            copy = Copy(tuple(store.block_ids), tuple(store.offsets), group)
            stores.append(Store(number, copy, origin))
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
        """By store, how many more ranks have finished it, and which failed: the last rank settles
        it."""
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
                state.open_stores.discard(store_id)
                state.closed |= store.failed
                if state.trace is not None:
                    state.trace.saved(store.failed, len(state.open_stores))
            if store.failed:
                self._pool.abandon(store.keys)
                self._tally.counts["stores_failed"] += 1
            else:
                copied += store.keys
        if copied:
            self._pool.commit(copied)

    def doubt(self, state: RequestState) -> None:
        """Blocks of a request that are being copied are not committed."""
        for store_id in state.open_stores:
            self._open[store_id].failed = True

    def forsake(self, digests: set[bytes] | None) -> None:
        """Blocks being copied for these namespaces (all) are not committed."""
        for store in self._open.values():
            store.failed |= digests is None or any(
                key[:NAMESPACE_BYTES] in digests for key in store.keys
            )

    def flush_later(self, keys: Sequence[BlockKey]) -> None:
        """The next ``flush`` waits for these blocks."""
        self._unflushed.append(keys)

    def flush(self) -> None:
        """Waits (bounded) until the blocks named to ``flush_later`` are durable. Those that the
        workers still copy are left to the next call."""
        if not self._unflushed:
            return
        chains, self._unflushed = self._unflushed, []
        copying = {key for store in self._open.values() for key in store.keys}
        for chain in chains:
            keys = [key for key in chain if key not in copying]
            if len(keys) < len(chain):
                self._unflushed.append([key for key in chain if key in copying])
            if not self._pool.flush(keys, FLUSH_DEADLINE_S):
                self._tally.counts["flushes_missed"] += 1
                logger.warning(
                    "kvrecall: a reply was sent before its blocks were durable (disk too slow, "
                    "full, or a store was shed)"
                )
