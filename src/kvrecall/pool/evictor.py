"""The evictor: makes room in the host for new blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvrecall.block import SHARED, BlockKey, Tenant, is_tail
from kvrecall.config import PoolTerms
from kvrecall.pool.changes import Cause
from kvrecall.pool.departures import Refusal
from kvrecall.pool.host import Block, HostStore
from kvrecall.pool.slots import slot_bytes_of
from kvrecall.pool.writer import Writer

_LEEWAY = 16  # blocks passed over, at least, to find one that is clean


class Evictor:
    """Allocates slots of the host, for which it evicts idle blocks. Used under its pool's lock;
    never waits: a dirty block whose write it starts stays until the write has ended.

    A refusal costs no walk over the blocks: leased ones are skipped, and the extents show
    beforehand whether there are idle ones.
    """

    def __init__(self, host: HostStore, writer: Writer, terms: PoolTerms) -> None:
        self._host = host
        self._writer = writer
        self._marks = terms.host_marks
        self._trimming = False

    def allocate(self, nbytes: int, count: int, tenant: Tenant = SHARED) -> list[int]:
        """Offsets of slots for ``count`` blocks of a tenant, ascending; fewer if there is not
        enough space, or the tenant's limit is reached."""
        slot_bytes = slot_bytes_of(nbytes)
        count = self._within_limit(tenant, slot_bytes, count)
        offsets = self._host.take(slot_bytes, count, tenant)
        return self._fill_up(offsets, slot_bytes, count, tenant)

    def place(
        self, blocks: Sequence[Block], choosy: bool, in_use: Callable[[], Sequence[Block]]
    ) -> Sequence[Block]:
        """Gives slots to new blocks of one size and tenant; returns those that have one, the first
        ones unless the policy refuses some. Evicts none of the blocks ``in_use``, which is called
        if something must be evicted; if ``choosy``, evicts only for blocks that the eviction policy
        admits."""
        host, tenant, slot_bytes = self._host, blocks[0].tenant, blocks[0].slot_bytes
        is_limited = host.accounts.excess(tenant, len(blocks) * slot_bytes) > 0
        offsets = [] if is_limited else host.take(slot_bytes, len(blocks), tenant)
        if len(offsets) < len(blocks):
            spared = in_use()
            host.lease(spared)
            if is_limited:
                if choosy:
                    blocks = [block for block in blocks if not is_tail(block.key)]
                fitting = self._within_limit(tenant, slot_bytes, len(blocks))
                host.refuse(blocks[fitting:], Refusal.QUOTA)
                blocks = blocks[:fitting]
                offsets = host.take(slot_bytes, len(blocks), tenant)
            if choosy:
                blocks = [*blocks[: len(offsets)], *self._admitted(blocks[len(offsets) :])]
            offsets = self._fill_up(offsets, slot_bytes, len(blocks), tenant)
            host.unlease(spared)
        placed = blocks[: len(offsets)]
        host.refuse(blocks[len(offsets) :], Refusal.ROOM)
        for block, offset in zip(placed, offsets, strict=True):
            block.offset = offset
        return placed

    def _admitted(self, blocks: Sequence[Block]) -> list[Block]:
        """Those of new blocks that the eviction policy admits: of a chain up to the first that it
        does not."""
        admitted: list[Block] = []
        refused: set[BlockKey | None] = set()
        for block in blocks:
            if block.parent not in refused and self._host.admits(block.key, block.parent):
                admitted.append(block)
            else:
                refused.add(block.key)
                self._host.refuse((block,), Refusal.POLICY)
        return admitted

    def _fill_up(
        self, offsets: list[int], slot_bytes: int, count: int, tenant: Tenant
    ) -> list[int]:
        """Evicts for further slots, ``count`` with those at ``offsets``; returns all offsets,
        ascending."""
        while len(offsets) < count and self._make_room(slot_bytes, count - len(offsets)):
            more = self._host.take(slot_bytes, count - len(offsets), tenant)
            if not more:
                break
            offsets += more
        offsets.sort()
        return offsets

    def drop(self, keys: Sequence[BlockKey], cause: Cause) -> None:
        """Drops blocks from the host, clean or not, except leased ones. Slots of blocks that are
        being written are freed when that ends."""
        host = self._host
        blocks = [host.blocks[key] for key in keys]
        going = [block for block in blocks if not block.leases]
        for block in blocks:
            if block.leases:
                host.set_stored(block, False)
        host.withdraw(going, cause)
        for block in going:
            self._writer.withdrawn(block)
            if not block.io_refs:
                host.free(block)

    def trim(self, most: int) -> bool:
        """Evicts up to ``most`` blocks if the host is above its high watermark (or the limit was
        lowered), until it is at the low one. False if there is nothing left to do, or nothing
        possible now."""
        limit, used = self._host.slots.limit_bytes, self._host.slots.used_bytes
        if used > self._marks.high * limit:
            self._trimming = True
        surplus = used - self._marks.low * limit
        if not self._trimming or surplus <= 0:
            self._trimming = False
            return False
        going: list[Block] = []
        for block in self._host.victims(most):
            if surplus <= 0:
                break
            going.append(block)
            surplus -= block.slot_bytes
        return self._evict(going) > 0

    # -- within a tenant's limit -----------------------------------------------------------

    def _within_limit(self, tenant: Tenant, slot_bytes: int, count: int) -> int:
        """How many of ``count`` slots the tenant may have. Evicts its own coldest blocks if
        needed."""
        accounts = self._host.accounts
        for offer in (True, False):  # last what is only to be offered to the remote tier yet
            excess = accounts.excess(tenant, count * slot_bytes)
            if not excess:
                return count
            wanted = None if offer else lambda block: block.stored
            going = self._host.victims_of(tenant, excess, wanted)
            accounts.limited(tenant, evicted=self._evict(going, Cause.QUOTA, offer))
        excess = accounts.excess(tenant, count * slot_bytes)
        fitting = max(0, count - -(-excess // slot_bytes))
        accounts.limited(tenant, refused=count - fitting)
        return fitting

    # -- making room -----------------------------------------------------------------------

    def _make_room(self, slot_bytes: int, count: int) -> bool:
        """Evicts for ``count`` slots of that size. False if no block could be evicted."""
        cold: list[Block] = []
        if self._host.has_idle(slot_bytes, others=True):
            cold = self._host.victims(max(64, count))
            others = sum(block.slot_bytes != slot_bytes for block in cold)
            if others * 2 > len(cold) and self._take_over(slot_bytes, cold):
                return True
        if self._host.has_idle(slot_bytes) and self._evict_own(slot_bytes, count):
            return True
        return bool(cold) and self._take_over(slot_bytes, cold)

    def _evict_own(self, slot_bytes: int, count: int) -> bool:
        """Evicts blocks of that size class; among the coldest, clean ones first."""
        host, writer = self._host, self._writer
        looked_at = count + max(count, _LEEWAY) if writer.has_below else count
        victims = host.victims(looked_at, slot_bytes)
        if writer.has_below:
            victims.sort(key=lambda block: not writer.is_clean(block))
        if self._evict(victims[:count]):
            return True
        if not (victims and host.stored[slot_bytes]):
            return False
        # Whatever is cold is on its way down now; what is there already goes in its stead, and
        # last what is only to be offered to the remote tier yet.
        if self._evict(host.victims(count, slot_bytes, writer.is_clean)):
            return True
        stored = host.victims(count, slot_bytes, lambda block: block.stored)
        return self._evict(stored, offer=False) > 0

    def _take_over(self, slot_bytes: int, cold: Sequence[Block]) -> bool:
        """Empties extents of other size classes to make space for a slot of this size. ``cold``:
        the coldest blocks of all sizes."""
        host = self._host
        extents = host.extents_to_empty(slot_bytes)
        cost = {base: float(extent.blocks) for base, extent in extents.items()}
        for rank, block in enumerate(cold):  # the coldest cost nothing
            if block.base in cost:
                cost[block.base] -= 1.0 - rank / len(cold)
        window = host.slots.window(slot_bytes, cost)
        if window is None:
            return False
        going = host.blocks_in(frozenset(window))
        return self._evict(going) == len(going)  # otherwise some are stored first

    def _evict(
        self, blocks: Sequence[Block], cause: Cause = Cause.CAPACITY, offer: bool = True
    ) -> int:
        """Evicts idle blocks, except those that must be written first (without ``offer``: to the
        tier that counts only). Returns their number."""
        writer = self._writer
        if writer.has_below:
            dirty = [b for b in blocks if not (writer.is_clean(b) if offer else b.stored)]
            staying = writer.leaving(dirty) if dirty else ()
            blocks = [block for block in blocks if block.key not in staying]
        self._host.withdraw(blocks, cause)
        for block in blocks:
            writer.withdrawn(block)
            self._host.free(block)
        return len(blocks)
