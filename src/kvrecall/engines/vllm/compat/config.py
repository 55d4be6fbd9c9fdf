"""Reads an engine's facts from vLLM's configuration, KV layout, platform and parallel groups.
Version branches of reading them are here.
"""

from __future__ import annotations

import enum
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import vllm
from vllm.v1.core import kv_cache_utils

from kvrecall.engines.base import CONTEXT_PARALLEL
from kvrecall.engines.vllm.compat.scales import Scaled, scaled_of
from kvrecall.environment import HASH_SEED
from kvrecall.errors import EngineError


class GroupKind(enum.StrEnum):
    """Which blocks of a prefix a KV group needs to continue it."""

    FULL = "full"  # all of them
    WINDOW = "window"  # those that the last tokens attend to: sliding windows, local chunks
    STATE = "state"  # the one that ends with it: recurrent layers


@dataclass(frozen=True, slots=True)
class KvGroup:
    """Layers that share a block table. ``block_size``: tokens. ``reach``: of a window or local
    chunk, in tokens; 0 for other kinds. ``frees``: whether the engine may take blocks from a
    running request."""

    kind: GroupKind
    block_size: int
    reach: int
    frees: bool

    def __str__(self) -> str:
        return f"{self.kind} of {self.reach} tokens" if self.reach else str(self.kind)


def kv_groups(kv_cache_config: Any) -> tuple[KvGroup, ...]:
    """The engine's KV groups, in vLLM's order."""
    return tuple(_group_of(group.kv_cache_spec) for group in kv_cache_config.kv_cache_groups)


def _group_of(spec: Any) -> KvGroup:
    """The longest reach counts of a uniform group whose layers differ, and all if one is full."""
    specs = getattr(spec, "kv_cache_specs", None)
    layers = list(specs.values()) if isinstance(specs, dict) else [spec]
    size = int(spec.block_size)
    if all(_is_recurrent(layer) for layer in layers):
        return KvGroup(GroupKind.STATE, size, 0, True)
    reaches = [_reach_of(layer) for layer in layers]
    if all(reaches):
        return KvGroup(GroupKind.WINDOW, size, max(reaches), True)
    names = {type(layer).__name__ for layer in layers}
    return KvGroup(GroupKind.FULL, size, 0, not names <= {"FullAttentionSpec", "MLAAttentionSpec"})


def _is_recurrent(spec: Any) -> bool:
    return type(spec).__name__ == "MambaSpec"


def _reach_of(spec: Any) -> int:
    """Tokens that a layer's window or chunk reaches back; 0: all. A full-attention spec may name a
    window (of a layer that keeps its full KV): only specs of their own count."""
    if "SlidingWindow" in type(spec).__name__:
        return int(spec.sliding_window)
    if type(spec).__name__ == "ChunkedLocalAttentionSpec":
        return int(spec.attention_chunk_size)
    return 0


@dataclass(frozen=True, slots=True)
class LayerPlacement:
    """Where a layer's blocks lie: bytes of one block, and bytes from one block to the next.
    ``parts``: bytes and dtype of the tensors that a block consists of, for a recurrent layer.
    ``scaled``: of values with scales between them."""

    page_bytes: int
    block_stride: int
    parts: tuple[tuple[int, torch.dtype], ...] = ()
    scaled: Scaled | None = None


def layer_placements(kv_cache_config: Any) -> tuple[Mapping[str, LayerPlacement], ...]:
    """Placement of every layer of each KV group, in a fixed order. Groups may lie in the same
    memory: a device block belongs to one of them at a time."""
    strides = {
        name: tensor.block_stride
        for tensor in kv_cache_config.kv_cache_tensors
        for name in tensor.layers
    }
    placements = []
    for group in kv_cache_config.kv_cache_groups:
        of_group = {}
        for name in group.layer_names:
            spec = _layer_spec(group.kv_cache_spec, name)
            # Pages may be padded to those of another group; the padding holds nothing.
            page = int(getattr(spec, "real_page_size_bytes", spec.page_size_bytes))
            stride = strides.get(name, spec.page_size_bytes)
            of_group[name] = LayerPlacement(page, stride, _parts_of(spec), scaled_of(spec))
        placements.append(of_group)
    return tuple(placements)


