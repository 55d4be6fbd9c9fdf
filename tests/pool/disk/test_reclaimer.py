"""Slabs are emptied: what moves is durable before its row says so, and what must stay stays."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
from support.disks import DiskBench, open_disk

from kvrecall.block import tenant_of
from kvrecall.config import Amount, DiskConfig, PoolTerms, TenantRules, TenantTerms
from kvrecall.pool.disk import DiskTier
from kvrecall.pool.disk.index import Index
from kvrecall.pool.tier import Outcome, Put
from kvrecall.testing import chain, namespace, wait_until
from kvrecall.testing.tier_contract import NAMESPACE, Bench
from pool.disk.test_disk import full, rows
from pool.disk.test_flusher import NotingIo, lost_slots

MIB = 1 << 20
SLOTS = 341  # of a slab
MOVED = chain(NAMESPACE, 20, "moved")


class Moves:
    """A tier whose third slab holds ``MOVED``, for which the two others have ten slots each."""

    def __init__(self, folder: Path) -> None:
        self.io = NotingIo()
        self.bench = bench = open_disk(folder, io=self.io)
        self.others = [chain(NAMESPACE, SLOTS, name) for name in "ab"]
        for keys in (*self.others, MOVED):
            assert set(bench.put(keys)) == {Outcome.STORED}
        bench.tier.drop([key for keys in self.others for key in keys[-10:]])
        wait_until(lambda: bench.tier.catalog.pending_free == 0)
        self.slots = bench.tier._store.slot_class(3 * 4096)
        wait_until(lambda: self.slots.free == SLOTS)

    def shrink(self) -> None:
        self.bench.tier.resize(13 * MIB)
        wait_until(lambda: len(self.bench.tier._store.slabs()) == 2)
        assert self.bench.tier.wait_pins_durable(30.0)  # the round has ended


def test_what_moves_is_durable_before_its_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moves = Moves(tmp_path)
    update = Index.update
    seen: list[tuple[int, set[str]]] = []

    def noted(self: Index, column: Any, values: Any) -> None:
        if column == "address":
            seen.append((len({place >> 40 for place, _ in values}), set(moves.io.unsynced)))
        update(self, column, values)

    monkeypatch.setattr(Index, "update", noted)
    moves.shrink()
    assert seen == [(2, set())], "two slabs, and nothing in them that a power cut would lose"
    assert moves.bench.get(MOVED) == [Outcome.LOADED] * 20
    assert moves.bench.holds(MOVED)


def test_a_move_that_fails_gives_back_the_slots(tmp_path: Path) -> None:
    moves = Moves(tmp_path)
    moves.io.faults.sync_error = errno.EIO
    moves.shrink()
    assert lost_slots(moves.bench) == 0
    assert moves.bench.get(MOVED) == [Outcome.MISS] * 20


def test_what_is_dropped_while_it_moves_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moves = Moves(tmp_path)
    update, tier = Index.update, moves.bench.tier

    def dropping(self: Index, column: Any, values: Any) -> None:
        update(self, column, values)
        if column == "address":
            tier.drop(MOVED[:5])

    monkeypatch.setattr(Index, "update", dropping)
    moves.shrink()
    assert lost_slots(moves.bench) == 0
    tier.close()
    again = open_disk(tmp_path)
    assert again.get(MOVED) == [Outcome.MISS] * 5 + [Outcome.LOADED] * 15


@pytest.mark.parametrize("pinned", [1, 20])
def test_pinned_blocks_outlive_a_lowered_limit(tmp_path: Path, pinned: int) -> None:
    """Though nothing else can be evicted, as all of it is being read."""
    bench = open_disk(tmp_path)
    tier = bench.tier
    first = chain(NAMESPACE, SLOTS)
    bench.put(first)
    bench.put(MOVED)
    tier.catalog.pin(MOVED[:pinned])
    reads = [entry for key in first if (entry := tier.catalog.acquire(key))]
    tier.resize(9 * MIB)
    wait_until(lambda: len(tier.catalog.slab_uses()) == 1)
    for entry in reads:
        tier.catalog.release(entry)
    wait_until(lambda: tier.surplus_bytes == 0)
    assert bench.get(MOVED[:pinned]) == [Outcome.LOADED] * pinned


def test_blocks_of_a_slab_that_is_given_to_another_size_are_evicted(tmp_path: Path) -> None:
    bench, large = open_disk(tmp_path, 16 * MIB), namespace("large")
    for name in "abc":
        bench.put(chain(NAMESPACE, SLOTS, name))
    bench.tier.register(large, 2_000_000)
    assert set(Bench(bench.tier, 4, 2_000_000).put(chain(large, 2))) == {Outcome.STORED}
    assert (stats := bench.tier.stats()).evictions == 3 * SLOTS + 2 - stats.blocks > 0


def test_a_slab_with_a_pinned_block_is_not_given_to_another_size(tmp_path: Path) -> None:
    bench, large = open_disk(tmp_path, 16 * MIB), namespace("large")
    kept = []
    for name in range(40):
        keys = chain(NAMESPACE, 40, str(name))
        bench.put(keys)
        kept += keys[:2]
        bench.tier.catalog.pin(keys[:2])
    bench.tier.register(large, 2_000_000)
    assert set(Bench(bench.tier, 4, 2_000_000).put(chain(large, 2))) == {Outcome.SHED}
    assert set(bench.get(kept)) == {Outcome.LOADED}


def test_slots_are_free_once_their_rows_could_be_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = open_disk(tmp_path)
    bench.put(MOVED)
    monkeypatch.setattr(Index, "delete", full)
    monkeypatch.setattr(Index, "delete_all", full)
    bench.tier.drop(MOVED[:8])
    assert lost_slots(bench) == bench.tier.catalog.pending_free == 8
    monkeypatch.undo()
    assert lost_slots(bench) == 0
    assert len(rows(tmp_path)) == 12


def test_a_tenant_at_its_limit_stores_the_beginning_of_a_chain(tmp_path: Path) -> None:
    ann = tenant_of("ann")
    rules = TenantRules(named={ann: TenantTerms(disk=Amount(8 * 3 * 4096))})
    tier = DiskTier(DiskConfig(tmp_path, 64 * MIB), terms=PoolTerms(tenants=rules))
    bench = DiskBench(tier)
    tier.register(NAMESPACE, bench.block_bytes)
    keys = chain(NAMESPACE, 12)
    parents = [None, *keys]
    puts = [
        Put(key, parents[at], at, bench.slot(at), bench.block_bytes, ann)
        for at, key in enumerate(keys)
    ]
    tier.submit_put(puts)
    assert bench.collect(keys) == [Outcome.STORED] * 8 + [Outcome.SHED] * 4
    tier.close()


def test_a_slot_is_free_when_its_last_read_ends(tmp_path: Path) -> None:
    bench = open_disk(tmp_path)
    bench.put(MOVED)
    catalog = bench.tier.catalog
    first, second = catalog.acquire(MOVED[0]), catalog.acquire(MOVED[0])
    assert first
    assert second
    bench.tier.drop(MOVED[:1])
    assert lost_slots(bench) == 1
    catalog.release(first)
    assert lost_slots(bench) == 1
    catalog.release(second)
    assert lost_slots(bench) == 0
