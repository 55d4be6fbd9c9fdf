"""A row of ``make models``: what a case showed, what it must move, and what is wrong with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvrecall_lab.engines.engine import Answer

ROUNDING = 1e-4
"""Difference of log-probabilities that sums taken in another order in float32 make."""

TIERS = ("host", "disk", "remote", "service", "mooncake")


@dataclass(frozen=True, slots=True)
class Row:
    """What a case showed. ``run``: whether this machine runs the shape; ``why``: why not, or which
    reply differs. ``hit_tokens``: prompt tokens recalled, and ``device_tokens``: those that the
    engine without a pool recalls. ``tier_tokens``: of those recalled, the ones that came from the
    tier and not from a copy above it. ``rounded``: tokens are equal, and log-probabilities up to
    the rounding of sums in float32. ``attempts``: how often the case was asked.
    ``device_blocks``: with the pool and without."""

    model: str
    tier: str = ""
    case: str = ""
    run: bool = True
    why: str = ""
    groups: int = 0
    hybrid_manager: bool = False
    restarted: bool = False
    equal: bool = False
    rounded: bool = False
    deviation: float = 0.0
    hit_tokens: int = 0
    tier_tokens: int = 0
    device_tokens: int = 0
    bytes_moved: int = 0
    bytes_needed: int = 0
    preemptions: int = 0
    attempts: int = 1
    device_blocks: tuple[int, int] = (0, 0)

    @property
    def ok(self) -> bool:
        """Whether the case shows what it must, if it could be tried."""
        return not self.run or not self.faults()

    def faults(self) -> list[str]:
        """What is wrong."""
        preempts = self.case == "preempted"
        together = preempts or self.case == "samples"
        checks = {
            # A step's sums may depend on what else it computes.
            f"replies differ from a device hit ({self.why})": not (
                self.equal or (together and self.rounded)
            ),
            "nothing recalled": not self.bytes_moved,
            "nothing came from the tier": not together and not self.tier_tokens,
            "recalled less than the device": not preempts and self.hit_tokens < self.device_tokens,
            "moved more bytes than needed": self.bytes_moved > self.bytes_needed,
            "moved fewer bytes than needed": self.bytes_moved < self.bytes_needed,
            "nothing was preempted": preempts and not self.preemptions,
            "the pool takes device blocks": self.device_blocks[0] != self.device_blocks[1],
        }
        return [text for text, wrong in checks.items() if wrong]


def difference(ones: Sequence[Answer], others: Sequence[Answer]) -> str:
    """The first answer whose tokens or log-probabilities are not the same, bit for bit, and from
    where on; empty if there is none."""
    for one, other in zip(ones, others, strict=True):
        if len(one.tokens) != len(other.tokens):
            return f"{one.id}: {len(one.tokens)} tokens, not {len(other.tokens)}"
        pairs = zip(one.tokens, one.scores, other.tokens, other.scores, strict=True)
        for at, (token, score, right, truth) in enumerate(pairs):
            if (token, score) != (right, truth):
                return f"{one.id} from token {at} on"
    return ""


def is_rounded(ones: Sequence[Answer], others: Sequence[Answer]) -> bool:
    """Whether tokens are equal, and log-probabilities nearly so."""
    return all(
        one.tokens == other.tokens
        and all(abs(a - b) <= ROUNDING for a, b in zip(one.scores, other.scores, strict=True))
        for one, other in zip(ones, others, strict=True)
    )


def from_tier(answers: Sequence[Answer], tier: str) -> int:
    """Prompt tokens that came from a tier: of a pool service, from its host memory."""
    source = {"service": "host", "mooncake": "remote"}.get(tier, tier)
    return sum(one.sources.get(source, 0) for one in answers)


# -- the bytes that a hit must move ----------------------------------------------------------


def needed_bytes(groups: Sequence[Mapping[str, Any]], loads: Sequence[tuple[int, int]]) -> int:
    """Bytes of the blocks that prefixes need from the pool, computed from the shape of the device
    cache alone: of each KV group those that the tokens behind the hit attend to. ``groups``: of an
    engine's ``memory()``; ``loads``: for each prefix, the tokens that the device has and its
    end."""
    return sum(_bytes_of(group, start, end) for group in groups for start, end in loads)


def _bytes_of(group: Mapping[str, Any], start: int, end: int) -> int:
    size: int = group["block_size"]
    first = max(start, _first_token(group, end)) // size
    page_bytes: int = sum(group["layers"])
    return (-(-end // size) - first) * page_bytes


def _first_token(group: Mapping[str, Any], end: int) -> int:
    """The first token whose KV the token at ``end`` needs."""
    kind = group["kind"]
    if kind == "MambaSpec":
        return end - 1
    if kind == "SlidingWindowSpec":
        return max(0, end - int(group["window"]) + 1)
    if kind == "ChunkedLocalAttentionSpec":
        return end // int(group["chunk"]) * int(group["chunk"])
    return 0
