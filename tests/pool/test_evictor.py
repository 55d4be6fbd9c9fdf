"""A pool whose blocks cannot be evicted refuses without searching them."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.clocks import ManualClock
from support.disks import FaultyIo

from kvrecall.block import BlockKey, TierName
from kvrecall.config import DiskConfig, PoolConfig, PoolTerms, Watermarks
from kvrecall.pool import Pool
from kvrecall.pool.arena import Arena
from kvrecall.pool.base import Verdict
from kvrecall.pool.disk import DiskTier
from kvrecall.pool.disk.catalog import Catalog
from kvrecall.pool.disk.index import IndexRow
from kvrecall.pool.eviction import POLICY_NAMES, make_policy
from kvrecall.testing import chain, namespace, wait_until

SPACE, OTHER = namespace(), namespace("other")
BLOCK = 4096
BLOCKS = 600
MIB = 1 << 20


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of blocks that policies ask about when they look for victims."""
    looked: list[int] = []

    def patch(kind: type, real: Callable[..., list[int]]) -> None:
        def victims(
            self: object, count: int, evictable: Callable[[int], bool], now: float
        ) -> list[int]:
            def asked(number: int) -> bool:
                looked.append(number)
                return evictable(number)

            return real(self, count, asked, now)

        monkeypatch.setattr(kind, "victims", victims)

    for kind in {type(make_policy(name, 1).policy) for name in POLICY_NAMES}:
        patch(kind, kind.victims)
    return looked


def save(pool: Pool, keys: list[BlockKey]) -> Counter[Verdict]:
    answers = pool.reserve(keys)
    pool.commit([k for k, a in zip(keys, answers, strict=True) if a.verdict is Verdict.RESERVED])
    return Counter(answer.verdict for answer in answers)


@pytest.fixture(params=POLICY_NAMES)
def pool(request: pytest.FixtureRequest) -> Iterator[Pool]:
    with Pool.open(PoolConfig(BLOCKS * BLOCK, policy=request.param)) as pool:
        pool.register(SPACE, BLOCK)
        pool.register(OTHER, 3 * BLOCK)
        yield pool


