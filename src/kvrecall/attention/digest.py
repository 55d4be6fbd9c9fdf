"""Digests: short vectors that stand for the keys of a few tokens.

Every kind is an inner product: ``of_query(q) @ of_keys(keys)`` says how similar the tokens are to
the query, so that one search serves all of them. Keys are indexed after rotary embedding.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import torch


class Digest(ABC):
    """A kind of digest. Pure functions; the last dimension is ``parts`` times the head's."""

    name: ClassVar[str]
    parts: ClassVar[int]

    @abstractmethod
    def of_keys(self, keys: torch.Tensor) -> torch.Tensor:
        """``[..., tokens, dim]`` -> float32 ``[..., parts * dim]``."""

    @abstractmethod
    def of_query(self, query: torch.Tensor) -> torch.Tensor:
        """``[..., dim]`` -> ``[..., parts * dim]`` of the same dtype."""


class Mean(Digest):
    """The mean key (openGauss RetrievalKV, ShadowKV): the score is the mean logit."""

    name = "mean"
    parts = 1

    def of_keys(self, keys: torch.Tensor) -> torch.Tensor:
        return keys.float().mean(-2)

    def of_query(self, query: torch.Tensor) -> torch.Tensor:
        return query


class Bounds(Digest):
    """Maximum and minimum of every coordinate (Quest): the score bounds every logit above."""

    name = "bounds"
    parts = 2

    def of_keys(self, keys: torch.Tensor) -> torch.Tensor:
        return torch.cat([keys.amax(-2), keys.amin(-2)], -1).float()

    def of_query(self, query: torch.Tensor) -> torch.Tensor:
        return torch.cat([query.clamp(min=0), query.clamp(max=0)], -1)


DIGESTS: Mapping[str, Digest] = {kind.name: kind for kind in (Mean(), Bounds())}


def digests_of(kind: Digest, keys: torch.Tensor, tokens: int) -> torch.Tensor:
    """Digests of every ``tokens`` keys: ``[..., block, dim]`` -> ``[..., block/tokens, width]``."""
    return kind.of_keys(keys.reshape(*keys.shape[:-2], -1, tokens, keys.shape[-1]))
