"""Room in the arena: extents for size classes, given on demand and taken back when empty."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvrecall.pool.slots import ALIGNMENT, RunSet, SlotClass

_EXTENTS = 64  # a full-sized extent is this part of the arena


@dataclass(frozen=True, slots=True)
class Window:
    """Adjacent extents and gaps that together would hold a slot, were the extents empty."""

    extents: tuple[int, ...]  # their bases


class ArenaRoom:
    """Who may use which bytes of an arena of ``nbytes``. Not thread-safe; never waits.

    ``ready`` says how many bytes from the start may be handed out by now; it never decreases.
    ``limit_bytes``: how much of them may be in use at first; all of them if absent.
    """

    def __init__(
        self, nbytes: int, ready: Callable[[], int], limit_bytes: int | None = None
    ) -> None:
        self.nbytes = nbytes - nbytes % ALIGNMENT
        self.limit_bytes = self.nbytes if limit_bytes is None else limit_bytes
        """How much of it may be in use; may be set to anything up to ``nbytes``."""
        self.used_bytes = 0
        self._ready_now = ready
        self._ready = 0
        self._gaps = RunSet()
        self._classes: dict[int, SlotClass] = {}

    def slot_class(self, slot_bytes: int) -> SlotClass:
        if slot_bytes not in self._classes:
            self._classes[slot_bytes] = SlotClass(slot_bytes)
        return self._classes[slot_bytes]

    def has_others(self, slot_bytes: int) -> bool:
        """Whether other size classes than this one hold room."""
        return any(
            slots.slot_bytes != slot_bytes and slots.has_extents for slots in self._classes.values()
        )

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

    def extent_of(self, slot_bytes: int, offset: int) -> int:
        return self._classes[slot_bytes].extent_of(offset)

    def used_slots(self, but_of: int) -> dict[int, int]:
        """Used slots of every extent of the other size classes, by base."""
        return {
            base: used
            for slots in self._classes.values()
            if slots.slot_bytes != but_of
            for base, used in slots.used_by_extent().items()
        }

    def window(self, slot_bytes: int, cost: Mapping[int, float]) -> Window | None:
        """The cheapest extents of other size classes whose room, with the gaps between them,
        would hold a slot. ``cost`` maps bases of extents to the price of emptying them; extents
        that are not in it cannot be emptied."""
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
        return None if best is None else Window(best[1])

    def take_back(self, window: Window) -> None:
        """Makes gaps of the window's extents, which are empty now."""
        for slots in self._classes.values():
            for base in slots.extents().keys() & set(window.extents):
                self._gaps.add(base, slots.remove_extent(base))

    def _grow(self, slots: SlotClass, count: int) -> None:
        """Gives a class an extent with room for at least ``count`` slots if there is such."""
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