def test_a_refusal_looks_at_no_leased_block(pool: Pool, looked_at: list[int]) -> None:
    keys = chain(SPACE, BLOCKS)
    assert save(pool, keys) == {Verdict.RESERVED: BLOCKS}
    tickets = [pool.acquire(keys[: BLOCKS // 2], 60.0), pool.acquire(keys, 60.0)]
    for name in ("a", "b"):
        assert save(pool, chain(SPACE, 5, name)) == {Verdict.REFUSED: 5}
        assert save(pool, chain(OTHER, 5, name)) == {Verdict.REFUSED: 5}
    assert looked_at == []
    pool.release(tickets[1])
    assert save(pool, chain(SPACE, 5, "c")) == {Verdict.RESERVED: 5}


def test_a_search_for_victims_passes_a_leased_block_once(pool: Pool, looked_at: list[int]) -> None:
    leased, idle = chain(SPACE, BLOCKS - 50, "leased"), chain(SPACE, 50, "idle")
    save(pool, leased)
    save(pool, idle)
    ticket = pool.acquire(leased, 60.0)
    for number in range(20):
        assert save(pool, chain(SPACE, 1, str(number))) == {Verdict.RESERVED: 1}
    looks, numbers = Counter(looked_at), pool._host._names.numbers(leased)
    # hazard asks lru, which asks the pool; fewer than 64 in one search are not worth holding
    assert sum(looks[number] for number in numbers) <= 2 * (len(leased) + 20 * 64)
    assert pool.find(leased).blocks == len(leased)
    pool.release(ticket)
    assert save(pool, chain(SPACE, BLOCKS, "all")) == {Verdict.RESERVED: BLOCKS}


def test_room_of_leased_blocks_of_another_size_is_not_looked_at(
    pool: Pool, looked_at: list[int]
) -> None:
    large, small = chain(OTHER, 100), chain(SPACE, BLOCKS - 300)
    save(pool, large)
    save(pool, small)
    ticket = pool.acquire(large, 60.0)
    idle = pool.acquire(small, 60.0)
    assert save(pool, chain(OTHER, 3, "more")) == {Verdict.REFUSED: 3}
    assert looked_at == []
    pool.release(idle)
    assert save(pool, chain(OTHER, 3, "more")) == {Verdict.RESERVED: 3}
    assert pool.find(large).blocks == 100
    pool.release(ticket)


def test_a_refusal_looks_at_few_dirty_blocks(tmp_path: Path, looked_at: list[int]) -> None:
    """Written back to a disk that hangs, so that what is dirty cannot go."""
    io = FaultyIo()
    io.gate.clear()
    clock = ManualClock()
    config = DiskConfig(tmp_path, 16 * MIB, max_queued_bytes=100 * BLOCK)
    terms = PoolTerms("back", unwritten_marks=Watermarks(1.0, 1.0))
    arena = Arena.create(BLOCKS * BLOCK)
    with Pool(arena, DiskTier(config, io=io), "lru", monotonic=clock, terms=terms) as pool:
        pool.register(SPACE, BLOCK)
        save(pool, chain(SPACE, BLOCKS))
        try:
            for number in range(20):
                assert save(pool, chain(SPACE, 5, str(number))) == {Verdict.REFUSED: 5}
            # and those being written once, but for a few in each search
            assert len(looked_at) <= 20 * (5 + 16) + 100 + 20 * 64
        finally:
            io.gate.set()
        wait_until(lambda: save(pool, chain(SPACE, 5, "now"))[Verdict.REFUSED] == 0)


def test_blocks_being_written_do_not_become_the_oldest(tmp_path: Path) -> None:
    """A search that passes the youngest blocks while they are written leaves them the youngest,
    though they are as many as a step of 4,096 tokens commits."""
    io = FaultyIo()
    arena = Arena.create(70 * BLOCK)
    with Pool(arena, DiskTier(DiskConfig(tmp_path, 16 * MIB), io=io), "lru") as pool:
        pool.register(SPACE, BLOCK)
        old, young = chain(SPACE, 38, "old"), chain(SPACE, 32, "young")
        save(pool, old)
        assert pool.flush(old, 60.0)
        io.gate.clear()
        try:
            save(pool, young)
            save(pool, chain(SPACE, 20, "more"))
        finally:
            io.gate.set()
        assert pool.flush(young, 60.0)
        assert save(pool, chain(SPACE, 18, "last")) == {Verdict.RESERVED: 18}
        assert set(pool.find(young).tiers) == {TierName.HOST}


def test_what_the_queue_has_no_room_for_is_stored_when_it_has(tmp_path: Path) -> None:
    """A step that computes a long prompt commits more blocks than may wait for the disk."""
    config = DiskConfig(tmp_path, 16 * MIB, max_queued_bytes=4 * BLOCK)
    with Pool(Arena.create(20 * BLOCK), DiskTier(config), "lru") as pool:
        pool.register(SPACE, BLOCK)
        keys = chain(SPACE, 15)
        save(pool, keys)
        wait_until(lambda: pool.stats().tiers[1].blocks == 15)


def test_an_order_touches_names_under_the_table_s_lock() -> None:
    """It has no lock of its own, and other threads look a disk's names up meanwhile."""
    catalog, [key] = Catalog("lru", 9, lambda: 1 << 20, ManualClock(), PoolTerms()), chain(SPACE, 1)
    catalog.publish([IndexRow(4096, key, None, 0, 4096, bytes(16), 0)])
    number = catalog._names.number(key)
    keeping = threading.Thread(target=catalog._refs.keep, args=(number,), daemon=True)
    with catalog._lock:
        keeping.start()
        keeping.join(0.1)
        assert keeping.is_alive()
    keeping.join(10.0)
    assert not keeping.is_alive()
