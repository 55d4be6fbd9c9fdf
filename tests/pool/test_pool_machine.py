from __future__ import annotations

import dataclasses
import unittest
from collections import Counter
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis.stateful import invariant
from support.pool_machine import PoolMachine

from kvrecall.config import DiskConfig, PoolConfig, RemoteConfig
from kvrecall.pool import Pool
from kvrecall.pool.base import PoolClient
from pool.counts import count_catalog, count_host


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


def case_of(machine: type[PoolMachine], examples: int = 8) -> type[unittest.TestCase]:
    machine.TestCase.settings = settings(
        max_examples=examples,
        stateful_step_count=40,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    return machine.TestCase


TestPoolMachine = case_of(CountedMachine, 25)
TestHazardMachine = case_of(HazardMachine)
TestBackMachine = case_of(BackMachine)
TestSelectiveMachine = case_of(SelectiveMachine)
TestRemoteBackMachine = case_of(RemoteBackMachine)
