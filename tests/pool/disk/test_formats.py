"""Folders that kvrecall wrote in each format, closed and as kill -9 leaves them, are opened.

``python tests/pool/disk/test_formats.py`` adds those of a new format.
"""

from __future__ import annotations

import shutil
import tarfile
import tempfile
from pathlib import Path

import pytest

from kvrecall.config import DiskConfig
from kvrecall.pool.disk import DiskTier
from kvrecall.pool.disk.index import SCHEMA_VERSION
from kvrecall.pool.tier import Outcome
from kvrecall.testing import chain
from kvrecall.testing.tier_contract import BLOCK_BYTES, NAMESPACE, Bench

FORMATS = Path(__file__).with_name("formats")
OPENS = 103  # the oldest format whose blocks are taken over; older ones are set aside
KEYS = chain(NAMESPACE, 24)


def opened(folder: Path) -> Bench:
    tier = DiskTier(DiskConfig(folder, 16 << 20))
    tier.register(NAMESPACE, BLOCK_BYTES)
    return Bench(tier, slots=2 * len(KEYS))


def write() -> None:
    with tempfile.TemporaryDirectory() as place:
        for name in ("closed", "killed"):
            bench = opened(Path(place, "disk"))
            assert bench.put(KEYS) == [Outcome.STORED] * len(KEYS)
            if name == "closed":
                bench.tier.close()
            shutil.copytree(Path(place, "disk"), Path(place, name))
            bench.tier.close()
            shutil.rmtree(Path(place, "disk"))
        with tarfile.open(FORMATS / f"{SCHEMA_VERSION}.tar.xz", "w:xz") as archive:
            for name in ("closed", "killed"):
                archive.add(Path(place, name), name)


@pytest.mark.parametrize("state", ["closed", "killed"])
@pytest.mark.parametrize("number", range(101, SCHEMA_VERSION + 1))
def test_a_folder_of_each_format_opens(
    tmp_path: Path, number: int, state: str, caplog: pytest.LogCaptureFixture
) -> None:
    with tarfile.open(FORMATS / f"{number}.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    for expected in [*[f"its format {number} is older"] * (number < SCHEMA_VERSION), ""]:
        caplog.clear()
        bench = opened(tmp_path / state)
        found = bench.get(KEYS)
        if number >= OPENS:
            assert found == [Outcome.LOADED] * len(KEYS)
            assert bench.holds(KEYS)
            assert [bench.tier.depth_of(key) for key in KEYS] == list(range(len(KEYS)))
        elif expected:
            assert found == [Outcome.MISS] * len(KEYS)
            assert bench.put(KEYS) == [Outcome.STORED] * len(KEYS)
        bench.tier.close()
        assert caplog.text.count(expected) if expected else not caplog.records


if __name__ == "__main__":
    write()
