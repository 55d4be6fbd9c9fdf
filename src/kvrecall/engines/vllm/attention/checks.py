"""Refuses at engine start what retrieval attention cannot serve, rather than serve it densely.

Every refusal names the setting and the cure.
"""

from __future__ import annotations

import logging
from typing import Any

from kvrecall.attention import layers_refusal
from kvrecall.attention.index import EXACT
from kvrecall.attention.settings import RetrievalSettings
from kvrecall.engines.vllm.compat.config import fp8_type, is_on_cpu
from kvrecall.engines.vllm.identity.weights import DRAFTLESS
from kvrecall.errors import EngineError
from kvrecall.modelconfig import CacheKind

logger = logging.getLogger("vllm.kvrecall")

_HERE = "kvrecall.engines.vllm.attention"
CPU_BACKENDS = {
    "CPU_ATTN": f"{_HERE}.cpu.RetrievalBackend",
    "CPU_MLA": f"{_HERE}.latent.LatentBackend",
}
CUDA_BACKENDS = {
    "FLASH_ATTN": f"{_HERE}.cuda.FlashBackend",
    "TRITON_ATTN": f"{_HERE}.cuda.TritonBackend",
}
"""The retrieval backends, by the names of the vLLM backends that they replace."""

_WINDOW = "sliding_attention"
_KINDS = {"full_attention": CacheKind.FULL, _WINDOW: CacheKind.WINDOW}
_WAY_OUT = "or remove `retrieval` from VLLM_PLUGINS"


def backends() -> dict[str, str]:
    """The retrieval backends of this platform."""
    return CPU_BACKENDS if is_on_cpu() else CUDA_BACKENDS


def reads_in_place() -> bool:
    """Whether attention reads offloaded blocks in the arena, so that a sequence needs no slots: see
    ``AttentionKernel.on_host``."""
    return f"{_HERE}.cpu.RetrievalBackend" in backends().values()


def require_engine(vllm_config: Any, settings: RetrievalSettings) -> None:
    """Raises EngineError for an engine that cannot decode by retrieval."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    parallel, transfer = vllm_config.parallel_config, vllm_config.kv_transfer_config
    _require_speculation(vllm_config, settings)
    plain = cache.cache_dtype in ("auto", "bfloat16", "float16", "float32")
    is_read = plain or fp8_type(vllm_config) is not None
    if not is_read or (cache.cache_dtype == "fp8_e5m2" and not is_on_cpu()):
        what = f"kv_cache_dtype={cache.cache_dtype}" + ("" if is_on_cpu() else " on a GPU")
        raise _refusal(what, "leave kv_cache_dtype at auto")
    if getattr(model, "is_encoder_decoder", False) or getattr(model, "is_hybrid", False):
        raise _refusal("encoder-decoder and hybrid models", "serve a decoder with full attention")
    named = _layer_types(vllm_config)
    if refused := layers_refusal({_KINDS.get(name, name) for name in named}):
        raise _refusal(*refused)
    if _WINDOW in named and vllm_config.scheduler_config.disable_hybrid_kv_cache_manager:
        what = "sliding windows and full attention in one KV group"
        raise _refusal(what, "remove --disable-hybrid-kv-cache-manager")
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise _refusal(f"{name}={getattr(parallel, name)}", "set it to 1")
    if getattr(parallel, "enable_dbo", False):
        raise _refusal("dual batch overlap", "remove --enable-dbo")
    connector = transfer.kv_connector if transfer is not None else None
    if connector not in (None, "RecallConnector"):
        # It would write blocks behind our back, and their digests would be another block's.
        raise _refusal(f"the connector {connector}", "use RecallConnector or none")
    if getattr(getattr(vllm_config, "attention_config", 0), "hisparse_config", None) is not None:
        raise _refusal("HiSparse", "leave hisparse_config out")
    if settings.index != EXACT and not is_on_cpu():
        raise _refusal(f"VLLM_RETRIEVAL_INDEX={settings.index} on a GPU", f"leave it at {EXACT}")
    full = [at for at, name in enumerate(named) if name != _WINDOW]
    layers = full[-1] + 1 if full else model.get_total_num_hidden_layers()
    if settings.dense_layers >= layers:
        raise EngineError(
            f"VLLM_RETRIEVAL_DENSE_LAYERS={settings.dense_layers} leaves none of this model's "
            f"{layers} layers to retrieval; set it below {layers}, {_WAY_OUT}"
        )


def tell_limits(vllm_config: Any, settings: RetrievalSettings) -> None:
    """Logs that no sequence can be long enough, or leave the device."""
    most = vllm_config.model_config.max_model_len
    if most >= settings.offload_boundary and (hindrance := offload_hindrance(vllm_config)):
        logger.warning(
            "kvrecall: NO SEQUENCE LEAVES THE DEVICE: those past "
            "VLLM_RETRIEVAL_OFFLOAD_BOUNDARY=%d decode sparsely on it, because %s",
            settings.offload_boundary,
            hindrance,
        )
    if most <= settings.dense_boundary:
        logger.warning(
            "kvrecall: RETRIEVAL CAN NEVER ACT: max_model_len=%d is within "
            "VLLM_RETRIEVAL_DENSE_BOUNDARY=%d, so every sequence is attended to densely",
            most,
            settings.dense_boundary,
        )


def _require_speculation(vllm_config: Any, settings: RetrievalSettings) -> None:
    """Raises EngineError for speculation whose tokens cannot be known, or that has layers of its
    own."""
    speculative = vllm_config.speculative_config
    if speculative is None:
        return
    if speculative.method not in DRAFTLESS:
        what = f"speculative decoding by {speculative.method}, whose draft has layers of its own"
        raise _refusal(what, 'draft by {"method": "ngram"}')
    if vllm_config.scheduler_config.async_scheduling:
        # A step is planned before it is known how many of the last step's drafts were accepted.
        what = "speculative decoding under asynchronous scheduling"
        raise _refusal(what, "pass --no-async-scheduling")
    if getattr(vllm_config.model_config, "use_mla", False):
        # vLLM's kernel decodes one token of a request in a step.
        raise _refusal("speculative decoding of latent attention (MLA)", "disable speculation")
    if settings.index != EXACT:
        # A rejected draft may have filled a block that the index then has, and the sequence not.
        what = f"speculative decoding and VLLM_RETRIEVAL_INDEX={settings.index}"
        raise _refusal(what, f"leave the index at {EXACT}")


def has_window(impl: Any) -> bool:
    """Whether an attention layer has a sliding window, so that retrieval leaves it to vLLM."""
    return impl.sliding_window not in (None, -1, (-1, -1))


def _layer_types(vllm_config: Any) -> tuple[str, ...]:
    """The kind of each layer, in Hugging Face's words; empty: all are of one kind."""
    named = getattr(vllm_config.model_config.hf_text_config, "layer_types", None)
    return tuple(map(str, named)) if isinstance(named, list | tuple) else ()


