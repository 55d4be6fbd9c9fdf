"""Why prompts of one application part early: what each cause looks like, and what costs most."""

from __future__ import annotations

import json

import pytest

from kvrecall.engines.base import miss_text
from kvrecall.engines.parting import ADVICE, costliest, with_cause

SYSTEM = "You are the assistant of a shop. Be brief, be kind, and answer in one line. "
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "d", "parameters": {}}}
    for name in ("get_weather", "send_mail", "search")
]
CHATML = "<|im_start|>system\n"
PARTINGS = [
    ("clock", "Today is 2026-11-27 09:42:01. " + SYSTEM, "Today is 2026-11-27 09:43:55. " + SYSTEM),
    ("clock", "It is now Friday, 27 November 2026. Hello", "It is now Friday, 28 November 2026. "),
    ("clock", "The current time is 09:42 here.", "The current time is 10:42 here."),
    ("clock", "The date: November 3, 2026, and so on", "The date: December 3, 2026, and so on"),
    ("clock", "当前时间：2026年11月27日，你是助手。", "当前时间：2026年11月28日，你是助手。"),
    ("clock", "started at 1795772521 UTC", "started at 1795772999 UTC"),
    (
        "number",
        "session 3f2b8c1d-aaaa-4bbb-8ccc-0123456789ab: " + SYSTEM,
        "session 3f2b8c1d-9aaa-4bbb-8ccc-0123456789ab: " + SYSTEM,
    ),
    ("number", "Customer 100234: " + SYSTEM, "Customer 100777: " + SYSTEM),
    ("tools", SYSTEM + json.dumps(TOOLS), SYSTEM + json.dumps(TOOLS[::-1])),
    (
        "template",
        CHATML + SYSTEM[:20] + "<|im_end|>\n<|im_start|>user",
        CHATML + SYSTEM[:20] + "<|eot_id|>\n<|im_start|>user",
    ),
    ("", SYSTEM + "What do apples cost?", SYSTEM + "What do pears cost?"),
    ("", SYSTEM * 3 + "No.<|im_end|>", SYSTEM * 3 + "No. But 5 do, at 3 each."),
    ("", "Page 12 of a book that is long", "Page 13 of a book that is long"),
]


@pytest.mark.parametrize(("cause", "known", "asked"), PARTINGS)
def test_the_text_where_prompts_part_tells_the_cause(cause: str, known: str, asked: str) -> None:
    token = next(at for at, (a, b) in enumerate(zip(known, asked, strict=False)) if a != b)
    miss = {"reason": "diverged", "from": 0, "tokens": len(asked), "token": token}
    ids = [ord(letter) for letter in asked]
    told = with_cause(miss, ids, lambda part: "".join(map(chr, part)))
    assert told == ({**miss, "cause": cause} if cause else miss)
    assert ADVICE.get(cause, f"at token {token}") in miss_text(told)


def test_another_cause_stays_and_other_reasons_have_none() -> None:
    for miss in (
        {"reason": "diverged", "from": 0, "tokens": 9, "token": 5, "cause": "media"},
        {"reason": "evicted", "from": 0, "tokens": 9},
    ):
        assert with_cause(miss, [50] * 20, lambda _: "2026-11-27") == miss


def test_the_costliest_places_are_summed() -> None:
    clock = {"reason": "diverged", "from": 0, "tokens": 900, "token": 40, "cause": "clock"}
    missed = [(f"c{at}", clock) for at in range(3)]
    missed += [(f"n{at}", {"reason": "diverged", "tokens": at, "token": at}) for at in range(20)]
    missed += [("other", {"reason": "new", "from": 0, "tokens": 10_000})]
    first, *others = costliest(missed)
    assert (first.token, first.cause, first.requests, first.tokens) == (40, "clock", 3, 2700)
    assert (first.example, first.advice) == ("c2", ADVICE["clock"])
    assert [one.tokens for one in others] == list(range(19, 10, -1))
