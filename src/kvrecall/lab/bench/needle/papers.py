"""Which documents are made, and which questions about them are asked."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvrecall.errors import ConfigError
from kvrecall.lab.bench.needle.tasks import TASKS, Document, Plan, Question, make_document

SEED = 41_000_017
"""Neither training nor ``bench.model.evaluate`` draws documents from it."""


@dataclass(frozen=True, slots=True)
class Paper:
    """A document of about ``length`` tokens, prompt and reply included, and questions about it."""

    length: int
    document: Document
    questions: tuple[Question, ...]


@dataclass(frozen=True, slots=True)
class Syllabus:
    """What is asked: at every length, every task ``samples`` times, all of it from ``seed``.

    ``most_documents``: documents a length; None for as many as it takes at eight questions a task.
    """

    lengths: tuple[int, ...]
    tasks: tuple[str, ...] = TASKS
    samples: int = 16
    most_documents: int | None = None
    seed: int = SEED

    def __post_init__(self) -> None:
        for task in self.tasks:
            if task not in TASKS:
                raise ConfigError(f"--tasks: {task!r} is not one of {', '.join(TASKS)}")
        if not self.lengths or min(self.lengths) < 512:
            raise ConfigError("--lengths: name lengths of at least 512 tokens, such as 4K,16K")

    def questions_each(self, length: int) -> int:
        """Questions a task and document; as many more as ``most_documents`` asks for."""
        fits = max(1, min(8, length // 256))
        if self.most_documents is None:
            return min(fits, self.samples)
        return min(self.samples, max(fits, math.ceil(self.samples / self.most_documents)))

    def documents(self, length: int) -> int:
        """Documents made for a length."""
        return math.ceil(self.samples / self.questions_each(length))

    @property
    def questions(self) -> int:
        """Questions at all lengths."""
        return len(self.lengths) * len(self.tasks) * self.samples


def papers(
    syllabus: Syllabus, length: int, room: int, measure: Callable[[str], int]
) -> Iterator[Paper]:
    """The documents of one length. ``room``: tokens left for question and reply; ``measure``:
    tokens of a text, roughly."""
    each = syllabus.questions_each(length)
    left = dict.fromkeys(syllabus.tasks, syllabus.samples)
    for number in range(syllabus.documents(length)):
        rng = random.Random(f"{syllabus.seed}/{length}/{number}")
        document = make_document(rng, _plan(syllabus.tasks, each), length - room, measure=measure)
        questions = []
        for question in document.questions:
            if left.get(question.task, 0):
                left[question.task] -= 1
                questions.append(question)
        yield Paper(length, document, tuple(questions))


def _plan(tasks: Sequence[str], each: int) -> Plan:
    """``each`` questions of every task asked for; at least some of the other facts, to mislead."""

    def wanted(*names: str) -> int:
        return each if set(names) & set(tasks) else max(1, each // 4)

    return Plan(
        singles=max(2, wanted("single", "several")),
        multikeys=max(2, wanted("multikey")),
        groups=wanted("values", "count"),
        chains=wanted("chain"),
        several=wanted("several"),
    )
