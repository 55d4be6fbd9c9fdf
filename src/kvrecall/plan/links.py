"""Device memory that links between cards take, after Ascend's rules for pooled KV (HCCL)."""

from __future__ import annotations

from dataclasses import dataclass

LINK_BYTES = 4 * 10**6
MOST_LINKS = 512
STEP = 0.01  # of the memory factor
STEP_BYTES = 600 * 10**6  # device memory that a step gives back
MOST_STEPS = 4


@dataclass(frozen=True, slots=True)
class Links:
    """What the links of one card take, and how far to lower the memory factor for them."""

    cards: int
    links: int
    nbytes: int
    lower_by: float
    too_many: bool  # more than can stay connected: links are cut and made again

    def factor(self, now: float) -> float:
        return round(now - self.lower_by, 4)


def links_of(cards: int, will_grow: bool = False) -> Links:
    """For ``cards`` cards (dies) that pool together. ``will_grow``: more may join while it runs,
    so the room for as many links as there can be is kept free."""
    wanted = max(0, cards - 1)
    links = min(wanted, MOST_LINKS)
    nbytes = links * LINK_BYTES
    steps = MOST_STEPS if will_grow else min(MOST_STEPS, -(-nbytes // STEP_BYTES))
    return Links(cards, links, nbytes, round(steps * STEP, 4), wanted >= MOST_LINKS)
