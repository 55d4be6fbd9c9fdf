"""Waiting for what a tier has done, while others take it."""

from __future__ import annotations

import queue
import random
import threading
import time

from kvrecall.block import BlockKey
from kvrecall.pool.tier import Done, Outcome, ended
from kvrecall.testing.blocks import wait_until

TIMEOUT_S = 0.002


def test_who_waits_is_back_in_time_though_another_took_what_came() -> None:
    """Something comes just as the time is up, and is taken by another: again and again."""
    done: queue.Queue[Done] = queue.Queue()
    draw = random.Random(3)
    rounds = [0]
    stop = threading.Event()

    def wait() -> None:
        while not stop.is_set():
            ended(done, TIMEOUT_S)
            rounds[0] += 1

    waiter = threading.Thread(target=wait, daemon=True)
    waiter.start()
    for _ in range(200):
        before = rounds[0]
        time.sleep(TIMEOUT_S * draw.uniform(0.5, 1.1))
        done.put(Done(BlockKey(b"key"), Outcome.STORED))
        ended(done, 0.0)
        wait_until(lambda before=before: rounds[0] > before)  # type: ignore[misc]
    stop.set()
    waiter.join(10.0)
    assert not waiter.is_alive()
