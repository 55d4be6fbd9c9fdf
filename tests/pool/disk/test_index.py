"""The index as a file: when its changes are durable, and what it believes of what it reads."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sqlite3
import tempfile
from pathlib import Path
from typing import NoReturn

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.disks import open_disk

from kvrecall.block import BlockKey
from kvrecall.pool.clock import Clock
from kvrecall.pool.disk.index import (
    INDEX_NAME,
    DamagedIndex,
    Index,
    IndexRow,
    aside_bytes,
    is_damage,
    reading,
)
from kvrecall.pool.tier import Outcome
from kvrecall.testing import chain
from kvrecall.testing.tier_contract import NAMESPACE
from pool.disk.indexes import KEYS, forging, full


def row(address: int, key: BlockKey) -> IndexRow:
    return IndexRow(address, key, None, 0, 4096, b"t" * 16, 1)


def filled(folder: Path) -> Index:
    index = Index.open(folder, Clock())
    index.register(NAMESPACE, 4096)
    index.insert([row(4096 * at, key) for at, key in enumerate(KEYS, 1)])
    return index


def found(index: Index) -> list[BlockKey]:
    return [one.key for rows, _ in index.rows() for one in rows]


def test_a_change_is_durable_on_return(tmp_path: Path) -> None:
    """SQLite syncs its log with each transaction, also in an index that was begun anew, or taken
    over from a damaged one."""

    def is_synced(index: Index) -> bool:
        told = index._connection.execute("SELECT * FROM pragma_synchronous, pragma_journal_mode")
        return bool(told.fetchone() == (2, b"wal"))

    index = filled(tmp_path)
    assert is_synced(index)
    index.begin_anew("it is damaged")
    assert is_synced(index)
    index.close()
    index = Index.open(tmp_path, Clock(), "it is damaged")
    assert is_synced(index)
    index.close()


def test_a_namespace_whose_row_is_damaged_is_not_known(tmp_path: Path) -> None:
    filled(tmp_path).close()
    with contextlib.closing(sqlite3.connect(tmp_path / INDEX_NAME)) as db:
        db.execute("UPDATE namespaces SET block_bytes = 4097")
        db.commit()
    index = Index.open(tmp_path, Clock())
    assert (index.namespaces(), index.damaged) == ([], 1)
    assert found(index) == []
    index.close()


def test_updates_keep_a_row_right(tmp_path: Path) -> None:
    index = filled(tmp_path)
    index._ahead_s = 7  # as after the clock was set back
    index.update("used", [(77, 4096)])
    index.update("pinned", [(1, 8192)])
    index.update("address", [(1 << 20, 3 * 4096)])
    assert set(found(index)) == set(KEYS)
    assert index.pinned_keys() == [KEYS[1]]
    assert max(one.used for rows, _ in index.rows() for one in rows) == 77
    index.close()


def test_the_last_slot_there_can_be_is_counted(tmp_path: Path) -> None:
    index = filled(tmp_path)
    change = "UPDATE blocks SET address = ? WHERE address = 4096"
    index._connection.execute(change, ((1 << 63) - 4096,))
    assert index.count_in_slabs(40) == {0: 7, (1 << 23) - 1: 1}
    index.close()


def test_an_address_that_comes_twice_is_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a page that is in the tree twice."""
    index = filled(tmp_path)
    index._connection.execute("ALTER TABLE blocks RENAME TO once")
    index._connection.execute(
        "CREATE VIEW blocks AS SELECT * FROM once UNION ALL SELECT * FROM once"
    )
    with pytest.raises(DamagedIndex):
        index._read("address < ?", 1 << 40)
    index.close()


def test_only_a_file_that_was_closed_well_says_so(tmp_path: Path) -> None:
    index = filled(tmp_path)
    index.close(is_well=False)
    index = Index.open(tmp_path, Clock())
    assert not index.has("ended")  # type: ignore[arg-type]

    def is_noted() -> bool:
        with reading(tmp_path) as db:
            return bool(db.execute("SELECT count(*) FROM meta WHERE name = 'ended'").fetchone()[0])

    assert not is_noted()
    index.close()
    assert is_noted()
    again = Index.open(tmp_path, Clock())
    assert not is_noted(), "from now on it may end in any way"
    again.close(is_well=False)
    assert not is_noted()


def test_a_link_in_its_place_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "tier").mkdir()
    other = tmp_path / "other"
    other.touch()
    (tmp_path / "tier" / INDEX_NAME).symlink_to(other)
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        Index.open(tmp_path / "tier", Clock())
    assert other.read_bytes() == b""


