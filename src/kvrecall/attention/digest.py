"""Digests: short vectors that represent the keys of a few tokens, and their storage format.

Every kind is an inner product: ``of_query(q) @ of_keys(keys)`` is the similarity of the tokens to
the query, so one search serves all kinds. Keys are indexed after rotary embedding.

A block's digests are consecutive rows, coded in eight bits: whole numbers, followed by the scale
they are multiples of. A search reads every row of every candidate, so its time is proportional to
their bytes; and sums of products of whole numbers are exact, wherever and in whatever order they
are computed (docs/retrieval-internals.md shows the cost of rounding).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

SCALE_BYTES = 4
LOADED_BYTES = 16
"""A GPU's rows begin at multiples of so many bytes, which it loads at once."""
WIDE = 6
"""With coarse rows, fine ones are read only for WIDE times the number of blocks to select: those
whose coarse rows score best (docs/retrieval-internals.md)."""
_MAX_CODE = 127


@dataclass(frozen=True, slots=True)
class Digest:
    """A kind of digest. The last dimension is ``parts`` times the head's.

    ``mean``: the mean key (openGauss RetrievalKV, ShadowKV), whose score is the mean logit.
    ``bounds``: maximum and minimum of every coordinate (Quest), whose score bounds every logit
    above.
    """

    name: str
    parts: int

    def of_keys(self, keys: torch.Tensor) -> torch.Tensor:
        """``[..., tokens, dim]`` -> float32 ``[..., parts * dim]``."""
        if self.parts == 1:
            return keys.float().mean(-2)
        return torch.cat([keys.amax(-2), keys.amin(-2)], -1).float()

    def of_query(self, query: torch.Tensor) -> torch.Tensor:
        """``[..., dim]`` -> ``[..., parts * dim]`` of the same dtype."""
        if self.parts == 1:
            return query
        return torch.cat([query.clamp(min=0), query.clamp(max=0)], -1)


DIGESTS: Mapping[str, Digest] = {
    kind.name: kind for kind in (Digest("mean", 1), Digest("bounds", 2))
}


def digests_of(kind: Digest, keys: torch.Tensor, tokens: int) -> torch.Tensor:
    """Digests of every ``tokens`` keys: ``[..., block, dim]`` -> ``[..., block/tokens, width]``."""
    return kind.of_keys(keys.reshape(*keys.shape[:-2], -1, tokens, keys.shape[-1]))


@dataclass(frozen=True, slots=True)
class Layout:
    """The rows of a block: ``coarse`` ones, by which a search narrows, then ``fine`` ones of fewer
    keys each. All are ``kind.parts`` times a head wide."""

    kind: Digest
    coarse: int
    fine: int

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
        """Number of ``blocks`` whose fine rows are read to find ``count``."""
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


def coded_width(width: int, whole: int = 1) -> int:
    """Bytes of a row of ``width`` coordinates: a multiple of ``whole``."""
    return -(-(width + SCALE_BYTES) // whole) * whole


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
    """What coded rows stand for: float32 ``[..., width]``."""
    return coded[..., :-SCALE_BYTES].float() * scales_in(coded)


def scales_in(coded: torch.Tensor) -> torch.Tensor:
    """The scales of coded rows: float32 ``[..., 1]``."""
    if coded.is_cpu and all(step % SCALE_BYTES == 0 for step in coded.stride()[:-1]):
        return coded.view(torch.float32)[..., -1:]
    return coded[..., -SCALE_BYTES:].contiguous().view(torch.float32)


def scales_of_maxima(most: torch.Tensor) -> torch.Tensor:
    """The scale under which the largest coordinate gets the largest code."""
    # Divides by a tensor: a GPU rounds a division by a Python number differently from a CPU.
    codes = torch.full_like(most, _MAX_CODE)
    return (most / codes).clamp(min=torch.finfo(torch.float32).tiny)
