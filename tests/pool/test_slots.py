from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrecall.pool.slots import ArenaSlots, RunSet, SlotClass, slot_bytes_of

PAGE = 4096


@pytest.mark.parametrize(("block", "slot"), [(1, 4096), (4096, 4096), (4097, 8192)])
def test_slot_is_the_block_rounded_up_to_a_page(block: int, slot: int) -> None:
    assert slot_bytes_of(block) == slot


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 9)), max_size=60), st.integers(1, 3))
@settings(max_examples=200)
def test_runs_against_a_plain_set(steps: list[tuple[bool, int]], unit: int) -> None:
    runs = RunSet()
    runs.add(0, 100)
    free = set(range(100))
    taken: list[tuple[int, int]] = []
    for take, size in steps:
        if take:
            got = runs.take(size * unit, unit)
            assert got == sorted(got)
            assert sum(length for _, length in got) <= size * unit
            for start, length in got:
                assert length % unit == 0
                assert free.issuperset(range(start, start + length))
                free.difference_update(range(start, start + length))
                taken.append((start, length))
        elif taken:
            start, length = taken.pop(size % len(taken))
            runs.add(start, length)
            free.update(range(start, start + length))
        assert runs.total == len(free)
        covered = [n for start, length in runs.runs() for n in range(start, start + length)]
        assert sorted(covered) == sorted(free)
        ends = {start + length for start, length in runs.runs()}
        assert not ends & {start for start, _ in runs.runs()}, "neighbours are not merged"


def test_one_run_is_preferred_to_several() -> None:
    runs = RunSet()
    runs.add(0, 3)
    runs.add(10, 50)
    assert runs.take(5, 1) == [(10, 5)]
    assert runs.take(60, 1) == [(0, 3), (15, 45)]


def test_class_knows_its_extents() -> None:
    slots = SlotClass(PAGE)
    slots.add_extent(10 * PAGE, 4, used=[11 * PAGE])
    slots.add_extent(14 * PAGE, 2)
    assert (slots.slots, slots.free) == (6, 5)
    assert slots.take(3) == [12 * PAGE, 13 * PAGE, 14 * PAGE]
    assert slots.empty_extents() == []
    with pytest.raises(ValueError, match="still holds 1 slots"):
        slots.remove_extent(14 * PAGE)
    slots.give(14 * PAGE)
    assert slots.remove_extent(14 * PAGE) == 2 * PAGE
    assert (slots.slots, slots.free) == (4, 1)
    slots.give_all([11 * PAGE, 13 * PAGE])
    assert slots.free == 3


def test_room_hands_out_only_what_is_ready() -> None:
    ready = [10 * PAGE + 5]
    room = ArenaSlots(100 * PAGE, lambda: ready[0])
    assert len(room.take(PAGE, 20)) == 10
    ready[0] = 1000 * PAGE
    assert len(room.take(PAGE, 100)) == 90


@pytest.mark.parametrize("pages", [1, 3, 7])
def test_one_class_gets_practically_everything(pages: int) -> None:
    room = ArenaSlots(1000 * PAGE, lambda: 1000 * PAGE)
    dice = random.Random(0)
    offsets: list[int] = []
    while got := room.take(pages * PAGE, dice.randrange(1, 20)):
        offsets += got
    assert len(offsets) == 1000 // pages
    assert len(set(offsets)) == len(offsets)


def test_empty_extents_go_to_another_class() -> None:
    room = ArenaSlots(64 * PAGE, lambda: 64 * PAGE)
    offsets = room.take(PAGE, 64)
    assert room.take(16 * PAGE, 1) == []
    for offset in offsets[20:40]:
        room.give(PAGE, offset)
    assert room.take(16 * PAGE, 1) == [offsets[20]]
    assert room.used_bytes == (44 + 16) * PAGE


def test_window_is_the_cheapest_place_for_a_slot() -> None:
    room = ArenaSlots(64 * PAGE, lambda: 64 * PAGE)
    offsets = room.take(PAGE, 64)
    cost = {offset: float(abs(offset // PAGE - 30)) for offset in offsets if offset != 30 * PAGE}
    window = room.window(4 * PAGE, cost)
    assert window is not None
    assert window in {
        (31 * PAGE, 32 * PAGE, 33 * PAGE, 34 * PAGE),
        (26 * PAGE, 27 * PAGE, 28 * PAGE, 29 * PAGE),
    }
    assert room.window(35 * PAGE, cost) is None
