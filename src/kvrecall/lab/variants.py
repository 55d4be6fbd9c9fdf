"""Writes model folders that differ from another in one thing, or tell their family's own story.

Each function takes a folder that ``kvrecall.lab.models`` wrote and returns the path of a new
one. The families are those whose KV depends on more than weights and tokens: Phi-3 (long rope
factors), Llama 4 (attention temperature), BLIP-2 (images), fp8 scales, code in the folder.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvrecall.lab.models import ModelShape, read_shape

Tensors = dict[str, Tensor]

WEIGHTS = "model.safetensors"
ADAPTER = "adapter_model.safetensors"
LONG_ROPE_FROM = 512
"""Phi-3: engines that serve longer sequences use the long factors."""


def write_changed(
    path: str | Path,
    source: str | Path,
    tensors: Callable[[Tensors], None] | None = None,
    config: Mapping[str, object] | None = None,
    file: str = WEIGHTS,
    note_bytes: int = 0,
) -> Path:
    """A copy of ``source``, a model or an adapter. ``tensors`` changes in place what ``file``
    holds, whose header then has a note of ``note_bytes``; ``config`` adds settings."""
    folder = Path(path)
    shutil.copytree(source, folder, dirs_exist_ok=True)
    if tensors is not None:
        weights = load_file(Path(source) / file)
        tensors(weights)
        _save(weights, folder / file, note_bytes)
    if config is not None:
        _update(folder / "config.json", config)
    return folder


def write_links(path: str | Path, source: str | Path) -> Path:
    """A folder of links to the files of ``source``, as the hub's cache has them."""
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    for file in Path(source).iterdir():
        (folder / file.name).symlink_to(file.resolve())
    return folder


def write_over(folder: Path, source: Path) -> None:
    """Overwrites the files of ``folder`` with those of ``source``; their times stay."""
    for file in folder.iterdir():
        if file.is_file():
            before = file.stat()
            shutil.copyfile(source / file.name, file)
            os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def write_indexed(path: str | Path, sources: Mapping[str, Path], winner: str) -> Path:
    """The weights of several models in one folder, each in a file ``model-NAME.safetensors``, and
    an index by which vLLM loads those of ``winner``. The rest is that of ``winner``."""
    folder = Path(path)
    shutil.copytree(sources[winner], folder, dirs_exist_ok=True)
    (folder / WEIGHTS).unlink()
    for name, source in sources.items():
        shutil.copyfile(source / WEIGHTS, folder / f"model-{name}.safetensors")
    names = load_file(sources[winner] / WEIGHTS)
    index = {
        "metadata": {"total_size": sum(one.nbytes for one in names.values())},
        "weight_map": dict.fromkeys(sorted(names), f"model-{winner}.safetensors"),
    }
    _write(folder / "model.safetensors.index.json", index)
    return folder


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


def write_code(path: str | Path, source: str | Path, places: int, *, needed: bool = True) -> Path:
    """A Qwen3 folder with a ``modeling_turned.py`` that turns embeddings by ``places``.

    ``needed``: the architecture is the file's own, which vLLM runs by its Transformers backend with
    ``trust_remote_code``. Else the folder keeps its architecture, so that vLLM serves it with its
    own code and the file is dead.
    """
    folder = Path(path)
    shutil.copytree(source, folder, dirs_exist_ok=True)
    model_type = "turned" if needed else "qwen3"
    code = _CODE.format(places=places, model_type=model_type)
    (folder / "modeling_turned.py").write_text(code)
    names = {"AutoConfig": "Config", "AutoModel": "Model", "AutoModelForCausalLM": "ForCausalLM"}
    auto = {key: f"modeling_turned.Turned{name}" for key, name in names.items()}
    settings: dict[str, object] = {"auto_map": auto}
    if needed:
        settings |= {"architectures": ["TurnedForCausalLM"], "model_type": model_type}
    _update(folder / "config.json", settings)
    return folder


