"""Reads an engine's facts from vLLM's configuration, KV layout, platform and parallel groups.
Version branches of reading them are here.
"""

from __future__ import annotations

import enum
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvrecall.config import MatchUnit
from kvrecall.engines.base import CONTEXT_PARALLEL
from kvrecall.engines.vllm.compat.versions import tp_replicas
from kvrecall.environment import HASH_SEED
from kvrecall.errors import ConfigError, EngineError
from kvrecall.modelconfig import Fields
from kvrecall.nicety import nicety


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


def kv_groups(kv_cache_config: Any, contexts: int = 1) -> tuple[KvGroup, ...]:
    """The engine's KV groups, in vLLM's order. ``contexts``: ranks that share a block's tokens."""
    return tuple(_group_of(group, contexts) for group in kv_cache_config.kv_cache_groups)


def _group_of(group: Any, contexts: int) -> KvGroup:
    """The longest reach counts of a uniform group whose layers differ, and all if one is full."""
    spec = group.kv_cache_spec
    layers = list(_layer_specs(spec).values()) or [spec]
    size = int(spec.block_size) * (contexts if getattr(spec, "dcp_sharded", False) else 1)
    if all(_is_recurrent(layer) for layer in layers):
        return KvGroup(GroupKind.STATE, size, 0, True)
    reaches = [_reach_of(layer) for layer in layers]
    if all(reaches):
        return KvGroup(GroupKind.WINDOW, size, max(reaches), True)
    names = {type(layer).__name__ for layer in layers}
    return KvGroup(GroupKind.FULL, size, 0, not names <= _KEEPING)


def _layer_specs(spec: Any) -> Mapping[str, Any]:
    """The specs of the layers of a uniform group whose layers differ; empty if they do not."""
    specs = getattr(spec, "kv_cache_specs", None)
    return specs if isinstance(specs, dict) else {}


_KEEPING = {"FullAttentionSpec", "MLAAttentionSpec", "OffloadableSpec"}
"""Specs of which a running request's blocks stay, or leave once the pool has them."""


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


SCALE_BYTES = 4
"""vLLM's Triton backend keeps ``int8_per_token_head`` and ``fp8_per_token_head`` so: the keys of a
token in a head, the float32 that they are multiplied with, the values, and theirs. A block's bytes
are therefore whole, and the pool copies them like any others."""
_TYPES = {
    "INT8_PER_TOKEN_HEAD": torch.int8,
    "FP8_PER_TOKEN_HEAD": torch.float8_e4m3fn,
}
"""vLLM's ``KVQuantMode``s of eight bits, by name. int4 packs two values in a byte: not read."""


@dataclass(frozen=True, slots=True)
class Scaled:
    """Runs of ``nbytes`` values of a one-byte ``dtype``, each followed by its float32 scale."""

    nbytes: int
    dtype: torch.dtype


def scaled_of(spec: Any) -> Scaled | None:
    """How a layer's KV cache spec interleaves values and scales; None if it does not."""
    dtype = _TYPES.get(getattr(getattr(spec, "kv_quant_mode", None), "name", ""))
    if dtype is None or spec.head_size != spec.head_size_v:
        return None  # MLA has no second half
    nbytes = int(spec.head_size)
    is_known = spec.state_content_size_bytes == 2 * (nbytes + SCALE_BYTES)
    return Scaled(nbytes, dtype) if is_known else None


@dataclass(frozen=True, slots=True)
class LayerPlacement:
    """Where a layer's blocks lie: bytes of one block, and bytes from one block to the next.
    ``parts``: bytes and dtype of the tensors that a block consists of, for a recurrent layer.
    ``scaled``: of values with scales between them. ``tokens``: of a block, if the kernel keeps the
    bytes of each together; else 0."""

    page_bytes: int
    block_stride: int
    parts: tuple[tuple[int, torch.dtype], ...] = ()
    scaled: Scaled | None = None
    tokens: int = 0


_BY_TOKEN = frozenset({"CUTLASS_MLA", "FLASHMLA", "FLASH_ATTN", "FLASH_ATTN_MLA", "TRITON_MLA"})
"""Attention backends that write a token's keys and values side by side. Others pack the tokens of a
block together, as on the CPU, or are not known."""


