"""Selects the blocks that a sequence attends to in a step: the first and last ones, and of those
between them the ones whose digests are most similar to the query, per KV head, where that pays.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from kvrecall.attention.digest import SCALE_BYTES, Layout, scales_in, scales_of_maxima
from kvrecall.attention.settings import Regime, RetrievalSettings

OVERHEAD_BYTES = 8 * 2**20
"""Cost of preparing one sequence's selection in a layer, in bytes of KV read in that time: half a
millisecond at 16 GB/s (docs/retrieval-internals.md)."""

_EXACT_IN_FLOAT = (1 << 24) // 127**2
"""Number of products of two codes that add up in single precision without rounding."""

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
    def whole(self) -> Split:
        """The same sequence, all of which is attended to."""
        return replace(self, init=self.blocks, local=self.blocks, chosen=0)

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


def choose(
    layout: Layout, query: torch.Tensor, rows: torch.Tensor, count: int, scale: float
) -> torch.Tensor:
    """The ``count`` blocks most similar to the query, in no order: int64 ``[kv_heads, count]``. In
    plain torch: on a CPU ``kernels.search`` finds the same blocks faster.

    To a query head a block is as similar as its best digest. Each head's blocks are made a
    distribution; those of a KV head's group are averaged (FreeKV). With coarse rows only the best
    blocks by these are compared by their fine rows, which almost always finds what all fine rows
    would (docs/retrieval-internals.md).

    ``query``: ``[kv_heads, group, dim]``. ``rows``: the candidates' digests, int8 ``[kv_heads,
    blocks, rows, width + 4]``, of at least ``count`` blocks. ``scale``: that of the attention.
    """
    coded = code_query(layout.kind.of_query(query))
    if not layout.coarse:
        return best_of(best_products(coded, rows, scale), count)
    coarse = best_products(coded, rows[:, :, layout.coarse_rows], scale)
    near = best_of(coarse, layout.narrowed(rows.shape[1], count))
    heads = torch.arange(len(rows), device=rows.device)[:, None]
    fine = best_products(coded, rows[heads, near][:, :, layout.fine_rows], scale)
    return near.gather(1, best_of(fine, count))


def code_query(point: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A digest's queries ``[heads, group, width]``, rounded as rows are: int8 codes of that shape,
    float32 scales ``[heads, group, 1]``."""
    point = point.float()
    scales = scales_of_maxima(point.abs().amax(-1, keepdim=True))
    return (point / scales).round_().to(torch.int8), scales


def best_products(
    query: tuple[torch.Tensor, torch.Tensor], coded: torch.Tensor, scale: float = 1.0
) -> torch.Tensor:
    """For each block the largest of its rows' products with the query (of ``code_query``), times
    ``scale``: float32 ``[heads, group, blocks]``, the same to the bit on every device.

    ``coded``: int8 ``[heads, blocks, rows, width + 4]``.
    """
    codes, scales = query
    heads, blocks, rows, _ = coded.shape
    sums = products(codes, coded.flatten(1, 2)[..., :-SCALE_BYTES])
    best = sums.view(heads, blocks, rows, codes.shape[1]).amax(2)
    return best.transpose(1, 2) * (scales * scale * scales_in(coded[:, :, 0]).transpose(1, 2))


def products(codes: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Of int8 ``[heads, group, width]`` with int8 ``[heads, count, width]``: int32 ``[heads, count,
    group]``, exact on any device, as parts of the sums are exact in single precision."""
    both = (torch.split(rows, _EXACT_IN_FLOAT, -1), torch.split(codes, _EXACT_IN_FLOAT, -1))
    parts = zip(*both, strict=True)
    sums = [torch.bmm(one.float(), other.float().transpose(1, 2)).int() for one, other in parts]
    return torch.stack(sums).sum(0, dtype=torch.int32)


def best_of(logits: torch.Tensor, count: int) -> torch.Tensor:
    """``logits`` of the blocks: ``[kv_heads, group, blocks]``."""
    weights = logits.softmax(-1).mean(1)
    return weights.topk(count, dim=-1, sorted=False).indices
