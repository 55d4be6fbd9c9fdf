"""Documents with scattered facts, questions about them, and the prompts that ask a model.

Everything follows from a ``random.Random``, of which only ``random()`` is used.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from kvrecall.errors import ConfigError
from kvrecall_lab.bench.needle.words import ADJECTIVES, NOUNS, VALUES, pick, sentences, shuffled

TASKS = ("single", "multikey", "several", "values", "chain", "count")
SEED = 41_000_017
"""Training drew no documents from it."""

_CLUSTER = 4  # keys that share a word
_MOST_VALUES = 4  # of one key
_WORD = re.compile(r"\w+|[^\w\s]")


def approximate_tokens(text: str) -> int:
    """Words and punctuation marks: within a few per cent of recall-tiny's own tokenizer."""
    return len(_WORD.findall(text))


@dataclass(frozen=True, slots=True)
class Fact:
    """``subject``'s code is ``value``, or its owner is ``value``."""

    relation: str
    subject: str
    value: str

    @property
    def text(self) -> str:
        return f"The {self.relation} of {self.subject} is {self.value}."


@dataclass(frozen=True, slots=True)
class Question:
    """``reply`` is what a perfect model says, without a leading space; it is right by the
    ``expected`` strings in it (``is_right``). ``depth``: the place of the facts asked for, the
    mean of them, 0 at the start of the document and 1 at its end."""

    task: str
    text: str
    reply: str
    expected: tuple[str, ...]
    facts: tuple[Fact, ...]
    depth: float = 0.0