@pytest.mark.parametrize("name", ["FULL", "IOERR", "BUSY", "READONLY", "NOMEM", "CANTOPEN", "PERM"])
def test_a_medium_that_fails_is_no_damage(name: str) -> None:
    code = getattr(sqlite3, f"SQLITE_{name}")
    for one in (code, code | 3 << 8):  # an extended code, such as SQLITE_IOERR_WRITE
        error = sqlite3.OperationalError(name)
        error.sqlite_errorcode = one
        assert not is_damage(error)
    for one in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        error.sqlite_errorcode = one
        assert is_damage(error)


def test_an_index_is_set_aside_neither_for_a_failing_medium_nor_as_it_is_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / INDEX_NAME).touch()
    filled(tmp_path).close()
    monkeypatch.setattr(Index, "note_time", full)
    with pytest.raises(sqlite3.OperationalError):
        Index.open(tmp_path, Clock())
    monkeypatch.undo()
    assert not list(tmp_path.glob("*.aside"))
    assert found(Index.open(tmp_path, Clock())) == KEYS


def test_a_file_aside_that_cannot_be_looked_at_counts_nothing(tmp_path: Path) -> None:
    (tmp_path / f"{INDEX_NAME}.aside").write_bytes(b"12345")
    (tmp_path / f"{INDEX_NAME}.aside-wal").symlink_to(tmp_path / "gone")
    assert aside_bytes(tmp_path) == 5


def test_a_folder_that_cannot_be_listed_counts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In faults, seed 1414, that ended the call that resized the tier."""

    def scandir(path: object) -> NoReturn:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "scandir", scandir)
    assert aside_bytes(tmp_path) == 0


def test_a_file_in_its_place_is_noticed(tmp_path: Path) -> None:
    index = filled(tmp_path)
    assert index.is_in_place()
    shutil.copy(tmp_path / INDEX_NAME, tmp_path / "copy")
    (tmp_path / "copy").replace(tmp_path / INDEX_NAME)
    assert not index.is_in_place()
    index.close()


# -- right sums around anything -------------------------------------------------------------


ANYTHING = st.one_of(
    st.none(),
    st.integers(-(1 << 63), (1 << 63) - 1),
    st.floats(allow_nan=False),
    st.binary(max_size=99),
    st.sampled_from(
        [b'[["a", 5]]', b"[1]", b"5 [1, 2]", b"5 [[], 1, 2]", b"9" * 20 + b' ["x", 1, 2]']
    ),
)
COLUMNS = {
    "blocks": "namespace hash parent depth nbytes checksum tenant".split(),
    "namespaces": "digest parts block_bytes".split(),
    "meta": ["time", "pool_id"],
}
PLACES = [(table, column) for table, columns in COLUMNS.items() for column in columns]


@given(st.sampled_from(PLACES), ANYTHING)
@example(("blocks", "depth"), 1 << 40)
@example(("blocks", "nbytes"), None)
@example(("blocks", "hash"), 7)
@example(("blocks", "checksum"), 1.5)
@example(("namespaces", "parts"), b"[1]")
@example(("meta", "time"), b"5 [[], 1, 2]")
@example(("meta", "time"), b"9" * 20 + b' ["x", 1, 2]')
@example(("meta", "pool_id"), b"zz")
@settings(max_examples=60)
def test_what_is_forged_costs_its_blocks_and_never_the_tier(
    stored: Path, place: tuple[str, str], value: object
) -> None:
    table, column = place
    with tempfile.TemporaryDirectory() as made:
        folder = Path(shutil.copytree(stored, Path(made) / "tier"))
        with forging(folder) as db:
            if table == "meta":
                text = value if isinstance(value, bytes) else str(value).encode()
                change = "INSERT OR REPLACE INTO meta VALUES (?, CAST(? AS TEXT), 0)"
                db.execute(change, (column, text))
            else:
                row = "WHERE address = (SELECT min(address) FROM blocks)" * (table == "blocks")
                db.execute(f"UPDATE {table} SET {column} = ? {row}", (value,))
        bench = open_disk(folder, 16 << 20)
        found = bench.get(KEYS)
        assert table != "blocks" or found.count(Outcome.LOADED) >= len(KEYS) - 1
        more = chain(NAMESPACE, 8, "more")
        assert set(bench.put(more)) == {Outcome.STORED}
        bench.tier.close()
        bench = open_disk(folder, 16 << 20)
        assert set(bench.get(more)) == {Outcome.LOADED}
        bench.tier.close()
