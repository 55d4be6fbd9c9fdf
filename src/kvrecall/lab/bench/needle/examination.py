"""Asking all questions of all arms."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice

from kvrecall.errors import KvrecallError
from kvrecall.lab.bench.needle.arms import CONCURRENT, Arm, Arms
from kvrecall.lab.bench.needle.endpoint import Endpoint
from kvrecall.lab.bench.needle.filler import sentences
from kvrecall.lab.bench.needle.papers import Paper, Syllabus, papers
from kvrecall.lab.bench.needle.prompts import ROOM, Manner, is_answered, request_of
from kvrecall.lab.bench.needle.score import Record
from kvrecall.lab.bench.needle.tasks import approximate_tokens

Advance = Callable[[str, int], None]
"""Told what is being done, and how many replies just came."""


@dataclass(slots=True)
class Findings:
    """What came of an examination. ``selected``: blocks chosen under each retrieval arm; None for
    a server that does not tell."""

    arms: tuple[Arm, ...]
    records: list[Record] = field(default_factory=list)
    selected: dict[str, int | None] = field(default_factory=dict)

    def require_active(self) -> None:
        """Raises KvrecallError if an arm that is to be retrieval did not choose any block."""
        for arm in self.arms:
            if not arm.retrieval:
                continue
            count = self.selected.get(arm.name)
            if count is None:
                raise KvrecallError(
                    "whether retrieval acted cannot be told: the server's metrics hold no "
                    "kvrecall_retrieval_* counters (they come with RecallConnector)"
                )
            if not count:
                raise KvrecallError(
                    f"{arm.name}: retrieval did not act, no block was chosen; the lengths may "
                    "lie within the dense boundary, or init and local tokens cover them"
                )

    @property
    def active(self) -> bool:
        """Whether retrieval really chose blocks in every arm that claims to."""
        retrieval = [arm for arm in self.arms if arm.retrieval]
        return bool(retrieval) and all(self.selected.get(arm.name) for arm in retrieval)


class Examiner:
    """Asks every question of a syllabus under every arm, document by document."""

    def __init__(self, arms: Arms, manner: Manner, syllabus: Syllabus, advance: Advance) -> None:
        self._arms = arms
        self._manner = manner
        self._syllabus = syllabus
        self._advance = advance

    def run(self) -> Findings:
        """All lengths, short ones first. Raises EngineError."""
        found = Findings(self._arms.arms)
        measure = self._measure()
        for length in sorted(self._syllabus.lengths):
            for paper in papers(self._syllabus, length, ROOM[self._manner], measure):
                found.records += self._examine(paper, found.selected)
        return found

    def _measure(self) -> Callable[[str], int]:
        """Counts tokens as the server's tokenizer does, to about half a per cent."""
        short = min(self._syllabus.lengths)
        text = " ".join(islice(sentences(random.Random(1)), min(120, short // 24)))
        endpoint = self._arms.turn_to(self._arms.arms[0])
        ratio = 1.005 * endpoint.tokens_of(text) / approximate_tokens(text)
        return lambda line: round(approximate_tokens(line) * ratio)

    def _examine(self, paper: Paper, selected: dict[str, int | None]) -> list[Record]:
        replies = {arm.name: self._replies(arm, paper, selected) for arm in self._arms.arms}
        records = []
        for at, question in enumerate(paper.questions):
            said = tuple(replies[arm.name][at] for arm in self._arms.arms)
            right = tuple(is_answered(self._manner, question, reply) for reply in said)
            records.append(
                Record(
                    paper.length, question.task, question.depth, question.text,
                    question.expected, right, said,
                )
            )  # fmt: skip
        return records

    def _replies(self, arm: Arm, paper: Paper, selected: dict[str, int | None]) -> Sequence[str]:
        endpoint = self._arms.turn_to(arm)
        before = self._arms.blocks_selected(arm) if arm.retrieval else None
        replies = self._ask(endpoint, paper, f"{paper.length:,} tokens, {arm.name}")
        if arm.retrieval:
            after = self._arms.blocks_selected(arm)
            known = before is not None and after is not None
            gained = after - before if known else None  # type: ignore[operator]
            selected[arm.name] = _sum(selected, arm.name, gained)
        return replies

    def _ask(self, endpoint: Endpoint, paper: Paper, doing: str) -> list[str]:
        """The first question alone, so that the document is computed once."""
        requests = [request_of(self._manner, paper.document, q) for q in paper.questions]
        self._advance(doing, 0)
        replies = [endpoint.ask(requests[0])]
        self._advance(doing, 1)
        with ThreadPoolExecutor(CONCURRENT) as pool:
            for reply in pool.map(endpoint.ask, requests[1:]):
                replies.append(reply)
                self._advance(doing, 1)
        return replies


def _sum(selected: Mapping[str, int | None], name: str, more: int | None) -> int | None:
    before = selected.get(name, 0)
    return None if more is None or before is None else before + more
