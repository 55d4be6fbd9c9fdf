"""Calls to a store: their bytes, for stores of various bandwidths and latencies, and how a queue
divides what is added to it."""

from __future__ import annotations

import random
import threading
import time

import pytest
from support.clocks import ManualClock

from kvrecall.block import BlockKey
from kvrecall.pool.remote import calls
from kvrecall.pool.remote.calls import (
    BatchSize,
    CallQueue,
    CircuitBreaker,
    Existence,
    ExistenceCache,
)

TURN_S, LIMIT_S = 0.04, 0.5
MIB = 1 << 20
LIMIT = 40


def move(pace: BatchSize, nbytes: int, seconds: float) -> None:
    """A call, with none ahead of it, that moves all its bytes."""
    pace.ended(nbytes, nbytes, seconds, pace.submitted(nbytes))


def carry(
    bytes_per_s: float, latency_s: float, asked: bool = True
) -> tuple[BatchSize, float, float]:
    """Hands blocks of 1 MiB over until the pace is steady; returns the seconds of the last call
    and the share of the bandwidth that it used."""
    pace = BatchSize(TURN_S, LIMIT_S)
    if asked:
        pace.answered(latency_s)
    seconds = share = 0.0
    for _ in range(40):
        nbytes = max(MIB, pace.nbytes // MIB * MIB)
        seconds = latency_s + nbytes / bytes_per_s
        share = nbytes / bytes_per_s / seconds
        move(pace, nbytes, seconds)
    return pace, seconds, share


@pytest.mark.parametrize("bytes_per_s", [2e7, 1e8, 1e9, 1e10, 1e11])
def test_a_near_store_gives_blocks_one_after_the_other(bytes_per_s: float) -> None:
    pace, seconds, share = carry(bytes_per_s, 0.0005)
    assert seconds <= max(1.5 * TURN_S, 2 * MIB / bytes_per_s)
    assert share > 0.85 or pace.nbytes == 64 * MIB


@pytest.mark.parametrize("latency_s", [0.02, 0.06, 0.11])
def test_a_distant_store_is_asked_for_more_at_once(latency_s: float) -> None:
    _, seconds, share = carry(1e8, latency_s)
    assert share > 0.7
    assert seconds < 5 * latency_s


def test_no_call_shall_last_longer_than_the_limit() -> None:
    _, seconds, _ = carry(1e8, 0.4)
    assert seconds <= 1.2 * LIMIT_S


def test_a_pause_of_the_store_is_made_up_for() -> None:
    pace, _, _ = carry(1e9, 0.0005)
    before = pace.nbytes
    move(pace, before, 3.0)
    assert pace.nbytes < before / 10
    for _ in range(10):
        move(pace, pace.nbytes, pace.nbytes / 1e9)
    assert pace.nbytes > before * 0.8


def test_a_latency_that_was_short_once_is_forgotten() -> None:
    pace = BatchSize(TURN_S, LIMIT_S)
    pace.answered(0.0001)
    for _ in range(60):
        pace.answered(0.1)
    for _ in range(10):
        move(pace, pace.nbytes, 0.1 + pace.nbytes / 1e8)
    assert pace.nbytes > 0.2 * 1e8


def test_calls_that_moved_nothing_say_nothing() -> None:
    pace = BatchSize(TURN_S, LIMIT_S)
    before = pace.nbytes
    pace.ended(before, 0, 1.0, pace.submitted(before))
    assert pace.nbytes == before


def test_a_small_call_that_waits_for_a_large_one_says_the_same_of_the_store() -> None:
    pace, _, _ = carry(1e9, 0.0005)
    before = pace.nbytes
    large, small = before, before // 4
    ahead = pace.submitted(large)
    ahead_of_small = pace.submitted(small)
    assert (ahead, ahead_of_small) == (0, large)
    pace.ended(large, large, large / 1e9, ahead)
    pace.ended(small, small, (large + small) / 1e9, ahead_of_small)
    assert pace.in_flight == 0
    assert abs(pace.nbytes - before) < 0.1 * before


def test_bytes_ahead_do_not_lift_the_limit_of_one_call() -> None:
    pace = BatchSize(TURN_S, TURN_S / 2)
    for _ in range(10):
        pace.ended(8 * MIB, 8 * MIB, 8 * MIB / 1e8, ahead=64 * MIB)
    assert pace.nbytes <= 1e8 * TURN_S / 2


# -- the queue ----------------------------------------------------------------------------------


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


# -- what is known of a store ---------------------------------------------------------------

KEYS = [BlockKey(bytes([number]) * 40) for number in range(6)]


def test_a_pause_grows_up_to_a_bound() -> None:
    clock = ManualClock()
    breaker, pauses = CircuitBreaker(clock), []
    for _ in range(9):
        assert breaker.failed() == (not pauses), "only the first begins an outage"
        began = clock.now
        while breaker.is_open:
            clock.advance(0.5)
        pauses.append(clock.now - began)
    assert pauses == [0.5, 1, 2, 4, 8, 15, 15, 15, 15]
    assert breaker.worked()
    assert not breaker.worked()
    assert breaker.failed(), "an outage of its own"


def test_answers_are_good_for_a_while() -> None:
    clock = ManualClock()
    cache = ExistenceCache(clock)
    cache.stored(KEYS[0], 10, 3)
    cache.answered(KEYS[1], True, 10)
    cache.answered(KEYS[2], False, 0)
    cache.dropped(KEYS[3])
    cache.answered(KEYS[3], True, 10)
    there, absent, unknown = Existence.THERE, Existence.ABSENT, Existence.UNKNOWN
    seen = []
    for seconds in (0.0, 1.0, 15.0, 50.0, 60.0):
        clock.advance(seconds)
        seen.append([cache.of(key) for key in KEYS[:4]])
    assert seen == [
        [there, there, absent, Existence.DROPPED],
        [there, there, unknown, Existence.DROPPED],
        [there, unknown, unknown, Existence.DROPPED],
        [there, unknown, unknown, unknown],
        [unknown] * 4,
    ]


def test_the_memory_of_answers_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "_MAX_ENTRIES", 3)
    cache = ExistenceCache(ManualClock())
    for key in KEYS:
        cache.answered(key, True, 10)
    assert (cache.blocks, cache.nbytes) == (3, 30)
    assert [cache.of(key) is Existence.THERE for key in KEYS] == [False] * 3 + [True] * 3
