"""Group commit: what one batch makes durable, and what a failing index leaves for later."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from support.disks import DiskBench, FaultyIo, open_disk

from kvrecall.pool.disk.index import Index
from kvrecall.pool.tier import Outcome
from kvrecall.testing import chain, namespace, wait_until
from kvrecall.testing.tier_contract import NAMESPACE, Bench
from pool.disk.test_disk import full, rows

KEYS = chain(NAMESPACE, 32)
LARGE = namespace("large")


class NotingIo(FaultyIo):
    """Notes which files of those that were written since are synced."""

    def __init__(self) -> None:
        super().__init__()
        self.unsynced: set[str] = set()

    def write(self, fd: int, *args: Any) -> int:
        self.unsynced.add(os.readlink(f"/proc/self/fd/{fd}"))
        return super().write(fd, *args)

    def sync(self, fd: int) -> None:
        super().sync(fd)
        self.unsynced.discard(os.readlink(f"/proc/self/fd/{fd}"))


def lost_slots(bench: DiskBench) -> int:
    """Slots that are neither free nor a block's, after a round of the flusher."""
    assert bench.tier.wait_pins_durable(30.0)
    classes = bench.tier._store.classes()
    return sum(one.slots - one.free for one in classes) - bench.tier.stats().blocks


def test_every_slab_of_a_batch_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    io = NotingIo()
    bench = open_disk(tmp_path, io=io)
    bench.tier.register(LARGE, 30_000)
    large = Bench(bench.tier, slots=8, block_bytes=30_000)
    keys = chain(LARGE, 8)
    insert = Index.insert
    at_rows: list[set[str]] = []
    monkeypatch.setattr(
        Index, "insert", lambda *args: (at_rows.append(set(io.unsynced)), insert(*args))[1]
    )
    io.gate.clear()
    bench.submit_put(KEYS[:1])
    wait_until(lambda: io.writes_begun > 0)
    bench.submit_put(KEYS[1:], base=1)
    large.submit_put(keys)
    io.gate.set()
    assert set(bench.collect([*KEYS, *keys])) == {Outcome.STORED}
    assert at_rows == [set(), set()], "one transaction for what waited, and its bytes before it"
    assert len(list(tmp_path.glob("slab-*.kv"))) == 2
    assert large.get(keys) == [Outcome.LOADED] * 8


def test_a_block_larger_than_the_queue_is_stored(tmp_path: Path) -> None:
    bench = open_disk(tmp_path, max_queued_bytes=4096)
    assert bench.put(KEYS[:1]) == [Outcome.STORED]


def test_a_namespace_that_came_while_the_index_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its blocks wait for its row, and take no others along."""
    bench = open_disk(tmp_path)
    bench.put(KEYS[:1])
    monkeypatch.setattr(Index, "register", full)
    other = namespace("other")
    bench.tier.register(other, bench.block_bytes)
    theirs = chain(other, 4)
    bench.submit_put([*theirs, *KEYS[1:]])
    assert bench.collect([*theirs, *KEYS[1:]]) == [Outcome.SHED] * 4 + [Outcome.STORED] * 31
    monkeypatch.undo()
    bench.tier.wait_pins_durable(30.0)  # a round of the flusher
    assert bench.put(theirs) == [Outcome.STORED] * 4
    bench.tier.close()
    assert open_disk(tmp_path).get(theirs) == [Outcome.LOADED] * 4


def test_pins_that_could_not_be_written_are_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = open_disk(tmp_path)
    bench.put(KEYS)
    monkeypatch.setattr(Index, "update", full)
    bench.tier.catalog.pin(KEYS[:3])
    assert not bench.tier.wait_pins_durable(0.2)
    bench.tier.catalog.unpin(KEYS[2:3])
    monkeypatch.undo()
    assert bench.tier.wait_pins_durable(30.0)
    bench.tier.close()
    assert open_disk(tmp_path).tier.catalog.pinned_keys() == set(KEYS[:2])


@pytest.mark.parametrize("fault", ["write_error", "sync_error", "index"])
def test_what_could_not_be_stored_keeps_no_slot(
    tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    io = FaultyIo()
    bench = open_disk(tmp_path, io=io)
    bench.put(KEYS[:2])
    if fault == "index":
        monkeypatch.setattr(Index, "insert", full)
    else:
        setattr(io.faults, fault, errno.EIO)
    assert set(bench.put(KEYS[2:])) == {Outcome.SHED}
    assert lost_slots(bench) == 0


def test_what_is_dropped_while_it_is_written_leaves_no_row(tmp_path: Path) -> None:
    io = FaultyIo()
    bench = open_disk(tmp_path, io=io)
    bench.put(KEYS[:1])
    io.gate.clear()
    bench.submit_put(KEYS[1:])
    wait_until(lambda: io.writes_begun > 2)
    bench.tier.drop(KEYS[1:9])
    io.gate.set()
    assert bench.collect(KEYS[1:]) == [Outcome.SHED] * 8 + [Outcome.STORED] * 23
    assert lost_slots(bench) == 0
    assert len(rows(tmp_path)) == 24
