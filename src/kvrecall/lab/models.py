"""Writes small models in Hugging Face's folder format: random weights, byte-level tokenizer; and
folders that differ from another in one thing.

They stand in for real models where only the machinery matters: names and shapes are those of
the real architecture, so that vLLM and transformers load them. The weights are scaled so that
greedy output depends on the whole prompt (attention is neither flat nor on one token, and each
block adds as much to the residual stream as it contains), because tests compare outputs. Special
tokens have low logits: greedy output never ends early.

``python -m kvrecall.lab.models PATH --architecture qwen3`` writes one. The functions that take a
folder written by ``write_model`` return the path of a new one, as a LoRA adapter of it, with
one thing changed, or of a family whose KV depends on more than weights and tokens: Phi-3 (long rope
factors), Llama 4 (attention temperature), BLIP-2 (images), fp8 scales, code in the folder.
"""

from __future__ import annotations

import enum
import json
import math
import os
import random
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import typer
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

Tensors = dict[str, Tensor]

WEIGHTS = "model.safetensors"
ADAPTER = "adapter_model.safetensors"
LONG_ROPE_FROM = 512
"""Phi-3: engines that serve longer sequences use the long factors."""

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
_EOS = 258  # <|im_end|>
_PAD = 259

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_SHARPNESS = 4.0  # standard deviation of attention scores before the softmax
_ATTENTION_GAIN = 1.5  # averaging over keys shrinks the output by about this factor
_LOGIT_SPREAD = 8.0  # standard deviation of logits


class Architecture(enum.StrEnum):
    """The supported model families, by ``model_type``."""

    QWEN3 = "qwen3"
    QWEN3_MOE = "qwen3_moe"
    QWEN2 = "qwen2"
    LLAMA = "llama"
    DEEPSEEK_V3 = "deepseek_v3"


_CLASS_NAMES = {
    Architecture.QWEN3: "Qwen3ForCausalLM",
    Architecture.QWEN3_MOE: "Qwen3MoeForCausalLM",
    Architecture.QWEN2: "Qwen2ForCausalLM",
    Architecture.LLAMA: "LlamaForCausalLM",
    Architecture.DEEPSEEK_V3: "DeepseekV3ForCausalLM",
}

