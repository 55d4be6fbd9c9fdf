"""Whether sparse attention is expected to be faster than dense."""

from __future__ import annotations

from dataclasses import dataclass

from kvrecall.attention.layout import Layout
from kvrecall.attention.settings import RetrievalSettings
from kvrecall.attention.split import Split

OVERHEAD_BYTES = 8 * 2**20
"""What preparing one sequence's selection costs in a layer, in bytes of KV read in that time:
half a millisecond at 16 GB/s (docs/retrieval.md)."""

DEVICE_OVERHEAD_BYTES = 512 * 2**20
"""The same on a GPU: some thirty small kernels, each started by the host, at 3.4 TB/s. Reckoned,
not measured: `kvrecall gpu-check` tells."""


@dataclass(frozen=True, slots=True)
class Gate:
    """``token_bytes``: keys and values of a token, in one layer. ``overhead_bytes``: what is read
    of them in the time that preparing a sequence's selection takes."""

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
