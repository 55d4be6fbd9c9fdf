from __future__ import annotations

from pathlib import Path

import pytest
from support.disks import DiskFaults, FaultyIo
from support.tiers import FaultyTier, LatencyTier, MemoryTier, RecordingTier

from kvrecall.block import TierName
from kvrecall.config import DiskConfig
from kvrecall.pool.disk import DiskTier
from kvrecall.pool.tier import Get, NullTier, Outcome, Put, PutVerdict, Tier
from kvrecall.testing.blocks import chain, namespace
from kvrecall.testing.tier_contract import BLOCK_BYTES, NAMESPACE, Bench, TierContract

MIB = 1 << 20


class TestDiskTier(TierContract):
    def make(self, path: Path) -> Tier:
        return DiskTier(DiskConfig(path, 64 * MIB))


class TestBufferedDiskTier(TierContract):
    def make(self, path: Path) -> Tier:
        return DiskTier(DiskConfig(path, 64 * MIB), io=FaultyIo(DiskFaults(no_direct=True)))


class TestMemoryTier(TierContract):
    def make(self, path: Path) -> Tier:
        return MemoryTier()


class TestLatencyTier(TierContract):
    def make(self, path: Path) -> Tier:
        return LatencyTier(MemoryTier(), 0.02)


class TestFaultyTier(TierContract):
    def make(self, path: Path) -> Tier:
        return FaultyTier(MemoryTier())


class TestRecordingTier(TierContract):
    def make(self, path: Path) -> Tier:
        return RecordingTier(MemoryTier())


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
