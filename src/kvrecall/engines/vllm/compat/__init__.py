"""The only module that knows vLLM's versions. Everything else asks here.

Supported: 0.32 (built and tested here on the CPU). Older 0.2x versions are recognised where a
difference is known, and listed as untested in the docs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import vllm
from vllm.v1.core import kv_cache_utils

from kvrecall.errors import EngineError

TESTED_VERSION = "0.32"


def engine_version() -> str:
    """``major.minor`` of the installed vLLM."""
    return ".".join(str(vllm.__version__).split("+")[0].split(".")[:2])


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


def is_deterministic() -> bool:
    """Whether kernels give the same bits whatever else is in their batch."""
    return bool(getattr(vllm.envs, "VLLM_BATCH_INVARIANT", False))


def kv_replicas(kv_cache_config: Any) -> int:
    """How many consecutive tensor-parallel ranks hold identical KV (1: none)."""
    return int(getattr(kv_cache_config, "kv_tp_replicas", 1))


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
    return os.environ.get("PYTHONHASHSEED", "unset")


def root_seed_is_random(hash_algo: str) -> bool:
    """Whether every process starts its hashes elsewhere, so that no restart can ever hit."""
    return hash_algo.startswith("xxhash") and "PYTHONHASHSEED" not in os.environ


def hash_block_size(vllm_config: Any, kv_cache_config: Any) -> int:
    """Tokens per block hash."""
    resolved = getattr(kv_cache_config, "hash_block_size", None)
    return int(resolved or vllm_config.cache_config.block_size)


def group_block_size(kv_cache_config: Any) -> int:
    """Tokens per device block of the engine's one KV group."""
    (group,) = kv_cache_config.kv_cache_groups
    return int(group.kv_cache_spec.block_size)


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


def freed_while_running(kv_cache_config: Any) -> bool:
    """Whether the engine may free a running request's blocks (sliding windows)."""
    (group,) = kv_cache_config.kv_cache_groups
    spec = group.kv_cache_spec
    specs = getattr(spec, "kv_cache_specs", None)
    kinds = list(specs.values()) if isinstance(specs, dict) else [spec]
    return any(type(kind).__name__ != "FullAttentionSpec" for kind in kinds) and not all(
        type(kind).__name__ in ("FullAttentionSpec", "MLAAttentionSpec") for kind in kinds
    )


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


def is_on_cpu() -> bool:
    """Whether this is vLLM's CPU platform."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def require_attention() -> None:
    """Raises EngineError where retrieval attention is not to be had."""
    from vllm.platforms import current_platform

    if not (current_platform.is_cpu() or current_platform.is_cuda()):
        raise EngineError(
            "retrieval attention runs on vLLM's CPU and CUDA platforms, and this is "
            f"{current_platform.device_name}; take `retrieval` out of VLLM_PLUGINS"
        )
    if engine_version() != TESTED_VERSION:
        raise EngineError(
            f"retrieval attention was built for vLLM {TESTED_VERSION}, and this is "
            f"{engine_version()}; take `retrieval` out of VLLM_PLUGINS"
        )


def override_attention(ours: Mapping[str, str]) -> None:
    """Puts classes, told by their paths, in place of vLLM's attention backends of these names."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    for name, path in ours.items():
        register_backend(AttentionBackendEnum[name], path)


def layer_index(layer_name: str) -> int:
    """Which layer of the model an attention layer's name speaks of, from 0."""
    from vllm.model_executor.models.utils import extract_layer_index

    return int(extract_layer_index(layer_name))


def note_overwritten(vllm_config: Any, block_ids: Iterable[int]) -> None:
    """Tells attention layers that keep something about blocks which ones a load is writing."""
    for layer in vllm_config.compilation_config.static_forward_context.values():
        note = getattr(getattr(layer, "impl", None), "note_overwritten", None)
        if note is not None:
            note(block_ids)


def _attention(vllm_config: Any) -> tuple[Any, dict[str, Any]]:
    """An attention layer that speaks for its group in what it keeps beside KV, None if there is
    none; and the KV caches of all layers by name."""
    layers = vllm_config.compilation_config.static_forward_context
    caches = {name: getattr(layer, "kv_cache", None) for name, layer in layers.items()}
    impls = (getattr(layer, "impl", None) for layer in layers.values())
    return next((impl for impl in impls if hasattr(impl, "take_offload")), None), caches


def digest_pages(vllm_config: Any) -> Mapping[str, torch.Tensor]:
    """What attention layers keep of a block beside its KV, and the pool is to keep with it."""
    impl, caches = _attention(vllm_config)
    return impl.digest_pages(caches) if impl is not None else {}


def before_store(vllm_config: Any, block_ids: Iterable[int]) -> None:
    """Tells attention layers that these blocks go to the pool with what they keep of them."""
    impl, caches = _attention(vllm_config)
    if impl is not None:
        impl.before_store(block_ids, caches)


