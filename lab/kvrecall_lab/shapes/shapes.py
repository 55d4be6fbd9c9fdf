"""The shapes: small models with the KV groups of published ones, and the engines that serve them.

Every engine computes prompts in chunks of ``CHUNK`` tokens, most prompts in several, and its device
cache holds a few of the longest only, so that requests which run together are preempted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from kvrecall.processes.child import server_environment
from kvrecall_lab.engines.engine import ONE_THREAD
from kvrecall_lab.models import write_model
from kvrecall_lab.shapes.row import TIERS

_OPTIONS: Mapping[str, Any] = {
    "max_model_len": 1280,
    "max_num_seqs": 4,
    "enable_prefix_caching": True,
    "disable_hybrid_kv_cache_manager": False,
}


@dataclass(frozen=True, slots=True)
class Shape:
    """A model and its engine. ``like``: what is published in this shape. ``architecture``,
    ``model``: arguments of ``write_model``. ``options``: of ``vllm.LLM``. ``pool``: further
    settings of the pool. ``alone``: further options of the engine without a pool, where it can have
    the same hits only in another way. ``dtype``: empty for that of vLLM's kernel. ``chunk``: tokens
    that a step computes at most. ``boundary``: tokens after which hits end. ``unit``: those inside
    blocks, if hits may end there. ``cache_bytes``: of the device cache. ``shared``: whether to try
    a pool service and Mooncake unasked. ``ranks``: whether to try other numbers of tensor-parallel
    ranks."""

    name: str
    like: str
    architecture: str
    model: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    pool: Mapping[str, Any] = field(default_factory=dict)
    alone: Mapping[str, Any] = field(default_factory=dict)
    dtype: str = "float32"
    chunk: int = 256
    boundary: int = 32
    unit: int | None = None
    cache_bytes: int = 6 << 20
    shared: bool = False
    ranks: bool = False

    @property
    def tiers(self) -> tuple[str, ...]:
        """The tiers to try unless others are asked for."""
        return TIERS if self.shared else TIERS[:3]

    def on(self, groups: Sequence[Mapping[str, Any]]) -> Shape:
        """The shape on this machine: vLLM gives blocks of recurrent layers another size where its
        kernels have states of another type. ``groups``: of an engine's ``memory()``."""
        blocks = math.lcm(*(group["block_size"] for group in groups))
        return replace(self, boundary=self.unit or blocks)

    def write(self, folder: Path) -> Path:
        """Writes the model."""
        dtype = self.dtype or latent_dtype()
        return write_model(folder / self.name, self.architecture, dtype=dtype, **self.model)

    def arguments(self, model: Path, cache: Path) -> dict[str, Any]:
        """Set-up of an engine process without a pool. ``cache``: a folder for what it remembers."""
        return {
            "model": str(model),
            "dtype": self.dtype or latent_dtype(),
            "block_size": 32,
            "max_num_batched_tokens": self.chunk,
            "kv_cache_memory_bytes": self.cache_bytes,
            **_OPTIONS,
            **self.options,
            "env": {"XDG_CACHE_HOME": str(cache)},
        }


def latent_dtype() -> str:
    """What vLLM's kernel for latent attention on this processor computes in: the one for AMX, which
    alone attends to prefixes that were cached, has bfloat16 only."""
    return "bfloat16" if torch.cpu._is_amx_tile_supported() else "float32"


def environment() -> dict[str, str]:
    """Environment of the engines: one thread each, and no size of the device cache, which would
    override theirs."""
    whole = {**server_environment(), **ONE_THREAD}
    del whole["VLLM_CPU_KVCACHE_SPACE"]
    return whole


SHAPES = (
    Shape("qwen3", "Qwen3, Llama: full attention", "qwen3", shared=True, ranks=True),
    Shape(
        "qwen3-finer", "the same in blocks of 128 tokens, with hits in units of 32; on the device "
        "blocks of 32", "qwen3", options={"block_size": 128}, pool={"match_unit": 32},
        alone={"block_size": 32}, unit=32,
    ),
    Shape("mistral", "Mistral: a window in every layer", "mistral", cache_bytes=4 << 20),
    Shape(
        "gemma3", "Gemma-3: windows and full", "gemma3_text", {"layers": 6}, shared=True, ranks=True
    ),
    Shape(
        "gpt-oss", "gpt-oss: windows with sinks and full, mixture of experts", "gpt_oss",
        {"window": 128}, cache_bytes=4 << 20, shared=True,
    ),
    Shape("llama4", "Llama 4: local chunks and full", "llama4_text", cache_bytes=4 << 20),
    Shape(
        "qwen3-next", "Qwen3-Next: gated delta net and full", "qwen3_next",
        options={"prefix_match_unit": 16}, dtype="bfloat16", unit=16, cache_bytes=26 * 147456,
        shared=True,
    ),
    # Three samples with tails of their own do not fit this device; and vLLM's CPU kernel keeps no
    # state from within a step, so it computes one block a step.
    Shape(
        "granite-hybrid", "Granite 4, Bamba: Mamba-2 and full", "granitemoehybrid",
        pool={"match_unit": "off"}, chunk=160, boundary=160, cache_bytes=26 * 163840,
    ),
    # 48 blocks in bfloat16, so that requests are preempted.
    Shape(
        "deepseek", "DeepSeek V3: latent attention", "deepseek_v3", dtype="", cache_bytes=7 << 20
    ),
)  # fmt: skip
