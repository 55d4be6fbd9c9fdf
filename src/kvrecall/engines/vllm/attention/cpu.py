"""vLLM's CPU attention backend with retrieval, by rewritten block tables.

The cache ``[blocks, kv_heads, tokens, 2 * dim]`` is viewed as ``[blocks * kv_heads, 1, ...]``, and
every row becomes a sequence of its own, of one KV head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from vllm import _custom_ops as ops
from vllm import envs
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadataBuilder,
)

from kvrecall.attention.digest import Layout, encode
from kvrecall.attention.kernels.device import Addresses, Piece
from kvrecall.attention.kernels.search import Search
from kvrecall.attention.residency import DeviceResidency, Ints
from kvrecall.attention.selection import OVERHEAD_BYTES
from kvrecall.engines.vllm.attention.backend import RetrievalAttention, RetrievalBuilder
from kvrecall.engines.vllm.attention.offloaded import stride_to
from kvrecall.engines.vllm.attention.step import (
    KernelShape,
    OffloadedRow,
    RowKernel,
    SparseSequence,
    SparseStep,
    Terms,
)
from kvrecall.engines.vllm.compat import config
from kvrecall.engines.vllm.device.base import Batch
from kvrecall.errors import EngineError

_FP8 = {torch.float8_e4m3fn: "fp8_e4m3", torch.float8_e5m2: "fp8_e5m2"}

_AT_ONCE = 64
"""Blocks unpacked at a time while digesting."""

Pack = Callable[[torch.Tensor], torch.Tensor]
"""Packs one block of one head: ``[tokens, dim]`` -> the elements of its half, flat."""


def halves(kv_cache: torch.Tensor, whole: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Key and value cache as the kernel takes them: ``[blocks * kv_heads, 1, tokens, dim]``, or
    ``[blocks, kv_heads, tokens, dim]`` if ``whole``."""
    blocks, kv_heads, block_size, width = kv_cache.shape
    dim, row = width // 2, block_size * width
    heads, steps = ((blocks, kv_heads), (kv_heads * row, row))
    if not whole:
        heads, steps = (blocks * kv_heads, 1), (row, row)
    size, strides, first = (*heads, block_size, dim), (*steps, dim, 1), kv_cache.storage_offset()
    # Of one piece. One operation for each: a decoded token's layers all wait for this.
    keys = kv_cache.as_strided(size, strides, first)
    return keys, kv_cache.as_strided(size, strides, first + row // 2)


def far_halves(
    kv_cache: torch.Tensor, distances: Ints, whole: bool = False
) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    """``halves`` of a cache, and a table for them of what begins so many bytes from its start, in
    it or elsewhere in this process: int32 of the distances' shape.

    A kernel call reads blocks at multiples of one stride from one address, forwards and backwards.
    Here that is the longest stride that leads to all of them. Each must be a whole block, or one of
    a KV head, and they must be as near as ``are_near`` says.
    """
    stride = stride_to(distances)
    keys, values = (
        half[:1].as_strided(
            (1, *half.shape[1:]), (stride // half.element_size(), *half.stride()[1:])
        )
        for half in halves(kv_cache, whole)
    )
    return (keys, values), torch.from_numpy((distances // stride).astype(np.int32))


def schedule(
    shape: KernelShape, seq_lens: torch.Tensor, starts: torch.Tensor, whole: bool = False
) -> torch.Tensor:
    """The kernel's work plan for sequences. ``seq_lens``, ``starts``: int32.

    ``whole``: sequences have all the heads, as in dense attention, instead of one KV head each.
    """
    plan: torch.Tensor = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=len(seq_lens),
        num_heads=shape.heads if whole else shape.group,
        num_kv_heads=shape.kv_heads if whole else 1,
        head_dim=shape.head_dim,
        seq_lens=seq_lens,
        dtype=shape.dtype,
        query_start_loc=starts,
        causal=True,
        sliding_window_size=-1,
        isa=shape.isa,
        enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
        dynamic_causal=None,
        kv_cache_dtype=_stored_as(shape),
    )
    return plan


def _stored_as(shape: KernelShape) -> str:
    """The kernel's name for the type of keys and values in the cache."""
    return "auto" if shape.fp8 is None else _FP8[shape.fp8]


def attend(
    shape: KernelShape,
    query: torch.Tensor,
    caches: tuple[torch.Tensor, torch.Tensor],
    table: torch.Tensor,
    seq_lens: torch.Tensor,
    starts: torch.Tensor,
    plan: torch.Tensor,
    terms: Terms,
    output: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of sequences' last tokens over the blocks in its row of the table. ``query``:
    contiguous ``[tokens, heads, dim]``; ``caches``: keys and values, from ``halves``, with the
    sequences' KV heads; ``table``: int32 ``[sequences, width]``; ``seq_lens``: int32, tokens in
    each row's blocks; ``plan``: of ``schedule``; ``output``: where it is written,
    contiguous. Returns the query's shape."""
    keys, values = caches
    output = torch.empty_like(query) if output is None else output
    ops.cpu_attention_with_kv_cache(
        query=query,
        key_cache=keys,
        value_cache=values,
        output=output,
        query_start_loc=starts,
        seq_lens=seq_lens,
        scale=terms.scale,
        causal=True,
        alibi_slopes=None,
        sliding_window=-1,
        block_table=table,
        softcap=terms.softcap,
        scheduler_metadata=plan,
        s_aux=_sinks_of(terms),
        k_scale=terms.key_scale,
        v_scale=terms.value_scale,
        kv_cache_dtype=_stored_as(shape),
    )
    return output


def _sinks_of(terms: Terms) -> torch.Tensor | None:
    """As the kernel takes them."""
    sinks = terms.sinks
    takes = sinks is None or sinks.dtype in (torch.bfloat16, torch.float32)
    return sinks if sinks is None or takes else sinks.float()


def write_tokens(
    shape: KernelShape,
    kv_cache: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    terms: Terms | None = None,
) -> None:
    """Packs keys and values ``[tokens, kv_heads, dim]`` into their slots of the cache."""
    scales = (1.0, 1.0) if terms is None else (terms.key_scale, terms.value_scale)
    caches = halves(kv_cache, True)
    stored = _stored_as(shape)
    ops.cpu_attn_reshape_and_cache(keys, values, *caches, slots, shape.isa, *scales, stored)


@dataclass(frozen=True, slots=True)
class CpuPlan:
    """``tokens``: int64, the sequences' places in the batch; ``span``: the same where they are side
    by side, else None. ``table``: int32 ``[sequences *
    kv_heads, width]``, whose chosen part every layer overwrites, from ``split.init`` on, before it
    attends. ``distances``: the same in bytes from the start of a layer's cache, which then counts
    instead; None if no sequence is partially offloaded. ``seq_lens``: int32, tokens in each row's
    blocks; ``starts``: int32, 0, 1, 2 ... to the number of rows; ``schedule``: vLLM's, of all rows
    or, with sinks, of those of a KV head."""

    tokens: torch.Tensor
    span: slice | None
    table: torch.Tensor
    seq_lens: torch.Tensor
    starts: torch.Tensor
    schedule: torch.Tensor
    distances: Ints | None = None


class CpuKernel(RowKernel):
    """vLLM's CPU kernel."""

    device = torch.device("cpu")
    chooses = False
    in_place = True
    overhead_bytes = OVERHEAD_BYTES

    def __init__(self, shape: KernelShape) -> None:
        self.shape = shape
        self._head = torch.arange(shape.kv_heads, dtype=torch.int32)[:, None]
        self._row_bytes = shape.block_size * shape.token_bytes // shape.kv_heads

    @cached_property
    def _reader(self) -> KeyReader:
        shape = self.shape
        count = shape.block_size * shape.head_dim

        def pack(ones: torch.Tensor) -> torch.Tensor:
            stored = shape.dtype if shape.fp8 is None else torch.uint8
            block = torch.zeros(1, 1, shape.block_size, 2 * shape.head_dim, dtype=stored)
            keys = ones[:, None].contiguous()
            write_tokens(shape, block, keys, keys, torch.arange(shape.block_size))
            return block.view(2, count)[0]

        return KeyReader(shape.block_size, shape.head_dim, shape.dtype, pack)

    def check(self, kv_cache: torch.Tensor) -> None:
        if not kv_cache.is_contiguous():
            raise EngineError(
                f"retrieval attention needs each layer's KV cache in one piece; this one has shape "
                f"{tuple(kv_cache.shape)} and strides {kv_cache.stride()}. Remove `retrieval` "
                "from VLLM_PLUGINS"
            )

    def read_keys(self, kv_cache: torch.Tensor, block_ids: torch.Tensor) -> torch.Tensor:
        keys = self._reader.read(kv_cache, block_ids)
        fp8 = self.shape.fp8
        return keys if fp8 is None else keys.contiguous().view(fp8).to(self.shape.dtype)

    def move(self, sources: Addresses, targets: Addresses, piece: Piece) -> None:
        Batch(sources, targets, np.full(len(sources), piece.nbytes)).copy_here()

    def digests(self, blocks: int, rows: int, width: int) -> torch.Tensor:
        return torch.empty(self.shape.kv_heads, blocks, rows, width, dtype=torch.int8)

    def digest(
        self, kv_cache: torch.Tensor, block_ids: torch.Tensor, rows: torch.Tensor, layout: Layout
    ) -> None:
        for ids in torch.split(block_ids, _AT_ONCE):
            rows[:, ids] = encode(layout.rows_of(self.read_keys(kv_cache, ids))).transpose(0, 1)

    def plan(self, stale: torch.Tensor, sequences: Sequence[SparseSequence]) -> SparseStep:
        if not sequences:
            return SparseStep(stale, (), None)
        heads = self.shape.kv_heads
        width = max(sequence.split.attended_blocks for sequence in sequences)
        table = torch.zeros(len(sequences) * heads, width, dtype=torch.int32)
        head = torch.arange(heads, dtype=torch.int32)[:, None]
        away = any(sequence.offloaded is not None for sequence in sequences)
        for at, sequence in enumerate(sequences):
            split, blocks = sequence.split, sequence.table
            rows = table[at * heads : (at + 1) * heads]
            rows[:, : split.init] = blocks[: split.init] * heads + head
            last = split.init + split.chosen
            rows[:, last : split.attended_blocks] = (
                blocks[split.local : split.blocks] * heads + head
            )
        lens = [sequence.split.attended_tokens for sequence in sequences]
        seq_lens = torch.tensor(lens, dtype=torch.int32).repeat_interleave(heads)
        starts = torch.arange(len(seq_lens) + 1, dtype=torch.int32)
        places = [sequence.token for sequence in sequences]
        first, end = places[0], places[-1] + 1
        span = slice(first, end) if places == list(range(first, end)) else None
        tokens = torch.tensor(places)
        ours = slice(None, None, heads if self.shape.sinks else 1)
        told = seq_lens[ours].contiguous(), starts[: len(seq_lens[ours]) + 1]
        distances = None
        if away:
            distances = table.numpy().astype(np.int64) * self._row_bytes
        plan = CpuPlan(tokens, span, table, seq_lens, starts, self.schedule(*told), distances)
        return SparseStep(stale, tuple(sequences), plan)

    def schedule(self, seq_lens: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        """The kernel's work plan for rows of one KV head."""
        return schedule(self.shape, seq_lens, starts)

    def choose(self, *args: object) -> None:
        return

    def fetch(self, *args: object) -> None:
        return

    def residency(self, blocks: int) -> DeviceResidency:
        raise NotImplementedError("the layers keep the slots of a CPU")

    def number(self, *args: object) -> None:
        return

    def forget(self, *args: object) -> None:
        return

    def collect(self, *args: object) -> None:
        return

    def enter(self, step: SparseStep, at: int, ids: torch.Tensor) -> None:
        plan, heads, split = step.plan, self.shape.kv_heads, step.sequences[at].split
        rows = slice(at * heads, (at + 1) * heads), slice(split.init, split.init + split.chosen)
        named = ids * heads + self._head
        if plan.distances is None:
            plan.table[rows] = named
        else:
            plan.distances[rows] = named.numpy().astype(np.int64) * self._row_bytes

    def enter_found(self, step: SparseStep, search: Search) -> None:
        plan, heads = step.plan, self.shape.kv_heads
        choosing = [(at, one) for at, one in enumerate(step.sequences) if one.split.middle]
        for place, (at, sequence) in enumerate(choosing):
            rows = slice(at * heads, (at + 1) * heads), slice(sequence.split.init, None)
            if plan.distances is None:
                search.enter_names(place, plan.table[rows])
                continue
            left = 0 if sequence.offloaded is None else sequence.offloaded.count
            cache_bytes = heads * self._row_bytes, self._row_bytes
            search.enter_distances(place, plan.distances[rows], left, cache_bytes)

    def enter_in_place(self, step: SparseStep, at: int, distances: Ints) -> None:
        plan, heads, split = step.plan, self.shape.kv_heads, step.sequences[at].split
        rows = slice(at * heads, (at + 1) * heads), slice(split.init, split.init + split.chosen)
        plan.distances[rows] = distances + self._head.numpy() * self._row_bytes

    def attend(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        step: SparseStep,
        output: torch.Tensor,
        terms: Terms,
    ) -> None:
        plan, shape = step.plan, self.shape
        span = plan.span
        here = plan.tokens if span is None else span
        rows = query[here].reshape(-1, shape.group, shape.head_dim).contiguous()
        caches, table = halves(kv_cache), plan.table
        if plan.distances is not None:
            caches, table = far_halves(kv_cache, plan.distances)
        if terms.sinks is not None:
            found = self._attend_by_head(rows, caches, table, plan, terms)
        else:
            into = None
            if span is not None and output.is_contiguous():
                into = output[span].view(rows.shape)
            told = table, plan.seq_lens, plan.starts, plan.schedule
            found = attend(shape, rows, caches, *told, terms, into)
            if into is not None:
                return
        output[here] = found.view(-1, *output.shape[1:])

    def _attend_by_head(
        self,
        rows: torch.Tensor,
        caches: tuple[torch.Tensor, torch.Tensor],
        table: torch.Tensor,
        plan: CpuPlan,
        terms: Terms,
    ) -> torch.Tensor:
        """A call has the same sinks for all its rows: one call for the rows of a KV head."""
        shape, heads = self.shape, self.shape.kv_heads
        assert terms.sinks is not None
        found = torch.empty_like(rows)
        starts = plan.starts[: len(plan.tokens) + 1]
        for head, sinks in enumerate(terms.sinks.view(heads, shape.group)):
            ours = slice(head, None, heads)
            told = table[ours], plan.seq_lens[ours].contiguous(), starts, plan.schedule
            of_head = replace(terms, sinks=sinks)
            found[ours] = attend(shape, rows[ours].contiguous(), caches, *told, of_head)
        return found


class KeyReader:
    """Unpacks the keys of blocks ``[blocks, kv_heads, tokens, 2 * dim]`` (keys, then values).

    Their packing differs by instruction set. It is detected, not hard-coded: vLLM's own kernel
    packs blocks of zeros and ones that spell every element's index in binary. A packing that cannot
    be read back is refused at start.
    """

    def __init__(self, block_size: int, head_dim: int, dtype: torch.dtype, pack: Pack) -> None:
        """Raises EngineError if ``pack`` does more than reorder a block's elements."""
        self._shape = block_size, head_dim
        count = block_size * head_dim
        index = torch.arange(count)
        element_at = torch.zeros(count, dtype=torch.int64)
        for bit in range((count - 1).bit_length()):
            ones = (index >> bit & 1).to(dtype).view(self._shape)
            element_at |= (pack(ones) != 0).to(torch.int64) << bit
        if not torch.equal(element_at.sort().values, index):
            raise EngineError(
                f"the CPU kernel's packing of {block_size} keys of {head_dim} cannot be read back, "
                "which retrieval attention needs; remove `retrieval` from VLLM_PLUGINS"
            )
        self._places = torch.empty_like(element_at)
        self._places[element_at] = index
        places = self._places.view(self._shape)
        token = int(places[1, 0] - places[0, 0]) if block_size > 1 else 1
        coordinate = int(places[0, 1] - places[0, 0])
        even = torch.arange(block_size)[:, None] * token + torch.arange(head_dim) * coordinate
        # From token to token and from coordinate to coordinate, if even: then keys are a view.
        self._steps = (token, coordinate) if torch.equal(places, even) else None

    def read(self, kv_cache: torch.Tensor, block_ids: torch.Tensor) -> torch.Tensor:
        """Keys of the blocks: ``[blocks, kv_heads, tokens, dim]``, of the cache's dtype."""
        count = len(self._places)
        packed = kv_cache.flatten(2)[..., :count].index_select(0, block_ids)
        shape = (*packed.shape[:2], *self._shape)
        if self._steps is not None:
            return packed.as_strided(shape, (packed.shape[1] * count, count, *self._steps))
        return packed.index_select(-1, self._places).view(shape)


class InPlaceLayer:
    """One layer's dense attention over partially offloaded sequences, whose blocks the kernel reads
    where they lie: in the arena, and in the cache."""

    def __init__(self, shape: KernelShape, name: str) -> None:
        self._shape = shape
        self._name = name

    def forget(self, key: str, memory: bool = True) -> None:
        """Nothing is kept."""

    def attend(
        self,
        row: OffloadedRow,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        terms: Terms,
        plainly: object = None,
    ) -> torch.Tensor:
        sequence, shape = row.sequence, self._shape
        blocks = -(-row.tokens // shape.block_size)
        distances = row.table[:blocks].numpy().astype(np.int64) * kv_cache[0].nbytes
        left = slice(sequence.init, sequence.init + sequence.count)
        distances[left] = sequence.addresses(self._name) - kv_cache.data_ptr()
        caches, table = far_halves(kv_cache, distances[None], whole=True)
        seq_lens = torch.tensor([row.tokens], dtype=torch.int32)
        starts = torch.tensor([0, len(query)], dtype=torch.int32)
        plan = schedule(shape, seq_lens, starts, whole=True)
        query = query.reshape(-1, shape.heads, shape.head_dim).contiguous()
        return attend(shape, query, caches, table, seq_lens, starts, plan, terms)


class RetrievalBackend(CPUAttentionBackend):
    """Registered in place of CPU_ATTN under its name: the KV bytes are the same."""

    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        return RetrievalImpl

    @staticmethod
    def get_builder_cls() -> type[CPUAttentionMetadataBuilder]:
        return RetrievalMetadataBuilder


class RetrievalMetadataBuilder(RetrievalBuilder, CPUAttentionMetadataBuilder):
    """Retrieval beside vLLM's dense metadata."""

    def make_kernel(self, kv_cache_spec: Any) -> CpuKernel:
        shape = (self.num_heads, self.num_kv_heads, self.head_dim, self.block_size)
        # vLLM keeps the layers of --kv-cache-dtype-skip-layers in the model's type.
        fp8 = config.fp8_type(self.vllm_config) if kv_cache_spec.dtype is torch.uint8 else None
        return CpuKernel(KernelShape(*shape, self.dtype, self.isa, fp8, self.has_sinks()))

    def make_whole(self, name: str) -> InPlaceLayer:
        return InPlaceLayer(self._kernel.shape, name)


class RetrievalImpl(RetrievalAttention, CPUAttentionBackendImpl):
    """Retrieval over vLLM's dense attention."""