def layer_placements(
    kv_cache_config: Any, vllm_config: Any = None
) -> tuple[Mapping[str, LayerPlacement], ...]:
    """Placement of every layer of each KV group, in a fixed order. Groups may lie in the same
    memory: a device block belongs to one of them at a time. Without ``vllm_config`` the layers'
    kernels are not known."""
    layers = {} if vllm_config is None else vllm_config.compilation_config.static_forward_context
    strides = {
        name: tensor.block_stride
        for tensor in kv_cache_config.kv_cache_tensors
        for name in tensor.layers
    }
    placements = []
    for group in kv_cache_config.kv_cache_groups:
        of_group = {}
        for name in group.layer_names:
            spec = _layer_specs(group.kv_cache_spec).get(name, group.kv_cache_spec)
            # Pages may be padded to those of another group; the padding holds nothing.
            page = int(getattr(spec, "real_page_size_bytes", spec.page_size_bytes))
            stride = strides.get(name, spec.page_size_bytes)
            tokens = spec.block_size if _backend_name(layers.get(name)) in _BY_TOKEN else 0
            pairs = zip(spec.shapes, spec.dtypes, strict=True) if _is_recurrent(spec) else ()
            parts = tuple((math.prod(shape) * dtype.itemsize, dtype) for shape, dtype in pairs)
            of_group[name] = LayerPlacement(page, stride, parts, scaled_of(spec), tokens)
        placements.append(of_group)
    return tuple(placements)


def settle_scales(vllm_config: Any, kv_caches: Mapping[str, torch.Tensor]) -> None:
    """Has vLLM set up its views of the scales now.

    It does so when a layer first runs, and then sets the scales of *all* blocks to 1: those of
    blocks that were loaded before the engine's first step would be lost.
    """
    layers = vllm_config.compilation_config.static_forward_context
    for name, tensor in kv_caches.items():
        implementation: Any = getattr(layers.get(name), "impl", None)
        if getattr(implementation, "_is_per_token_head_quant", False):
            implementation._ensure_scale_caches(tensor)


def fp8_type(vllm_config: Any) -> torch.dtype | None:
    """What a KV cache of plain bytes holds; None if it is no plain eight-bit float."""
    name = str(vllm_config.cache_config.cache_dtype)
    if name == "fp8_e5m2":
        return torch.float8_e5m2
    return torch.float8_e4m3fn if name in ("fp8", "fp8_e4m3") else None


def match_unit(kv_cache_config: Any, wanted: MatchUnit) -> int | None:
    """Tokens after which hits end inside blocks, the device's or else the pool's; None if they end
    with blocks. Raises ConfigError if a number is ``wanted`` that cannot be."""
    groups = kv_groups(kv_cache_config)
    kinds = {group.kind for group in groups}
    sizes = [group.block_size for group in groups]
    device = getattr(kv_cache_config, "cache_hit_alignment_tokens", None) or math.lcm(*sizes)
    if device < math.lcm(*sizes):
        return int(device) if kinds == {GroupKind.FULL, GroupKind.STATE} else None
    if not isinstance(wanted, int) or GroupKind.STATE in kinds:
        return None
    if len(groups) > 1 or kinds != {GroupKind.FULL}:
        what = ", ".join(str(group) for group in groups)
        raise ConfigError(
            f"match_unit is {wanted}: the pool can end hits inside blocks of models with full "
            f"attention in every layer, and of those with recurrent layers beside it; this model's "
            f'KV groups are: {what}. Leave match_unit out, or set it to "auto"'
        )
    if sizes[0] % wanted:
        raise ConfigError(
            f"match_unit is {wanted}, which does not divide the block size, {sizes[0]} tokens"
        )
    return wanted if wanted < sizes[0] else None


def layer_token_bytes(kv_cache_config: Any) -> int:
    """Bytes of a token's keys and values in one layer of a rank, of an engine's one KV group."""
    (group,) = kv_cache_config.kv_cache_groups
    return int(group.kv_cache_spec.page_size_bytes) // int(group.kv_cache_spec.block_size)


@dataclass(frozen=True, slots=True)
class Sharing:
    """How the ranks of a pipeline stage share the KV of a layer's block. ``same`` consecutive ones
    have the same KV heads. Of these, ``contexts`` take turns in its tokens, ``run`` tokens a turn
    (context parallelism); more of them hold what the first hold."""

    ranks: int = 1
    same: int = 1
    contexts: int = 1
    run: int = 1

    @property
    def parts(self) -> int:
        """Parts that differ."""
        return self.ranks // self.same * self.contexts

    def part_of(self, rank: int) -> int:
        """Which part a rank holds: counted by KV heads, then round-robin."""
        return rank // self.same * self.contexts + rank % self.contexts

    def writes(self, rank: int) -> bool:
        """Whether a rank is the first that holds its part."""
        return rank % self.same < self.contexts


ALONE = Sharing()


