"""What the disk holds, in memory: entries by key, their order for eviction, their pins."""

from __future__ import annotations

import copy
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from kvrecall.block import NAMESPACE_BYTES, BlockKey, Tenant, TierName
from kvrecall.config import TenantRules
from kvrecall.pool.accounts import Accounts, TenantUse
from kvrecall.pool.clock import SteadyClock
from kvrecall.pool.disk.index import Row
from kvrecall.pool.eviction import EvictionPolicy, make_policy
from kvrecall.pool.held import Held
from kvrecall.pool.slots import slot_bytes_of

_DISK = TierName.DISK
_SLAB_SHIFT = 40
_STALE_SECONDS = 10  # a last use is written to the index again when it is older than this


class Entry:
    """A durable block. Only its catalog changes it."""

    __slots__ = (
        "address",
        "depth",
        "gone",
        "key",
        "nbytes",
        "parent",
        "pinned",
        "pins",
        "proof",
        "slot_bytes",
        "tenant",
        "used",
    )

    def __init__(self, row: Row) -> None:
        self.key = row.key
        self.parent = row.parent
        self.address = row.address
        self.depth = row.depth
        self.nbytes = row.nbytes
        self.slot_bytes = slot_bytes_of(row.nbytes)
        self.proof = row.proof
        self.used = row.used  # wall-clock second noted in the index, or about to be
        self.tenant = row.tenant
        self.pinned = False  # not to be evicted, somebody said
        self.pins = 0  # reads under way
        self.gone = False  # dropped while pinned

    def moved(self, address: int) -> Entry:
        """The same block in another slot."""
        other = copy.copy(self)
        other.address = address
        other.pins = 0
        return other


