"""The benchmark of the disk tier's index."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

from kvrecall_lab.bench.index import WatchedLock, measure_index


def test_holds_of_a_lock_are_timed_by_their_thread() -> None:
    lock = WatchedLock(threading.Lock())
    for least_s in (0.006, 0.007, 0.0):
        with lock:
            until = time.thread_time() + least_s
            while time.thread_time() < until:
                pass
        time.sleep(0.001)
    assert 0.007 <= lock.longest_s < 0.012


def test_index_figures(tmp_path: Path) -> None:
    figures: Any = measure_index(5000, "lru", tmp_path, repeats=2, passes=2).figures
    json.dumps(figures)
    assert figures["find_1000_us"] > 0
    pauses = figures["pauses_ms"]
    assert {"touch of 1,000", "clear", "while blocks are found"} <= pauses.keys()
    assert {"quotas: room for 512", "expiry of a tenth"} <= pauses.keys()
    assert pauses["quotas: touch of 1,000"] > 0
    assert pauses["expiry of a tenth"] > 0
    assert figures["longest_pause_ms"] == max(pauses.values()) <= figures["longest_seen_ms"]
    assert list(tmp_path.iterdir()) == []
