from __future__ import annotations

import dataclasses
from pathlib import Path

from hypothesis import HealthCheck, settings

from kvrecall.config import DiskConfig, PoolConfig, RemoteConfig
from kvrecall.pool import Pool
from kvrecall.pool.base import PoolClient
from kvrecall.testing.pool_machine import PoolMachine


class HazardMachine(PoolMachine):
    """The same with the policy that keeps blocks out."""

    def open_pool(self, folder: Path) -> PoolClient:
        return Pool.open(PoolConfig(1 << 20, DiskConfig(folder, 32 << 20), policy="hazard"))


class BackMachine(PoolMachine):
    terms = dataclasses.replace(PoolMachine.terms, write_policy="back")


class SelectiveMachine(PoolMachine):
    terms = dataclasses.replace(PoolMachine.terms, write_policy="selective")


class RemoteBackMachine(PoolMachine):
    """Over a remote store that is written back."""

    terms = dataclasses.replace(PoolMachine.terms, remote_write="back")

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
TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(
    max_examples=25,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
