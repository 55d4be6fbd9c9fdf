"""What a model's config.json says about the size of its KV cache and the cost of its prefill."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvrecall.errors import ConfigError
from kvrecall.modelconfig import CacheKind, Fields, read_fields
from kvrecall.plan.groups import Group, groups_of
from kvrecall.plan.layers import (
    DTYPE_BYTES,
    Ffn,
    Layer,
    LayerCache,
    dtype_of,
    experts_of,
    head_size,
    kv_heads,
    read_layers,
)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """``caches``: what each layer keeps, in the model's order. ``active_params``: those that take
    part in computing one token."""

    name: str
    layers: int
    kv_heads: int
    is_latent: bool  # MLA: one latent vector for all heads, the same on all ranks
    caches: tuple[LayerCache, ...]
    attention_width: int  # query heads x head size
    params: int
    active_params: int
    weight_bytes: int
    max_context: int

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of all attention layers, each head once, as the pool stores them."""
        return sum(cache.token_bytes for cache in self.caches)

    @property
    def full_bytes_per_token(self) -> int:
        """Of the layers that keep all tokens: what each further token of a hit adds."""
        return sum(cache.token_bytes for cache in self.caches if cache.kind is CacheKind.FULL)

    def groups(self, block_tokens: int, ranks: int = 1) -> tuple[Group, ...]:
        """vLLM's KV groups, for a ``--block-size`` of ``block_tokens``."""
        return groups_of(self.caches, block_tokens, ranks)

    def flops_per_token(self, depth: int) -> float:
        """Of prefilling one token after ``depth`` others."""
        attended = 0
        for cache in self.caches:
            attended += min(depth, cache.attends or cache.reach or depth) if cache.heads else 0
        return 2.0 * self.active_params + 4.0 * self.attention_width * attended


def read_shape(path: Path, kv_dtype: str = "auto", name: str = "") -> ModelShape:
    """The shape of the model in a folder, or of a config.json. ``name``: what to call it, if not
    by its folder. Raises ConfigError."""
    fields, file = read_fields(path)
    if fields.is_encoder_decoder or fields.has("cross_attention_layers"):
        raise ConfigError(
            f"{fields.source}: {fields.architecture} has layers that attend to an encoder's output;"
            " vLLM serves no such model with a pool, so there is none to size"
        )
    hidden = fields.number("hidden_size", "n_embd", "d_model")
    layers = read_layers(fields, kv_dtype)
    heads = fields.number("num_attention_heads", "n_head")
    if not (hidden and layers and heads):
        raise ConfigError(f"{fields.source}: hidden_size, layers and heads must be more than 0")
    if not any(layer.caches for layer in layers):
        raise ConfigError(f"{fields.source}: no layer of this model keeps KV, so nothing is pooled")
    is_latent = bool(fields.number("kv_lora_rank", default=0))
    params, active = _params(fields, layers, hidden)
    weights = sum(f.stat().st_size for f in file.parent.glob("*.safetensors"))
    return ModelShape(
        name=name or file.parent.name or str(file),
        layers=len(layers),
        kv_heads=1 if is_latent else kv_heads(fields),
        is_latent=is_latent,
        caches=tuple(cache for layer in layers for cache in layer.caches),
        attention_width=heads * head_size(fields),
        params=params,
        active_params=active,
        weight_bytes=weights or params * DTYPE_BYTES.get(dtype_of(fields), 2),
        max_context=fields.number("max_position_embeddings", default=0),
    )


def _params(fields: Fields, layers: tuple[Layer, ...], hidden: int) -> tuple[int, int]:
    """Parameters in all and those active per token, estimated from the dimensions."""
    matrices = 2 if fields.model_type == "nemotron_h" else 3
    width = fields.number("intermediate_size_mlp", "intermediate_size", "n_inner", default=0)
    dense = matrices * hidden * (width or 4 * hidden)
    embedding = fields.number("vocab_size", default=0) * hidden
    embedding *= 1 if fields.flag("tie_word_embeddings") else 2
    mixing = sum(layer.mixing for layer in layers)
    counts = {ffn: sum(layer.ffn is ffn for layer in layers) for ffn in Ffn}
    base = mixing + counts[Ffn.DENSE] * dense
    if not counts[Ffn.EXPERTS]:
        return base + embedding, base + embedding - embedding // 2
    expert = matrices * hidden * fields.number("moe_intermediate_size", "intermediate_size")
    together = fields.number(
        "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size",
        "shared_intermediate_size", default=0,
    )  # fmt: skip
    shared = matrices * hidden * together
    shared = shared or fields.number("n_shared_experts", default=0) * expert
    used = fields.number("num_experts_per_tok", default=2)
    whole = base + counts[Ffn.EXPERTS] * (experts_of(fields) * expert + shared) + embedding
    active = base + counts[Ffn.EXPERTS] * (used * expert + shared) + embedding // 2
    return whole, active
