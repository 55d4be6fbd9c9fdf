"""The benchmarks of the pool alone: its calls, and its disk tier."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvrecall.bench.pool import measure_disk, measure_lookup


def test_lookup_figures() -> None:
    figures: Any = measure_lookup(100, repeats=3).figures
    json.dumps(figures)
    timings = figures["median_us"]
    assert set(timings) >= {"find_host", "find_disk", "acquire_release_host", "reserve_64"}
    assert all(value > 0 for value in timings.values())


def test_disk_figures(tmp_path: Path) -> None:
    for encrypted in (False, True):
        figures: Any = measure_disk(tmp_path, encrypted, "8MiB", 100_000, repeats=2).figures
        json.dumps(figures)
        assert figures["bytes"] == 81 * 102_400
        assert figures["sealed"] is encrypted
        assert list(tmp_path.iterdir()) == []


def test_compressed_disk_figures(tmp_path: Path) -> None:
    figures: Any = measure_disk(tmp_path, False, "8MiB", 100_000, 1, "zstd").figures
    assert 0.5 < figures["compressed_to"] < 0.9
