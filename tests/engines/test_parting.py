"""Why prompts of one application part early: what each cause looks like, and what costs most."""

from __future__ import annotations

import json
import re

import pytest

from kvrecall.engines.base import miss_text
from kvrecall.engines.parting import ADVICE, Partings, with_cause

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
    ("clock", "Now: 9:05 AM, hello", "Now: 9:05 PM, hello"),
    ("clock", "It is Sat Nov 28 16:25:37", "It is Sun Nov 29 16:25:37"),
    ("clock", "Today is Friday.", "Today is Saturday."),
    ("clock", "the 3rd of November 2026", "the 4th of November 2026"),
    ("clock", "On 11/28/2026 we", "On 11/29/2026 we"),
    ("clock", "Am 28.11.2026 sind", "Am 29.11.2026 sind"),
    ("clock", "at=20261128T162537Z", "at=20261128T162538Z"),
    ("clock", "今天是2026年11月28日 星期六", "今天是2026年11月28日 星期日"),
    ("number", "request req-8f3a2b: hi", "request req-9f3a2b: hi"),
    ("number", "User u_18273645 asks", "User u_18279999 asks"),
    (
        "number",
        "session 3f2b8c1d-aaaa-4bbb-8ccc-0123456789ab: " + SYSTEM,
        "session 3f2b8c1d-9aaa-4bbb-8ccc-0123456789ab: " + SYSTEM,
    ),
    ("number", "Customer 100234: " + SYSTEM, "Customer 100777: " + SYSTEM),
    ("tools", SYSTEM + json.dumps(TOOLS), SYSTEM + json.dumps(TOOLS[::-1])),
    ("tools", "functions {\n\n// Mails.\ntype mail = (", "functions {\n\n// Asks.\ntype ask = ("),
    ("tools", SYSTEM + "<|im_end|>", SYSTEM + "\n\n# Tools\n\nYou may call"),
    ("template", f"{CHATML}Be brief.", "<|im_start|>user\nHello."),
    ("template", "<|message|>\nReasoning: low\n", "<|message|>\nReasoning: high\n"),
    (
        "template",
        CHATML + SYSTEM[:20] + "<|im_end|>\n<|im_start|>user",
        CHATML + SYSTEM[:20] + "<|eot_id|>\n<|im_start|>user",
    ),
    ("", SYSTEM + "What do apples cost?", SYSTEM + "What do pears cost?"),
    ("", SYSTEM * 3 + "No.<|im_end|>", SYSTEM * 3 + "No. But 5 do, at 3 each."),
    ("", "Page 12 of a book that is long", "Page 13 of a book that is long"),
    ("", "Take 3 Decks of cards", "Take 4 Decks of cards"),
    ("", "请给出3点建议", "请给出5点建议"),
]


@pytest.mark.parametrize(("cause", "known", "asked"), PARTINGS)
def test_the_text_where_prompts_part_tells_the_cause(cause: str, known: str, asked: str) -> None:
    others, words = (re.findall(r" ?[^\W\d]+|\d{1,3}|.", x, re.DOTALL) for x in (known, asked))
    token = next(at for at, (a, b) in enumerate(zip(others, words, strict=False)) if a != b)
    miss = {"reason": "diverged", "from": 0, "tokens": len(words), "token": token}
    every = range(len(words))  # text as of SentencePiece: its first space is not there
    told = with_cause(miss, every, lambda ids: "".join(words[at] for at in ids).removeprefix(" "))
    assert told == ({**miss, "cause": cause} if cause else miss)
    assert ADVICE.get(cause, f"at token {token}") in miss_text(told)


def test_another_cause_stays_and_other_reasons_have_none() -> None:
    for miss in (
        {"reason": "diverged", "from": 0, "tokens": 9, "token": 5, "cause": "media"},
        {"reason": "evicted", "from": 0, "tokens": 9},
    ):
        assert with_cause(miss, [50] * 20, lambda _: "2026-11-27") == miss


def test_the_costliest_places_of_an_hour_are_summed() -> None:
    """Of more requests than are remembered by their ids, over several minutes, until they are
    gone; of a crowd of places the dearest are kept."""
    now = [0.0]
    found = Partings(lambda: now[0])
    clock = {"reason": "diverged", "from": 0, "tokens": 900, "token": 40, "cause": "clock"}
    for at in range(9000):
        now[0] = at / 100
        found.note(f"c{at}", clock)
    found.note("other", {"reason": "new", "from": 0, "tokens": 10_000})
    for at in range(3000):
        found.note(f"n{at}", {"reason": "diverged", "tokens": at, "token": at})
    first, *others = found.costliest()
    assert (first.token, first.cause, first.requests, first.tokens) == (
        40,
        "clock",
        9000,
        8_100_000,
    )
    assert (first.example, first.advice) == ("c8999", ADVICE["clock"])
    assert [one.tokens for one in others] == list(range(2999, 2990, -1))
    assert found.costliest()[0].requests == 9000
    assert sum(map(len, found._minutes.values())) <= 2 * 256
    now[0] = 3601.0
    assert found.costliest()[0].requests == 3000
    now[0] = 3661.0
    assert found.costliest() == []
