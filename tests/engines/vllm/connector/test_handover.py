"""What a prefill instance promises and a decode instance waits for, on the scheduler side."""

from __future__ import annotations

from typing import Any

import pytest

from kvrecall.block import Namespace
from kvrecall.engines.base import HANDOVER
from kvrecall.engines.vllm.connector.handover import LOOK_EVERY_S, Handover, Promise, receipt

SPACE = Namespace.of({"test": "1"})


def promise(tokens: int = 64) -> Promise:
    made = Promise.of(receipt(SPACE, tokens), 16, 2.0)
    assert made is not None
    return made


def test_a_promise_is_waited_for_until_it_is_kept() -> None:
    made = promise()
    assert made.tokens == 64
    assert made.hinted == ""
    assert made.look(5.0, False) is Handover.WAIT
    assert not made.is_over
    assert made.look(6.9, True) is Handover.KEPT
    assert made.is_over


def test_a_promise_that_is_not_kept_is_given_up() -> None:
    made = promise()
    assert made.look(5.0, False) is Handover.WAIT
    assert made.look(7.0, False) is Handover.LATE
    assert made.is_over


def test_the_pool_is_not_asked_in_every_step_but_at_the_deadline() -> None:
    wait = promise().wait
    assert not wait.is_early(5.0)
    assert wait.goes_on(5.0)
    assert wait.is_early(5.0 + LOOK_EVERY_S / 2)
    assert not wait.is_early(5.0 + 2 * LOOK_EVERY_S)
    assert wait.goes_on(6.9999)
    assert wait.is_early(6.99995)
    assert not wait.is_early(7.0)
    assert not wait.goes_on(7.0)


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
    assert Promise.of(params, 16, 1.0) is None


@pytest.mark.parametrize("hinted", ["a pool", 5, None, ["a pool"]])
def test_the_pool_that_knows_a_hint_is_a_name(hinted: Any) -> None:
    told = {HANDOVER: {"tokens": 64, "namespace": "a", "hinted": hinted}}
    made = Promise.of(told, 16, 1.0)
    assert made is not None
    assert made.hinted == ("a pool" if hinted == "a pool" else "")


def test_nothing_saved_is_nothing_promised() -> None:
    assert receipt(SPACE, 0) == {}
    assert receipt(None, 64) == {}
