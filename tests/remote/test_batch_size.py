"""The bytes per call of a store, for stores of various bandwidths and latencies."""

from __future__ import annotations

import pytest

from kvrecall.pool.remote.calls import BatchSize

TURN_S, LIMIT_S = 0.04, 0.5
MIB = 1 << 20


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
        pace.moved(nbytes, seconds)
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
    pace.moved(before, 3.0)
    assert pace.nbytes < before / 10
    for _ in range(10):
        pace.moved(pace.nbytes, pace.nbytes / 1e9)
    assert pace.nbytes > before * 0.8


def test_a_latency_that_was_short_once_is_forgotten() -> None:
    pace = BatchSize(TURN_S, LIMIT_S)
    pace.answered(0.0001)
    for _ in range(60):
        pace.answered(0.1)
    for _ in range(10):
        pace.moved(pace.nbytes, 0.1 + pace.nbytes / 1e8)
    assert pace.nbytes > 0.2 * 1e8


def test_calls_that_moved_nothing_say_nothing() -> None:
    pace = BatchSize(TURN_S, LIMIT_S)
    before = pace.nbytes
    pace.moved(0, 1.0)
    assert pace.nbytes == before
