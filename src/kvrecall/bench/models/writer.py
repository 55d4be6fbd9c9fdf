"""Writes a model of a known architecture."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from kvrecall.bench.models import dense
from kvrecall.bench.models.folder import EOS, PAD, SPECIALS, WEIGHTS, save, write, write_tokenizer


@dataclass(frozen=True, slots=True)
class Family:
    """A ``model_type``: transformers' class, and what makes its ``config.json`` and weights out of
    the common settings. ``settings``: those it adds, from the common ones and a window."""

    class_name: str
    settings: Callable[[Mapping[str, Any], int], Mapping[str, Any]] = lambda *_: {}
    weights: Callable[[Mapping[str, Any], int], Iterator[tuple[str, Tensor]]] = dense.weights


def _latent(config: Mapping[str, Any], _: int) -> Mapping[str, Any]:
    return dense.DEEPSEEK | {
        "num_key_value_heads": config["num_attention_heads"],
        "moe_intermediate_size": config["hidden_size"],
        "head_dim": None,
    }


def _experts(config: Mapping[str, Any], _: int) -> Mapping[str, Any]:
    return dense.QWEN3_MOE | {"moe_intermediate_size": config["hidden_size"]}


FAMILIES: Mapping[str, Family] = {
    "qwen3": Family("Qwen3ForCausalLM"),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", _experts),
    "qwen2": Family("Qwen2ForCausalLM"),
    "llama": Family("LlamaForCausalLM"),
    "mistral": Family("MistralForCausalLM", lambda _, window: {"sliding_window": window}),
    "deepseek_v3": Family("DeepseekV3ForCausalLM", _latent),
}
"""The supported families whose layers are all alike, by ``model_type``."""


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
    families: Mapping[str, Family] = FAMILIES,
) -> Path:
    """Writes a model folder (replacing the files of an earlier one) and returns its path.

    Equal arguments give equal bytes. A deepseek_v3 model has multi-head latent attention and a
    mixture of experts, a qwen3_moe model the latter; the first ignores ``kv_heads`` and
    ``head_dim``. ``window``: tokens that a layer with a sliding window or a chunk attends to: all
    layers of mistral. ``families``: the laboratory has more.
    Without ``weights`` an engine must make its own (vLLM's ``--load-format dummy``).
    """
    if vocab < 256 + len(SPECIALS):
        raise ValueError(f"vocab is {vocab}; bytes and special tokens need {256 + len(SPECIALS)}")
    family = families[architecture]
    config: dict[str, Any] = {
        "architectures": [family.class_name],
        "model_type": architecture,
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
    config["head_dim"] = head_dim
    config |= family.settings(config, window)
    if config["head_dim"] is None:
        del config["head_dim"]
    path.mkdir(parents=True, exist_ok=True)
    if weights:
        save(dict(family.weights(config, seed)), path / WEIGHTS)
    write(path / "config.json", config)
    write(path / "generation_config.json", {"eos_token_id": EOS, "pad_token_id": PAD})
    write_tokenizer(path, max_position)
    return path
