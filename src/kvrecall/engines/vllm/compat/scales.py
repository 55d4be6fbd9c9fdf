"""KV that is quantised per token and head, with each scale beside its values in the same page.

vLLM's Triton backend keeps ``int8_per_token_head`` and ``fp8_per_token_head`` so: the keys of a
token in a head, the float32 that they are multiplied with, the values, and theirs. A block's bytes
are therefore whole, and the pool copies them like any others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

SCALE_BYTES = 4
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
