"""How a queue of calls divides what is added to it."""

from __future__ import annotations

import random
import threading
import time

import pytest

from kvrecall.pool.remote.calls import CallQueue

LIMIT = 40


class Recorder:
    """Batches of the items 0, 1, ... of size 1, in the order in which they were taken; calls wait
    for ``go``."""

    def __init__(self, threads: int, first_share: float = 1.0, last_share: float = 1.0) -> None:
        self.batches: list[list[int]] = []
        self.go = threading.Event()
        self.queue: CallQueue[int] = CallQueue(
            "test",
            threads,
            self._call,
            lambda: LIMIT,
            lambda _: 1,
            time.monotonic,
            first_share,
            last_share,
        )

    def _call(self, batch: list[int]) -> None:
        self.batches.append(batch)
        self.go.wait(10.0)

    def sizes(self, items: int) -> list[int]:
        """The sizes of the batches, by their place, of ``items`` added at once."""
        self.queue.add(range(items))
        while sum(map(len, self.batches)) < items and not self.go.wait(0.01):
            if len(self.batches) == 2:
                self.go.set()
        self.go.set()
        assert self.queue.close(10.0)
        batches = sorted(self.batches)
        assert [item for batch in batches for item in batch] == list(range(items))
        return [len(batch) for batch in batches]


def test_the_first_batch_is_small_while_nothing_is_in_flight() -> None:
    assert Recorder(2, first_share=0.25).sizes(50) == [10, 40]


def test_the_last_batch_is_small() -> None:
    assert Recorder(2, last_share=0.25).sizes(128) == [40, 40, 38, 10]
    assert Recorder(2, last_share=0.25).sizes(40) == [30, 10]


@pytest.mark.parametrize("shares", [(0.25, 1.0), (1.0, 0.25)])
def test_half_a_batch_is_one_call(shares: tuple[float, float]) -> None:
    assert Recorder(2, *shares).sizes(LIMIT // 2) == [LIMIT // 2]


@pytest.mark.parametrize("shares", [(0.25, 1.0), (1.0, 0.25)])
def test_one_thread_has_no_call_to_work_behind(shares: tuple[float, float]) -> None:
    recorder = Recorder(1, *shares)
    recorder.go.set()
    assert recorder.sizes(128) == [40, 40, 40, 8]


def test_whatever_is_added_is_taken_once_and_within_the_limit() -> None:
    chance = random.Random(1)
    for _ in range(30):
        taken: list[list[tuple[int, int]]] = []
        queue: CallQueue[tuple[int, int]] = CallQueue(
            "test",
            2,
            taken.append,
            lambda: LIMIT,
            lambda item: item[1],
            time.monotonic,
            first_share=chance.choice([0.1, 1.0]),
            last_share=chance.choice([0.1, 1.0]),
        )
        items = [(place, chance.randint(1, 60)) for place in range(chance.randint(1, 40))]
        half = chance.randint(0, len(items))
        queue.add(items[:half])
        queue.add(items[half:])
        assert queue.close(10.0)
        assert [item for batch in sorted(taken) for item in batch] == items
        assert all(len(b) == 1 or sum(size for _, size in b) <= LIMIT for b in taken)


def test_what_was_not_begun_is_cleared_and_counts_no_more() -> None:
    recorder = Recorder(1)
    recorder.queue.add(range(100))
    while not recorder.batches:
        time.sleep(0.001)
    assert recorder.queue.clear() == list(range(LIMIT, 100))
    recorder.go.set()
    recorder.queue.add(range(LIMIT, LIMIT + 8))
    assert recorder.queue.close(10.0)
    assert [len(batch) for batch in recorder.batches] == [LIMIT, 8]
