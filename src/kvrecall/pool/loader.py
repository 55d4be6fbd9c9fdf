"""The loader: brings blocks from the tier below into the host for recalls that wait for them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from kvrecall.block import SHARED, BlockKey, Tenant, TierName
from kvrecall.pool.arena import Arena
from kvrecall.pool.base import Recall, RecallState
from kvrecall.pool.evictor import Evictor
from kvrecall.pool.host import Block, HostStore
from kvrecall.pool.tier import Done, Get, Outcome, Tier
from kvrecall.pool.writer import Writer

_PENALTY_S = 30.0  # how long a tier with an overdue load is not asked
_PENDING = Recall(RecallState.PENDING)


class Ticket:
    """The state of one recall: its blocks, leased as they arrive. Used under its pool's lock.

    Methods that shorten it return the blocks whose lease the caller has to give back.
    """

    __slots__ = ("_blocks", "_missing", "_result", "deadline", "tiers")

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        self._blocks: list[Block | None] = []
        self.tiers: list[TierName] = []
        self._missing = 0
        self._result: Recall | None = None

    @property
    def is_settled(self) -> bool:
        """Whether its result stands (or the caller no longer waits for it)."""
        return self._result is not None

    @property
    def is_waiting(self) -> bool:
        """Whether some block is not there yet."""
        return self._missing > 0

    def __len__(self) -> int:
        return len(self._blocks)

    def add(self, tier: TierName, block: Block | None) -> None:
        """The next block of the chain; None if it is still below."""
        self.tiers.append(tier)
        self._blocks.append(block)
        self._missing += block is None

    def waiting(self) -> list[int]:
        """Places of blocks that are not there."""
        return [place for place, block in enumerate(self._blocks) if block is None]

    def fill(self, place: int, block: Block) -> bool:
        """A block arrived. False if the recall does not need it any more."""
        if place >= len(self._blocks):
            return False
        self._blocks[place] = block
        self._missing -= 1
        return True

    def cut(self, place: int) -> list[Block]:
        """The block at ``place`` cannot come: the recall ends before it."""
        beyond = self._blocks[place:]
        del self._blocks[place:]
        del self.tiers[place:]
        self._missing -= sum(block is None for block in beyond)
        return [block for block in beyond if block is not None]

    def settle(self, now: float) -> tuple[Recall, list[Block]]:
        """The recall as it stands at ``now``."""
        if self._result is not None:
            return self._result, []
        if self._missing and now < self.deadline:
            return _PENDING, []
        beyond = self.cut(self.waiting()[0]) if self._missing else []
        offsets = tuple(block.offset for block in self._blocks if block is not None)
        self._result = Recall(RecallState.READY, offsets, tuple(self.tiers))
        return self._result, beyond

    def give_up(self) -> list[Block]:
        """The caller no longer waits."""
        self._result = _PENDING if self._result is None else self._result
        return self.cut(0)


class _Loading:
    """A block on its way up: the slot it goes to and the recalls that wait for it."""

    __slots__ = ("block", "due", "overdue", "tier", "waiters", "wanted")

    def __init__(self, block: Block, due: float, tier: TierName) -> None:
        self.block = block
        self.tier = tier
        self.due = due  # when the first of them stops waiting
        self.overdue = False  # and that has been noticed
        self.wanted = True  # False: it is out of date on arrival unless a recall waits for it
        self.waiters: list[tuple[Ticket, int]] = []


class Loader:
    """Queues gets and takes their ends. Used under its pool's lock; never waits. Owns the slots of
    blocks that are being loaded."""

    def __init__(
        self,
        host: HostStore,
        evictor: Evictor,
        writer: Writer,
        below: Tier,
        arena: Arena,
        monotonic: Callable[[], float],
    ) -> None:
        self._host = host
        self._evictor = evictor
        self._writer = writer
        self._below = below
        self._arena = arena
        self._monotonic = monotonic
        self._loading: dict[BlockKey, _Loading] = {}
        self._silent_until = float("-inf")

    # -- what is below ---------------------------------------------------------------------

    def answers(self) -> bool:
        """Whether the tier below gives what is asked of it. After a load is overdue it counts as
        empty, until a load arrives or a while has passed: one hung medium costs one deadline now
        and then, not one for each request. A remote tier sees to that by itself."""
        if self._loading:
            now = self._monotonic()
            for loading in self._loading.values():
                if loading.tier is TierName.REMOTE:
                    continue
                if loading.due >= now:
                    break
                if not loading.overdue:
                    loading.overdue = True
                    self._silent_until = now + _PENALTY_S
            return now >= self._silent_until
        return self._writer.has_below

    def holds(self, key: BlockKey) -> bool:
        """Whether the block is below or on its way up."""
        return self._writer.has_below and (key in self._loading or self._below.contains(key))

    def holds_here(self, key: BlockKey) -> bool:
        """Whether the block is below on this host, or on its way up."""
        if not self._writer.has_below or key in self._loading:
            return self._writer.has_below
        below = self._below
        return below.contains(key) and below.tier_of(key) is not TierName.REMOTE

    # -- loading ---------------------------------------------------------------------------

    def load(
        self,
        keys: Sequence[BlockKey],
        ticket: Ticket,
        parent: BlockKey | None,
        size_of: Callable[[BlockKey], int],
        tenant: Tenant = SHARED,
    ) -> None:
        """Starts loading the blocks ``ticket`` has not; cuts it where room ends."""
        if not ticket.is_waiting:
            return
        blocks = self._allocate(keys, ticket, size_of, tenant)
        gets: list[Get] = []
        for place, block in blocks.items():
            block.parent = keys[place - 1] if place else parent
            tier = self._below.tier_of(block.key)
            self._loading[block.key] = _Loading(block, ticket.deadline, tier)
            gets.append(Get(block.key, self._arena.view(block.offset, block.slot_bytes)))
        for place in ticket.waiting():
            self._loading[keys[place]].waiters.append((ticket, place))
        if gets:
            self._below.submit_get(gets)

    def _allocate(
        self,
        keys: Sequence[BlockKey],
        ticket: Ticket,
        size_of: Callable[[BlockKey], int],
        tenant: Tenant,
    ) -> dict[int, Block]:
        """Slots, by place, for what is to be loaded. Where there are too few the ticket gives up
        blocks from its end, so that its beginning can come in their stead."""
        blocks: dict[int, Block] = {}
        while True:
            wanted: dict[BlockKey, int] = {}
            for place in ticket.waiting():
                if keys[place] not in self._loading:
                    wanted.setdefault(keys[place], place)
            for place in [place for place in blocks if place >= len(ticket)]:
                self._host.free(blocks.pop(place))
            missing = [key for key, place in wanted.items() if place not in blocks]
            if not missing:
                return blocks
            for nbytes, group in itertools.groupby(missing, size_of):
                run = list(group)
                offsets = self._evictor.allocate(nbytes, len(run), tenant)
                for key, offset in zip(run, offsets, strict=False):
                    depth = self._below.depth_of(key) or 0
                    blocks[wanted[key]] = Block(key, None, depth, offset, nbytes, tenant)
            short = len(wanted) - len(blocks)
            if short:
                self._host.unlease(ticket.cut(len(ticket) - (short + 1) // 2))

    def expire(self, keys: Sequence[BlockKey] | None = None) -> None:
        """What is on its way up now (None: everything) is out of date: it is kept only for recalls
        that wait for it."""
        for key in list(self._loading) if keys is None else keys:
            if key in self._loading:
                self._loading[key].wanted = False

    def ended(self, done: Done) -> None:
        """A get is done."""
        loading = self._loading.pop(done.key)
        self._silent_until = float("-inf")
        waiters = [waiter for waiter in loading.waiters if not waiter[0].is_settled]
        block = loading.block
        if done.outcome is not Outcome.LOADED:
            self._host.free(block)
            for ticket, place in waiters:
                self._host.unlease(ticket.cut(place))
        elif waiters or loading.wanted:
            durable = loading.wanted and self._writer.is_durable(block.key)
            self._host.set_stored(block, durable)
            self._host.publish(block)
            for ticket, place in waiters:
                if ticket.fill(place, block):
                    self._host.lease((block,))
        else:
            self._host.free(block)
