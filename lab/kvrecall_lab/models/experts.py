"""Families whose layers are all alike, beside the product's: mixtures of experts, latent attention,
biases, a window in every layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from kvrecall.bench.model import ATTENTION_GAIN, SHARPNESS, DenseWeights, Family

_DEEPSEEK: dict[str, Any] = {
    "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "first_k_dense_replace": 1, "moe_layer_freq": 1, "n_routed_experts": 4,
    "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
}  # fmt: skip
"""Latent attention of the published head sizes, and a mixture of few experts."""

_QWEN3_MOE: dict[str, Any] = {
    "num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "norm_topk_prob": True,
}  # fmt: skip


class ExpertWeights(DenseWeights):
    """A mixture of few experts in every layer."""

    experts: int = _QWEN3_MOE["num_experts"]

    def feed_forward(self, index: int) -> Iterator[tuple[str, Tensor]]:
        yield "mlp.gate.weight", self.matrix(self.experts, self.hidden, 1.0)
        for expert in range(self.experts):
            yield from self.mlp(f"mlp.experts.{expert}", self.hidden)


class LatentWeights(ExpertWeights):
    """Multi-head latent attention, and experts from the second layer on. Ignores ``kv_heads`` and
    ``head_dim``."""

    experts: int = _DEEPSEEK["n_routed_experts"]

    def attention(self) -> Iterator[tuple[str, Tensor]]:
        heads, hidden = self.heads, self.hidden
        rank, nope, rope, value = (
            _DEEPSEEK[name]
            for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        )
        yield "self_attn.q_proj.weight", self.matrix(heads * (nope + rope), hidden, SHARPNESS)
        yield "self_attn.kv_a_proj_with_mqa.weight", self.matrix(rank + rope, hidden, 1.0)
        yield "self_attn.kv_a_layernorm.weight", self.ones(rank)
        yield "self_attn.kv_b_proj.weight", self.matrix(heads * (nope + value), rank, 1.0)
        yield "self_attn.o_proj.weight", self.matrix(hidden, heads * value, ATTENTION_GAIN)

    def feed_forward(self, index: int) -> Iterator[tuple[str, Tensor]]:
        if not index:
            yield from DenseWeights.feed_forward(self, index)
            return
        yield from super().feed_forward(index)
        yield (
            "mlp.gate.e_score_correction_bias",
            torch.zeros(self.experts, dtype=torch.float32),
        )
        yield from self.mlp("mlp.shared_experts", self.hidden)


def _latent(config: Mapping[str, Any], _: int) -> Mapping[str, Any]:
    return _DEEPSEEK | {
        "num_key_value_heads": config["num_attention_heads"],
        "moe_intermediate_size": config["hidden_size"],
        "head_dim": None,
    }


def _experts(config: Mapping[str, Any], _: int) -> Mapping[str, Any]:
    return _QWEN3_MOE | {"moe_intermediate_size": config["hidden_size"]}


FAMILIES: Mapping[str, Family] = {
    "qwen2": Family("Qwen2ForCausalLM"),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", _experts, ExpertWeights),
    "mistral": Family("MistralForCausalLM", lambda _, window: {"sliding_window": window}),
    "deepseek_v3": Family("DeepseekV3ForCausalLM", _latent, LatentWeights),
}
