"""The pool when the tier below it is slow, fails, hangs or is full."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
from support.clocks import ManualClock
from support.disks import FaultyIo
from support.stores import MemoryStore
from support.tiers import FaultyTier, LatencyTier, WrapperTier

from kvrecall.block import TierName
from kvrecall.config import DiskConfig, PoolConfig, PoolTerms, RemoteConfig
from kvrecall.errors import ConfigError, TierError
from kvrecall.pool import Pool
from kvrecall.pool.arena import Arena, available_memory
from kvrecall.pool.base import RecallState, Verdict
from kvrecall.pool.cascade import Cascade
from kvrecall.pool.disk import DiskTier
from kvrecall.pool.remote.tier import RemoteTier
from kvrecall.pool.tier import Done, Outcome, Tier
from kvrecall.testing import chain, wait_until
from kvrecall.testing.pool_contract import BLOCK_BYTES, NAMESPACE, SLOT_BYTES, Engine, engines
from kvrecall_lab.memory_tier import MemoryTier

MIB = 1 << 20
KEYS = chain(NAMESPACE, 10)
REMOTE = TierName.REMOTE
Start = Callable[..., Engine]


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def start(clock: ManualClock, tmp_path: Path) -> Iterator[Start]:
    def make(nbytes: int, _: Path | None, below: Tier, by_hand: bool) -> Pool:
        monotonic = clock if by_hand else time.monotonic
        return Pool(Arena.create(nbytes), below, monotonic=monotonic)

    with engines(make, tmp_path) as make_engine:
        yield lambda below, blocks=32, by_hand=True: make_engine(below, by_hand, blocks=blocks)


def push_out(engine: Engine, blocks: int = 32) -> None:
    """Evicts everything else from the host: fills it with other chains, twice over."""
    for name in ("x", "y", "z", "w"):
        keys = chain(NAMESPACE, blocks // 2, name)
        engine.save(keys)
        assert engine.pool.flush(keys, 60.0)


def with_blocks_below(start: Start) -> tuple[Engine, FaultyTier]:
    """An engine whose KEYS are in the tier below alone."""
    tier = FaultyTier(MemoryTier())
    engine = start(tier)
    engine.save(KEYS)
    assert engine.pool.flush(KEYS, 60.0)
    push_out(engine)
    return engine, tier


def test_late_blocks_cut_the_recall_and_come_later(start: Start, clock: ManualClock) -> None:
    engine, tier = with_blocks_below(start)
    tier.faults.hung = set(KEYS[6:8])
    ticket = engine.pool.acquire(KEYS, 3.0)
    wait_until(lambda: engine.pool.find(KEYS[:6]).tiers == (TierName.HOST,) * 6)
    assert engine.pool.poll(ticket).state is RecallState.PENDING
    clock.advance(3.1)
    recall = engine.pool.poll(ticket)
    assert recall.state is RecallState.READY
    assert recall.tiers == (REMOTE,) * 6
    engine.check(KEYS, recall)
    engine.pool.release(ticket)
    assert engine.pool.stats().leases == 0
    tier.faults.hung = set()
    wait_until(lambda: engine.pool.find(KEYS).tiers == (TierName.HOST,) * 10)
    assert engine.recall(KEYS) == (TierName.HOST,) * 10


def test_a_hung_tier_costs_one_deadline_not_many(start: Start, clock: ManualClock) -> None:
    memory = MemoryTier()
    memory.name = TierName.DISK  # a hung remote tier pauses by itself
    tier = FaultyTier(memory)
    engine = start(tier)
    other = chain(NAMESPACE, 5, "other")
    for keys in (KEYS, other):
        engine.save(keys)
        assert engine.pool.flush(keys, 60.0)
    push_out(engine)
    tier.faults.hung = {KEYS[0]}
    ticket = engine.pool.acquire(KEYS[:1], 3.0)
    clock.advance(3.1)
    assert engine.pool.poll(ticket).offsets == ()
    assert engine.pool.find(other).blocks == 0
    late = engine.pool.acquire(other, 3.0)
    assert engine.pool.poll(late).state is RecallState.READY
    engine.pool.release(late)
    clock.advance(31)  # it is given another chance, though the first load still hangs
    assert engine.pool.find(other).blocks == 5
    late = engine.pool.acquire(KEYS[:1], 3.0)
    clock.advance(3.1)
    assert engine.pool.poll(late).offsets == ()
    tier.faults.hung = set()
    wait_until(lambda: engine.pool.find(other).blocks == 5)
    assert engine.recall(other) == (TierName.DISK,) * 5


@pytest.mark.parametrize("ends", ["released", "late"])
def test_a_dropped_block_that_comes_when_nobody_waits_for_it_takes_no_room(
    start: Start, clock: ManualClock, ends: str
) -> None:
    engine, tier = with_blocks_below(start)
    tier.faults.hung = set(KEYS)
    ticket = engine.pool.acquire(KEYS, 5.0)
    if ends == "late":
        clock.advance(6.0)
        assert engine.pool.poll(ticket).offsets == ()
    else:
        engine.pool.release(ticket)
    engine.pool.drop(KEYS)
    wait_until(lambda: len(tier._hung) == len(KEYS))
    tier.faults.hung = set()
    wait_until(lambda: not tier._hung)
    assert engine.pool.stats().leases == 0
    assert engine.pool.find(KEYS).blocks == 0
    engine.pool.clear()
    wait_until(lambda: engine.pool.stats().tiers[0].used_bytes == 0)


@pytest.mark.parametrize("commits_first", [True, False])
def test_a_block_that_is_computed_while_it_comes_from_a_store_is_there_once(
    start: Start, commits_first: bool
) -> None:
    engine, tier = with_blocks_below(start)
    answers = engine.pool.reserve(KEYS)
    assert {answer.verdict for answer in answers} == {Verdict.RESERVED}
    for key, answer in zip(KEYS, answers, strict=True):
        engine.fill(key, answer.offset)
    tier.faults.hung = set(KEYS) if commits_first else set()
    ticket = engine.pool.acquire(KEYS, 5.0)
    if commits_first:
        engine.pool.commit(KEYS)
        tier.faults.hung = set()
    wait_until(lambda: engine.pool.poll(ticket).state is RecallState.READY)
    recall = engine.pool.poll(ticket)
    assert recall.tiers == (REMOTE,) * 10
    if not commits_first:
        engine.pool.commit(KEYS)
    engine.check(KEYS, recall)
    assert engine.pool.find(KEYS).tiers == (TierName.HOST,) * 10
    engine.pool.release(ticket)
    engine.pool.clear()
    wait_until(lambda: engine.pool.stats().tiers[0].used_bytes == 0)


@pytest.mark.parametrize("outcome", [Outcome.CORRUPT, Outcome.ERROR, Outcome.MISS])
def test_a_block_that_does_not_come_cuts_the_recall(start: Start, outcome: Outcome) -> None:
    engine, tier = with_blocks_below(start)
    tier.faults.gets = {KEYS[4]: outcome}
    assert engine.recall(KEYS) == (REMOTE,) * 4
    assert engine.pool.stats().leases == 0
    if outcome is not Outcome.MISS:
        assert engine.pool.find(KEYS).blocks == 4
        tier.faults.gets = {}
        assert engine.save(KEYS)[Verdict.RESERVED] == 1
        assert len(engine.recall(KEYS)) == 10
    engine.pool.clear()
    wait_until(lambda: engine.pool.stats().tiers[0].used_bytes == 0)


def test_stores_that_fail_are_tried_again_but_not_for_ever(start: Start) -> None:
    tier = FaultyTier(MemoryTier())
    engine = start(tier, by_hand=False)
    tier.faults.shed = {KEYS[3]}
    engine.save(KEYS)
    assert not engine.pool.flush(KEYS, 3600.0), "it gives up long before"
    assert engine.pool.flush(KEYS[:3], 60.0)
    tier.faults.shed = set()
    assert engine.pool.find(KEYS).blocks == 10


def test_blocks_that_were_shed_are_stored_when_they_are_used(start: Start) -> None:
    tier = MemoryTier(capacity_blocks=4)
    engine = start(tier)
    engine.save(KEYS)
    wait_until(lambda: tier.stats().blocks == 4)
    tier.drop(KEYS[:4])
    engine.recall(KEYS)
    wait_until(lambda: tier.stats().blocks == 4)
    assert tier.contains(KEYS[4])


def test_blocks_being_stored_are_not_evicted(tmp_path: Path, start: Start) -> None:
    io = FaultyIo()
    engine = start(DiskTier(DiskConfig(tmp_path, 64 * MIB), io=io), by_hand=False)
    io.gate.clear()
    engine.save(chain(NAMESPACE, 32))
    assert engine.save(chain(NAMESPACE, 4, "more")) == {Verdict.REFUSED: 4}
    assert not engine.pool.flush(KEYS, 0.05)
    io.gate.set()
    assert engine.pool.flush(chain(NAMESPACE, 32), 60.0)
    # Durable is a moment before the pool has heard of it.
    wait_until(lambda: engine.save(chain(NAMESPACE, 4, "more")) == {Verdict.RESERVED: 4})


def test_saved_again_while_the_old_ones_are_being_stored(tmp_path: Path, start: Start) -> None:
    io = FaultyIo()
    engine = start(DiskTier(DiskConfig(tmp_path, 64 * MIB), io=io), by_hand=False)
    io.gate.clear()
    engine.save(KEYS)
    engine.pool.clear()
    assert engine.save(KEYS) == {Verdict.RESERVED: 10}
    assert engine.pool.stats().tiers[0].used_bytes == 20 * SLOT_BYTES
    io.gate.set()
    assert engine.pool.flush(KEYS, 60.0)
    assert engine.pool.stats().tiers[0].used_bytes == 10 * SLOT_BYTES
    assert engine.recall(KEYS) == (TierName.HOST,) * 10
    engine.pool.clear()
    wait_until(lambda: engine.pool.stats().tiers[0].used_bytes == 0)


def test_saved_again_before_the_end_of_the_first_was_heard_of(start: Start) -> None:
    clock, store = ManualClock(), MemoryTier()
    late = LatencyTier(store, 0.5, clock)
    engine = start(late, by_hand=False)
    engine.save(KEYS)
    wait_until(lambda: all(map(store.contains, KEYS)))  # but the pool does not know
    engine.pool.clear()
    assert engine.save(KEYS) == {Verdict.RESERVED: 10}
    late.delay_s = 0.0
    clock.advance(0.5)
    assert engine.pool.flush(KEYS, 60.0)
    assert engine.pool.stats().tiers[0].used_bytes == 10 * SLOT_BYTES


def test_durable_blocks_are_evicted_first(start: Start) -> None:
    tier = FaultyTier(MemoryTier())
    engine = start(tier, blocks=16)
    first, second = chain(NAMESPACE, 8, "first"), chain(NAMESPACE, 8, "second")
    tier.faults.shed = set(first)
    engine.save(first)
    engine.save(second)
    assert engine.pool.flush(second, 60.0)
    wait_until(lambda: engine.pool.stats().queued_writes == 0)
    engine.save(chain(NAMESPACE, 4, "third"))
    assert engine.pool.find(first).tiers == (TierName.HOST,) * 8
    assert REMOTE in engine.pool.find(second).tiers


def test_the_tier_is_told_chain_and_depth(start: Start) -> None:
    tier = MemoryTier()
    tier.touch = Mock()  # type: ignore[method-assign]
    engine = start(tier)
    engine.save(KEYS[:4])
    answers = engine.pool.reserve(KEYS[4:], KEYS[3])  # type: ignore[call-arg]
    assert {answer.verdict for answer in answers} == {Verdict.RESERVED}
    engine.pool.commit(KEYS[4:])
    assert engine.pool.flush(KEYS, 60.0)
    assert [tier.depth_of(key) for key in KEYS] == list(range(10))
    engine.pool.touch(KEYS)
    assert tier.touch.call_args.args[0] == KEYS


def test_many_threads_at_once(tmp_path: Path, start: Start) -> None:
    tier = LatencyTier(DiskTier(DiskConfig(tmp_path, 64 * MIB)), 0.002)
    engine = start(tier, by_hand=False)
    failures: list[BaseException] = []
    recalled: list[int] = []

    def work(seed: int) -> None:
        try:
            for step in range(30):
                keys = chain(NAMESPACE, 8, f"{(seed + step) % 7}")
                ticket = engine.pool.acquire(keys, 5.0)
                recall = engine.wait(ticket)
                engine.check(keys, recall)
                engine.save(keys)
                engine.check(keys, recall)
                recalled.append(len(recall.offsets))
                engine.pool.release(ticket)
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert sum(recalled) > 100
    engine.pool.clear()
    wait_until(lambda: engine.pool.stats().tiers[0].used_bytes == 0)
    assert engine.pool.stats().leases == 0


def test_open_leaves_nothing_when_it_fails(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    with pytest.raises(ConfigError, match="host_size"):
        Pool.open(PoolConfig(available_memory() * 2, DiskConfig(tmp_path / "a", 64 * MIB)))
    assert list(tmp_path.iterdir()) == []
    with Pool.open(PoolConfig(MIB, DiskConfig(tmp_path / "b", 64 * MIB))):
        with pytest.raises(TierError, match="is in use"):
            Pool.open(PoolConfig(MIB, DiskConfig(tmp_path / "b", 64 * MIB)))
        with pytest.raises(ConfigError, match="policy"):
            Pool.open(PoolConfig(MIB, DiskConfig(tmp_path / "c", 64 * MIB), policy="none"))
    assert not (tmp_path / "c").exists()
    begun = set(threading.enumerate()) - before
    assert not [thread for thread in begun if thread.name.startswith("kvrecall")]


def test_stats_have_latencies(tmp_path: Path) -> None:
    with Pool.open(PoolConfig(32 * SLOT_BYTES, DiskConfig(tmp_path, 64 * MIB))) as pool:
        pool.register(NAMESPACE, BLOCK_BYTES)
        engine = Engine(pool)
        engine.save(KEYS)
        assert pool.flush(KEYS, 60.0)
        push_out(engine)
        assert TierName.DISK in engine.recall(KEYS)
        stats = pool.stats()
        host, disk = stats.tiers
        assert host.name == "host"
        assert host.evictions > 0
        assert disk.name == "disk"
        assert disk.writes == 10 + 64
        assert disk.write_bytes == 74 * SLOT_BYTES
        assert disk.reads == disk.hits > 0
        for name, count in (("disk_read_seconds", disk.reads), ("disk_write_seconds", 74)):
            buckets = stats.histograms[name]
            assert buckets[-1] == (float("inf"), count)
            assert [n for _, n in buckets] == sorted(n for _, n in buckets)
        engine.close()


class Held(WrapperTier):
    """What the pool's own thread hears of an operation, it acts on only after another thread has
    asked twice what has ended."""

    def __init__(self, inner: Tier) -> None:
        super().__init__(inner)
        self.heard, self._asked, self._asks = threading.Event(), threading.Event(), 0

    def poll(self, timeout_s: float = 0.0) -> list[Done]:
        done = self.inner.poll(timeout_s)
        if threading.current_thread() is threading.main_thread():
            self._asks += self.heard.is_set()
            if self._asks > 1:
                self._asked.set()
        elif done:
            self.heard.set()
            self._asked.wait(10.0)
        return done


def test_a_pool_that_closes_stores_what_it_owes_to_the_remote_tier(tmp_path: Path) -> None:
    """Also a block whose write to disk has ended a moment ago."""
    store = MemoryStore()
    disk = DiskTier(DiskConfig(tmp_path, 64 * MIB))
    tier = Held(disk)
    below = Cascade(tier, RemoteTier(store, RemoteConfig("memory")))  # type: ignore[arg-type]
    pool = Pool(Arena.create(32 * SLOT_BYTES), below, terms=PoolTerms(remote_write="back"))
    with pool:
        pool.register(NAMESPACE, BLOCK_BYTES)
        Engine(pool).save(KEYS[:1])
        assert tier.heard.wait(60.0)
        assert not store.values
    assert len(store.values) == 1