_DEEPSEEK: dict[str, Any] = {
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

_QWEN3_MOE: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
"""A mixture of few experts in every layer."""


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
    seed: int = 0,
    dtype: str = "bfloat16",
    weights: bool = True,
) -> Path:
    """Writes a model folder (replacing the files of an earlier one) and returns its path.

    Equal arguments give equal bytes. A deepseek_v3 model has multi-head latent attention and a
    mixture of experts, a qwen3_moe model the latter; the first ignores ``kv_heads`` and
    ``head_dim``. Without ``weights`` an engine must
    make its own (vLLM's ``--load-format dummy``).
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
        "eos_token_id": _EOS,
        "pad_token_id": _PAD,
        "torch_dtype": dtype,
    }
    if family is Architecture.DEEPSEEK_V3:
        config |= _DEEPSEEK | {"num_key_value_heads": heads, "moe_intermediate_size": hidden}
    else:
        config["head_dim"] = head_dim
    if family is Architecture.QWEN3_MOE:
        config |= _QWEN3_MOE | {"moe_intermediate_size": hidden}
    path.mkdir(parents=True, exist_ok=True)
    if weights:
        _save(dict(_Weights(config, seed).tensors()), path / WEIGHTS)
    _write(path / "config.json", config)
    _write(path / "generation_config.json", {"eos_token_id": _EOS, "pad_token_id": _PAD})
    _write_tokenizer(path, max_position)
    return path


class _Weights:
    """Draws the tensors of a model; matrices [out, in] preserve the scale of activations."""

    def __init__(self, config: Mapping[str, Any], seed: int) -> None:
        self._config = config
        self._family = Architecture(config["model_type"])
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
        head = self._matrix(vocab, hidden, _LOGIT_SPREAD)
        head[256:] = 0  # only bytes are generated
        yield "lm_head.weight", head

    def _layer(self, index: int) -> Iterator[tuple[str, Tensor]]:
        yield "input_layernorm.weight", self._ones(self._hidden)
        yield "post_attention_layernorm.weight", self._ones(self._hidden)
        if self._family is Architecture.DEEPSEEK_V3:
            yield from self._latent_attention()
            if index:
                yield from self._experts()
                return
        else:
            yield from self._attention()
        if self._family is Architecture.QWEN3_MOE:
            yield from self._experts()
        else:
            yield from self._mlp("mlp", self._config["intermediate_size"])

    def _attention(self) -> Iterator[tuple[str, Tensor]]:
        head_dim = self._config["head_dim"]
        queries, keys = self._heads * head_dim, self._config["num_key_value_heads"] * head_dim
        normed = self._family in (Architecture.QWEN3, Architecture.QWEN3_MOE)
        sharp = 1.0 if normed else math.sqrt(_SHARPNESS)
        for name, rows, gain in (("q", queries, sharp), ("k", keys, sharp), ("v", keys, 1.0)):
            yield f"self_attn.{name}_proj.weight", self._matrix(rows, self._hidden, gain)
            if self._family is Architecture.QWEN2:
                yield f"self_attn.{name}_proj.bias", self._matrix(1, rows, 0.1 * rows**0.5)[0]
        yield "self_attn.o_proj.weight", self._matrix(self._hidden, queries, _ATTENTION_GAIN)
        if normed:
            for name in ("q", "k"):
                norm = self._ones(head_dim) * math.sqrt(_SHARPNESS)
                yield f"self_attn.{name}_norm.weight", norm

    def _latent_attention(self) -> Iterator[tuple[str, Tensor]]:
        heads, hidden = self._heads, self._hidden
        rank, nope, rope, value = (
            _DEEPSEEK[name]
            for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        )
        yield "self_attn.q_proj.weight", self._matrix(heads * (nope + rope), hidden, _SHARPNESS)
        yield "self_attn.kv_a_proj_with_mqa.weight", self._matrix(rank + rope, hidden, 1.0)
        yield "self_attn.kv_a_layernorm.weight", self._ones(rank)
        yield "self_attn.kv_b_proj.weight", self._matrix(heads * (nope + value), rank, 1.0)
        yield "self_attn.o_proj.weight", self._matrix(hidden, heads * value, _ATTENTION_GAIN)

    def _experts(self) -> Iterator[tuple[str, Tensor]]:
        shares = self._family is Architecture.DEEPSEEK_V3
        count = _DEEPSEEK["n_routed_experts"] if shares else _QWEN3_MOE["num_experts"]
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


# -- forms and changes -----------------------------------------------------------------------


def write_changed(
    path: Path,
    source: Path,
    tensors: Callable[[Tensors], None] | None = None,
    config: Mapping[str, object] | None = None,
    file: str = WEIGHTS,
    note_bytes: int = 0,
) -> Path:
    """A copy of ``source``, a model or an adapter. ``tensors`` changes the tensors of ``file`` in
    place, whose header then has a note of ``note_bytes``; ``config`` adds settings."""
    shutil.copytree(source, path, dirs_exist_ok=True)
    if tensors is not None:
        weights = load_file(source / file)
        tensors(weights)
        _save(weights, path / file, note_bytes)
    if config is not None:
        _update(path / "config.json", config)
    return path


def write_links(path: Path, source: Path) -> Path:
    """A folder of links to the files of ``source``, as the hub's cache has them."""
    path.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        (path / file.name).symlink_to(file.resolve())
    return path


def write_over(folder: Path, source: Path) -> None:
    """Overwrites the files of ``folder`` with those of ``source``; their times stay."""
    for file in folder.iterdir():
        if file.is_file():
            before = file.stat()
            shutil.copyfile(source / file.name, file)
            os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def write_indexed(path: Path, sources: Mapping[str, Path], winner: str) -> Path:
    """The weights of several models in one folder, each in a file ``model-NAME.safetensors``, and
    an index by which vLLM loads those of ``winner``. The rest is that of ``winner``."""
    shutil.copytree(sources[winner], path, dirs_exist_ok=True)
    (path / WEIGHTS).unlink()
    for name, source in sources.items():
        shutil.copyfile(source / WEIGHTS, path / f"model-{name}.safetensors")
    names = load_file(sources[winner] / WEIGHTS)
    index = {
        "metadata": {"total_size": sum(one.nbytes for one in names.values())},
        "weight_map": dict.fromkeys(sorted(names), f"model-{winner}.safetensors"),
    }
    _write(path / "model.safetensors.index.json", index)
    return path


def write_lora(path: Path, base: Path, *, rank: int = 8, seed: int = 0) -> Path:
    """Writes a PEFT adapter for the model ``base`` on its query, key, value and output layers.

    Its weights are as large as the base's own, so that answers with and without it, and those of
    two seeds, differ. Not for deepseek_v3.
    """
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    dice = torch.Generator().manual_seed(seed)
    weights: dict[str, Tensor] = {}
    for name, tensor in load_file(base / WEIGHTS).items():
        module = name.removesuffix(".weight")
        if name == module or module.rpartition(".")[2] not in targets:
            continue
        rows, columns = tensor.shape
        down = torch.randn(rank, columns, generator=dice) / columns**0.5
        up = torch.randn(rows, rank, generator=dice) / rank**0.5
        weights[f"base_model.model.{module}.lora_A.weight"] = down.to(tensor.dtype)
        weights[f"base_model.model.{module}.lora_B.weight"] = up.to(tensor.dtype)
    path.mkdir(parents=True, exist_ok=True)
    _save(weights, path / ADAPTER)
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
    _write(path / "adapter_config.json", settings)
    return path


