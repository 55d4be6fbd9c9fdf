"""Names of blocks: the compact table against a dictionary."""

from __future__ import annotations

import errno
import mmap
import random
import re
import resource
import struct
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrecall.block import BlockKey, Namespace
from kvrecall.pool.names import CompactNames, DictNames, Names

SPACES = [Namespace.of({"n": str(number)}) for number in range(3)]


def key(number: int, colliding: bool = False) -> BlockKey:
    """Keys of every form: whole blocks and tails, of several namespaces, and odd ones. Colliding:
    all those of a namespace have one hash."""
    space, digest = SPACES[number % 3], number.to_bytes(32, "big" if colliding else "little")
    match number % 11:
        case 0:
            return space.tail_key(digest)
        case 1:
            return space.key(digest[-9:] if colliding else digest[:9])
        case 2:
            return BlockKey(b"%d" % number)
        case 3:
            return space.key(digest * 2)
        case _:
            return space.key(digest)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("mmmmkdsn"), st.integers(0, 400)), min_size=1, max_size=900),
    st.booleans(),
)
def test_names_are_a_dictionary(steps: list[tuple[str, int]], colliding: bool) -> None:
    names: list[Names] = [CompactNames(1), DictNames()]
    columns = [one.column("i") for one in names]
    kept: list[dict[bytes, int]] = [{}, {}]  # how often
    make = partial(key, colliding=colliding)
    for what, which in steps:
        one = make(which)
        for table, column, refs in zip(names, columns, kept, strict=True):
            if what == "m":
                number = table.meet(one)
                assert one in refs or column.cells[number] == 0
                table.keep(number)
                column.cells[number] = which
                refs[one] = refs.get(one, 0) + 1
            elif what == "k" and one in refs:
                table.keep(table.number(one))
                refs[one] += 1
            elif what == "d" and one in refs:
                refs[one] -= 1
                number = table.number(one)
                if not refs[one]:
                    del refs[one]
                    column.cells[number] = 0
                table.drop(number)
            elif what == "s":
                some = [make(n) for n in range(which, which + 30)]
                met = table.meet_all(some)
                assert [table.key(number) for number in met] == some
                table.sweep(met)
        for table, refs in zip(names, kept, strict=True):
            if what == "n":
                some = [make(n) for n in range(which, which + 60)]
                assert [n >= 0 for n in table.numbers(some)] == [k in refs for k in some]
    for table, column, refs in zip(names, columns, kept, strict=True):
        assert len(table) == len(refs)  # type: ignore[arg-type]
        for one in map(BlockKey, refs):
            assert table.key(table.number(one)) == one
        assert {make(column.cells[table.number(BlockKey(one))]) for one in refs} == set(refs)


@pytest.mark.parametrize("expected", [1, 40_000])
def test_many_names_are_met_at_once(expected: int) -> None:
    """With and without growing on the way, and some of them known already."""
    rng, names = random.Random(1), CompactNames(expected)
    keys = [SPACES[0].key(rng.randbytes(32)) for _ in range(40_000)]
    for one in keys[:100]:
        names.keep(names.meet(one))
    assert names.numbers_of([]).tolist() == names.meet_many([]).tolist() == []
    for start in range(0, len(keys), 2000):
        part = keys[start : start + 2000]
        numbers = names.meet_many(part)
        assert len(set(numbers.tolist())) == len(part)
        names.keep_many(numbers)
    names.keep_many(names.meet_many([key(7), key(7), keys[5]]))
    assert len(names) == len(keys) + 1
    found = names.numbers_of(keys).tolist()
    assert sorted([*found, names.number(key(7))]) == list(range(len(keys) + 1))
    assert [names.key(number) for number in found] == keys
    assert found == [names.number(one) for one in keys] == names.numbers_of(keys, False).tolist()
    names.drop(found[200])
    names.drop(found[7])
    assert names.number(keys[200]) == -1
    assert names.number(keys[7]) == found[7], "kept twice"
    for number in found[101:20_000]:
        if number != found[200]:
            names.drop(number)
    assert names.numbers_of(keys[101:20_000]).tolist() == [-1] * 19_899
    assert names.numbers_of(keys[20_000:]).tolist() == found[20_000:]