def sharing_of(vllm_config: Any, kv_cache_config: Any, replicas: int = 1) -> Sharing:
    """How the ranks of this engine share blocks, in the order of ``stage_rank``. ``replicas``: see
    ``head_replicas``."""
    parallel = vllm_config.parallel_config
    tensor, contexts = parallel.tensor_parallel_size, parallel.decode_context_parallel_size
    prefill = parallel.prefill_context_parallel_size
    same = int(getattr(kv_cache_config, "kv_tp_replicas", 1))
    if contexts > 1:  # then vLLM does not count them
        same = tp_replicas(kv_cache_config.kv_cache_groups, tensor)
    same = max(same, replicas)
    older = getattr(parallel, "dcp_kv_cache_interleave_size", 1)  # overrides the other
    run = older if older > 1 else parallel.cp_kv_cache_interleave_size
    return Sharing(tensor * prefill, max(same * prefill, contexts), contexts, run)


def head_replicas(model: Any, layer_names: Iterable[str]) -> int:
    """How many consecutive tensor-parallel ranks have the same KV heads: with more ranks than heads
    each head is on several. vLLM itself counts only those of latent attention. 1 if the layers
    differ in it, or do not tell: then each rank's heads count as its own."""
    found: dict[str, set[int]] = {}
    for path, module in model.named_modules():
        replicas = getattr(module, "num_kv_head_replicas", None)
        if isinstance(replicas, int):
            parent = path.replace(".base_layer", "").rpartition(".")[0]
            found.setdefault(parent, set()).add(replicas)
    counts = {n for name in layer_names for n in found.get(name.rpartition(".")[0], {1})}
    return counts.pop() if len(counts) == 1 else 1


def is_deterministic() -> bool:
    """Whether kernels give the same bits whatever else is in their batch."""
    from vllm import envs

    return bool(envs.VLLM_BATCH_INVARIANT)


def most_of_ranks(number: int, stages: bool = True) -> int:
    """The largest of the numbers that all ranks of this engine call this with, at one time; without
    ``stages``, those of this rank's pipeline stage."""
    from vllm.distributed import get_pp_group, get_tp_group

    most = torch.tensor([number], dtype=torch.int64)
    for group in (get_tp_group(), get_pp_group()) if stages else (get_tp_group(),):
        if group.world_size > 1:
            largest = torch.distributed.ReduceOp.MAX
            torch.distributed.all_reduce(most, largest, group=group.cpu_group)
    return int(most[0])


def is_on_cpu() -> bool:
    """Whether this is vLLM's CPU platform."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def device_kind() -> str:
    """``cpu``, ``cuda``, ..."""
    from vllm.platforms import current_platform

    return str(current_platform.device_type)


def traces_endpoint(vllm_config: Any) -> str | None:
    """The collector of spans (``--otlp-traces-endpoint``); None without one. vLLM has checked that
    OpenTelemetry is installed."""
    endpoint = vllm_config.observability_config.otlp_traces_endpoint
    return None if endpoint is None else str(endpoint)


def kernel_of(vllm_config: Any, layer_names: tuple[str, ...]) -> str:
    """Attention backends of the layers and the instruction set their bytes are packed for."""
    layers = vllm_config.compilation_config.static_forward_context
    names = set()
    for name in layer_names:
        layer = layers.get(name)
        # KV of tokens decoded by an approximate attention is not what an exact one computes.
        approximation = getattr(getattr(layer, "impl", None), "approximation", "")
        suffix = f" ({approximation})" if approximation else ""
        names.add(f"{_backend_name(layer)}/{getattr(layer, 'isa', '')}{suffix}")
    device = torch.accelerator.current_accelerator()
    machine = device.type if device is not None else torch.backends.cpu.get_cpu_capability()
    return f"{'+'.join(sorted(names))} on {machine}"


def _backend_name(layer: Any) -> str:
    get_name = getattr(getattr(layer, "attn_backend", None), "get_name", None)
    return str(get_name()) if get_name else "unknown"


@nicety("the estimate of what a prompt's token costs", (0.0, 0))
def prompt_token_work(vllm_config: Any) -> tuple[float, int]:
    """Operations of this rank's matrix products for a prompt token, roughly, and their width;
    zeros for a model whose configuration does not tell."""
    fields = Fields(vllm_config.model_config.hf_text_config.to_dict(), "hf_text_config")
    hidden = fields.number("hidden_size", default=0)
    layers = fields.number("num_hidden_layers", default=0)
    heads = fields.number("num_attention_heads", default=0)
    kv_heads = fields.number("num_key_value_heads", default=0) or heads
    size = fields.number("head_dim", default=0) or hidden // max(1, heads)
    experts = fields.number("num_experts_per_tok", default=0)
    wide = fields.number("moe_intermediate_size", default=0) * experts
    wide = wide or fields.number("intermediate_size", default=0)
    parallel = vllm_config.parallel_config
    ranks = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
    weights = layers * hidden * (2 * size * (heads + kv_heads) + 3 * wide)
    return 2.0 * weights / ranks, hidden


def root_seed() -> str:
    """The seed the first block's hash starts from. Settled once the engine has started."""
    from vllm.v1.core.kv_cache_utils import get_none_hash_seed

    return str(get_none_hash_seed())


