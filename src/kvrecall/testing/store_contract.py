"""The contract of every store. Subclass ``StoreContract`` in a test module and give it a store."""

from __future__ import annotations

import hashlib
import random
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvrecall.pool.remote.staged import StagedStore
from kvrecall.pool.remote.store import Object, RegisteringStore, Store

HEADER_BYTES = 64
VALUE_BYTES = 20_000
MEMORY_BYTES = 4 << 20
_SLOT_BYTES = 5 * 4096


def names(count: int, of: str = "a") -> list[str]:
    """Names in the tier's form, distinct for each ``of``."""
    return [
        f"v1.{hashlib.md5(of.encode()).hexdigest()}.{hashlib.sha256(f'{n}'.encode()).hexdigest()}"
        for n in range(count)
    ]


def value(name: str, nbytes: int) -> bytes:
    """The bytes that belong to a name; bytes that no store can compress away."""
    return random.Random(name).randbytes(nbytes)


class Counter:
    """A store as a pool uses it, and memory with room for objects."""

    def __init__(self, store: Store) -> None:
        self.store = StagedStore(store) if isinstance(store, RegisteringStore) else store
        self._memory = memoryview(bytearray(MEMORY_BYTES))

    def close(self) -> None:
        self.store.close()

    def empty(self, some: Sequence[str], nbytes: int = VALUE_BYTES, base: int = 0) -> list[Object]:
        """Room for the values of ``some``: a header of its own, the rest in slots ``base`` on."""
        return [
            Object(name, (memoryview(bytearray(HEADER_BYTES)), self._room(base + at, nbytes)))
            for at, name in enumerate(some)
        ]

    def filled(self, some: Sequence[str], nbytes: int = VALUE_BYTES, base: int = 0) -> list[Object]:
        objects = self.empty(some, nbytes, base)
        for item in objects:
            data = value(item.name, nbytes)
            item.parts[0][:] = data[:HEADER_BYTES]
            item.parts[1][:] = data[HEADER_BYTES:]
        return objects

    def put(self, some: Sequence[str], nbytes: int = VALUE_BYTES, base: int = 0) -> list[bool]:
        return self.store.put(self.filled(some, nbytes, base))

    def get(self, some: Sequence[str], nbytes: int = VALUE_BYTES, base: int = 0) -> list[bool]:
        """Gets values and asserts that those found are correct."""
        objects = self.empty(some, nbytes, base)
        for item in objects:
            item.parts[1][:] = bytes(item.parts[1].nbytes)
        found = self.store.get(objects)
        assert len(found) == len(objects)
        for item, is_there in zip(objects, found, strict=True):
            if is_there:
                assert b"".join(item.parts) == value(item.name, nbytes)
        return found

    def _room(self, slot: int, nbytes: int) -> memoryview:
        begin = slot * _SLOT_BYTES
        return self._memory[begin : begin + nbytes - HEADER_BYTES]


