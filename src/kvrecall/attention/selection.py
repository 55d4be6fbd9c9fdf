"""Choosing blocks: a search for the digests most similar to the query, per KV head."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch.nn import functional

from kvrecall.attention import coding
from kvrecall.attention.coding import CodedQuery, best_products, coded_products
from kvrecall.attention.digest import Digest
from kvrecall.attention.kernels.native import PackedQuery, codes_natively, native_search
from kvrecall.attention.layout import Layout
from kvrecall.attention.settings import RetrievalSettings


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


class Point:
    """Queries ``[kv_heads, group, dim]`` as digests see them, in what forms a search asks for."""

    def __init__(self, digest: Digest, query: torch.Tensor) -> None:
        self._digest = digest
        self._query = query
        self._packed: tuple[float, PackedQuery] | None = None

    @cached_property
    def plain(self) -> torch.Tensor:
        """``[kv_heads, group, width]``."""
        return self._digest.of_query(self._query)

    @cached_property
    def coded(self) -> CodedQuery:
        return CodedQuery.of(self.plain)

    def of(self, heads: slice) -> Point:
        """Those of some KV heads."""
        return Point(self._digest, self._query[heads])

    def best(
        self, rows: torch.Tensor, scale: float, places: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See ``best_products``."""
        _, group, dim = self._query.shape
        native = None
        if not coding.on_device(rows) and codes_natively(dim, self._digest.split):
            native = native_search(group, self._digest.parts * dim)
        if native is None or rows.stride(-1) != 1:
            return best_products(self.coded, rows, scale, places)
        if self._packed is None or self._packed[0] != scale:
            self._packed = scale, native.code(self._query, scale, self._digest.split is True)
        return native.best(self._packed[1], rows, places)


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
        coarse: Sequence[torch.Tensor] | None = None,
    ) -> Choice:
        """The ``count`` blocks most similar to the query, and the ``ahead`` next to them.

        ``query``: ``[kv_heads, group, dim]``. ``runs``: the candidates' digests
        ``[kv_heads, blocks, rows a block, width]``, coded (int8) or not, any number of tensors of
        any number of blocks, together at least ``count + ahead``. ``scale``: that of the attention.
        ``coarse``: the runs' coarse rows once more, side by side: reading them out of all rows
        takes as long as reading several times as many.
        """


class ExactSelector(Selector):
    """A matrix product over all digests.

    To a query head a block is as similar as its best digest. Each head's blocks are made a
    distribution; those of a KV head's group are averaged (FreeKV).
    """

    def __init__(self, digest: Digest, rows: slice = slice(None), target_mass: float = 1.0) -> None:
        """``rows``: which of a block's rows are looked at. ``target_mass``: as many blocks are
        taken as hold this share of the candidates' estimated attention; 1: all."""
        self._digest = digest
        self._rows = rows
        self._every_row = target_mass < 1
        self._target = target_mass

    def choose(
        self,
        query: torch.Tensor,
        runs: Sequence[torch.Tensor],
        count: int,
        scale: float,
        ahead: int = 0,
        coarse: Sequence[torch.Tensor] | None = None,
    ) -> Choice:
        point = self.point_of(query)
        parts = [self.products(point, run, scale) for run in runs]
        return self.among(parts[0] if len(parts) == 1 else torch.cat(parts, 2), count, ahead)

    def point_of(self, query: torch.Tensor) -> Point:
        """What ``products`` are taken of."""
        return Point(self._digest, query)

    def products(
        self, point: Point, run: torch.Tensor, scale: float, places: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Scaled products ``[kv_heads, group, blocks, rows]`` with a run's digests, of each block's
        rows only the best where no more is needed. ``places``: int64 ``[kv_heads, blocks]``, only
        with those of these blocks."""
        digests = run[:, :, self._rows]
        if digests.dtype is torch.int8 and not self._every_row:
            return point.best(digests, scale, places).unsqueeze(-1)
        if places is not None:
            digests = digests[torch.arange(len(digests))[:, None], places]
        heads, blocks, rows, _ = digests.shape
        return _products(point, digests, scale).view(heads, -1, blocks, rows)

    def among(self, logits: torch.Tensor, count: int, ahead: int = 0) -> Choice:
        """As ``choose``, by scaled products ``[kv_heads, group, blocks, rows]``."""
        best = logits.squeeze(-1) if logits.shape[-1] == 1 else logits.amax(-1)
        weights = best.softmax(-1).mean(1)
        masses = None
        if self._every_row:
            masses = logits.flatten(2).softmax(-1).mean(1).view(*weights.shape, -1).sum(-1)
        return _best(weights, masses, count, ahead, self._target)


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
        coarse: Sequence[torch.Tensor] | None = None,
    ) -> Choice:
        few = self._layout.narrowed(sum(run.shape[1] for run in runs), count + ahead)
        point = self._wide.point_of(query)
        if coarse is None:
            coarse = [run[:, :, self._layout.coarse_rows] for run in runs]
        products = [self._wide.products(point, run, scale) for run in coarse]
        found = products[0] if len(products) == 1 else torch.cat(products, 2)
        near = self._wide.among(found, few).blocks
        if len(runs) == 1:
            logits = self._close.products(point, runs[0], scale, near)
        else:
            near, logits = self._by_runs(point, runs, near, scale)
        best = self._close.among(logits, count, ahead)
        return Choice(near.gather(1, best.blocks), best.taken, near.gather(1, best.later))

    def _by_runs(
        self, point: Point, runs: Sequence[torch.Tensor], near: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """These blocks of each head, run by run, and their products."""
        ends = list(accumulate(run.shape[1] for run in runs))
        spans = list(zip(runs, [0, *ends], ends, strict=False))
        order, products = [], []
        for head, blocks in enumerate(near):
            heads = slice(head, head + 1)
            here = [blocks[(blocks >= first) & (blocks < end)] for _, first, end in spans]
            order.append(torch.cat(here))
            own = point.of(heads)
            parts = [
                self._close.products(own, run[heads], scale, some[None] - first)
                for some, (run, first, _) in zip(here, spans, strict=True)
            ]
            products.append(torch.cat(parts, 2))
        return torch.stack(order), torch.cat(products)


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


def _products(point: Point, digests: torch.Tensor, scale: float) -> torch.Tensor:
    """With ``[heads, blocks, rows, width]``, times ``scale``: float32 ``[heads, group,
    blocks * rows]``.

    All forms are the same product. On a CPU a batched one in half precision is eight times
    slower than one a head, and in single precision the digests had better come first.
    """
    if digests.dtype is torch.int8:
        return coded_products(point.coded, digests, scale)
    plain, digests = point.plain.to(digests.dtype), digests.flatten(1, 2)
    if plain.dtype is torch.float32:
        return torch.bmm(digests, plain.transpose(1, 2)).transpose(1, 2) * scale
    pairs = zip(plain, digests, strict=True)
    return torch.stack([functional.linear(one, many) for one, many in pairs]).float() * scale
