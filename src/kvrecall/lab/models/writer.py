"""Writes a model of a known architecture."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Any

from kvrecall.lab.models import dense, hybrid
from kvrecall.lab.models.folder import EOS, PAD, SPECIALS, WEIGHTS, save, write, write_tokenizer


class Architecture(enum.StrEnum):
    """The supported model families, by ``model_type``."""

    QWEN3 = "qwen3"
    QWEN3_MOE = "qwen3_moe"
    QWEN2 = "qwen2"
    LLAMA = "llama"
    MISTRAL = "mistral"
    DEEPSEEK_V3 = "deepseek_v3"
    GEMMA3 = "gemma3_text"
    GPT_OSS = "gpt_oss"
    LLAMA4 = "llama4_text"
    QWEN3_NEXT = "qwen3_next"
    GRANITE_HYBRID = "granitemoehybrid"


_CLASS_NAMES = {
    Architecture.QWEN3: "Qwen3ForCausalLM",
    Architecture.QWEN3_MOE: "Qwen3MoeForCausalLM",
    Architecture.QWEN2: "Qwen2ForCausalLM",
    Architecture.LLAMA: "LlamaForCausalLM",
    Architecture.MISTRAL: "MistralForCausalLM",
    Architecture.DEEPSEEK_V3: "DeepseekV3ForCausalLM",
    Architecture.GEMMA3: "Gemma3ForCausalLM",
    Architecture.GPT_OSS: "GptOssForCausalLM",
    Architecture.LLAMA4: "Llama4ForCausalLM",
    Architecture.QWEN3_NEXT: "Qwen3NextForCausalLM",
    Architecture.GRANITE_HYBRID: "GraniteMoeHybridForCausalLM",
}


def write_model(
    path: Path,
    architecture: str = "qwen3",
    *,
    hidden: int = 256,
    layers: int = 4,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
    vocab: int = 512,
    max_position: int = 32768,
    window: int = 256,
    seed: int = 0,
    dtype: str = "bfloat16",
    weights: bool = True,
) -> Path:
    """Writes a model folder (replacing the files of an earlier one) and returns its path.

    Equal arguments give equal bytes. A deepseek_v3 model has multi-head latent attention and a
    mixture of experts, a qwen3_moe model the latter; the first ignores ``kv_heads`` and
    ``head_dim``. ``window``: tokens that a layer with a sliding window or a chunk attends to: all
    layers of mistral, two of three of gemma3_text, every other of gpt_oss, three of four of
    llama4_text. Three of four layers of qwen3_next and granitemoehybrid keep recurrent state.
    Without ``weights`` an engine must make its own (vLLM's ``--load-format dummy``).
    """
    if vocab < 256 + len(SPECIALS):
        raise ValueError(f"vocab is {vocab}; bytes and special tokens need {256 + len(SPECIALS)}")
    family = Architecture(architecture)
    config: dict[str, Any] = {
        "architectures": [_CLASS_NAMES[family]],
        "model_type": family.value,
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": max_position,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "torch_dtype": dtype,
    }
    if family is Architecture.DEEPSEEK_V3:
        config |= dense.DEEPSEEK | {"num_key_value_heads": heads, "moe_intermediate_size": hidden}
    else:
        config["head_dim"] = head_dim
    if family is Architecture.QWEN3_MOE:
        config |= dense.QWEN3_MOE | {"moe_intermediate_size": hidden}
    if family is Architecture.MISTRAL:
        config["sliding_window"] = window
    if family in hybrid.SETTINGS:
        config |= hybrid.SETTINGS[family](config, window)
    path.mkdir(parents=True, exist_ok=True)
    if weights:
        draw = hybrid.weights if family in hybrid.SETTINGS else dense.weights
        save(dict(draw(config, seed)), path / WEIGHTS)
    write(path / "config.json", config)
    write(path / "generation_config.json", {"eos_token_id": EOS, "pad_token_id": PAD})
    write_tokenizer(path, max_position)
    return path