class StoreContract:
    """Contract of ``kvrecall.pool.remote.store.Store`` with room for 16 MiB.

    A subclass overrides ``make``, and sets ``outlives`` to False if what is stored ends with the
    process that stored it.
    """

    outlives = True

    def make(self, path: Path) -> Store:
        """A store that keeps its values at ``path`` (initially an empty folder) or elsewhere; a
        second call gives a store with the same values."""
        raise NotImplementedError

    def open(self, path: Path) -> Counter:
        """``make`` with memory attached. Overridden where a store has its memory already."""
        return Counter(self.make(path))

    @pytest.fixture
    def counter(self, tmp_path: Path) -> Iterator[Counter]:
        counter = self.open(tmp_path)
        yield counter
        counter.close()

    def test_gives_back_what_was_put(self, counter: Counter) -> None:
        some = names(40, "back")
        assert counter.store.exists(some) == [False] * 40
        assert counter.put(some) == [True] * 40
        assert counter.store.exists(some) == [True] * 40
        assert counter.get(some) == [True] * 40
        assert counter.get(some[::-1]) == [True] * 40

    def test_nothing_asked_nothing_answered(self, counter: Counter) -> None:
        assert counter.store.exists([]) == []
        assert counter.store.put([]) == []
        assert counter.store.get([]) == []
        counter.store.remove([])

    def test_a_value_of_another_size_is_not_there(self, counter: Counter) -> None:
        some = names(3, "size")
        counter.put(some)
        for nbytes in (VALUE_BYTES - 1, VALUE_BYTES + 1, HEADER_BYTES + 1):
            assert counter.store.get(counter.empty(some, nbytes)) == [False] * 3
        assert counter.get(some) == [True] * 3

    def test_what_is_removed_is_gone_until_it_is_put_again(self, counter: Counter) -> None:
        some = names(6, "remove")
        counter.put(some[:3])
        assert counter.put(some[:4]) == [True] * 4, "what is there may be put again"
        counter.store.remove([some[1], some[5], some[2]])
        assert counter.store.exists(some) == [True, False, False, True, False, False]
        assert counter.get(some) == [True, False, False, True, False, False]
        counter.store.remove([some[1], some[2]])
        assert counter.put(some[1:3]) == [True, True]
        assert counter.get(some[:4]) == [True] * 4

    def test_any_name(self, counter: Counter) -> None:
        some = "a A ab a.b a.b. a..b a-b_c 0 v1.a.b v1.a.bc a.b.cd.e".split()
        some += ["n" * 199, "n" * 200, "v1." + "0" * 100 + "." + "f" * 96]
        assert counter.put(some) == [True] * len(some)
        assert counter.get(some) == [True] * len(some)
        counter.store.remove(some[::2])
        expected = [place % 2 == 1 for place in range(len(some))]
        assert counter.store.exists(some) == expected

    def test_any_size(self, counter: Counter) -> None:
        for nbytes in (HEADER_BYTES + 1, HEADER_BYTES + 4096, 1_000_000, 3_000_000):
            some = names(1, f"size {nbytes}")
            assert counter.put(some, nbytes) == [True]
            assert counter.get(some, nbytes) == [True]

    def test_one_part_only(self, counter: Counter) -> None:
        item = counter.filled(names(1, "one"))[0]
        assert counter.store.put([Object("one", item.parts[1:])]) == [True]
        into = counter.empty(names(1, "one"), base=1)[0].parts[1]
        assert counter.store.get([Object("one", (into,))]) == [True]
        assert into == item.parts[1]

    def test_a_thousand_questions_in_one_call(self, counter: Counter) -> None:
        some = names(1000, "thousand")
        counter.put(some[300:420:2])
        expected = [place in range(300, 420, 2) for place in range(1000)]
        assert counter.store.exists(some) == expected, "in the order of the questions"
        assert counter.get(some[290:430]) == expected[290:430]

    def test_several_threads(self, counter: Counter) -> None:
        """A thread finds at once what only it puts; a value that several threads put may still be
        in progress (``get`` checks the bytes) and is present when all are done."""
        shared = names(4, "shared")

        def work(number: int) -> None:
            some = names(12, f"thread {number}")
            base = number * 32
            assert counter.put(some + shared, base=base)[:12] == [True] * 12
            assert counter.get(some + shared, base=base)[:12] == [True] * 12
            counter.store.remove(some[:6])
            assert counter.store.exists(some) == [False] * 6 + [True] * 6

        with ThreadPoolExecutor(4) as threads:
            list(threads.map(work, range(4)))
        assert counter.put(shared) == [True] * 4
        assert counter.get(shared) == [True] * 4

    def test_a_value_is_never_seen_in_part(self, counter: Counter) -> None:
        """A get during a put or remove returns the whole value or none."""
        some = names(1, "whole")
        nbytes = 400_000
        done = threading.Event()

        def write() -> None:
            try:
                for _ in range(12):
                    counter.put(some, nbytes, base=40)
                    counter.put(some, nbytes, base=40)
                    counter.store.remove(some)
                counter.put(some, nbytes, base=40)
            finally:
                done.set()

        writer = threading.Thread(target=write)
        writer.start()
        while not done.is_set():
            counter.get(some, nbytes)  # checks the bytes
        writer.join()
        assert counter.get(some, nbytes) == [True]

    def test_another_host_finds_it_and_closing_keeps_it(
        self, counter: Counter, tmp_path: Path
    ) -> None:
        if not self.outlives:
            pytest.skip("the values of this store end with its process")
        some = names(5, "other")
        counter.put(some)
        for _ in range(2):
            other = self.open(tmp_path)
            assert other.store.exists(some) == [True] * 5
            assert other.get(some) == [True] * 5
            other.store.close()
            other.close()
        assert counter.get(some) == [True] * 5