def note_restored(vllm_config: Any, block_ids: Iterable[int]) -> None:
    """Tells attention layers that a load has written these blocks and what they keep of them."""
    impl, _ = _attention(vllm_config)
    if impl is not None:
        impl.note_restored(block_ids)


def take_offload(vllm_config: Any, orders: Any, records: Any) -> set[str]:
    """Hands a step's offload orders to the attention layers, which share them; see ``Offload``.
    Returns the requests for which they could not be carried out."""
    impl, caches = _attention(vllm_config)
    return set() if impl is None else impl.take_offload(orders, caches, records)


def override_kv_cache_spec(require: Callable[[Any], None]) -> None:
    """Full-attention layers get a spec whose blocks may leave the device. Others keep theirs.
    ``require``: raises for a layer that is not to be served."""
    from vllm.model_executor.layers.attention import MLAAttention
    from vllm.model_executor.layers.attention.attention import Attention
    from vllm.v1.kv_cache_interface import FullAttentionSpec
    from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

    from kvrecall.engines.vllm.attention.spec import OffloadableSpec, OffloadManager

    KVCacheSpecRegistry._ensure_registered()
    KVCacheSpecRegistry.register(OffloadableSpec, OffloadManager, FullAttentionSpec)
    plain = Attention.get_kv_cache_spec
    if getattr(plain, "kvrecall", False):
        return

    def get_kv_cache_spec(self: Any, vllm_config: Any) -> Any:
        require(self)
        made = plain(self, vllm_config)
        return OffloadableSpec.of(made) if type(made) is FullAttentionSpec else made

    get_kv_cache_spec.kvrecall = True  # type: ignore[attr-defined]
    Attention.get_kv_cache_spec = get_kv_cache_spec
    MLAAttention.get_kv_cache_spec = lambda self, vllm_config: require(self)


