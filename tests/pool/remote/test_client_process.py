"""Threads of Mooncake's calls stand back from the processors, and are raised when that hurts."""

import os
import threading

import pytest

from kvrecall.pool.remote.mooncake.client_process import CallTimes, SpinPriority, can_raise
from kvrecall.testing import wait_until

MIB = 1 << 20


def taught(seconds: float = 0.02) -> CallTimes:
    times = CallTimes()
    times.ended(MIB, seconds)
    return times


def test_the_limit_grows_with_the_bytes_and_the_time_they_took() -> None:
    times = taught(0.02)
    short, long = times.limit_of(MIB), times.limit_of(4 * MIB)
    assert short is not None
    assert long is not None
    assert 0.02 < short < long
    assert long > 0.08


def test_slow_calls_are_forgotten_quickly_and_fast_ones_slowly() -> None:
    times = taught(0.02)
    times.ended(MIB, 2.0)
    limit = times.limit_of(MIB)
    assert limit is not None
    assert limit < 0.1


def test_after_a_late_call_the_next_ones_do_not_stand_back_and_longer_each_time() -> None:
    times = taught()

    def rest() -> int:
        count = 0
        while times.limit_of(MIB) is None:
            count += 1
        return count

    times.late()
    first = rest()
    times.late()
    second = rest()
    times.in_time()
    times.late()
    assert 0 < first < second
    assert rest() == first
    for _ in range(50):
        times.late()
    assert rest() < 100


needs_raise = pytest.mark.skipif(not can_raise(), reason="needs CAP_SYS_NICE to raise a thread")


class Clock:
    now = 0.0
    looks = 0

    def __call__(self) -> float:
        self.looks += 1
        return self.now


class Call:
    """A call under way in a thread of its own, until ``end``."""

    def __init__(
        self, priority: SpinPriority, way: str = "get", fails: bool = False, moves: bool = True
    ) -> None:
        self._priority, self._way, self._fails, self._moves = priority, way, fails, moves
        self._inside, self._end, self._out = (threading.Event() for _ in range(3))
        self.after = -1
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._inside.wait()

    def _run(self) -> None:
        self._native = threading.get_native_id()
        try:
            with self._priority.call(self._way, MIB) as call:
                self._inside.set()
                self._end.wait()
                if self._fails:
                    raise RuntimeError("of Mooncake")
                call.moved = self._moves
        except RuntimeError:
            assert self._fails
        self.after = os.sched_getscheduler(self._native)

    @property
    def policy(self) -> int:
        return os.sched_getscheduler(self._native)

    def end(self) -> int:
        """The policy of its thread after the call."""
        self._end.set()
        self._thread.join()
        return self.after


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def priority(clock: Clock) -> SpinPriority:
    """Has seen that a call takes a second."""
    made = SpinPriority(clock)
    call = Call(made)
    assert call.policy == os.SCHED_OTHER
    clock.now += 1.0
    call.end()
    return made


@needs_raise
def test_a_call_stands_back_and_ends_at_the_ordinary_priority(priority: SpinPriority) -> None:
    call = Call(priority)
    assert call.policy == os.SCHED_IDLE
    assert call.end() == os.SCHED_OTHER


@needs_raise
def test_a_late_call_is_raised_while_it_is_under_way_and_the_next_is_not_lowered(
    priority: SpinPriority, clock: Clock
) -> None:
    call = Call(priority)
    assert call.policy == os.SCHED_IDLE
    clock.now += 10.0
    wait_until(lambda: call.policy == os.SCHED_OTHER)
    assert call.end() == os.SCHED_OTHER
    after = Call(priority)
    assert after.policy == os.SCHED_OTHER
    after.end()


@needs_raise
def test_a_call_that_found_nothing_says_nothing_of_how_long_calls_take(
    priority: SpinPriority, clock: Clock
) -> None:
    for _ in range(3):
        Call(priority, moves=False).end()
    call = Call(priority)
    clock.now += 1.2
    looks = clock.looks
    beside = Call(priority)  # looks once itself, and wakes the watcher
    wait_until(lambda: clock.looks > looks + 1)
    assert call.policy == os.SCHED_IDLE, "late after 1.5 s"
    call.end()
    beside.end()


@needs_raise
def test_each_direction_is_judged_by_itself(priority: SpinPriority) -> None:
    put = Call(priority, "put")
    assert put.policy == os.SCHED_OTHER
    put.end()


@needs_raise
def test_a_call_that_fails_leaves_the_ordinary_priority(priority: SpinPriority) -> None:
    call = Call(priority, fails=True)
    assert call.policy == os.SCHED_IDLE
    assert call.end() == os.SCHED_OTHER


def test_without_the_right_to_rise_no_thread_stands_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("sched_setscheduler")

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    assert not can_raise()
    priority = SpinPriority()
    for _ in range(3):
        call = Call(priority)
        assert call.policy == os.SCHED_OTHER
        call.end()
