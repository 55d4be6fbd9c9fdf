"""Folders that differ from another in one thing.

The functions take a folder written by ``write_model`` and return the path of a new one, as a LoRA
adapter of it, with one thing changed, or of a family whose KV depends on more than weights and
tokens: Phi-3 (long rope factors), Llama 4 (attention temperature), BLIP-2 (images), fp8 scales,
code in the folder.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from kvrecall.bench.model import WEIGHTS, Tensors, save
from kvrecall.bench.model import write_json as write

ADAPTER = "adapter_model.safetensors"

LONG_ROPE_FROM = 512
"""Phi-3: engines that serve longer sequences use the long factors."""


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
        save(weights, path / file, note_bytes)
    if config is not None:
        update(path / "config.json", config)
    return path


def read(path: Path) -> dict[str, Any]:
    known: dict[str, Any] = json.loads(path.read_text())
    return known


def update(path: Path, settings: Mapping[str, object]) -> None:
    write(path, read(path) | dict(settings))


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
    write(path / "model.safetensors.index.json", index)
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
    save(weights, path / ADAPTER)
    settings = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": str(base),
        "r": rank, "lora_alpha": rank, "lora_dropout": 0.0, "bias": "none",
        "target_modules": targets, "inference_mode": True,
    }  # fmt: skip
    write(path / "adapter_config.json", settings)
    return path


_CODE = Path(__file__).with_name("turned.txt").read_text()


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
    update(path / "config.json", settings)
    return path


def write_phi3(path: Path, source: Path) -> Path:
    """A Phi-3 with long and short rope factors, of the weights of a Llama."""
    llama = read(source / "config.json")

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
    llama = read(source / "config.json")
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
        for layer in range(read(source / "config.json")["num_hidden_layers"]):
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
    llama = read(source / "config.json")
    seen = {"hidden_size": _VISION, "intermediate_size": 2 * _VISION, "num_hidden_layers": 2}
    seen |= {"num_attention_heads": 2}
    tokenizer = read(source / "tokenizer.json")
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
    save(weights, path / WEIGHTS)
    write(path / "config.json", config)
    tokenizer["added_tokens"].append({**last_token, "id": image_token, "content": "<image>"})
    write(path / "tokenizer.json", tokenizer)
    processor: dict[str, object] = {"processor_class": "Blip2Processor"}
    write(path / "processor_config.json", processor | {"num_query_tokens": _QUERIES})
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
    write(path / "preprocessor_config.json", processor | pixels)
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
