"""The disk tier when the medium fails."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.disks import DiskBench, FaultyIo, open_disk

from kvrecall.errors import ConfigError
from kvrecall.pool.cipher import Cipher
from kvrecall.pool.disk import index
from kvrecall.pool.disk.catalog import DiskCounters
from kvrecall.pool.disk.codec import BlockCodec
from kvrecall.pool.disk.flusher import Flusher
from kvrecall.pool.disk.index import Index, reading
from kvrecall.pool.tier import Outcome, PutVerdict
from kvrecall.testing import chain, wait_until
from kvrecall.testing.tier_contract import NAMESPACE
from pool.disk.indexes import forging, full

MIB = 1 << 20
KEYS = chain(NAMESPACE, 32)
Start = Callable[..., DiskBench]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "disk"


@pytest.fixture
def io() -> FaultyIo:
    return FaultyIo()


@pytest.fixture
def start(folder: Path, io: FaultyIo) -> Iterator[Start]:
    yield partial(open_disk, folder, io=io)
    io.gate.set()
    io.read_gate.set()


def slabs(folder: Path) -> list[Path]:
    return sorted(folder.glob("slab-*.kv"))


def rows(folder: Path) -> set[int]:
    """The addresses in the index."""
    with reading(folder) as db:
        return {row[0] for row in db.execute("SELECT address FROM blocks")}


CODECS = {"plain": None, "encrypted": BlockCodec(Cipher([secrets.token_bytes(32)]))}
in_each_form = pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)


@in_each_form
def test_every_byte_is_covered_by_the_checksum(
    start: Start, folder: Path, codec: BlockCodec | None, caplog: pytest.LogCaptureFixture
) -> None:
    bench = start(block_bytes=5000, codec=codec)
    for place in (0, 1, 2500, 4999):
        bench.put(KEYS[:1])
        with slabs(folder)[0].open("r+b") as file:
            data = bytearray(file.read())
            begin = next(at for at in range(4096, len(data), 8192) if any(data[at : at + 5000]))
            file.seek(begin + place)
            file.write(bytes([data[begin + place] ^ 0x10]))
            file.flush()
            os.fsync(file.fileno())
        assert bench.get(KEYS[:1]) == [Outcome.CORRUPT]
        assert not bench.tier.contains(KEYS[0])
        bench.tier.clear()
        wait_until(lambda: bench.tier.catalog.pending_free == 0)
        slabs(folder)[0].write_bytes(bytes(data[:4096]) + bytes(len(data) - 4096))
    assert bench.tier.stats().corrupt == 4
    assert "a corrupt block is dropped" in caplog.text


@in_each_form
def test_bytes_of_another_block_do_not_pass(
    start: Start, folder: Path, codec: BlockCodec | None
) -> None:
    """Write access to the folder can lose blocks, but not substitute one for another."""
    bench = start(codec=codec)
    bench.put(KEYS[:2])
    bench.tier.close()
    with forging(folder) as db:
        (a, name_a), (b, name_b) = db.execute("SELECT address, hash FROM blocks").fetchall()
        db.execute("UPDATE blocks SET hash = ? WHERE address = ?", (name_b, a))
        db.execute("UPDATE blocks SET hash = ? WHERE address = ?", (name_a, b))
    assert start(codec=codec).get(KEYS[:2]) == [Outcome.CORRUPT] * 2


@in_each_form
def test_short_reads_lose_only_what_is_missing(
    start: Start, io: FaultyIo, codec: BlockCodec | None
) -> None:
    bench = start(codec=codec)
    bench.put(KEYS)
    io.faults.short_read = 4096
    outcomes = bench.get(KEYS)
    assert outcomes.count(Outcome.LOADED) >= 28
    assert outcomes[-1] is Outcome.CORRUPT


def test_read_errors_are_misses(start: Start, io: FaultyIo) -> None:
    bench = start()
    bench.put(KEYS)
    io.faults.read_error = errno.EIO
    assert bench.get(KEYS[:4]) == [Outcome.ERROR] * 4
    io.faults.read_error = 0
    assert bench.tier.stats().errors >= 4
    assert bench.get(KEYS[:5]) == [Outcome.MISS] * 4 + [Outcome.LOADED]


@pytest.mark.parametrize("fault", ["full", "write_error", "sync_error"])
def test_failing_writes_shed_stores_and_lose_nothing(
    start: Start, io: FaultyIo, fault: str
) -> None:
    bench = start()
    bench.put(KEYS[:8])
    setattr(io.faults, fault, errno.EIO)
    assert bench.put(KEYS[8:]) == [Outcome.SHED] * 24
    setattr(io.faults, fault, 0)
    assert bench.get(KEYS[:9]) == [Outcome.LOADED] * 8 + [Outcome.MISS]
    assert bench.tier.stats().dropped == 24
    assert bench.tier.stats().errors >= 1
    assert bench.put(KEYS[8:]) == [Outcome.STORED] * 24
    assert bench.get(KEYS) == [Outcome.LOADED] * 32
    assert bench.holds(KEYS)


def test_no_room_for_the_first_slab(
    start: Start, io: FaultyIo, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    io.faults.no_room = True
    bench = start()
    assert bench.put(KEYS) == [Outcome.SHED] * 32
    assert bench.put(KEYS) == [Outcome.SHED] * 32
    assert slabs(folder) == []
    assert caplog.text.count("cannot add a slab") == 1
    assert bench.tier.stats().full == 1
    io.faults.no_room = False
    bench.tier._flusher._reclaimer._grow_at = 0.0  # it is tried again now
    assert bench.put(KEYS) == [Outcome.STORED] * 32
    assert bench.tier.stats().full == 0


def test_no_room_for_the_index_is_said_too(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bench = start()
    monkeypatch.setattr(Index, "reserve", lambda self, nbytes: False)
    assert bench.put(KEYS) == [Outcome.SHED] * 32
    assert f"{os.strerror(errno.ENOSPC)}; new blocks only replace stored ones" in caplog.text


def test_index_that_cannot_grow_sheds(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = start()
    bench.put(KEYS[:8])
    real = Index.limit
    monkeypatch.setattr(Index, "limit", lambda self, nbytes: real(self, 4096))
    keys = chain(NAMESPACE, 400, "more")
    outcomes: list[Outcome] = []
    for at in range(0, 400, 100):
        outcomes += bench.put(keys[at : at + 100])
    assert Outcome.SHED in outcomes
    assert bench.tier.stats().errors > 0
    monkeypatch.setattr(Index, "limit", real)
    assert bench.put(chain(NAMESPACE, 100, "again")) == [Outcome.STORED] * 100
    assert bench.get(KEYS[:8]) == [Outcome.LOADED] * 8
    assert bench.holds(KEYS[:8])


def test_blocks_are_not_given_up_for_rows_that_cannot_be_written(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = start(12 * MIB)
    keys = chain(NAMESPACE, 560)
    for at in range(0, 560, 80):
        assert bench.put(keys[at : at + 80]) == [Outcome.STORED] * 80
    for name in ("insert", "delete", "note_time"):
        monkeypatch.setattr(Index, name, full)
    for name in range(10):
        assert bench.put(chain(NAMESPACE, 80, str(name))) == [Outcome.SHED] * 80
    assert bench.tier.stats().blocks > 400
    monkeypatch.undo()
    assert bench.put(chain(NAMESPACE, 80, "again")) == [Outcome.STORED] * 80


@pytest.mark.parametrize("how", ["delete", "truncate"])
def test_slab_lost_while_running(start: Start, folder: Path, how: str) -> None:
    bench = start()
    bench.put(KEYS)
    for slab in slabs(folder):
        if how == "delete":
            slab.unlink()
        else:
            os.truncate(slab, 8192)
    outcomes = bench.get(KEYS)
    assert Outcome.LOADED not in outcomes
    assert not any(bench.tier.contains(key) for key in KEYS)
    wait_until(lambda: bench.tier.stats().errors > 0)
    assert bench.put(KEYS) == [Outcome.STORED] * 32
    assert bench.get(KEYS) == [Outcome.LOADED] * 32
    assert bench.holds(KEYS)
    bench.tier.close()
    assert start().get(KEYS) == [Outcome.LOADED] * 32


def test_folder_deleted_while_running(start: Start, folder: Path) -> None:
    bench = start()
    bench.put(KEYS[:8])
    shutil.rmtree(folder)
    assert Outcome.STORED not in bench.put(KEYS[8:])
    assert Outcome.LOADED not in bench.get(KEYS)


@pytest.mark.parametrize("name", ["index.sqlite", "index.sqlite-wal"])
def test_index_deleted_while_running(start: Start, folder: Path, name: str) -> None:
    bench = start()
    bench.put(KEYS[:8])
    (folder / name).unlink()
    assert bench.put(KEYS[8:16]) == [Outcome.SHED] * 8, "its rows would be lost"
    assert bench.put(KEYS[8:]) == [Outcome.STORED] * 24
    assert bench.get(KEYS) == [Outcome.LOADED] * 32
    bench.tier.close()
    bench = start()
    assert bench.get(KEYS) == [Outcome.LOADED] * 32, "of those before, the rows were written again"
    assert bench.holds(KEYS)


def test_an_index_is_renewed_as_soon_as_the_medium_allows_it(
    start: Start, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = start()
    bench.put(KEYS[:8])
    (folder / "index.sqlite").unlink()
    monkeypatch.setattr(index, "_set_up", full)
    for _ in range(2):
        assert bench.put(KEYS[8:16]) == [Outcome.SHED] * 8
    assert bench.get(KEYS[:8]) == [Outcome.LOADED] * 8
    monkeypatch.undo()
    assert bench.put(KEYS[8:]) == [Outcome.STORED] * 24
    bench.tier.close()
    assert start().get(KEYS) == [Outcome.LOADED] * 32


@pytest.mark.parametrize("dropped", [0, 10])
def test_a_slab_that_is_emptied_stays_while_its_blocks_are_read(
    start: Start, io: FaultyIo, dropped: int
) -> None:
    """Also for reads that were accepted and have not begun, and of blocks that were dropped since
    (faults, seed 1574)."""
    bench = start(readers=1)
    disk = bench.tier
    first, last = chain(NAMESPACE, 341), chain(NAMESPACE, 20, "last")
    bench.put(first)
    bench.put(last)
    disk.drop(first[300:])
    assert len(disk.catalog.slab_uses()) == 2
    gate = threading.Event()

    def read(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if threading.current_thread().name.startswith("kvrecall-read"):
            gate.wait()
        return FaultyIo.read(io, fd, buffers, offset)

    io.read = read  # type: ignore[method-assign]
    bench.submit_get(last[:10:2])  # not neighbours, so each is a read of its own
    disk.drop(last[:dropped])
    disk.resize(10 * MIB)
    wait_until(lambda: len(disk.catalog.slab_uses()) == 1)
    for _ in range(3):  # rounds of the flusher
        disk.wait_pins_durable(10.0)
    gate.set()
    assert bench.collect(last[:10:2]) == [Outcome.LOADED] * 5
    assert bench.holds(last[:10:2])
    wait_until(lambda: disk.surplus_bytes == 0)


def test_a_folder_that_cannot_be_looked_at_is_not_resized(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = start(12 * MIB).tier

    def check_room(path: Path, capacity_bytes: int) -> str:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("kvrecall.pool.disk.tier.check_room", check_room)
    with pytest.raises(ConfigError, match="Input/output error"):
        disk.resize(16 * MIB)
    monkeypatch.setattr("kvrecall.pool.disk.tier.check_room", lambda *_: "1 GiB is free")
    with pytest.raises(ConfigError, match="1 GiB is free; free some room"):
        disk.resize(16 * MIB)


def test_full_queue_sheds_and_takes_again(start: Start, io: FaultyIo) -> None:
    """Reads are served while writes hang."""
    bench = start(max_queued_bytes=20 * 12288)
    other = chain(NAMESPACE, 4, "other")
    bench.put(other)
    io.gate.clear()
    verdicts = bench.submit_put(KEYS, base=100)
    assert verdicts == [PutVerdict.QUEUED] * 20 + [PutVerdict.SHED] * 12
    assert bench.tier.queued() == (20, 0)
    assert bench.get(other) == [Outcome.LOADED] * 4
    io.gate.set()
    assert bench.collect(KEYS[:20]) == [Outcome.STORED] * 20
    assert bench.put(KEYS[20:]) == [Outcome.STORED] * 12
    assert bench.tier.stats().dropped == 12


def test_loads_are_not_starved_by_a_flood_of_stores(start: Start, io: FaultyIo) -> None:
    """Writes that take a while each, more of them queued than the queue can hold: loads are served
    between them, and what does not fit is shed and counted."""
    bench = start(max_queued_bytes=100 * 12288)
    bench.put(KEYS[:8])
    io.faults.write_delay_s = 0.03
    shed = 0
    for number in range(20):
        # Every other block: slots are not adjacent, so that each block is a write of its own.
        verdicts = bench.submit_put(chain(NAMESPACE, 30, f"flood {number}"), base=100)
        shed += verdicts.count(PutVerdict.SHED)
        assert bench.get(KEYS[:8], among=True) == [Outcome.LOADED] * 8
        assert bench.tier.queued()[0] <= 100
    assert shed > 0
    assert bench.tier.stats().dropped == shed
    io.faults.write_delay_s = 0.0
    wait_until(lambda: bench.tier.queued()[0] == 0)


def test_blocks_being_read_are_not_evicted(start: Start, io: FaultyIo) -> None:
    bench = start(12 * MIB)
    bench.put(KEYS)
    io.read_gate.clear()
    bench.submit_get(KEYS[:4], base=200)
    for name in range(9):
        keys = chain(NAMESPACE, 100, str(name))
        assert set(bench.put(keys)) == {Outcome.STORED}
    assert bench.tier.stats().evictions > 100
    assert [bench.tier.contains(key) for key in KEYS] == [True] * 4 + [False] * 28
    io.read_gate.set()
    assert bench.collect(KEYS[:4]) == [Outcome.LOADED] * 4


def test_slots_of_dropped_blocks_stay_until_their_read_ends(start: Start, io: FaultyIo) -> None:
    bench = start(12 * MIB)
    bench.put(KEYS)
    io.read_gate.clear()
    bench.submit_get(KEYS, base=200)
    bench.tier.drop(KEYS)
    bench.put(chain(NAMESPACE, 100, "new"))
    io.read_gate.set()
    assert bench.collect(KEYS) == [Outcome.LOADED] * 32
    for name in range(4):
        assert bench.put(chain(NAMESPACE, 100, str(name))) == [Outcome.STORED] * 100
    for name in range(4):
        assert bench.get(chain(NAMESPACE, 100, str(name))) == [Outcome.LOADED] * 100


def test_a_slot_that_two_read_is_free_when_both_end_and_moves_no_other_block(start: Start) -> None:
    bench = start(12 * MIB)
    bench.put(KEYS)
    catalog: Any = bench.tier.catalog
    first, second, other = map(catalog.acquire, [KEYS[0], *KEYS[:2]])
    catalog.release(other)
    bench.tier.drop(KEYS[:1])
    catalog.release(first)
    assert catalog.slabs_read(), "by the second"
    assert bench.put(KEYS[:1]) == [Outcome.STORED]
    assert not catalog.relocate(second, other.address), "it is elsewhere by now"
    catalog.release(second)
    assert not catalog.slabs_read()
    assert bench.get(KEYS) == [Outcome.LOADED] * len(KEYS)


@pytest.mark.parametrize("way", ["clear", "drop"])
def test_blocks_dropped_while_being_written_do_not_appear(
    start: Start, io: FaultyIo, way: str
) -> None:
    bench = start()
    bench.put(KEYS[:1])
    io.gate.clear()
    before = io.writes_begun
    bench.submit_put(KEYS[1:], base=1)
    wait_until(lambda: io.writes_begun > before)
    if way == "clear":
        bench.tier.clear()
    else:
        bench.tier.drop(KEYS)
    io.gate.set()
    assert bench.collect(KEYS[1:]) == [Outcome.SHED] * 31
    assert not any(bench.tier.contains(key) for key in KEYS)
    bench.tier.close()
    assert start().tier.stats().blocks == 0


def test_writes_wait_for_reads(start: Start, io: FaultyIo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvrecall.pool.disk.flusher._PATIENCE_S", 20.0)
    bench = start()
    bench.put(KEYS[:4])
    io.read_gate.clear()
    bench.submit_get(KEYS[:4])
    begun, yielded = threading.Event(), []
    yield_to_reads = DiskCounters.yield_to_reads

    def noted(this: DiskCounters, seconds: float) -> None:
        begun.set()
        yield_to_reads(this, seconds)
        yielded.append(io.read_gate.is_set())

    monkeypatch.setattr(DiskCounters, "yield_to_reads", noted)
    before = len(io.write_sizes)
    bench.submit_put(KEYS[4:], base=4)
    wait_until(begun.is_set)
    assert (len(io.write_sizes), yielded) == (before, [])
    io.read_gate.set()
    assert set(bench.collect(KEYS)) == {Outcome.LOADED, Outcome.STORED}
    assert all(yielded)


class NamesWriters(FaultyIo):
    """Knows which threads write, and fails the write at ``bad`` (bytes into the file)."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: set[str] = set()
        self.bad: int | None = None

    def write(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self.threads.add(threading.current_thread().name)
        if offset == self.bad:
            self.gate.wait()
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().write(fd, buffers, offset)


@pytest.mark.parametrize("io", [NamesWriters()])
def test_two_threads_write_and_a_run_that_fails_takes_only_its_own_blocks(
    start: Start, io: NamesWriters, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvrecall.pool.disk.slabs.RUN_BYTES", 4 * 12288)
    bench = start()
    bench.put(KEYS[:1])
    io.threads.clear()
    io.bad = 4096 + 5 * 12288  # the second run of four
    io.gate.clear()
    bench.submit_put(KEYS[1:], base=1)
    wait_until(lambda: len(io.threads) == 2)
    io.gate.set()
    lost = [Outcome.SHED if 5 <= n < 9 else Outcome.STORED for n in range(1, 32)]
    assert bench.collect(KEYS[1:]) == lost
    assert bench.tier.stats().errors == 1
    io.bad = None
    bench.tier.close()
    again = start()
    kept = [key for key, outcome in zip(KEYS[1:], lost, strict=True) if outcome is Outcome.STORED]
    assert again.get(kept) == [Outcome.LOADED] * 27
    assert again.holds(kept)
    assert again.put(KEYS[5:9]) == [Outcome.STORED] * 4


def test_neighbours_are_read_and_written_together(start: Start, io: FaultyIo) -> None:
    bench = start()
    bench.put(KEYS)
    assert max(io.write_sizes) == 32 * 12288
    bench.get(KEYS)
    assert io.read_sizes == [32 * 12288]


def test_close_does_not_wait_for_a_hung_medium(
    start: Start, io: FaultyIo, caplog: pytest.LogCaptureFixture
) -> None:
    bench = start()
    io.gate.clear()
    bench.submit_put(KEYS)
    bench.tier.close(deadline_s=0.2)
    assert "the medium does not answer" in caplog.text
    io.gate.set()


def test_a_bug_in_the_flusher_ends_its_puts(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Flusher, *args: object) -> None:
        raise ZeroDivisionError

    bench = start()
    monkeypatch.setattr(Flusher, "_place", broken)
    monkeypatch.setattr("threading.excepthook", lambda args: None)
    assert bench.put(KEYS[:3]) == [Outcome.SHED] * 3
    assert bench.submit_put(KEYS[3:5]) == [PutVerdict.SHED] * 2


def test_rows_come_after_durable_bytes(start: Start, io: FaultyIo, folder: Path) -> None:
    seen: list[tuple[str, int]] = []
    bench = start()
    bench.put(KEYS[:1])
    write, sync = io.write, io.sync
    io.write = lambda *a: (seen.append(("write", len(rows(folder)))), write(*a))[1]  # type: ignore
    io.sync = lambda *a: (sync(*a), seen.append(("sync", len(rows(folder)))))[0]  # type: ignore
    bench.put(KEYS[1:])
    assert seen == [("write", 1), ("sync", 1)]
    assert len(rows(folder)) == 32


def test_slots_are_used_again_only_after_their_rows_are_gone(
    start: Start, io: FaultyIo, folder: Path
) -> None:
    bench = start(12 * MIB)
    write = io.write
    wrong: list[int] = []

    def checked(fd: int, buffers: list[memoryview], offset: int) -> int:
        number = int(os.readlink(f"/proc/self/fd/{fd}")[-9:-3])
        if offset:
            slots = {number << 40 | offset + n * 12288 for n in range(len(buffers))}
            wrong.extend(rows(folder) & slots)
        return write(fd, buffers, offset)

    io.write = checked  # type: ignore[method-assign]
    for name in range(30):
        bench.put(chain(NAMESPACE, 40, str(name)))
    assert bench.tier.stats().evictions > 100
    assert wrong == []
