"""A disk tier's folder in which others have written: right sums and headers around anything."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.disks import open_disk
from support.hostile import fuzz, hostile, spoiled

from kvrecall.errors import TierError
from kvrecall.pool.disk.index import INDEX_NAME
from kvrecall.pool.disk.slabs import _HEADER, _MAGIC, _VERSION, FileIo, Slab, SlabStore
from kvrecall.pool.tier import Outcome
from kvrecall.testing import chain
from kvrecall.testing.tier_contract import NAMESPACE
from pool.disk.indexes import KEYS, forging

POOL = b"a" * 16
NUMBERS = st.sampled_from([0, 1, 4095, 4096, 8192, 1 << 20, (1 << 32) - 1, 1 << 63, (1 << 64) - 1])
COLUMNS = "namespace hash parent depth nbytes checksum tenant".split()
VALUES = st.one_of(
    st.sampled_from([None, -1, 0, 1, 1 << 31, 1 << 40, (1 << 63) - 1, -(1 << 63), 0.5, ""]),
    st.binary(max_size=40),
    st.text(max_size=5),
)


def opens(folder: Path) -> list[Outcome]:
    """The tier's answers for the blocks; it stores others, and finds them at its next start."""
    more = chain(NAMESPACE, 4, "more")
    bench = open_disk(folder, 16 << 20)
    found = bench.get(KEYS)
    assert set(bench.put(more)) == {Outcome.STORED}
    bench.tier.close()
    bench = open_disk(folder, 16 << 20)
    assert set(bench.get(more)) == {Outcome.LOADED}
    stats = bench.tier.stats()
    assert 0 < stats.used_bytes <= stats.capacity_bytes
    assert stats.blocks <= len(KEYS) + len(more)
    bench.tier.close()
    return found


@fuzz(12)
@given(st.dictionaries(st.sampled_from(COLUMNS), VALUES, min_size=2), st.integers(1, 3))
@example({"nbytes": 1, "checksum": b"t" * 16}, 2)
@example({"hash": KEYS[7][16:], "parent": KEYS[7][16:], "depth": 0}, 2)
def test_rows_with_right_sums_cost_themselves(
    stored: Path, values: dict[str, object], count: int
) -> None:
    with tempfile.TemporaryDirectory() as made:
        folder = Path(shutil.copytree(stored, Path(made) / "tier"))
        with forging(folder) as db:
            which = f"address IN (SELECT address FROM blocks ORDER BY address LIMIT {count})"
            for column, value in values.items():
                db.execute(f"UPDATE blocks SET {column} = ? WHERE {which}", (value,))
        assert opens(folder).count(Outcome.LOADED) >= len(KEYS) - count - 1


@fuzz(8)
@given(st.data())
def test_an_index_of_any_bytes_costs_blocks_and_never_the_tier(
    stored: Path, data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as made:
        folder = Path(shutil.copytree(stored, Path(made) / "tier"))
        index = folder / INDEX_NAME
        index.write_bytes(data.draw(hostile(index.read_bytes())))
        opens(folder)


HEADERS = st.builds(
    _HEADER.pack, st.just(_MAGIC), st.just(_VERSION), st.just(POOL),
    NUMBERS.filter(lambda one: one < 1 << 32), NUMBERS, NUMBERS,
)  # fmt: skip
RIGHT = _HEADER.pack(_MAGIC, _VERSION, POOL, 0, 8192, 4)


@fuzz(200)
@given(spoiled(RIGHT) | HEADERS, st.sampled_from([0, 10, 4096, 4096 + 4 * 8192, 1 << 20]))
@example(RIGHT, 4096 + 4 * 8192)
@example(_HEADER.pack(_MAGIC, _VERSION, POOL, 0, 4096, 0), 4096)
def test_a_slab_of_any_header_is_whole_or_gone(header: bytes, nbytes: int) -> None:
    with tempfile.TemporaryDirectory() as made:
        path = Path(made) / "slab-000000.kv"
        path.write_bytes(header[:4096])
        os.truncate(path, max(nbytes, path.stat().st_size))
        before = set(os.listdir("/proc/self/fd"))
        store = SlabStore(Path(made), 16 << 20, POOL, FileIo(), direct=False)
        missing = store.recover([0])
        assert missing == [] if header == RIGHT and nbytes > 36_000 else missing in ([], [0])
        slab: Slab | None
        for slab in store.slabs():
            assert slab.nbytes <= path.stat().st_size
            assert slab.slot_bytes > 0 == slab.slot_bytes % 4096
            store.place(0, [])
            right = store.are_slots([slab.base, slab.base + 1, slab.base + slab.nbytes], [1] * 3)
            assert not right[1:].any()
        assert path.exists() == (missing == [])
        store.close()
        slab = None
        assert set(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("kind", ["fifo", "folder", "link", "loop"])
def test_what_is_no_file_is_named(tmp_path: Path, stored: Path, kind: str) -> None:
    folder = Path(shutil.copytree(stored, tmp_path / "tier"))
    path = folder / "slab-000077.kv"
    {
        "fifo": lambda: os.mkfifo(path),
        "folder": lambda: path.mkdir(),
        "link": lambda: path.symlink_to(tmp_path / "tier" / INDEX_NAME),
        "loop": lambda: path.symlink_to(path),
    }[kind]()
    with pytest.raises(TierError, match=r"slab-000077\.kv is a link, or not a file; remove it"):
        open_disk(folder, 16 << 20)
