from __future__ import annotations

import queue
import random
import threading
import time
from pathlib import Path

import pytest
from support.disks import DiskFaults, FaultyIo
from support.tiers import FaultyTier

from kvrecall.block import BlockKey, TierName
from kvrecall.config import DiskConfig
from kvrecall.pool.disk import DiskTier
from kvrecall.pool.tier import Done, Get, NullTier, Outcome, Put, PutVerdict, Tier, ended
from kvrecall.testing import chain, namespace, wait_until
from kvrecall.testing.tier_contract import BLOCK_BYTES, NAMESPACE, Bench, TierContract
from kvrecall_lab.memory_tier import MemoryTier

MIB = 1 << 20


class TestDiskTier(TierContract):
    def make(self, path: Path) -> Tier:
        return DiskTier(DiskConfig(path, 64 * MIB))


class TestMemoryTier(TierContract):
    def make(self, path: Path) -> Tier:
        return MemoryTier()


class TestFaultyTier(TierContract):
    def make(self, path: Path) -> Tier:
        return FaultyTier(MemoryTier())


def test_null_tier_takes_and_finds_nothing() -> None:
    tier = NullTier(TierName.REMOTE)
    key = chain(namespace(), 1)[0]
    slot = memoryview(bytearray(4096))
    assert tier.submit_put([Put(key, None, 0, slot, 10)]) == [PutVerdict.SHED]
    assert not tier.contains(key)
    tier.submit_get([Get(key, slot)])
    assert [done.outcome for done in tier.poll()] == [Outcome.MISS]
    assert tier.poll() == []


@pytest.mark.parametrize(("wanted", "possible"), [(True, True), (True, False), (False, True)])
def test_disk_says_whether_it_is_direct(tmp_path: Path, wanted: bool, possible: bool) -> None:
    io = FaultyIo(DiskFaults(no_direct=not possible))
    tier = DiskTier(DiskConfig(tmp_path, 64 * MIB, direct_io=wanted), io=io)
    tier.register(NAMESPACE, BLOCK_BYTES)
    Bench(tier).put(chain(NAMESPACE, 1))
    assert tier.is_direct == (wanted and possible)
    tier.close()


def test_who_waits_is_back_in_time_though_another_took_what_came() -> None:
    """Something comes just as the time is up, and is taken by another: again and again."""
    timeout_s = 0.002
    done: queue.Queue[Done] = queue.Queue()
    draw = random.Random(3)
    rounds = [0]
    stop = threading.Event()

    def wait() -> None:
        while not stop.is_set():
            ended(done, timeout_s)
            rounds[0] += 1

    waiter = threading.Thread(target=wait, daemon=True)
    waiter.start()
    for _ in range(200):
        before = rounds[0]
        time.sleep(timeout_s * draw.uniform(0.5, 1.1))
        done.put(Done(BlockKey(b"key"), Outcome.STORED))
        ended(done, 0.0)
        wait_until(lambda before=before: rounds[0] > before)  # type: ignore[misc]
    stop.set()
    waiter.join(10.0)
    assert not waiter.is_alive()
