"""Documents with scattered facts, and questions about them. Standard library only.

The text interface of the needle benchmark: `make_document` returns a document and questions,
each with the prompt text, the reply of a perfect model, the strings by which a reply is
scored and the depth of the fact. Everything follows from the `random.Random` argument, of
which only `random()` is used, so that a seed gives the same text on every machine.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvrecall_lab.bench.needle.words import (
    ADJECTIVES,
    ALL,
    NOUNS,
    VALUES,
    Alphabet,
    pick,
    sentences,
    shuffled,
)

TASKS: tuple[str, ...] = ("single", "multikey", "several", "values", "chain", "count")

_WORD = re.compile(r"\w+|[^\w\s]")


def approximate_tokens(text: str) -> int:
    """Words and punctuation marks: within a few per cent of recall-tiny's own tokenizer."""
    return len(_WORD.findall(text))


@dataclass(frozen=True, slots=True)
class Fact:
    """`subject`'s code is `value`, or its owner is `value`."""

    relation: str
    subject: str
    value: str

    @property
    def text(self) -> str:
        return f"The {self.relation} of {self.subject} is {self.value}."


@dataclass(frozen=True, slots=True)
class Question:
    """One question about a document.

    `reply` is what a perfect model says, without a leading space. A reply is right when it
    holds the `expected` strings (see `is_right`); if `unordered`, the sentences of the
    reply may come in any order. `depth` is the place of the facts asked for, the mean of
    them, 0 at the start of the document and 1 at its end.
    """

    task: str
    text: str
    reply: str
    expected: tuple[str, ...]
    depth: float
    unordered: bool = False


