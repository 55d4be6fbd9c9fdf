"""Real file systems that fail under an open tier, and recover. Each needs root, or is skipped."""

from __future__ import annotations

import gc
import sqlite3
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.disks import open_disk

from kvrecall.pool.disk import reclaimer
from kvrecall.pool.disk.folder import refusal
from kvrecall.pool.tier import Outcome
from kvrecall.testing import chain
from kvrecall.testing.tier_contract import NAMESPACE

MIB = 1 << 20
LOOP = "truncate -s {0} image && mkfs.{1} image && mount -o loop,{2} image m"
FAIL = "echo 1 > /sys/fs/ext4/$(basename $(findmnt -no SOURCE m))/trigger_fs_error"
MEDIA = {
    "full": ("mount -t tmpfs -o size=32m none m", "dd if=/dev/zero of=m/eat bs=4k", "rm m/eat"),
    "without inodes": (
        "mount -t tmpfs -o size=32m,nr_inodes=10 none m", "touch $(seq -f m/%g 20)", "rm m/?",
    ),
    "thin": (  # what it promised is not there: writes fail with EIO, or only fsync does
        "mkdir b && mount -t tmpfs -o size=6m none b && ln -s b/image image && "
        + LOOP.format("60M", "ext4 -q -O ^has_journal -E lazy_itable_init=1", "rw"),
        "dd if=/dev/zero of=b/eat bs=4k", "rm b/eat; mount -o remount,size=60m b",
    ),
    "btrfs": (
        LOOP.format("120M", "btrfs -q", "rw"),
        "dd if=/dev/zero of=m/eat bs=64k; sync; while head -c 4k /dev/zero > m/eat$((i += 1)); "
        "do :; done; sync", "rm m/eat*; sync",
    ),
    "read-only": (
        LOOP.format("60M", "ext4 -q", "errors=remount-ro"), f"sync; {FAIL}",
        "umount m && e2fsck -fy image; mount -o loop image m",
    ),
}  # fmt: skip
"""How each is made, how it fails, and the cure, which for the last one is a new start."""


@pytest.fixture(params=MEDIA)
def medium(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    (tmp_path / "m").mkdir()
    if shell(tmp_path, MEDIA[request.param][0]):
        pytest.skip(f"this machine gives no file system that is {request.param}")
    yield request.param
    shell(tmp_path, "umount -l m; umount -l b")


def shell(place: Path, command: str) -> int:
    return subprocess.run(command, shell=True, cwd=place, capture_output=True).returncode


def test_a_medium_that_fails_costs_no_block_that_is_stored(
    medium: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reclaimer, "_RETRY_S", 0.2)
    _, failure, cure = MEDIA[medium]
    bench = open_disk(tmp_path / "m" / "disk", 24 * MIB)
    keys = chain(NAMESPACE, 32)
    assert bench.put(keys) == [Outcome.STORED] * 32
    assert str(tmp_path) not in Path("/proc/self/maps").read_text(), "may end by SIGBUS"
    shell(tmp_path, failure)
    more = chain(NAMESPACE, 300, "more")
    outcomes = [one for at in range(0, 300, 60) for one in bench.put(more[at : at + 60])]
    assert set(outcomes) <= {Outcome.STORED, Outcome.SHED}
    said = [str(refusal(at, sqlite3.Error("full"))) for at in (tmp_path / "m", Path("/proc"))]
    assert ["no inodes left" in one for one in said] == [medium == "without inodes", False]
    if medium != "read-only":
        shell(tmp_path, cure)
        fresh = chain(NAMESPACE, 60, "fresh")
        while bench.put(fresh) != [Outcome.STORED] * 60:
            fresh = [key for key in fresh if not bench.tier.contains(key)]
    kept = [key for key in [*keys, *more] if bench.tier.contains(key)]
    assert len(kept) > 20
    assert bench.get(kept) == [Outcome.LOADED] * len(kept)
    assert bench.holds(kept)
    bench.tier.close()
    gc.collect()
    if medium == "read-only":
        shell(tmp_path, cure)
    bench = open_disk(tmp_path / "m" / "disk", 24 * MIB)
    assert bench.get(kept) == [Outcome.LOADED] * len(kept)
    again = chain(NAMESPACE, 200, "again")
    assert bench.put(again) == [Outcome.STORED] * 200
    bench.tier.close()
