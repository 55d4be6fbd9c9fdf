"""The host tier: blocks in slots of the arena."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from kvrecall.block import SHARED, BlockKey, Tenant, TierName
from kvrecall.config import PoolTerms
from kvrecall.pool.changes import Cause
from kvrecall.pool.departures import Refusal
from kvrecall.pool.entries import BlockInfo, EntryTable, Extent
from kvrecall.pool.eviction.base import RequestUse
from kvrecall.pool.hints import Advice
from kvrecall.pool.slots import ArenaSlots, slot_bytes_of


@dataclass(slots=True, eq=False)
class Block:
    """A slot of the arena and the block in it. Only host store and writer change it."""

    key: BlockKey
    parent: BlockKey | None
    depth: int
    offset: int
    nbytes: int
    tenant: Tenant = SHARED
    slot_bytes: int = field(init=False)
    number: int = -1  # its entry in the host; -1: it is not visible
    base: int = -1  # of its extent
    extent: Extent | None = None
    pinned: bool = False  # as its entry says
    leases: int = 0  # recalls that use the slot
    io_refs: int = 0  # reads or writes of the slot under way
    stored: bool = False  # the tier below that counts has it too
    tries: int = 0  # failed attempts to store it there
    checksum: bytes | None = None  # while it may be needed, if it is known

    def __post_init__(self) -> None:
        self.slot_bytes = slot_bytes_of(self.nbytes)

    @property
    def is_fixed(self) -> bool:
        return bool(self.leases or self.io_refs or self.pinned)


class HostStore(EntryTable):
    """The committed blocks of an arena. Not thread-safe: the holder of its pool's lock owns it;
    never waits.

    The caller owns a slot from ``take`` until it returns it with ``free`` or turns it into a
    visible block with ``publish``.
    """

    def __init__(
        self, slots: ArenaSlots, policy: str, clock: Callable[[], float], terms: PoolTerms
    ) -> None:
        capacity = slots.limit_bytes >> 20
        super().__init__(TierName.HOST, policy, capacity, lambda: slots.limit_bytes, clock, terms)
        self.slots = slots
        self.blocks: dict[BlockKey, Block] = {}
        self.leases = 0
        self.stored: Counter[int] = Counter()  # visible blocks that are below, by slot size
        self._numbered: dict[int, Block] = {}

    def _is_busy(self, number: int) -> bool:
        block = self._numbered[number]
        return bool(block.leases or block.io_refs)

    def _place_of(self, number: int) -> int:
        return self._numbered[number].base

    def take(self, slot_bytes: int, count: int, tenant: Tenant) -> list[int]:
        """Offsets of up to ``count`` slots that are free now, charged to a tenant."""
        offsets = self.slots.take(slot_bytes, count)
        if offsets:
            self.accounts.charge(tenant, len(offsets) * slot_bytes)
        return offsets

    def free(self, block: Block) -> None:
        """Frees the slot of a block that is not (or no longer) visible."""
        self.slots.give(block.slot_bytes, block.offset)
        self.accounts.refund(block.tenant, block.slot_bytes)

    def publish(self, blocks: Sequence[Block]) -> None:
        """Makes filled blocks visible."""
        now = self.now()
        for block in blocks:
            number = block.number = self._enter(
                block.key, block.parent, block.depth, block.nbytes, block.tenant, now
            )
            self.blocks[block.key] = self._numbered[number] = block
            block.base = self.slots.slot_class(block.slot_bytes).extent_of(block.offset)
            block.extent = self._place(number)
            if block.key in self.pins and self._may_pin(number):
                self._set_pinned(number, True)
            if block.stored:
                self.stored[block.slot_bytes] += 1
        self._settle([block.number for block in blocks])

    def withdraw(self, blocks: Sequence[Block], cause: Cause) -> None:
        """Makes blocks invisible; the caller frees their slots, after writes in flight."""
        for block in blocks:
            self._leave(block.number, cause)
            del self.blocks[block.key]
            if block.stored:
                self.stored[block.slot_bytes] -= 1
        self._settle([block.number for block in blocks])
        for block in blocks:
            del self._numbered[block.number]
            block.number, block.extent, block.pinned = -1, None, False

    def use(
        self,
        chain: Sequence[BlockKey],
        hanging: Sequence[BlockKey] = (),
        ending: Sequence[BlockKey] = (),
        advice: Advice | None = None,
    ) -> None:
        self._apply(RequestUse(chain, self.now(), hanging, ending, advice))

    def refuse(self, blocks: Iterable[Block], why: Refusal) -> None:
        """Remembers why these blocks have no slot."""
        for block in blocks:
            self.departures.note(block.key, why)

    def set_stored(self, block: Block, stored: bool) -> None:
        if block.number >= 0:
            self.stored[block.slot_bytes] += stored - block.stored
        block.stored = stored

    def infos(self, blocks: Iterable[Block], unused_since: float) -> list[BlockInfo]:
        """Those of these blocks that are visible, and unused since that second."""
        used = self._used.cells
        return [
            self._info(block.number)
            for block in blocks
            if block.number >= 0 and used[block.number] < unused_since
        ]

    # -- in use ----------------------------------------------------------------------------

    def lease(self, blocks: Sequence[Block]) -> None:
        self.leases += len(blocks)
        for block in blocks:
            if not (block.leases or block.io_refs or block.pinned):
                block.extent.fixed += 1  # type: ignore[union-attr]
            block.leases += 1

    def unlease(self, blocks: Sequence[Block]) -> None:
        self.leases -= len(blocks)
        held = self._held
        for block in blocks:
            block.leases -= 1
            if not (block.leases or block.io_refs or block.pinned):
                block.extent.fixed -= 1  # type: ignore[union-attr]
                if held and block.number in held:
                    self._changed(block.number)

    def begin_io(self, block: Block) -> None:
        """The slot is being read or written; it is not reused before ``end_io``."""
        if block.extent is not None and not block.is_fixed:
            block.extent.fixed += 1
        block.io_refs += 1

    def end_io(self, block: Block) -> None:
        block.io_refs -= 1
        if block.extent is not None and not block.is_fixed:
            block.extent.fixed -= 1
            if block.number in self._held:
                self._changed(block.number)

    def _set_pinned(self, number: int, pinned: bool) -> None:
        super()._set_pinned(number, pinned)
        self._numbered[number].pinned = pinned

    # -- which go --------------------------------------------------------------------------

    def victims(
        self,
        count: int,
        slot_bytes: int | None = None,
        wanted: Callable[[Block], bool] | None = None,
    ) -> list[Block]:
        """Up to ``count`` idle blocks (of a slot size, that are ``wanted``), the least valuable
        first. Removes none."""
        found = self._search(count, slot_bytes, self._by_number(wanted))
        return [self._numbered[number] for number in found]

    def victims_of(
        self, tenant: Tenant, nbytes: int, wanted: Callable[[Block], bool] | None = None
    ) -> list[Block]:
        """A limited tenant's idle blocks, coldest first, up to ``nbytes`` bytes."""
        found = self._search_of(tenant, nbytes, self._by_number(wanted))
        return [self._numbered[number] for number in found]

    def _by_number(self, wanted: Callable[[Block], bool] | None) -> Callable[[int], bool] | None:
        return None if wanted is None else lambda number: wanted(self._numbered[number])

    def has_idle(self, slot_bytes: int, others: bool = False) -> bool:
        """Whether there is an idle block of that slot size, or of any other. Checks the extents,
        not the blocks."""
        return any(
            extent.fixed < extent.blocks and (extent.slot_bytes == slot_bytes) is not others
            for extent in self._extents.values()
        )

    def extents_to_empty(self, slot_bytes: int) -> dict[int, Extent]:
        """Extents of other size classes, by base, whose slots all hold idle blocks."""
        return {
            base: extent
            for base, extent in self._extents.items()
            if extent.slot_bytes != slot_bytes
            and not extent.fixed
            and self.slots.slot_class(extent.slot_bytes).used_in(base) == extent.blocks
        }

    def blocks_in(self, bases: Collection[int]) -> list[Block]:
        """The blocks in these extents. A pass over all blocks."""
        return [block for block in self.blocks.values() if block.base in bases]

    @property
    def least_limit(self) -> int:
        """Bytes of the smallest limit: the host's, or a tenant's."""
        limit = self.slots.limit_bytes
        amounts = [terms.host for terms in self._terms.tenants.all if terms.host is not None]
        return min([limit, *(amount.of(limit) for amount in amounts)])