@pytest.mark.parametrize("colliding", [False, True])
def test_many_keys_are_found_as_one_by_one_while_the_table_grows(colliding: bool) -> None:
    """Present ones and absent ones, with deletions, and with both tables in use."""
    rng, names = random.Random(2), CompactNames()
    here: dict[BlockKey, int] = {}
    gone: list[BlockKey] = []
    both = 0
    for turn in range(120):
        for number in range(turn * 200, turn * 200 + 200):
            one = key(number, colliding)
            here[one] = names.meet(one)
            names.keep(here[one])
        for one in rng.sample(sorted(here), 60):
            names.drop(here.pop(one))
            gone.append(one)
        both += names._old is not None
        asked = rng.sample(sorted(here), 60) + rng.sample(gone, 60)
        rng.shuffle(asked)
        expected = [here.get(one, -1) for one in asked]
        assert names.numbers_of(asked).tolist() == expected == [names.number(one) for one in asked]
        if not colliding:
            assert names.numbers_of(asked, exact=False).tolist() == expected
        whole = [one for one in asked if len(one) == 48]  # these are looked up together
        assert names.numbers_of(whole).tolist() == [here.get(one, -1) for one in whole]
    assert 0 < both < 120
    assert bool(names._far) is colliding
    everything = list(here)
    assert names.numbers_of(everything).tolist() == list(here.values())
    assert set(names.numbers_of(gone).tolist()) == {-1}


def test_keys_that_differ_in_one_half_of_their_hash_are_told_apart() -> None:
    """And a free slot is taken for no key, whatever its hash."""
    uppers = lowers = (0, 1, 2, 1 << 31, (1 << 32) - 1)
    hashes = [upper << 32 | lower for upper, lower in product(uppers, lowers)]
    keys = [
        SPACES[0].key(struct.pack("=Q", hashes[at]) + bytes([at] * 24)) for at in range(len(hashes))
    ]
    names = CompactNames()
    names._factors = (0, 1)  # the first word of a digest is the hash
    for number, one in enumerate(keys):
        assert names.numbers_of(keys).tolist() == [*range(number), *[-1] * (len(keys) - number)]
        names.keep(names.meet(one))
    for number, one in enumerate(keys):
        names.drop(names.number(one))
        assert names.numbers_of(keys)[: number + 1].tolist() == [-1] * (number + 1)
        assert names.numbers_of(keys)[number + 1 :].tolist() == [*range(number + 1, len(keys))]


def test_keys_of_several_lengths_that_run_into_each_other_are_told_apart() -> None:
    """Looked up together they are as many bytes as if all were as long as the first."""
    names, rng = CompactNames(), random.Random(3)
    keys = [SPACES[0].key(rng.randbytes(size)) for size in (32, 24, 40) * 20]
    expected = [names.meet(one) for one in keys]
    assert names.numbers_of(keys).tolist() == expected
    assert names.numbers_of(keys, exact=False).tolist() == expected


def test_a_table_that_is_full_around_one_home_leaves_others_alone() -> None:
    """Slots that become free there are used again, and what lies behind is still found."""
    names = CompactNames()
    names._factors = (0, 1)

    def homed(group: int, number: int) -> BlockKey:
        word = group << 64 - names._table.bits | number
        return SPACES[0].key(struct.pack("=Q", word) + number.to_bytes(24, "little"))

    crowd = [homed(group, number) for number in range(20) for group in (7, 8, 9)]
    beside = [homed(group, 99) for group in (6, 10, 14, 15, 16)]
    rng = random.Random(4)
    for _ in range(30):
        rng.shuffle(crowd)
        numbers = dict(zip((*crowd, *beside), names.meet_all([*crowd, *beside]), strict=True))
        names.keep_many(np.array(list(numbers.values())))
        left = dict(numbers)
        for one in rng.sample(crowd, 30):
            names.drop(left.pop(one))
            assert names.number(one) == -1
        for some in (list(left), list(numbers)):
            assert names.numbers_of(some).tolist() == [left.get(one, -1) for one in some]
        for number in left.values():
            names.drop(number)
        assert not len(names)
        assert not names._far
        assert not names._table.slots.array().any()


def test_many_names_come_and_go_while_the_table_grows() -> None:
    """Freed numbers are used again, and keys of every form move along."""
    rng, names = random.Random(5), CompactNames()
    here: dict[BlockKey, int] = {}
    moving = 0
    for turn in range(100):
        ones = [key(number) for number in range(turn * 40, turn * 40 + 40)]
        many = [SPACES[turn % 3].key(rng.randbytes(32)) for _ in range(250)]
        for some in (ones, many + many[:3] * (turn % 2)):
            numbers = names.meet_many(some)
            if len(set(some)) == len(some):
                assert not set(numbers.tolist()) & set(here.values())
            for one, number in zip(some, numbers.tolist(), strict=True):
                if one not in here:
                    names.keep(number)
                here[one] = number
        leaving = rng.sample(sorted(here), 60)
        names.keep(here[leaving[0]])
        names.drop_all([here[one] for one in (*leaving, leaving[0])])
        for one in leaving:
            del here[one]
            assert names.number(one) == -1
        moving += names._old is not None
        assert len(names) == len(here) == len(set(here.values()))
    assert 0 < moving < 100
    assert names.size < len(here) + 400, "free numbers are used first"
    assert {one: names.number(one) for one in here} == here
    assert {one: names.key(number) for one, number in here.items()} == {one: one for one in here}


