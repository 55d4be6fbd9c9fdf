"""Reads an engine's facts from vLLM's configuration, KV layout, platform and parallel groups.
Version branches of reading them are here.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import vllm
from vllm.v1.core import kv_cache_utils

from kvrecall.environment import HASH_SEED
from kvrecall.errors import EngineError


@dataclass(frozen=True, slots=True)
class LayerPlacement:
    """Where a layer's blocks lie: bytes of one block, and bytes from one block to the next."""

    page_bytes: int
    block_stride: int


def layer_placements(kv_cache_config: Any) -> Mapping[str, LayerPlacement]:
    """Placement of every layer of the engine's one KV group, in a fixed order."""
    (group,) = kv_cache_config.kv_cache_groups
    spec = group.kv_cache_spec
    strides = {
        name: tensor.block_stride
        for tensor in kv_cache_config.kv_cache_tensors
        for name in tensor.layers
    }
    placements = {}
    for name in group.layer_names:
        page = _layer_spec(spec, name).page_size_bytes
        placements[name] = LayerPlacement(page, strides.get(name, page))
    return placements


def _layer_spec(spec: Any, layer: str) -> Any:
    """The spec of one layer; a uniform group of differing layers keeps one spec each."""
    specs = getattr(spec, "kv_cache_specs", None)
    return specs[layer] if isinstance(specs, dict) else spec


def fp8_type(vllm_config: Any) -> torch.dtype | None:
    """What a KV cache of plain bytes holds; None if it is no plain eight-bit float."""
    name = str(vllm_config.cache_config.cache_dtype)
    if name == "fp8_e5m2":
        return torch.float8_e5m2
    return torch.float8_e4m3fn if name in ("fp8", "fp8_e4m3") else None


def group_block_size(kv_cache_config: Any) -> int:
    """Tokens per device block of the engine's one KV group."""
    (group,) = kv_cache_config.kv_cache_groups
    return int(group.kv_cache_spec.block_size)


def hash_block_size(vllm_config: Any, kv_cache_config: Any) -> int:
    """Tokens per block hash."""
    resolved = getattr(kv_cache_config, "hash_block_size", None)
    return int(resolved or vllm_config.cache_config.block_size)


def layer_token_bytes(kv_cache_config: Any) -> int:
    """Bytes of a token's keys and values in one layer of a rank."""
    (group,) = kv_cache_config.kv_cache_groups
    return int(group.kv_cache_spec.page_size_bytes) // int(group.kv_cache_spec.block_size)


def kv_replicas(kv_cache_config: Any) -> int:
    """How many consecutive tensor-parallel ranks hold identical KV (1: none)."""
    return int(getattr(kv_cache_config, "kv_tp_replicas", 1))


def freed_while_running(kv_cache_config: Any) -> bool:
    """Whether the engine may free a running request's blocks (sliding windows)."""
    (group,) = kv_cache_config.kv_cache_groups
    spec = group.kv_cache_spec
    specs = getattr(spec, "kv_cache_specs", None)
    kinds = list(specs.values()) if isinstance(specs, dict) else [spec]
    return any(type(kind).__name__ != "FullAttentionSpec" for kind in kinds) and not all(
        type(kind).__name__ in ("FullAttentionSpec", "MLAAttentionSpec") for kind in kinds
    )


def is_deterministic() -> bool:
    """Whether kernels give the same bits whatever else is in their batch."""
    return bool(getattr(vllm.envs, "VLLM_BATCH_INVARIANT", False))


