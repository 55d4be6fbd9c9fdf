"""Figures derived from the engines' steps."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from kvrecall.engines.vllm.serving.insight import WINDOW_S, Steps


def step(at: float, *tokens: int, engine: int = 0, prompt: int = 0) -> Any:
    """A step in which each sequence got so many tokens; the first is new, with this prompt."""
    given = [
        SimpleNamespace(new_token_ids=list(range(count)), prefill_stats=None) for count in tokens
    ]
    if prompt:
        given[0].prefill_stats = SimpleNamespace(num_prompt_tokens=prompt)
    return SimpleNamespace(timestamp=at, engine_index=engine, outputs=given)


def test_batches_of_an_answer() -> None:
    steps = Steps()
    for each in (step(1.0, 1), step(2.0, 1, 1, 0), step(2.5), step(3.0, 2, 1, 1), step(4.0, 1)):
        steps.note(each)
    steps.note(step(2.2, 1, 1, 1, 1, 1, engine=1))
    assert steps.sizes(1.0, 4.0) == (1, 2, 3, 1)  # without those in which nobody got a token
    assert steps.sizes(2.0, 3.0) == (2, 3)
    assert steps.sizes(3.0, 3.0) == (3,)
    assert steps.sizes(2.2, 2.2) == (5,)
    for unknown in ((2.0, 2.2), (0.5, 3.0), (4.0, 5.0), (3.0, 2.0)):
        assert steps.sizes(*unknown) == ()


def test_what_is_forgotten_is_not_told_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvrecall.engines.vllm.serving.insight._KEPT", 3)
    steps = Steps()
    for at in range(5):
        steps.note(step(float(at), 1))
    assert steps.sizes(2.0, 4.0) == (1, 1, 1)
    assert steps.sizes(1.0, 4.0) == ()


def test_throughputs_are_of_the_last_seconds() -> None:
    now = 100.0
    steps = Steps(lambda: now)
    steps.note(step(1.0, 1, prompt=900))
    now += WINDOW_S / 2
    steps.note(step(2.0, 3, 2))
    assert steps.throughputs() == (900 / WINDOW_S, 6 / WINDOW_S)
    now += WINDOW_S / 2
    assert steps.throughputs() == (0, 5 / WINDOW_S)
    now += WINDOW_S
    assert steps.throughputs() == (0, 0)


def test_what_the_engines_send_is_noted_and_passed_on() -> None:
    from kvrecall.engines.vllm.compat.serving import note_outputs

    class Core:
        async def get_output_async(self) -> Any:
            return step(7.0, 1, 1)

    steps, core = Steps(), Core()
    note_outputs(core, steps.note)
    assert asyncio.run(core.get_output_async()).timestamp == 7.0
    assert steps.sizes(7.0, 7.0) == (2,)
