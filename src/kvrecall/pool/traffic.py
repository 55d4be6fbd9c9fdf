"""Blocks on their way between the host store and the tier below it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from kvrecall.block import SHARED, BlockKey, Tenant, TierName
from kvrecall.pool.arena import Arena
from kvrecall.pool.host import Block, HostStore
from kvrecall.pool.sharing import Sharing
from kvrecall.pool.ticket import Ticket
from kvrecall.pool.tier import Done, Get, NullTier, Outcome, Put, PutVerdict, Tier
from kvrecall.pool.writing import STORE_TRIES, WritePolicy

_NEVER = 1 << 62
_STALLED_S = 1.0  # without the end of a write
_OFFERED_SHARE = 0.25
_PENANCE_S = 30.0  # how long a tier with an overdue load is not asked


class _Loading:
    """A block on its way up: the slot it goes to and the recalls that wait for it."""

    __slots__ = ("block", "due", "kept", "overdue", "tier", "waiters")

    def __init__(self, block: Block, due: float, tier: TierName) -> None:
        self.block = block
        self.tier = tier
        self.due = due  # when the first of them stops waiting
        self.overdue = False  # and that has been noticed
        self.kept = True  # False: it is out of date on arrival unless somebody waits
        self.waiters: list[tuple[Ticket, int]] = []


class Traffic:
    """Moves blocks up (loads) and down (stores). Used under its pool's lock; never waits.

    Owns the slots of blocks that are being loaded; pins blocks that are being stored.
    """

    def __init__(
        self,
        host: HostStore,
        below: Tier,
        arena: Arena,
        writing: WritePolicy,
        sharing: Sharing,
        monotonic: Callable[[], float],
    ) -> None:
        self._writes = writing
        self._sharing = sharing
        self._offered: set[BlockKey] = set()  # puts under way that pay what the remote tier is owed
        self._offered_bytes = 0
        self._host = host
        self._below = below
        self._arena = arena
        self._monotonic = monotonic
        self._loading: dict[BlockKey, _Loading] = {}
        self._writing: dict[BlockKey, Block] = {}
        self._silent_until = float("-inf")
        self._wrote_at = float("-inf")  # when a write ended, or the first of those under way began
        self._full_at = _NEVER  # puts that were queued when the tier last had no room for more
        self.has_below = not isinstance(below, NullTier)

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
                    self._silent_until = now + _PENANCE_S
            return now >= self._silent_until
        return self.has_below

    def holds(self, key: BlockKey) -> bool:
        """Whether the block is below or on its way up."""
        return self.has_below and (key in self._loading or self._below.contains(key))

    def holds_here(self, key: BlockKey) -> bool:
        """Whether the block is below on this host, or on its way up."""
        if not self.has_below or key in self._loading:
            return self.has_below
        below = self._below
        return below.contains(key) and below.tier_of(key) is not TierName.REMOTE

    def _rests(self, key: BlockKey) -> bool:
        """Whether the block is below, in the tier that counts."""
        return self._below.contains(key) and self._below.tier_of(key) is self._below.name

    # -- down ------------------------------------------------------------------------------

    def committed(self, blocks: Sequence[Block]) -> None:
        """Blocks became visible: stores those that are to be stored now."""
        if self.has_below:
            self._sharing.committed(blocks)
            self.store(self._writes.committed(blocks))

    def store(self, blocks: Sequence[Block], offering: bool = False) -> None:
        """Queues committed blocks, a chain prefix first, to be stored below. Passes over keys of
        which an older block is being stored still. ``offering``: in the remote tier, too, even if
        that is written back."""
        blocks = [block for block in blocks if block.key not in self._writing]
        if not (self.has_below and blocks):
            return
        puts = [
            Put(
                b.key,
                b.parent,
                b.depth,
                self._arena.view(b.offset, b.slot_bytes),
                b.nbytes,
                b.tenant,
                offering or not self._sharing.is_on,
            )
            for b in blocks
        ]
        if not self._writing:
            self._wrote_at = self._monotonic()
        for block, verdict in zip(blocks, self._below.submit_put(puts), strict=True):
            if verdict is PutVerdict.QUEUED:
                block.pins += 1
                self._writing[block.key] = block
                if offering:
                    self._offered.add(block.key)
                    self._offered_bytes += block.slot_bytes
            elif verdict is PutVerdict.PRESENT and self._rests(block.key):
                block.stored = True
                self._writes.settled(block.key)

    def store_again(self, blocks: Sequence[Block]) -> None:
        """Stores those of ``blocks`` that are not, unless it failed too often."""
        if self.has_below:
            self.store(
                [b for b in blocks if not (b.stored or b.pins or b.tries >= STORE_TRIES)],
            )

    def rescue(self, blocks: Sequence[Block]) -> frozenset[BlockKey]:
        """Stores those of ``blocks``, which are about to be evicted, that the write policy kept
        back, or that the remote tier is owed; returns those that must stay until that is done.
        None must on account of a tier that takes no more and has not ended a write for a while, or
        of a remote one that takes no more: what is lost then is counted as shed."""
        if not self.has_below:
            return frozenset()
        wanted = self._writes.leaving([block for block in blocks if not block.stored])
        owed = self._offerable(self._sharing.leaving(blocks))
        self.store(owed, offering=True)
        self.store(wanted)
        now = self._monotonic()
        stalled = bool(self._writing) and now - self._wrote_at > _STALLED_S
        staying = [b.key for b in wanted if b.pins or not (b.stored or stalled)]
        return frozenset(staying + [b.key for b in owed if b.pins])

    def _offerable(self, blocks: Sequence[Block]) -> list[Block]:
        """The first of ``blocks``, so few that room for new ones need not wait for a remote tier:
        with those under way a share of the smallest limit."""
        left = int(_OFFERED_SHARE * self._host.least_limit) - self._offered_bytes
        sizes = itertools.accumulate(block.slot_bytes for block in blocks)
        return [block for block, size in zip(blocks, sizes, strict=True) if size <= left]

    def store_due(self) -> None:
        """Stores what the write policy wants to be stored by now."""
        if not self.has_below:
            return
        blocks, host = self._host.blocks, self._host
        self.store(self._writes.due(blocks, host.room.limit_bytes))
        owed = self._offerable(self._sharing.due(blocks, host.least_limit))
        self.store(owed, offering=True)
        if owed and not any(block.pins for block in owed):
            self._sharing.refused()

    def store_rest(self) -> bool:
        """Stores what was kept back, before the pool closes. False if nothing of it is left, or
        the tier below takes no more."""
        if not self.has_below:
            return False
        blocks = self._host.blocks
        owed = self._sharing.rest(blocks)
        self.store(owed, offering=True)
        rest = self._writes.rest()
        self.store_again([blocks[key] for key in rest])
        return bool(rest or owed) and self._below.queued()[0] > 0

    def chase(self, keys: Sequence[BlockKey]) -> list[BlockKey] | None:
        """Of ``keys`` those not durable yet, queued again if they were shed. None if one of them
        cannot become durable."""
        waiting: list[BlockKey] = []
        again: list[Block] = []
        for key in keys:
            if self._rests(key):
                continue
            waiting.append(key)
            if key in self._writing:
                continue
            block = self._host.blocks.get(key)
            if block is None or block.tries >= STORE_TRIES:
                return None
            again.append(block)
        queued = self._below.queued()[0]
        if again and (queued < self._full_at or not queued):
            self.store(again)
            refused = any(block.key not in self._writing and not block.stored for block in again)
            if refused and not queued:
                return None  # not for want of room in the queue
            self._full_at = self._below.queued()[0] if refused else _NEVER
        return waiting

    # -- up --------------------------------------------------------------------------------

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
            for block in self._slots_for(missing, size_of, tenant):
                blocks[wanted[block.key]] = block
            short = len(wanted) - len(blocks)
            if short:
                self._host.unlease(ticket.cut(len(ticket) - (short + 1) // 2))

    def _slots_for(
        self, keys: Sequence[BlockKey], size_of: Callable[[BlockKey], int], tenant: Tenant
    ) -> list[Block]:
        """Slots for blocks from below, for as many of ``keys`` as can be had, in their order."""
        blocks: list[Block] = []
        for nbytes, group in itertools.groupby(keys, size_of):
            run = list(group)
            offsets = self._host.allocate(nbytes, len(run), tenant=tenant)
            for key, offset in zip(run, offsets, strict=False):
                depth = self._below.depth_of(key) or 0
                blocks.append(Block(key, None, depth, offset, nbytes, tenant))
        return blocks

    # -- ends ------------------------------------------------------------------------------

    def drain(self) -> None:
        """Takes note of everything the tier below has done by now."""
        if self.has_below:
            self.apply(self._below.poll())

    def apply(self, done: Sequence[Done]) -> None:
        for item in done:
            if item.outcome in (Outcome.STORED, Outcome.SHED):
                self._stored(item)
            else:
                self._loaded(item)

    def expire(self, keys: Sequence[BlockKey] | None = None) -> None:
        """What is on its way up now (None: everything) is out of date: it is kept only for those
        who wait for it."""
        for key in list(self._loading) if keys is None else keys:
            if key in self._loading:
                self._loading[key].kept = False

    def _stored(self, done: Done) -> None:
        block = self._writing.pop(done.key)
        self._wrote_at = self._monotonic()
        block.pins -= 1
        if done.key in self._offered:
            self._offered.discard(done.key)
            self._offered_bytes -= block.slot_bytes
            self._sharing.settled(done.key)
        if done.outcome is Outcome.STORED:
            block.stored = True
            self._writes.settled(block.key)
        else:
            block.tries += 1
        if self._host.blocks.get(done.key) is not block:
            self._host.free(block)  # withdrawn meanwhile

    def _loaded(self, done: Done) -> None:
        loading = self._loading.pop(done.key)
        self._silent_until = float("-inf")
        waiters = [waiter for waiter in loading.waiters if not waiter[0].is_settled]
        block = loading.block
        if done.outcome is not Outcome.LOADED:
            self._host.free(block)
            for ticket, place in waiters:
                self._host.unlease(ticket.cut(place))
        elif waiters or loading.kept:
            block.stored = loading.kept and self._rests(block.key)
            self._host.publish(block)
            for ticket, place in waiters:
                if ticket.fill(place, block):
                    self._host.lease(block)
        else:
            self._host.free(block)