@dataclass(frozen=True, slots=True)
class Document:
    """A text with facts in it, and questions about them."""

    text: str
    questions: tuple[Question, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """The number of facts of each kind in a document; each kind has its own questions.

    singles: keys that share no word with each other. multikeys: keys in clusters of
    `cluster` that all share the adjective or the noun. groups: keys with 2 to `most_values`
    codes. chains: an owner fact and the owner's code. There are questions about all;
    `several` questions name two or three of the single keys.
    """

    singles: int = 4
    multikeys: int = 0
    cluster: int = 4
    groups: int = 0
    most_values: int = 4
    chains: int = 0
    several: int = 0
    alphabet: Alphabet = ALL


class _Keys:
    """Draws distinct keys."""

    def __init__(self, rng: random.Random, alphabet: Alphabet) -> None:
        self._rng = rng
        self._adjectives = shuffled(rng, ADJECTIVES[: alphabet.adjectives])
        self._nouns = shuffled(rng, NOUNS[: alphabet.nouns])
        self._used: set[str] = set()
        self._next = 0

    def apart(self) -> str:
        """A key that shares no word with the earlier ones, if one is left."""
        n, self._next = self._next, self._next + 1
        key = f"{self._adjectives[n % len(self._adjectives)]} {self._nouns[n % len(self._nouns)]}"
        return self._take(key)

    def anywhere(self) -> str:
        return self._take(f"{pick(self._rng, self._adjectives)} {pick(self._rng, self._nouns)}")

    def cluster(self, size: int) -> list[str]:
        """`size` keys with one word in common."""
        adjective, noun = pick(self._rng, self._adjectives), pick(self._rng, self._nouns)
        if self._rng.random() < 0.5:
            keys = [f"{adjective} {n}" for n in shuffled(self._rng, self._nouns)[:size]]
        else:
            keys = [f"{a} {noun}" for a in shuffled(self._rng, self._adjectives)[:size]]
        return [self._take(key) for key in keys]

    def _take(self, key: str) -> str:
        while key in self._used:
            key = f"{pick(self._rng, self._adjectives)} {pick(self._rng, self._nouns)}"
        self._used.add(key)
        return key


@dataclass(frozen=True, slots=True)
class _Draft:
    """A question before the places of its facts are known."""

    task: str
    text: str
    reply: tuple[str, ...]
    expected: tuple[str, ...]
    facts: tuple[Fact, ...]
    unordered: bool = False


def _ask_code(task: str, fact: Fact) -> _Draft:
    text = f"What is the code of {fact.subject}?"
    return _Draft(task, text, (fact.text,), (fact.value,), (fact,))


def _ask_several(facts: Sequence[Fact]) -> _Draft:
    keys = [fact.subject for fact in facts]
    text = f"What are the codes of {', '.join(keys[:-1])} and {keys[-1]}?"
    values = tuple(fact.value for fact in facts)
    return _Draft("several", text, tuple(f.text for f in facts), values, tuple(facts))


def _ask_group(rng: random.Random, facts: Sequence[Fact]) -> list[_Draft]:
    """The reply marks the end of the list in the place of a further value."""
    listed = shuffled(rng, facts)
    subject, total = facts[0].subject, str(len(facts))
    lines = (*(f.text for f in listed), f"The code of {subject} is nothing else.")
    values = tuple(f.value for f in listed)
    counted = (*lines, f"That makes {total}.")
    facts = tuple(listed)
    return [
        _Draft("values", f"What are all the codes of {subject}?", lines, values, facts, True),
        _Draft(
            "count", f"How many codes has {subject}?", counted, (f"makes {total}.",), facts, True
        ),
    ]


def _ask_chain(owner: Fact, code: Fact) -> _Draft:
    text = f"What is the code of the owner of {owner.subject}?"
    return _Draft("chain", text, (owner.text, code.text), (code.value,), (owner, code))


def _draw(rng: random.Random, plan: Plan) -> tuple[list[Fact], list[_Draft]]:
    """The facts of a document and the questions about them."""
    keys = _Keys(rng, plan.alphabet)
    numbers = shuffled(rng, VALUES[:: len(VALUES) // plan.alphabet.values])
    facts: list[Fact] = []
    drafts: list[_Draft] = []

    def code(subject: str) -> Fact:
        facts.append(Fact("code", subject, pick(rng, numbers)))
        return facts[-1]

    singles = [code(keys.apart()) for _ in range(plan.singles)]
    drafts += [_ask_code("single", fact) for fact in singles]
    for start in range(0, plan.multikeys, plan.cluster):
        near = keys.cluster(min(plan.cluster, plan.multikeys - start))
        drafts += [_ask_code("multikey", code(key)) for key in near]
    for _ in range(plan.several if len(singles) > 1 else 0):
        drafts.append(_ask_several(shuffled(rng, singles)[: 2 + int(rng.random() * 2)]))
    for _ in range(plan.groups):
        subject, size = keys.anywhere(), 2 + int(rng.random() * (plan.most_values - 1))
        values = shuffled(rng, numbers)[:size]
        group = [Fact("code", subject, value) for value in values]
        facts += group
        drafts += _ask_group(rng, group)
    for _ in range(plan.chains):
        held, holder = keys.anywhere(), keys.anywhere()
        facts.append(Fact("owner", held, holder))
        drafts.append(_ask_chain(facts[-1], code(holder)))
    return facts, drafts


def make_document(
    rng: random.Random,
    plan: Plan,
    length: int,
    *,
    filler: Iterator[str] | None = None,
    measure: Callable[[str], int] = approximate_tokens,
) -> Document:
    """A document of about `length` tokens as `measure` counts them, and its questions.

    The facts are at uniformly random places between sentences of `filler` (default: the
    grammar of `words.py`); the questions come in random order.
    """
    facts, drafts = _draw(rng, plan)
    filler = filler or sentences(rng)
    lines: list[tuple[float, str, Fact | None]] = [(rng.random(), f.text, f) for f in facts]
    room = length - sum(measure(text) for _, text, _ in lines)
    while room > 0:
        line = next(filler)
        room -= measure(line)
        lines.append((rng.random(), line, None))
    lines.sort(key=lambda entry: entry[0])
    places: dict[Fact, int] = {}
    size = 0
    for _, text, fact in lines:
        if fact is not None:
            places[fact] = size
        size += len(text) + 1
    questions = tuple(_place(draft, places, size) for draft in shuffled(rng, drafts))
    return Document(" ".join(text for _, text, _ in lines), questions)


def _place(draft: _Draft, places: dict[Fact, int], size: int) -> Question:
    depth = sum(places[fact] for fact in draft.facts) / len(draft.facts) / max(size, 1)
    reply = " ".join(draft.reply)
    return Question(draft.task, draft.text, reply, draft.expected, depth, draft.unordered)


def raw_prompt(document: str, question: str) -> str:
    """The prompt of a plain completion; the reply follows after one space."""
    return f"{document}\n\nQuestion: {question}\nAnswer:"


def is_right(question: Question, reply: str) -> bool:
    """Whether the first line of `reply` contains the expected answer.

    The value asked for must be among the numbers that the reply names; for `values` the
    numbers must be exactly the expected ones, for a chain the last number is the answer.
    """
    line = reply.strip().split("\n")[0]
    numbers = re.findall(r"\d+", line)
    if question.task == "count":
        return question.expected[0] in line
    if question.task in ("single", "multikey", "chain"):
        return numbers[-1:] == list(question.expected)
    if question.task == "several":
        return numbers == list(question.expected)
    return sorted(numbers) == sorted(question.expected)
