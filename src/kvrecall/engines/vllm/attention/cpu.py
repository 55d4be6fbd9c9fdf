"""vLLM's CPU attention backend with retrieval, by rewritten block tables.

The cache ``[blocks, kv_heads, tokens, 2 * dim]`` is viewed as ``[blocks * kv_heads, 1, ...]``, and
every row becomes a sequence of its own, of one KV head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
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
from kvrecall.attention.kernels.search import is_compiled
from kvrecall.attention.selection import OVERHEAD_BYTES
from kvrecall.engines.vllm.attention.backend import RetrievalAttention, RetrievalBuilder
from kvrecall.engines.vllm.attention.base import (
    AttentionKernel,
    AttentionParameters,
    DigestStore,
    KernelShape,
    SparseSequence,
    SparseStep,
)
from kvrecall.engines.vllm.attention.host_selection import HostPlan, HostSelection
from kvrecall.engines.vllm.attention.step import DenseOffload, OffloadedRow
from kvrecall.engines.vllm.compat import config
from kvrecall.errors import EngineError

_STORED = {None: "auto", torch.float8_e4m3fn: "fp8_e4m3", torch.float8_e5m2: "fp8_e5m2"}
"""The kernel's names for the types of keys and values in the cache, by ``KernelShape.fp8``."""

_AT_ONCE = 64
"""Blocks unpacked at a time while digesting."""

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Ints = tuple[int, ...]
Pack = Callable[[torch.Tensor], torch.Tensor]
"""Packs one block of one head: ``[tokens, dim]`` -> the elements of its half, flat."""


