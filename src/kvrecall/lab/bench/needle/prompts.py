"""How a question is put to a model, and what counts as a right reply, in two manners.

``RECALL``: the completions that ``models/recall-tiny`` was trained on. ``INSTRUCT``: plain language
for any instruction-tuned model, asked as a chat.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from kvrecall.lab.bench.needle.tasks import Document, Question, is_right, raw_prompt


class Manner(Enum):
    """How to ask."""

    RECALL = "recall"
    INSTRUCT = "instruct"


@dataclass(frozen=True, slots=True)
class Request:
    """One request to an OpenAI-compatible server: its route and what goes into its body."""

    path: str
    body: Mapping[str, object]


MOST_TOKENS: Mapping[Manner, int] = {Manner.RECALL: 72, Manner.INSTRUCT: 256}
"""Tokens a reply may have."""

ROOM: Mapping[Manner, int] = {Manner.RECALL: 136, Manner.INSTRUCT: 640}
"""Tokens of a prompt and its reply beside the document, with some to spare."""

_INSTRUCTION = (
    "Read the text below. In some places it says what the code or the owner of something is. "
    "One thing may have several codes, said in different places. Then answer the question from "
    "the text alone, with one short sentence for each code, of the form "
    '"The code of NAME is NUMBER.", and nothing else.'
)
_HINTS: Mapping[str, str] = {
    "several": "Keep the order of the question.",
    "values": "Name every one of its codes.",
    "count": 'Name every one of its codes, then say how many there are: "That makes COUNT."',
    "chain": "First say who the owner is, then give the owner's code.",
}
_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def request_of(manner: Manner, document: Document, question: Question) -> Request:
    """The request that asks ``question``; all questions of a document share a long prefix."""
    limits: dict[str, object] = {"temperature": 0, "max_tokens": MOST_TOKENS[manner]}
    if manner is Manner.RECALL:
        prompt = raw_prompt(document.text, question.text)
        return Request("/completions", {"prompt": prompt, "stop": ["\n"], **limits})
    asked = f"{question.text} {_HINTS.get(question.task, '')}".strip()
    text = f"{_INSTRUCTION}\n\n{document.text}\n\nQuestion: {asked}"
    return Request("/chat/completions", {"messages": [{"role": "user", "content": text}], **limits})


def is_answered(manner: Manner, question: Question, reply: str) -> bool:
    """Whether the reply is right."""
    if manner is Manner.RECALL:
        return is_right(question, reply)
    reply = re.sub(r".*</think>", "", reply, flags=re.DOTALL)
    if question.task == "count":
        return _count_in(reply) == _count_in(question.expected[0])
    values = re.findall(r"(?<!\d)\d{3}(?!\d)", reply)
    if question.task == "chain":
        return values[-1:] == list(question.expected)
    if question.task == "several":
        return values == list(question.expected)
    return set(values) == set(question.expected)


def _count_in(text: str) -> int | None:
    """The last number below 100 that the text names, as digits or, up to nine, as a word."""
    found = re.findall(rf"(?<!\d)\d{{1,2}}(?!\d)|\b(?:{'|'.join(_WORDS)})\b", text.lower())
    if not found:
        return None
    return _WORDS.index(found[-1]) if found[-1] in _WORDS else int(found[-1])
