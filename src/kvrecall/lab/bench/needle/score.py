"""What was right, counted so that chance can be told from difference."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Z = 1.96
"""Of a 95 % interval."""


@dataclass(frozen=True, slots=True)
class Record:
    """One question: ``right`` says for each arm, in order, whether its reply was right."""

    length: int
    task: str
    depth: float
    question: str
    expected: tuple[str, ...]
    right: tuple[bool, ...]
    replies: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Score:
    """``right`` of ``asked``."""

    right: int
    asked: int

    @property
    def percent(self) -> float:
        return round(100 * self.right / self.asked, 1) if self.asked else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's 95 % interval, in per cent."""
        if not self.asked:
            return (0.0, 100.0)
        n, p = self.asked, self.right / self.asked
        middle = (p + Z * Z / (2 * n)) / (1 + Z * Z / n)
        half = Z / (1 + Z * Z / n) * math.sqrt(p * (1 - p) / n + Z * Z / (4 * n * n))
        return (round(100 * max(0.0, middle - half), 1), round(100 * min(1.0, middle + half), 1))

    def told(self) -> dict[str, object]:
        """For the line of JSON."""
        low, high = self.interval
        return {"percent": self.percent, "right": self.right, "asked": self.asked,
                "low": low, "high": high}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Pairs:
    """The same questions under two arms: those only the first had right, and only the second."""

    lost: int
    gained: int

    @property
    def chance(self) -> float:
        """Two-sided exact sign test (McNemar): how likely so uneven a split is by chance."""
        n, least = self.lost + self.gained, min(self.lost, self.gained)
        tail: float = sum(math.comb(n, k) for k in range(least + 1)) / (1 << n)
        return min(1.0, 2 * tail)

    def told(self) -> dict[str, object]:
        """For the line of JSON."""
        return {"lost": self.lost, "gained": self.gained, "chance": round(self.chance, 4)}


def score(records: Iterable[Record], arm: int) -> Score:
    """What an arm had right of these."""
    right = [record.right[arm] for record in records]
    return Score(sum(right), len(right))


def pairs(records: Iterable[Record], arm: int, base: int = 0) -> Pairs:
    """An arm against another on the same questions."""
    both = [(record.right[base], record.right[arm]) for record in records]
    return Pairs(both.count((True, False)), both.count((False, True)))


def at(
    records: Sequence[Record], length: int | None = None, task: str | None = None
) -> list[Record]:
    """Those of a length and a task, where given."""
    return [
        record
        for record in records
        if length in (None, record.length) and task in (None, record.task)
    ]


def placed(records: Sequence[Record]) -> list[Record]:
    """Those about a single fact, whose depth is a place; all of them if there are none such. The
    depth of a question about several facts is but the mean of theirs."""
    return [one for one in records if one.task in ("single", "multikey")] or list(records)


def depth_of(record: Record, bins: int) -> int:
    """Which of ``bins`` equal parts of the document the fact lies in."""
    return min(bins - 1, int(record.depth * bins))
