"""What a prefill instance promises and a decode instance waits for, on the scheduler side."""

from __future__ import annotations

from typing import Any

import pytest
from support.clocks import ManualClock

from kvrecall.block import Namespace
from kvrecall.engines.base import HANDOVER
from kvrecall.engines.vllm.connector.request import Handover, Promise, receipt

SPACE = Namespace.of({"test": "1"})


def promise(clock: ManualClock, tokens: int = 64) -> Promise:
    made = Promise.of(receipt(SPACE, tokens), 16, 2.0, clock)
    assert made is not None
    return made


def test_a_promise_is_waited_for_until_it_is_kept() -> None:
    clock = ManualClock()
    made = promise(clock)
    assert made.tokens == 64
    assert made.hinted == ""
    assert made.look(64, lambda: 48) is Handover.WAIT
    clock.advance(1.9)
    assert made.look(64, lambda: 64) is Handover.KEPT
    assert made.is_over


def test_a_promise_that_is_not_kept_is_given_up() -> None:
    clock = ManualClock()
    made = promise(clock)
    assert made.look(64, lambda: 0) is Handover.WAIT
    clock.advance(2.0)
    assert made.look(64, lambda: 48) is Handover.LATE
    assert made.is_over


def test_the_pool_is_not_asked_in_every_step() -> None:
    clock = ManualClock()
    made = promise(clock)
    asked: list[int] = []

    def found() -> int:
        asked.append(1)
        return 0

    for _ in range(100):
        assert made.look(64, found) is Handover.WAIT
    assert len(asked) == 1
    clock.advance(0.01)
    made.look(64, found)
    assert len(asked) == 2


@pytest.mark.parametrize(
    "params",
    [
        None,
        {},
        [],
        {HANDOVER: None},
        {HANDOVER: {"tokens": 64}},
        {HANDOVER: {"tokens": "64", "namespace": "a"}},
        {HANDOVER: {"tokens": True, "namespace": "a"}},
        {HANDOVER: {"tokens": 15, "namespace": "a"}},
        {HANDOVER: {"tokens": -64, "namespace": 5}},
    ],
)
def test_what_comes_from_outside_is_checked(params: Any) -> None:
    assert Promise.of(params, 16, 1.0, ManualClock()) is None


@pytest.mark.parametrize("hinted", ["a pool", 5, None, ["a pool"]])
def test_the_pool_that_knows_a_hint_is_a_name(hinted: Any) -> None:
    told = {HANDOVER: {"tokens": 64, "namespace": "a", "hinted": hinted}}
    made = Promise.of(told, 16, 1.0, ManualClock())
    assert made is not None
    assert made.hinted == ("a pool" if hinted == "a pool" else "")


def test_nothing_saved_is_nothing_promised() -> None:
    assert receipt(SPACE, 0) == {}
    assert receipt(None, 64) == {}
