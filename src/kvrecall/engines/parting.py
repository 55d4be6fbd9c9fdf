"""What it looks like where a prompt leaves a known one, and what its sender can do about it.

Prompts of one application that part early are computed from there on, each time. Three causes are
frequent, and the text at the place tells them: what is new in each request stands at its head, the
same tools stand in another order, and the template of the chat is another one.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

MOST = 10
_A_MINUTE = 256
BEFORE, BEHIND = 48, 12  # tokens around the place that are looked at
_HEAD = 64  # tokens within which a mark of a template is not one of a later turn

_DAY = "(?:Mon|Tue|Tues|Wed|Wednes|Thu|Thurs|Fri|Sat|Satur|Sun)"
_MONTH = r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)(?:\w*ary|ch|il|[ety]|ust|\w+er)?\b"
_NTH = r"\d{1,2}(?:st|nd|rd|th)?"
_TIME = r"\d{1,2}:\d\d(?::\d\d(?:[.,]\d+)?)?(?: ?[AaPp]\.?[Mm]\b)?(?:Z|[+-]\d\d:?\d\d)?"
_LOOKS = {
    "clock": re.compile(
        rf"(?:\b{_DAY}(?:day)?,? )?(?:{_NTH}\.?(?: of)? {_MONTH}|\b{_MONTH} {_NTH}\b)"
        rf"(?:,? \d{{4}})?(?:,?(?: at)? {_TIME})?|\b{_TIME}|\b{_DAY}day\b"
        rf"|\b\d{{4}}[-/.年]\d{{1,2}}[-/.月]\d{{1,2}}日?(?:[T ,]*{_TIME})?|\b20\d{{6}}T\d{{4,}}Z?"
        r"|\b\d{1,2}/\d{1,2}/(?:\d\d)?\d\d\b|\b\d{1,2}\.\d{1,2}\.20\d\d\b"
        r"|\b1[6-9]\d{8}(?:\.\d+|(?:\d{3}){1,3})?\b|(?:星期|周)[一二三四五六日天]"
        r"|\d{1,2}[点时]\d{1,2}分|(?:[上中下]午|早上|晚上|凌晨)\d{1,2}[点时](?:\d{1,2}分)?"
    ),
    "number": re.compile(
        r"\b[0-9A-Fa-f]{8}-[0-9A-Fa-f-]{4,27}|\d{6,}|\b[0-9A-Fa-f]{12,}\b"
        r"|\b(?=[A-Za-z]*\d+[A-Za-z]+\d+[A-Za-z])[0-9A-Za-z]{6,}"
    ),
    "template": re.compile(
        r"(?:<[|｜][^<>]{1,40}[|｜]>|\[/?INST\]|<</?SYS>>|<(?:start|end)_of_turn>)"
        r"(?:system|user|assistant|model|developer|tool)?|(?m:^)Reasoning: \w+"
    ),
}
_TOOLS = re.compile(
    r'"(?:function|parameters|input_?[sS]chema|tools)"\s*:|</?tools?>|# Tools\b|AVAILABLE_TOOLS'
    r"|(?m:^)type \w+ = \(|=> any;|(?m:^)Parameters: \{"
)

ADVICE = {
    "clock": "a date or time is in the way: move it behind what stays the same, or round it",
    "number": "an id or number of this request is in the way: move it behind what stays the same",
    "tools": "it is among the tools: send the same ones, in the same order, with the same keys",
    "template": "it is a mark of the template: give all clients and servers the same chat template "
    "and chat_template_kwargs, and begin with the same roles",
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


class Partings:
    """Where requests of the last hour left known prompts. Of a minute it keeps the places that cost
    most, ``_A_MINUTE`` at most."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._minutes: dict[int, dict[tuple[int, str], PartingPlace]] = {}

    def note(self, name: str, miss: Mapping[str, object]) -> None:
        """A request, its id and its miss."""
        token, cause, tokens = miss.get("token"), str(miss.get("cause", "")), miss["tokens"]
        if isinstance(token, int) and isinstance(tokens, int):
            made = PartingPlace(token, cause, ADVICE.get(cause, ""), 1, tokens, name)
            places = self._of_hour().setdefault(int(self._clock() // 60), {})
            _add(places, made)
            if len(places) > _A_MINUTE:
                del places[min(places, key=lambda place: places[place].tokens)]

    def costliest(self) -> list[PartingPlace]:
        """The ``MOST`` places that cost most tokens."""
        found: dict[tuple[int, str], PartingPlace] = {}
        for _, places in sorted(self._of_hour().items()):
            for one in places.values():
                _add(found, replace(one))
        return sorted(found.values(), key=lambda one: -one.tokens)[:MOST]

    def _of_hour(self) -> dict[int, dict[tuple[int, str], PartingPlace]]:
        last = int(self._clock() // 60) - 60
        self._minutes = {at: places for at, places in self._minutes.items() if at > last}
        return self._minutes


def _add(places: dict[tuple[int, str], PartingPlace], new: PartingPlace) -> None:
    one = places.setdefault((new.token, new.cause), new)
    if one is not new:
        one.requests, one.tokens = one.requests + new.requests, one.tokens + new.tokens
        one.example = new.example


def with_cause(
    miss: Mapping[str, object], ids: Sequence[int], decode: Callable[[tuple[int, ...]], str]
) -> Mapping[str, object]:
    """``miss`` of the prompt ``ids`` with the cause that the text at its place looks like, if it
    left a known prompt there and has no other one."""
    token = miss.get("token")
    if not isinstance(token, int) or "cause" in miss:
        return miss
    window, at = ids[max(0, token - BEFORE) : token + BEHIND], min(token, BEFORE)
    text, before, through = (decode(tuple(window[:end])) for end in (None, at, at + 1))
    first = through[len(before) :].lstrip()  # tokens begin with the space before a word
    place = len(through) - len(first)
    end = place + max(1, len(first.rstrip()))
    for cause, looks in _LOOKS.items():
        if cause == "template" and token >= _HEAD:
            continue
        spans = (found.span() for found in looks.finditer(text))
        if any(begin < end and place < behind for begin, behind in spans):
            return {**miss, "cause": cause}
    return {**miss, "cause": "tools"} if _TOOLS.search(text) else miss
