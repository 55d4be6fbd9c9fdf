"""What the disk holds, in memory: entries by key, their order for eviction, their pins."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from kvrecall.block import NAMESPACE_BYTES, BlockKey
from kvrecall.pool.clock import SteadyClock
from kvrecall.pool.disk.index import Row
from kvrecall.pool.eviction import EvictionPolicy, make_policy
from kvrecall.pool.slots import slot_bytes_of

_SLAB_SHIFT = 40
_STALE_SECONDS = 10  # a last use is written to the index again when it is older than this


class Entry:
    """A durable block. Only its catalog changes it."""

    __slots__ = ("address", "checksum", "depth", "gone", "key", "nbytes", "pins", "used")

    def __init__(self, row: Row) -> None:
        self.key = row.key
        self.address = row.address
        self.depth = row.depth
        self.nbytes = row.nbytes
        self.checksum = row.checksum
        self.used = row.used  # wall-clock second noted in the index, or about to be
        self.pins = 0  # reads under way
        self.gone = False  # dropped while pinned


class Catalog:
    """The entries of one disk tier. Thread-safe; never waits for I/O.

    An entry that is forgotten is not found from that moment on. Its slot is handed to the flusher
    (``take_condemned``), which deletes the row before the slot is used again.
    """

    def __init__(self, policy: str, capacity_blocks: int, clock: Callable[[], float]) -> None:
        self._policy_name = policy
        self._policy: EvictionPolicy = make_policy(policy, max(1, capacity_blocks))
        self._clock = SteadyClock(clock)
        self._lock = threading.Lock()
        self._entries: dict[BlockKey, Entry] = {}
        self._condemned: list[int] = []
        self._uses: dict[int, int] = {}
        self.used_bytes = 0
        self.evictions = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._entries

    def depth_of(self, key: BlockKey) -> int | None:
        entry = self._entries.get(key)
        return None if entry is None else entry.depth

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
                used = min(float(row.used), now)  # a policy's time never decreases
                self._entries[row.key] = Entry(row)
                self._policy.insert(row.key, row.parent, row.depth, used)
                self.used_bytes += slot_bytes_of(row.nbytes)

    def publish(self, rows: Iterable[Row]) -> None:
        """Makes durable blocks visible."""
        with self._lock:
            now = self._clock()
            for row in rows:
                self._entries[row.key] = Entry(row)
                self._policy.insert(row.key, row.parent, row.depth, now)
                self.used_bytes += slot_bytes_of(row.nbytes)

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
            for key in chain:
                entry = self._entries.get(key)
                if entry is not None and second - entry.used >= _STALE_SECONDS:
                    entry.used = second
                    self._uses[entry.address] = second

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
            for key in list(self._entries):
                self._forget(key)

    def evict(self, count: int, slot_bytes: int) -> int:
        """Drops up to ``count`` blocks of that slot size, the least valuable ones."""

        def evictable(key: BlockKey) -> bool:
            entry = self._entries[key]
            return not entry.pins and slot_bytes_of(entry.nbytes) == slot_bytes

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
            return [(entry.address, slot_bytes_of(entry.nbytes)) for entry in entries]

    def blocks_by_slab(self) -> Counter[int]:
        with self._lock:
            return Counter(entry.address >> _SLAB_SHIFT for entry in self._entries.values())

    def pinned_slabs(self) -> set[int]:
        """Slabs with a block that is being read."""
        with self._lock:
            return {e.address >> _SLAB_SHIFT for e in self._entries.values() if e.pins}

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
        self._uses.pop(entry.address, None)
        self.used_bytes -= slot_bytes_of(entry.nbytes)
        entry.gone = True
        if not entry.pins:
            self._condemned.append(entry.address)
        return True
