"""Sequences packed into a KV cache by vLLM's own kernel, without an engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from kvrecall.attention.digest import encode
from kvrecall.attention.selection import choose, split_of
from kvrecall.attention.settings import RetrievalSettings
from kvrecall.engines.vllm.attention.activity import Activity, HeatTotals
from kvrecall.engines.vllm.attention.base import AttentionKernel, AttentionParameters, KernelShape
from kvrecall.engines.vllm.attention.cpu import CpuKernel, attend_in_place, write_tokens
from kvrecall.engines.vllm.attention.group import RetrievalGroup
from kvrecall.engines.vllm.attention.offloaded import OffloadedSequence
from kvrecall.engines.vllm.attention.step import BatchRow, StepPlanner
from kvrecall_lab.engines.decode import isa_of

BLOCK = 128


def shape_of(
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 64,
    dtype: torch.dtype = torch.float32,
    fp8: torch.dtype | None = None,
    sinks: bool = False,
    block: int = BLOCK,
) -> KernelShape:
    return KernelShape(heads, kv_heads, dim, block, dtype, isa_of(dtype, dim, block), fp8, sinks)


@dataclass(frozen=True, slots=True)
class Sequence:
    """Keys and values ``[tokens, kv_heads, dim]``, the last token's query ``[heads, dim]``."""

    keys: torch.Tensor
    values: torch.Tensor
    query: torch.Tensor
    block_ids: torch.Tensor


class Bench:
    """A one-layer KV cache, and attention to it."""

    def __init__(
        self,
        shape: KernelShape,
        settings: RetrievalSettings,
        blocks: int,
        terms: AttentionParameters | None = None,
        note: Callable[[Any, Any, int], None] | None = None,
    ) -> None:
        self.shape = shape
        self.terms = terms or AttentionParameters(shape.head_dim**-0.5)
        size = (blocks, shape.kv_heads, shape.block_size, 2 * shape.head_dim)
        self.cache = torch.full(size, 3).to(shape.stored)
        self.activity = Activity()
        self.kernel = self.make_kernel(shape)
        self.group = RetrievalGroup(self.activity, HeatTotals(), self.kernel)
        self.freshness = self.group.freshness
        self.planner = StepPlanner(settings, self.kernel, self.freshness, self.activity)
        self.layer = self.kernel.layer("layer", settings, self.activity, note)
        self.whole = partial(attend_in_place, shape, "layer")
        self.group.add("layer", self.layer)
        self.free = torch.randperm(blocks - 1) + 1
        self._used = 0

    def make_kernel(self, shape: KernelShape) -> AttentionKernel:
        return CpuKernel(shape)

    def sequence(self, tokens: int, in_order: bool = False) -> Sequence:
        """Writes a random sequence into blocks of its own."""
        shape = self.shape
        ids = self.take(-(-tokens // shape.block_size))
        ids = ids.sort().values if in_order else ids
        size = (tokens, shape.kv_heads, shape.head_dim)
        keys, values = torch.randn(size), torch.randn(size)
        query = torch.randn(shape.heads, shape.head_dim)
        made = Sequence(*(t.to(shape.dtype) for t in (keys, values, query)), ids)
        self.write(made, 0, tokens)
        return made

    def take(self, count: int) -> torch.Tensor:
        """Takes free blocks."""
        self._used += count
        return self.free[self._used - count : self._used]

    def write(self, sequence: Sequence, first: int, end: int) -> None:
        """Writes tokens ``[first, end)`` of the sequence."""
        at, size = torch.arange(first, end), self.shape.block_size
        slots = sequence.block_ids[at // size] * size + at % size
        keys, values = sequence.keys[first:end], sequence.values[first:end]
        both = keys.contiguous(), values.contiguous()
        scales = self.terms.key_scale, self.terms.value_scale
        write_tokens(self.shape, self.cache, *both, slots, scales)
        self.freshness.wrote_blocks((slots // size).tolist())

    def decode(self, *sequences: Sequence, lengths: tuple[int, ...] = ()) -> torch.Tensor:
        """Sparse attention of every sequence's query: ``[sequences, heads, dim]``."""
        tokens = lengths or tuple(len(sequence.keys) for sequence in sequences)
        width = max(len(sequence.block_ids) for sequence in sequences)
        table = torch.zeros(len(sequences), width, dtype=torch.int32)
        for row, sequence in zip(table, sequences, strict=True):
            row[: len(sequence.block_ids)] = sequence.block_ids
        rows = [BatchRow(1, count, False) for count in tokens]
        return self.attend(rows, table, torch.stack([sequence.query for sequence in sequences]))

    def verify(self, sequence: Sequence, queries: torch.Tensor, length: int) -> torch.Tensor:
        """Sparse attention, in one step, of the last ``len(queries)`` tokens of a sequence of that
        length: a decoded one and drafts. ``queries``: ``[tokens, heads, dim]``."""
        row = BatchRow(len(queries), length, False)
        return self.attend([row], sequence.block_ids.to(torch.int32)[None], queries)

    def decode_offloaded(
        self, sequence: Sequence, offloaded: OffloadedSequence, *queries: torch.Tensor
    ) -> list[torch.Tensor]:
        """Sparse attention of these queries, or the sequence's own, each ``[1, heads, dim]``."""
        table = sequence.block_ids.to(torch.int32)[None]
        step = self.planner.plan([BatchRow(1, len(sequence.keys), False)], table, {0: offloaded})
        assert step is not None
        return [
            self.layer.attend(query[None], self.cache, step, self.terms)
            for query in queries or (sequence.query,)
        ]

    def attend(
        self, rows: list[BatchRow], table: torch.Tensor, queries: torch.Tensor
    ) -> torch.Tensor:
        step = self.planner.plan(rows, table)
        assert step is not None
        assert len(step.sequences) == len(queries), "not all of them were attended to sparsely"
        self.layer.digest(self.cache, step.stale)
        return self.layer.attend(queries, self.cache, step, self.terms)


def attended(
    query: torch.Tensor,
    keys: torch.Tensor,
    block_size: int,
    settings: RetrievalSettings,
    narrows: bool = True,
) -> torch.Tensor:
    """The tokens attended to: bool ``[kv_heads, tokens]``. ``query``: ``[heads, dim]`` of one
    token; ``keys``: ``[tokens, kv_heads, dim]``; ``narrows``: as of ``settings.layout``."""
    tokens, kv_heads, dim = keys.shape
    split = split_of(tokens, block_size, settings)
    mask = torch.zeros(kv_heads, split.blocks, dtype=torch.bool)
    mask[:, : split.init] = mask[:, split.local :] = True
    if split.chosen:
        layout = settings.layout(block_size, narrows)
        middle = keys[split.init * block_size : split.local * block_size].transpose(0, 1)
        digests = encode(layout.rows_of(middle.reshape(kv_heads, split.middle, block_size, dim)))
        grouped = query.view(kv_heads, -1, dim)
        chosen = choose(layout, grouped, digests, split.chosen, dim**-0.5)
        mask.scatter_(1, chosen + split.init, True)
    return mask.repeat_interleave(block_size, dim=1)[:, :tokens]