def is_on_cpu() -> bool:
    """Whether this is vLLM's CPU platform."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def kernel_of(vllm_config: Any, layer_names: tuple[str, ...]) -> str:
    """Attention backends of the layers and the instruction set their bytes are packed for."""
    layers = vllm_config.compilation_config.static_forward_context
    names = set()
    for name in layer_names:
        layer = layers.get(name)
        backend = getattr(layer, "attn_backend", None)
        get_name = getattr(backend, "get_name", None)
        # KV of tokens decoded by an approximate attention is not what an exact one computes.
        approximation = getattr(getattr(layer, "impl", None), "approximation", "")
        suffix = f" ({approximation})" if approximation else ""
        names.add(f"{get_name() if get_name else 'unknown'}/{getattr(layer, 'isa', '')}{suffix}")
    device = torch.accelerator.current_accelerator()
    machine = device.type if device is not None else torch.backends.cpu.get_cpu_capability()
    return f"{'+'.join(sorted(names))} on {machine}"


def prompt_token_work(vllm_config: Any) -> tuple[float, int]:
    """Operations of this rank's matrix products for a prompt token, roughly, and their width;
    zeros for a model whose configuration does not tell."""
    text = vllm_config.model_config.hf_text_config
    hidden = int(getattr(text, "hidden_size", 0) or 0)
    layers = int(getattr(text, "num_hidden_layers", 0) or 0)
    heads = int(getattr(text, "num_attention_heads", 0) or 0)
    kv_heads = int(getattr(text, "num_key_value_heads", heads) or heads)
    size = int(getattr(text, "head_dim", 0) or (hidden // heads if heads else 0))
    experts = int(getattr(text, "num_experts_per_tok", 0) or 0)
    wide = int(getattr(text, "moe_intermediate_size", 0) or 0) * experts
    wide = wide or int(getattr(text, "intermediate_size", 0) or 0)
    parallel = vllm_config.parallel_config
    ranks = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
    weights = layers * hidden * (2 * size * (heads + kv_heads) + 3 * wide)
    return 2.0 * weights / ranks, hidden


def root_seed() -> str:
    """The seed the first block's hash starts from. Settled once the engine has started."""
    get_seed = getattr(kv_cache_utils, "get_none_hash_seed", None)
    if get_seed is not None:
        return str(get_seed())
    return os.environ.get(HASH_SEED, "unset")


def root_seed_is_random(hash_algo: str) -> bool:
    """Whether every process starts its hashes elsewhere, so that no restart can ever hit."""
    return hash_algo.startswith("xxhash") and HASH_SEED not in os.environ


def loads_are_ordered(vllm_config: Any) -> bool:
    """Whether blocks may be loaded while steps run: a consumer frees blocks only when no step can
    write to them any more; other roles may load where one step ends before the next begins."""
    consumer = bool(vllm_config.kv_transfer_config.is_kv_consumer)
    return consumer or int(vllm_config.max_concurrent_batches) == 1


def most_blocks_of_sequences(vllm_config: Any, block_size: int) -> int:
    """Blocks of as many sequences as run at once, all as long as can be."""
    longest = -(-int(vllm_config.model_config.max_model_len) // block_size)
    return int(vllm_config.scheduler_config.max_num_seqs) * longest


def layer_index(layer_name: str) -> int:
    """Which layer of the model an attention layer's name speaks of, from 0."""
    from vllm.model_executor.models.utils import extract_layer_index

    return int(extract_layer_index(layer_name))


def tensor_rank() -> int:
    """This worker's rank in its tensor-parallel group."""
    from vllm.distributed import parallel_state

    return int(parallel_state.get_tensor_model_parallel_rank())


def shard_position(nbytes: int, replicas: int) -> int:
    """Bytes of the shards before this worker's in a block's record.

    Records are ordered by pipeline rank, then tensor rank; ranks of one tensor-parallel group
    hold equally many bytes, those of different pipeline stages may not.
    """
    from vllm.distributed import parallel_state

    tensor = parallel_state.get_tp_group()
    stages = parallel_state.get_pp_group()
    writers = tensor.world_size // replicas
    before = 0
    if stages.world_size > 1:
        sizes: list[int | None] = [None] * stages.world_size
        torch.distributed.all_gather_object(sizes, nbytes, group=stages.cpu_group)
        before = sum(size or 0 for size in sizes[: stages.rank_in_group]) * writers
    return before + tensor.rank_in_group // replicas * nbytes


def require_supported(vllm_config: Any, kv_cache_config: Any) -> None:
    """Raises EngineError with cause and cure for what the pool cannot serve rightly."""
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        raise EngineError(
            f"this model has {len(groups)} KV cache groups; kvrecall serves models with one. "
            "Start vLLM with --disable-hybrid-kv-cache-manager: sliding-window layers then keep "
            "their full KV and join the one group. Mamba and other recurrent models are not "
            "supported"
        )
    if not vllm_config.cache_config.enable_prefix_caching:
        raise EngineError(
            "prefix caching is off, and a KV pool works only on top of it. Pass "
            "--enable-prefix-caching; if vLLM turned it off itself, this model cannot continue "
            "from a cached prefix on this platform (for example MLA on a CPU without AMX)"
        )
    parallel = vllm_config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise EngineError(f"{name} is {getattr(parallel, name)}; kvrecall supports only 1")
    policy = vllm_config.kv_transfer_config.kv_load_failure_policy
    if policy != "recompute":
        # A lost block must be a miss, never a failed request.
        vllm_config.kv_transfer_config.kv_load_failure_policy = "recompute"
