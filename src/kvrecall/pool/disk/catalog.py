"""The contents of the disk, in memory: the entries of durable blocks, their slots to be freed, and
the tier's counters.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvrecall.block import NAMESPACE_BYTES, BlockKey, Tenant, TierName
from kvrecall.config import PoolTerms
from kvrecall.pool.counters import TierCounters
from kvrecall.pool.disk.index import Row
from kvrecall.pool.disk.slabs import slab_of
from kvrecall.pool.residents import BlockInfo, Resident, Residents, TenantUse
from kvrecall.pool.tier import Outcome

_STALE_S = 10.0  # a last use is written to the index again when it is older than this


class Entry(Resident):
    """A durable block. Only its catalog changes it."""

    __slots__ = ("address", "tag")

    def __init__(self, row: Row) -> None:
        super().__init__(row.key, row.parent, row.depth, row.nbytes, row.tenant)
        self.address = row.address
        self.tag = row.tag

    def moved(self, address: int) -> Entry:
        """The same block in another slot."""
        other = copy.copy(self)
        other.address = address
        other.io_refs = 0
        return other


@dataclass(frozen=True, slots=True)
class SlabUse:
    """The number of blocks in a slab, of those that cannot be moved or dropped now, and of pinned
    ones."""

    blocks: int = 0
    fixed: int = 0
    pinned: int = 0


class Catalog(Residents[Entry]):
    """The entries of one disk tier. The methods defined here are thread-safe; they never wait for
    I/O.

    A forgotten entry is not found from that moment on. Its slot is passed to the flusher
    (``take_pending_free``), which deletes the row before the slot is reused.
    """

    def __init__(
        self,
        policy: str,
        capacity_blocks: int,
        capacity_bytes: Callable[[], int],
        clock: Callable[[], float],
        terms: PoolTerms,
    ) -> None:
        super().__init__(TierName.DISK, policy, capacity_blocks, capacity_bytes, clock, terms)
        self._lock = threading.Lock()
        self._pending_free: list[int] = []
        self._unnoted_uses: dict[int, int] = {}  # seconds by address, not in the index yet
        self._unnoted_pins: dict[int, int] = {}  # 1 or 0 by address, not in the index yet
        self.used_bytes = 0

    def __len__(self) -> int:
        return len(self.blocks)

    def __contains__(self, key: BlockKey) -> bool:
        return key in self.blocks

    def depth_of(self, key: BlockKey) -> int | None:
        entry = self.blocks.get(key)
        return None if entry is None else entry.depth

    def infos(self, unused_since: float | None = None) -> list[BlockInfo]:
        """Every block, or those unused since that wall-clock second."""
        with self._lock:
            entries = list(self.blocks.values())
        if unused_since is not None:
            entries = [entry for entry in entries if entry.used < unused_since]
        return [entry.info(TierName.DISK) for entry in entries]

    def resize_policy(self, capacity_blocks: int) -> None:
        with self._lock:
            super().resize_policy(capacity_blocks)

    # -- coming ----------------------------------------------------------------------------

    def recover(self, rows: Iterable[Row]) -> None:
        """Takes over the blocks of an earlier process, least recently used first."""
        with self._lock:
            used = now = self.now()
            for row in rows:
                if row.pinned:
                    self.pins.add(row.key)
                if row.used != used:
                    used = min(float(row.used), now)  # one object for all rows of a second
                self._take_in(row, used, row.pinned)

    def publish(self, rows: Iterable[Row]) -> None:
        """Makes durable blocks visible."""
        with self._lock:
            now = self.now()
            for row in rows:
                self._take_in(row, now, None)

    def _take_in(self, row: Row, used: float, pinned: bool | None) -> None:
        entry = Entry(row)
        above = self.blocks.get(row.parent) if row.parent is not None else None
        if above is not None:
            entry.parent = above.key  # the same object
        self.used_bytes += entry.slot_bytes
        self.accounts.charge(entry.tenant, entry.slot_bytes)
        if pinned is None:
            pinned = entry.key in self.pins and self.may_pin(entry)
        self.insert(entry, slab_of(entry.address), used, pinned)
        if pinned != row.pinned:
            self._unnoted_pins[entry.address] = int(pinned)

    # -- in use ----------------------------------------------------------------------------

    def acquire(self, key: BlockKey) -> Entry | None:
        """Protects the block's slot for a read, until ``release``. None if the block is not
        here."""
        with self._lock:
            entry = self.blocks.get(key)
            if entry is not None:
                self.begin_io(entry)
            return entry

    def release(self, entry: Entry) -> None:
        with self._lock:
            self.end_io(entry)
            if entry.extent is None and not entry.io_refs:  # forgotten meanwhile
                self._pending_free.append(entry.address)

    def touch(
        self,
        chain: Sequence[BlockKey],
        hanging: Sequence[BlockKey] = (),
        ending: Sequence[BlockKey] = (),
        stale_s: float = _STALE_S,
    ) -> list[Entry]:
        with self._lock:
            stale = super().touch(chain, hanging, ending, stale_s)
            for entry in stale:
                self._unnoted_uses[entry.address] = int(entry.used)
            return stale

    def take_unnoted_uses(self, limit: int) -> list[tuple[int, int]]:
        """``(second, address)`` of last uses not yet written to the index."""
        with self._lock:
            uses = self._unnoted_uses
            taken = [uses.popitem() for _ in range(min(limit, len(uses)))]
            return [(second, address) for address, second in taken]

    def pin(self, keys: Iterable[BlockKey]) -> list[Entry]:
        with self._lock:
            return self._note_pins(super().pin(keys))

    def unpin(self, keys: Iterable[BlockKey]) -> list[Entry]:
        with self._lock:
            return self._note_pins(super().unpin(keys))

    def _note_pins(self, changed: list[Entry]) -> list[Entry]:
        for entry in changed:
            self._unnoted_pins[entry.address] = int(entry.pinned)
        return changed

    def pinned_keys(self) -> frozenset[BlockKey]:
        """All pinned keys, of blocks here or not."""
        with self._lock:
            return frozenset(self.pins)

    def take_unnoted_pins(self, limit: int) -> list[tuple[int, int]]:
        """``(1 or 0, address)`` of blocks pinned or unpinned, not yet written to the index."""
        with self._lock:
            pins = self._unnoted_pins
            taken = [pins.popitem() for _ in range(min(limit, len(pins)))]
            return [(pinned, address) for address, pinned in taken]

    def return_unnoted_pins(self, pins: Iterable[tuple[int, int]]) -> None:
        """Returns entries that could not be written; newer ones override them."""
        with self._lock:
            for pinned, address in pins:
                self._unnoted_pins.setdefault(address, pinned)

    # -- going -----------------------------------------------------------------------------

    def forget(self, keys: Iterable[BlockKey]) -> int:
        """Drops blocks; returns how many were here."""
        with self._lock:
            return sum(self._forget(key) for key in keys)

    def forget_slab(self, number: int) -> int:
        """Drops all blocks of a slab."""
        with self._lock:
            slab = self._extents.get(number)
            return 0 if slab is None else sum(self._forget(key) for key in list(slab.blocks))

    def forget_namespace(self, digest: bytes, but_of: int) -> int:
        """Drops the blocks of a namespace whose size is not ``but_of`` bytes."""
        with self._lock:
            keys = [
                key
                for key, entry in self.blocks.items()
                if entry.nbytes != but_of and key[:NAMESPACE_BYTES] == digest
            ]
            return sum(self._forget(key) for key in keys)

    def forget_all(self) -> None:
        with self._lock:
            self.pins.clear()
            for key in list(self.blocks):
                self._forget(key)

    def evict(self, count: int, slot_bytes: int) -> int:
        """Drops up to ``count`` blocks of that slot size, the least valuable ones."""
        with self._lock:
            return self._evict(self.victims(count, slot_bytes))

    def evict_bytes(self, nbytes: int) -> int:
        """Drops the least valuable blocks of any size until that many bytes are freed, or none can
        be. Returns the number of bytes."""
        given = 0
        while given < nbytes:
            going: list[Entry] = []
            with self._lock:
                for entry in self.victims(256):
                    if given >= nbytes:
                        break
                    given += entry.slot_bytes
                    going.append(entry)
                self._evict(going)
            if not going:
                break
        return given

    def make_way(self, tenant: Tenant, nbytes: int, parent: BlockKey | None) -> int:
        """Evicts the tenant's own coldest blocks so that it may store ``nbytes`` more below
        ``parent``, whose ancestors stay; evicts none if the parent is not here, because the new
        blocks would then be useless. Returns by how much the limit would still be exceeded."""
        with self._lock:
            excess = self.accounts.excess(tenant, nbytes)
            orphan = parent is not None and parent not in self.blocks
            if not excess or orphan:
                return excess
            spared: set[BlockKey] = set()
            while parent is not None and parent not in spared:
                spared.add(parent)
                above = self.blocks.get(parent)
                parent = None if above is None else above.parent
            going = self.victims_of(tenant, excess, lambda entry: entry.key not in spared)
            self.accounts.evict(tenant, self._evict(going))
            return max(0, excess - sum(entry.slot_bytes for entry in going))

    def _evict(self, entries: Sequence[Entry]) -> int:
        for entry in entries:
            self._forget(entry.key)
        self.evictions += len(entries)
        return len(entries)

    def _forget(self, key: BlockKey) -> bool:
        if key not in self.blocks:
            return False
        entry = self.remove(key)
        self.accounts.refund(entry.tenant, entry.slot_bytes)
        self._unnoted_uses.pop(entry.address, None)
        self._unnoted_pins.pop(entry.address, None)
        self.used_bytes -= entry.slot_bytes
        if not entry.io_refs:
            self._pending_free.append(entry.address)
        return True

    def take_pending_free(self, limit: int) -> list[int]:
        """Slots whose rows are to be deleted; the caller owns them now."""
        with self._lock:
            taken, self._pending_free = self._pending_free[:limit], self._pending_free[limit:]
            return taken

    def add_pending_free(self, addresses: Iterable[int]) -> None:
        """Adds (or returns) slots to the list of those whose rows are to be deleted."""
        with self._lock:
            self._pending_free.extend(addresses)

    # -- limits, and what the reclaimer goes by --------------------------------------------

    def refuse(self, tenant: Tenant, blocks: int) -> None:
        """Counts blocks not stored because of a tenant's limit."""
        with self._lock:
            self.accounts.refuse(tenant, blocks)

    def tenants(self) -> list[TenantUse]:
        """Tenants that hold blocks."""
        with self._lock:
            return self.accounts.uses()

    def admits(self, key: BlockKey, parent: BlockKey | None, depth: int) -> bool:
        with self._lock:
            return super().admits(key, parent, depth)

    def coldest(self, count: int) -> list[Entry]:
        """The ``count`` least valuable blocks of any size."""
        with self._lock:
            return self.victims(count)

    def slab_uses(self) -> dict[int, SlabUse]:
        """The use of each slab that holds a block, by its number."""
        with self._lock:
            return {
                number: SlabUse(len(slab.blocks), slab.fixed, slab.pinned)
                for number, slab in self._extents.items()
            }

    def in_order(self, keys: Sequence[BlockKey]) -> list[BlockKey]:
        """The blocks that are here, in the order of their addresses on the medium."""
        with self._lock:
            placed = [(self.blocks[key].address, key) for key in keys if key in self.blocks]
        return [key for _, key in sorted(placed)]

    def in_slab(self, number: int) -> list[Entry]:
        """The blocks of a slab: the pinned first, then the latest used."""
        with self._lock:
            slab = self._extents.get(number)
            entries = [] if slab is None else [self.blocks[key] for key in slab.blocks]
        return sorted(entries, key=lambda e: (not e.pinned, -e.used))

    def relocate(self, old: Entry, address: int) -> bool:
        """Records that the block of ``old`` was copied to ``address`` and its row updated. False if
        it is gone meanwhile: the caller then owns the new slot. Reads of the old slot may still be
        in flight."""
        with self._lock:
            if self.blocks.get(old.key) is not old:
                return False
            self.replace(old, old.moved(address), slab_of(address))
            for notes in (self._unnoted_uses, self._unnoted_pins):
                if old.address in notes:
                    notes[address] = notes.pop(old.address)
            return True


class DiskCounters(TierCounters):
    """Counters of one disk tier, and its reads in flight. Thread-safe."""

    def __init__(self) -> None:
        super().__init__("disk")
        self.reading = 0  # gets not done

    def reads_began(self, count: int) -> None:
        with self._changed:
            self.reading += count

    def read_done(self, outcome: Outcome, seconds: float) -> None:
        super().read_done(outcome, seconds)
        with self._changed:
            self.reading -= 1
            if not self.reading:
                self._changed.notify_all()

    def fault(self, what: str, error: Exception) -> None:
        """An operation of the medium failed: counts and logs it."""
        self.failed()
        self.warn(f"{what}: {error}")

    def yield_to_reads(self, at_most_s: float) -> None:
        """Waits until no read is queued, so that loads have priority over stores; but not
        forever."""
        until = time.monotonic() + at_most_s
        with self._changed:
            while self.reading and (left := until - time.monotonic()) > 0:
                self._changed.wait(left)
