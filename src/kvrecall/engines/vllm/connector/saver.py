"""Saving: chooses the blocks that the workers copy to the arena, and commits or abandons them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvrecall.block import NAMESPACE_BYTES, BlockKey
from kvrecall.engines.vllm.connector.metrics import Tally
from kvrecall.engines.vllm.connector.request import RequestState
from kvrecall.engines.vllm.connector.wire import Copy, EngineFacts, Store
from kvrecall.pool.base import PoolClient, Verdict

logger = logging.getLogger("vllm.kvrecall")

_MOST_PASSED_OVER = 15  # steps in which a request that was refused room is not saved
FLUSH_DEADLINE_S = 30.0
"""Longest wait of a reply for its blocks to be durable when ``async_write`` is off."""


@dataclass(slots=True)
class _OpenStore:
    keys: tuple[BlockKey, ...]
    ranks_left: int
    request_id: str
    failed: bool = False


class Saver:
    """Reserves slots for blocks, orders their copies, and commits those that every rank has made.
    ``states``: the requests in the engine, owned by the caller. ``block_ids``: the device blocks of
    a request, in chain order; 0 for one that is no longer on the device. ``origin``: the origin of
    a request's blocks. Only ``flush`` blocks."""

    def __init__(
        self,
        pool: PoolClient,
        facts: EngineFacts,
        states: Mapping[str, RequestState],
        block_ids: Callable[[str], Sequence[int]],
        origin: Callable[[RequestState], bytes],
        tally: Tally,
    ) -> None:
        self._pool = pool
        self._origin = origin
        self._facts = facts
        self._states = states
        self._block_ids = block_ids
        self._tally = tally
        self._ordered: list[Store] = []
        self._open: dict[int, _OpenStore] = {}
        self._next_store = 0
        self._unflushed: list[Sequence[BlockKey]] = []

    def save(self, state: RequestState, upto: int, ids: Sequence[int] | None = None) -> bool:
        """Orders stores for the blocks of the chain up to ``upto`` that the pool lacks; returns
        whether there were any. ``ids`` replaces ``block_ids`` at the end of a request. After a
        refusal a request tries again after 1, 3, 7, then every 15 calls. These blocks contain final
        tokens only: rejected speculation is beyond ``num_tokens``."""
        if state.closed or state.namespace is None or upto <= state.saved:
            return False
        if ids is None and state.passes > 0:
            state.passes -= 1
            return False
        keys = state.keys(upto)
        new = keys[state.saved :]
        if not new:
            return False
        if ids is None:
            ids = self._block_ids(state.request.request_id)
        parent = keys[state.saved - 1] if state.saved else None
        answers = list(zip(new, self._pool.reserve(new, parent, state.tenant), strict=True))
        rows: list[tuple[BlockKey, int, int]] = []
        refused = any(reservation.verdict is Verdict.REFUSED for _, reservation in answers)
        state.passes_next = min(2 * state.passes_next + 1, _MOST_PASSED_OVER) if refused else 0
        state.passes = state.passes_next
        for key, reservation in answers:
            if reservation.verdict is Verdict.REFUSED:
                self._tally.counts["blocks_refused"] += 1
                break
            if reservation.verdict is Verdict.RESERVED:
                block = ids[state.saved] if state.saved < len(ids) else 0
                rows.append((key, block, reservation.offset))
            state.saved += 1
        behind_gap = answers[len(answers) - (len(keys) - state.saved) :]
        self._pool.abandon([key for key, r in behind_gap if r.verdict is Verdict.RESERVED])
        return self._order(state, rows)

    def _order(self, state: RequestState, rows: list[tuple[BlockKey, int, int]]) -> bool:
        """Orders the copy of reserved blocks; those no longer on the device end the chain."""
        gone = next((i for i, row in enumerate(rows) if row[1] == 0), None)
        if gone is not None:
            self._pool.abandon([row[0] for row in rows[gone:]])
            rows = rows[:gone]
            state.closed = True
        if not rows:
            return False
        store_id = self._next_store
        self._next_store += 1
        keys = tuple(row[0] for row in rows)
        copy = Copy(tuple(row[1] for row in rows), tuple(row[2] for row in rows))
        self._ordered.append(Store(store_id, copy, self._origin(state)))
        self._open[store_id] = _OpenStore(keys, self._facts.ranks, state.request.request_id)
        state.open_stores.add(store_id)
        return True

    def take(self) -> list[Store]:
        """The stores ordered since the last call."""
        ordered, self._ordered = self._ordered, []
        return ordered

    def must_drain(self) -> bool:
        """Whether device blocks of open stores may be overwritten in this step."""
        if self._facts.copies_in_step or not self._open:
            return False
        if self._facts.frees_while_running:
            return True
        waiting = (self._states.get(store.request_id) for store in self._open.values())
        return any(
            state is not None and state.request.status.name == "PREEMPTED" for state in waiting
        )

    def count_down(self, store_id: int, ranks: int, failed: bool) -> None:
        """``ranks`` more have finished a store: the last of them settles it."""
        store = self._open[store_id]
        store.ranks_left -= ranks
        store.failed |= failed
        if store.ranks_left > 0:
            return
        del self._open[store_id]
        state = self._states.get(store.request_id)
        if state is not None:
            state.open_stores.discard(store_id)
        if store.failed:
            self._pool.abandon(store.keys)
            self._tally.counts["stores_failed"] += 1
            if state is not None:
                state.closed = True
        else:
            self._pool.commit(store.keys)

    def forsake(self, digests: set[bytes]) -> None:
        """Blocks being copied for these namespaces are not committed."""
        for store in self._open.values():
            store.failed |= any(key[:NAMESPACE_BYTES] in digests for key in store.keys)

    def flush_later(self, keys: Sequence[BlockKey]) -> None:
        """The next ``flush`` waits for these blocks."""
        self._unflushed.append(keys)

    def flush(self) -> None:
        """Waits (bounded) until the blocks named to ``flush_later`` are durable."""
        chains, self._unflushed = self._unflushed, []
        for keys in chains:
            if not self._pool.flush(keys, FLUSH_DEADLINE_S):
                self._tally.counts["flushes_missed"] += 1
                logger.warning(
                    "kvrecall: a reply was sent before its blocks were durable (disk too slow, "
                    "full, or a store was shed)"
                )
