"""The load of a hit: its blocks, acquired in the pool until the workers have copied them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from kvrecall.block import BlockKey, TierName
from kvrecall.engines.vllm.connector.cost import LoadCostModel, Mark
from kvrecall.engines.vllm.connector.hit import Hit
from kvrecall.engines.vllm.connector.request import RequestState
from kvrecall.pool.base import PoolClient, Recall, RecallState

_PORTIONS = 16


@dataclass(slots=True)
class PrefixLoad:
    """The blocks of a hit on their way into the arena.

    They are acquired in portions, which the pool serves in order, so that the scheduler side sees
    the progress and can stop waiting where that does not pay. ``mark``: when they were found.
    ``patience_s``: how long to wait beyond the time that the arrived blocks have saved.
    ``deadline_s``: of the pool. ``given_up``: computing was faster than waiting longer.
    ``was_late``: that, or the deadline passed. ``offsets``: of the blocks to copy, by run of the
    hit; None while more may arrive. ``pending_s``: when it was last seen unfinished, and ``came``:
    when each of ``whole`` was seen; seconds since ``mark``.
    """

    pool: PoolClient
    costs: LoadCostModel
    hit: Hit
    mark: Mark
    patience_s: float
    deadline_s: float
    tickets: list[int] = field(default_factory=list)
    portions: list[tuple[int, int]] = field(default_factory=list)  # run and blocks of each ticket
    whole: list[Recall] = field(default_factory=list)  # of the leading tickets that are READY
    came: list[float] = field(default_factory=list)
    was_late: bool = False
    pending_s: float = 0.0
    given_up: bool = False
    offsets: list[tuple[int, ...]] | None = None

    def acquire(self, state: RequestState) -> None:
        """Acquires the blocks of the hit; each run in one portion if all of it is in the host."""
        for number, run in enumerate(self.hit.runs):
            count = len(run.keys)
            size = -(-count // _PORTIONS)
            if all(tier is TierName.HOST for tier in run.tiers):
                size = count
            for first in range(0, count, size):
                part = run.part(first, first + size)
                self.tickets.append(part.acquire(self.pool, self.deadline_s, state))
                self.portions.append((number, len(part.keys)))

    def poll(self) -> bool:
        """Whether nothing more is waited for; ``tokens`` is settled then."""
        if self.offsets is not None:
            if not self._holds():
                self.offsets = [()] * len(self.hit.runs)
            return True
        if self._is_pending():
            self.pending_s = self.costs.elapsed(self.mark)
            gained = self.costs.gained_seconds(self._arrived(), self.hit.chain.first)
            self.given_up = self.pending_s > gained + self.patience_s
            if not self.given_up:
                return False
        for ticket in self.tickets[len(self.whole) :]:
            self.pool.release(ticket)
        del self.tickets[len(self.whole) :]
        offsets: list[tuple[int, ...]] = [()] * len(self.hit.runs)
        for (number, _), recall in zip(self.portions, self.whole, strict=False):
            offsets[number] += recall.offsets
        self.offsets = offsets
        self.was_late = self.given_up or self.costs.elapsed(self.mark) >= self.deadline_s
        self._tell_speeds()
        return True

    @property
    def tokens(self) -> int:
        """Tokens behind the hit's start that the arrived blocks give; of several KV groups all that
        the hit promised, or none."""
        assert self.offsets is not None
        came = [len(offsets) for offsets in self.offsets]
        whole = [len(run.keys) for run in self.hit.runs]
        if self.hit.is_chain:
            return self.hit.tokens(came[0])
        return self.hit.end - self.hit.start if came == whole else 0

    @property
    def missing(self) -> tuple[BlockKey, TierName] | None:
        """The first block of the hit that did not arrive, and its tier."""
        assert self.offsets is not None
        for run, offsets in zip(self.hit.runs, self.offsets, strict=True):
            if len(offsets) < len(run.keys):
                return run.keys[len(offsets)], run.tiers[len(offsets)]
        return None

    def cut(self, tokens: int) -> None:
        """Limits the load to that many tokens. The leases of the others stay."""
        assert self.offsets is not None
        if tokens < self.tokens:
            count = -(-tokens // self.hit.block_size) if self.hit.is_chain else 0
            self.offsets = [offsets[:count] for offsets in self.offsets]

    def tokens_by_tier(self, tokens: int) -> Counter[TierName]:
        """The first ``tokens`` loaded tokens by the tier that their block of the chain came from;
        by the lowest tier of all, if the hit has no blocks of a chain for them."""
        hit, count = self.hit, -(-tokens // self.hit.block_size)
        tiers = self._arrived()[:count]
        if hit.chain.first * hit.block_size != hit.start or len(tiers) != count:
            return Counter({self.lowest_tier: tokens})
        counts: Counter[TierName] = Counter()
        for place, tier in enumerate(tiers):
            counts[tier] += min(hit.tokens(place + 1), tokens) - hit.tokens(place)
        return counts

    @property
    def lowest_tier(self) -> TierName:
        """The tier farthest from the device that a block came from."""
        tiers = (tier for recall in self.whole for tier in recall.tiers)
        return max(tiers, key=list(TierName).index)

    def release(self) -> None:
        for ticket in self.tickets:
            self.pool.release(ticket)

    # ---- within --------------------------------------------------------------------------

    def _is_pending(self) -> bool:
        """Records the portions that are READY. False after the last of them, and after an
        incomplete one."""
        while (place := len(self.whole)) < len(self.tickets):
            recall = self.pool.poll(self.tickets[place])
            if recall.state is RecallState.PENDING:
                return True
            self.whole.append(recall)
            self.came.append(self.costs.elapsed(self.mark))
            if len(recall.offsets) < self.portions[place][1]:
                return False
        return False

    def _arrived(self) -> tuple[TierName, ...]:
        """The original tiers of the chain's blocks that are in the host now."""
        chain = len(self.hit.runs) - 1
        came = zip(self.portions, self.whole, strict=False)
        return tuple(tier for (of, _), recall in came if of == chain for tier in recall.tiers)

    def _tell_speeds(self) -> None:
        """Reports the tiers' speeds to the cost model. Blocks that did not arrive although they
        were awaited were lost (a damaged file, a dead service), which says nothing about speed."""
        # After a step of other work it is only known that the blocks took longer than until they
        # were last seen pending.
        elapsed = self.costs.elapsed(self.mark) if self.costs.idle_since(self.mark) else 0.0
        seconds = elapsed or self.pending_s
        for tier in {tier for run in self.hit.runs for tier in run.tiers} - {TierName.HOST}:
            came = sum(
                recall.tiers.count(tier) * self.hit.runs[number].weight
                for (number, _), recall in zip(self.portions, self.whole, strict=False)
            )
            if seconds > 0 and (came or self.given_up):
                self.costs.saw_load(tier, came, seconds)

    def _holds(self) -> bool:
        """Whether the arrived blocks are still valid: a pool service may have died since, and its
        replacement have other blocks in their place. Keeps them valid until the next
        ``arena_handle``."""
        came = zip(self.tickets, self.whole, strict=True)
        return all(self.pool.poll(ticket).offsets == recall.offsets for ticket, recall in came)
