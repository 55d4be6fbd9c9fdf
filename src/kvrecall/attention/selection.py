"""Selects the blocks that a sequence attends to in a step: the first and last ones, and of those
between them the ones whose digests are most similar to the query, per KV head, where that pays.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch

from kvrecall.attention.digest import SCALE_BYTES, Digest, Layout, scales_in, scales_of_maxima
from kvrecall.attention.kernels.int8 import PackedRows
from kvrecall.attention.settings import Regime, RetrievalSettings

OVERHEAD_BYTES = 8 * 2**20
"""Cost of preparing one sequence's selection in a layer, in bytes of KV read in that time: half a
millisecond at 16 GB/s (docs/retrieval.md)."""

LAUNCHES = 2
"""Kernels of a sparse layer on a device in every decode step: the choice of its blocks, and
attention to them (tests/engines/vllm/attention/test_launches.py counts them)."""

LAUNCHES_A_BLOCK = 1
"""More of them in a step in which a block fills: its digests."""


@dataclass(frozen=True, slots=True)
class DeviceSpeed:
    """What sparse attention costs a device beside what it reads, and how fast that is.

    ``launch_s``: seconds of a small kernel behind others, from its launch to the next one's;
    ``bandwidth``: bytes a second that a kernel reads. By default those of an H100: 3.35 TB/s, of
    which a kernel gets nine tenths; stated, not measured.
    """

    launch_s: float = 5e-6
    bandwidth: float = 3.0e12

    def overhead_bytes(self, block_size: int) -> int:
        """Bytes of KV read in the time of a sparse layer's launches: a power of two, so that one
        start decides as the next, though they measure numbers that differ by a third."""
        launches = LAUNCHES + LAUNCHES_A_BLOCK / block_size
        return 1 << (math.ceil(launches * self.launch_s * self.bandwidth) - 1).bit_length()


@dataclass(frozen=True, slots=True)
class Split:
    """Blocks ``[0, init)`` and ``[local, blocks)`` are always attended to, and ``chosen`` of those
    between. ``last_tokens``: tokens in the last block, 1 to ``block_size``."""

    blocks: int
    init: int
    local: int
    chosen: int
    last_tokens: int
    block_size: int

    @property
    def middle(self) -> int:
        """Blocks to select from."""
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
    blocks = -(-tokens // block_size)
    init = min(-(-settings.init_tokens // block_size), blocks)
    local = max(0, tokens - settings.local_tokens) // block_size
    local = max(local, init)
    middle = local - init
    chosen = min(middle, max(math.ceil(middle * settings.topk_share), settings.fewest_blocks))
    last_tokens = tokens - (blocks - 1) * block_size
    return Split(blocks, init, local, chosen, last_tokens, block_size)


def slots_of(split: Split, offloaded: int, settings: RetrievalSettings) -> tuple[int, int]:
    """Minimum number of device slots for a sequence with that many offloaded middle blocks, and the
    preferred number, which also keeps blocks of earlier steps."""
    spare = math.ceil(split.middle * settings.cache_share)
    return min(offloaded, split.chosen), min(offloaded, split.chosen + spare)


@dataclass(frozen=True, slots=True)
class Gate:
    """Whether sparse attention is expected to be faster than dense. ``token_bytes``: keys and
    values of a token, in one layer. ``overhead_bytes``: bytes of them read in the time that
    preparing a sequence's selection takes. ``narrows``: as of ``settings.layout``."""

    settings: RetrievalSettings
    token_bytes: int
    overhead_bytes: int = OVERHEAD_BYTES
    narrows: bool = True

    def sparse_from(self, block_size: int, most: int) -> int | None:
        """The least number of tokens from which on all sequences of up to ``most`` tokens pass, of
        whole blocks unless the boundary decides; None if there is none."""

        def passes(tokens: int) -> bool:
            is_dense = self.settings.regime(tokens, tokens) is Regime.DENSE
            return not is_dense and self.passes(tokens, split_of(tokens, block_size, self.settings))

        least = most if passes(most) else None
        for tokens in range(most - most % block_size, block_size - 1, -block_size):
            if not passes(tokens):
                break
            least = tokens
        boundary = self.settings.dense_boundary
        if least is not None and 0 < least - boundary < block_size and passes(boundary):
            return boundary
        return least

    def passes(self, tokens: int, split: Split) -> bool:
        """Whether there are blocks to select from and sparse attention reads enough less than dense
        to be worth its overhead. False if all blocks would be selected, gate or not, unless the
        share is 1."""
        if not split.middle:
            return False
        if split.chosen == split.middle and self.settings.topk_share < 1:
            return False
        if not self.settings.gate:
            return True
        layout = self.settings.layout(split.block_size, self.narrows)
        scored = layout.scored(split.middle, split.chosen) * layout.kind.parts / 2
        return split.attended_tokens + scored + self.overhead_bytes / self.token_bytes < tokens


class CodedQuery:
    """A digest's queries ``[heads, group, width]``, rounded as rows are: int8 ``codes`` of that
    shape, float32 ``scales`` ``[heads, group, 1]``."""

    def __init__(self, point: torch.Tensor) -> None:
        point = point.float()
        self.scales = scales_of_maxima(point.abs().amax(-1, keepdim=True))
        self.codes = (point / self.scales).round_().to(torch.int8)

    @cached_property
    def packed(self) -> PackedRows:
        return PackedRows(self.codes)