def halves(
    kv_cache: torch.Tensor, whole: bool = False, unit: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Key and value cache as the kernel takes them: ``[blocks * kv_heads, 1, tokens, dim]``, or
    ``[blocks, kv_heads, tokens, dim]`` if ``whole``. ``unit``: bytes by which a block table counts
    from the cache's start, forwards and backwards, also out of the cache; 0: it names its blocks.
    """
    blocks, kv_heads, block_size, width = kv_cache.shape
    dim, row = width // 2, block_size * width
    heads, steps = ((blocks, kv_heads), (kv_heads * row, row))
    if not whole:
        heads, steps = (blocks * kv_heads, 1), (row, row)
    if unit:
        heads, steps = (1, heads[1]), (unit // kv_cache.element_size(), row)
    size, strides, first = (*heads, block_size, dim), (*steps, dim, 1), kv_cache.storage_offset()
    # Of one piece. One operation for each: a decoded token's layers all wait for this.
    keys = kv_cache.as_strided(size, strides, first)
    return keys, kv_cache.as_strided(size, strides, first + row // 2)


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
        kv_cache_dtype=_STORED[shape.fp8],
    )
    return plan


def attend(
    shape: KernelShape,
    query: torch.Tensor,
    caches: tuple[torch.Tensor, torch.Tensor],
    table: torch.Tensor,
    seq_lens: torch.Tensor,
    starts: torch.Tensor,
    plan: torch.Tensor,
    parameters: AttentionParameters,
    output: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of sequences' last tokens over the blocks in its row of the table. ``query``:
    contiguous ``[tokens, heads, dim]``; ``caches``: keys and values, from ``halves``, with the
    sequences' KV heads; ``table``: int32 ``[sequences, width]``; ``seq_lens``: int32, tokens in
    each row's blocks; ``plan``: of ``schedule``; ``output``: where it is written,
    contiguous. Returns the query's shape."""
    keys, values = caches
    output = torch.empty_like(query) if output is None else output
    sinks = parameters.sinks
    if sinks is not None and sinks.dtype not in (torch.bfloat16, torch.float32):
        sinks = sinks.float()
    ops.cpu_attention_with_kv_cache(
        query=query,
        key_cache=keys,
        value_cache=values,
        output=output,
        query_start_loc=starts,
        seq_lens=seq_lens,
        scale=parameters.scale,
        causal=True,
        alibi_slopes=None,
        sliding_window=-1,
        block_table=table,
        softcap=parameters.softcap,
        scheduler_metadata=plan,
        s_aux=sinks,
        k_scale=parameters.key_scale,
        v_scale=parameters.value_scale,
        kv_cache_dtype=_STORED[shape.fp8],
    )
    return output


def write_tokens(
    shape: KernelShape,
    kv_cache: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    scales: tuple[float, float] = (1.0, 1.0),
) -> None:
    """Packs keys and values ``[tokens, kv_heads, dim]`` into their slots of the cache. ``scales``:
    what a stored 1 is, of keys and of values."""
    caches, stored = halves(kv_cache, True), _STORED[shape.fp8]
    ops.cpu_attn_reshape_and_cache(keys, values, *caches, slots, shape.isa, *scales, stored)


class CpuKernel(AttentionKernel):
    """vLLM's CPU kernel."""

    device = torch.device("cpu")
    on_host = True
    layers = HostSelection
    overhead_bytes = OVERHEAD_BYTES

    def __init__(self, shape: KernelShape) -> None:
        self.shape = shape
        is_compiled()  # compiles, so that the first step does not

    @cached_property
    def _reader(self) -> KeyReader:
        shape = self.shape
        count = shape.block_size * shape.head_dim

        def pack(ones: torch.Tensor) -> torch.Tensor:
            block = torch.zeros(1, 1, shape.block_size, 2 * shape.head_dim, dtype=shape.stored)
            keys = ones[:, None].contiguous()
            write_tokens(shape, block, keys, keys, torch.arange(shape.block_size))
            return block.view(2, count)[0]

        return KeyReader(shape.block_size, shape.head_dim, shape.dtype, pack)

    def read_keys(self, kv_cache: torch.Tensor, block_ids: torch.Tensor) -> torch.Tensor:
        """Keys of these blocks, as stored: ``[blocks, kv_heads, tokens, dim]``, of the shape's
        dtype."""
        keys = self._reader.read(kv_cache, block_ids)
        fp8 = self.shape.fp8
        return keys if fp8 is None else keys.contiguous().view(fp8).to(self.shape.dtype)

    def digest(self, kv_cache: torch.Tensor, block_ids: torch.Tensor, store: DigestStore) -> None:
        for ids in torch.split(block_ids, _AT_ONCE):
            rows = encode(store.layout.rows_of(self.read_keys(kv_cache, ids)))
            store.rows[:, ids] = rows.transpose(0, 1)

    def schedule(
        self,
        stale: torch.Tensor,
        sequences: Sequence[SparseSequence],
        layout: Layout | None,
        table: torch.Tensor,
        graph_rows: int = 0,
    ) -> SparseStep:
        plan = None
        if sequences:
            plan = HostPlan(self.shape, sequences, layout)
            plan.work = self._work(plan)
        return SparseStep(stale, tuple(sequences), plan)

    def _work(self, plan: HostPlan) -> Any:
        """Of all rows or, with sinks, of those of a KV head."""
        seq_lens = plan.seq_lens[:: self.shape.kv_heads if self.shape.sinks else 1].contiguous()
        return schedule(self.shape, seq_lens, plan.starts[: len(seq_lens) + 1])

    def attend(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        step: SparseStep,
        output: torch.Tensor,
        parameters: AttentionParameters,
    ) -> None:
        shape, plan = self.shape, step.plan
        span = plan.span
        here = plan.tokens if span is None else span
        rows = query[here].reshape(-1, shape.group, shape.head_dim).contiguous()
        caches, table = halves(kv_cache, unit=plan.unit), plan.table
        is_there = span is not None and output.is_contiguous()
        found = output[span].view(rows.shape) if is_there else torch.empty_like(rows)
        if parameters.sinks is None:
            args = table, plan.seq_lens, plan.starts, plan.work
            attend(shape, rows, caches, *args, parameters, found)
        else:  # A call has the same sinks for all its rows: one for the rows of a KV head.
            starts = plan.starts[: len(plan.tokens) + 1]
            for head, sinks in enumerate(parameters.sinks.view(-1, shape.group)):
                ours = slice(head, None, shape.kv_heads)
                args = table[ours], plan.seq_lens[ours].contiguous(), starts, plan.work
                of_head = replace(parameters, sinks=sinks)
                found[ours] = attend(shape, rows[ours].contiguous(), caches, *args, of_head)
        if not is_there:
            output[here] = found.view(-1, *output.shape[1:])


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
            packed = pack((index >> bit & 1).to(dtype).view(self._shape))
            element_at |= (packed != 0).to(torch.int64) << bit
        if not torch.equal(element_at.sort().values, index):
            raise EngineError(
                f"the CPU kernel's packing of {block_size} keys of {head_dim} cannot be read back, "
                "which retrieval attention needs; remove `retrieval` from VLLM_PLUGINS"
            )
        self._places = torch.empty_like(element_at)
        self._places[element_at] = index
        self._tiles = self._tiled(self._places.view(self._shape), packed.element_size())

    def _tiled(self, places: torch.Tensor, size: int) -> tuple[torch.dtype, Ints, Ints] | None:
        """The packing as tiles of tokens, whose coordinates lie side by side in words, where it is
        as even: the type of a word; tiles, tokens in each, words of a token; the steps of these in
        words. ``size``: of an element, in bytes."""
        row, column = places[0].diff(), places[:, 0].diff()
        most = [many for many in (8, 4, 2) if many * size <= 8 and self._shape[1] % many == 0]
        side = next((many for many in most if bool((row[: many - 1] == 1).all())), 1)
        tile = int((column != column[:1]).nonzero().flatten()[:1].sum()) + 1
        tile = tile if tile > 1 and self._shape[0] % tile == 0 else self._shape[0]
        tiled = places.view(-1, tile, self._shape[1] // side, side)
        steps, even = [], torch.arange(side)
        for axis, many in enumerate(tiled.shape[:3]):
            steps.append(int(tiled.select(axis, min(1, many - 1)).flatten()[0]))
            even = even + torch.arange(many).view(-1, *[1] * (3 - axis)) * steps[-1]
        if not torch.equal(tiled, even) or any(step % side for step in steps):
            return None
        return _WORDS[size * side], tiled.shape[:3], tuple(step // side for step in steps)

    def read(self, kv_cache: torch.Tensor, block_ids: torch.Tensor) -> torch.Tensor:
        """Keys of the blocks: ``[blocks, kv_heads, tokens, dim]``, of the cache's dtype."""
        packed = kv_cache.flatten(2)[..., : len(self._places)].index_select(0, block_ids)
        shape = (*packed.shape[:2], *self._shape)
        if self._tiles is None:
            return packed.index_select(-1, self._places).view(shape)
        word, sizes, steps = self._tiles
        words = packed.view(word)  # what lies side by side is copied in an eighth of the time
        found = words.as_strided((*shape[:2], *sizes), (*words.stride()[:2], *steps))
        found = found if sizes[0] == 1 and word.itemsize == packed.itemsize else found.contiguous()
        return found.flatten(2, 3).view(packed.dtype)


def attend_in_place(
    shape: KernelShape,
    name: str,
    row: OffloadedRow,
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    parameters: AttentionParameters,
    plainly: object = None,
) -> torch.Tensor:
    """A ``DenseOffload`` of the layer of that name: the kernel reads blocks where they lie, in the
    arena and in the cache."""
    sequence = row.sequence
    blocks = -(-row.tokens // shape.block_size)
    distances = row.table[:blocks].numpy().astype(np.int64) * kv_cache[0].nbytes
    left = slice(sequence.init, sequence.init + sequence.count)
    distances[left] = sequence.addresses(name) - kv_cache.data_ptr()
    caches = halves(kv_cache, True, sequence.unit)
    table = torch.from_numpy((distances // sequence.unit).astype(np.int32))[None]
    seq_lens = torch.tensor([row.tokens], dtype=torch.int32)
    starts = torch.tensor([0, len(query)], dtype=torch.int32)
    plan = schedule(shape, seq_lens, starts, whole=True)
    query = query.reshape(-1, shape.heads, shape.head_dim).contiguous()
    return attend(shape, query, caches, table, seq_lens, starts, plan, parameters)


class RetrievalBackend(CPUAttentionBackend):
    """Registered in place of CPU_ATTN under its name: the KV bytes are the same."""

    get_impl_cls = staticmethod(lambda: RetrievalImpl)
    get_builder_cls = staticmethod(lambda: RetrievalMetadataBuilder)


class RetrievalMetadataBuilder(RetrievalBuilder, CPUAttentionMetadataBuilder):
    """Retrieval beside vLLM's dense metadata."""

    def make_kernel(self, kv_cache_spec: Any) -> CpuKernel:
        shape = (self.num_heads, self.num_kv_heads, self.head_dim, self.block_size)
        # vLLM keeps the layers of --kv-cache-dtype-skip-layers in the model's type.
        fp8 = config.fp8_type(self.vllm_config) if kv_cache_spec.dtype is torch.uint8 else None
        sinks = any(impl.sinks is not None for impl in self._impls().values())
        return CpuKernel(KernelShape(*shape, self.dtype, self.isa, fp8, sinks))

    def make_dense(self, name: str) -> DenseOffload:
        return partial(attend_in_place, self._kernel.shape, name)


class RetrievalImpl(RetrievalAttention, CPUAttentionBackendImpl):
    """Retrieval over vLLM's dense attention."""