@dataclass(frozen=True, slots=True)
class Document:
    text: str
    questions: tuple[Question, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """The number of facts of each kind in a document; each kind has its own questions.

    singles: keys that share no word with each other. multikeys: keys in clusters of four that all
    share the adjective or the noun. groups: keys with 2 to 4 codes. chains: an owner fact and the
    owner's code. ``several`` questions name two or three of the single keys.
    """

    singles: int = 4
    multikeys: int = 0
    groups: int = 0
    chains: int = 0
    several: int = 0


class _Keys:
    """Draws distinct keys."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._adjectives = shuffled(rng, ADJECTIVES)
        self._nouns = shuffled(rng, NOUNS)
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
        """``size`` keys with one word in common."""
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


def _asked(task: str, text: str, facts: Sequence[Fact], *more: str) -> Question:
    """A question whose reply states these facts, and ``more``."""
    reply = " ".join([*(fact.text for fact in facts), *more])
    return Question(task, text, reply, tuple(fact.value for fact in facts), tuple(facts))


def _draw(rng: random.Random, plan: Plan) -> tuple[list[Fact], list[Question]]:
    """The facts of a document and the questions about them."""
    keys = _Keys(rng)
    numbers = shuffled(rng, VALUES)
    facts: list[Fact] = []
    asked: list[Question] = []

    def code(subject: str) -> Fact:
        facts.append(Fact("code", subject, pick(rng, numbers)))
        return facts[-1]

    def ask_code(task: str, fact: Fact) -> None:
        asked.append(_asked(task, f"What is the code of {fact.subject}?", [fact]))

    singles = [code(keys.apart()) for _ in range(plan.singles)]
    for fact in singles:
        ask_code("single", fact)
    for start in range(0, plan.multikeys, _CLUSTER):
        for key in keys.cluster(min(_CLUSTER, plan.multikeys - start)):
            ask_code("multikey", code(key))
    for _ in range(plan.several if len(singles) > 1 else 0):
        some = shuffled(rng, singles)[: 2 + int(rng.random() * 2)]
        *first, last = (fact.subject for fact in some)
        text = f"What are the codes of {', '.join(first)} and {last}?"
        asked.append(_asked("several", text, some))
    for _ in range(plan.groups):
        subject, size = keys.anywhere(), 2 + int(rng.random() * (_MOST_VALUES - 1))
        group = [Fact("code", subject, value) for value in shuffled(rng, numbers)[:size]]
        facts += group
        listed, total = shuffled(rng, group), str(size)
        end = f"The code of {subject} is nothing else."  # in the place of a further value
        asked.append(_asked("values", f"What are all the codes of {subject}?", listed, end))
        makes = f"That makes {total}."
        counted = _asked("count", f"How many codes has {subject}?", listed, end, makes)
        asked.append(replace(counted, expected=(f"makes {total}.",)))
    for _ in range(plan.chains):
        held, holder = keys.anywhere(), keys.anywhere()
        facts.append(Fact("owner", held, holder))
        owner, told = facts[-1], code(holder)
        text = f"What is the code of the owner of {held}?"
        asked.append(replace(_asked("chain", text, [owner, told]), expected=(told.value,)))
    return facts, asked


def make_document(
    rng: random.Random, plan: Plan, length: int, measure: Callable[[str], int] = approximate_tokens
) -> Document:
    """A document of about ``length`` tokens as ``measure`` counts them, and its questions in random
    order. The facts are at uniformly random places between sentences of filler."""
    facts, asked = _draw(rng, plan)
    filler = sentences(rng)
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
    questions = tuple(
        replace(one, depth=sum(places[fact] for fact in one.facts) / len(one.facts) / max(size, 1))
        for one in shuffled(rng, asked)
    )
    return Document(" ".join(text for _, text, _ in lines), questions)


# -- a dataset -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Dataset:
    """At every length, ``samples`` questions of every task, all drawn from ``seed``."""

    lengths: tuple[int, ...]
    tasks: tuple[str, ...] = TASKS
    samples: int = 16
    seed: int = SEED

    def __post_init__(self) -> None:
        for task in self.tasks:
            if task not in TASKS:
                raise ConfigError(f"--tasks: {task!r} is not one of {', '.join(TASKS)}")
        if not self.lengths or min(self.lengths) < 512:
            raise ConfigError("--lengths: name lengths of at least 512 tokens, such as 4K,16K")

    def at(self, length: int, reserve: int, measure: Callable[[str], int]) -> Iterator[Document]:
        """The documents of one length, prompt and reply included, with the questions to ask.
        ``reserve``: tokens left for question and reply; ``measure``: tokens of a text, roughly."""
        each = min(max(1, min(8, length // 256)), self.samples)  # questions a task and document

        def wanted(*names: str) -> int:  # some facts of other tasks, as distractors
            return each if set(names) & set(self.tasks) else max(1, each // 4)

        plan = Plan(
            singles=max(2, wanted("single", "several")),
            multikeys=max(2, wanted("multikey")),
            groups=wanted("values", "count"),
            chains=wanted("chain"),
            several=wanted("several"),
        )
        left = dict.fromkeys(self.tasks, self.samples)
        for number in range(math.ceil(self.samples / each)):
            rng = random.Random(f"{self.seed}/{length}/{number}")
            document = make_document(rng, plan, length - reserve, measure)
            asked = []
            for question in document.questions:
                if left.get(question.task, 0):
                    left[question.task] -= 1
                    asked.append(question)
            yield replace(document, questions=tuple(asked))


# -- prompts ---------------------------------------------------------------------------------


class PromptStyle(Enum):
    """``RECALL``: the completions that ``models/recall-tiny`` was trained on. ``INSTRUCT``: plain
    language for any instruction-tuned model, asked as a chat."""

    RECALL = "recall"
    INSTRUCT = "instruct"

    @property
    def reserve(self) -> int:
        """Tokens of a prompt and its reply besides the document, with a margin."""
        return 136 if self is PromptStyle.RECALL else 640


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
_NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def raw_prompt(document: str, question: str) -> str:
    """The prompt of a plain completion; the reply follows after one space."""
    return f"{document}\n\nQuestion: {question}\nAnswer:"


def request_of(
    style: PromptStyle, document: Document, question: Question
) -> tuple[str, dict[str, object]]:
    """Route and body that ask an OpenAI-compatible server; all questions of a document share a long
    prefix."""
    if style is PromptStyle.RECALL:
        prompt = raw_prompt(document.text, question.text)
        return "/completions", {"prompt": prompt, "stop": ["\n"], "max_tokens": 72}
    full = f"{question.text} {_HINTS.get(question.task, '')}".strip()
    text = f"{_INSTRUCTION}\n\n{document.text}\n\nQuestion: {full}"
    messages = [{"role": "user", "content": text}]
    return "/chat/completions", {"messages": messages, "max_tokens": 256}


def is_right(style: PromptStyle, question: Question, reply: str) -> bool:
    """Whether a reply names exactly the expected numbers, in their order for ``several``; for a
    chain, and for one code in a completion, the last number is the answer. Of a completion only the
    first line counts."""
    expected, task, recall = list(question.expected), question.task, style is PromptStyle.RECALL
    if recall:
        reply = reply.strip().split("\n")[0]
    else:
        reply = re.sub(r".*</think>", "", reply, flags=re.DOTALL)
    if task == "count":
        return expected[0] in reply if recall else _count_in(reply) == _count_in(expected[0])
    values = re.findall(r"\d+" if recall else r"(?<!\d)\d{3}(?!\d)", reply)
    if task == "several":
        return values == expected
    if task == "chain" or (recall and task != "values"):
        return values[-1:] == expected
    return sorted(values if recall else set(values)) == sorted(expected)


def _count_in(text: str) -> int | None:
    """The last number below 100 in the text, in digits or, up to nine, as a word."""
    found = re.findall(rf"(?<!\d)\d{{1,2}}(?!\d)|\b(?:{'|'.join(_NUMBERS)})\b", text.lower())
    if not found:
        return None
    return _NUMBERS.index(found[-1]) if found[-1] in _NUMBERS else int(found[-1])