def best_products(
    query: CodedQuery,
    coded: torch.Tensor,
    scale: float = 1.0,
    places: torch.Tensor | None = None,
) -> torch.Tensor:
    """For each block the largest of its rows' products with the query, times ``scale``: float32
    ``[heads, group, blocks]``, the same to the bit on every device.

    ``coded``: int8 ``[heads, blocks, rows, width + 4]``. ``places``: int64 ``[heads, count]``, only
    of these blocks.
    """
    scales = query.scales * scale
    if places is not None:
        coded = coded[torch.arange(len(coded), device=coded.device)[:, None], places]
    heads, blocks, rows, _ = coded.shape
    sums = query.packed.products(coded.flatten(1, 2)[..., :-SCALE_BYTES])
    best = _best_rows(sums.view(heads, blocks, rows, -1)) if blocks else sums
    return best.transpose(1, 2) * (scales * scales_in(coded[:, :, 0]).transpose(1, 2))


def _best_rows(sums: torch.Tensor) -> torch.Tensor:
    """``[heads, blocks, rows, group]`` -> ``[heads, blocks, group]``, of the largest."""
    heads, blocks, rows, group = sums.shape
    while rows % 2 == 0:  # twice as fast on a CPU as amax along that dimension
        rows //= 2
        halves = sums.view(heads, blocks, 2, rows * group)
        sums = torch.maximum(halves[:, :, 0], halves[:, :, 1])
    return sums.view(heads, blocks, rows, group).amax(2)


class Selector(ABC):
    """Selects among candidate blocks of one sequence, in one layer. In plain torch: on a CPU
    ``kernels.search`` finds the same blocks faster."""

    @abstractmethod
    def choose(
        self,
        query: torch.Tensor,
        runs: Sequence[torch.Tensor],
        count: int,
        scale: float,
        coarse: Sequence[torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """The ``count`` blocks most similar to the query, in no order: int64 ``[kv_heads, count]``.

        ``query``: ``[kv_heads, group, dim]``. ``runs``: the candidates' digests
        ``[kv_heads, blocks, rows a block, width]``, coded (int8) or not, any number of tensors of
        any number of blocks, together at least ``count``. ``scale``: that of the attention.
        ``coarse``: a copy of the runs' coarse rows, side by side, which is faster to read.
        """


class ExactSelector(Selector):
    """A matrix product over all digests.

    To a query head a block is as similar as its best digest. Each head's blocks are made a
    distribution; those of a KV head's group are averaged (FreeKV).
    """

    def __init__(self, digest: Digest, rows: slice = slice(None)) -> None:
        """``rows``: the rows of a block to read."""
        self._digest = digest
        self._rows = rows

    def choose(
        self,
        query: torch.Tensor,
        runs: Sequence[torch.Tensor],
        count: int,
        scale: float,
        coarse: Sequence[torch.Tensor] | None = None,
    ) -> torch.Tensor:
        point = self._digest.of_query(query)
        coded = CodedQuery(point)
        parts = []
        for run in runs:
            rows = run[:, :, self._rows]
            if rows.dtype is torch.int8:
                parts.append(best_products(coded, rows, scale))
            else:
                products = torch.einsum("hgw,hbrw->hgbr", point.float(), rows.float())
                parts.append(products.amax(-1) * scale)
        return best_of(parts, count)


class NarrowingSelector(Selector):
    """Reads coarse digests of all blocks first, and fine ones only of the best of these.

    Its selection almost always equals that of an ExactSelector over the fine ones
    (docs/digest-study.md), in the time of a search over fewer digests. Coded digests only.
    """

    def __init__(self, layout: Layout) -> None:
        """``layout``: with coarse rows."""
        self._layout = layout

    def choose(
        self,
        query: torch.Tensor,
        runs: Sequence[torch.Tensor],
        count: int,
        scale: float,
        coarse: Sequence[torch.Tensor] | None = None,
    ) -> torch.Tensor:
        few = self._layout.narrowed(sum(run.shape[1] for run in runs), count)
        point = self._layout.kind.of_query(query)
        coded = CodedQuery(point)
        if coarse is None:
            coarse = [run[:, :, self._layout.coarse_rows] for run in runs]
        near = best_of([best_products(coded, run, scale) for run in coarse], few)
        fine = [run[:, :, self._layout.fine_rows] for run in runs]
        if len(fine) == 1:
            return near.gather(1, best_of([best_products(coded, fine[0], scale, near)], count))
        return torch.stack(
            [
                self._among(CodedQuery(point[head][None]), head, blocks, fine, count, scale)
                for head, blocks in enumerate(near)
            ]
        )

    def _among(
        self,
        coded: CodedQuery,
        head: int,
        near: torch.Tensor,
        fine: Sequence[torch.Tensor],
        count: int,
        scale: float,
    ) -> torch.Tensor:
        """The best of blocks ``near`` of one head, which are in several runs."""
        ends = list(accumulate(run.shape[1] for run in fine))
        order, products = [], []
        for run, first, end in zip(fine, [0, *ends], ends, strict=False):
            here = near[(near >= first) & (near < end)]
            order.append(here)
            products.append(best_products(coded, run[head][None], scale, here[None] - first))
        return torch.cat(order)[best_of(products, count)[0]]


def selector_of(layout: Layout) -> Selector:
    """The selector for blocks with these rows."""
    return NarrowingSelector(layout) if layout.coarse else ExactSelector(layout.kind)


def best_of(logits: Sequence[torch.Tensor], count: int) -> torch.Tensor:
    """``logits`` of the blocks: ``[kv_heads, group, blocks]`` for each run."""
    whole = logits[0] if len(logits) == 1 else torch.cat(list(logits), 2)
    weights = whole.softmax(-1).mean(1)
    return weights.topk(count, dim=-1, sorted=False).indices
