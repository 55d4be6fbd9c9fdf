"""Writes small models in Hugging Face's folder format: random weights, byte-level tokenizer.

They stand in for real models where only the machinery matters: every name and shape is that of
the real architecture, so that vLLM and transformers load them. The weights are scaled such that
greedy output depends on the whole prompt (attention is neither flat nor on one token, and each
block adds as much to the residual stream as lies there), since equality of outputs is what they
are used to prove. Special tokens have no logit worth choosing: greedy output never ends early.

``python -m kvrecall.lab.models PATH --architecture qwen3`` writes one.
"""

from __future__ import annotations

import enum
import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
_EOS = 258  # <|im_end|>
_PAD = 259

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_SHARPNESS = 4.0  # standard deviation of attention scores before the softmax
_ATTENTION_GAIN = 1.5  # averaging over keys shrinks the output by about this much
_LOGIT_SPREAD = 8.0  # standard deviation of logits


class Architecture(enum.StrEnum):
    """The model families that can be written, by their ``model_type``."""

    QWEN3 = "qwen3"
    QWEN2 = "qwen2"
    LLAMA = "llama"
    DEEPSEEK_V3 = "deepseek_v3"


_CLASS_NAMES = {
    Architecture.QWEN3: "Qwen3ForCausalLM",
    Architecture.QWEN2: "Qwen2ForCausalLM",
    Architecture.LLAMA: "LlamaForCausalLM",
    Architecture.DEEPSEEK_V3: "DeepseekV3ForCausalLM",
}


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a model. DeepSeek's latent attention keeps its published head sizes."""

    architecture: Architecture
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    max_position: int
    dtype: str

    @property
    def intermediate(self) -> int:
        return 3 * self.hidden

    def config(self) -> dict[str, object]:
        """Contents of config.json."""
        common: dict[str, object] = {
            "architectures": [_CLASS_NAMES[self.architecture]],
            "model_type": self.architecture.value,
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "max_position_embeddings": self.max_position,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "attention_bias": False,
            "tie_word_embeddings": False,
            "use_cache": True,
            "bos_token_id": None,
            "eos_token_id": _EOS,
            "pad_token_id": _PAD,
            "torch_dtype": self.dtype,
        }
        if self.architecture is Architecture.DEEPSEEK_V3:
            return common | _DEEPSEEK | {"moe_intermediate_size": self.hidden}
        return common | {"head_dim": self.head_dim}


