"""A claim: blocks of the pool that a request waits for, acquired in portions.

A recall tells nothing before it is whole. In portions, acquired at once and served in their order,
it can be seen how much has come, and the wait can be ended where it does not pay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvrecall.block import SHARED, BlockKey, Tenant, TierName
from kvrecall.engines.vllm.connector.stepclock import Mark
from kvrecall.pool.base import PoolClient, Recall, RecallState

_PORTIONS = 16


@dataclass(slots=True)
class Claim:
    """Blocks acquired for a request that has not been admitted yet.

    ``start``: index of the first block within the request's chain. ``tiers``: where its blocks
    were found. ``mark``: when, by the scheduler side's clock. ``patience_s``: how long to wait
    beyond what the blocks that came have saved. ``pending_s``: when it was last seen unfinished,
    seconds since ``mark``.
    """

    start: int
    tiers: tuple[TierName, ...]
    mark: Mark
    patience_s: float
    tickets: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    whole: list[Recall] = field(default_factory=list)  # of the leading tickets that are READY
    pending_s: float = 0.0
    recall: Recall | None = None  # once nothing more is waited for
    admitted: bool = False  # ``recall`` is cut to what may be loaded

    def acquire(
        self,
        pool: PoolClient,
        keys: Sequence[BlockKey],
        deadline_s: float,
        parent: BlockKey | None,
        tenant: Tenant = SHARED,
    ) -> None:
        """Asks for ``keys``; one portion if all of them are in the host."""
        size = -(-len(keys) // _PORTIONS)
        if all(tier is TierName.HOST for tier in self.tiers):
            size = len(keys)
        for first in range(0, len(keys), size):
            part = keys[first : first + size]
            before = keys[first - 1] if first else parent
            self.tickets.append(pool.acquire(part, deadline_s, before, tenant))
            self.sizes.append(len(part))

    def poll(self, pool: PoolClient) -> Recall:
        """What came of it, over all portions; PENDING while one may still add to it."""
        while self.recall is None:
            place = len(self.whole)
            recall = pool.poll(self.tickets[place])
            if recall.state is RecallState.PENDING:
                return recall
            self.whole.append(recall)
            if len(recall.offsets) < self.sizes[place] or place + 1 == len(self.tickets):
                self.settle(pool)
        return self.recall

    def settle(self, pool: PoolClient) -> Recall:
        """Waits no longer: what has come is all there will be."""
        for ticket in self.tickets[len(self.whole) :]:
            pool.release(ticket)
        del self.tickets[len(self.whole) :]
        self.recall = Recall(
            RecallState.READY,
            tuple(offset for recall in self.whole for offset in recall.offsets),
            self.arrived,
        )
        return self.recall

    def cut(self, blocks: int) -> None:
        """Of what has come, only so many leading blocks are loaded. Their leases stay."""
        assert self.recall is not None
        self.recall = Recall(
            RecallState.READY, self.recall.offsets[:blocks], self.recall.tiers[:blocks]
        )

    def holds(self, pool: PoolClient) -> bool:
        """Whether what has come is still there: a pool service may have died since, and another
        one have other blocks in its place. Keeps them so until the next ``arena_handle``."""
        came = zip(self.tickets, self.whole, strict=True)
        return all(pool.poll(ticket).offsets == recall.offsets for ticket, recall in came)

    @property
    def arrived(self) -> tuple[TierName, ...]:
        """Where the blocks were that are in the host now."""
        return tuple(tier for recall in self.whole for tier in recall.tiers)

    def release(self, pool: PoolClient) -> None:
        for ticket in self.tickets:
            pool.release(ticket)
