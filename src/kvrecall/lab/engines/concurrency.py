"""In an engine process: how many long sequences decode at once in its device cache, and how fast.

The prompts may be in the pool already, with random KV, to skip their prefill, which takes minutes
each: the cost of attention and copies does not depend on the values.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from random import Random
from typing import Any

import torch
from prometheus_client import REGISTRY

from kvrecall.attention.settings import RetrievalSettings
from kvrecall.block import BlockKey
from kvrecall.engines.vllm.attention.plugin import active_settings, is_requested
from kvrecall.errors import EngineError
from kvrecall.pool.base import Verdict
from kvrecall.pool.pool import Pool


def decode_together(
    llm: Any, sequences: int, context: int, decoded: int, pooled: bool
) -> dict[str, Any]:
    """Has the engine decode ``decoded`` tokens of each of ``sequences`` random prompts of
    ``context`` tokens. ``pooled``: they are in the pool, so that only the last block of a prompt
    is computed (on vLLM's CPU platform only).

    ``at_once``: maximum sequences that decoded in one step. ``decode_seconds``, ``decode_tokens``:
    of the steps that computed no prompt. ``prefix_bytes``: of the prefixes
    found in the pool, ``loaded_bytes``: of whole blocks copied from it to the device.
    """
    from vllm import SamplingParams

    engine = llm.llm_engine
    greedy = SamplingParams(temperature=0.0, max_tokens=decoded, ignore_eos=True)
    for number in range(sequences):
        draw = Random(number)
        prompt = [draw.randrange(1, 250) for _ in range(context)]
        engine.add_request(str(number), {"prompt_token_ids": prompt}, greedy)
    prefix_bytes = _fill_pool(llm) if pooled else 0
    seen: dict[str, int] = {}
    at_once = decode_tokens = 0
    decode_seconds = 0.0
    began = time.perf_counter()
    while engine.has_unfinished_requests():
        started = time.perf_counter()
        new = {output.request_id: len(output.outputs[0].token_ids) for output in engine.step()}
        decoding = [key for key, count in new.items() if count > seen.get(key, 0) > 0]
        at_once = max(at_once, len(decoding))
        running = engine.engine_core.engine_core.scheduler.running
        if decoding and all(r.num_computed_tokens >= r.num_prompt_tokens for r in running):
            decode_seconds += time.perf_counter() - started
            decode_tokens += len(decoding)
        seen.update(new)
    seconds = time.perf_counter() - began
    (activity,) = llm.collective_rpc("retrieval_activity")
    preemptions = [m.value for m in llm.get_metrics() if m.name == "vllm:num_preemptions"]
    loaded = [
        sample.value
        for family in REGISTRY.collect()
        for sample in family.samples
        if sample.name == "kvrecall_loaded_bytes_total"
    ]
    return {
        "at_once": at_once,
        "seconds": seconds,
        "tokens": sum(seen.values()),
        "decode_seconds": decode_seconds,
        "decode_tokens": decode_tokens,
        "preemptions": int(sum(preemptions)),
        "prefix_bytes": prefix_bytes,
        "loaded_bytes": int(sum(loaded)),
        "activity": activity,
    }


def _fill_pool(llm: Any) -> int:
    """Puts every whole block of the waiting requests' prompts into the pool, with random KV;
    returns their bytes. Raises EngineError if the pool is full."""
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    from kvrecall.engines.vllm.attention.step import KernelShape

    config = llm.llm_engine.vllm_config
    model, block = config.model_config, config.cache_config.block_size
    dim = model.get_head_size()
    shape = KernelShape(
        model.get_num_attention_heads(config.parallel_config),
        model.get_num_kv_heads(config.parallel_config),
        dim,
        block,
        model.dtype,
        _get_attn_isa(model.dtype, block, dim, "auto"),
    )
    sparse = active_settings(config) if is_requested(os.environ) else None
    layers = model.get_total_num_hidden_layers()
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    nbytes = 0
    for name in scheduler.requests:  # the engine's own names
        state = scheduler.connector.state_of(name)
        keys = state.keys((state.request.num_prompt_tokens - 1) // block)
        records = _random_records(len(keys), shape, layers, sparse)
        _put(scheduler.connector.pool, keys, records)
        nbytes += records.numel()
    return nbytes


def _put(pool: Pool, keys: Sequence[BlockKey], records: torch.Tensor) -> None:
    arena = torch.from_numpy(pool.arena.array())
    for reservation, record in zip(pool.reserve(keys), records, strict=True):
        if reservation.verdict is not Verdict.RESERVED:
            raise EngineError(f"the pool does not take a block: {reservation.verdict.value}")
        arena[reservation.offset : reservation.offset + len(record)] = record
    pool.commit(keys)


def _random_records(
    blocks: int, shape: Any, layers: int, sparse: RetrievalSettings | None
) -> torch.Tensor:
    """Blocks as the pool holds them, keys and values from a normal distribution, with digests by
    ``sparse`` if given: uint8 ``[blocks, bytes]``."""
    from kvrecall.engines.vllm.attention.activity import Activity
    from kvrecall.engines.vllm.attention.cpu import CpuKernel
    from kvrecall.engines.vllm.attention.layer import RetrievalLayer

    size = (blocks, shape.kv_heads, shape.block_size, 2 * shape.head_dim)
    caches: list[Any] = [torch.randn(size).to(shape.dtype) for _ in range(layers)]
    pages = [cache.view(blocks, -1).view(torch.uint8) for cache in caches]
    if sparse is not None:
        kernel = CpuKernel(shape)
        for cache in caches[sparse.dense_layers :]:
            layer = RetrievalLayer("", sparse, kernel, Activity())
            layer.digest(cache, torch.arange(blocks))
            layer.sign(torch.arange(blocks))
            pages.append(layer.digest_rows(cache).reshape(blocks, -1))
            pages.append(layer.checksum_rows(cache))
    return torch.cat(pages, 1)
