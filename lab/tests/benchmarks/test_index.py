"""The benchmark of the disk tier's index."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvrecall_lab.bench.index import measure_index


def test_index_figures(tmp_path: Path) -> None:
    figures: Any = measure_index(6000, "lru", tmp_path, repeats=2, passes=2).figures
    json.dumps(figures)
    assert figures["find_1000_us"] > 0
    assert figures["find_beside_eviction_us_p999"] >= figures["find_beside_eviction_us_p99"] > 0
    assert figures["bytes_a_block"] > 0
    assert list(tmp_path.iterdir()) == []
