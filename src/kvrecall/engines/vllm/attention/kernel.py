"""Sparse attention of decoded tokens on vLLM's CPU kernel, by rewritten block tables.

The cache ``[blocks, kv_heads, tokens, 2 * dim]`` is viewed as ``[blocks * kv_heads, 1, ...]`` and
every row is made a sequence of its own, of one KV head.
"""

from __future__ import annotations

from functools import cached_property

import torch
from vllm import _custom_ops as ops
from vllm import envs

from kvrecall.attention.split import OVERHEAD_BYTES
from kvrecall.engines.vllm.attention.packing import KeyReader
from kvrecall.engines.vllm.attention.rows import Bytes, Ints, KernelShape, RowKernel
from kvrecall.errors import EngineError


def halves(kv_cache: torch.Tensor, whole: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Key and value cache as the kernel takes them: ``[blocks * kv_heads, 1, tokens, dim]``, or
    ``[blocks, kv_heads, tokens, dim]`` if ``whole``."""
    blocks, kv_heads, block_size, _ = kv_cache.shape
    heads = (blocks, kv_heads) if whole else (blocks * kv_heads, 1)
    keys, values = kv_cache.view(*heads, 2 * block_size, -1).chunk(2, dim=2)
    return keys, values


def schedule(
    shape: KernelShape, seq_lens: torch.Tensor, starts: torch.Tensor, whole: bool = False
) -> torch.Tensor:
    """The kernel's work plan for one token a sequence. ``seq_lens``, ``starts``: int32.

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
        kv_cache_dtype="auto",
    )
    return plan


def attend(
    query: torch.Tensor,
    caches: tuple[torch.Tensor, torch.Tensor],
    table: torch.Tensor,
    seq_lens: torch.Tensor,
    starts: torch.Tensor,
    plan: torch.Tensor,
    scale: float,
    softcap: float = 0.0,
) -> torch.Tensor:
    """Attention of one token a sequence over the blocks its row of the table names.

    ``query``: contiguous ``[sequences, heads, dim]``; ``caches``: keys and values, from
    ``halves``, with the sequences' KV heads; ``table``: int32 ``[sequences, width]``; ``seq_lens``:
    int32, tokens in each row's blocks. Returns the query's shape.
    """
    keys, values = caches
    output = torch.empty_like(query)
    ops.cpu_attention_with_kv_cache(
        query=query,
        key_cache=keys,
        value_cache=values,
        output=output,
        query_start_loc=starts,
        seq_lens=seq_lens,
        scale=scale,
        causal=True,
        alibi_slopes=None,
        sliding_window=-1,
        block_table=table,
        softcap=softcap,
        scheduler_metadata=plan,
        s_aux=None,
    )
    return output


def write_tokens(
    shape: KernelShape,
    kv_cache: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Packs keys and values ``[tokens, kv_heads, dim]`` into their slots of the cache."""
    ops.cpu_attn_reshape_and_cache(keys, values, *halves(kv_cache, True), slots, shape.isa)


def reader_of(shape: KernelShape) -> KeyReader:
    """Reads keys packed for this shape. Raises EngineError if they cannot be read back."""
    count = shape.block_size * shape.head_dim

    def pack(ones: torch.Tensor) -> torch.Tensor:
        block = torch.zeros(1, 1, shape.block_size, 2 * shape.head_dim, dtype=shape.dtype)
        keys = ones[:, None].contiguous()
        write_tokens(shape, block, keys, keys, torch.arange(shape.block_size))
        return block.view(2, count)[0]

    return KeyReader(shape.block_size, shape.head_dim, shape.dtype, pack)


class HostWriter:
    """Copies one after the other, where device memory is host memory."""

    def __init__(self, kv_cache: torch.Tensor) -> None:
        """``kv_cache``: contiguous."""
        blocks, self._heads = kv_cache.shape[:2]
        self._rows: Bytes = kv_cache.view(blocks * self._heads, -1).view(torch.uint8).numpy()
        self.nbytes = self._rows.shape[1]

    def write(self, memory: Bytes, pages: Ints, heads: Ints, slots: Ints) -> None:
        rows = slots * self._heads + heads
        begins = pages + heads * self.nbytes
        for row, begin in zip(rows.tolist(), begins.tolist(), strict=True):
            self._rows[row] = memory[begin : begin + self.nbytes]


class CpuKernel(RowKernel):
    """vLLM's CPU kernel."""

    device = torch.device("cpu")
    overhead_bytes = OVERHEAD_BYTES

    def __init__(self, shape: KernelShape) -> None:
        self.shape = shape

    @cached_property
    def keys(self) -> KeyReader:
        return reader_of(self.shape)

    def check(self, kv_cache: torch.Tensor) -> None:
        if not kv_cache.is_contiguous():
            raise EngineError(
                f"retrieval attention needs each layer's KV cache in one piece; this one has shape "
                f"{tuple(kv_cache.shape)} and strides {kv_cache.stride()}. Take `retrieval` out of "
                "VLLM_PLUGINS"
            )

    def writer(self, kv_cache: torch.Tensor) -> HostWriter:
        return HostWriter(kv_cache)

    def digests(self, blocks: int, rows: int, width: int) -> torch.Tensor:
        return torch.empty(self.shape.kv_heads, blocks, rows, width, dtype=torch.int8)

    def plan(self, seq_lens: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        return schedule(self.shape, seq_lens, starts)

    def attend(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        table: torch.Tensor,
        seq_lens: torch.Tensor,
        starts: torch.Tensor,
        plan: torch.Tensor,
        scale: float,
        softcap: float,
    ) -> torch.Tensor:
        return attend(query, halves(kv_cache), table, seq_lens, starts, plan, scale, softcap)
