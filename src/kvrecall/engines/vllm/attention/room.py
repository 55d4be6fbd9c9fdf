"""Room for the digests of blocks in one layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvrecall.attention.layout import Layout, coded_width
from kvrecall.engines.vllm.attention.rows import RowKernel

_SPARE = 64
"""Blocks beyond those asked for, when there must be more room."""


@dataclass(frozen=True, slots=True)
class Digests:
    """Of some blocks: int8 ``rows`` ``[kv_heads, blocks, rows, width]``, and a copy of their
    ``coarse`` rows, side by side; None if there are none."""

    rows: torch.Tensor
    coarse: torch.Tensor | None


class DigestRoom:
    """Of blocks by their numbers. On a CPU memory is taken from the system as it is written."""

    def __init__(self, kernel: RowKernel, layout: Layout, blocks: int = 0) -> None:
        self._kernel = kernel
        self._layout = layout
        self._width = coded_width(layout.kind.parts * kernel.shape.head_dim)
        self._blocks = blocks
        self.rows = self._new(layout.rows)
        self._coarse = self._new(layout.coarse) if layout.coarse else None

    @property
    def heads(self) -> int:
        return self._kernel.shape.kv_heads

    def write(self, block_ids: torch.Tensor, rows: torch.Tensor) -> None:
        """``rows``: ``[kv_heads, blocks, rows, width]``, coded."""
        self.rows[:, block_ids] = rows
        self.wrote(block_ids)

    def wrote(self, block_ids: torch.Tensor) -> None:
        """The rows of these blocks were written by somebody else."""
        if self._coarse is not None:
            self._coarse[:, block_ids] = self.rows[:, block_ids, self._layout.coarse_rows]

    def part(self, blocks: slice | torch.Tensor) -> Digests:
        """Of these blocks: a view for a slice, else a copy."""
        coarse = None if self._coarse is None else self._coarse[:, blocks]
        return Digests(self.rows[:, blocks], coarse)

    def reach(self, blocks: int) -> None:
        """There is room for at least so many blocks; those there are stay."""
        if blocks <= self._blocks:
            return
        before, self._blocks = self._blocks, blocks + _SPARE
        rows, coarse = self.rows, self._coarse
        self.rows = self._new(self._layout.rows)
        self.rows[:, :before] = rows
        if coarse is not None:
            self._coarse = self._new(self._layout.coarse)
            self._coarse[:, :before] = coarse

    def _new(self, rows: int) -> torch.Tensor:
        return self._kernel.digests(self._blocks, rows, self._width)
