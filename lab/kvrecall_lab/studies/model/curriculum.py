"""The stages of training: short before long, small alphabets before large."""

from __future__ import annotations

from dataclasses import dataclass

from kvrecall_lab.bench.needle.words import Alphabet

from .batches import Recipe


@dataclass(frozen=True, slots=True)
class Stage:
    """Recipes drawn by weight until value accuracy reaches `goal` or `minutes` are over.

    The learning rate is `rate`, falling linearly to `final` where that is given. Where
    `suppress` is not zero the stage begins with `suppress.start_suppression`.
    """

    name: str
    recipes: tuple[tuple[float, Recipe], ...]
    rate: float
    minutes: float
    goal: float = 0.98
    final: float | None = None
    suppress: float = 0.0


_TINY = Alphabet(16, 16, 32)
_SMALL = Alphabet(40, 60, 200)
_WIDE = 131_072

_REPEATS = Recipe(64, 48, repeats=0.5, restated=0.5, alphabet=_TINY)
_FIRST = Recipe(128, 32, 0.25, 0.25, kinds=("single", "multikey"), alphabet=_SMALL)
_ALL = Recipe(512, 8)
_LISTS = Recipe(256, 16, 0, 0.05, kinds=("values", "count"))
_KEYS = Recipe(512, 8, 0, 0.2, kinds=("chain", "multikey", "several"))
_COPIED = Recipe(512, 8, 0, 0, kinds=("chain", "several"))
_NEAR = Recipe(512, 8, span=4096)
_FAR = Recipe(1024, 4, span=_WIDE)
_FAR_ASKED = Recipe(1024, 4, 0.05, 0.05, span=_WIDE)
_REAL = Recipe(4096, 1, 0, 0)
_MID_LISTS = Recipe(512, 8, 0, 0, span=16384, kinds=("values", "count"))
_FAR_LISTS = Recipe(1024, 4, 0, 0, span=_WIDE, kinds=("values", "count"))

STAGES: tuple[Stage, ...] = (
    Stage("repeat64", ((1, _REPEATS),), 1.5e-3, 14, 0.9),
    Stage("facts128", ((1, _FIRST),), 1.5e-3, 8, 0.84),
    Stage("all512", ((1, _ALL), (1, _NEAR)), 1.2e-3, 7, 0.9),
    Stage("stretch1k", ((1, _ALL), (2, _FAR)), 1e-3, 7, 0.97),
    Stage("values", ((3, _LISTS), (1, _KEYS), (2, _FAR)), 1e-3, 12, 0.97),
    Stage("real4k", ((2, _FAR), (1, _REAL)), 1e-3, 6, 0.98),
    Stage("lists", ((3, _LISTS), (1, _ALL), (2, _FAR)), 1e-3, 8, 0.97, suppress=1.0),
    Stage("ends", ((2, _LISTS), (1, _ALL), (2, _FAR)), 1e-3, 7, 0.98),
    Stage("settle", ((3, _LISTS), (2, _COPIED), (5, _FAR_ASKED)), 1e-3, 25, 1.1, final=3e-5),
    Stage(
        "complete",
        ((2, _LISTS), (2, _MID_LISTS), (4, _FAR_LISTS), (1, _COPIED), (3, _FAR_ASKED)),
        8e-4,
        48,
        goal=1.1,
        final=3e-5,
    ),
)
