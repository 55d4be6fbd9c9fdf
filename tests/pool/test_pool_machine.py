from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis.stateful import invariant
from support.pool_machine import PoolMachine

from kvrecall.config import DiskConfig, PoolConfig, RemoteConfig
from kvrecall.pool import Pool
from kvrecall.pool.base import PoolClient
from kvrecall.pool.disk.catalog import Catalog, SlabUse
from kvrecall.pool.disk.slabs import slab_of
from kvrecall.pool.residents import Resident, Residents


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
            _count(self.pool._host)
            stored = [b.slot_bytes for b in self.pool._host.blocks.values() if b.stored]
            assert +self.pool._host.stored == Counter(stored)
        with disk._catalog._lock:
            _count_disk(disk._catalog)


def idle(block: Resident) -> bool:
    return not (block.leases or block.io_refs or block.pinned)


def _count(residents: Residents[Any]) -> None:
    blocks: list[Resident] = list(residents.blocks.values())
    sizes = {block.slot_bytes for block in blocks if idle(block)}
    for size in {block.slot_bytes for block in blocks}:
        assert residents.has_idle(size) == (size in sizes)
        assert residents.has_idle(size, others=True) == bool(sizes - {size})
    assert residents.pinned_bytes == sum(b.slot_bytes for b in blocks if b.pinned)
    extents = residents._extents.values()
    assert sum(len(extent.blocks) for extent in extents) == len(blocks)
    for extent in extents:
        members = [residents.blocks[key] for key in extent.blocks]
        assert all(block.extent is extent for block in members)
        assert extent.fixed == sum(not idle(block) for block in members)
        assert extent.pinned == sum(block.pinned for block in members)
    assert all(not idle(residents.blocks[key]) for key in residents._held)


def _count_disk(catalog: Catalog) -> None:
    state, address = catalog._state.cells, catalog._address.cells
    here = [number for number in range(catalog._table.size) if state[number]]
    assert len(here) == len(catalog)
    assert len({address[number] for number in here}) == len(here)
    pinned = {number for number in here if state[number] & 2}
    read = {number for number in here if address[number] in catalog._reading}
    assert catalog.pinned_bytes == sum(map(catalog._slot_bytes, pinned))
    assert catalog.used_bytes == sum(map(catalog._slot_bytes, here))
    slabs = {slab_of(address[number]) for number in here}
    uses = {
        slab: SlabUse(
            sum(slab_of(address[number]) == slab for number in here),
            sum(slab_of(address[number]) == slab for number in pinned | read),
            sum(slab_of(address[number]) == slab for number in pinned),
        )
        for slab in slabs
    }
    assert catalog._slabs == uses
    assert catalog._held <= read
    ranked = set(catalog._policy.victims_n(1 << 20, lambda number: True, catalog.now()))
    ranked |= set(catalog._tails.oldest_n())
    assert ranked <= set(here) - pinned
    assert ranked | catalog._held == set(here) - pinned


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
