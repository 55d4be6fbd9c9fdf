"""Choosing blocks: a search for the digests most similar to the query, per KV head."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from kvrecall.retrieval.coding import coded_products
from kvrecall.retrieval.digest import Digest
from kvrecall.retrieval.layout import Layout
from kvrecall.retrieval.settings import RetrievalSettings


@dataclass(frozen=True, slots=True)
class Choice:
    """Blocks of the candidates, each at most once a head, int64.

    ``blocks``: ``[kv_heads, count]``, the most similar ones, in no order. ``taken``: bool of the
    same shape, those that hold the target mass, at least one a head; None: all of them. ``later``:
    ``[kv_heads, ahead]``, those next in similarity, the more similar first.
    """

    blocks: torch.Tensor
    taken: torch.Tensor | None
    later: torch.Tensor


class Selector(ABC):
    """Chooses among candidate blocks of one sequence, in one layer."""

    @abstractmethod
    def choose(
        self,
        query: torch.Tensor,
        runs: Sequence[torch.Tensor],
        count: int,
        scale: float,
        ahead: int = 0,
    ) -> Choice:
        """The ``count`` blocks most similar to the query, and the ``ahead`` next to them.

        ``query``: ``[kv_heads, group, dim]``. ``runs``: the candidates' digests
        ``[kv_heads, blocks, rows a block, width]``, coded (int8) or not, any number of tensors of
        any number of blocks, together at least ``count + ahead``. ``scale``: that of the attention.
        """


class ExactSelector(Selector):
    """A matrix product over all digests.

    Each query head's scores are made a distribution over all digests of the candidates; those of
    a KV head's group are averaged (FreeKV), and a block counts as much as its best digest.
    """

    def __init__(self, digest: Digest, rows: slice = slice(None), target_mass: float = 1.0) -> None:
        """``rows``: which of a block's rows are looked at. ``target_mass``: as many blocks are
        taken as hold this share of the candidates' estimated attention; 1: all."""
        self._digest = digest
        self._rows = rows
        self._target = target_mass

    def choose(
        self,
        query: torch.Tensor,
        runs: Sequence[torch.Tensor],
        count: int,
        scale: float,
        ahead: int = 0,
    ) -> Choice:
        point = self._digest.of_query(query)
        parts = [_products(point, run, scale) for run in runs]
        logits = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        return self.among(logits.view(*logits.shape[:2], -1, runs[0].shape[2]), count, ahead)

    def among(self, logits: torch.Tensor, count: int, ahead: int = 0) -> Choice:
        """As ``choose``, by scaled products ``[kv_heads, group, blocks, rows]``."""
        looked = logits[..., self._rows]
        mass = looked.flatten(2).softmax(-1).mean(1).view(len(looked), *looked.shape[2:])
        best = mass.amax(-1)
        masses = mass.sum(-1) if self._target < 1 else None
        return _best(best, masses, count, ahead, self._target)


class NarrowingSelector(Selector):
    """Looks at coarse digests of all blocks first, and at fine ones only of the best of these.

    What it chooses is almost always what an ExactSelector over the fine ones does
    (docs/digest-study.md), for the time of a search over fewer digests.
    """

    def __init__(self, layout: Layout, target_mass: float = 1.0) -> None:
        """``layout``: with coarse rows."""
        self._layout = layout
        self._wide = ExactSelector(layout.kind)
        self._close = ExactSelector(layout.kind, layout.fine_rows, target_mass)

    def choose(
        self,
        query: torch.Tensor,
        runs: Sequence[torch.Tensor],
        count: int,
        scale: float,
        ahead: int = 0,
    ) -> Choice:
        blocks = sum(run.shape[1] for run in runs)
        few = self._layout.narrowed(blocks, count + ahead)
        coarse = [run[:, :, self._layout.coarse_rows] for run in runs]
        near = self._wide.choose(query, coarse, few, scale).blocks
        point = self._layout.kind.of_query(query)
        heads = [
            _near_products(one, runs, head, at, scale)
            for head, (one, at) in enumerate(zip(point, near, strict=True))
        ]
        near = torch.stack([at for at, _ in heads])
        logits = torch.stack([products for _, products in heads])
        found = self._close.among(logits, count, ahead)
        return Choice(near.gather(1, found.blocks), found.taken, near.gather(1, found.later))


def selector_of(settings: RetrievalSettings, layout: Layout) -> Selector:
    """The one these settings ask for."""
    if layout.coarse:
        return NarrowingSelector(layout, settings.target_mass)
    return ExactSelector(layout.kind, layout.fine_rows, settings.target_mass)


def _best(
    weights: torch.Tensor, masses: torch.Tensor | None, count: int, ahead: int, target: float
) -> Choice:
    """``weights``, ``masses``: of each block, ``[kv_heads, blocks]``."""
    in_order = masses is not None or ahead > 0
    top = weights.topk(count + ahead, dim=-1, sorted=in_order).indices
    blocks, later = top[:, :count], top[:, count:]
    if masses is None:
        return Choice(blocks, None, later)
    held = masses.gather(1, blocks)
    return Choice(blocks, held.cumsum(-1) - held < target, later)


def _near_products(
    point: torch.Tensor,
    runs: Sequence[torch.Tensor],
    head: int,
    blocks: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One head's blocks, run by run, and the products with their digests: ``[group, count, rows]``.
    ``point``: ``[group, width]``; ``blocks``: int64 ``[count]``."""
    order, products, first = [], [], 0
    for run in runs:
        end = first + run.shape[1]
        here = blocks if len(runs) == 1 else blocks[(blocks >= first) & (blocks < end)]
        digests = run[head].index_select(0, here - first)
        order.append(here)
        products.append(_products(point[None], digests[None], scale)[0])
        first = end
    return torch.cat(order), torch.cat(products, -1).view(len(point), len(blocks), -1)


def _products(point: torch.Tensor, digests: torch.Tensor, scale: float) -> torch.Tensor:
    """``[heads, group, width]`` by ``[heads, blocks, rows, width]``, times ``scale``: float32
    ``[heads, group, blocks * rows]``.

    All forms are the same product. On a CPU a batched one in half precision is eight times
    slower than one a head, and in single precision the digests had better come first.
    """
    if digests.dtype is torch.int8:
        return coded_products(point, digests, scale)
    point, digests = point.to(digests.dtype), digests.flatten(1, 2)
    if point.dtype is torch.float32:
        return torch.bmm(digests, point.transpose(1, 2)).transpose(1, 2) * scale
    pairs = zip(point, digests, strict=True)
    return torch.stack([functional.linear(one, many) for one, many in pairs]).float() * scale
