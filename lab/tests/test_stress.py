"""The parts of the stress run: it detects every fault whose absence it reports."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from lab_commands import lab

from kvrecall_lab.engines.engine import Answer, Question
from kvrecall_lab.engines.host import STATES
from kvrecall_lab.stress.mix import BLOCK, LONGEST, Order, mix
from kvrecall_lab.stress.oracle import PARTED, fault

GREEDY = Order(Question("a", (7, 8, 9), 3), True)
DRAWN = Order(Question("a", (7, 8, 9), 2, samples=2), True)
RIGHT = Answer("a", (1, 2, 3, 4), "length", {"computed": 3}, (), (2.0,) * 4, 0.0, (-0.1,) * 4)


def test_what_an_answer_may_not_differ_in() -> None:
    assert fault(GREEDY, RIGHT, RIGHT) == fault(DRAWN, RIGHT, RIGHT) == ""
    assert fault(GREEDY, RIGHT, replace(RIGHT, finish="abort")) == "ended with 'abort'"
    assert "sources" in fault(GREEDY, RIGHT, replace(RIGHT, sources={"host": 4}))
    prompts = [replace(RIGHT, prompt_scores=scores) for scores in ((), (-0.5,), (-0.51,))]
    assert fault(GREEDY, prompts[1], prompts[1]) == ""
    for other in prompts[::2]:
        assert "of the prompt" in fault(GREEDY, prompts[1], other)
    assert "token 3 are off by 0.5" in fault(GREEDY, RIGHT, replace(RIGHT, gaps=(2, 2, 2, 1.5)))
    assert "token 0 are off by 0.1" in fault(DRAWN, RIGHT, replace(RIGHT, scores=(-0.2,) * 4))
    assert "instead of" in fault(GREEDY, RIGHT, replace(RIGHT, tokens=(1, 2, 3)))


def test_where_tokens_may_part() -> None:
    other = replace(RIGHT, tokens=(1, 9, 9, 9))
    assert fault(GREEDY, RIGHT, other) == "[1, 9, 9, 9] instead of [1, 2, 3, 4]"
    close = replace(RIGHT, gaps=(2.0, 0.001, 2.0, 2.0))
    assert fault(GREEDY, close, replace(other, gaps=close.gaps)) == ""
    assert fault(DRAWN, RIGHT, other) == PARTED
    assert "are off" in fault(DRAWN, RIGHT, replace(other, gaps=(2.0, 2.0, 1.0, 2.0)))


def test_a_mix_has_everything_and_fits() -> None:
    orders = mix(1, 600, [Path("one"), Path("two")])
    assert orders == mix(1, 600, [Path("one"), Path("two")]) != mix(2, 600, [Path("one")])
    asked = [order.question for order in orders]
    assert {order.abort for order in orders} == {"", *STATES}
    assert {question.adapter and question.adapter[0] for question in asked} == {None, "one", "two"}
    assert {key for question in asked for key in question.sampling} == {
        "seed", "ignore_eos", "structured_outputs", "prompt_logprobs"
    }  # fmt: skip
    assert max(len(question.prompt) + question.max_tokens for question in asked) == LONGEST
    assert {0, 1, 13} < {len(question.prompt) % BLOCK for question in asked}


@pytest.mark.engine
@pytest.mark.long
def test_a_short_run_is_clean() -> None:
    """With copies that are late, as on an accelerator."""
    words = ("--requests", "150", "--seed", "1", "--device", "late")
    done = lab("stress", *words)
    assert done.returncode == 0, done.stdout + done.stderr[-6000:]
    line = json.loads(done.stdout.splitlines()[-1])
    assert (line["requests"], line["wrong"], line["stuck"], line["leaks"]) == (150, 0, 0, 0)
    assert line["restarted"]
