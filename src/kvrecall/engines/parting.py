"""What it looks like where a prompt leaves a known one, and what its sender can do about it.

Prompts of one application that part early are computed from there on, each time. Three causes are
frequent, and the text at the place tells them: what is new in each request stands at its head, the
same tools stand in another order, and the template of the chat is another one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

MOST = 10
BEFORE, BEHIND = 48, 12  # tokens around the place that are looked at
_HEAD = 64  # tokens within which a mark of a template is not one of a later turn

_DAY = "(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)[a-z]*"
_MONTH = "(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*"
_LOOKS = {
    "clock": re.compile(
        rf"(?:{_DAY},? )?(?:\d{{1,2}}\.? {_MONTH}|{_MONTH} \d{{1,2}})(?:,? \d{{4}})?"
        r"(?:,?(?: at)? \d{1,2}:\d\d(?::\d\d)?)?"
        r"|\d{4}[-/.年]\d{1,2}[-/.月]\d{1,2}日?(?:[T ,]*\d{1,2}:\d\d(?::\d\d(?:[.,]\d+)?)?)?"
        r"|\b\d{1,2}:\d\d(?::\d\d)?|\b1[6-9]\d{8}(?:\d{3})?\b"
    ),
    "number": re.compile(r"\b[0-9A-Fa-f]{8}-[0-9A-Fa-f-]{4,27}|\b\d{6,}\b|\b[0-9A-Fa-f]{12,}\b"),
    "template": re.compile(r"<[|｜][^<>]{1,40}[|｜]>|\[/?INST\]|<</?SYS>>|<(?:start|end)_of_turn>"),
}
_TOOLS = re.compile(r'"(?:function|parameters|input_schema|inputSchema|tools)"\s*:')

ADVICE = {
    "clock": "a date or time is in the way: move it behind what stays the same, or round it",
    "number": "an id or number of this request is in the way: move it behind what stays the same",
    "tools": "it is among the tools: send the same ones, in the same order, with the same keys",
    "template": "it is a mark of the template: give all clients and servers the same chat template "
    "and chat_template_kwargs",
}
"""By the cause of a miss that diverged."""


@dataclass(slots=True)
class PartingPlace:
    """A place at which requests left known prompts: its ``token`` and ``cause`` ("" if it looks
    like none), how many did, the tokens that they computed, and the last one's id."""

    token: int
    cause: str
    advice: str
    requests: int = 0
    tokens: int = 0
    example: str = ""


def costliest(missed: Iterable[tuple[str, Mapping[str, object]]]) -> list[PartingPlace]:
    """Of requests' ids and misses, oldest first: the ``MOST`` places that cost most tokens."""
    found: dict[tuple[object, str], PartingPlace] = {}
    for name, miss in missed:
        token, cause, tokens = miss.get("token"), str(miss.get("cause", "")), miss["tokens"]
        if isinstance(token, int) and isinstance(tokens, int):
            made = PartingPlace(token, cause, ADVICE.get(cause, ""))
            one = found.setdefault((token, cause), made)
            one.requests, one.tokens, one.example = one.requests + 1, one.tokens + tokens, name
    return sorted(found.values(), key=lambda one: -one.tokens)[:MOST]


def with_cause(
    miss: Mapping[str, object], ids: Sequence[int], decode: Callable[[tuple[int, ...]], str]
) -> Mapping[str, object]:
    """``miss`` of the prompt ``ids`` with the cause that the text at its place looks like, if it
    left a known prompt there and has no other one."""
    token = miss.get("token")
    if not isinstance(token, int) or "cause" in miss:
        return miss
    cause = _cause_at(token, ids, decode)
    return {**miss, "cause": cause} if cause else miss


def _cause_at(token: int, ids: Sequence[int], decode: Callable[[tuple[int, ...]], str]) -> str:
    before = decode(tuple(ids[max(0, token - BEFORE) : token]))
    text = before + decode(tuple(ids[token : token + BEHIND]))
    place = len(before)
    for cause, looks in _LOOKS.items():
        if cause == "template" and token >= _HEAD:
            continue
        spans = (found.span() for found in looks.finditer(text))
        if any(begin <= place < end for begin, end in spans):
            return cause
    return "tools" if _TOOLS.search(text) else ""
