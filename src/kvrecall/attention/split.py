"""Where a sequence's first, middle and last blocks lie."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvrecall.attention.settings import RetrievalSettings


@dataclass(frozen=True, slots=True)
class Split:
    """Blocks ``[0, init)`` and ``[local, blocks)`` always take part, ``chosen`` of those between.

    ``last_tokens``: tokens in the last block, 1 to ``block_size``.
    """

    blocks: int
    init: int
    local: int
    chosen: int
    last_tokens: int
    block_size: int

    @property
    def middle(self) -> int:
        """Blocks to choose from."""
        return self.local - self.init

    @property
    def attended_blocks(self) -> int:
        return self.blocks - self.middle + self.chosen

    @property
    def attended_tokens(self) -> int:
        return (self.attended_blocks - 1) * self.block_size + self.last_tokens


def split_of(tokens: int, block_size: int, settings: RetrievalSettings) -> Split:
    """Splits a sequence of ``tokens`` (at least 1). Init and local are rounded up to blocks, so
    the middle blocks are full and the last block is always local."""
    blocks = math.ceil(tokens / block_size)
    init = min(math.ceil(settings.init_tokens / block_size), blocks)
    local = max(0, tokens - settings.local_tokens) // block_size
    local = max(local, init)
    middle = local - init
    chosen = min(middle, max(math.ceil(middle * settings.topk_share), settings.fewest_blocks))
    last_tokens = tokens - (blocks - 1) * block_size
    return Split(blocks, init, local, chosen, last_tokens, block_size)


def slots_of(split: Split, offloaded: int, settings: RetrievalSettings) -> tuple[int, int]:
    """Device slots a sequence needs with so many of its middle blocks off the device, and how many
    it should have, so that those of earlier steps are found there."""
    spare = math.ceil(split.middle * settings.cache_share)
    return min(offloaded, split.chosen), min(offloaded, split.chosen + spare)
