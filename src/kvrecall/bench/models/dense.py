"""Draws the weights of models whose layers are all alike: dense, mixtures of experts, MLA."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

SHARPNESS = 4.0  # standard deviation of attention scores before the softmax
ATTENTION_GAIN = 1.5  # averaging over keys shrinks the output by about this factor
LOGIT_SPREAD = 8.0  # standard deviation of logits

DEEPSEEK: dict[str, Any] = {
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
}
"""Latent attention of the published head sizes, and a mixture of few experts."""

QWEN3_MOE: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
"""A mixture of few experts in every layer."""


def weights(config: Mapping[str, Any], seed: int) -> Iterator[tuple[str, Tensor]]:
    """Every (name, tensor) of the checkpoint."""
    return _Weights(config, seed).tensors()


class _Weights:
    """Draws the tensors of a model; matrices [out, in] preserve the scale of activations."""

    def __init__(self, config: Mapping[str, Any], seed: int) -> None:
        self._config = config
        self._family: str = config["model_type"]
        self._hidden: int = config["hidden_size"]
        self._heads: int = config["num_attention_heads"]
        self._dtype: torch.dtype = getattr(torch, config["torch_dtype"])
        self._random = torch.Generator().manual_seed(seed)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every (name, tensor) of the checkpoint."""
        hidden, vocab = self._hidden, self._config["vocab_size"]
        yield "model.embed_tokens.weight", self._matrix(vocab, hidden, hidden**0.5)
        for index in range(self._config["num_hidden_layers"]):
            for name, tensor in self._layer(index):
                yield f"model.layers.{index}.{name}", tensor
        yield "model.norm.weight", self._ones(hidden)
        head = self._matrix(vocab, hidden, LOGIT_SPREAD)
        head[256:] = 0  # only bytes are generated
        yield "lm_head.weight", head

    def _layer(self, index: int) -> Iterator[tuple[str, Tensor]]:
        yield "input_layernorm.weight", self._ones(self._hidden)
        yield "post_attention_layernorm.weight", self._ones(self._hidden)
        if self._family == "deepseek_v3":
            yield from self._latent_attention()
            if index:
                yield from self._experts()
                return
        else:
            yield from self._attention()
        if self._family == "qwen3_moe":
            yield from self._experts()
        else:
            yield from self._mlp("mlp", self._config["intermediate_size"])

    def _attention(self) -> Iterator[tuple[str, Tensor]]:
        head_dim = self._config["head_dim"]
        queries, keys = self._heads * head_dim, self._config["num_key_value_heads"] * head_dim
        normed = self._family in ("qwen3", "qwen3_moe")
        sharp = 1.0 if normed else math.sqrt(SHARPNESS)
        for name, rows, gain in (("q", queries, sharp), ("k", keys, sharp), ("v", keys, 1.0)):
            yield f"self_attn.{name}_proj.weight", self._matrix(rows, self._hidden, gain)
            if self._family == "qwen2":
                yield f"self_attn.{name}_proj.bias", self._matrix(1, rows, 0.1 * rows**0.5)[0]
        yield "self_attn.o_proj.weight", self._matrix(self._hidden, queries, ATTENTION_GAIN)
        if normed:
            for name in ("q", "k"):
                norm = self._ones(head_dim) * math.sqrt(SHARPNESS)
                yield f"self_attn.{name}_norm.weight", norm

    def _latent_attention(self) -> Iterator[tuple[str, Tensor]]:
        heads, hidden = self._heads, self._hidden
        rank, nope, rope, value = (
            DEEPSEEK[name]
            for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        )
        yield "self_attn.q_proj.weight", self._matrix(heads * (nope + rope), hidden, SHARPNESS)
        yield "self_attn.kv_a_proj_with_mqa.weight", self._matrix(rank + rope, hidden, 1.0)
        yield "self_attn.kv_a_layernorm.weight", self._ones(rank)
        yield "self_attn.kv_b_proj.weight", self._matrix(heads * (nope + value), rank, 1.0)
        yield "self_attn.o_proj.weight", self._matrix(hidden, heads * value, ATTENTION_GAIN)

    def _experts(self) -> Iterator[tuple[str, Tensor]]:
        shares = self._family == "deepseek_v3"
        count = DEEPSEEK["n_routed_experts"] if shares else QWEN3_MOE["num_experts"]
        yield "mlp.gate.weight", self._matrix(count, self._hidden, 1.0)
        if shares:
            yield "mlp.gate.e_score_correction_bias", torch.zeros(count, dtype=torch.float32)
        for expert in range(count):
            yield from self._mlp(f"mlp.experts.{expert}", self._hidden)
        if shares:
            yield from self._mlp("mlp.shared_experts", self._hidden)

    def _mlp(self, prefix: str, inner: int) -> Iterator[tuple[str, Tensor]]:
        yield f"{prefix}.gate_proj.weight", self._matrix(inner, self._hidden, 1.0)
        yield f"{prefix}.up_proj.weight", self._matrix(inner, self._hidden, 1.0)
        yield f"{prefix}.down_proj.weight", self._matrix(self._hidden, inner, 1.5)

    def _matrix(self, rows: int, columns: int, gain: float) -> Tensor:
        drawn = torch.empty(rows, columns)
        drawn.normal_(0.0, gain / columns**0.5, generator=self._random)
        return drawn.to(self._dtype)

    def _ones(self, size: int) -> Tensor:
        return torch.ones(size, dtype=self._dtype)