class Catalog:
    """The entries of one disk tier. Thread-safe; never waits for I/O.

    An entry that is forgotten is not found from that moment on. Its slot is handed to the flusher
    (``take_condemned``), which deletes the row before the slot is used again. Pinned blocks (in
    the sense of ``keep``) are not known to the eviction policy.
    """

    def __init__(
        self,
        policy: str,
        capacity_blocks: int,
        clock: Callable[[], float],
        rules: TenantRules | None = None,
        capacity_bytes: Callable[[], int] = lambda: 0,
    ) -> None:
        """``rules`` bound tenants to shares of ``capacity_bytes()``."""
        self._policy_name = policy
        self._policy: EvictionPolicy = make_policy(policy, max(1, capacity_blocks))
        self._clock = SteadyClock(clock)
        self._rules = rules or TenantRules()
        self._capacity_bytes = capacity_bytes
        bounded = any(terms.disk is not None for terms in self._rules.all)
        self._accounts = Accounts(bounded, self._limit_of)
        self._lock = threading.Lock()
        self._entries: dict[BlockKey, Entry] = {}
        self._condemned: list[int] = []
        self._uses: dict[int, int] = {}
        self._kept: set[BlockKey] = set()
        self._keeps: dict[int, int] = {}  # by address, 1 or 0: to be noted in the index
        self.used_bytes = 0
        self.pinned_bytes = 0
        self.evictions = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._entries

    def depth_of(self, key: BlockKey) -> int | None:
        entry = self._entries.get(key)
        return None if entry is None else entry.depth

    def held(self, unused_since: float | None = None) -> list[Held]:
        """Every block, or those not used since that wall-clock second."""
        with self._lock:
            entries = list(self._entries.values())
        return [
            Held(e.key, _DISK, e.tenant, e.parent, e.depth, e.slot_bytes, e.used, e.pinned)
            for e in entries
            if unused_since is None or e.used < unused_since
        ]

    def resize(self, capacity_blocks: int) -> None:
        """Fits the policy to a tier of that many blocks, if nothing is in it yet."""
        with self._lock:
            if not self._entries:
                self._policy = make_policy(self._policy_name, max(1, capacity_blocks))

    def recover(self, rows: Iterable[Row]) -> None:
        """Takes in what an earlier process left, least recently used first."""
        with self._lock:
            now = self._clock()
            for row in rows:
                if row.pinned:
                    self._kept.add(row.key)
                self._take_in(row, min(float(row.used), now))  # a policy's time never decreases

    def publish(self, rows: Iterable[Row]) -> None:
        """Makes durable blocks visible."""
        with self._lock:
            now = self._clock()
            for row in rows:
                self._take_in(row, now)

    def _take_in(self, row: Row, used: float) -> None:
        entry = self._entries[row.key] = Entry(row)
        above = self._entries.get(row.parent) if row.parent is not None else None
        if above is not None:
            entry.parent = above.key  # the same object
        self.used_bytes += entry.slot_bytes
        self._accounts.charge(entry.tenant, entry.slot_bytes)
        if row.key in self._kept:
            entry.pinned = True
            self.pinned_bytes += entry.slot_bytes
        else:
            self._loosen(entry, used)
        if entry.pinned != row.pinned:
            self._keeps[entry.address] = int(entry.pinned)

    def _loosen(self, entry: Entry, used: float) -> None:
        """From now on the block can be evicted."""
        self._policy.insert(entry.key, entry.parent, entry.depth, used)
        self._accounts.join(entry.tenant, entry.key, entry.parent)

    # -- pinned by somebody ----------------------------------------------------------------

    def keep(self, keys: Iterable[BlockKey]) -> None:
        """Blocks of these keys, here or to come, are not evicted."""
        with self._lock:
            for key in keys:
                self._kept.add(key)
                entry = self._entries.get(key)
                if entry is not None and not entry.pinned:
                    self._policy.remove(key)
                    self._accounts.leave(entry.tenant, key)
                    entry.pinned = True
                    self.pinned_bytes += entry.slot_bytes
                    self._keeps[entry.address] = 1

    def unkeep(self, keys: Iterable[BlockKey]) -> None:
        """Takes ``keep`` back."""
        with self._lock:
            now = self._clock()
            for key in keys:
                self._kept.discard(key)
                entry = self._entries.get(key)
                if entry is not None and entry.pinned:
                    entry.pinned = False
                    self.pinned_bytes -= entry.slot_bytes
                    self._loosen(entry, now)
                    self._keeps[entry.address] = 0

    def keeps(self, key: BlockKey) -> bool:
        """Whether the block is, or will be, pinned."""
        return key in self._kept

    def kept(self) -> frozenset[BlockKey]:
        """All keys that are pinned."""
        with self._lock:
            return frozenset(self._kept)

    def take_keeps(self, limit: int) -> list[tuple[int, int]]:
        """``(1 or 0, address)`` of pins not yet noted in the index."""
        with self._lock:
            taken = [self._keeps.popitem() for _ in range(min(limit, len(self._keeps)))]
            return [(pinned, address) for address, pinned in taken]

    def give_keeps(self, keeps: Iterable[tuple[int, int]]) -> None:
        """Gives back what could not be noted; what is newer stands."""
        with self._lock:
            for pinned, address in keeps:
                self._keeps.setdefault(address, pinned)

    # -- limits of tenants -----------------------------------------------------------------

    def _limit_of(self, tenant: Tenant) -> int | None:
        amount = self._rules.of(tenant).disk
        return None if amount is None else amount.of(self._capacity_bytes())

    def make_way(self, tenant: Tenant, nbytes: int, parent: BlockKey | None) -> int:
        """Evicts the tenant's own coldest blocks so that it may store ``nbytes`` more below
        ``parent``, whose ancestors stay; if the parent is not here, which makes them useless,
        nothing goes. Returns by how much it would still be too much."""
        with self._lock:
            excess = self._accounts.excess(tenant, nbytes)
            orphan = parent is not None and parent not in self._entries
            if not excess or orphan:
                return excess
            spared: set[BlockKey] = set()
            while parent is not None and parent not in spared:
                spared.add(parent)
                above = self._entries.get(parent)
                parent = None if above is None else above.parent
            going: list[BlockKey] = []
            for key in self._accounts.oldest(tenant):
                if excess <= 0:
                    break
                if key not in spared and not self._entries[key].pins:
                    going.append(key)
                    excess -= self._entries[key].slot_bytes
            for key in going:
                self._forget(key)
            self.evictions += len(going)
            self._accounts.evict(tenant, len(going))
            return max(0, excess)

    def refuse(self, tenant: Tenant, blocks: int) -> None:
        """Blocks were not stored for the sake of a tenant's limit."""
        with self._lock:
            self._accounts.refuse(tenant, blocks)

    def uses(self) -> list[TenantUse]:
        """Tenants that hold something."""
        with self._lock:
            return self._accounts.uses()

    @property
    def over_quota(self) -> tuple[int, int]:
        """Blocks refused, and blocks evicted, for the sake of a tenant's limit."""
        return self._accounts.refused, self._accounts.evicted

    # -- reads under way -------------------------------------------------------------------

    def pin(self, key: BlockKey) -> Entry | None:
        """Keeps the block's slot until ``unpin``. None if the block is not here."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None:
                entry.pins += 1
            return entry

    def unpin(self, entry: Entry) -> None:
        with self._lock:
            entry.pins -= 1
            if entry.gone and not entry.pins:
                self._condemned.append(entry.address)

    def touch(self, chain: Sequence[BlockKey]) -> None:
        """``chain`` (prefix first) was used."""
        with self._lock:
            now = self._clock()
            second = int(now)
            self._policy.access(chain, now)
            last: Entry | None = None
            for key in chain:
                entry = self._entries.get(key)
                if entry is None:
                    continue
                last = entry
                if second - entry.used >= _STALE_SECONDS:
                    entry.used = second
                    self._uses[entry.address] = second
            if last is not None and self._accounts.is_bounded:
                self._accounts.access(last.tenant, chain)

    def forget(self, keys: Iterable[BlockKey]) -> int:
        """Drops blocks; returns how many were here."""
        with self._lock:
            return sum(self._forget(key) for key in keys)

    def forget_slab(self, number: int) -> int:
        """Drops all blocks of a slab."""
        with self._lock:
            keys = [k for k, e in self._entries.items() if e.address >> _SLAB_SHIFT == number]
            return sum(self._forget(key) for key in keys)

    def forget_namespace(self, digest: bytes, but_of: int) -> int:
        """Drops the blocks of a namespace that have not ``but_of`` bytes."""
        with self._lock:
            keys = [
                key
                for key, entry in self._entries.items()
                if entry.nbytes != but_of and key[:NAMESPACE_BYTES] == digest
            ]
            return sum(self._forget(key) for key in keys)

    def forget_all(self) -> None:
        with self._lock:
            self._kept.clear()
            for key in list(self._entries):
                self._forget(key)

    def evict(self, count: int, slot_bytes: int) -> int:
        """Drops up to ``count`` blocks of that slot size, the least valuable ones."""

        def evictable(key: BlockKey) -> bool:
            entry = self._entries[key]
            return not entry.pins and entry.slot_bytes == slot_bytes

        with self._lock:
            victims = self._policy.victims(count, evictable, self._clock())
            for key in victims:
                self._forget(key)
            self.evictions += len(victims)
            return len(victims)

    def admits(self, key: BlockKey, parent: BlockKey | None, depth: int) -> bool:
        """Whether the policy wants the block at the price of another. Asked when full."""
        with self._lock:
            return self._policy.admit(key, parent, depth, self._clock())

    def coldest(self, count: int) -> list[tuple[int, int]]:
        """``(address, slot bytes)`` of the ``count`` least valuable blocks of any size."""

        def evictable(key: BlockKey) -> bool:
            return not self._entries[key].pins

        with self._lock:
            keys = self._policy.victims(count, evictable, self._clock())
            entries = [self._entries[key] for key in keys]
            return [(entry.address, entry.slot_bytes) for entry in entries]

    def blocks_by_slab(self) -> tuple[Counter[int], Counter[int]]:
        """How many blocks, and how many pinned ones, each slab holds."""
        with self._lock:
            entries = list(self._entries.values())
        return (
            Counter(e.address >> _SLAB_SHIFT for e in entries),
            Counter(e.address >> _SLAB_SHIFT for e in entries if e.pinned),
        )

    def busy_slabs(self) -> set[int]:
        """Slabs with a block that is being read, or is pinned."""
        with self._lock:
            return {e.address >> _SLAB_SHIFT for e in self._entries.values() if e.pins or e.pinned}

    def in_order(self, keys: Sequence[BlockKey]) -> list[BlockKey]:
        """Those that are here, in the order in which they lie on the medium."""
        with self._lock:
            placed = [(self._entries[key].address, key) for key in keys if key in self._entries]
        return [key for _, key in sorted(placed)]

    def in_slab(self, number: int) -> list[Entry]:
        """The blocks of a slab: the pinned first, then the latest used."""
        with self._lock:
            entries = list(self._entries.values())
        found = [e for e in entries if e.address >> _SLAB_SHIFT == number]
        return sorted(found, key=lambda e: (not e.pinned, -e.used))

    def shed(self, nbytes: int) -> int:
        """Drops the least valuable blocks of any size until that many bytes are given up, or none
        can be. Returns how many bytes are."""
        given = 0
        while given < nbytes:
            with self._lock:
                keys = self._policy.victims(256, lambda k: not self._entries[k].pins, self._clock())
                for key in keys:
                    if given >= nbytes:
                        break
                    given += self._entries[key].slot_bytes
                    self._forget(key)
                    self.evictions += 1
            if not keys:
                break
        return given

    def relocate(self, old: Entry, address: int) -> bool:
        """The block of ``old`` was copied to ``address``, and its row says so. False if it is gone
        meanwhile: the caller owns the new slot. Reads of the old slot may still be under way."""
        with self._lock:
            if self._entries.get(old.key) is not old:
                return False
            self._entries[old.key] = old.moved(address)
            for notes in (self._uses, self._keeps):
                if old.address in notes:
                    notes[address] = notes.pop(old.address)
            return True

    def take_condemned(self, limit: int) -> list[int]:
        """Slots whose rows are to be deleted; the caller owns them now."""
        with self._lock:
            taken, self._condemned = self._condemned[:limit], self._condemned[limit:]
            return taken

    def condemn(self, addresses: Iterable[int]) -> None:
        """Gives slots (back) to the list of those whose rows are to be deleted."""
        with self._lock:
            self._condemned.extend(addresses)

    def take_uses(self, limit: int) -> list[tuple[int, int]]:
        """``(second, address)`` of last uses not yet noted in the index."""
        with self._lock:
            taken = [self._uses.popitem() for _ in range(min(limit, len(self._uses)))]
            return [(second, address) for address, second in taken]

    def _forget(self, key: BlockKey) -> bool:
        entry = self._entries.pop(key, None)
        if entry is None:
            return False
        self._policy.remove(key)
        self._accounts.leave(entry.tenant, key)
        self._accounts.refund(entry.tenant, entry.slot_bytes)
        self._uses.pop(entry.address, None)
        self._keeps.pop(entry.address, None)
        self.used_bytes -= entry.slot_bytes
        if entry.pinned:
            self.pinned_bytes -= entry.slot_bytes
        entry.gone = True
        if not entry.pins:
            self._condemned.append(entry.address)
        return True
