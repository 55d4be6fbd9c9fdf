"""The requests of a run, all drawn from its seed."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvrecall_lab.engines.engine import Question
from kvrecall_lab.engines.host import STATES

BLOCK = 32
LONGEST = 1024
"""Tokens of a block, and of the longest sequence."""

_ABORTED = 0.25  # share of the requests
_TAIL = 60
_ANSWERS = ((2, 16), (2, 16), (40, 120), (40, 120))
_BASES = 6
_SALTS = (None, None, None, None, "tenant-a", "tenant-b")
_PROPERTIES = {
    "kind": {"enum": ["hit", "miss"]},
    "blocks": {"type": "array", "items": {"type": "integer"}, "maxItems": 4},
    "name": {"type": "string", "maxLength": 20},
}
_GRAMMARS: tuple[Mapping[str, Any], ...] = (
    {"regex": "([a-f]{3}-){2,9}[0-9]{4}"},
    {"choice": ["yes, of course", "no, of course not", "yes, and no"]},
    {"json": {"type": "object", "properties": _PROPERTIES, "required": [*_PROPERTIES]}},
)


@dataclass(frozen=True, slots=True)
class Order:
    """A request. ``tells``: with log-probabilities, which are compared, too. ``abort``: in which
    of ``STATES`` it is aborted; empty: in none."""

    question: Question
    tells: bool
    abort: str = ""


def mix(seed: int, count: int, folders: Sequence[Path]) -> list[Order]:
    """``folders``: of adapters."""
    dice = random.Random(f"mix {seed}")
    adapters = [*((one.name, at, str(one)) for at, one in enumerate(folders, 1)), None]
    bases = [_drawn(dice, dice.randrange(6 * BLOCK, LONGEST)) for _ in range(_BASES)]
    orders: list[Order] = []
    while len(orders) < count:
        prompt = _prompt(dice, bases, orders)
        again = dice.choice((1, 1, 1, 1, 1, 2, 3))  # in flight at the same time
        under = [dice.choice(adapters)] * again if dice.random() < 0.85 else adapters
        orders += [_order(dice, f"r{len(orders) + at}", prompt, of) for at, of in enumerate(under)]
    return orders[:count]


def _drawn(dice: random.Random, tokens: int) -> tuple[int, ...]:
    return tuple(dice.choices(range(1, 250), k=tokens))


def _prompt(
    dice: random.Random, bases: Sequence[tuple[int, ...]], before: Sequence[Order]
) -> tuple[int, ...]:
    """Most begin like others: up to a block's end, inside one, or with one token behind it."""
    base = dice.choice(bases)
    whole = base[: dice.randrange(1, len(base) // BLOCK + 1) * BLOCK]
    part, tail = base[: dice.randrange(1, len(base))], _drawn(dice, dice.randint(1, _TAIL))
    known = [dice.choice(before).question.prompt] if before else []
    some = [part + tail, part + tail, part + tail, base + tail, whole + tail[:1], whole, tail[:4]]
    return dice.choice([*some, base + _drawn(dice, LONGEST), *known])[: LONGEST - 1]


def _order(
    dice: random.Random, name: str, prompt: tuple[int, ...], adapter: tuple[str, int, str] | None
) -> Order:
    kind, tells, samples = dice.random(), dice.random() < 0.7, 1
    tokens = dice.choice((1, *(dice.randint(*one) for one in _ANSWERS)))
    sampling: dict[str, Any] = {}
    if kind < 0.2:
        tells, samples = True, dice.randint(2, 3)
        sampling = {"seed": dice.randrange(1 << 30), "ignore_eos": True}
    elif kind < 0.4:
        sampling, tokens = {"structured_outputs": dice.choice(_GRAMMARS)}, dice.randint(4, 70)
    elif kind < 0.5:
        sampling = {"prompt_logprobs": 1}
    question = Question(
        name, prompt, min(tokens, LONGEST - len(prompt)), dice.choice(_SALTS), adapter,
        samples=samples, sampling=sampling, priority=dice.randrange(4),
    )  # fmt: skip
    abort = dice.choice(STATES) if dice.random() < _ABORTED else ""
    return Order(question, tells, abort)