def _parts_of(spec: Any) -> tuple[tuple[int, torch.dtype], ...]:
    if not _is_recurrent(spec):
        return ()
    pairs = zip(spec.shapes, spec.dtypes, strict=True)
    return tuple((math.prod(shape) * dtype.itemsize, dtype) for shape, dtype in pairs)


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


def hash_block_size(vllm_config: Any, kv_cache_config: Any) -> int:
    """Tokens per block hash."""
    resolved = getattr(kv_cache_config, "hash_block_size", None)
    return int(resolved or vllm_config.cache_config.block_size)


def layer_token_bytes(kv_cache_config: Any) -> int:
    """Bytes of a token's keys and values in one layer of a rank, of an engine's one KV group."""
    (group,) = kv_cache_config.kv_cache_groups
    return int(group.kv_cache_spec.page_size_bytes) // int(group.kv_cache_spec.block_size)


def kv_replicas(kv_cache_config: Any) -> int:
    """How many consecutive tensor-parallel ranks hold identical KV (1: none)."""
    return int(getattr(kv_cache_config, "kv_tp_replicas", 1))


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


def record_places(page_bytes: Sequence[int], replicas: int) -> list[int]:
    """Where each of this worker's layers begins within a block's record.

    Records are ordered by layer, then KV head, whatever the parallel sizes: of each layer the bytes
    of all tensor-parallel ranks follow each other, and the layers of a pipeline stage those of the
    stages before it. Of ``replicas`` consecutive ranks with identical KV, one counts.
    """
    from vllm.distributed import parallel_state

    tensor = parallel_state.get_tp_group()
    stages = parallel_state.get_pp_group()
    writers = tensor.world_size // replicas
    at = 0
    if stages.world_size > 1:
        sizes: list[int | None] = [None] * stages.world_size
        torch.distributed.all_gather_object(sizes, sum(page_bytes), group=stages.cpu_group)
        at = sum(size or 0 for size in sizes[: stages.rank_in_group]) * writers
    return places_of(page_bytes, at, tensor.rank_in_group // replicas, writers)


def places_of(page_bytes: Sequence[int], at: int, writer: int, writers: int) -> list[int]:
    """Where the layers of the ``writer``-th of ``writers`` equal shards begin in a record, the
    first layer at byte ``at``."""
    places = []
    for nbytes in page_bytes:
        places.append(at + writer * nbytes)
        at += writers * nbytes
    return places


def require_supported(vllm_config: Any, kv_cache_config: Any) -> None:
    """Raises EngineError with cause and cure for what the pool cannot serve rightly."""
    for group in kv_cache_config.kv_cache_groups:
        name = type(group.kv_cache_spec).__name__
        if not getattr(group.kv_cache_spec, "prefix_cacheable", True):
            raise EngineError(
                f"this model has layers whose cache vLLM itself cannot share between requests "
                f"({name}: {', '.join(group.layer_names[:3])}); kvrecall cannot serve it"
            )
        if name.startswith("CrossAttention"):
            raise EngineError(
                "this model attends to an encoder (cross-attention), whose cache no prefix of "
                "tokens identifies; kvrecall serves decoders"
            )
    if not kv_cache_config.kv_cache_groups:
        raise EngineError("this model has no KV cache, so there is nothing to pool")
    if not vllm_config.cache_config.enable_prefix_caching:
        raise EngineError(
            "prefix caching is off, and a KV pool works only on top of it. Pass "
            "--enable-prefix-caching; if vLLM turned it off itself, this model cannot continue "
            "from a cached prefix on this platform (for example MLA on a CPU without AMX)"
        )
    parallel = vllm_config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise EngineError(
                f"{name} is {getattr(parallel, name)}: {CONTEXT_PARALLEL}; set it to 1, or start "
                "vLLM without the kvrecall connector"
            )
    policy = vllm_config.kv_transfer_config.kv_load_failure_policy
    if policy != "recompute":
        # A lost block must be a miss, never a failed request.
        vllm_config.kv_transfer_config.kv_load_failure_policy = "recompute"
