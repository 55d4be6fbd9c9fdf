"""Choosing blocks: a search for the digests most similar to the query, per KV head."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch.nn import functional

from kvrecall.retrieval.digest import Digest


class Selector(ABC):
    """Chooses among candidate blocks of one sequence, in one layer."""

    @abstractmethod
    def choose(
        self, query: torch.Tensor, runs: Sequence[torch.Tensor], count: int, scale: float
    ) -> torch.Tensor:
        """The ``count`` blocks most similar to the query: int64 ``[kv_heads, count]``, indices
        over the candidates, every one at most once, in no order.

        ``query``: ``[kv_heads, group, dim]``. ``runs``: the candidates' digests
        ``[kv_heads, blocks, digests a block, width]``, any number of tensors of any number of
        blocks, together at least ``count``. ``scale``: that of the attention.
        """

    @abstractmethod
    def rank(
        self, query: torch.Tensor, runs: Sequence[torch.Tensor], count: int, scale: float
    ) -> torch.Tensor:
        """As ``choose``, the most similar first."""


class ExactSelector(Selector):
    """A matrix product over all digests.

    Each query head's scores are made a distribution over all digests of the candidates; those of
    a KV head's group are averaged (FreeKV), and a block counts as much as its best digest.
    """

    def __init__(self, digest: Digest) -> None:
        self._digest = digest

    def choose(
        self, query: torch.Tensor, runs: Sequence[torch.Tensor], count: int, scale: float
    ) -> torch.Tensor:
        return self._best(query, runs, scale).topk(count, dim=-1, sorted=False).indices

    def rank(
        self, query: torch.Tensor, runs: Sequence[torch.Tensor], count: int, scale: float
    ) -> torch.Tensor:
        return self._best(query, runs, scale).topk(count, dim=-1).indices

    def _best(
        self, query: torch.Tensor, runs: Sequence[torch.Tensor], scale: float
    ) -> torch.Tensor:
        """What each block counts: ``[kv_heads, blocks]``."""
        heads, _, per_block, _ = runs[0].shape
        point = self._digest.of_query(query).to(runs[0].dtype)
        parts = [_products(point, run.flatten(1, 2)) for run in runs]
        logits = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        mass = (logits.float() * scale).softmax(-1).mean(1)
        return mass.view(heads, -1, per_block).amax(-1)


def _products(point: torch.Tensor, digests: torch.Tensor) -> torch.Tensor:
    """``[heads, group, width]`` by ``[heads, digests, width]``: ``[heads, group, digests]``.

    Both forms are the same product. On a CPU a batched one in half precision is eight times
    slower than one a head, and in single precision the digests had better come first.
    """
    if point.dtype is torch.float32:
        return torch.bmm(digests, point.transpose(1, 2)).transpose(1, 2)
    pairs = zip(point, digests, strict=True)
    return torch.stack([functional.linear(one, many) for one, many in pairs])
