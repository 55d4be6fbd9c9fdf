"""The bytes per call of a store, for stores of various bandwidths and latencies."""

from __future__ import annotations

import pytest

from kvrecall.pool.remote.calls import BatchSize

TURN_S, LIMIT_S = 0.04, 0.5
MIB = 1 << 20


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
