"""The host tier: blocks in slots of the arena; it evicts idle blocks to make room for new ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from kvrecall.block import SHARED, BlockKey, Tenant, TierName, is_tail
from kvrecall.config import PoolTerms
from kvrecall.pool.changes import Cause
from kvrecall.pool.departures import Refusal
from kvrecall.pool.entries import PINNED, BlockInfo, EntryTable, Extent, Use
from kvrecall.pool.hints import Advice
from kvrecall.pool.slots import ArenaSlots, slot_bytes_of

if TYPE_CHECKING:
    from kvrecall.pool.writer import Writer

_LEEWAY = 16  # blocks passed over, at least, to find one that is clean


class Block:
    """A slot of the arena and the block in it. Only the host store changes it."""

    __slots__ = (
        "base", "checksum", "depth", "io_refs", "key", "leases", "nbytes", "number", "offset",
        "parent", "slot_bytes", "stored", "tenant", "tries",
    )  # fmt: skip

    def __init__(
        self,
        key: BlockKey,
        parent: BlockKey | None,
        depth: int,
        offset: int,
        nbytes: int,
        tenant: Tenant = SHARED,
    ) -> None:
        self.key = key
        self.parent = parent
        self.depth = depth
        self.offset = offset
        self.nbytes = nbytes
        self.slot_bytes = slot_bytes_of(nbytes)
        self.tenant = tenant
        self.number = -1  # its entry in the host; -1: it is not visible
        self.base = -1  # of its extent
        self.leases = 0  # recalls that use the slot
        self.io_refs = 0  # reads or writes of the slot under way
        self.stored = False  # the tier below that counts has it too
        self.tries = 0  # failed attempts to store it there
        self.checksum: bytes | None = None  # while it may be needed, if it is known


class HostStore(EntryTable):
    """The committed blocks of an arena. Not thread-safe: whoever has its pool's lock owns it; never
    waits.

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

    def publish(self, blocks: Iterable[Block]) -> None:
        """Makes filled blocks visible."""
        now = self.now()
        for block in blocks:
            number = block.number = self._enter(
                block.key, block.parent, block.depth, block.nbytes, block.tenant, now
            )
            self.blocks[block.key] = self._numbered[number] = block
            block.base = self.slots.extent_of(block.slot_bytes, block.offset)
            self._place(number)
            if block.key in self.pins and self._may_pin(number):
                self._set_pinned(number, True)
            self._settle((number,))
            if block.stored:
                self.stored[block.slot_bytes] += 1

    def withdraw(self, block: Block, cause: Cause) -> None:
        """Makes a block invisible; the caller frees its slot, after a write in flight."""
        self._leave(block.number, cause)
        del self.blocks[block.key], self._numbered[block.number]
        block.number = -1
        if block.stored:
            self.stored[block.slot_bytes] -= 1

    def use(
        self,
        chain: Sequence[BlockKey],
        hanging: Sequence[BlockKey] = (),
        ending: Sequence[BlockKey] = (),
        advice: Advice | None = None,
    ) -> None:
        """A request used these blocks, see ``Use``."""
        self._apply(Use(chain, self.now(), hanging, ending, advice))

    def set_stored(self, block: Block, stored: bool) -> None:
        """Records whether the tier below has the block."""
        if block.number >= 0:
            self.stored[block.slot_bytes] += stored - block.stored
        block.stored = stored

    def set_checksum(self, block: Block, checksum: bytes | None) -> None:
        """Records the checksum of the block's bytes."""
        block.checksum = checksum

    def count_failure(self, block: Block) -> None:
        """Records that storing the block below failed."""
        block.tries += 1

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
        """Visible blocks are in use."""
        self.leases += len(blocks)
        state, extents = self._state.cells, self._extents
        for block in blocks:
            if not (block.leases or block.io_refs or state[block.number] & PINNED):
                extents[block.base].fixed += 1
            block.leases += 1

    def unlease(self, blocks: Sequence[Block]) -> None:
        """Releases leases."""
        self.leases -= len(blocks)
        for block in blocks:
            block.leases -= 1
            self._is_used_less(block)

    def begin_io(self, block: Block) -> None:
        """The slot is being read or written; it is not reused before ``end_io``."""
        if block.number >= 0 and not (
            block.leases or block.io_refs or self._state.cells[block.number] & PINNED
        ):
            self._extents[block.base].fixed += 1
        block.io_refs += 1

    def end_io(self, block: Block) -> None:
        block.io_refs -= 1
        self._is_used_less(block)

    def _is_used_less(self, block: Block) -> None:
        number = block.number
        if number < 0 or block.leases or block.io_refs:
            return
        if not self._state.cells[number] & PINNED:
            self._extents[block.base].fixed -= 1
        if number in self._held:
            self._changed(number)

    def pin(self, keys: Iterable[BlockKey]) -> None:
        """Pins blocks of these keys, present or future, as far as ``pin_limit`` allows."""
        self._pin(keys)

    def unpin(self, keys: Iterable[BlockKey]) -> None:
        """Undoes ``pin``."""
        self._unpin(keys)

    # -- which go --------------------------------------------------------------------------

    def victims(
        self,
        count: int,
        slot_bytes: int | None = None,
        wanted: Callable[[Block], bool] | None = None,
    ) -> list[Block]:
        """Up to ``count`` idle blocks (of a slot size, that are ``wanted``), the least valuable
        first. Removes none."""
        block_of = self._numbered
        is_wanted = None if wanted is None else lambda number: wanted(block_of[number])
        return [block_of[number] for number in self._search(count, slot_bytes, is_wanted)]

    def victims_of(
        self, tenant: Tenant, nbytes: int, wanted: Callable[[Block], bool] | None = None
    ) -> list[Block]:
        """A limited tenant's idle blocks, coldest first, up to ``nbytes`` bytes."""
        block_of = self._numbered
        is_wanted = None if wanted is None else lambda number: wanted(block_of[number])
        return [block_of[number] for number in self._search_of(tenant, nbytes, is_wanted)]

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
            and self.slots.used_in(extent.slot_bytes, base) == extent.blocks
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
                self._refuse(blocks[fitting:], Refusal.QUOTA)
                blocks = blocks[:fitting]
                offsets = host.take(slot_bytes, len(blocks), tenant)
            if choosy:
                blocks = [*blocks[: len(offsets)], *self._admitted(blocks[len(offsets) :])]
            offsets = self._fill_up(offsets, slot_bytes, len(blocks), tenant)
            host.unlease(spared)
        placed = blocks[: len(offsets)]
        self._refuse(blocks[len(offsets) :], Refusal.ROOM)
        for block, offset in zip(placed, offsets, strict=True):
            block.offset = offset
        return placed

    def _admitted(self, blocks: Sequence[Block]) -> list[Block]:
        """Those of new blocks that the eviction policy admits: of a chain up to the first that it
        does not."""
        admitted: list[Block] = []
        refused: set[BlockKey | None] = set()
        for block in blocks:
            if block.parent not in refused and self._host.admits(
                block.key, block.parent, block.depth
            ):
                admitted.append(block)
            else:
                refused.add(block.key)
                self._host.departures.note(block.key, Refusal.POLICY)
        return admitted

    def _refuse(self, blocks: Sequence[Block], why: Refusal) -> None:
        """Remembers why these blocks have no slot."""
        for block in blocks:
            self._host.departures.note(block.key, why)

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
        for key in keys:
            block = self._host.blocks[key]
            if block.leases:
                self._host.set_stored(block, False)
                continue
            self._withdraw(block, cause)
            if not block.io_refs:
                self._host.free(block)

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
        excess = accounts.excess(tenant, count * slot_bytes)
        if excess:
            going = self._host.victims_of(tenant, excess)
            accounts.evict(tenant, self._evict(going, Cause.QUOTA))
            excess = accounts.excess(tenant, count * slot_bytes)
        if excess:  # last what is only to be offered to the remote tier yet
            going = self._host.victims_of(tenant, excess, lambda block: block.stored)
            accounts.evict(tenant, self._evict(going, Cause.QUOTA, offer=False))
            excess = accounts.excess(tenant, count * slot_bytes)
        if excess:
            fitting = max(0, count - -(-excess // slot_bytes))
            accounts.refuse(tenant, count - fitting)
            return fitting
        return count

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
        if self._evict(going) < len(going):
            return False  # some are stored first
        host.slots.take_back(window)
        return True

    def _evict(
        self, blocks: Sequence[Block], cause: Cause = Cause.CAPACITY, offer: bool = True
    ) -> int:
        """Evicts idle blocks, except those that must be written first (without ``offer``: to the
        tier that counts only). Returns their number."""
        writer = self._writer
        staying: Collection[BlockKey] = ()
        if writer.has_below:
            dirty = [b for b in blocks if not (writer.is_clean(b) if offer else b.stored)]
            staying = writer.leaving(dirty) if dirty else ()
        going = [block for block in blocks if block.key not in staying] if staying else blocks
        for block in going:
            self._withdraw(block, cause)
            self._host.free(block)
        self._host.evictions += len(going)
        return len(going)

    def _withdraw(self, block: Block, cause: Cause) -> None:
        self._host.withdraw(block, cause)
        self._writer.withdrawn(block)
