from __future__ import annotations

import json
from pathlib import Path

from kvrecall.lab.bench.probes import measure_disk, measure_lookup


def test_lookup_figures() -> None:
    figures = measure_lookup(100, repeats=3)
    json.dumps(figures)
    timings = figures["median_us"]
    assert isinstance(timings, dict)
    assert set(timings) >= {"find_host", "find_disk", "acquire_release_host", "reserve_64"}
    assert all(0 < value < 1e6 for value in timings.values())


def test_disk_figures(tmp_path: Path) -> None:
    figures = measure_disk(tmp_path, 8 << 20, 100_000, repeats=2)
    json.dumps(figures)
    assert figures["bytes"] == 81 * 102_400
    assert all(isinstance(figures[n], float) for n in ("read_ratio", "write_ratio"))
    assert list(tmp_path.iterdir()) == []
