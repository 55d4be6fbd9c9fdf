"""The benchmark of the disk tier's index."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

from kvrecall_lab.bench.index import Machine, WatchedLock, measure_index


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


def test_a_machine_takes_turns_beside_what_is_measured() -> None:
    machine, lock = Machine(1 << 20), WatchedLock(threading.Lock())
    threads = threading.active_count()
    with machine.beside(lock):
        assert threading.active_count() == threads + 1
        with lock:
            until = time.monotonic() + 60
            while not machine.memory.held_s and time.monotonic() < until:
                time.sleep(0.001)
            time.sleep(0.2)  # for most of which its thread waits
    assert threading.active_count() == threads
    assert max(machine.waited_s) > 0.05
    assert 0.00075 <= machine.idle.longest_s <= machine.idle.held_s
    assert 0 < machine.memory.longest_s <= machine.memory.held_s
    assert not machine.idle.too_long or machine.idle.longest_s > 0.005


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
    assert figures["holds"].keys() == {"while blocks are found", "list", "clear"}
    for what, holds in figures["holds"].items():
        assert pauses[what] <= 1e3 * holds["held_s"] + 10
        assert {"too_long", "idle_too_long", "memory_too_long"} <= holds.keys()
        assert holds["idle_longest_ms"] >= 0.75
        assert holds["memory_longest_ms"] > 0
        assert 0 <= holds["waited_p99_ms"] <= holds["waited_longest_ms"]
    assert list(tmp_path.iterdir()) == []
