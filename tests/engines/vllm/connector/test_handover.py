"""What a prefill instance promises and a decode instance waits for, on the scheduler side."""

from __future__ import annotations

from typing import Any

import pytest

from kvrecall.block import Namespace
from kvrecall.engines.base import HANDOVER
from kvrecall.engines.vllm.connector.handover import Promise, receipt

SPACE = Namespace.of({"test": "1"})


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