_CODE = '''"""Qwen3 whose embeddings are turned by some places."""

from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3Model

PLACES = {places}


class TurnedConfig(Qwen3Config):
    model_type = "{model_type}"


class TurnedModel(Qwen3Model):
    config_class = TurnedConfig

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        inputs_embeds=None,
        **kwargs,
    ):
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        return super().forward(
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds.roll(PLACES, dims=-1),
            **kwargs,
        )


class TurnedForCausalLM(Qwen3ForCausalLM):
    config_class = TurnedConfig
'''


def write_code(path: Path, source: Path, places: int, *, needed: bool = True) -> Path:
    """A Qwen3 folder with a ``modeling_turned.py`` that turns embeddings by ``places``.

    ``needed``: the architecture is the file's own, which vLLM runs by its Transformers backend with
    ``trust_remote_code``. Otherwise the folder keeps its architecture, so that vLLM serves it with
    its own code and never runs the file.
    """
    shutil.copytree(source, path, dirs_exist_ok=True)
    model_type = "turned" if needed else "qwen3"
    code = _CODE.format(places=places, model_type=model_type)
    (path / "modeling_turned.py").write_text(code)
    names = {"AutoConfig": "Config", "AutoModel": "Model", "AutoModelForCausalLM": "ForCausalLM"}
    auto = {key: f"modeling_turned.Turned{name}" for key, name in names.items()}
    settings: dict[str, object] = {"auto_map": auto}
    if needed:
        settings |= {"architectures": ["TurnedForCausalLM"], "model_type": model_type}
    _update(path / "config.json", settings)
    return path


def write_phi3(path: Path, source: Path) -> Path:
    """A Phi-3 with long and short rope factors, of the weights of a Llama."""
    llama = _read(source / "config.json")

    def fuse(weights: Tensors) -> None:
        for layer in range(llama["num_hidden_layers"]):
            place = f"model.layers.{layer}"
            for fused, parts in (
                ("self_attn.qkv_proj", [f"self_attn.{name}_proj" for name in "qkv"]),
                ("mlp.gate_up_proj", ["mlp.gate_proj", "mlp.up_proj"]),
            ):
                rows = [weights.pop(f"{place}.{part}.weight") for part in parts]
                weights[f"{place}.{fused}.weight"] = torch.cat(rows)

    half = llama["head_dim"] // 2
    config = {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "original_max_position_embeddings": LONG_ROPE_FROM,
        "rope_theta": 1e4,
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0 + 0.02 * place for place in range(half)],
            "long_factor": [1.0 + 0.5 * place for place in range(half)],
        },
    }
    return write_changed(path, source, fuse, config)


def write_llama4(path: Path, source: Path) -> Path:
    """A dense Llama 4 (text) of the weights of a Llama. Every other layer has no rope, and its
    attention temperature, where it is tuned, changes every 16 tokens."""
    llama = _read(source / "config.json")
    layers = llama["num_hidden_layers"]

    def rename(weights: Tensors) -> None:
        for name in [name for name in weights if ".mlp." in name]:
            weights[name.replace(".mlp.", ".feed_forward.")] = weights.pop(name)

    config = {
        "architectures": ["Llama4ForCausalLM"],
        "model_type": "llama4_text",
        "intermediate_size_mlp": llama["intermediate_size"],
        "interleave_moe_layer_step": 0,
        "moe_layers": [],
        "num_local_experts": 1,
        "no_rope_layers": [(layer + 1) % 2 for layer in range(layers)],
        "layer_types": ["full_attention"] * layers,
        "attention_chunk_size": None,
        "floor_scale": 16,
        "attn_scale": 0.5,
        "max_position_embeddings": 2 * llama["max_position_embeddings"],
    }
    return write_changed(path, source, rename, config)


def write_kv_scales(path: Path, source: Path, scale: float) -> Path:
    """A copy whose checkpoint brings this scale for keys and values kept as fp8."""

    def add(weights: Tensors) -> None:
        for layer in range(_read(source / "config.json")["num_hidden_layers"]):
            for name in ("k_scale", "v_scale"):
                weights[f"model.layers.{layer}.self_attn.{name}"] = torch.tensor([scale])

    scheme = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor"}
    quantization = {
        "quant_method": "compressed-tensors",
        "format": "dense",
        "quantization_status": "frozen",
        "config_groups": {},
        "ignore": [],
        "kv_cache_scheme": scheme | {"dynamic": False},
    }
    return write_changed(path, source, add, {"quantization_config": quantization})


