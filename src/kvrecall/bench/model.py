"""The models of random weights that benchmarks, demo and checks serve, and their prompts.

They stand in for real models where only the machinery matters: names and shapes are those of the
real architecture, so that vLLM and transformers load them. The weights are scaled so that greedy
output depends on the whole prompt (attention is neither flat nor on one token, and each block adds
as much to the residual stream as it contains), because tests compare outputs. Special tokens have
low logits: greedy output never ends early.
"""

from __future__ import annotations

import json
import math
import platform
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

BLOCK = 128
"""Tokens of a block."""

TAIL = 16
"""Tokens behind a prefix: what a hit leaves to compute."""

_CPUINFO = Path("/proc/cpuinfo")
_BFLOAT16 = {"avx512_bf16", "amx_bf16"}
_ITEM_BYTES = {"bfloat16": 2, "float32": 4}

Tensors = dict[str, Tensor]

WEIGHTS = "model.safetensors"
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
EOS = 258  # <|im_end|>
PAD = 259

SHARPNESS = 4.0  # standard deviation of attention scores before the softmax
ATTENTION_GAIN = 1.5  # averaging over keys shrinks the output by about this factor
LOGIT_SPREAD = 8.0  # standard deviation of logits

_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class DenseWeights:
    """Draws the tensors of a model whose layers are all alike; matrices [out, in] preserve the
    scale of activations."""

    def __init__(self, config: Mapping[str, Any], seed: int) -> None:
        self.config = config
        self.family: str = config["model_type"]
        self.hidden: int = config["hidden_size"]
        self.heads: int = config["num_attention_heads"]
        self._dtype: torch.dtype = getattr(torch, config["torch_dtype"])
        self._random = torch.Generator().manual_seed(seed)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Every (name, tensor) of the checkpoint."""
        hidden, vocab = self.hidden, self.config["vocab_size"]
        yield "model.embed_tokens.weight", self.matrix(vocab, hidden, hidden**0.5)
        for index in range(self.config["num_hidden_layers"]):
            for name, tensor in self.layer(index):
                yield f"model.layers.{index}.{name}", tensor
        yield "model.norm.weight", self.ones(hidden)
        head = self.matrix(vocab, hidden, LOGIT_SPREAD)
        head[256:] = 0  # only bytes are generated
        yield "lm_head.weight", head

    def layer(self, index: int) -> Iterator[tuple[str, Tensor]]:
        yield "input_layernorm.weight", self.ones(self.hidden)
        yield "post_attention_layernorm.weight", self.ones(self.hidden)
        yield from self.attention()
        yield from self.feed_forward(index)

    def attention(self) -> Iterator[tuple[str, Tensor]]:
        head_dim = self.config["head_dim"]
        queries, keys = self.heads * head_dim, self.config["num_key_value_heads"] * head_dim
        normed = self.family.startswith("qwen3")
        sharp = 1.0 if normed else math.sqrt(SHARPNESS)
        for name, rows, gain in (("q", queries, sharp), ("k", keys, sharp), ("v", keys, 1.0)):
            yield f"self_attn.{name}_proj.weight", self.matrix(rows, self.hidden, gain)
            if self.family == "qwen2":
                yield f"self_attn.{name}_proj.bias", self.matrix(1, rows, 0.1 * rows**0.5)[0]
        yield "self_attn.o_proj.weight", self.matrix(self.hidden, queries, ATTENTION_GAIN)
        if normed:
            for name in ("q", "k"):
                norm = self.ones(head_dim) * math.sqrt(SHARPNESS)
                yield f"self_attn.{name}_norm.weight", norm

    def feed_forward(self, index: int) -> Iterator[tuple[str, Tensor]]:
        yield from self.mlp("mlp", self.config["intermediate_size"])

    def mlp(self, prefix: str, inner: int) -> Iterator[tuple[str, Tensor]]:
        yield f"{prefix}.gate_proj.weight", self.matrix(inner, self.hidden, 1.0)
        yield f"{prefix}.up_proj.weight", self.matrix(inner, self.hidden, 1.0)
        yield f"{prefix}.down_proj.weight", self.matrix(self.hidden, inner, 1.5)

    def matrix(self, rows: int, columns: int, gain: float) -> Tensor:
        drawn = torch.empty(rows, columns)
        drawn.normal_(0.0, gain / columns**0.5, generator=self._random)
        return drawn.to(self._dtype)

    def ones(self, size: int) -> Tensor:
        return torch.ones(size, dtype=self._dtype)


@dataclass(frozen=True, slots=True)
class Family:
    """A ``model_type``: transformers' class, and what makes its ``config.json`` and weights out of
    the common settings. ``settings``: those it adds, from the common ones and a window."""

    class_name: str
    settings: Callable[[Mapping[str, Any], int], Mapping[str, Any]] = lambda *_: {}
    weights: Callable[[Mapping[str, Any], int], Any] = DenseWeights


FAMILIES: Mapping[str, Family] = {
    "qwen3": Family("Qwen3ForCausalLM"),
    "llama": Family("LlamaForCausalLM"),
}
"""By ``model_type``; the laboratory has more."""


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

    Equal arguments give equal bytes. ``window``: tokens that a layer with a sliding window or a
    chunk attends to, if the family has such. Without ``weights`` an engine must make its own
    (vLLM's ``--load-format dummy``).
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
        "head_dim": head_dim,
    }
    config |= family.settings(config, window)
    if config["head_dim"] is None:
        del config["head_dim"]
    path.mkdir(parents=True, exist_ok=True)
    if weights:
        save(dict(iter(family.weights(config, seed))), path / WEIGHTS)
    write_json(path / "config.json", config)
    write_json(path / "generation_config.json", {"eos_token_id": EOS, "pad_token_id": PAD})
    _write_tokenizer(path, max_position)
    return path


def save(weights: Tensors, path: Path, note_bytes: int = 0) -> None:
    """``note_bytes``: of a note in the file's header."""
    whole = {name: tensor.contiguous() for name, tensor in weights.items()}
    note = {"note": " " * note_bytes} if note_bytes else {}
    save_file(whole, path, metadata={"format": "pt", **note})


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


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
        "chat_template": _CHAT_TEMPLATE,
    }
    write_json(folder / "tokenizer_config.json", settings)
    (folder / "chat_template.jinja").write_text(_CHAT_TEMPLATE)


