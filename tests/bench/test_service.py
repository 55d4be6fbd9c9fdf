"""The benchmark of the service runs, and measures what it says."""

from __future__ import annotations

import json
import time
from pathlib import Path

from typer.testing import CliRunner

from kvrecall.lab.bench import cli
from kvrecall.lab.disks import ThrottledIo
from kvrecall.pool.disk.slabs import FileIo


def test_every_part_is_measured() -> None:
    done = CliRunner().invoke(cli.app, ["service", "--blocks", "1000", "--repetitions", "1"])
    assert done.exit_code == 0, done.output
    *table, last = done.stdout.splitlines()
    figures = json.loads(last)
    assert figures["lookup_s"]["n"] == 100
    assert 0 < figures["lookup_s"]["p50"] < 1.0
    assert figures["restore_to_plain"]["n"] == 2
    assert 0 < figures["restore_to_plain"]["p50"] < 10.0
    assert figures["start_s"]["ready"]["p50"] > 0
    assert figures["start_s"]["first_find"]["p50"] >= figures["start_s"]["ready"]["p50"]
    assert done.stderr.count("bench: ") >= 3
    assert sum(line.startswith("│") for line in table) >= 7


def test_a_throttled_disk_takes_its_time_and_can_be_let_go(tmp_path: Path) -> None:
    io = ThrottledIo()
    fd = FileIo().open(tmp_path / "file", False)
    FileIo().write(fd, [memoryview(bytes(100_000))], 0)
    buffer = [memoryview(bytearray(100_000))]

    def seconds() -> float:
        began = time.monotonic()
        assert io.read(fd, buffer, 0) == 100_000
        return time.monotonic() - began

    io.bytes_per_s = 1e6
    assert seconds() >= 0.1
    io.slow_after, io.then_bytes_per_s = 150_000, 5e5
    assert seconds() >= 0.1
    assert seconds() >= 0.2
    io.bytes_per_s = 0.0
    assert min(seconds() for _ in range(5)) < 0.1
