"""Saving: chooses the blocks that the workers copy to the arena, and commits or abandons them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvrecall.block import NAMESPACE_BYTES, BlockKey
from kvrecall.engines.vllm.compat.config import GroupKind
from kvrecall.engines.vllm.connector.hit import HitFinder
from kvrecall.engines.vllm.connector.metrics import Tally
from kvrecall.engines.vllm.connector.pages import Copy
from kvrecall.engines.vllm.connector.request import RequestState
from kvrecall.engines.vllm.connector.wire import EngineFacts, Store
from kvrecall.pool.base import PoolClient, Verdict

logger = logging.getLogger("vllm.kvrecall")

_MOST_PASSED_OVER = 15  # steps in which a request that was refused room is not saved
Reachable = Callable[[Any, int, int, int], Sequence[bool] | None]
"""``(request, group, start, stop)``: which of these blocks a hit can need; None: all."""

FLUSH_DEADLINE_S = 30.0
"""Longest wait of a reply for its blocks to be durable when ``async_write`` is off."""


@dataclass(slots=True)
class _OpenStore:
    """``preemptions``: of the request when the store was ordered."""

    keys: tuple[BlockKey, ...]
    ranks_left: int
    request: Any
    preemptions: int
    failed: bool = False


Tables = Sequence[Sequence[int] | Mapping[int, int]]
"""By KV group, the device blocks of a request in order, 0 for one that is no longer on the device;
of a recurrent group the blocks that hold a state to be saved in this step, by the tokens up to
it."""


def block_at(table: Sequence[int] | Mapping[int, int], index: int, end: int) -> int:
    """A device block of a table by its index, or that of a state by the ``end`` of its tokens; 0:
    none."""
    if isinstance(table, Mapping):
        return table.get(end, 0)
    return table[index] if index < len(table) else 0


class Saver:
    """Reserves slots for blocks, orders their copies, and commits those that every rank has made.
    ``states``: the requests in the engine, owned by the caller. ``origin``: the origin of a
    request's blocks. ``reachable``: of blocks ``[start, stop)`` of a group of a request, which can
    be needed by a hit; None: all. Only ``flush`` blocks."""

    def __init__(
        self,
        pool: PoolClient,
        facts: EngineFacts,
        states: Mapping[str, RequestState],
        finder: HitFinder,
        reachable: Reachable,
        origin: Callable[[RequestState], bytes],
        tally: Tally,
    ) -> None:
        self._pool = pool
        self._origin = origin
        self._facts = facts
        self._states = states
        self._finder = finder
        self._reachable = reachable
        self._tally = tally
        self._ordered: list[Store] = []
        self._open: dict[int, _OpenStore] = {}
        self._next_store = 0
        self._unflushed: list[Sequence[BlockKey]] = []
        chain = facts.chain
        self._has_chain = facts.groups[chain].kind is GroupKind.FULL
        groups = range(len(facts.groups))
        self._hanging = [i for i in groups if i != chain or not self._has_chain]
        self._sizes = {group.block_size for group in facts.groups}
        self._by_need = [chain, *(i for i in groups if i != chain)]

    def save(
        self,
        state: RequestState,
        tokens: int,
        tables: Callable[[], Tables],
        ended: bool = False,
        tails: Iterable[int] = (),
    ) -> bool:
        """Orders stores for the blocks of the first ``tokens`` tokens that the pool lacks; returns
        whether there were any. ``tables`` is called if it may be so. After a refusal a request
        tries again after 1, 3, 7, then every 15 calls, and once more when it has ``ended``. These
        blocks contain final tokens only: rejected speculation is beyond ``num_tokens``. ``tails``:
        tokens inside a block at which a hit may end: what such a hit needs is saved, too."""
        if state.namespace is None:
            return False
        any_new = False
        if self._has_chain:
            size = self._facts.block_size
            any_new = self._save_chain(state, tokens // size, tables, ended)
            for tail in tails:
                if tail <= tokens and tail not in state.tails and state.saved >= tail // size:
                    any_new |= self._save_tail(state, tail, tables)
            tokens = min(tokens, state.saved * size)  # without its chain a block serves no hit
        for group in self._hanging:
            any_new |= self._save_hanging(state, group, tokens, tables, ended)
        if ended:
            aligned = tokens // self._facts.alignment * self._facts.alignment
            if ending := self._finder.ending(state, aligned):
                self._pool.touch((), ending=ending)
        return any_new

    def due(self, state: RequestState, tokens: int) -> int:
        """Tokens that a request which has ``tokens`` computes before ``save`` has new work; 0 while
        blocks wait for room, whose tries are counted in calls."""
        waits = state.namespace is not None and self._has_chain and not state.closed
        if waits and state.saved < tokens // self._facts.block_size:
            return 0
        return min(size - tokens % size for size in self._sizes)

    def _save_chain(
        self, state: RequestState, upto: int, tables: Callable[[], Tables], ended: bool
    ) -> bool:
        """Blocks of the chain: each needs the one before it."""
        if state.closed or upto <= state.saved:
            return False
        if not ended and state.passes > 0:
            state.passes -= 1
            return False
        keys = state.keys(upto)
        new = keys[state.saved :]
        if not new:
            return False
        ids = tables()[self._facts.chain]
        parent = keys[state.saved - 1] if state.saved else None
        answers = list(zip(new, self._pool.reserve(new, parent, state.tenant), strict=True))
        rows: list[tuple[BlockKey, int, int]] = []
        before = state.saved
        refused = any(reservation.verdict is Verdict.REFUSED for _, reservation in answers)
        state.passes_next = min(2 * state.passes_next + 1, _MOST_PASSED_OVER) if refused else 0
        state.passes = state.passes_next
        for key, reservation in answers:
            if reservation.verdict is Verdict.REFUSED:
                self._tally.counts["blocks_refused"] += 1
                break
            if reservation.verdict is Verdict.RESERVED:
                rows.append((key, block_at(ids, state.saved, 0), reservation.offset))
            state.saved += 1
        size = self._facts.block_size
        self._finder.learn(state, before * size, state.saved * size)
        behind_gap = answers[len(answers) - (len(keys) - state.saved) :]
        self._pool.abandon([key for key, r in behind_gap if r.verdict is Verdict.RESERVED])
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

    def _save_hanging(
        self,
        state: RequestState,
        group: int,
        tokens: int,
        tables: Callable[[], Tables],
        ended: bool,
    ) -> bool:
        """Blocks of a group in which a hit needs only some: of those that became complete, the ones
        that are on the device and that a hit can need; at the end of a request also those that its
        continuation needs, such as a conversation's next turn."""
        facts = self._facts.groups[group]
        done, upto = state.seen.get(group, 0), tokens // facts.block_size
        if upto <= done and not ended:
            return False
        table, size = tables()[group], facts.block_size
        places = [i for i in range(done, upto) if block_at(table, i, (i + 1) * size)]
        state.seen[group] = max(done, upto)
        wanted = self._reachable(state.request, group, done, upto) if places else None
        if wanted is not None:
            places = [i for i in places if wanted[i - done]]
        if ended:
            needed = self._finder.needed(group, tokens)
            last = (i for i in needed if block_at(table, i, (i + 1) * size))
            places = sorted({*places, *last})
        if not places:
            return False
        chain = state.keys(upto, group)
        keys = [chain[i] for i in places if i < len(chain)]
        if group == self._facts.chain:
            parents = [chain[i - 1] if i else None for i in places[: len(keys)]]
        else:
            parents = self._finder.parents(state, group, places[: len(keys)], tokens)
        answers = self._pool.reserve(keys, tenant=state.tenant, parents=parents)
        rows = []
        for place, key, answer in zip(places, keys, answers, strict=False):
            if answer.verdict is Verdict.REFUSED:
                self._tally.counts["blocks_refused"] += 1
                continue
            state.hanging.append(key)
            if facts.kind is GroupKind.STATE:
                state.boundaries.setdefault(group, set()).add((place + 1) * size)
            if answer.verdict is Verdict.RESERVED:
                rows.append((key, block_at(table, place, (place + 1) * size), answer.offset))
        return self._order(state, group, rows)

    def _order(
        self, state: RequestState, group: int, rows: list[tuple[BlockKey, int, int]]
    ) -> bool:
        """Orders the copy of reserved blocks."""
        if not rows:
            return False
        store_id = self._next_store
        self._next_store += 1
        keys = tuple(row[0] for row in rows)
        copy = Copy(tuple(row[1] for row in rows), tuple(row[2] for row in rows), group)
        self._ordered.append(Store(store_id, copy, self._origin(state)))
        request = state.request
        self._open[store_id] = _OpenStore(keys, self._facts.ranks, request, request.num_preemptions)
        state.open_stores.add(store_id)
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
        ordered, self._ordered = self._ordered, []
        return ordered

    def must_drain(self) -> bool:
        """Whether device blocks of open stores may be overwritten in this step: those of requests
        that were preempted since, whatever has become of them. vLLM can preempt all requests at
        once, outside a step, and resume or abort them before the next."""
        if self._facts.copies_in_step or not self._open:
            return False
        if self._facts.frees_while_running:
            return True
        return any(
            store.request.num_preemptions != store.preemptions for store in self._open.values()
        )

    def made(self, ranks: Mapping[int, int], failed: Collection[int]) -> None:
        """By store, how many more ranks have finished it, and which failed: the last rank settles
        it."""
        copied: list[BlockKey] = []
        for store_id, count in ranks.items():
            store = self._open[store_id]
            store.ranks_left -= count
            store.failed |= store_id in failed
            if store.ranks_left > 0:
                continue
            del self._open[store_id]
            state = self._states.get(store.request.request_id)
            if state is not None:
                state.open_stores.discard(store_id)
            if store.failed:
                self._pool.abandon(store.keys)
                self._tally.counts["stores_failed"] += 1
                if state is not None:
                    state.closed = True
            else:
                copied += store.keys
        if copied:
            self._pool.commit(copied)

    def forsake(self, digests: set[bytes]) -> None:
        """Blocks being copied for these namespaces are not committed."""
        for store in self._open.values():
            store.failed |= any(key[:NAMESPACE_BYTES] in digests for key in store.keys)

    def flush_later(self, keys: Sequence[BlockKey]) -> None:
        """The next ``flush`` waits for these blocks."""
        self._unflushed.append(keys)

    def flush(self) -> None:
        """Waits (bounded) until the blocks named to ``flush_later`` are durable. Those that the
        workers still copy are left to the next call."""
        chains, self._unflushed = self._unflushed, []
        copying = {key for store in self._open.values() for key in store.keys} if chains else ()
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