_DEEPSEEK: dict[str, object] = {
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


def write_model(
    path: str | Path,
    architecture: str = "qwen3",
    *,
    hidden: int = 256,
    layers: int = 4,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
    vocab: int = 512,
    max_position: int = 32768,
    seed: int = 0,
    dtype: str = "bfloat16",
) -> Path:
    """Writes a model folder (replacing the files of an earlier one) and returns its path.

    Equal arguments give equal bytes. A deepseek_v3 model has multi-head latent attention and a
    mixture of experts; it ignores ``kv_heads`` and ``head_dim``.
    """
    if vocab < 256 + len(SPECIALS):
        raise ValueError(f"vocab is {vocab}; bytes and special tokens need {256 + len(SPECIALS)}")
    family = Architecture(architecture)
    if family is Architecture.DEEPSEEK_V3:
        kv_heads = heads
    shape = ModelShape(
        family, hidden, layers, heads, kv_heads, head_dim, vocab, max_position, dtype
    )
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    weights = dict(_Weights(shape, seed).tensors())
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    _write_json(folder / "config.json", shape.config())
    _write_json(folder / "generation_config.json", {"eos_token_id": _EOS, "pad_token_id": _PAD})
    _write_tokenizer(folder, max_position)
    return folder


def read_shape(folder: str | Path) -> ModelShape:
    """The shape of a model that ``write_model`` wrote."""
    config = json.loads((Path(folder) / "config.json").read_text())
    return ModelShape(
        Architecture(config["model_type"]),
        config["hidden_size"],
        config["num_hidden_layers"],
        config["num_attention_heads"],
        config["num_key_value_heads"],
        config["head_dim"],
        config["vocab_size"],
        config["max_position_embeddings"],
        config["torch_dtype"],
    )


class _Weights:
    """Draws the tensors of a shape; matrices [out, in] keep the scale of what passes through."""

    def __init__(self, shape: ModelShape, seed: int) -> None:
        self._shape = shape
        self._dtype: torch.dtype = getattr(torch, shape.dtype)
        self._random = torch.Generator().manual_seed(seed)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every (name, tensor) of the checkpoint."""
        shape = self._shape
        yield (
            "model.embed_tokens.weight",
            self._matrix(shape.vocab, shape.hidden, shape.hidden**0.5),
        )
        for index in range(shape.layers):
            for name, tensor in self._layer(index):
                yield f"model.layers.{index}.{name}", tensor
        yield "model.norm.weight", self._ones(shape.hidden)
        head = self._matrix(shape.vocab, shape.hidden, _LOGIT_SPREAD)
        head[256:] = 0  # only bytes are ever chosen
        yield "lm_head.weight", head

    def _layer(self, index: int) -> Iterator[tuple[str, Tensor]]:
        hidden = self._shape.hidden
        yield "input_layernorm.weight", self._ones(hidden)
        yield "post_attention_layernorm.weight", self._ones(hidden)
        if self._shape.architecture is Architecture.DEEPSEEK_V3:
            yield from self._latent_attention()
            if index:
                yield from self._experts()
                return
        else:
            yield from self._attention()
        yield from self._mlp("mlp", self._shape.intermediate)

    def _attention(self) -> Iterator[tuple[str, Tensor]]:
        shape = self._shape
        queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        normed = shape.architecture is Architecture.QWEN3
        sharp = 1.0 if normed else math.sqrt(_SHARPNESS)
        for name, rows, gain in (("q", queries, sharp), ("k", keys, sharp), ("v", keys, 1.0)):
            yield f"self_attn.{name}_proj.weight", self._matrix(rows, shape.hidden, gain)
            if shape.architecture is Architecture.QWEN2:
                yield f"self_attn.{name}_proj.bias", self._matrix(1, rows, 0.1 * rows**0.5)[0]
        yield "self_attn.o_proj.weight", self._matrix(shape.hidden, queries, _ATTENTION_GAIN)
        if normed:
            for name in ("q", "k"):
                norm = self._ones(shape.head_dim) * math.sqrt(_SHARPNESS)
                yield f"self_attn.{name}_norm.weight", norm

    def _latent_attention(self) -> Iterator[tuple[str, Tensor]]:
        heads, hidden = self._shape.heads, self._shape.hidden
        rank, nope, rope, value = 512, 128, 64, 128
        yield "self_attn.q_proj.weight", self._matrix(heads * (nope + rope), hidden, _SHARPNESS)
        yield "self_attn.kv_a_proj_with_mqa.weight", self._matrix(rank + rope, hidden, 1.0)
        yield "self_attn.kv_a_layernorm.weight", self._ones(rank)
        yield "self_attn.kv_b_proj.weight", self._matrix(heads * (nope + value), rank, 1.0)
        yield "self_attn.o_proj.weight", self._matrix(hidden, heads * value, _ATTENTION_GAIN)

    def _experts(self) -> Iterator[tuple[str, Tensor]]:
        hidden = self._shape.hidden
        count = int(str(_DEEPSEEK["n_routed_experts"]))
        yield "mlp.gate.weight", self._matrix(count, hidden, 1.0)
        yield "mlp.gate.e_score_correction_bias", torch.zeros(count, dtype=torch.float32)
        for expert in range(count):
            yield from self._mlp(f"mlp.experts.{expert}", hidden)
        yield from self._mlp("mlp.shared_experts", hidden)

    def _mlp(self, prefix: str, inner: int) -> Iterator[tuple[str, Tensor]]:
        hidden = self._shape.hidden
        yield f"{prefix}.gate_proj.weight", self._matrix(inner, hidden, 1.0)
        yield f"{prefix}.up_proj.weight", self._matrix(inner, hidden, 1.0)
        yield f"{prefix}.down_proj.weight", self._matrix(hidden, inner, 1.5)

    def _matrix(self, rows: int, columns: int, gain: float) -> Tensor:
        drawn = torch.empty(rows, columns)
        drawn.normal_(0.0, gain / columns**0.5, generator=self._random)
        return drawn.to(self._dtype)

    def _ones(self, size: int) -> Tensor:
        return torch.ones(size, dtype=self._dtype)


def write_w8a8(path: str | Path, source: str | Path) -> Path:
    """Writes an int8 form of the model ``source``, in the compressed-tensors format.

    Every linear layer but the head has symmetric int8 weights with a scale for each output
    channel; activations are quantised per token while running.
    """
    folder, origin = Path(path), Path(source)
    shutil.copytree(origin, folder, dirs_exist_ok=True)
    weights: dict[str, Tensor] = {}
    for name, tensor in load_file(origin / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            weights[name] = tensor
            continue
        wide = tensor.float()
        scale = wide.abs().amax(dim=1, keepdim=True) / 127
        weights[name] = (wide / scale).round().clamp(-128, 127).to(torch.int8)
        weights[f"{name}_scale"] = scale
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((origin / "config.json").read_text())
    integers = {"num_bits": 8, "type": "int", "symmetric": True}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": integers | {"strategy": "channel", "dynamic": False},
                "input_activations": integers | {"strategy": "token", "dynamic": True},
            }
        },
    }
    _write_json(folder / "config.json", config)
    return folder


def write_lora(path: str | Path, base: str | Path, *, rank: int = 8, seed: int = 0) -> Path:
    """Writes a PEFT adapter for the model ``base`` on its query, key, value and output layers.

    Its weights are as large as the base's own, so that answers with and without it, and those of
    two seeds, differ. Not for deepseek_v3.
    """
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    random = torch.Generator().manual_seed(seed)
    weights: dict[str, Tensor] = {}
    for name, tensor in load_file(Path(base) / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if name == module or module.rpartition(".")[2] not in targets:
            continue
        rows, columns = tensor.shape
        down = torch.randn(rank, columns, generator=random) / columns**0.5
        up = torch.randn(rows, rank, generator=random) / rank**0.5
        weights[f"base_model.model.{module}.lora_A.weight"] = down.to(tensor.dtype)
        weights[f"base_model.model.{module}.lora_B.weight"] = up.to(tensor.dtype)
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": rank,
        "lora_alpha": rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": targets,
        "inference_mode": True,
    }
    _write_json(folder / "adapter_config.json", settings)
    return folder


def _write_tokenizer(folder: Path, max_position: int) -> None:
    """One token for each byte (its id is the byte's place in ByteLevel's alphabet), no merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIALS])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_position,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "pad_token": "<|pad|>",
        "chat_template": CHAT_TEMPLATE,
    }
    _write_json(folder / "tokenizer_config.json", settings)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def _main(
    path: Annotated[Path, typer.Argument(help="Folder to write.")],
    architecture: Annotated[Architecture, typer.Option()] = Architecture.QWEN3,
    hidden: int = 256,
    layers: int = 4,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
    vocab: int = 512,
    max_position: int = 32768,
    seed: int = 0,
    dtype: str = "bfloat16",
) -> None:
    """Writes a small model with random weights and a byte-level tokenizer."""
    write_model(
        path,
        architecture.value,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab=vocab,
        max_position=max_position,
        seed=seed,
        dtype=dtype,
    )
    typer.echo(path)


if __name__ == "__main__":
    typer.run(_main)
