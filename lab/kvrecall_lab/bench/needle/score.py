"""Scores with intervals and sign tests, and the report."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvrecall.attention.settings import RetrievalSettings
from kvrecall.bench.report import Report
from kvrecall.errors import KvrecallError

_Z = 1.96  # for a 95 % interval


@dataclass(frozen=True, slots=True)
class Variant:
    """A variant under comparison. ``settings``: those of retrieval; None for dense attention."""

    name: str
    settings: RetrievalSettings | None = None


DENSE = Variant("dense")


@dataclass(frozen=True, slots=True)
class Record:
    """One question. ``right``: whether each variant's reply was right, in their order."""

    length: int
    task: str
    depth: float
    question: str
    expected: tuple[str, ...]
    right: tuple[bool, ...]
    replies: tuple[str, ...]

    def depth_bin(self, bins: int) -> int:
        """Which of ``bins`` equal parts of the document contains the fact."""
        return min(bins - 1, int(self.depth * bins))


@dataclass(slots=True)
class Results:
    """Replies of all variants, the first of which is dense. ``selected``: blocks selected under
    each of the others."""

    variants: tuple[Variant, ...]
    records: list[Record] = field(default_factory=list)
    selected: Counter[str] = field(default_factory=Counter)

    def require_active(self) -> None:
        """Raises KvrecallError if a variant with retrieval selected no block."""
        for variant in self.variants:
            if variant.settings and not self.selected[variant.name]:
                raise KvrecallError(
                    f"{variant.name}: retrieval did not act, no block was selected; the "
                    "lengths may be within the dense boundary, or init and local tokens "
                    "cover them"
                )

    @property
    def active(self) -> bool:
        """Whether retrieval selected blocks in every variant with retrieval."""
        return all(self.selected[variant.name] for variant in self.variants[1:])


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
        middle = (p + _Z * _Z / (2 * n)) / (1 + _Z * _Z / n)
        half = _Z / (1 + _Z * _Z / n) * math.sqrt(p * (1 - p) / n + _Z * _Z / (4 * n * n))
        return (round(100 * max(0.0, middle - half), 1), round(100 * min(1.0, middle + half), 1))

    def figures(self) -> dict[str, object]:
        low, high = self.interval
        return {"percent": self.percent, "right": self.right, "asked": self.asked,
                "low": low, "high": high}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Pairs:
    """Questions that only the first of two variants answered, and those that only the second
    did."""

    lost: int
    gained: int

    @property
    def chance(self) -> float:
        """The p-value of the two-sided exact sign test (McNemar)."""
        n, least = self.lost + self.gained, min(self.lost, self.gained)
        tail: float = sum(math.comb(n, k) for k in range(least + 1)) / (1 << n)
        return min(1.0, 2 * tail)

    def figures(self) -> dict[str, object]:
        return {"lost": self.lost, "gained": self.gained, "chance": round(self.chance, 4)}


def score(records: Iterable[Record], variant: int) -> Score:
    """A variant's score on these questions."""
    right = [record.right[variant] for record in records]
    return Score(sum(right), len(right))


def pairs(records: Iterable[Record], variant: int, base: int = 0) -> Pairs:
    """A variant against another on the same questions."""
    both = [(record.right[base], record.right[variant]) for record in records]
    return Pairs(both.count((True, False)), both.count((False, True)))


def select(
    records: Sequence[Record], length: int | None = None, task: str | None = None
) -> list[Record]:
    """The records of a length and a task, if given."""
    return [
        record
        for record in records
        if length in (None, record.length) and task in (None, record.task)
    ]


def by_depth(records: Sequence[Record], variant: int, bins: int = 10) -> list[float]:
    """Per cent right by part of the document; nan for a part without questions. Uses questions
    about a single fact if there are any, because the depth of several facts is only a mean."""
    placed = [one for one in records if one.task in ("single", "multikey")] or records
    return [
        score([one for one in placed if one.depth_bin(bins) == part], variant).percent
        for part in range(bins)
    ]


def report_of(
    results: Results, model: str, tasks: Sequence[str], facts: Mapping[str, object]
) -> Report:
    """The table and the line of JSON, which contains ``facts`` unchanged."""
    records, variants = results.records, results.variants
    lengths = sorted({record.length for record in records})
    groups: list[tuple[str, str | None]] = [*((task, task) for task in tasks), ("all", None)]

    def scores(variant: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for length in lengths:
            here = select(records, length)
            depths = by_depth(here, variant)
            found[str(length)] = {
                **{
                    name: score(select(here, task=task), variant).figures() for name, task in groups
                },
                "by_depth": [None if math.isnan(percent) else percent for percent in depths],
            }
        return found

    def against_dense(variant: int) -> dict[str, Any]:
        return {
            str(length): {
                name: pairs(select(records, length, task), variant).figures()
                for name, task in groups
            }
            for length in lengths
        }

    compared: list[dict[str, Any]] = [
        {
            "name": variant.name,
            "share": settings.topk_share,
            "digest": f"{settings.digest} of {settings.tokens_a_digest}",
            "blocks_selected": results.selected[variant.name],
            "results": scores(number),
            "against_dense": against_dense(number),
        }
        for number, variant in enumerate(variants)
        if (settings := variant.settings) is not None
    ]
    figures = {
        "model": model,
        "lengths": lengths,
        "dense": scores(0),
        "retrieval": compared[0]["results"],
        "share": compared[0]["share"],
        "active": results.active,
        "questions": len(records),
        "arms": compared,
        **facts,
    }
    rows = []
    for length in lengths:
        for name, task in groups:
            here = select(records, length, task)
            cells = []
            for number in range(len(variants)):
                one = score(here, number)
                low, high = one.interval
                cells.append(f"{one.percent:.1f} [{low:.0f}-{high:.0f}]")
            split = [pairs(here, number) for number in range(1, len(variants))]
            lost = "; ".join(f"{pair.lost}, {pair.gained}" for pair in split)
            rows.append((f"{length:,}", f"{name} ({len(here)})", *cells, lost))
    notes = ["per cent right of the questions asked (in brackets), with Wilson's 95 % interval"]
    notes.append("lost, gained: questions that only dense answered, and only the other")
    notes += [f"{one['name']}: {one['blocks_selected']} blocks chosen" for one in compared]
    columns = ("tokens", "task", *(variant.name for variant in variants), "lost, gained")
    return Report("needle", columns, tuple(rows), figures, tuple(notes))
