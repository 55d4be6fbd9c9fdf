"""Names of blocks: the compact table against a dictionary."""

from __future__ import annotations

import errno
import mmap
import random
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrecall.block import BlockKey, Namespace
from kvrecall.pool.names import CompactNames, DictNames, Names

Factors = Sequence[int]
SPACES = [Namespace.of({"n": str(number)}) for number in range(3)]


def key(number: int) -> BlockKey:
    """Keys of every form: whole blocks and tails, of several namespaces, and odd ones."""
    space, digest = SPACES[number % 3], number.to_bytes(32, "little")
    match number % 11:
        case 0:
            return space.tail_key(digest)
        case 1:
            return space.key(digest[:9])
        case 2:
            return BlockKey(b"%d" % number)
        case 3:
            return space.key(digest * 2)
        case _:
            return space.key(digest)


SAME: Factors = (0,) * 7
"""Gives all keys one code."""
FEW: Factors = (0, 0, 1, 1, 0, 0, 1)
"""Gives many keys the same upper bits, and some the same code."""
FACTORS: list[Factors | None] = [None, SAME, FEW]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("mmmmkdsn"), st.integers(0, 400)), min_size=1, max_size=900),
    st.sampled_from(FACTORS),
)
def test_names_are_a_dictionary(steps: list[tuple[str, int]], factors: Factors | None) -> None:
    names: list[Names] = [CompactNames(1, factors=factors), DictNames()]
    columns = [one.column("i") for one in names]
    kept: list[dict[bytes, int]] = [{}, {}]  # how often
    for what, which in steps:
        one = key(which)
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
                some = [key(n) for n in range(which, which + 30)]
                met = table.meet_all(some)
                assert [table.key(number) for number in met] == some
                table.keep_all(met)
                table.drop_all(met)
        for table, refs in zip(names, kept, strict=True):
            if what == "n":
                some = [key(n) for n in range(which, which + 60)]
                assert [n >= 0 for n in table.numbers(some)] == [k in refs for k in some]
    for table, column, refs in zip(names, columns, kept, strict=True):
        assert len(table) == len(refs)  # type: ignore[arg-type]
        for one in map(BlockKey, refs):
            assert table.key(table.number(one)) == one
        assert {key(column.cells[table.number(BlockKey(one))]) for one in refs} == set(refs)


@pytest.mark.parametrize(("expected", "factors"), [(1, None), (40_000, None), (1, FEW), (1, SAME)])
def test_many_names_are_met_at_once(expected: int, factors: Factors | None) -> None:
    """With and without growing on the way, and some of them known already."""
    rng, names = random.Random(1), CompactNames(expected, factors=factors)
    keys = [SPACES[0].key(rng.randbytes(32)) for _ in range(40_000)]
    for one in keys[:100]:
        names.keep(names.meet(one))
    assert names.numbers_of([]).tolist() == names.meet_many([]).tolist() == []
    for start in range(0, len(keys), 2000):
        part = keys[start : start + 2000]
        numbers = names.meet_many(part)
        assert len(set(numbers.tolist())) == len(part)
        names.keep_all(numbers)
    names.keep_all(names.meet_many([key(7), key(7), keys[5]]))
    assert len(names) == len(keys) + 1
    found = names.numbers_of(keys).tolist()
    assert sorted([*found, names.number(key(7))]) == list(range(len(keys) + 1))
    assert [names.key(number) for number in found] == keys
    assert found == [names.number(one) for one in keys]
    if factors is None:
        assert found == names.numbers_of(keys, exact=False).tolist()
    names.drop(found[200])
    names.drop(found[7])
    assert names.number(keys[200]) == -1
    assert names.number(keys[7]) == found[7], "kept twice"
    for number in found[101:20_000]:
        if number != found[200]:
            names.drop(number)
    assert names.numbers_of(keys[101:20_000]).tolist() == [-1] * 19_899
    assert names.numbers_of(keys[20_000:]).tolist() == found[20_000:]


@pytest.mark.parametrize("at_once", [1, 500])
def test_keys_chosen_to_share_a_bucket_cost_neither_time_nor_memory(at_once: int) -> None:
    """Codes that agree in their upper half, and so want one bucket however often it is split."""
    names = CompactNames(1, factors=(0, 0, 1, 0, 0, 0, 0))  # as if they were known
    crowd = [SPACES[0].key((2 * n + 1).to_bytes(32, "little")) for n in range(20_000)]
    for start in range(0, len(crowd), at_once):
        names.keep_all(names.meet_many(crowd[start : start + at_once]))
    assert len(names._directory.cells) <= 16 * names._buckets
    assert names._buckets < 100
    found = names.numbers_of(crowd).tolist()
    assert sorted(found) == list(range(len(crowd)))
    assert [names.key(number) for number in found] == crowd
    names.drop_all(found[::2])
    assert names.numbers_of(crowd[::2]).tolist() == [-1] * 10_000
    assert names.numbers_of(crowd[1::2]).tolist() == found[1::2]


def test_keys_of_several_lengths_that_run_into_each_other_are_told_apart() -> None:
    """Looked up together they are as many bytes as if all were as long as the first."""
    names, rng = CompactNames(), random.Random(3)
    keys = [SPACES[0].key(rng.randbytes(size)) for size in (32, 24, 40) * 20]
    expected = [names.meet(one) for one in keys]
    assert names.numbers_of(keys).tolist() == expected
    assert names.numbers_of(keys, exact=False).tolist() == expected


@pytest.mark.parametrize("factors", FACTORS)
def test_many_names_come_and_go_while_the_table_grows(factors: Factors | None) -> None:
    """Freed numbers are used again, keys of every form move along, and many are found as one."""
    rng, names = random.Random(5), CompactNames(1, factors=factors)
    here: dict[BlockKey, int] = {}
    for turn in range(60 if factors is None else 12):
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
        asked = rng.sample(sorted(here), 60) + leaving
        rng.shuffle(asked)
        for some in (asked, [one for one in asked if len(one) == 48]):
            expected = [here.get(one, -1) for one in some]
            assert names.numbers_of(some).tolist() == expected
            if factors is None:
                assert names.numbers_of(some, exact=False).tolist() == expected
        assert len(names) == len(here) == len(set(here.values()))
    assert names.size < len(here) + 400, "free numbers are used first"
    assert {one: names.number(one) for one in here} == here
    assert {one: names.key(number) for one, number in here.items()} == {one: one for one in here}
    names.drop_all(list(here.values()))
    assert len(names) == len(names._outside) == len(names._outside_keys) == 0
    assert not names._codes.array().any()


def test_columns_with_address_space_do_not_move() -> None:
    """Pages that move take time for each, under the owner's lock."""
    names = CompactNames(most=1 << 15)
    column = names.column("q")
    cells, before = column.cells, column.array().ctypes.data
    numbers = names.meet_many([SPACES[0].key(n.to_bytes(32)) for n in range(20_000)])
    names.keep_all(numbers)
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


def test_columns_and_table_use_no_huge_pages() -> None:
    """Where the system uses them unasked, a column's first cell would take 2 MiB; and a virtual
    machine whose memory is watched is slow to reach them after a pause."""
    if not Path("/sys/kernel/mm/transparent_hugepage").exists():
        pytest.skip("the kernel has none")
    names = CompactNames(most=1 << 24)
    for column in (names.column("q"), names._codes, names._directory):
        flags = flags_of(column.array().ctypes.data)
        assert "nh" in flags
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
