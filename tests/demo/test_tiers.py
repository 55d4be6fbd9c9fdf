"""The demo's verdict on its rows, and its prompts."""

from __future__ import annotations

import dataclasses
import io
import json

import pytest
from rich.console import Console

from kvrecall.demo.tiers import FACT, Row, TierVerdict, long_question
from kvrecall.processes.server import Answer

TEXT, TURN = "long text", "conversation, turn 2"


def answer(tokens: tuple[int, ...] = (1, 2), **recalled: int) -> Answer:
    first = sum(recalled.values()) / 1000
    return Answer(300, recalled, tokens, (-0.5, -0.25), "text\nmore", first, first + 1)


def rows() -> list[Row]:
    return [
        Row(TURN, "no pool", answer((7,), computed=200)),
        Row(TEXT, "no pool", answer(computed=300)),
        Row(TURN, "new", answer((7,), device=128, computed=72)),
        Row(TEXT, "asked again", answer(device=256, computed=44)),
        Row(TEXT, "device cache emptied", answer(host=256, computed=44)),
        Row(TEXT, "server restarted", answer(disk=256, computed=44)),
    ]


def without(kept: list[Row], place: int, **change: object) -> list[Row]:
    changed = dataclasses.replace(kept[place].answer, **change)  # type: ignore[arg-type]
    kept[place] = dataclasses.replace(kept[place], answer=changed)
    return kept


def test_ok_when_tokens_are_equal_and_every_tier_was_hit() -> None:
    summary = TierVerdict(rows(), "some-model").summary()
    assert (summary["ok"], summary["tokens_equal"]) == (True, True)
    assert summary["device_hit_tokens"] == 128 + 256
    assert (summary["host_hit_tokens"], summary["disk_hit_tokens"]) == (256, 256)


@pytest.mark.parametrize("tokens", [(1, 3), ()], ids=["another", "fewer"])
@pytest.mark.parametrize("place", range(2, 6))
def test_another_token_or_fewer_is_not_ok(place: int, tokens: tuple[int, ...]) -> None:
    summary = TierVerdict(without(rows(), place, tokens=tokens), "m").summary()
    assert (summary["ok"], summary["tokens_equal"]) == (False, False)


@pytest.mark.parametrize("place", [4, 5])
def test_a_tier_that_was_not_hit_is_not_ok(place: int) -> None:
    summary = TierVerdict(without(rows(), place, recalled={"computed": 300}), "m").summary()
    assert (summary["ok"], summary["tokens_equal"]) == (False, True)


def test_one_wrong_answer_is_told() -> None:
    said = [without(rows(), place, text=" The code is 417.\n")[place] for place in (1, 3, 4, 5)]
    right = [row for row in rows() if row.text == TURN] + said
    assert TierVerdict(right, "m").summary()["answers_right"] is True
    wrong = without(right, 4, text=" The code is 471.\n Not 417.")
    assert TierVerdict(wrong, "m").summary()["answers_right"] is False
    assert TierVerdict(wrong, "m").summary()["ok"] is True


def printed(verdict: TierVerdict, as_json: bool = False, terminal: bool = False) -> list[str]:
    out = io.StringIO()
    verdict.print(Console(file=out, force_terminal=terminal, width=60), as_json)
    return out.getvalue().splitlines()


@pytest.mark.parametrize("terminal", [True, False])
def test_the_line_of_json_is_one_line_however_narrow_it_is(terminal: bool) -> None:
    verdict = TierVerdict(rows(), "a[red]model" * 20)
    (line,) = printed(verdict, as_json=True, terminal=terminal)
    assert json.loads(line)["model"] == "a[red]model" * 20
    assert not any(line.startswith("{") for line in printed(verdict, terminal=terminal))


def test_the_last_line_says_what_was_gained() -> None:
    fast = without(without(rows(), 1, ttft_s=6.5), 4, ttft_s=0.1)
    assert printed(TierVerdict(without(fast, 5, ttft_s=2.0), "m"))[-1] == (
        "First token of the long text: 65 times as fast from host memory, 3.2 times from disk "
        "after a restart; 6 of 6 answers identical."
    )
    other = without(rows(), 4, tokens=(1, 3))
    assert printed(TierVerdict(other, "m"))[-1].endswith("5 of 6 answers identical.")


def test_a_tier_that_was_not_hit_is_explained() -> None:
    assert not [line for line in printed(TierVerdict(rows(), "m")) if "nothing came from" in line]
    missed = without(rows(), 5, recalled={"computed": 300})
    assert "nothing came from disk: " in " ".join(printed(TierVerdict(missed, "m")))


def test_what_a_model_of_random_weights_says_is_not_judged() -> None:
    verdict = TierVerdict(rows(), "m", trained=False)
    assert verdict.summary()["answers_right"] is None
    assert verdict.summary()["ok"] is True
    assert not [line for line in printed(verdict) if "answer about" in line]


def test_the_long_text_holds_the_fact_once_in_its_middle() -> None:
    text = long_question(72_000)
    assert 71_000 < len(text) < 73_000
    assert text.count(FACT) == 1
    assert 0.4 < text.index(FACT) / len(text) < 0.6
