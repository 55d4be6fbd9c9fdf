"""Ordinary sentences that carry no fact. Standard library only, same text on every machine.

A small grammar with a few hundred words: enough variety that sentences seldom repeat, no
word of the key alphabets, no number of three digits.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")

PEOPLE = """the teacher|the baker|a farmer|my neighbour|the doctor|her brother|his aunt|the
postman|an engineer|the librarian|our guide|the gardener|a student|the captain|the painter|
their cousin|the shopkeeper|a traveller|the mayor|the carpenter|the old man|a young woman|the
children|two friends|the driver|the cook|a visitor|the judge|the writer|the musician"""
PLACES = """the village|the market|the station|the river|the library|the old mill|the school|
the kitchen|the garden|the bridge|the town hall|the beach|the forest|the hotel|the museum|the
workshop|the church|the main road|the valley|the lake|the office|the theatre|the park|the
hospital|the north field|the corner shop|the hill|the square|the bakery|the upper floor"""
THINGS = """a letter|some bread|the newspaper|a coat stand|the accounts|a map|two chairs|
the keys|a wooden box|fresh vegetables|an old photograph|the engine|a bicycle|the timetable|
a pot of tea|the report|a blanket|several books|the wall clock|a bottle of milk|the fence|
a bag of flour|the radio|some tools|a new coat|the broken window|a long rope|the weekly list|
the garden gate|a piece of cloth"""
ACTIONS = """carried|forgot|found|repaired|sold|bought|looked for|described|borrowed|measured|
left|brought|cleaned|showed|painted|noticed|packed|ordered|paid for|moved|asked about|kept|
lost|returned|checked|counted|drew|wrapped|collected|promised"""
TIMES = """in the morning|last week|before lunch|after the rain|every Monday|on Sunday|at
noon|late in the evening|during the winter|in early spring|the day before|some years ago|
that afternoon|once a month|at the end of summer|all night|for an hour|as usual|without
hurry|in the meantime"""
REASONS = """because the weather was changing|although nobody had asked|while the others were
waiting|since the train was late|as the light was fading|when the work was done|because it
had rained for days|though it was not far|until the shops closed|while the soup boiled over|
since there was plenty of time|as everyone expected|before anyone could answer|because the
road was closed|although the price had gone up|when the bells rang"""
STATES = """was quiet|was full of people|looked different|seemed smaller than before|was closed
for repairs|smelled of soap|had been painted again|was covered with snow|stood empty|was
open until late|needed a new roof|was warm and bright|felt colder than usual|was known for
its view|had changed very little|was busy"""
OPENERS = """In general|Of course|As a rule|By then|After a while|For that reason|Even so|
Now and then|At first|In the end|Meanwhile|On the whole|Besides|Later on|To be fair|Strangely"""


def _split(table: str) -> tuple[str, ...]:
    return tuple(" ".join(entry.split()) for entry in table.split("|"))


_PEOPLE, _PLACES, _THINGS = _split(PEOPLE), _split(PLACES), _split(THINGS)
_ACTIONS, _TIMES, _REASONS = _split(ACTIONS), _split(TIMES), _split(REASONS)
_STATES, _OPENERS = _split(STATES), _split(OPENERS)


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


def sentence(rng: random.Random) -> str:
    """One filler sentence, capitalised, with its full stop."""
    form = int(rng.random() * 5)
    if form == 0:
        text = f"{pick(rng, _PLACES)} {pick(rng, _STATES)} {pick(rng, _TIMES)}"
    elif form == 1:
        text = f"{pick(rng, _PEOPLE)} {pick(rng, _ACTIONS)} {pick(rng, _THINGS)}"
        text += f" {pick(rng, _TIMES)}"
    elif form == 2:
        text = f"{pick(rng, _PEOPLE)} {pick(rng, _ACTIONS)} {pick(rng, _THINGS)}"
        text += f" near {pick(rng, _PLACES)} {pick(rng, _REASONS)}"
    elif form == 3:
        text = f"{pick(rng, _OPENERS)}, {pick(rng, _PLACES)} {pick(rng, _STATES)}"
    else:
        text = f"{pick(rng, _OPENERS)}, {pick(rng, _PEOPLE)} went to {pick(rng, _PLACES)}"
        text += f" and {pick(rng, _ACTIONS)} {pick(rng, _THINGS)}"
    return text[0].upper() + text[1:] + "."


def sentences(rng: random.Random) -> Iterator[str]:
    """Filler without end."""
    while True:
        yield sentence(rng)
