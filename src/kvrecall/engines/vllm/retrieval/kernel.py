"""Sparse attention of decoded tokens on vLLM's CPU kernel, by rewritten block tables.

The cache ``[blocks, kv_heads, tokens, 2 * dim]`` is viewed as ``[blocks * kv_heads, 1, ...]`` and
every (sequence, KV head) is made a sequence of its own, so that each may have its own blocks. Keys
are stored after rotary embedding, so the order of blocks means nothing; only the last one, which
may be partial, must stay last.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from vllm import _custom_ops as ops
from vllm import envs

from kvrecall.engines.vllm.retrieval.packing import KeyReader


@dataclass(frozen=True, slots=True)
class KernelShape:
    """What the CPU kernel is told about a group of layers. ``isa``: its instruction set."""

    heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    isa: str

    @property
    def group(self) -> int:
        """Query heads to a KV head."""
        return self.heads // self.kv_heads

    @property
    def token_bytes(self) -> int:
        """Keys and values of a token, in one layer."""
        return 2 * self.kv_heads * self.head_dim * self.dtype.itemsize


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


def reader_of(shape: KernelShape, values: bool = False) -> KeyReader:
    """Reads keys packed for this shape, or values. Raises EngineError if they cannot be read
    back."""
    count = shape.block_size * shape.head_dim

    def pack(ones: torch.Tensor) -> torch.Tensor:
        block = torch.zeros(1, 1, shape.block_size, 2 * shape.head_dim, dtype=shape.dtype)
        keys = ones[:, None].contiguous()
        write_tokens(shape, block, keys, keys, torch.arange(shape.block_size))
        return block.view(2, count)[int(values)]

    return KeyReader(shape.block_size, shape.head_dim, shape.dtype, pack, values)
