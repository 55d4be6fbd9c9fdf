from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule
from support.between import meanwhile
from support.counts import count_catalog, count_residents
from support.pool_machine import CHAINS, PoolMachine

from kvrecall.config import DiskConfig, PoolConfig, RemoteConfig
from kvrecall.pool import Pool
from kvrecall.pool.base import PoolClient


class CountedMachine(PoolMachine):
    """Also counts by hand what the residents count as they go."""

    @invariant()
    def residents_are_counted(self) -> None:
        if not hasattr(self, "pool"):
            return
        assert isinstance(self.pool, Pool)
        disk = self.pool.admin.disk
        assert disk is not None
        with self.pool._changed:
            count_residents(self.pool._host)
            stored = [b.slot_bytes for b in self.pool._host.blocks.values() if b.stored]
            assert +self.pool._host.stored == Counter(stored)
        with disk._catalog._lock:
            count_catalog(disk._catalog)

    @rule(
        of=CHAINS,
        other=CHAINS,
        share=st.sampled_from((0.5, 1.0)),
        what=st.lists(
            st.sampled_from(("clear", "save", "touch", "find", "unpin", "resize")), max_size=5
        ),
    )
    def touch_in_parts(
        self, of: tuple[str, str, int], other: tuple[str, str, int], share: float, what: list[str]
    ) -> None:
        """Between two of them other things happen."""
        calls: dict[str, Callable[[], None]] = {
            "clear": self.clear,
            "save": lambda: self.save(other),
            "touch": lambda: self.touch(other),
            "find": lambda: self.find(other),
            "unpin": lambda: self.unpin(other),
            "resize": lambda: self.resize(share),
        }
        with meanwhile([calls[name] for name in what]):
            self.touch(of)


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
