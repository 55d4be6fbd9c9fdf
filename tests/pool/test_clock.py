"""Blocks age by time that passes, whatever the wall clock is set to, also over restarts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.clocks import HostClocks
from support.stores import MemoryStore

from kvrecall.block import TierName
from kvrecall.config import DiskConfig, PoolTerms, RemoteConfig, TenantRules, TenantTerms
from kvrecall.pool.admin import PoolAdmin
from kvrecall.pool.arena import Arena
from kvrecall.pool.cascade import Cascade
from kvrecall.pool.disk import DiskTier
from kvrecall.pool.pool import Pool
from kvrecall.pool.remote.tier import RemoteTier
from kvrecall.testing import chain, wait_until
from kvrecall.testing.pool_contract import Engine
from kvrecall.testing.tier_contract import BLOCK_BYTES, NAMESPACE
from pool.disk.indexes import forging

MIB = 1 << 20
YEAR = 365 * 86400.0
TTL = PoolTerms(tenants=TenantRules(TenantTerms(ttl_s=1000.0)))
KEYS, MORE = chain(NAMESPACE, 5), chain(NAMESPACE, 5, "more")


class Host:
    """A host with a pool whose blocks expire after 1,000 seconds."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.clocks = HostClocks()
        self.store = MemoryStore()

    @contextlib.contextmanager
    def process(self, with_store: bool = False) -> Iterator[Pool]:
        clock = self.clocks.clock()
        disk = DiskTier(DiskConfig(self.path, 64 * MIB), clock=clock)
        wait_until(disk._engine.recovered.is_set)
        remote = RemoteTier(self.store, RemoteConfig("memory"))
        below = Cascade(disk, remote) if with_store else disk
        with Pool(Arena.create(4 * MIB), below, clock=clock) as pool:
            pool.register(NAMESPACE, BLOCK_BYTES)
            yield pool

    def save(self, pool: Pool) -> None:
        engine = Engine(pool)
        engine.save(KEYS)
        assert pool.flush(KEYS, 60.0)
        engine.close()

    def left(self, pool: Pool) -> int:
        """Blocks that are on disk after those that are too old were dropped."""
        disk = pool.admin.disk
        assert disk is not None
        PoolAdmin(pool, disk, TTL, pool.admin.now).expire()
        return sum(map(disk.contains, KEYS))


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path / "tier")


STEPS = [56 * YEAR, 2 * YEAR, -2 * YEAR, -56 * YEAR]


@pytest.mark.parametrize("step", STEPS)
def test_a_clock_that_is_set_changes_no_age(host: Host, step: float) -> None:
    with host.process() as pool:
        host.save(pool)
        host.clocks.advance(600)
        host.clocks.wall += step
        assert host.left(pool) == 5
        host.clocks.advance(300)
        assert host.left(pool) == 5
        host.clocks.advance(200)
        assert host.left(pool) == 0
        assert not any(map(pool.is_in_host, KEYS))


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("when", ["before", "between"])
def test_nor_does_it_over_a_restart_of_the_process(host: Host, step: float, when: str) -> None:
    with host.process() as pool:
        host.save(pool)
        host.clocks.wall += step if when == "before" else 0
        host.clocks.advance(300)
    host.clocks.wall += step if when == "between" else 0
    host.clocks.advance(300)
    with host.process() as pool:
        assert host.left(pool) == 5
        host.clocks.advance(300)
    with host.process() as pool:
        assert host.left(pool) == 5
        host.clocks.advance(200)
        assert host.left(pool) == 0


def test_a_host_that_is_off_for_longer_than_the_ttl(host: Host) -> None:
    with host.process() as pool:
        host.save(pool)
    host.clocks.reboot(off_s=900)
    with host.process() as pool:
        assert host.left(pool) == 5
    host.clocks.reboot(off_s=200)
    with host.process() as pool:
        assert host.left(pool) == 0


@pytest.mark.parametrize("step", STEPS)
def test_a_host_that_boots_with_another_time(host: Host, step: float) -> None:
    """Then it is not known for how long it was off; the blocks age on from where they were."""
    with host.process() as pool:
        host.save(pool)
        host.clocks.advance(600)
    host.clocks.reboot(off_s=60)
    host.clocks.wall += step
    with host.process() as pool:
        host.clocks.advance(200)
        host.clocks.wall -= step
        assert host.left(pool) == 5
        host.clocks.advance(300)
        assert host.left(pool) == 0


def test_a_use_in_the_future_counts_as_one_now(host: Host) -> None:
    with host.process() as pool:
        host.save(pool)
    with forging(host.path) as db:
        db.execute("UPDATE blocks SET used = used + ?", (int(9 * YEAR),))
    with host.process() as pool:
        assert host.left(pool) == 5
        host.clocks.advance(1100)
        assert host.left(pool) == 0


def test_what_expires_on_a_host_stays_in_the_store_of_all(host: Host) -> None:
    with host.process(with_store=True) as pool:
        host.save(pool)
        wait_until(lambda: len(host.store.values) == 5)
        host.clocks.advance(1100)
        assert host.left(pool) == 0
        assert not any(map(pool.is_in_host, KEYS))
        assert pool._below.tiers_of(KEYS) == [TierName.REMOTE] * 5
        assert len(host.store.values) == 5
        pool.drop(KEYS)
        wait_until(lambda: not host.store.values)


def test_a_note_that_is_none_or_of_later_is_no_time() -> None:
    clocks = HostClocks()
    clocks.advance(500)
    note = clocks.clock().note()
    clocks.advance(-50)
    assert clocks.clock().since(note) == 0.0
    for wrong in ("", "5", "[1, 2]", '["boot 0", null, null]', '["x", [], 1]', "[" * 100_000):
        with pytest.raises(ValueError):  # noqa: PT011 - as the contract says
            clocks.clock().since(wrong)
