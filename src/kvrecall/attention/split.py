"""Where a sequence's first, middle and last blocks lie, and whether choosing among them pays."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvrecall.attention.layout import Layout
from kvrecall.attention.settings import RetrievalSettings

OVERHEAD_BYTES = 8 * 2**20
"""What preparing one sequence's selection costs in a layer, in bytes of KV read in that time:
half a millisecond at 16 GB/s (docs/retrieval.md)."""

DEVICE_OVERHEAD_BYTES = 512 * 2**20
"""The same on a GPU: some thirty small kernels, each started by the host, at 3.4 TB/s. Reckoned,
not measured: `kvrecall gpu-check` tells."""


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


@dataclass(frozen=True, slots=True)
class Gate:
    """Whether sparse attention is expected to be faster than dense. ``token_bytes``: keys and
    values of a token, in one layer. ``overhead_bytes``: what is read of them in the time that
    preparing a sequence's selection takes."""

    settings: RetrievalSettings
    token_bytes: int
    overhead_bytes: int = OVERHEAD_BYTES

    def passes(self, tokens: int, split: Split) -> bool:
        """Whether there is something to choose from and sparse attention reads enough less than
        dense to be worth its overhead. Where all blocks would be chosen it is never, gate or not,
        unless a share of 1 asks for them."""
        if not split.middle:
            return False
        if split.chosen == split.middle and self.settings.topk_share < 1:
            return False
        if not self.settings.gate:
            return True
        layout = Layout.of(self.settings, split.block_size)
        scored = layout.scored(split.middle, split.chosen) * layout.kind.parts / 2
        return split.attended_tokens + scored + self.overhead_bytes / self.token_bytes < tokens