def begin_lost_anew() -> None:
    """Has vLLM's scheduler preempt requests that the workers report as lost, before it looks at
    what the step computed of them, which is dropped. They are computed anew. If the workers report
    that loaded blocks are wrong, all running requests begin anew, with an empty device cache, and
    loads under way count as failed."""
    from vllm.v1.core.sched.scheduler import Scheduler

    from kvrecall.engines.vllm.connector.wire import StepReport

    plain = Scheduler.update_from_output
    if getattr(plain, "kvrecall", False):
        return

    doomed: set[str] = set()  # requests whose loads, when they end, were in vain

    def update_from_output(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        transfers = model_runner_output.kv_connector_output
        report = transfers.kv_connector_worker_meta if transfers is not None else None
        if isinstance(report, StepReport):
            for request_id in report.lost:
                _begin_anew(self, self.requests.get(request_id))
            if report.refuted:
                doomed.update(_begin_all_anew(self))
        if doomed and transfers is not None and transfers.finished_recving:
            ended = doomed & transfers.finished_recving
            transfers.failed_recving = (transfers.failed_recving or set()) | ended
            doomed.difference_update(ended)
        return plain(self, scheduler_output, model_runner_output)

    update_from_output.kvrecall = True  # type: ignore[attr-defined]
    Scheduler.update_from_output = update_from_output


def _begin_anew(scheduler: Any, request: Any) -> None:
    """As vLLM's ``reset_prefix_cache`` does it with running requests."""
    if request is None or request not in scheduler.running:
        return
    scheduler.running.remove(request)
    scheduler._preempt_request(request, time.monotonic(), drop_stale_output=True)
    scheduler.prev_step_scheduled_req_ids.discard(request.request_id)


def hand_orders_first(vllm_config: Any) -> None:
    """Makes Model Runner V2 give the connector a step's orders before the step touches a device
    block or builds attention metadata, as V1 does. Idempotent.

    V2 itself calls ``handle_preemptions`` only just before the forward pass. It still does, so the
    connector gets the same orders twice. Dummy runs and warm-up have no orders.
    """
    if not getattr(vllm_config, "use_v2_model_runner", False):
        return
    from vllm.distributed import kv_transfer
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    from kvrecall.engines.vllm.connector.wire import StepOrders

    plain = GPUModelRunner.execute_model
    if getattr(plain, "kvrecall", False):
        return

    @torch.inference_mode()
    def execute_model(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        orders = scheduler_output.kv_connector_metadata
        if isinstance(orders, StepOrders) and kv_transfer.has_kv_transfer_group():
            kv_transfer.get_kv_transfer_group().handle_preemptions(orders)
        return plain(self, scheduler_output, *args, **kwargs)

    execute_model.kvrecall = True  # type: ignore[attr-defined]
    GPUModelRunner.execute_model = execute_model


def _begin_all_anew(scheduler: Any) -> set[str]:
    """Preempts what runs and empties the device's prefix cache, also of blocks that are in use.
    Returns the requests that are being loaded."""
    now = time.monotonic()
    while scheduler.running:
        scheduler._preempt_request(scheduler.running.pop(), now, drop_stale_output=True)
    scheduler.prev_step_scheduled_req_ids.clear()
    manager = scheduler.kv_cache_manager
    manager.evict_blocks(set(range(manager.block_pool.num_gpu_blocks)))
    return {
        request_id
        for request_id, request in scheduler.requests.items()
        if request.status.name == "WAITING_FOR_REMOTE_KVS"
    }


def most_blocks_of_sequences(vllm_config: Any, block_size: int) -> int:
    """Blocks of as many sequences as run at once, all as long as can be."""
    longest = -(-int(vllm_config.model_config.max_model_len) // block_size)
    return int(vllm_config.scheduler_config.max_num_seqs) * longest


def block_manager(kv_cache_manager: Any) -> Any:
    """The manager of the engine's one KV group."""
    (manager,) = kv_cache_manager.coordinator.single_type_managers
    return manager


def layer_token_bytes(kv_cache_config: Any) -> int:
    """Bytes of a token's keys and values in one layer of a rank."""
    (group,) = kv_cache_config.kv_cache_groups
    return int(group.kv_cache_spec.page_size_bytes) // int(group.kv_cache_spec.block_size)


def attention_activity(vllm_config: Any) -> Mapping[str, int]:
    """Totals of what this worker's attention layers did, if they count it."""
    for layer in vllm_config.compilation_config.static_forward_context.values():
        totals = getattr(getattr(layer, "impl", None), "activity", None)
        if totals is not None:
            return dict(totals())
    return {}


def loads_are_ordered(vllm_config: Any) -> bool:
    """Whether blocks may be loaded while steps run: a consumer frees blocks only when no step can
    write to them any more; other roles may load where one step ends before the next begins."""
    consumer = bool(vllm_config.kv_transfer_config.is_kv_consumer)
    return consumer or int(vllm_config.max_concurrent_batches) == 1


_DRAFTLESS = ("ngram", "ngram_gpu", "suffix")


def draft_model(vllm_config: Any) -> Any:
    """Configuration of the draft model whose layers lie in the KV cache; None without one."""
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.method in _DRAFTLESS:
        return None
    return getattr(speculative, "draft_model_config", None)


def hub_snapshot(model_config: Any, load_config: Any) -> Path | None:
    """Folder of the model's files in the local cache of the Hugging Face hub, None if they are not
    there. The commit is that of the configuration which the engine has read."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    name = str(model_config.model).split(":")[0]  # GGUF: repository:quantisation
    commit = getattr(model_config.hf_config, "_commit_hash", None)
    try:
        folder = snapshot_download(
            name,
            revision=commit or model_config.revision,
            cache_dir=load_config.download_dir,
            local_files_only=True,
        )
    except (LocalEntryNotFoundError, ValueError, OSError):
        return None
    return Path(folder)


def before_loading(begin: Callable[[Any], None]) -> None:
    """Has ``begin(vllm_config)`` called in an engine's process before the executor loads the model,
    if the engine has our connector. Idempotent."""
    from vllm.v1.executor.abstract import Executor

    plain = Executor.__init__
    if getattr(plain, "kvrecall", False):
        return

    def init(self: Any, vllm_config: Any) -> None:
        if has_our_connector(vllm_config):
            begin(vllm_config)
        plain(self, vllm_config)

    init.kvrecall = True  # type: ignore[attr-defined]
    Executor.__init__ = init


def has_our_connector(vllm_config: Any) -> bool:
    """Whether the engine's KV connector is this project's, or one made of it."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from kvrecall.engines.vllm.connector.connector import RecallConnector

    transfer = vllm_config.kv_transfer_config
    if not getattr(transfer, "kv_connector_module_path", None):
        return False
    return issubclass(KVConnectorFactory.get_connector_class(transfer), RecallConnector)


def show_model(vllm_config: Any, see: Callable[[Any], None]) -> None:
    """Has ``see(model)`` called in this worker's process, with the model it has loaded, when the
    engine asks the workers' connectors what they hold. Idempotent for a worker class."""
    from vllm.utils.import_utils import resolve_obj_by_qualname

    name = str(vllm_config.parallel_config.worker_cls)
    worker: Any = resolve_obj_by_qualname(name) if "." in name else None
    plain = getattr(worker, "get_kv_connector_handshake_metadata", None)
    if plain is None:
        return
    plain = getattr(plain, "kvrecall_plain", plain)

    def get_kv_connector_handshake_metadata(self: Any) -> Any:
        model = self.get_model() if hasattr(self, "get_model") else None
        if model is not None:
            see(model)
        return plain(self)

    get_kv_connector_handshake_metadata.kvrecall_plain = plain  # type: ignore[attr-defined]
    worker.get_kv_connector_handshake_metadata = get_kv_connector_handshake_metadata
