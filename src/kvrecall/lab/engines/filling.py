"""Fills an engine's pool with random KV under the names of waiting requests' blocks.

For benchmarks of what comes after the prefill of long prompts, which takes minutes each: attention
and copies cost the same whatever the numbers are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kvrecall.attention.settings import RetrievalSettings
from kvrecall.block import BlockKey
from kvrecall.engines.vllm.attention.activity import Activity
from kvrecall.engines.vllm.attention.kernel import CpuKernel
from kvrecall.engines.vllm.attention.layer import RetrievalLayer
from kvrecall.engines.vllm.attention.rows import KernelShape
from kvrecall.engines.vllm.connector.request import RequestState
from kvrecall.errors import EngineError
from kvrecall.pool.base import Verdict
from kvrecall.pool.pool import Pool


def fill(
    pool: Pool,
    states: Sequence[RequestState],
    shape: KernelShape,
    layers: int,
    sparse: RetrievalSettings | None,
) -> int:
    """Puts every whole block of the requests' prompts into the pool; returns their bytes.

    ``layers``: of the model, whose records also hold digests by ``sparse`` if given. Raises
    EngineError if the pool has no room.
    """
    nbytes = 0
    for state in states:
        keys = state.keys((state.request.num_prompt_tokens - 1) // shape.block_size)
        records = _records(len(keys), shape, layers, sparse)
        _put(pool, keys, records)
        nbytes += records.numel()
    return nbytes


def _put(pool: Pool, keys: Sequence[BlockKey], records: torch.Tensor) -> None:
    arena = torch.from_numpy(pool.arena.array())
    for reservation, record in zip(pool.reserve(keys), records, strict=True):
        if reservation.verdict is not Verdict.RESERVED:
            raise EngineError(f"the pool does not take a block: {reservation.verdict.value}")
        arena[reservation.offset : reservation.offset + len(record)] = record
    pool.commit(keys)


def _records(
    blocks: int, shape: KernelShape, layers: int, sparse: RetrievalSettings | None
) -> torch.Tensor:
    """Blocks as the pool holds them, keys and values from a normal distribution: uint8
    ``[blocks, bytes]``."""
    size = (blocks, shape.kv_heads, shape.block_size, 2 * shape.head_dim)
    caches: list[Any] = [torch.randn(size).to(shape.dtype) for _ in range(layers)]
    pages = [cache.view(blocks, -1).view(torch.uint8) for cache in caches]
    kernel = CpuKernel(shape)
    for cache in caches[sparse.dense_layers :] if sparse is not None else ():
        assert sparse is not None
        layer = RetrievalLayer(sparse, kernel, Activity())
        layer.digest(cache, torch.arange(blocks))
        layer.seal(torch.arange(blocks))
        pages.append(layer.digest_rows(cache).reshape(blocks, -1))
        pages.append(layer.seal_rows(cache))
    return torch.cat(pages, 1)


def shape_of(vllm_config: Any) -> KernelShape:
    """What vLLM's CPU kernel is told about the layers of an engine on one rank."""
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    model, size = vllm_config.model_config, vllm_config.cache_config.block_size
    heads = model.get_num_attention_heads(vllm_config.parallel_config)
    kv_heads = model.get_num_kv_heads(vllm_config.parallel_config)
    dim = model.get_head_size()
    isa = _get_attn_isa(model.dtype, size, dim, "auto")
    return KernelShape(heads, kv_heads, dim, size, model.dtype, isa)
