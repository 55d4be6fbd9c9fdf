"""Threads of Mooncake's calls stand back from the processors, and are raised when that hurts."""

import os
import threading
import time

import pytest

from kvrecall.pool.remote.mooncake.courtesy import Courtesy, Record, may_rise

MIB = 1 << 20


def taught(seconds: float = 0.02) -> Record:
    record = Record()
    record.ended(MIB, seconds)
    return record


def test_a_first_call_does_not_stand_back() -> None:
    assert Record().limit_of(MIB) is None


def test_the_limit_grows_with_the_bytes_and_the_time_they_took() -> None:
    record = taught(0.02)
    short, long = record.limit_of(MIB), record.limit_of(4 * MIB)
    assert short is not None
    assert long is not None
    assert 0.02 < short < long
    assert long > 0.08


def test_slow_calls_are_forgotten_quickly_and_fast_ones_slowly() -> None:
    record = taught(0.02)
    record.ended(MIB, 2.0)
    limit = record.limit_of(MIB)
    assert limit is not None
    assert limit < 0.1


def test_after_a_late_call_the_next_ones_do_not_stand_back_and_longer_each_time() -> None:
    record = taught()

    def rest() -> int:
        count = 0
        while record.limit_of(MIB) is None:
            count += 1
        return count

    record.late()
    first = rest()
    record.late()
    second = rest()
    record.in_time()
    record.late()
    assert 0 < first < second
    assert rest() == first


def test_the_rest_has_an_end() -> None:
    record = taught()
    for _ in range(50):
        record.late()
    assert any(record.limit_of(MIB) is not None for _ in range(100))


needs_rise = pytest.mark.skipif(not may_rise(), reason="needs CAP_SYS_NICE to raise a thread")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Call:
    """A call under way in a thread of its own, until ``end``."""

    def __init__(
        self, courtesy: Courtesy, way: str = "get", fails: bool = False, moves: bool = True
    ) -> None:
        self._courtesy, self._way, self._fails, self._moves = courtesy, way, fails, moves
        self._inside, self._end, self._out = (threading.Event() for _ in range(3))
        self.after = -1
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._inside.wait(30.0)

    def _run(self) -> None:
        self._native = threading.get_native_id()
        try:
            with self._courtesy.call(self._way, MIB) as call:
                self._inside.set()
                assert self._end.wait(30.0)
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
        self._thread.join(30.0)
        return self.after


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def courtesy(clock: Clock) -> Courtesy:
    """Has seen that a call takes a second."""
    made = Courtesy(clock)
    call = Call(made)
    assert call.policy == os.SCHED_OTHER
    clock.now += 1.0
    call.end()
    return made


@needs_rise
def test_a_call_stands_back_and_ends_at_the_ordinary_priority(courtesy: Courtesy) -> None:
    call = Call(courtesy)
    assert call.policy == os.SCHED_IDLE
    assert call.end() == os.SCHED_OTHER


@needs_rise
def test_a_late_call_is_raised_while_it_is_under_way_and_the_next_is_not_lowered(
    courtesy: Courtesy, clock: Clock
) -> None:
    call = Call(courtesy)
    assert call.policy == os.SCHED_IDLE
    clock.now += 10.0
    until = time.monotonic() + 30.0
    while call.policy == os.SCHED_IDLE and time.monotonic() < until:
        time.sleep(0.005)
    assert call.policy == os.SCHED_OTHER
    assert call.end() == os.SCHED_OTHER
    after = Call(courtesy)
    assert after.policy == os.SCHED_OTHER
    after.end()


@needs_rise
def test_a_call_that_found_nothing_says_nothing_of_how_long_calls_take(
    courtesy: Courtesy, clock: Clock
) -> None:
    for _ in range(3):
        Call(courtesy, moves=False).end()
    call = Call(courtesy)
    clock.now += 1.2
    time.sleep(0.1)
    assert call.policy == os.SCHED_IDLE, "late after 1.5 s"
    call.end()


@needs_rise
def test_each_direction_is_judged_by_itself(courtesy: Courtesy) -> None:
    put = Call(courtesy, "put")
    assert put.policy == os.SCHED_OTHER
    put.end()


@needs_rise
def test_a_call_that_fails_leaves_the_ordinary_priority(courtesy: Courtesy) -> None:
    call = Call(courtesy, fails=True)
    assert call.policy == os.SCHED_IDLE
    assert call.end() == os.SCHED_OTHER


def test_without_the_right_to_rise_no_thread_stands_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("sched_setscheduler")

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    assert not may_rise()
    courtesy = Courtesy()
    for _ in range(3):
        call = Call(courtesy)
        assert call.policy == os.SCHED_OTHER
        call.end()
