"""The dataset: its documents, the questions about them, and the prompts for a model."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

from kvrecall.errors import ConfigError
from kvrecall_lab.bench.needle.tasks import (
    TASKS,
    Document,
    Plan,
    Question,
    is_right,
    make_document,
    raw_prompt,
)

SEED = 41_000_017
"""Training draws no documents from it."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A document of about ``length`` tokens, prompt and reply included, and questions about it."""

    length: int
    document: Document
    questions: tuple[Question, ...]


@dataclass(frozen=True, slots=True)
class Dataset:
    """The questions: at every length, ``samples`` of every task, all drawn from ``seed``."""

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

    @property
    def question_count(self) -> int:
        """Questions at all lengths."""
        return len(self.lengths) * len(self.tasks) * self.samples

    def questions_each(self, length: int) -> int:
        """Questions per task and document."""
        return min(max(1, min(8, length // 256)), self.samples)

    def document_count(self, length: int) -> int:
        """Documents per length."""
        return math.ceil(self.samples / self.questions_each(length))

    def at(self, length: int, reserve: int, measure: Callable[[str], int]) -> Iterator[Sample]:
        """The documents of one length. ``reserve``: tokens left for question and reply;
        ``measure``: tokens of a text, roughly."""
        each = self.questions_each(length)

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
        for number in range(self.document_count(length)):
            rng = random.Random(f"{self.seed}/{length}/{number}")
            document = make_document(rng, plan, length - reserve, measure=measure)
            questions = []
            for question in document.questions:
                if left.get(question.task, 0):
                    left[question.task] -= 1
                    questions.append(question)
            yield Sample(length, document, tuple(questions))


# -- prompts --------------------------------------------------------------------------------


class PromptStyle(Enum):
    """``RECALL``: the completions that ``models/recall-tiny`` was trained on. ``INSTRUCT``: plain
    language for any instruction-tuned model, asked as a chat."""

    RECALL = "recall"
    INSTRUCT = "instruct"

    @property
    def most_tokens(self) -> int:
        """Maximum tokens of a reply."""
        return 72 if self is PromptStyle.RECALL else 256

    @property
    def reserve(self) -> int:
        """Tokens of a prompt and its reply besides the document, with a margin."""
        return 136 if self is PromptStyle.RECALL else 640


@dataclass(frozen=True, slots=True)
class Request:
    """A request to an OpenAI-compatible server: its route and fields of its body."""

    path: str
    body: Mapping[str, object]


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


def request_of(style: PromptStyle, document: Document, question: Question) -> Request:
    """The request that asks ``question``; all questions of a document share a long prefix."""
    limits: dict[str, object] = {"temperature": 0, "max_tokens": style.most_tokens}
    if style is PromptStyle.RECALL:
        prompt = raw_prompt(document.text, question.text)
        return Request("/completions", {"prompt": prompt, "stop": ["\n"], **limits})
    full = f"{question.text} {_HINTS.get(question.task, '')}".strip()
    text = f"{_INSTRUCTION}\n\n{document.text}\n\nQuestion: {full}"
    return Request("/chat/completions", {"messages": [{"role": "user", "content": text}], **limits})


def is_answered(style: PromptStyle, question: Question, reply: str) -> bool:
    """Whether the reply is right."""
    if style is PromptStyle.RECALL:
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
    """The last number below 100 in the text, in digits or, up to nine, as a word."""
    found = re.findall(rf"(?<!\d)\d{{1,2}}(?!\d)|\b(?:{'|'.join(_NUMBERS)})\b", text.lower())
    if not found:
        return None
    return _NUMBERS.index(found[-1]) if found[-1] in _NUMBERS else int(found[-1])
