"""What the arena holds: blocks by key, and their slots."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from kvrecall.block import SHARED, BlockKey, Tenant, TierName
from kvrecall.config import PoolTerms
from kvrecall.pool.residents import Extent, Resident, Residents
from kvrecall.pool.slots import ArenaSlots


class Block(Resident):
    """A slot of the arena and the block in it. Only the host store changes it."""

    __slots__ = ("offset", "stored", "tries")

    def __init__(
        self,
        key: BlockKey,
        parent: BlockKey | None,
        depth: int,
        offset: int,
        nbytes: int,
        tenant: Tenant = SHARED,
    ) -> None:
        super().__init__(key, parent, depth, nbytes, tenant)
        self.offset = offset
        self.stored = False  # the tier below that counts has it too
        self.tries = 0  # failed attempts to store it there


class HostStore(Residents[Block]):
    """The committed blocks of an arena. Not thread-safe; never waits.

    A slot is owned by the caller from ``take`` until it is given back with ``free`` or becomes a
    visible block with ``publish``.
    """

    def __init__(
        self, slots: ArenaSlots, policy: str, clock: Callable[[], float], terms: PoolTerms
    ) -> None:
        blocks = max(1, slots.limit_bytes >> 20)
        super().__init__(TierName.HOST, policy, blocks, lambda: slots.limit_bytes, clock, terms)
        self.slots = slots
        self.stored: Counter[int] = Counter()  # visible blocks that are below, by slot size

    def take(self, slot_bytes: int, count: int, tenant: Tenant) -> list[int]:
        """Offsets of up to ``count`` slots that are free now, on a tenant's account."""
        offsets = self.slots.take(slot_bytes, count)
        if offsets:
            self.accounts.charge(tenant, len(offsets) * slot_bytes)
        return offsets

    def free(self, block: Block) -> None:
        """Gives the slot of a block back that is not (or no longer) visible."""
        self.slots.give(block.slot_bytes, block.offset)
        self.accounts.refund(block.tenant, block.slot_bytes)

    def publish(self, block: Block) -> None:
        """Makes a filled block visible."""
        base = self.slots.extent_of(block.slot_bytes, block.offset)
        pinned = block.key in self.pins and self.may_pin(block)
        self.insert(block, base, self.now(), pinned)
        if block.stored:
            self.stored[block.slot_bytes] += 1

    def withdraw(self, block: Block) -> None:
        """Makes a block invisible; its slot is the caller's to free, after a write under way."""
        self.remove(block.key)
        if block.stored:
            self.stored[block.slot_bytes] -= 1

    def set_stored(self, block: Block, stored: bool) -> None:
        """Notes whether the tier below has the block."""
        if block.extent is not None:
            self.stored[block.slot_bytes] += stored - block.stored
        block.stored = stored

    def count_failure(self, block: Block) -> None:
        """Notes that the block could not be stored below."""
        block.tries += 1

    def extents_to_empty(self, slot_bytes: int) -> dict[int, Extent]:
        """Extents of other size classes, by base, whose slots all hold idle blocks."""
        return {
            base: extent
            for base, extent in self._extents.items()
            if extent.slot_bytes != slot_bytes
            and not extent.fixed
            and self.slots.used_in(extent.slot_bytes, base) == len(extent.blocks)
        }

    @property
    def least_limit(self) -> int:
        """Bytes of the smallest limit there is: the host's, or a tenant's."""
        limit = self.slots.limit_bytes
        amounts = [terms.host for terms in self._terms.tenants.all if terms.host is not None]
        return min([limit, *(amount.of(limit) for amount in amounts)])