PICTURE = 56  # pixels per side
_PATCH = 14
_QUERIES = 16
_VISION = 64
"""A picture takes ``_QUERIES`` tokens; the vision encoder is ``_VISION`` wide."""


def write_blip2(path: Path, source: Path) -> Path:
    """A BLIP-2 whose language model is the Llama ``source``. A picture is 16 tokens."""
    llama = _read(source / "config.json")
    seen = {"hidden_size": _VISION, "intermediate_size": 2 * _VISION, "num_hidden_layers": 2}
    seen |= {"num_attention_heads": 2}
    tokenizer = _read(source / "tokenizer.json")
    last_token = max(tokenizer["added_tokens"], key=lambda token: int(token["id"]))
    image_token = int(last_token["id"]) + 1
    config = {
        "architectures": ["Blip2ForConditionalGeneration"],
        "model_type": "blip-2",
        "image_token_index": image_token,
        "num_query_tokens": _QUERIES,
        "text_config": llama,
        "vision_config": {
            "model_type": "blip_2_vision_model",
            "image_size": PICTURE,
            "patch_size": _PATCH,
            **seen,
        },
        "qformer_config": {
            "model_type": "blip_2_qformer",
            "encoder_hidden_size": _VISION,
            "vocab_size": llama["vocab_size"],
            **seen,
        },
        "torch_dtype": llama["torch_dtype"],
    }
    weights = dict(_eyes(config, getattr(torch, llama["torch_dtype"])))
    for name, tensor in load_file(source / WEIGHTS).items():
        weights[f"language_model.{name}"] = tensor
    shutil.copytree(source, path, dirs_exist_ok=True)
    _save(weights, path / WEIGHTS)
    _write(path / "config.json", config)
    tokenizer["added_tokens"].append({**last_token, "id": image_token, "content": "<image>"})
    _write(path / "tokenizer.json", tokenizer)
    processor: dict[str, object] = {"processor_class": "Blip2Processor"}
    _write(path / "processor_config.json", processor | {"num_query_tokens": _QUERIES})
    pixels = {
        "image_processor_type": "BlipImageProcessor",
        "size": {"height": PICTURE, "width": PICTURE},
        "do_resize": True,
        "do_rescale": True,
        "do_normalize": True,
        "do_convert_rgb": True,
        "rescale_factor": 1 / 255,
        "resample": 3,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    _write(path / "preprocessor_config.json", processor | pixels)
    return path


def write_picture(path: Path) -> Path:
    """A picture of noise, as PNG."""
    from PIL import Image

    size = (PICTURE, PICTURE)
    Image.frombytes("RGB", size, random.Random(1).randbytes(3 * PICTURE**2)).save(path)
    return path


def _eyes(config: Mapping[str, Any], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """BLIP-2's weights except its language model's, by their names in a checkpoint."""
    from transformers import Blip2Config, Blip2ForConditionalGeneration

    with torch.device("meta"):
        names = Blip2ForConditionalGeneration(Blip2Config.from_dict(dict(config))).state_dict()
    dice = torch.Generator().manual_seed(0)
    gains = {
        "query_tokens": (_QUERIES * _VISION) ** 0.5,
        "vision_model.embeddings.patch_embedding.weight": 3.0,
        "language_projection.weight": 2.0,
    }
    for name, tensor in names.items():
        if name.startswith("language_model."):
            continue
        if tensor.dim() == 1:
            yield name, torch.full(tensor.shape, float(name.endswith("weight")), dtype=dtype)
        else:
            spread = gains.get(name, 1.0) / tensor[0].numel() ** 0.5
            drawn = torch.empty(tensor.shape).normal_(0.0, spread, generator=dice)
            yield name, drawn.to(dtype)


def _save(weights: Tensors, path: Path, note_bytes: int = 0) -> None:
    whole = {name: tensor.contiguous() for name, tensor in weights.items()}
    note = {"note": " " * note_bytes} if note_bytes else {}
    save_file(whole, path, metadata={"format": "pt", **note})


def _update(path: Path, settings: Mapping[str, object]) -> None:
    _write(path, _read(path) | dict(settings))


def _read(path: Path) -> dict[str, Any]:
    known: dict[str, Any] = json.loads(path.read_text())
    return known


def _write(path: Path, value: object) -> None:
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
        "chat_template": CHAT_TEMPLATE,
    }
    _write(folder / "tokenizer_config.json", settings)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)


if __name__ == "__main__":
    typer.run(write_model)
