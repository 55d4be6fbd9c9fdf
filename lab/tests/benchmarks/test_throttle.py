"""The disk of a given bandwidth, on a clock of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvrecall.pool.disk.slabs import FileIo
from kvrecall_lab.bench import throttle


class Clock:
    """Replaces ``time``: advances by the time slept."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += max(seconds, 1e-6)  # like a real clock, it always advances


def test_a_read_takes_its_time_and_may_become_slower(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(throttle, "time", clock)
    io = throttle.ThrottledIo()
    fd = FileIo().open(tmp_path / "file", False)
    FileIo().write(fd, [memoryview(bytes(100_000))], 0)
    buffer = [memoryview(bytearray(100_000))]

    def seconds() -> float:
        began = clock.now
        assert io.read(fd, buffer, 0) == 100_000
        return clock.now - began

    assert seconds() == 0.0
    io.bytes_per_s = 1e6
    assert seconds() == pytest.approx(0.1, rel=0.01)
    io.bytes_per_s = 5e5
    assert seconds() == pytest.approx(0.2, rel=0.01)
    io.bytes_per_s = 0.0
    assert seconds() == 0.0
