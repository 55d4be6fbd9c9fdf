"""What a model's config.json says about the size of its KV cache and the cost of its prefill."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvrecall.errors import ConfigError
from kvrecall.jsonfile import read_json

DTYPE_BYTES = {
    "float32": 4, "float": 4, "fp32": 4, "bfloat16": 2, "bf16": 2, "float16": 2, "fp16": 2,
    "half": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "int8": 1,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ModelShape:
    """``kv_bytes_per_token``: of all layers, each head once, as the pool stores them.
    ``active_params``: those that take part in computing one token."""

    name: str
    layers: int
    kv_heads: int
    is_latent: bool  # MLA: one latent vector for all heads, the same on all ranks
    kv_bytes_per_token: int
    attention_width: int  # query heads x head size
    params: int
    active_params: int
    weight_bytes: int
    max_context: int

    def block_bytes(self, block_tokens: int) -> int:
        return self.kv_bytes_per_token * block_tokens

    def device_bytes_per_token(self, tensor_parallel: int) -> float:
        """On all devices of an instance together: heads that do not divide are duplicated."""
        if self.is_latent:
            return float(self.kv_bytes_per_token * tensor_parallel)
        copies = max(1.0, tensor_parallel / self.kv_heads)
        return self.kv_bytes_per_token * copies

    def flops_per_token(self, depth: int) -> float:
        """Of prefilling one token after ``depth`` others."""
        return 2.0 * self.active_params + 4.0 * self.layers * self.attention_width * depth


_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def find_config(model: str, hub_cache: Path) -> Path:
    """The config.json of a model folder, of a file, or of a model of the Hugging Face hub that
    lies in ``hub_cache``. Nothing is downloaded. Raises ConfigError that says how to get it."""
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").exists():
            raise ConfigError(f"{path}: is not a model folder: it has no config.json")
        return path / "config.json"
    if path.exists() or not _HUB_ID.fullmatch(model):
        return path
    copy = hub_cache / f"models--{model.replace('/', '--')}"
    with contextlib.suppress(OSError):
        revision = (copy / "refs" / "main").read_text().strip()
        if (copy / "snapshots" / revision / "config.json").is_file():
            return copy / "snapshots" / revision / "config.json"
    others = sorted(copy.glob("snapshots/*/config.json"), key=lambda file: file.stat().st_mtime)
    if others:
        return others[-1]
    raise ConfigError(
        f"{model}: there is no such folder, and no such model in the local Hugging Face cache "
        f"({hub_cache}); only its config.json is needed: `hf download {model} config.json` puts it "
        "there"
    )


def read_shape(path: Path, kv_dtype: str = "auto", name: str = "") -> ModelShape:
    """The shape of the model in a folder, or of a config.json. ``name``: its name, by default
    that of its folder. Raises ConfigError."""
    file = path / "config.json" if path.is_dir() else path
    read = read_json(file).value
    if not isinstance(read, dict):
        raise ConfigError(f"{file}: must hold an object")
    text = read.get("text_config")
    fields = _Fields({**read, **text} if isinstance(text, dict) else read, str(file))
    return _shape(fields, file, kv_dtype, name)


class _Fields:
    def __init__(self, raw: Mapping[str, object], source: str) -> None:
        self._raw = raw
        self.source = source

    def number(self, *names: str, default: int | None = None) -> int:
        for name in names:
            value = self._raw.get(name)
            if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
                return value
        if default is None:
            raise ConfigError(f"{self.source}: {names[0]} is missing; this is not a model's config")
        return default

    def text(self, *names: str) -> str:
        return next((v for n in names if isinstance(v := self._raw.get(n), str)), "")

    def flag(self, name: str) -> bool:
        return self._raw.get(name) is True


def _shape(fields: _Fields, file: Path, kv_dtype: str, name: str) -> ModelShape:
    hidden = fields.number("hidden_size", "n_embd", "d_model")
    layers = fields.number("num_hidden_layers", "n_layer", "num_layers")
    heads = fields.number("num_attention_heads", "n_head")
    if not (hidden and layers and heads):
        raise ConfigError(f"{fields.source}: hidden_size, layers and heads must be more than 0")
    kv_heads = fields.number("num_key_value_heads", default=heads) or heads
    head = fields.number("head_dim", default=0) or hidden // heads
    latent = fields.number("kv_lora_rank", default=0)
    rope = fields.number("qk_rope_head_dim", default=0)
    model_dtype = fields.text("torch_dtype", "dtype").removeprefix("torch.") or "bfloat16"
    wanted = model_dtype if kv_dtype == "auto" else kv_dtype
    if wanted not in DTYPE_BYTES:
        raise ConfigError(f"--kv-dtype: {wanted!r}; known: auto, {', '.join(DTYPE_BYTES)}")
    width = latent + rope if latent else 2 * kv_heads * head
    params, active = _params(fields, hidden, layers, heads, kv_heads, head)
    weights = sum(f.stat().st_size for f in file.parent.glob("*.safetensors"))
    return ModelShape(
        name=name or file.parent.name or str(file),
        layers=layers,
        kv_heads=1 if latent else kv_heads,
        is_latent=bool(latent),
        kv_bytes_per_token=layers * width * DTYPE_BYTES[wanted],
        attention_width=heads * head,
        params=params,
        active_params=active,
        weight_bytes=weights or params * DTYPE_BYTES.get(model_dtype, 2),
        max_context=fields.number("max_position_embeddings", default=0),
    )


def _params(
    fields: _Fields, hidden: int, layers: int, heads: int, kv_heads: int, head: int
) -> tuple[int, int]:
    """Parameters in all and those active per token, estimated from the dimensions."""
    latent = fields.number("kv_lora_rank", default=0)
    if latent:
        nope = fields.number("qk_nope_head_dim", default=head)
        rope = fields.number("qk_rope_head_dim", default=0)
        value = fields.number("v_head_dim", default=head)
        query_rank = fields.number("q_lora_rank", default=0)
        into = query_rank * (hidden + heads * (nope + rope)) or hidden * heads * (nope + rope)
        attention = into + hidden * (latent + rope) + latent * heads * (nope + value)
        attention += heads * value * hidden
    else:
        attention = 2 * hidden * heads * head + 2 * hidden * kv_heads * head
    dense = 3 * hidden * fields.number("intermediate_size", "n_inner", default=4 * hidden)
    experts = fields.number("n_routed_experts", "num_local_experts", "num_experts", default=0)
    embedding = fields.number("vocab_size", default=0) * hidden
    embedding *= 1 if fields.flag("tie_word_embeddings") else 2
    if not experts:
        whole = layers * (attention + dense) + embedding
        return whole, whole - embedding // 2
    expert = 3 * hidden * fields.number("moe_intermediate_size", "intermediate_size")
    shared = fields.number("n_shared_experts", default=0)
    first = min(layers, fields.number("first_k_dense_replace", default=0))
    used = fields.number("num_experts_per_tok", default=2)
    base = layers * attention + first * dense
    whole = base + (layers - first) * (experts + shared) * expert + embedding
    active = base + (layers - first) * (used + shared) * expert + embedding // 2
    return whole, active
