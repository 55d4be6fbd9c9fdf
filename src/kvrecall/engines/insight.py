"""What an engine room shows of itself while it runs: its requests, and what retrieval chose.

Plain values, for the dashboard. No prompt and no answer is in them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol


class Phase(StrEnum):
    """Where a request is."""

    PREFILL = "prefill"  # waiting, recalling or computing its prompt
    DECODE = "decode"
    DONE = "done"
    CANCELLED = "cancelled"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class RequestView:
    """One request. Times are wall-clock seconds; ``ended`` 0 while it is under way.

    ``ttft_s``: seconds to its first token, 0 if there is none. ``output_tokens``: None if not
    known. ``split``: its prompt's tokens by source, empty until that is known.
    """

    id: str
    phase: Phase
    began: float
    ended: float
    prompt_tokens: int
    output_tokens: int | None
    ttft_s: float
    split: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Heat:
    """Blocks that retrieval chose, by layer and place in the context: running totals.

    ``considered[l][p]`` middle blocks lay in the ``p``-th part of their contexts when layer ``l``
    chose, ``selected[l][p]`` of them were chosen; over all KV heads. Parts are of equal length,
    from the start of a context to its end.
    """

    layers: tuple[str, ...]
    considered: tuple[tuple[int, ...], ...]
    selected: tuple[tuple[int, ...], ...]


class Insight(Protocol):
    """A running engine, to be watched. No method waits."""

    def live(self, most: int) -> tuple[Sequence[RequestView], int]:
        """Requests under way, at most so many, and how many there are."""

    def ended(self, since: float) -> Sequence[RequestView]:
        """The last requests that ended after ``since``, oldest first."""

    @property
    def remembered(self) -> int:
        """How many ended requests are remembered at most."""

    def heat(self) -> Heat | None:
        """None if retrieval has chosen nothing."""
