"""How a block's digests are stored: rows, one after the other, coded in eight bits.

A row is whole numbers, and behind them the scale they are multiples of. A search reads every row of
every candidate, so its time goes with their bytes; and sums of products of whole numbers are exact,
wherever and in whatever order they are computed (docs/digest-study.md has what the rounding costs).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvrecall.attention.digest import DIGESTS, Digest, digests_of
from kvrecall.attention.settings import RetrievalSettings

SCALE_BYTES = 4
NARROW_SHARE = 0.02
COARSE_TOKENS = 64
WIDE = 6
"""Up to NARROW_SHARE of the blocks, fine digests are read only of WIDE times the blocks to choose:
those whose coarse digests, of COARSE_TOKENS keys each, score best. For larger shares that saves no
time (docs/digest-study.md)."""
_MAX_CODE = 127


@dataclass(frozen=True, slots=True)
class Layout:
    """The rows of a block: ``coarse`` ones, by which a search narrows down, then ``fine`` ones of
    fewer keys each. All are ``kind.parts`` times a head wide."""

    kind: Digest
    coarse: int
    fine: int

    @classmethod
    def of(cls, settings: RetrievalSettings, block_size: int) -> Layout:
        kind, tokens = DIGESTS[settings.digest], settings.tokens_a_digest
        narrows = settings.topk_share <= NARROW_SHARE and block_size % COARSE_TOKENS == 0
        coarse = block_size // COARSE_TOKENS if narrows and tokens < COARSE_TOKENS else 0
        return cls(kind, coarse, block_size // tokens)

    @property
    def rows(self) -> int:
        return self.coarse + self.fine

    @property
    def coarse_rows(self) -> slice:
        return slice(0, self.coarse)

    @property
    def fine_rows(self) -> slice:
        return slice(self.coarse, self.rows)

    def narrowed(self, blocks: int, count: int) -> int:
        """Of how many of ``blocks`` the fine rows are read to find ``count``."""
        return min(blocks, WIDE * count)

    def scored(self, blocks: int, count: int) -> int:
        """Rows that a search for ``count`` of ``blocks`` reads."""
        if not self.coarse:
            return blocks * self.rows
        return blocks * self.coarse + self.narrowed(blocks, count) * self.rows

    def rows_of(self, keys: torch.Tensor) -> torch.Tensor:
        """``[..., tokens, dim]`` of whole blocks -> float32 ``[..., coarse + fine, width]``."""
        tokens = keys.shape[-2]
        fine = digests_of(self.kind, keys, tokens // self.fine)
        if not self.coarse:
            return fine
        return torch.cat([digests_of(self.kind, keys, tokens // self.coarse), fine], -2)


def coded_width(width: int) -> int:
    """Bytes of a row of ``width`` coordinates."""
    return width + SCALE_BYTES


def encode(rows: torch.Tensor) -> torch.Tensor:
    """float ``[..., rows, width]`` of a block each -> int8 ``[..., rows, width + 4]``, with one
    scale for a block's rows."""
    scales = scales_of_maxima(rows.abs().amax((-1, -2), keepdim=True).float())
    size = (*rows.shape[:-1], coded_width(rows.shape[-1]))
    coded = torch.empty(size, dtype=torch.int8, device=rows.device)
    coded[..., :-SCALE_BYTES] = (rows / scales).round()
    every = scales.expand(*rows.shape[:-1], 1)
    coded[..., -SCALE_BYTES:] = every.contiguous().view(torch.int8)
    return coded


def decode(coded: torch.Tensor) -> torch.Tensor:
    """int8 ``[..., width + 4]`` -> float32 ``[..., width]``."""
    return coded[..., :-SCALE_BYTES].float() * scales_in(coded)


def scales_in(coded: torch.Tensor) -> torch.Tensor:
    """The scales of coded rows: float32 ``[..., 1]``."""
    return coded[..., -SCALE_BYTES:].contiguous().view(torch.float32)


def scales_of_maxima(most: torch.Tensor) -> torch.Tensor:
    """The scale under which the largest coordinate gets the largest code."""
    # By a tensor, as a GPU rounds a division by a plain number differently from a CPU.
    codes = torch.full_like(most, _MAX_CODE)
    return (most / codes).clamp(min=torch.finfo(torch.float32).tiny)
