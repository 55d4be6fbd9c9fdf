"""Identity of this engine's blocks: the namespace, and what an adapter adds to it."""

from __future__ import annotations

import json
import logging
import platform
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvrecall.block import Namespace
from kvrecall.engines.vllm import compat
from kvrecall.engines.vllm.fingerprint import file_digest, folder_digest, folder_signature
from kvrecall.engines.vllm.wire import Shard

logger = logging.getLogger("vllm.kvrecall")

_IRRELEVANT_CONFIG = ("_name_or_path", "transformers_version", "_commit_hash")


def namespace_of(vllm_config: Any, kv_cache_config: Any, shards: Sequence[Shard]) -> Namespace:
    """Namespace of an engine's blocks: all their bytes depend on, beside what vLLM hashes.

    ``shards``: what each rank holds, ordered by pipeline then tensor rank.
    """
    model = vllm_config.model_config
    cache = vllm_config.cache_config
    parallel = vllm_config.parallel_config
    parts = {
        "engine": f"vllm {compat.engine_version()}",
        "weights": weights_of(model, vllm_config.load_config.load_format),
        "architecture": config_text(model.hf_config),
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "kv_dtype": str(cache.cache_dtype),
        "block_size": str(compat.group_block_size(kv_cache_config)),
        "kernel": "; ".join(sorted({shard.kernel for shard in shards})),
        "tensor_parallel": str(parallel.tensor_parallel_size),
        "pipeline_parallel": str(parallel.pipeline_parallel_size),
        "kv_replicas": str(compat.kv_replicas(kv_cache_config)),
        "layout": json.dumps(
            [[(layer.name, layer.layout) for layer in shard.layers] for shard in shards]
        ),
        "hash": f"{cache.prefix_caching_hash_algo} seed {compat.root_seed()}",
        "python": hash_dialect(cache.prefix_caching_hash_algo),
        "speculator": speculator_of(vllm_config),
        "byte_order": sys.byteorder,
    }
    if getattr(cache, "calculate_kv_scales", False):
        logger.warning(
            "kvrecall: calculate_kv_scales takes scales from the first request served, so blocks "
            "of this engine fit no other: nothing will hit after a restart"
        )
        parts["private"] = secrets.token_hex(16)
    return Namespace.of(parts)


def hash_dialect(algo: str) -> str:
    """Pickle-based hashes may differ between Python versions; cbor ones do not."""
    return "any" if algo.endswith("cbor") else platform.python_version()


def config_text(hf_config: Any) -> str:
    """The model's configuration as canonical text, without what does not shape its KV."""
    fields = {
        name: value for name, value in hf_config.to_dict().items() if name not in _IRRELEVANT_CONFIG
    }
    return json.dumps(fields, sort_keys=True, default=str)


def weights_of(model_config: Any, load_format: str) -> str:
    """Fingerprint of the weights: content of a local checkpoint, or a hub revision.

    Where neither can be known it is random: nothing is shared and the log says so.
    """
    name = str(model_config.model)
    if str(load_format) == "dummy":
        return f"dummy seed {model_config.seed}"
    path = Path(name)
    if path.is_dir():
        return folder_digest(path)
    if path.is_file():
        return file_digest(path)
    commit = getattr(model_config.hf_config, "_commit_hash", None)
    if commit:
        return f"{name}@{commit}"
    logger.warning(
        "kvrecall: cannot tell which weights %s has (no local folder, no hub revision): blocks "
        "are private to this process and nothing will hit after a restart. Pass the path of a "
        "downloaded model, or --revision",
        name,
    )
    return f"private {secrets.token_hex(16)}"


def speculator_of(vllm_config: Any) -> str:
    """Fingerprint of a draft model whose layers share the KV cache, or ``none``."""
    speculative = vllm_config.speculative_config
    draft = getattr(speculative, "draft_model_config", None)
    if speculative is None or draft is None or speculative.method in ("ngram", "ngram_gpu"):
        return "none"
    return f"{speculative.method} {weights_of(draft, vllm_config.load_config.load_format)}"


class Adapters:
    """Content digests of LoRA adapters, taken when an adapter is first used.

    vLLM's block hash carries an adapter's name and path, not its weights.
    """

    def __init__(self) -> None:
        self._seen: dict[tuple[int, str], tuple[object, str | None]] = {}

    def digest(self, lora_request: Any) -> str | None:
        """Digest of the adapter's content; None if it cannot be known which content is loaded.

        The files of an adapter in use may be replaced while the engine keeps the old weights, or
        reloads it; from then on this adapter is not pooled, until it comes under a new id.
        """
        path = Path(lora_request.lora_path)
        name = (lora_request.lora_int_id, lora_request.lora_path)
        if not path.is_dir():
            return None
        signature = folder_signature(path)
        known = self._seen.get(name)
        if known is None:
            self._seen[name] = (signature, folder_digest(path))
        elif known[0] != signature:
            if known[1] is not None:
                logger.warning(
                    "kvrecall: adapter %s changed on disk while in use; it is no "
                    "longer pooled until loaded under a new id",
                    path,
                )
            self._seen[name] = (known[0], None)
        return self._seen[name][1]
