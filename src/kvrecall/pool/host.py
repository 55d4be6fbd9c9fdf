"""What the arena holds: blocks by key, their leases, who goes when room is short."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from kvrecall.block import BlockKey
from kvrecall.pool.clock import SteadyClock
from kvrecall.pool.eviction import EvictionPolicy, make_policy
from kvrecall.pool.room import ArenaRoom
from kvrecall.pool.slots import slot_bytes_of

_LEEWAY = 16  # blocks passed over, at least, to find one that a lower tier has


class Block:
    """A slot of the arena and the block in it. Only pool and host store change it."""

    __slots__ = ("depth", "key", "leases", "nbytes", "offset", "parent", "pins", "stored", "tries")

    def __init__(
        self, key: BlockKey, parent: BlockKey | None, depth: int, offset: int, nbytes: int
    ) -> None:
        self.key = key
        self.parent = parent
        self.depth = depth
        self.offset = offset
        self.nbytes = nbytes
        self.leases = 0  # recalls that copy from the slot
        self.pins = 0  # writes to a lower tier under way
        self.stored = False  # a lower tier has it too
        self.tries = 0  # failed attempts to store it there

    @property
    def slot_bytes(self) -> int:
        return slot_bytes_of(self.nbytes)


class HostStore:
    """The committed blocks of an arena. Not thread-safe; never waits.

    A slot is owned by the caller from ``allocate`` until it is given back with ``free`` or
    becomes a visible block with ``publish``.
    """

    def __init__(
        self,
        room: ArenaRoom,
        policy: str,
        prefer_stored: bool,
        clock: Callable[[], float],
    ) -> None:
        self.room = room
        self.blocks: dict[BlockKey, Block] = {}
        self.evictions = 0
        self.leases = 0
        self._policy_name = policy
        self._policy: EvictionPolicy = make_policy(policy, max(1, room.nbytes >> 20))
        self._prefer_stored = prefer_stored
        self._clock = SteadyClock(clock)

    def resize(self, capacity_blocks: int) -> None:
        """Fits the policy to so many blocks, if there are none yet."""
        if not self.blocks:
            self._policy = make_policy(self._policy_name, max(1, capacity_blocks))

    def allocate(self, nbytes: int, count: int, picky: Sequence[Block] = ()) -> list[int]:
        """Offsets of slots for ``count`` blocks, ascending; fewer if room cannot be made.

        If ``picky`` names these blocks, room is made only for as many as the policy wants.
        """
        slot_bytes = slot_bytes_of(nbytes)
        offsets = self.room.take(slot_bytes, count)
        if picky:
            wanted = itertools.takewhile(self._admits, picky[len(offsets) :])
            count = len(offsets) + sum(1 for _ in wanted)
        while len(offsets) < count:
            if not self._make_room(slot_bytes, count - len(offsets)):
                break
            more = self.room.take(slot_bytes, count - len(offsets))
            if not more:
                break
            offsets += more
        offsets.sort()
        return offsets

    def free(self, block: Block) -> None:
        """Gives the slot of a block back that is not (or no longer) visible."""
        self.room.give(block.slot_bytes, block.offset)

    def publish(self, block: Block) -> None:
        """Makes a filled block visible."""
        self.blocks[block.key] = block
        self._policy.insert(block.key, block.parent, block.depth, self._clock())

    def withdraw(self, key: BlockKey) -> Block:
        """Makes a block invisible; its slot is the caller's to free."""
        block = self.blocks.pop(key)
        self._policy.remove(key)
        return block

    def access(self, chain: Sequence[BlockKey]) -> None:
        """A request used ``chain`` (prefix first)."""
        self._policy.access(chain, self._clock())

    def lease(self, block: Block) -> None:
        block.leases += 1
        self.leases += 1

    def unlease(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            block.leases -= 1
            self.leases -= 1

    # -- making room -----------------------------------------------------------------------

    def _make_room(self, slot_bytes: int, count: int) -> bool:
        """Evicts for ``count`` slots of that size. False if nothing could be evicted."""
        cold: list[BlockKey] = []
        if self.room.has_others(slot_bytes):
            cold = self._policy.victims(max(64, count), self._is_idle, self._clock())
            others = sum(self.blocks[key].slot_bytes != slot_bytes for key in cold)
            if others * 2 > len(cold) and self._take_over(slot_bytes, cold):
                return True
        if self._evict_own(slot_bytes, count):
            return True
        return self._take_over(slot_bytes, cold)

    def _evict_own(self, slot_bytes: int, count: int) -> bool:
        """Evicts blocks of that size class, among the coldest those first that a lower tier
        has."""
        blocks = self.blocks

        def evictable(key: BlockKey) -> bool:
            block = blocks[key]
            return not (block.leases or block.pins) and block.slot_bytes == slot_bytes

        looked_at = count + max(count, _LEEWAY) if self._prefer_stored else count
        victims = self._policy.victims(looked_at, evictable, self._clock())
        if self._prefer_stored:
            victims.sort(key=lambda key: not blocks[key].stored)
        self._evict(victims[:count])
        return bool(victims)

    def _take_over(self, slot_bytes: int, cold: Sequence[BlockKey]) -> bool:
        """Empties extents of other size classes so that a slot of this size fits."""
        held: dict[int, list[BlockKey]] = {}
        fixed: set[int] = set()
        places: Counter[int] = Counter()
        for block in self.blocks.values():
            if block.slot_bytes == slot_bytes:
                continue
            base = self.room.extent_of(block.slot_bytes, block.offset)
            held.setdefault(base, []).append(block.key)
            places[base] += 1
            if block.leases or block.pins:
                fixed.add(base)
        cost = {base: float(len(keys)) for base, keys in held.items() if base not in fixed}
        for base, used in self.room.used_slots(slot_bytes).items():
            if used != places[base]:  # slots that are being filled
                cost.pop(base, None)
        for rank, key in enumerate(cold):  # the coldest cost nothing
            block = self.blocks[key]
            base = self.room.extent_of(block.slot_bytes, block.offset)
            if base in cost:
                cost[base] -= 1.0 - rank / len(cold)
        window = self.room.window(slot_bytes, cost)
        if window is None:
            return False
        for base in window.extents:
            self._evict(held[base])
        self.room.take_back(window)
        return True

    def _evict(self, keys: Iterable[BlockKey]) -> None:
        for key in keys:
            self.free(self.withdraw(key))
            self.evictions += 1

    def _admits(self, block: Block) -> bool:
        """Whether the policy wants the block at the price of another."""
        return self._policy.admit(block.key, block.parent, block.depth, self._clock())

    def _is_idle(self, key: BlockKey) -> bool:
        block = self.blocks[key]
        return not (block.leases or block.pins)
