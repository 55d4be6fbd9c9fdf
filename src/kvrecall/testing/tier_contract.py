"""The contract of every tier. Subclass ``TierContract`` in a test module and give it a tier."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvrecall.block import BlockKey
from kvrecall.pool.slots import slot_bytes_of
from kvrecall.pool.tier import Done, Get, Outcome, Put, PutVerdict, Tier
from kvrecall.testing import chain, content, namespace, wait_until

BLOCK_BYTES = 10_000
NAMESPACE = namespace()


class Bench:
    """A tier and memory to move blocks from and to."""

    def __init__(
        self,
        tier: Tier,
        slots: int = 256,
        block_bytes: int = BLOCK_BYTES,
        memory: memoryview | None = None,
    ) -> None:
        """``memory`` has room for the slots; by default it is the bench's own."""
        self.tier = tier
        self.block_bytes = block_bytes
        self._slot = slot_bytes_of(block_bytes)
        self._memory = memory or memoryview(mmap.mmap(-1, slots * self._slot))
        self.done: list[Done] = []

    def slot(self, place: int) -> memoryview:
        return self._memory[place * self._slot : (place + 1) * self._slot]

    def submit_put(self, keys: list[BlockKey], base: int = 0) -> list[PutVerdict]:
        """Puts a chain from slots ``base`` on."""
        puts = []
        for place, key in enumerate(keys):
            data = self.slot(base + place)
            data[: self.block_bytes] = content(key, self.block_bytes)
            parent = keys[place - 1] if place else None
            puts.append(Put(key, parent, place, data, self.block_bytes))
        return self.tier.submit_put(puts)

    def put(self, keys: list[BlockKey]) -> list[Outcome]:
        """Puts a chain and waits; asserts that all were queued."""
        assert self.submit_put(keys) == [PutVerdict.QUEUED] * len(keys)
        return self.collect(keys)

    def submit_get(self, keys: list[BlockKey], base: int = 0) -> None:
        for place in range(len(keys)):
            self.slot(base + place)[:] = bytes(self._slot)
        self.tier.submit_get([Get(key, self.slot(base + n)) for n, key in enumerate(keys)])

    def get(self, keys: list[BlockKey], among: bool = False) -> list[Outcome]:
        """Gets blocks into the first slots and waits. ``among``: as in ``collect``."""
        self.submit_get(keys)
        return self.collect(keys, among)

    def holds(self, keys: list[BlockKey]) -> bool:
        """Whether the first slots hold the right bytes of ``keys``."""
        return all(
            bytes(self.slot(n)[: self.block_bytes]) == content(key, self.block_bytes)
            for n, key in enumerate(keys)
        )

    def collect(self, keys: list[BlockKey], among: bool = False) -> list[Outcome]:
        """Waits for a completion of each of ``keys``; returns the outcomes in that order.
        ``among``: others may complete, too."""
        done: dict[BlockKey, Outcome] = {}

        def complete() -> bool:
            for item in self.tier.poll(0.01):
                assert among or item.key not in done
                done[item.key] = item.outcome
            return done.keys() >= set(keys) if among else len(done) == len(keys)

        wait_until(complete)
        return [done[key] for key in keys]


class TierContract:
    """Contract of ``kvrecall.pool.tier.Tier`` with room for at least 256 blocks of 10,000 bytes.

    A subclass overrides ``make``, and ``memory`` if its tier needs the memory before it is made.
    """

    shrinks = False
    """Whether blocks may take fewer bytes than they have."""

    def memory(self) -> memoryview | None:
        """Memory for 256 slots; called after ``make``."""
        return None

    def make(self, path: Path) -> Tier:
        raise NotImplementedError

    @pytest.fixture
    def bench(self, tmp_path: Path) -> Iterator[Bench]:
        tier = self.make(tmp_path / "tier")
        tier.register(NAMESPACE, BLOCK_BYTES)
        yield Bench(tier, memory=self.memory())
        tier.close()

    def test_gives_back_what_was_put_and_counts_it(self, bench: Bench) -> None:
        keys = chain(NAMESPACE, 40)
        assert bench.put(keys) == [Outcome.STORED] * 40
        assert all(bench.tier.contains(key) for key in keys)
        assert [bench.tier.depth_of(key) for key in keys] == list(range(40))
        assert bench.tier.stats().blocks == 40
        assert bench.tier.stats().used_bytes >= (40 if self.shrinks else 40 * BLOCK_BYTES)
        for some in (keys, keys[::-1]):
            assert bench.get(some) == [Outcome.LOADED] * 40
            assert bench.holds(some)
        assert bench.tier.queued() == (0, 0)

    def test_an_unknown_block_is_a_miss_and_may_be_touched(self, bench: Bench) -> None:
        keys, other = chain(NAMESPACE, 3), namespace("other")
        bench.tier.register(other, BLOCK_BYTES)
        bench.put(keys[:1])
        bench.tier.touch(keys)
        assert [bench.tier.contains(key) for key in keys] == [True, False, False]
        assert bench.tier.depth_of(keys[1]) is None
        assert bench.get(keys) == [Outcome.LOADED, Outcome.MISS, Outcome.MISS]
        assert bench.get(chain(other, 1)) == [Outcome.MISS], "of another namespace"

    def test_second_put_is_present(self, bench: Bench) -> None:
        keys = chain(NAMESPACE, 4)
        bench.put(keys[:2])
        verdicts = bench.submit_put(keys)
        assert verdicts == [PutVerdict.PRESENT] * 2 + [PutVerdict.QUEUED] * 2
        assert bench.collect(keys[2:]) == [Outcome.STORED] * 2
        assert bench.tier.poll(0.05) == []

    def test_dropped_block_is_a_miss(self, bench: Bench) -> None:
        keys = chain(NAMESPACE, 4)
        bench.put(keys)
        bench.tier.drop([keys[1], chain(NAMESPACE, 1, "unknown")[0]])
        assert [bench.tier.contains(key) for key in keys] == [True, False, True, True]
        assert bench.get(keys[:3]) == [Outcome.LOADED, Outcome.MISS, Outcome.LOADED]
        assert bench.put([keys[1]]) == [Outcome.STORED]

    def test_clear_forgets_what_is_stored_and_what_is_queued(self, bench: Bench) -> None:
        keys = chain(NAMESPACE, 60)
        bench.put(keys[:30])
        bench.submit_put(keys[30:], base=100)
        bench.tier.clear()
        bench.collect(keys[30:])
        assert not any(bench.tier.contains(key) for key in keys)
        assert bench.get(keys[:5]) == [Outcome.MISS] * 5
        assert bench.tier.stats().blocks == 0

    def test_holds_blocks_of_several_sizes(self, bench: Bench) -> None:
        small = namespace("small")
        bench.tier.register(small, 100)
        little = Bench(bench.tier, block_bytes=100, memory=self.memory())
        bench.put(chain(NAMESPACE, 10))
        little.put(chain(small, 10))
        assert bench.get(chain(NAMESPACE, 10)) == [Outcome.LOADED] * 10
        assert bench.holds(chain(NAMESPACE, 10))
        assert little.get(chain(small, 10)) == [Outcome.LOADED] * 10
        assert little.holds(chain(small, 10))

    def test_after_close_puts_are_shed_and_gets_miss(self, bench: Bench) -> None:
        keys = chain(NAMESPACE, 2)
        bench.put(keys[:1])
        bench.tier.close()
        bench.tier.close()
        assert bench.submit_put(keys[1:]) == [PutVerdict.SHED]
        assert bench.get(keys[:1]) == [Outcome.MISS]