def root_seed_is_random(hash_algo: str) -> bool:
    """Whether every process starts its hashes elsewhere, so that no restart can ever hit."""
    return hash_algo.startswith("xxhash") and HASH_SEED not in os.environ


def loads_are_ordered(vllm_config: Any) -> bool:
    """Whether blocks may be loaded while steps run: a consumer frees blocks only when no step can
    write to them any more; other roles may load where one step ends before the next begins."""
    consumer = bool(vllm_config.kv_transfer_config.is_kv_consumer)
    return consumer or int(vllm_config.max_concurrent_batches) == 1


def replays_graphs(vllm_config: Any) -> bool:
    """Whether it is to capture steps as full graphs, as far as attention allows."""
    mode = vllm_config.compilation_config.cudagraph_mode
    return mode is not None and bool(mode.has_full_cudagraphs())


def padded_requests(vllm_config: Any, requests: int) -> int:
    """Requests of the graph that is replayed for so many, of one token each; no fewer."""
    sizes = vllm_config.compilation_config.cudagraph_capture_sizes or ()
    return min((size for size in sizes if size >= requests), default=requests)


def most_decoded_at_once(vllm_config: Any) -> int:
    """Tokens of a request in a step in which it decodes: one, and the drafts."""
    speculative = vllm_config.speculative_config
    return 1 if speculative is None else 1 + int(speculative.num_speculative_tokens)


def layer_index(layer_name: str) -> int:
    """Which layer of the model an attention layer's name speaks of, from 0."""
    from vllm.model_executor.models.utils import extract_layer_index

    return int(extract_layer_index(layer_name))


def stage_rank() -> int:
    """This worker's place among the ranks of its pipeline stage: those that share the tokens of
    blocks follow each other, as in vLLM's decode context parallel groups."""
    from vllm.distributed import parallel_state

    prefill = parallel_state.get_pcp_group()
    rank = parallel_state.get_tensor_model_parallel_rank()
    return int(rank * prefill.world_size + prefill.rank_in_group)


def record_places(
    page_bytes: Sequence[int], piece_bytes: Sequence[int], sharing: Sharing
) -> list[int]:
    """Where each of this worker's layers begins within a block's record.

    Records are ordered by layer, then KV head, then token, whatever the parallel sizes: of each
    layer the parts of all ranks of a stage follow each other, and the layers of a pipeline stage
    those of the stages before it. ``piece_bytes``: of each layer's page what stays together.
    """
    from vllm.distributed import parallel_state

    stages = parallel_state.get_pp_group()
    at = 0
    if stages.world_size > 1:
        sizes: list[int | None] = [None] * stages.world_size
        whole = sum(page_bytes) * sharing.parts
        torch.distributed.all_gather_object(sizes, whole, group=stages.cpu_group)
        at = sum(size or 0 for size in sizes[: stages.rank_in_group])
    return places_of(page_bytes, piece_bytes, at, stage_rank(), sharing)


def places_of(
    page_bytes: Sequence[int], piece_bytes: Sequence[int], at: int, rank: int, sharing: Sharing
) -> list[int]:
    """Where the layers of a rank begin in a record, the first layer at byte ``at``."""
    heads, context = divmod(sharing.part_of(rank), sharing.contexts)
    places = []
    for nbytes, piece in zip(page_bytes, piece_bytes, strict=True):
        places.append(at + heads * sharing.contexts * nbytes + context * piece)
        at += sharing.parts * nbytes
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
    if getattr(getattr(vllm_config, "attention_config", 0), "hisparse_config", None) is not None:
        raise EngineError("HiSparse keeps KV where no pool reads it; leave hisparse_config out")
    parallel = vllm_config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise EngineError(
                f"{name} is {getattr(parallel, name)}: {CONTEXT_PARALLEL}; set it to 1, or start "
                "vLLM without the kvrecall connector"
            )
    # A lost block must be a miss, never a failed request.
    vllm_config.kv_transfer_config.kv_load_failure_policy = "recompute"