def require_layer(impl: Any, vllm_config: Any) -> None:
    """Raises EngineError for an attention layer that cannot attend to selected blocks."""
    if impl.attn_type != "decoder":
        raise _refusal(f"{impl.attn_type} attention", "serve a decoder")
    if has_window(impl) and _WINDOW not in _layer_types(vllm_config):
        # Whether any layer has full attention is not known here.
        raise _refusal("sliding windows in every layer", "serve a model with full attention")
    if impl.alibi_slopes is not None:
        raise _refusal("ALiBi positions", "serve a model with rotary positions")


def require_block_size(block_size: int, settings: RetrievalSettings) -> None:
    """Raises EngineError if a block is not a whole number of digests."""
    if block_size % settings.tokens_a_digest:
        raise EngineError(
            f"block_size={block_size} is not a multiple of VLLM_RETRIEVAL_DIGEST_TOKENS="
            f"{settings.tokens_a_digest}; pass --block-size 128, or digest another number of "
            "tokens, unless VLLM_RETRIEVAL_MODE fixes it"
        )


def offload_hindrance(vllm_config: Any) -> str | None:
    """Why sequences cannot be partially offloaded, in words that follow "because"; None: they
    can."""
    transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
    if transfer is None or transfer.kv_connector != "RecallConnector":
        return "it has no pool to keep them in (use RecallConnector)"
    if parallel.pipeline_parallel_size > 1:
        return "offloading was never run with pipeline parallelism (use tensor parallelism)"
    if getattr(vllm_config.model_config, "use_mla", False):
        return "offloading was never run with latent attention (MLA)"
    if _WINDOW in _layer_types(vllm_config):
        return "its layers with sliding windows have KV groups of their own"
    if vllm_config.speculative_config is not None:
        # Each would recall over what the one before it is about to read.
        return (
            "drafts and the token before them would need slots of their own (disable speculation)"
        )
    return None


def _refusal(what: str, cure: str) -> EngineError:
    return EngineError(f"retrieval attention does not work with {what}; {cure}, {_WAY_OUT}")


def require_retrieval(layer: Any) -> None:
    """Raises EngineError for an attention layer whose backend is not a retrieval backend: it would
    be served densely."""
    is_latent = type(layer).__name__.startswith("MLA")
    if is_latent and not is_on_cpu():
        raise _refusal("latent attention (MLA) on a GPU", "serve a model with ordinary attention")
    backend = layer.attn_backend
    if f"{backend.__module__}.{backend.__name__}" not in backends().values():
        cure = f"pass --attention-backend {'CPU_MLA' if is_latent else min(backends())}"
        raise _refusal(f"the attention backend {backend.get_name()}", cure)
