"""The benchmarks of the pool alone: its calls, and its disk tier."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

from kvrecall.lab.bench.index import WatchedLock, idle_turns, measure_index
from kvrecall.lab.bench.pool import measure_disk, measure_lookup


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
        assert figures["read_ratio"] > 0
        assert figures["write_ratio"] > 0
        assert list(tmp_path.iterdir()) == []


def test_compressed_disk_figures(tmp_path: Path) -> None:
    figures: Any = measure_disk(tmp_path, False, "8MiB", 100_000, 1, "zstd").figures
    assert 0.5 < figures["compressed_to"] < 0.9


def test_holds_of_a_lock_are_timed_by_their_thread() -> None:
    lock = WatchedLock(threading.Lock())
    for least_s in (0.006, 0.007, 0.0):
        with lock:
            until = time.thread_time() + least_s
            while time.thread_time() < until:
                pass
        time.sleep(0.001)
    assert lock.too_long >= 2
    assert 0.007 <= lock.longest_s < lock.held_s
    lock.begin()
    assert lock.longest_s == lock.held_s == lock.too_long == 0


def test_idle_threads_take_turns() -> None:
    lock = idle_turns(0.05)
    assert lock.held_s >= 0.05
    assert 0.00075 <= lock.longest_s < lock.held_s
    assert idle_turns(0.0).held_s == 0.0


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
    assert pauses["while blocks are found"] <= 1e3 * figures["found_held_s"] + 10
    assert {"found_too_long", "idle_too_long", "idle_longest_ms"} <= figures.keys()
    assert list(tmp_path.iterdir()) == []