def fast_dtype(cpuinfo: Path = _CPUINFO) -> str:
    """The dtype with the fastest prefill on this machine: ``bfloat16``, or ``float32`` on an x86
    processor without a GPU and without instructions for bfloat16, where products in bfloat16 take
    four to five times as long and would make hits look better than they are.
    """
    if platform.machine() != "x86_64" or torch.accelerator.is_available():
        return "bfloat16"
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return "bfloat16"
    flags = next((line for line in lines if line.startswith("flags")), "")
    return "bfloat16" if _BFLOAT16 & set(flags.split()) else "float32"


@dataclass(frozen=True, slots=True)
class BenchModel:
    """A Qwen3 whose KV cache per token is as small, next to its weights, as real models'."""

    hidden: int = 1024
    layers: int = 8
    heads: int = 16
    kv_heads: int = 4
    head_dim: int = 64
    dtype: str = field(default_factory=fast_dtype)

    @property
    def token_bytes(self) -> int:
        """Bytes of KV cache per token."""
        return _ITEM_BYTES[self.dtype] * 2 * self.layers * self.kv_heads * self.head_dim

    def write(self, folder: Path, max_position: int) -> Path:
        """Writes the model, with random weights and a byte-level tokenizer; returns its path."""
        return write_model(
            folder,
            hidden=self.hidden,
            layers=self.layers,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            max_position=max_position,
            dtype=self.dtype,
        )

    def serve(self, folder: Path, longest: int, device_bytes: int, block: int = BLOCK) -> list[str]:
        """Writes the model into ``folder``; arguments of ``kvrecall serve`` without those of the
        pool, for sequences of up to ``longest`` tokens."""
        path = self.write(folder / "bench-model", longest)
        options = {
            "max-model-len": longest,
            "block-size": block,
            "dtype": self.dtype,
            "kv-cache-memory-bytes": device_bytes,
        }
        pairs = ((f"--{name}", str(value)) for name, value in options.items())
        return [str(path), *(word for pair in pairs for word in pair)]


class Texts:
    """Prompts that share no prefix with each other, drawn from a seed."""

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)

    def document(self, tokens: int) -> str:
        """A new text of printable bytes, one token each for a byte-level tokenizer."""
        return "".join(self._random.choices("abcdefghijklmnopqrstuvwxyz      \n", k=tokens))

    def tokens(self, count: int) -> tuple[int, ...]:
        """A new prompt as token numbers."""
        return tuple(self._random.choices(range(1, 250), k=count))
