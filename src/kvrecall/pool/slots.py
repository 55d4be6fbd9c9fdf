"""Slots for blocks of different sizes in one address space: runs of free bytes, size classes of
slots, and the classes of the arena, which take space from each other.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

ALIGNMENT = 4096
"""Slots start at and fill multiples of this, so that direct I/O can read and write them."""
_EXTENTS = 64  # a full-sized extent is this part of the arena


def slot_bytes_of(block_bytes: int) -> int:
    """Bytes of the slot that holds a block: its size class."""
    return -(-block_bytes // ALIGNMENT) * ALIGNMENT


class RunSet:
    """Disjoint runs ``[start, start + length)`` of free bytes; neighbours are merged.

    ``add`` and ``take`` cost O(1) whatever the number of runs (segregated fit by powers of two).
    """

    def __init__(self) -> None:
        self._length_at: dict[int, int] = {}
        self._start_at_end: dict[int, int] = {}
        self._bins: list[dict[int, None]] = [{} for _ in range(64)]
        self._filled = 0  # bit i: bin i has runs
        self.total = 0

    def add(self, start: int, length: int) -> None:
        """Frees a run that is not free now."""
        self.total += length
        end = start + length
        after = self._length_at.get(end)
        if after is not None:
            self._forget(end)
            end += after
        before = self._start_at_end.get(start)
        if before is not None:
            self._forget(before)
            start = before
        self._note(start, end - start)

    def take(self, length: int, unit: int) -> list[tuple[int, int]]:
        """Takes up to ``length`` bytes in whole ``unit`` pieces, in as few runs as possible.
        ``length`` is a multiple of ``unit``. Returns runs by ascending start; less than requested,
        or none, if no run has space for another unit."""
        taken: list[tuple[int, int]] = []
        while length > 0:
            start = self._fitting(length)
            if start is None:
                start = self._largest()
            if start is None:
                break
            whole = self._length_at[start]
            part = min(length, whole - whole % unit)
            if part == 0:
                break
            self._forget(start)
            self.total -= part
            if whole > part:
                self._note(start + part, whole - part)
            taken.append((start, part))
            length -= part
        taken.sort()
        return taken

    def has_run(self, length: int) -> bool:
        """Whether one run has space for ``length`` bytes (may miss a barely fitting one)."""
        return self._fitting(length) is not None

    def runs(self) -> list[tuple[int, int]]:
        """``(start, length)`` of every run, in no order."""
        return list(self._length_at.items())

    def remove_within(self, start: int, length: int) -> None:
        """Removes all free bytes in ``[start, start + length)``. O(number of runs)."""
        end = start + length
        inside = [
            (begin, begin + size)
            for begin, size in self._length_at.items()
            if begin < end and start < begin + size
        ]
        for begin, stop in inside:
            self._forget(begin)
            self.total -= min(stop, end) - max(begin, start)
            if begin < start:
                self._note(begin, start - begin)
            if stop > end:
                self._note(end, stop - end)

    def _note(self, start: int, length: int) -> None:
        self._length_at[start] = length
        self._start_at_end[start + length] = start
        self._bins[length.bit_length()][start] = None
        self._filled |= 1 << length.bit_length()

    def _forget(self, start: int) -> None:
        length = self._length_at.pop(start)
        del self._start_at_end[start + length]
        bin_ = self._bins[length.bit_length()]
        del bin_[start]
        if not bin_:
            self._filled ^= 1 << length.bit_length()

    def _fitting(self, length: int) -> int | None:
        own = length.bit_length()
        for tries, start in enumerate(self._bins[own]):
            if self._length_at[start] >= length:
                return start
            if tries == 8:
                break
        longer = self._filled >> own + 1
        if longer:
            return next(iter(self._bins[own + (longer & -longer).bit_length()]))
        return None

    def _largest(self) -> int | None:
        if not self._filled:
            return None
        bin_ = self._bins[self._filled.bit_length() - 1]
        return max(bin_, key=self._length_at.__getitem__) if len(bin_) < 9 else next(iter(bin_))


@dataclass(slots=True)
class _Extent:
    slots: int
    used: int


class SlotClass:
    """All slots of one size: extents are added to it, slots are taken from it and returned to it.
    Not thread-safe."""

    def __init__(self, slot_bytes: int) -> None:
        self.slot_bytes = slot_bytes
        self._runs = RunSet()
        self._extents: dict[int, _Extent] = {}
        self._bases: list[int] = []

    @property
    def free(self) -> int:
        return self._runs.total // self.slot_bytes

    @property
    def slots(self) -> int:
        return sum(extent.slots for extent in self._extents.values())

    def add_extent(self, base: int, slots: int, used: Iterable[int] = ()) -> None:
        """Adds space for ``slots`` slots from address ``base`` on; those at addresses ``used`` are
        taken already."""
        taken = sorted(used)
        self._extents[base] = _Extent(slots, len(taken))
        insort(self._bases, base)
        begin = base
        for address in [*taken, base + slots * self.slot_bytes]:
            if address > begin:
                self._runs.add(begin, address - begin)
            begin = address + self.slot_bytes

    def take(self, count: int) -> list[int]:
        """Addresses of up to ``count`` free slots, ascending, adjacent as far as possible."""
        size = self.slot_bytes
        addresses: list[int] = []
        for start, length in self._runs.take(count * size, size):
            addresses.extend(range(start, start + length, size))
        extents, bases = self._extents, self._bases
        for address in addresses:
            extents[bases[bisect_right(bases, address) - 1]].used += 1
        return addresses

    def give(self, address: int) -> None:
        self._extents[self.extent_of(address)].used -= 1
        self._runs.add(address, self.slot_bytes)

    def give_all(self, addresses: Iterable[int]) -> None:
        """``give`` of each of many, different ones."""
        begin = end = -1
        for address in sorted(addresses):
            self._extents[self.extent_of(address)].used -= 1
            if address != end:
                if begin >= 0:
                    self._runs.add(begin, end - begin)
                begin = address
            end = address + self.slot_bytes
        if begin >= 0:
            self._runs.add(begin, end - begin)

    def has_run(self, count: int) -> bool:
        return self._runs.has_run(count * self.slot_bytes)

    def extent_of(self, address: int) -> int:
        return self._bases[bisect_right(self._bases, address) - 1]

    def extents(self) -> dict[int, int]:
        return {base: e.slots * self.slot_bytes for base, e in self._extents.items()}

    def used_in(self, base: int) -> int:
        extent = self._extents.get(base)
        return 0 if extent is None else extent.used

    def empty_extents(self) -> list[int]:
        """Bases of extents without a used slot."""
        return [base for base, extent in self._extents.items() if extent.used == 0]

    def remove_extent(self, base: int) -> int:
        """Removes an empty extent; returns its length in bytes."""
        extent = self._extents[base]
        if extent.used:
            raise ValueError(f"extent {base} still holds {extent.used} slots")
        return self.discard_extent(base)

    def discard_extent(self, base: int) -> int:
        """Removes an extent whose used slots are lost; returns its length."""
        length = self._extents.pop(base).slots * self.slot_bytes
        self._bases.remove(base)
        self._runs.remove_within(base, length)
        return length


class ArenaSlots:
    """The slots of an arena of ``nbytes``. Size classes get extents on demand and return them when
    they are empty. Not thread-safe; never waits.

    ``ready`` returns the number of bytes from the start that may be used by now; it never
    decreases. ``limit_bytes``: how many of them may be in use at first; all of them if absent.
    """

    def __init__(
        self, nbytes: int, ready: Callable[[], int], limit_bytes: int | None = None
    ) -> None:
        self.nbytes = nbytes - nbytes % ALIGNMENT
        self.limit_bytes = self.nbytes if limit_bytes is None else limit_bytes
        """Bytes that may be in use; can be set to any value up to ``nbytes``."""
        self.used_bytes = 0
        self._ready_now = ready
        self._ready = 0
        self._gaps = RunSet()
        self._classes: dict[int, SlotClass] = {}

    def slot_class(self, slot_bytes: int) -> SlotClass:
        if slot_bytes not in self._classes:
            self._classes[slot_bytes] = SlotClass(slot_bytes)
        return self._classes[slot_bytes]

    def take(self, slot_bytes: int, count: int) -> list[int]:
        """Offsets of up to ``count`` slots, ascending, adjacent as far as possible."""
        slots = self.slot_class(slot_bytes)
        count = min(count, max(0, (self.limit_bytes - self.used_bytes) // slot_bytes))
        if count < 1:
            return []
        if not slots.has_run(count):
            self._grow(slots, count)
        if slots.free < count:
            self._collect_empty(slots)
            self._grow(slots, count - slots.free)
        taken = slots.take(count)
        self.used_bytes += len(taken) * slot_bytes
        return taken

    def give(self, slot_bytes: int, offset: int) -> None:
        self._classes[slot_bytes].give(offset)
        self.used_bytes -= slot_bytes

    def window(self, slot_bytes: int, cost: Mapping[int, float]) -> tuple[int, ...] | None:
        """Bases of the cheapest extents of other size classes whose space, with the gaps between
        them, would hold a slot. ``cost`` maps bases of extents to the cost of emptying them;
        extents that it omits cannot be emptied."""
        pieces = [(start, length, 0.0, False) for start, length in self._gaps.runs()]
        for slots in self._classes.values():
            if slots.slot_bytes != slot_bytes:
                pieces += [
                    (base, length, cost[base], True)
                    for base, length in slots.extents().items()
                    if base in cost
                ]
        pieces.sort()
        best: tuple[float, tuple[int, ...]] | None = None
        first = 0
        size, price = 0, 0.0
        for last, (start, length, extra, _) in enumerate(pieces):
            if last and pieces[last - 1][0] + pieces[last - 1][1] != start:
                first, size, price = last, 0, 0.0
            size += length
            price += extra
            while size - pieces[first][1] >= slot_bytes:
                size -= pieces[first][1]
                price -= pieces[first][2]
                first += 1
            if size >= slot_bytes and (best is None or price < best[0]):
                best = price, tuple(p[0] for p in pieces[first : last + 1] if p[3])
        return None if best is None else best[1]

    def _grow(self, slots: SlotClass, count: int) -> None:
        """Gives a class an extent with space for at least ``count`` slots, if there is one."""
        if count < 1:
            return
        if self._ready < self.nbytes:
            ready = min(self._ready_now(), self.nbytes)
            ready -= ready % ALIGNMENT
            if ready > self._ready:
                self._gaps.add(self._ready, ready - self._ready)
                self._ready = ready
        size = slots.slot_bytes
        most = max(1, self.limit_bytes // _EXTENTS // size)
        for start, length in self._gaps.take(max(count, most) * size, size):
            for base in range(start, start + length, most * size):
                slots.add_extent(base, min(most, (start + length - base) // size))

    def _collect_empty(self, but: SlotClass) -> None:
        for slots in self._classes.values():
            if slots is not but:
                for base in slots.empty_extents():
                    self._gaps.add(base, slots.remove_extent(base))
