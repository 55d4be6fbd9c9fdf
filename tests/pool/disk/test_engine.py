"""A folder is served while its blocks are still being found."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.clocks import ManualClock
from support.disks import DiskBench, open_disk

from kvrecall.config import DiskConfig
from kvrecall.errors import TierError
from kvrecall.pool.clock import Clock
from kvrecall.pool.disk import DiskTier, catalog, flusher, index, tier
from kvrecall.pool.disk.index import Index, IndexRow
from kvrecall.pool.tier import Outcome
from kvrecall.testing import chain, wait_until
from kvrecall.testing.tier_contract import BLOCK_BYTES, NAMESPACE, Bench
from kvrecall_lab.bench.index import key_of, write_folder
from pool.disk.test_disk import full

MIB = 1 << 20
KEYS = chain(NAMESPACE, 32)
MANY = 20_000  # blocks of a folder whose reading and deleting take a while
EARLY, LATE = KEYS[:8], KEYS[8:]


class Folder:
    """A folder of blocks of which ``open`` finds the first 8, and the others after ``go_on``."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path = path
        bench = self.bench()
        bench.put(KEYS)
        bench.tier.close()
        monkeypatch.setattr(index, "_READ_AT_ONCE", 8)
        monkeypatch.setattr(tier, "_OPENING_S", 0.0)
        self._gate = threading.Event()
        rows = Index.rows

        def slowly(this: Index) -> Iterator[tuple[list[IndexRow], list[int]]]:
            for number, part in enumerate(rows(this)):
                if number:
                    self._gate.wait(30.0)
                yield part

        monkeypatch.setattr(Index, "rows", slowly)

    def bench(self) -> DiskBench:
        return open_disk(self.path)

    def open(self) -> DiskBench:
        self._gate.clear()
        bench = self.bench()
        wait_until(lambda: bench.tier.stats().blocks == len(EARLY))
        return bench

    def go_on(self, bench: DiskBench) -> None:
        self._gate.set()
        assert bench.tier._engine.recovered.wait(30.0)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
    return Folder(tmp_path / "tier", monkeypatch)


def here(bench: Bench) -> list[bool]:
    return [bench.tier.contains(key) for key in KEYS]


@pytest.mark.parametrize("count", [1, 32])
def test_blocks_without_parents_come_back(tmp_path: Path, count: int) -> None:
    """Of prompts that are one block long."""
    roots = [chain(NAMESPACE, 1, str(n))[0] for n in range(count)]
    bench = open_disk(tmp_path / "roots")
    for key in roots:
        bench.put([key])
    bench.tier.close()
    again = open_disk(tmp_path / "roots")
    assert again.tier._engine.recovered.wait(30.0)
    assert again.get(roots) == [Outcome.LOADED] * count
    assert again.put(KEYS[:2]) == [Outcome.STORED] * 2


def test_what_is_not_found_yet_is_a_miss(folder: Folder) -> None:
    bench = folder.open()
    assert here(bench) == [True] * 8 + [False] * 24
    assert [tier is not None for tier in bench.tier.tiers_of(KEYS)] == here(bench)
    assert set(bench.get(EARLY)) == {Outcome.LOADED}
    assert set(bench.get(LATE)) == {Outcome.MISS}
    folder.go_on(bench)
    assert all(here(bench))
    assert set(bench.get(LATE)) == {Outcome.LOADED}


def test_new_blocks_wait_and_those_that_are_there_are_not_stored_twice(folder: Folder) -> None:
    bench = folder.open()
    new = chain(NAMESPACE, 4, "new")
    waiting = threading.Thread(target=bench.put, args=(LATE[:8] + new,))
    waiting.start()
    wait_until(lambda: bench.tier.queued()[0] == 12)
    folder.go_on(bench)
    waiting.join()
    assert bench.tier.stats().blocks == 36
    assert set(bench.get(KEYS + new)) == {Outcome.LOADED}


@pytest.mark.parametrize("what", ["drop", "clear", "size"])
def test_what_was_dropped_meanwhile_does_not_come_back(folder: Folder, what: str) -> None:
    bench = folder.open()
    expected = [False] * 32
    if what == "drop":
        bench.tier.drop(KEYS[4:20])
        expected = [True] * 4 + [False] * 16 + [True] * 12
    elif what == "clear":
        bench.tier.clear()
    else:
        bench.tier.register(NAMESPACE, BLOCK_BYTES // 2)
    folder.go_on(bench)
    wait_until(lambda: here(bench) == expected)
    bench.tier.close()
    bench = folder.bench()
    folder.go_on(bench)
    assert here(bench) == expected


def test_pins_of_blocks_not_found_yet(folder: Folder) -> None:
    bench = folder.open()
    folder.go_on(bench)
    bench.tier.catalog.pin(KEYS[10:14])
    assert bench.tier.wait_pins_durable(10.0)
    bench.tier.close()
    bench = folder.open()
    assert bench.tier.catalog.pinned_keys() == frozenset(KEYS[10:14])
    bench.tier.catalog.unpin(KEYS[10:12])
    bench.tier.catalog.pin(KEYS[20:22])
    folder.go_on(bench)
    assert bench.tier.wait_pins_durable(10.0)
    expected = {*KEYS[12:14], *KEYS[20:22]}
    assert {block.key for block in bench.tier.catalog.infos() if block.pinned} == expected
    bench.tier.close()
    bench = folder.bench()
    folder.go_on(bench)
    assert bench.tier.catalog.pinned_keys() == expected
    assert {block.key for block in bench.tier.catalog.infos() if block.pinned} == expected


def test_a_tier_is_closed_while_its_blocks_are_being_found(folder: Folder) -> None:
    bench = folder.open()
    closing = threading.Thread(target=bench.tier.close)
    closing.start()
    wait_until(lambda: bench.tier._flusher._closing_at is not None)
    folder.go_on(bench)
    closing.join()
    bench = folder.bench()
    folder.go_on(bench)
    assert all(here(bench))


def test_what_was_used_last_is_found_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "_READ_AT_ONCE", 8)
    now = [1_000_000.0]
    bench = open_disk(tmp_path, clock=Clock(lambda: now[0], lambda: now[0]))
    bench.put(KEYS)
    now[0] += 2_000_000_000  # past the time at which they were stored
    bench.tier.touch(KEYS[8:16])
    now[0] += 1000
    bench.tier.touch(KEYS[24:32])
    bench.tier.close()
    opened = Index.open(tmp_path, Clock())
    parts = [{row.key for row in rows} for rows, _ in opened.rows()]
    opened.close()
    assert set().union(*parts) == set(KEYS)
    assert sum(map(len, parts)) == len(KEYS)
    touched = [len(part & set(KEYS[24:32])) for part in parts]
    assert touched[0] > 0
    assert touched[-1] == 0


