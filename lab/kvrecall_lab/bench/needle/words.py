"""The words of facts, and ordinary sentences that contain none of them. Standard library only.

A key is an adjective and a noun ("amber falcon"), a value a number of three digits. The tokenizer
is trained so that every one of these words, with the space before it, is one token. Filler comes
from a small grammar with a few hundred other words: enough variety that sentences seldom repeat,
and no number of three digits.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

_WORDS: dict[str, list[str]] = json.loads(Path(__file__).with_suffix(".json").read_text())

ADJECTIVES, NOUNS = (tuple(_WORDS[kind]) for kind in ("adjectives", "nouns"))
VALUES = tuple(str(n) for n in range(100, 1000))

_PEOPLE, _PLACES, _THINGS = (_WORDS[kind] for kind in ("people", "places", "things"))
_ACTIONS, _TIMES, _STATES = (_WORDS[kind] for kind in ("actions", "times", "states"))
_OPENERS, _REASONS = _WORDS["openers"], _WORDS["reasons"]


def pick(rng: random.Random, items: Sequence[T]) -> T:
    """One item, using nothing of `rng` but `random()`, whose sequence Python guarantees."""
    return items[int(rng.random() * len(items))]


def shuffled(rng: random.Random, items: Sequence[T]) -> list[T]:
    """The items in random order; see `pick` for why not `rng.shuffle`."""
    out = list(items)
    for i in range(len(out) - 1, 0, -1):
        j = int(rng.random() * (i + 1))
        out[i], out[j] = out[j], out[i]
    return out


def sentences(rng: random.Random) -> Iterator[str]:
    """Filler without end: capitalised, with full stops."""
    while True:
        match int(rng.random() * 5):
            case 0:
                text = f"{pick(rng, _PLACES)} {pick(rng, _STATES)} {pick(rng, _TIMES)}"
            case 1:
                text = f"{pick(rng, _PEOPLE)} {pick(rng, _ACTIONS)} {pick(rng, _THINGS)}"
                text += f" {pick(rng, _TIMES)}"
            case 2:
                text = f"{pick(rng, _PEOPLE)} {pick(rng, _ACTIONS)} {pick(rng, _THINGS)}"
                text += f" near {pick(rng, _PLACES)} {pick(rng, _REASONS)}"
            case 3:
                text = f"{pick(rng, _OPENERS)}, {pick(rng, _PLACES)} {pick(rng, _STATES)}"
            case _:
                text = f"{pick(rng, _OPENERS)}, {pick(rng, _PEOPLE)} went to {pick(rng, _PLACES)}"
                text += f" and {pick(rng, _ACTIONS)} {pick(rng, _THINGS)}"
        yield text[0].upper() + text[1:] + "."
