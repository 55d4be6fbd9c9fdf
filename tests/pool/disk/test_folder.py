"""The disk tier's folder: opening, limits, recovery."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import sqlite3
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from support.disks import open_disk

from kvrecall.errors import ConfigError, TierError
from kvrecall.pool.cipher import Cipher
from kvrecall.pool.disk import index as index_module
from kvrecall.pool.disk.codec import BlockCodec
from kvrecall.pool.disk.folder import FolderLock
from kvrecall.pool.tier import Outcome
from kvrecall.testing import chain, namespace, wait_until
from kvrecall.testing.tier_contract import BLOCK_BYTES, NAMESPACE, Bench
from pool.disk.indexes import forging, without_types

MIB = 1 << 20
KEYS = chain(NAMESPACE, 32)


open_tier = open_disk


def filled(folder: Path, nbytes: int = 64 * MIB) -> None:
    bench = open_tier(folder, nbytes)
    bench.put(KEYS)
    bench.tier.close()


def bytes_in(folder: Path) -> int:
    """What the files take: their size or their blocks on the medium, whichever is more."""
    total = 0
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):  # a slab that is deleted just now
            stat = path.stat()
            total += max(stat.st_size, stat.st_blocks * 512)
    return total


def test_is_the_owners_alone(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "disk"
    bench = open_tier(folder)
    bench.put(KEYS)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    assert str(folder) not in Path("/proc/self/maps").read_text(), "a full medium may mean SIGBUS"


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    other = tmp_path / "notes.txt"
    other.write_text("mine")
    other.chmod(0o644)
    open_tier(tmp_path).tier.close()
    assert stat.S_IMODE(other.stat().st_mode) == 0o644
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    with pytest.raises(TierError, match="shared is shared with other users; name a folder below"):
        open_tier(shared)
    assert list(shared.iterdir()) == []
    open_tier(shared / "mine")


def test_blocks_are_there_after_a_restart(tmp_path: Path) -> None:
    filled(tmp_path)
    bench = open_tier(tmp_path)
    assert bench.tier.namespaces() == [(NAMESPACE, BLOCK_BYTES)]
    assert bench.tier.stats().blocks == 32
    assert [bench.tier.depth_of(key) for key in KEYS] == list(range(32))
    assert bench.get(KEYS) == [Outcome.LOADED] * 32
    assert bench.holds(KEYS)
    more = chain(NAMESPACE, 32, "more")
    bench.put(more)
    assert bench.get(KEYS + more) == [Outcome.LOADED] * 64
    assert bench.holds(KEYS + more)


# -- refused at open, with nothing changed ------------------------------------------------------


def test_larger_than_the_file_system(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "disk"
    usage = shutil.disk_usage(tmp_path)
    with pytest.raises(TierError, match=r"disk_size: .* GiB is more than the .* GiB of the file"):
        open_tier(folder, usage.total + MIB)
    assert list(tmp_path.iterdir()) == []


def test_larger_than_what_is_free_now(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An engine starts again although others have filled the file system meanwhile."""
    usage = shutil.disk_usage(tmp_path)
    bench = open_tier(tmp_path / "disk", (usage.total + usage.free) // 2)
    assert "the tier grows as far as there is room" in caplog.text
    assert bench.put(KEYS) == [Outcome.STORED] * 32


@pytest.mark.parametrize(
    ("name", "nbytes", "said"),
    [
        ("new", MIB, "the minimum is 8MiB"),
        ("file/disk", 64 * MIB, "is not a folder"),
        ("/proc/kvrecall", 64 * MIB, "disk_"),
    ],
)
def test_what_cannot_be_a_folder(tmp_path: Path, name: str, nbytes: int, said: str) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises((ConfigError, TierError), match=said):
        open_tier(tmp_path / name, nbytes)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_unwritable_folder(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(TierError, match="is not writable"):
        open_tier(tmp_path / "new")


def test_folder_in_use_names_the_process(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib\n"
        "from kvrecall.pool.disk.folder import FolderLock\n"
        f"lock = FolderLock(pathlib.Path({str(tmp_path)!r}))\n"
        "print('held', flush=True)\n"
        "sys.stdin.read()\n"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdout is not None
    assert holder.stdin is not None
    holder.stdout.readline()
    before = sorted(tmp_path.iterdir())
    with pytest.raises(TierError, match=f"is in use by process {holder.pid};"):
        open_tier(tmp_path)
    assert sorted(tmp_path.iterdir()) == before
    holder.kill()
    holder.wait()
    holder.stdin.close()
    holder.stdout.close()
    open_tier(tmp_path).tier.close()


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o720])
def test_a_folder_that_others_can_write_to(tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "disk"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(TierError, match=rf"mode {mode:04o}, so others can .*; run: chmod 700 "):
        open_tier(folder)
    assert list(folder.iterdir()) == []
    folder.chmod(0o755)
    open_tier(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_path_that_is_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir(0o700)
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    with pytest.raises(TierError, match=rf"symbolic link; name the folder .* {tmp_path}/disk"):
        open_tier(tmp_path / "link")
    assert list((tmp_path / "disk").iterdir()) == []


def test_slabs_are_in_the_folder_that_is_locked(tmp_path: Path) -> None:
    """Also when another one has its path."""
    folder, moved = tmp_path / "disk", tmp_path / "moved"
    bench = open_tier(folder, 16 * MIB)
    folder.rename(moved)
    folder.mkdir()
    bench.submit_put(KEYS)
    bench.collect(KEYS)
    bench.tier.close()
    assert list(moved.glob("slab-*.kv"))
    assert not list(folder.glob("slab-*.kv"))


def test_lock_is_given_back_by_close_and_by_a_failed_open(tmp_path: Path) -> None:
    open_tier(tmp_path).tier.close()
    with sqlite3.connect(tmp_path / "index.sqlite") as db:
        db.execute("PRAGMA user_version = 100000")
        db.execute("CREATE TABLE more (name TEXT)")
    db.close()
    with pytest.raises(TierError, match=r"newer kvrecall .*; update kvrecall"):
        open_tier(tmp_path)
    FolderLock(tmp_path).release()


# -- damage found at open -----------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["garbage", "torn", "foreign", "older", "page"])
def test_unfit_index_is_moved_aside(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    filled(tmp_path)
    index = tmp_path / "index.sqlite"
    if damage == "garbage":
        index.write_bytes(b"not a database" * 1000)
    elif damage == "torn":
        os.truncate(index, index.stat().st_size - 5000)
    elif damage == "page":
        with index.open("r+b") as file:
            file.seek(4096)
            file.write(b"\xff" * 4096)
    else:
        change = {"foreign": "application_id = 7", "older": "user_version = 1"}[damage]
        with sqlite3.connect(index) as db:
            db.execute(f"PRAGMA {change}")
            db.execute("DROP TABLE blocks")
        db.close()
    bench = open_tier(tmp_path)
    assert bench.tier.stats().blocks == 0
    assert "a new one was started" in caplog.text
    assert (tmp_path / "index.sqlite.aside").exists()
    assert not list(tmp_path.glob("slab-*.kv")), "slabs nobody knows would take room for ever"
    assert bench.put(KEYS) == [Outcome.STORED] * 32


def test_a_large_index_that_was_closed_well_is_not_checked_page_by_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Damage since then is found all the same."""
    monkeypatch.setattr(index_module, "_LARGE", 0)
    first, killed = tmp_path / "first", tmp_path / "killed"
    filled(first)

    def is_checked(path: Path) -> bool:
        caplog.clear()
        with caplog.at_level(logging.INFO):
            open_tier(path).tier.close()
        return "checking" in caplog.text

    assert not is_checked(first)
    bench = open_tier(first)
    shutil.copytree(first, killed)  # what kill -9 would leave
    bench.tier.close()
    assert is_checked(killed)
    assert not is_checked(killed)
    index = killed / "index.sqlite"
    with index.open("r+b") as file:
        file.seek(4096 * 3)  # what is before the rows is read whenever it is opened
        file.write(b"\xff" * (index.stat().st_size - 4096 * 3))
    bench = open_tier(killed)
    assert "a new one was started" in caplog.text
    assert bench.put(KEYS) == [Outcome.STORED] * 32


@pytest.mark.parametrize("large", [0, 1 << 30])
def test_a_damaged_row_costs_its_block_only(
    tmp_path: Path, large: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Set aside is the file where it is checked; a large one is not."""
    monkeypatch.setattr(index_module, "_LARGE", large)
    caplog.set_level(logging.INFO)
    filled(tmp_path)
    with without_types(tmp_path) as db:
        db.execute("UPDATE blocks SET tenant = CAST('text' AS TEXT) WHERE depth = 3")
        db.execute("UPDATE blocks SET used = used + 1 WHERE depth = 30")
    bench = open_tier(tmp_path)
    outcomes = bench.get(KEYS)
    lost = [key for key, outcome in zip(KEYS, outcomes, strict=True) if outcome is Outcome.MISS]
    assert lost == [KEYS[3], KEYS[30]]
    assert outcomes.count(Outcome.LOADED) == 30
    assert bench.tier.stats().corrupt == 2
    assert caplog.text.count("2 rows in the index of") == 1
    assert f"30 blocks in {tmp_path} found" in caplog.text
    assert ("non-BLOB value in blocks.tenant" in caplog.text) == bool(large)
    bench.submit_put(lost)
    assert bench.collect(lost) == [Outcome.STORED] * 2
    store, index = bench.tier._store, bench.tier._engine.index
    pages = index._connection.execute("PRAGMA max_page_count").fetchone()[0]
    room = store.limit_bytes - store.file_bytes - index_module.WAL_BYTES
    assert pages * 4096 <= room


@pytest.mark.parametrize("large", [0, 1 << 30])
def test_a_damaged_page_costs_its_blocks_only(
    tmp_path: Path, large: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of an index that is too large to be checked page by page."""
    monkeypatch.setattr(index_module, "_LARGE", large)
    bench = open_tier(tmp_path)
    keys = chain(NAMESPACE, 200)
    bench.put(keys)
    bench.tier.close()
    index = tmp_path / "index.sqlite"
    assert index.stat().st_size >= 8 * 4096
    with index.open("r+b") as file:
        file.seek(5 * 4096)
        file.write(b"\xff" * 8)
    bench = open_tier(tmp_path)
    found = bench.get(keys).count(Outcome.LOADED)
    assert 100 < found < 200
    assert bench.put([key for key in keys if not bench.tier.contains(key)])
    bench.tier.close()
    assert open_tier(tmp_path).get(keys) == [Outcome.LOADED] * 200


def test_empty_index_file_is_an_empty_tier(tmp_path: Path) -> None:
    (tmp_path / "index.sqlite").touch()
    bench = open_tier(tmp_path)
    assert bench.put(KEYS) == [Outcome.STORED] * 32


@pytest.mark.parametrize("damage", ["missing", "truncated", "header", "foreign"])
def test_damaged_slab_loses_its_blocks_only(tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "disk"
    bench = open_tier(folder, 16 * MIB)
    keys = chain(NAMESPACE, 200)
    for at in range(0, 200, 50):
        bench.put(keys[at : at + 50])
    bench.tier.close()
    slabs = sorted(folder.glob("slab-*.kv"))
    assert len(slabs) > 2
    if damage == "missing":
        slabs[0].unlink()
    elif damage == "truncated":
        os.truncate(slabs[0], 20_000)
    elif damage == "header":
        with slabs[0].open("r+b") as file:
            file.write(b"\0" * 64)
    else:
        filled(tmp_path / "other", 16 * MIB)
        shutil.copy(sorted((tmp_path / "other").glob("slab-*.kv"))[0], slabs[0])
    bench = open_tier(folder, 16 * MIB)
    outcomes = bench.get(keys)
    assert 0 < outcomes.count(Outcome.LOADED) < 200
    assert set(outcomes) == {Outcome.LOADED, Outcome.MISS}
    lost = [key for key, outcome in zip(keys, outcomes, strict=True) if outcome is Outcome.MISS]
    assert bench.put(lost) == [Outcome.STORED] * len(lost)


def test_an_index_without_types_is_replaced_by_one_with_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Such as an old SQLite makes."""
    with pytest.MonkeyPatch.context() as patch:
        loose = tuple(re.sub(" STRICT,?", "", sql) for sql in index_module._SCHEMA)
        patch.setattr(index_module, "_SCHEMA", loose)
        filled(tmp_path)
    bench = open_tier(tmp_path)
    assert bench.get(KEYS) == [Outcome.LOADED] * 32
    assert "a new one was started" in caplog.text
    bench.tier.close()
    with sqlite3.connect(tmp_path / "index.sqlite") as db:
        with pytest.raises(sqlite3.IntegrityError, match="cannot store TEXT"):
            db.execute("UPDATE blocks SET tenant = 'text'")
        tables = dict(db.execute("SELECT name, strict FROM pragma_table_list"))
    db.close()
    assert {name for name, strict in tables.items() if strict} == {"meta", "namespaces", "blocks"}


@pytest.mark.parametrize("parts", ["5", "[" * 100_000, "[[1, 2, 3]]", "{"])
def test_a_description_that_cannot_be(tmp_path: Path, parts: str) -> None:
    """With a right sum, as whoever can write the folder can give it."""
    filled(tmp_path)
    with contextlib.closing(index_module._plain(tmp_path / "index.sqlite")) as db:
        [(number, digest, nbytes)] = db.execute("SELECT id, digest, block_bytes FROM namespaces")
        total = index_module._sum(number, digest, parts.encode(), nbytes)
        db.execute("UPDATE namespaces SET parts = ?, sum = ?", (parts, total))
    assert open_tier(tmp_path).put(KEYS) == [Outcome.STORED] * 32


def test_rows_that_cannot_be_are_dropped(tmp_path: Path) -> None:
    filled(tmp_path)
    with forging(tmp_path) as db:
        addresses = [row[0] for row in db.execute("SELECT address FROM blocks")]
        db.execute("UPDATE blocks SET address = address + 100 WHERE address = ?", addresses[:1])
        db.execute("UPDATE blocks SET nbytes = 1 << 30 WHERE address = ?", addresses[1:2])
        db.execute("UPDATE blocks SET namespace = 99 WHERE address = ?", addresses[2:3])
    bench = open_tier(tmp_path)
    assert bench.tier.stats().blocks == 29
    assert bench.get(KEYS).count(Outcome.LOADED) == 29
    more = chain(NAMESPACE, 400, "more")
    assert bench.put(more) == [Outcome.STORED] * 400, "their slots are free"


def test_other_block_size_in_a_namespace_is_a_miss(tmp_path: Path) -> None:
    filled(tmp_path)
    bench = open_tier(tmp_path, block_bytes=BLOCK_BYTES - 1)
    assert bench.get(KEYS[:2]) == [Outcome.MISS] * 2


# -- limits -------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_bytes", [500, 10_000, 300_000])
def test_never_more_than_the_limit(tmp_path: Path, block_bytes: int) -> None:
    limit = 24 * MIB
    bench = open_tier(tmp_path, limit, block_bytes)
    most = 0
    stored = 0
    for name in range(40 if block_bytes < 300_000 else 10):
        outcomes = bench.put(chain(NAMESPACE, 200, str(name)))
        stored += outcomes.count(Outcome.STORED)
        most = max(most, bytes_in(tmp_path))
    assert stored > 150
    assert most <= limit
    assert bench.tier.stats().evictions > 0
    assert most > limit * 0.6


def test_an_index_that_was_moved_aside_counts(tmp_path: Path) -> None:
    filled(tmp_path, 16 * MIB)
    (tmp_path / "index.sqlite.aside").write_bytes(bytes(4 * MIB))
    bench = open_tier(tmp_path, 16 * MIB)
    for name in range(40):
        bench.put(chain(NAMESPACE, 40, str(name)))
    assert 12 * MIB < bytes_in(tmp_path) <= 16 * MIB


def test_watermarks(tmp_path: Path) -> None:
    bench = open_tier(tmp_path, 16 * MIB)
    for name in range(60):
        bench.put(chain(NAMESPACE, 20, str(name)))
    slots = (16 * MIB - 4.5 * MIB) / (12288 + 288)
    assert 0.85 * slots < bench.tier.stats().blocks < 0.96 * slots


def test_a_smaller_limit_at_the_next_start(tmp_path: Path) -> None:
    bench = open_tier(tmp_path, 64 * MIB)
    for name in range(20):
        bench.put(chain(NAMESPACE, 100, str(name)))
    bench.tier.close()
    assert bytes_in(tmp_path) > 20 * MIB
    bench = open_tier(tmp_path, 16 * MIB)
    assert bytes_in(tmp_path) <= 16 * MIB
    assert 0 < bench.tier.stats().blocks < 2000


@pytest.mark.parametrize("codec", [None, BlockCodec(Cipher([bytes(range(32))]))])
def test_blocks_of_another_size_are_not_lost_for_a_smaller_disk(
    tmp_path: Path, codec: BlockCodec | None
) -> None:
    """Encrypted blocks that move open at their new place: their tag is of their key alone."""
    bench = open_tier(tmp_path, 64 * MIB, codec=codec)
    small = namespace("small")
    bench.tier.register(small, 100)
    little = Bench(bench.tier, block_bytes=100)
    few = chain(small, 50)
    little.put(few)
    for number in range(10):
        bench.put(chain(NAMESPACE, 100, str(number)))
    bench.tier.touch(few)
    disk = bench.tier
    disk.resize(20 * MIB)
    wait_until(lambda: bytes_in(tmp_path) <= 20 * MIB)
    assert little.get(few) == [Outcome.LOADED] * 50
    assert little.holds(few)
    assert disk.stats().blocks > 500


def test_slabs_go_to_another_block_size(tmp_path: Path) -> None:
    bench = open_tier(tmp_path, 16 * MIB)
    for name in range(40):
        bench.put(chain(NAMESPACE, 40, str(name)))
    large = namespace("large")
    bench.tier.register(large, 2_000_000)
    big = Bench(bench.tier, slots=4, block_bytes=2_000_000)
    keys = chain(large, 2)
    assert big.put(keys) == [Outcome.STORED] * 2
    assert big.get(keys) == [Outcome.LOADED] * 2
    assert big.holds(keys)
    assert bytes_in(tmp_path) <= 16 * MIB
    assert bench.tier.stats().blocks > 100
