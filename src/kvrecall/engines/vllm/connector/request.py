"""A request on the scheduler side: its blocks, and the load of the prefix that the pool has.

A request *matches* (which leading blocks does the pool have?), *waits* (for blocks that a prefill
instance promised, for a store's answer, for blocks on their way into the arena), *loads* (the
workers copy, leases hold the blocks) and is then an ordinary request of the engine.
``RecallScheduler`` moves it from one to the next.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvrecall.block import SHARED, BlockKey, Namespace, Tenant, TierName
from kvrecall.engines.base import HANDOVER
from kvrecall.engines.vllm.connector.costs import Mark
from kvrecall.pool.base import PoolClient, Recall, RecallState

_PORTIONS = 16
_LOOK_EVERY_S = 0.002


@dataclass(slots=True)
class PrefixLoad:
    """Leading blocks of a request, acquired in the pool until the workers have copied them.

    They are acquired in portions, which the pool serves in their order: so the scheduler side sees
    how much has come, and can stop waiting where that does not pay. ``start``: index of the first
    block within the request's chain. ``tiers``: where the blocks were found. ``mark``: when.
    ``patience_s``: how long to wait beyond what the blocks that came have saved. ``pending_s``:
    when it was last seen unfinished, seconds since ``mark``.
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
    audited: bool = False  # ``recall`` is cut to what may be loaded

    def acquire(
        self,
        pool: PoolClient,
        keys: Sequence[BlockKey],
        deadline_s: float,
        parent: BlockKey | None,
        tenant: Tenant = SHARED,
    ) -> None:
        """Asks for ``keys``; in one portion if all of them are in the host."""
        size = -(-len(keys) // _PORTIONS)
        if all(tier is TierName.HOST for tier in self.tiers):
            size = len(keys)
        for first in range(0, len(keys), size):
            part = keys[first : first + size]
            before = keys[first - 1] if first else parent
            self.tickets.append(pool.acquire(part, deadline_s, before, tenant))
            self.sizes.append(len(part))

    def poll(self, pool: PoolClient) -> Recall:
        """What has come, over all portions; PENDING while one may still add to it. READY without
        blocks if those that had come are lost."""
        if self.recall is not None:
            return self.recall if self._holds(pool) else Recall(RecallState.READY)
        while True:
            place = len(self.whole)
            recall = pool.poll(self.tickets[place])
            if recall.state is RecallState.PENDING:
                return recall
            self.whole.append(recall)
            if len(recall.offsets) < self.sizes[place] or place + 1 == len(self.tickets):
                return self.settle(pool)

    def settle(self, pool: PoolClient) -> Recall:
        """Stops waiting: what has come is all there will be."""
        for ticket in self.tickets[len(self.whole) :]:
            pool.release(ticket)
        del self.tickets[len(self.whole) :]
        offsets = tuple(offset for recall in self.whole for offset in recall.offsets)
        self.recall = Recall(RecallState.READY, offsets, self.arrived)
        return self.recall

    def cut(self, blocks: int) -> Recall:
        """Leaves so many leading blocks to load. The leases of the others stay."""
        assert self.recall is not None
        offsets, tiers = self.recall.offsets[:blocks], self.recall.tiers[:blocks]
        self.recall = Recall(RecallState.READY, offsets, tiers)
        return self.recall

    def _holds(self, pool: PoolClient) -> bool:
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


class Handover(enum.Enum):
    """How a promise stands."""

    WAIT = "wait"
    KEPT = "kept"
    LATE = "late"


def receipt(namespace: Namespace | None, tokens: int) -> dict[str, Any]:
    """What a prefill instance hands to a decode instance, by way of the router: how many tokens of
    the prompt lie in the pool or are on their way there. Empty if there are none."""
    if namespace is None or tokens <= 0:
        return {}
    return {HANDOVER: {"tokens": tokens, "namespace": namespace.digest.hex()}}


@dataclass(slots=True)
class Promise:
    """Leading blocks of a prompt that a prefill instance's receipt says are in the pool, or on
    their way. The decode instance waits for them ``patience_s`` seconds from the first ``look``
    on, and never within a step; what counts is what it finds itself, whatever pool lies between
    the two."""

    blocks: int
    namespace: str
    patience_s: float
    clock: Callable[[], float]
    is_over: bool = False
    _until: float | None = None
    _next: float = 0.0

    @classmethod
    def of(
        cls, params: object, block_size: int, patience_s: float, clock: Callable[[], float]
    ) -> Promise | None:
        """From a request's ``kv_transfer_params``; None if there is no receipt in them, or one
        that cannot be read (they come from outside)."""
        given = params.get(HANDOVER) if isinstance(params, Mapping) else None
        if not isinstance(given, Mapping):
            return None
        tokens, namespace = given.get("tokens"), given.get("namespace")
        if type(tokens) is not int or tokens < block_size or not isinstance(namespace, str):
            return None
        return cls(tokens // block_size, namespace, patience_s, clock)

    def look(self, wanted: int, found: Callable[[], int]) -> Handover:
        """Whether ``wanted`` blocks are there; ``found`` asks the pool, and not at every call."""
        now = self.clock()
        if self._until is None:
            self._until = now + self.patience_s
        if now < self._next and now < self._until:
            return Handover.WAIT
        self._next = now + _LOOK_EVERY_S
        if found() >= wanted:
            self.is_over = True
            return Handover.KEPT
        if now < self._until:
            return Handover.WAIT
        self.is_over = True
        return Handover.LATE


@dataclass(slots=True)
class RequestState:
    """What the scheduler side remembers of a request. Owned by ``RecallScheduler``.

    ``namespace`` is None if the request is not pooled, or not yet ``settled``: whose blocks these
    are is being found out. ``promise``: what a prefill instance said of its blocks. ``asked_at``:
    since when the pool has been asking another host for them (seconds of the scheduler side's
    clock). ``load``: from a match until the engine has given it device blocks. ``computes``: it
    loads nothing, as a load failed or is audited. ``saved``: leading blocks of the chain that are
    in the pool or on their way; ``closed``: nothing more of it can be saved; ``passes``: how many
    steps pass before it asks for room again, and ``passes_next`` after the last refusal.
    ``touched``: the pool knows that its chain is in use. ``reported``: the API process knows where
    its prompt comes from.
    """

    request: Any
    hashes_per_block: int
    tenant: Tenant = SHARED
    namespace: Namespace | None = None
    settled: bool = False
    promise: Promise | None = None
    asked_at: float | None = None
    load: PrefixLoad | None = None
    computes: bool = False
    saved: int = 0
    closed: bool = False
    passes: int = 0
    passes_next: int = 0
    open_stores: set[int] = field(default_factory=set)
    touched: bool = False
    reported: bool = False
    device_tokens: int = 0
    recalled: Counter[TierName] = field(default_factory=Counter)
    _keys: list[BlockKey] = field(default_factory=list)

    @property
    def has_media(self) -> bool:
        """Whether there are images, sound or the like in its prompt."""
        return bool(getattr(self.request, "mm_features", None))

    def keys(self, count: int) -> list[BlockKey]:
        """Keys of the first ``count`` blocks, or of as many as are hashed by now."""
        if self.namespace is None:
            return []
        step = self.hashes_per_block
        hashes = self.request.block_hashes
        for index in range(len(self._keys), min(count, len(hashes) // step)):
            self._keys.append(self.namespace.key(hashes[(index + 1) * step - 1]))
        return self._keys[:count]

    def sources(self) -> dict[str, int]:
        """Prompt tokens by where their KV came from."""
        counts = {str(tier): self.recalled[tier] for tier in TierName}
        counts[str(TierName.DEVICE)] = self.device_tokens
        counts["computed"] = max(0, self.request.num_prompt_tokens - sum(counts.values()))
        return counts
