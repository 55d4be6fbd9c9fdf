"""Retrieval attention in place of vLLM's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kvrecall.engines.vllm.compat.config import is_on_cpu
from kvrecall.engines.vllm.compat.patches import install_at_import
from kvrecall.engines.vllm.compat.versions import require_version
from kvrecall.errors import EngineError


def require_attention() -> None:
    """Raises EngineError where retrieval attention cannot run."""
    from vllm.platforms import current_platform

    if not (is_on_cpu() or current_platform.is_cuda()):
        raise EngineError(
            "retrieval attention runs on vLLM's CPU and CUDA platforms; this is "
            f"{current_platform.device_name}; remove `retrieval` from VLLM_PLUGINS"
        )
    require_version()


def override_attention(ours: Mapping[str, str]) -> None:
    """Puts classes, named by their paths, in place of vLLM's attention backends of these names."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    for name, path in ours.items():
        register_backend(AttentionBackendEnum[name], path)


def overrides_attention(ours: Mapping[str, str]) -> bool:
    """Whether ``override_attention`` put these classes there, in this process."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    return all(AttentionBackendEnum[name].get_path() == path for name, path in ours.items())


def override_kv_cache_spec(require: Callable[[Any], None]) -> None:
    """Full-attention layers get a spec whose blocks may leave the device. Others keep theirs.
    ``require``: raises for a layer that is not to be served."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec
    from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

    from kvrecall.engines.vllm.compat.offloadable import OffloadableSpec, OffloadManager

    KVCacheSpecRegistry._ensure_registered()
    KVCacheSpecRegistry.register(OffloadableSpec, OffloadManager, FullAttentionSpec)

    def make(plain: Any) -> Any:
        def get_kv_cache_spec(self: Any) -> Any:
            from vllm.model_executor.layers.attention import Attention, MLAAttention

            made = plain(self)
            layers = self.vllm_config.compilation_config.static_forward_context
            for name in made:
                if isinstance(layers[name], Attention | MLAAttention):
                    require(layers[name])
            return {
                name: OffloadableSpec.of(spec) if type(spec) is FullAttentionSpec else spec
                for name, spec in made.items()
            }

        return get_kv_cache_spec

    install_at_import("offloadable-spec", make)
