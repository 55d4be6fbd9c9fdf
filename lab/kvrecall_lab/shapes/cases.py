"""What is asked of the engines of a shape."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvrecall.errors import EngineError
from kvrecall_lab.engines.engine import Admission, Answer, EngineProcess, Question
from kvrecall_lab.shapes.shapes import Shape

_ANSWER = 16
_LONG_ANSWER = 320  # requests that begin together outgrow the device
_LETTERS = 250  # tokens that the models have one letter each for
_ANSWER_S = 300.0


@dataclass(frozen=True, slots=True)
class Case:
    """Requests of one kind, asked together. ``saved``: prompts that the pool is filled with;
    ``asked``: what is asked for then."""

    name: str
    saved: tuple[Question, ...]
    asked: tuple[Question, ...]


def cases_of(shape: Shape, tier: str) -> list[Case]:
    """The requests of a shape: prompts that end on a boundary of hits and beside it. A tier has
    continuations of its own: those of another are in the pool by then."""
    unit, whole = _sizes(shape)
    hits = on_and_off(shape, "hit")
    base = _prompt(shape, "chunked", whole + 7)
    tail = _prompt(shape, f"tail {tier}", 2 * shape.chunk + 45)
    drawn = _prompt(shape, "samples", whole + 11)
    short = -(-160 // unit) * unit
    crowd = [_question(f"crowd-{i}", _prompt(shape, f"crowd {i}", short + 5 + i)) for i in range(4)]
    long = tuple(_question(one.id, one.prompt, _LONG_ANSWER) for one in crowd)
    return [
        Case("hit", hits, hits),
        Case("chunked", (_question("base", base),), (_question(f"tail-{tier}", base + tail),)),
        Case("samples", (_question("drawn", drawn),), (_question("drawn-3", drawn, n=3),)),
        Case("preempted", tuple(crowd), long),
    ]


def on_and_off(shape: Shape, seed: str) -> tuple[Question, Question]:
    """Two prompts: one ends on a boundary of hits, the other beside it."""
    _, whole = _sizes(shape)
    on, off = (_prompt(shape, f"{seed} {end}", whole + end) for end in (0, 23))
    return _question("on", on), _question("off", off)


def _sizes(shape: Shape) -> tuple[int, int]:
    """Tokens of which prompts are a multiple, and of the usual prompt."""
    unit = shape.boundary
    return unit, max(2, 640 // unit) * unit


def _prompt(shape: Shape, seed: str, tokens: int) -> tuple[int, ...]:
    dice = random.Random(f"{shape.name} {seed}")
    return tuple(dice.randrange(1, _LETTERS) for _ in range(tokens))


def _question(name: str, tokens: tuple[int, ...], answer: int = _ANSWER, n: int = 1) -> Question:
    return Question(name, tokens, answer, samples=n)


def ask(engine: EngineProcess, *questions: Question) -> list[Answer]:
    """Asks all together. Raises EngineError if an answer lacks samples."""
    answers = engine.answers(questions, _ANSWER_S)
    for question, answer in zip(questions, answers, strict=True):
        if question.samples > 1 and len(answer.tokens) <= question.max_tokens:
            raise EngineError(f"{question.id}: not all of {question.samples} samples")
    return answers


def trust(engine: EngineProcess, shape: Shape, question: Question) -> None:
    """Asks until a hit is loaded: an engine compares the first hit on another's blocks with what it
    computes. ``question``: the one that was saved last, as that proves what was written before; it
    would also compare, and so compute, the newest block of a hit written a second later."""
    for _ in range(4):
        ask(engine, question)
        engine.forget_device()
        if loads_of(engine.admissions()):
            return
    raise EngineError(f"{shape.name}: nothing is recalled after a restart")


def loads_of(admissions: Sequence[Admission]) -> list[tuple[int, int]]:
    """Start and end, in tokens, of what was recalled."""
    return [(one.start, one.end) for one in admissions if one.end > one.start]


def rise(name: str, before: Mapping[str, float], after: Mapping[str, float]) -> int:
    """By how much a metric rose."""
    return int(after.get(name, 0) - before.get(name, 0))