def test_columns_with_address_space_do_not_move() -> None:
    """Pages that move take time for each, under the owner's lock."""
    names = CompactNames(most=1 << 15)
    column = names.column("q")
    cells, before = column.cells, column.array().ctypes.data
    numbers = names.meet_many([SPACES[0].key(n.to_bytes(32)) for n in range(20_000)])
    names.keep_many(numbers)
    assert len(numbers) == names.size > 1 << 12, "more than there was room for"
    column.cells[names.size - 1] = 7
    assert column.cells is cells
    assert column.array().ctypes.data == before
    names.meet_many([SPACES[1].key(n.to_bytes(32)) for n in range(20_000)])
    assert names.size > 1 << 15
    column.cells[names.size - 1] = 8
    assert column.cells is not cells
    assert column.cells[len(numbers) - 1] == 7


def flags_of(address: int) -> list[str]:
    """VmFlags of the mapping that the address is in."""
    is_it = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if match := re.match("([0-9a-f]+)-([0-9a-f]+) ", line):
            begin, end = (int(each, 16) for each in match.groups())
            is_it = begin <= address < end
        elif is_it and line.startswith("VmFlags:"):
            return line.split()[1:]
    return []


def test_a_column_with_address_space_uses_no_huge_pages() -> None:
    """Where the system uses them unasked, a column's first cell would take 2 MiB."""
    if not Path("/sys/kernel/mm/transparent_hugepage").exists():
        pytest.skip("the kernel has none")
    column = CompactNames(most=1 << 24).column("q")
    assert "nh" in flags_of(column.array().ctypes.data)


def test_the_table_asks_for_no_huge_pages() -> None:
    """Which a virtual machine whose memory is watched is slow to reach after a pause."""
    names, rng = CompactNames(), random.Random(8)
    tables = {names._table}
    while len(tables) < 3:
        names.prepare(600)
        names.meet_many([SPACES[0].key(rng.randbytes(32)) for _ in range(600)])
        tables.add(names._table)
    for table in tables:
        flags = flags_of(table.slots.array().ctypes.data)
        assert flags
        assert "hg" not in flags


def test_without_address_space_there_is_room_for_what_is_expected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole, refused = mmap.mmap, []

    def limited(fd: int, nbytes: int, **how: int) -> mmap.mmap:
        if nbytes > 1 << 20:
            refused.append(nbytes)
            raise OSError(errno.ENOMEM, "no address space")
        return whole(fd, nbytes, **how)

    monkeypatch.setattr(mmap, "mmap", limited)
    names = CompactNames(most=1 << 24)
    assert refused
    monkeypatch.undo()
    keys = [SPACES[0].key(n.to_bytes(32)) for n in range(9000)]
    numbers = names.meet_many(keys).tolist()
    assert [names.key(number) for number in numbers] == keys


def test_memory_is_taken_before_it_is_written() -> None:
    """Of columns that most numbers have a value in."""
    names = CompactNames(100_000)
    often, rarely = (names.column("q", 64, is_rare=is_rare) for is_rare in (False, True))
    try:
        mmap.mmap(-1, mmap.PAGESIZE).madvise(23, 0, mmap.PAGESIZE)
    except OSError:
        pytest.skip("the kernel has no MADV_POPULATE_WRITE")
    names.prepare(8000)
    faults = {}
    for column in (often, rarely):
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        column.array()[:8000] = 1
        faults[column] = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before
    assert faults[often] < faults[rarely] or not faults[rarely]
    assert not names.column("q").array().any()
    assert not often.array()[8000:].any()


def test_a_table_is_prepared_before_it_is_needed() -> None:
    """And one that was made too late, as another thread began to grow meanwhile, is not used."""
    rng, names = random.Random(6), CompactNames(20_000)
    here: dict[BlockKey, int] = {}
    prepared, used, grown = None, 0, 0
    for turn in range(150):
        table = names._table
        if turn % 100 < 60:
            names.prepare(600)
            prepared = names._next
        keys = [SPACES[0].key(rng.randbytes(32)) for _ in range(600)]
        numbers = names.meet_many(keys)
        names.keep_many(numbers)
        here.update(zip(keys, numbers.tolist(), strict=True))
        if names._table is not table:
            grown += 1
            used += names._table is prepared
            assert names._table.bits == table.bits + 1
            names._next = table  # as if it had been made in the meantime
    assert grown == 2
    assert used == 1
    assert {one: names.number(one) for one in here} == here
    assert len(names) == len(set(here.values())) == 150 * 600
