"""Draws the weights of models whose layers differ: windows, chunks or recurrent state beside full
attention.

Names and shapes are those of transformers' class, as it saves them, so that a checkpoint of ours
is loaded as a published one is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from kvrecall.bench.model import ATTENTION_GAIN, LOGIT_SPREAD, SHARPNESS

Settings = dict[str, Any]

_EXPERTS = 4
_TOP = 2


def _kinds(layers: int, every: int, often: str, full: str = "full_attention") -> list[str]:
    """The layers' kinds: each ``every``-th is ``full``, as in the published models."""
    return [often if (layer + 1) % every else full for layer in range(layers)]


def _gemma3(common: Mapping[str, Any], window: int) -> Settings:
    rope = {"rope_type": "default"}
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": common["head_dim"],
        "sliding_window": window,
        "layer_types": _kinds(common["num_hidden_layers"], 3, "sliding_attention"),
        "rope_parameters": {
            "sliding_attention": rope | {"rope_theta": 1e4},
            "full_attention": rope | {"rope_theta": 1e6},
        },
    }


def _gpt_oss(common: Mapping[str, Any], window: int) -> Settings:
    return {
        "sliding_window": window,
        "layer_types": _kinds(common["num_hidden_layers"], 2, "sliding_attention"),
        "attention_bias": True,
        "intermediate_size": common["hidden_size"],
        "num_local_experts": _EXPERTS,
        "num_experts_per_tok": _TOP,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": common["max_position_embeddings"] / 4096,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    }


def _llama4(common: Mapping[str, Any], window: int) -> Settings:
    layers = common["num_hidden_layers"]
    return {
        "intermediate_size_mlp": common["intermediate_size"],
        "interleave_moe_layer_step": 0,
        "moe_layers": [],
        "num_local_experts": 1,
        "num_experts_per_tok": 1,
        "no_rope_layers": [int((layer + 1) % 4 != 0) for layer in range(layers)],
        "layer_types": _kinds(layers, 4, "chunked_attention"),
        "attention_chunk_size": window,
        "attn_temperature_tuning": False,
    }


def _qwen3_next(common: Mapping[str, Any], window: int) -> Settings:
    hidden = common["hidden_size"]
    return {
        "layer_types": _kinds(common["num_hidden_layers"], 4, "linear_attention"),
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
        "linear_conv_kernel_dim": 4,
        "partial_rotary_factor": 0.25,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_experts": _EXPERTS,
        "num_experts_per_tok": _TOP,
        "moe_intermediate_size": hidden,
        "shared_expert_intermediate_size": hidden,
    }


def _granite_hybrid(common: Mapping[str, Any], window: int) -> Settings:
    hidden = common["hidden_size"]
    return {
        "layer_types": _kinds(common["num_hidden_layers"], 4, "mamba", "attention"),
        "shared_intermediate_size": common["intermediate_size"],
        "intermediate_size": hidden,
        "num_local_experts": _EXPERTS,
        "num_experts_per_tok": _TOP,
        "position_embedding_type": "rope",
        "embedding_multiplier": 1.0,
        "logits_scaling": 1.0,
        "residual_multiplier": 1.0,
        "attention_multiplier": (hidden // common["num_attention_heads"]) ** -0.5,
        "mamba_expand": 2,
        "mamba_n_heads": 8,
        "mamba_d_head": 2 * hidden // 8,
        "mamba_d_state": 64,
        "mamba_n_groups": 1,
        "mamba_d_conv": 4,
        "mamba_chunk_size": 64,
    }


SETTINGS: Mapping[str, Callable[[Mapping[str, Any], int], Settings]] = {
    "gemma3_text": _gemma3,
    "gpt_oss": _gpt_oss,
    "llama4_text": _llama4,
    "qwen3_next": _qwen3_next,
    "granitemoehybrid": _granite_hybrid,
}
"""By ``model_type``: the settings a model of these common ones has beside them, given the tokens of
a window or chunk."""


def weights(config: Mapping[str, Any], seed: int) -> Iterator[tuple[str, Tensor]]:
    """Every (name, tensor) of the checkpoint."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.core_model_loading import revert_weight_conversion

    dtype: torch.dtype = getattr(torch, config["torch_dtype"])
    settings = {name: value for name, value in config.items() if name != "model_type"}
    made = AutoConfig.for_model(config["model_type"], **settings)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(made, dtype=torch.float32)
        drawn = {name: _drawn(name, tensor, config) for name, tensor in model.state_dict().items()}
    for name, tensor in revert_weight_conversion(model, drawn).items():
        yield name, tensor.to(dtype)


_GAINS = {"o_proj": ATTENTION_GAIN, "out_proj": 1.5, "down_proj": 1.5, "output_linear": 1.5}


def _drawn(name: str, tensor: Tensor, config: Mapping[str, Any]) -> Tensor:
    """A tensor of the model, which transformers has initialised for training, as ours has it."""
    *_, module, last = name.split(".")
    if module == "embed_tokens":
        # Gemma multiplies embeddings by the root of their length
        scaled = config["model_type"] == "gemma3_text"
        return torch.empty_like(tensor).normal_(0.0, tensor.shape[-1] ** -0.5 if scaled else 1.0)
    if module in ("q_norm", "k_norm"):
        return tensor + math.sqrt(SHARPNESS) - 1.0  # is 1, or 0 where the layer adds 1
    if last == "dt_bias":  # states remember from ten to a thousand tokens
        steps = torch.logspace(-3, -1, tensor.numel())
        return torch.log(torch.expm1(steps))
    if last == "A_log":
        return torch.linspace(1, 4, tensor.numel()).log().reshape(tensor.shape)
    if last == "sinks":
        return torch.empty_like(tensor).normal_(0.0, 2.0)
    if tensor.dim() == 1:
        return tensor
    if last.endswith("bias"):
        return torch.empty_like(tensor).normal_(0.0, 0.1)
    gain = _GAINS.get(last if last in _GAINS else module, 1.0)
    if module in ("q_proj", "k_proj") and config["model_type"] not in ("gemma3_text", "qwen3_next"):
        gain = math.sqrt(SHARPNESS)
    if module == "lm_head":
        gain = LOGIT_SPREAD
    transposed = config["model_type"] == "gpt_oss" and tensor.dim() == 3
    inputs = tensor.shape[-2] if transposed else tensor.shape[-1]
    drawn = torch.empty_like(tensor).normal_(0.0, gain / inputs**0.5)
    if module == "lm_head":
        drawn[256:] = 0  # only bytes are generated
    return drawn