@pytest.mark.parametrize("scanned", [8, 32, 1000])
def test_recovered_blocks_are_evicted_in_the_order_of_their_uses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scanned: int
) -> None:
    """However many are looked at under one hold of the lock."""
    monkeypatch.setattr(catalog, "_SCANNED", scanned)
    now = [3_000_000_000.0]
    clock = Clock(lambda: now[0], lambda: now[0])
    chains = [chain(NAMESPACE, 8, name) for name in "abcd"]
    bench = open_disk(tmp_path, policy="lru", clock=clock)
    for keys in chains:
        bench.put(keys)
    used = [chains[place] for place in (1, 3, 0, 2)]
    for keys in used:
        now[0] += 1000
        bench.tier.touch(keys)
    bench.tier.close()
    again = open_disk(tmp_path, policy="lru", clock=clock).tier
    assert again._engine.recovered.wait(30.0)
    order = [entry.key for entry in again.catalog.coldest(100)]
    assert order == [key for keys in used for key in keys[::-1]]
    again.close()


def whole(path: Path) -> tuple[DiskConfig, DiskTier]:
    """A folder with ``MANY`` blocks, opened; all of them are read."""
    config = DiskConfig(path, (8 << 20) + MANY * 6144, direct_io=False)
    write_folder(config, MANY)
    tier = DiskTier(config)
    wait_until(tier._engine.recovered.is_set)
    return config, tier


def found_again(config: DiskConfig) -> int:
    """The blocks that a new tier finds in the folder."""
    tier = DiskTier(config)
    assert tier._engine.recovered.wait(30.0)
    blocks = tier.stats().blocks
    tier.close()
    return blocks


def test_a_cleared_tier_stays_empty_however_soon_it_is_closed(tmp_path: Path) -> None:
    """The rows of all its blocks go at once, and their slots are free again."""
    config, opened = whole(tmp_path)
    assert opened.stats().blocks == MANY
    slots = opened._store.slot_class(4096)
    opened.clear()
    opened.close()
    assert slots.free == slots.slots > MANY
    assert found_again(config) == 0


def test_however_slowly_rows_are_deleted_a_cleared_tier_stays_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config, opened = whole(tmp_path)
    begun = threading.Event()

    def never(this: Index, addresses: Sequence[int]) -> None:
        begun.set()
        wait_until(lambda: opened._closed)
        delete(this, addresses)

    delete = Index.delete
    monkeypatch.setattr(Index, "delete", never)
    opened.clear()
    wait_until(begun.is_set)
    opened.close()
    assert opened.catalog.pending_free == 0
    assert "dropped blocks" not in caplog.text
    assert found_again(config) == 0


def test_closing_waits_no_longer_for_rows_than_it_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What was dropped and not deleted is said, and comes back; the folder is closed well."""
    config, opened = whole(tmp_path)
    delete, clock = Index.delete, ManualClock()

    def slowly(this: Index, addresses: Sequence[int]) -> None:
        wait_until(lambda: opened._flusher._closing_at is not None)
        clock.advance(0.2)
        delete(this, addresses)

    monkeypatch.setattr(Index, "delete", slowly)
    monkeypatch.setattr(flusher, "time", SimpleNamespace(monotonic=clock))
    opened.drop([key_of(number) for number in range(MANY - 1)])
    opened.close(1.0)
    assert "dropped blocks were deleted; they will be found again" in caplog.text
    assert 1 < found_again(config) < MANY


def test_a_folder_that_is_exchanged_while_it_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its index and its slabs would be of two folders."""
    path, real = tmp_path / "tier", Index.open

    def exchanged(*args: object) -> Index:
        opened = real(*args)  # type: ignore[arg-type]
        path.rename(tmp_path / "other")
        path.mkdir(mode=0o700)
        return opened

    monkeypatch.setattr(Index, "open", exchanged)
    with pytest.raises(TierError, match="was replaced by another folder just now"):
        open_disk(path)
    assert list(path.iterdir()) == []


def test_an_index_that_could_not_be_written_is_checked_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def closed_well(name: str, fails: bool) -> int:
        bench = open_disk(tmp_path)
        with monkeypatch.context() as patch:
            if fails:
                patch.setattr(Index, "insert", full)
            bench.put(chain(NAMESPACE, 2, name))
            bench.tier.close()
        with contextlib.closing(sqlite3.connect(tmp_path / "index.sqlite")) as db:
            return int(db.execute("SELECT count(*) FROM meta WHERE name = 'ended'").fetchone()[0])

    assert [closed_well(name, name == "b") for name in "abc"] == [1, 0, 1]
