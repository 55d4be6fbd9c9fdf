from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis.stateful import invariant
from support.counts import count_catalog, count_host
from support.pool_machine import PoolMachine

from kvrecall.config import DiskConfig, PoolConfig, RemoteConfig
from kvrecall.pool import Pool
from kvrecall.pool.base import PoolClient


class CountedMachine(PoolMachine):
    """Also counts by hand what the tiers count as they go."""

    @invariant()
    def tiers_are_counted(self) -> None:
        if not hasattr(self, "pool"):
            return
        assert isinstance(self.pool, Pool)
        disk = self.pool.admin.disk
        assert disk is not None
        with self.pool._changed:
            count_host(self.pool._host)
            stored = [b.slot_bytes for b in self.pool._host.blocks.values() if b.stored]
            assert +self.pool._host.stored == Counter(stored)
        with disk.catalog._lock:
            count_catalog(disk.catalog)


class HazardMachine(CountedMachine):
    """The same with the policy that keeps blocks out."""

    def open_pool(self, folder: Path) -> PoolClient:
        return Pool.open(PoolConfig(1 << 20, DiskConfig(folder, 32 << 20), policy="hazard"))


class BackMachine(CountedMachine):
    terms = dataclasses.replace(PoolMachine.terms, write_policy="back")


class SelectiveMachine(CountedMachine):
    terms = dataclasses.replace(PoolMachine.terms, write_policy="selective")


class RemoteBackMachine(CountedMachine):
    """Over a remote store that is written back."""

    terms = dataclasses.replace(PoolMachine.terms, remote_write="back")
    keeps_cleared = True

    def open_pool(self, folder: Path) -> PoolClient:
        remote = RemoteConfig("support.stores:make_store", {"name": str(folder)})
        disk = DiskConfig(folder, 32 << 20)
        return Pool.open(PoolConfig(1 << 20, disk, terms=self.terms, remote=remote))


TestHazardMachine = HazardMachine.TestCase
TestHazardMachine.settings = settings(
    max_examples=8,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestBackMachine = BackMachine.TestCase
TestSelectiveMachine = SelectiveMachine.TestCase
TestRemoteBackMachine = RemoteBackMachine.TestCase
for _case in (TestBackMachine, TestSelectiveMachine, TestRemoteBackMachine):
    _case.settings = settings(
        max_examples=8,
        stateful_step_count=40,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
del _case  # or it is taken for one more test
TestPoolMachine = CountedMachine.TestCase
TestPoolMachine.settings = settings(
    max_examples=25,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
