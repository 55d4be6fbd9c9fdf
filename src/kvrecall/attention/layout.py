"""What is kept of a block to choose it by: rows of digests, one after the other.

First ``coarse`` ones, each of more keys, by which a search narrows down; then ``fine`` ones; then
``rest`` ones: the mean key and the mean value, by which a block that was not chosen is estimated,
each a row, as each has a scale of its own when they are coded (see ``coding``).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from kvrecall.attention.coding import decode_fine
from kvrecall.attention.digest import DIGESTS, Digest, digests_of
from kvrecall.attention.settings import RetrievalSettings

NARROW_SHARE = 0.02
COARSE_TOKENS = 64
WIDE = 6
"""Up to this share of the blocks, fine digests are looked at of only so many times the blocks to
choose: those whose coarse digests, of so many keys, are the best. For larger shares that saves no
time (docs/digest-study.md)."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How many rows of each sort a block has; all are ``kind.parts`` times a head wide."""

    kind: Digest
    coarse: int
    fine: int
    rest: int

    @classmethod
    def of(cls, settings: RetrievalSettings, block_size: int) -> Layout:
        kind, tokens = DIGESTS[settings.digest], settings.tokens_a_digest
        narrows = settings.topk_share <= NARROW_SHARE and block_size % COARSE_TOKENS == 0
        coarse = block_size // COARSE_TOKENS if narrows and tokens < COARSE_TOKENS else 0
        return cls(kind, coarse, block_size // tokens, 2 if settings.estimate_rest else 0)

    @property
    def rows(self) -> int:
        """As they are coded."""
        return self.coarse + self.fine + 2 * self.rest

    @property
    def coarse_rows(self) -> slice:
        return slice(0, self.coarse)

    @property
    def fine_rows(self) -> slice:
        return slice(self.coarse, self.coarse + self.fine)

    def narrowed(self, blocks: int, count: int) -> int:
        """How many of ``blocks`` are looked at closely where ``count`` are to be found."""
        return min(blocks, WIDE * count)

    def scored(self, blocks: int, count: int) -> int:
        """Rows that a search for ``count`` of ``blocks`` reads."""
        if not self.coarse:
            return blocks * self.rows
        return blocks * self.coarse + self.narrowed(blocks, count) * self.rows

    def rows_of(self, keys: torch.Tensor, values: torch.Tensor | None = None) -> torch.Tensor:
        """``[..., tokens, dim]`` of whole blocks -> float32 ``[..., coarse + fine + rest,
        width]``. ``values``: of the same shape, needed if there are rows for the rest."""
        tokens = keys.shape[-2]
        rows = [digests_of(self.kind, keys, tokens // self.fine)]
        if self.coarse:
            rows.insert(0, digests_of(self.kind, keys, tokens // self.coarse))
        if self.rest:
            assert values is not None
            means = torch.stack([keys.float().mean(-2), values.float().mean(-2)], -2)
            rows.append(functional.pad(means, (0, (self.kind.parts - 1) * keys.shape[-1])))
        return torch.cat(rows, -2)

    def rest_of(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean keys and mean values ``[..., dim]`` of blocks whose coded rows these are."""
        means = decode_fine(rows, self.rest)
        means = means[..., : means.shape[-1] // self.kind.parts]
        return means[..., 0, :], means[..., 1, :]
