"""Work is done under holds of a lock that end in time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from kvrecall.pool import holds
from kvrecall.pool.holds import HOLD_S, in_holds


class Work:
    """Parts that take as long as they are told, by a clock that only they move."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.lock = threading.Lock()
        self.slept = 0
        clock = SimpleNamespace(perf_counter=lambda: self.now, sleep=self.sleep)
        monkeypatch.setattr(holds, "time", clock)

    def sleep(self, seconds: float) -> None:
        assert seconds == 0
        assert not self.lock.locked()
        self.slept += 1

    def parts(self, *seconds: float) -> Iterator[float]:
        for each in seconds:
            assert self.lock.locked()
            self.now += each
            yield each


def test_a_hold_ends_with_the_part_that_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    work, quick, slow = Work(monkeypatch), 0.3 * HOLD_S, 9 * HOLD_S
    done = []
    for some in in_holds(work.lock, work.parts(quick, quick, quick, quick, slow, quick, slow)):
        assert not work.lock.locked()
        done.append(some)
        work.now += slow  # what others take between two holds does not count
    assert done == [[quick] * 4, [slow], [quick, slow], []]
    assert work.slept == 3, "others go first, but for the last hold"


def test_no_work_is_one_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    work = Work(monkeypatch)
    assert list(in_holds(work.lock, work.parts())) == [[]]


def test_a_lock_is_let_go_of_when_work_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    work = Work(monkeypatch)

    def fails() -> Iterator[int]:
        yield 1
        raise KeyError

    with pytest.raises(KeyError):
        list(in_holds(work.lock, fails()))
    assert not work.lock.locked()