def write_phi3(path: str | Path, source: str | Path) -> Path:
    """A Phi-3 with long and short rope factors, of the weights of a Llama."""
    folder, shape = Path(path), read_shape(source)
    weights = load_file(Path(source) / WEIGHTS)
    for layer in range(shape.layers):
        place = f"model.layers.{layer}"
        for fused, parts in (
            ("self_attn.qkv_proj", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
            ("mlp.gate_up_proj", ("mlp.gate_proj", "mlp.up_proj")),
        ):
            rows = [weights.pop(f"{place}.{part}.weight") for part in parts]
            weights[f"{place}.{fused}.weight"] = torch.cat(rows)
    half = shape.head_dim // 2
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
    return _write_family(folder, source, weights, config)


def write_llama4(path: str | Path, source: str | Path) -> Path:
    """A dense Llama 4 (text) of the weights of a Llama. Every other layer has no rope, and its
    attention temperature, where it is tuned, changes every 16 tokens."""
    shape = read_shape(source)
    weights = {
        name.replace(".mlp.", ".feed_forward."): tensor
        for name, tensor in load_file(Path(source) / WEIGHTS).items()
    }
    config = {
        "architectures": ["Llama4ForCausalLM"],
        "model_type": "llama4_text",
        "intermediate_size_mlp": shape.intermediate,
        "interleave_moe_layer_step": 0,
        "moe_layers": [],
        "num_local_experts": 1,
        "no_rope_layers": [(layer + 1) % 2 for layer in range(shape.layers)],
        "layer_types": ["full_attention"] * shape.layers,
        "attention_chunk_size": None,
        "floor_scale": 16,
        "attn_scale": 0.5,
        "max_position_embeddings": 2 * shape.max_position,
    }
    return _write_family(Path(path), source, weights, config)


def write_kv_scales(path: str | Path, source: str | Path, scale: float) -> Path:
    """A copy whose checkpoint brings this scale for keys and values kept as fp8."""

    def add(weights: Tensors) -> None:
        for layer in range(read_shape(source).layers):
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


PICTURE = 56  # pixels a side
_PATCH = 14
_QUERIES = 16
_VISION = 64
"""A picture's tokens are ``_QUERIES``; what sees it is ``_VISION`` wide."""


def write_blip2(path: str | Path, source: str | Path, seed: int = 0) -> Path:
    """A BLIP-2 whose language model is the Llama ``source``. A picture is 16 tokens."""
    folder, shape = Path(path), read_shape(source)
    seen = {"hidden_size": _VISION, "intermediate_size": 2 * _VISION, "num_hidden_layers": 2}
    seen |= {"num_attention_heads": 2}
    image_token = _first_free_token(Path(source))
    config = {
        "architectures": ["Blip2ForConditionalGeneration"],
        "model_type": "blip-2",
        "image_token_index": image_token,
        "num_query_tokens": _QUERIES,
        "text_config": json.loads((Path(source) / "config.json").read_text()),
        "vision_config": {
            "model_type": "blip_2_vision_model",
            "image_size": PICTURE,
            "patch_size": _PATCH,
            **seen,
        },
        "qformer_config": {
            "model_type": "blip_2_qformer",
            "encoder_hidden_size": _VISION,
            "vocab_size": shape.vocab,
            **seen,
        },
        "torch_dtype": shape.dtype,
    }
    weights = _eyes(shape, seed)
    for name, tensor in load_file(Path(source) / WEIGHTS).items():
        weights[f"language_model.{name}"] = tensor
    shutil.copytree(source, folder, dirs_exist_ok=True)
    _save(weights, folder / WEIGHTS)
    _write(folder / "config.json", config)
    _add_special_token(folder / "tokenizer.json", image_token, "<image>")
    processor: dict[str, object] = {"processor_class": "Blip2Processor"}
    _write(folder / "processor_config.json", processor | {"num_query_tokens": _QUERIES})
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
    _write(folder / "preprocessor_config.json", processor | pixels)
    return folder


def write_picture(path: str | Path, seed: int) -> Path:
    """A picture of noise that no other seed gives, as PNG."""
    from PIL import Image

    size = (PICTURE, PICTURE)
    Image.frombytes("RGB", size, random.Random(seed).randbytes(3 * PICTURE**2)).save(path)
    return Path(path)


def _eyes(shape: ModelShape, seed: int) -> Tensors:
    """BLIP-2's weights beside those of its language model, by their names in a checkpoint."""
    dice = torch.Generator().manual_seed(seed)
    dtype: torch.dtype = getattr(torch, shape.dtype)

    def matrix(*size: int, gain: float = 1.0) -> Tensor:
        columns = torch.empty(size)[0].numel()
        drawn = torch.empty(size).normal_(0.0, gain / columns**0.5, generator=dice)
        return drawn.to(dtype)

    def linear(name: str, rows: int, columns: int, gain: float = 1.0) -> Tensors:
        weight = matrix(rows, columns, gain=gain)
        return {f"{name}.weight": weight, f"{name}.bias": torch.zeros(rows, dtype=dtype)}

    def norm(name: str) -> Tensors:
        ones, zeros = torch.ones(_VISION, dtype=dtype), torch.zeros(_VISION, dtype=dtype)
        return {f"{name}.weight": ones, f"{name}.bias": zeros}

    wide, patches = 2 * _VISION, (PICTURE // _PATCH) ** 2
    place = "vision_model.embeddings"
    weights = {
        "query_tokens": matrix(1, _QUERIES, _VISION, gain=_QUERIES**0.5 * _VISION**0.5),
        f"{place}.class_embedding": matrix(1, 1, _VISION),
        f"{place}.position_embedding": matrix(1, patches + 1, _VISION),
        f"{place}.patch_embedding.weight": matrix(_VISION, 3, _PATCH, _PATCH, gain=3.0),
        f"{place}.patch_embedding.bias": torch.zeros(_VISION, dtype=dtype),
    }
    for layer in range(2):
        place = f"vision_model.encoder.layers.{layer}"
        weights |= linear(f"{place}.self_attn.qkv", 3 * _VISION, _VISION)
        weights |= linear(f"{place}.self_attn.projection", _VISION, _VISION)
        weights |= linear(f"{place}.mlp.fc1", wide, _VISION)
        weights |= linear(f"{place}.mlp.fc2", _VISION, wide)
        weights |= norm(f"{place}.layer_norm1") | norm(f"{place}.layer_norm2")
        place = f"qformer.encoder.layer.{layer}"
        for attention in ("attention", "crossattention")[: 2 - layer]:  # every other one crosses
            for part in ("attention.query", "attention.key", "attention.value", "output.dense"):
                weights |= linear(f"{place}.{attention}.{part}", _VISION, _VISION)
            weights |= norm(f"{place}.{attention}.output.LayerNorm")
        weights |= linear(f"{place}.intermediate_query.dense", wide, _VISION)
        weights |= linear(f"{place}.output_query.dense", _VISION, wide)
        weights |= norm(f"{place}.output_query.LayerNorm")
    weights |= norm("vision_model.post_layernorm") | norm("qformer.layernorm")
    return weights | linear("language_projection", shape.hidden, _VISION, gain=2.0)


def _write_family(
    folder: Path, source: str | Path, weights: Tensors, config: Mapping[str, object]
) -> Path:
    shutil.copytree(source, folder, dirs_exist_ok=True)
    _save(weights, folder / WEIGHTS)
    _update(folder / "config.json", config)
    return folder


def _first_free_token(source: Path) -> int:
    added = json.loads((source / "tokenizer.json").read_text())["added_tokens"]
    return 1 + max(int(token["id"]) for token in added)


def _add_special_token(path: Path, number: int, text: str) -> None:
    tokenizer = json.loads(path.read_text())
    tokens = tokenizer["added_tokens"]
    tokens.append({**tokens[-1], "id": number, "content": text})
    path.write_text(json.dumps(tokenizer))


def _save(weights: Tensors, path: Path, note_bytes: int = 0) -> None:
    whole = {name: tensor.contiguous() for name, tensor in weights.items()}
    note = {"note": " " * note_bytes} if note_bytes else {}
    save_file(whole, path, metadata={"format": "pt", **note})


def _update(path: Path, settings: Mapping[str, object]) -> None:
    known: dict[str, Any] = json.loads(path.read_text())
    _write(path, known | dict(settings))


def _write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
