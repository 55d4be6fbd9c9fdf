"""A model's ``config.json``: finding it, and reading its fields with the defaults of its family."""

from __future__ import annotations

import contextlib
import copy
import enum
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvrecall.environment import CACHE_HOME, HUB_CACHE, HUB_HOME, OLD_HUB_CACHE
from kvrecall.errors import ConfigError
from kvrecall.jsonfile import MAX_BYTES, read_json

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
"""Of a model of the Hugging Face hub."""

_LINEAR = {
    "full_attention_interval": 4, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "head_dim": 256,
}  # fmt: skip
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "gemma2": {"sliding_window": 4096, "sliding_window_pattern": 2, "head_dim": 256,
               "num_attention_heads": 8, "num_key_value_heads": 4},
    "gemma3_text": {"sliding_window": 4096, "sliding_window_pattern": 6, "head_dim": 256,
                    "num_attention_heads": 8, "num_key_value_heads": 4,
                    "vocab_size": 262208, "max_position_embeddings": 131072,
                    "tie_word_embeddings": True},
    "cohere2": {"sliding_window": 4096, "sliding_window_pattern": 4},
    "olmo3": {"sliding_window": 4096, "sliding_window_pattern": 4},
    "gpt_oss": {"sliding_window": 128, "sliding_window_pattern": 2, "head_dim": 64,
                "num_experts_per_tok": 4},
    "llama4_text": {"attention_chunk_size": 8192, "no_rope_layer_interval": 4, "head_dim": 128,
                    "num_key_value_heads": 8, "interleave_moe_layer_step": 1,
                    "num_experts_per_tok": 1, "n_shared_experts": 1},
    "qwen3_next": _LINEAR, "qwen3_5_text": _LINEAR, "qwen3_5_moe_text": _LINEAR,
    "jamba": {"attn_layer_period": 8, "attn_layer_offset": 4, "mamba_d_state": 16,
              "mamba_d_conv": 4, "mamba_expand": 2, "expert_layer_period": 2,
              "expert_layer_offset": 1, "num_key_value_heads": 8},
    "bamba": {"mamba_n_heads": 128, "mamba_d_head": "auto", "mamba_n_groups": 1,
              "mamba_d_state": 256, "mamba_d_conv": 4, "mamba_expand": 2},
    "granitemoehybrid": {"mamba_n_heads": 128, "mamba_d_head": "auto", "mamba_n_groups": 1,
                         "mamba_d_state": 256, "mamba_d_conv": 4, "mamba_expand": 2},
    "falcon_h1": {"mamba_n_heads": 128, "mamba_d_head": "auto", "mamba_n_groups": 1,
                  "mamba_d_state": 256, "mamba_d_conv": 4, "mamba_expand": 2},
    "nemotron_h": {"ssm_state_size": 128, "mamba_num_heads": 128, "mamba_head_dim": 64,
                   "n_groups": 8, "conv_kernel": 4, "mamba_ssm_cache_dtype": "float32",
                   "head_dim": 128},
}  # fmt: skip
"""By ``model_type``: what Hugging Face's configuration classes assume of fields that a published
``config.json`` leaves out, as far as the size of the KV cache depends on them."""


_MOST = 1 << 53  # no number of a model is larger
_PARTS = ("thinker_config", "text_config", "llm_config", "language_config")
"""Where models of several kinds of input have the fields of their text model."""


class CacheKind(enum.StrEnum):
    """Which blocks of a prefix a layer needs to continue it."""

    FULL = "full"  # all of them
    WINDOW = "window"  # those that the last tokens attend to
    CHUNK = "chunk"  # those since the last multiple of the chunk's size
    STATE = "state"  # the one that ends with it

    def needed(self, reach: int, tokens: int, block_tokens: int) -> range:
        """The blocks that a hit of ``tokens`` needs; ``reach``: of a window or chunk, in tokens."""
        end = -(-tokens // block_tokens)
        match self:
            case CacheKind.FULL:
                return range(end)
            case CacheKind.WINDOW:
                return range(max(0, tokens - reach + 1) // block_tokens, end)
            case CacheKind.CHUNK:
                return range(tokens // reach * reach // block_tokens, end)
            case CacheKind.STATE:
                return range(max(0, end - 1), end)


def hub_cache() -> Path:
    """Where Hugging Face's libraries keep models."""
    given = os.environ.get(HUB_CACHE) or os.environ.get(OLD_HUB_CACHE)
    if given:
        return Path(given).expanduser()
    cache = os.environ.get(CACHE_HOME) or "~/.cache"
    home = os.environ.get(HUB_HOME) or os.path.join(cache, "huggingface")
    return Path(home).expanduser() / "hub"


def find_config(model: str, cache: Path) -> Path:
    """The config.json of a model folder, of a file, or of a model of the Hugging Face hub that
    lies in ``cache``. Nothing is downloaded. Raises ConfigError that says how to get it."""
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").exists():
            raise ConfigError(f"{path}: is not a model folder: it has no config.json")
        return path / "config.json"
    if path.exists() or not HUB_ID.fullmatch(model):
        return path
    copy = cache / f"models--{model.replace('/', '--')}"
    with contextlib.suppress(OSError):
        revision = (copy / "refs" / "main").read_text().strip()
        if (copy / "snapshots" / revision / "config.json").is_file():
            return copy / "snapshots" / revision / "config.json"
    others = sorted(copy.glob("snapshots/*/config.json"), key=lambda file: file.stat().st_mtime)
    if others:
        return others[-1]
    raise ConfigError(
        f"{model}: there is no such folder, and no such model in the local Hugging Face cache "
        f"({cache}); only its config.json is needed: `hf download {model} config.json` puts it "
        "there"
    )


class Fields:
    """The fields of a text model, wherever ``config.json`` has them. ``source``: the file.
    ``architecture``: of the whole model, by its class in transformers."""

    def __init__(self, raw: Mapping[str, object], source: str) -> None:
        own = dict(raw)
        while isinstance(text := next((own.pop(n) for n in _PARTS if n in own), None), dict):
            own |= text
        self.model_type = str(own.get("model_type", ""))
        named = raw.get("architectures")
        first = named[0] if isinstance(named, list) and named else self.model_type
        self.architecture = str(first) or "the model"
        self.is_encoder_decoder = raw.get("is_encoder_decoder") is True
        self._raw: Mapping[str, Any] = {**_DEFAULTS.get(self.model_type, {}), **own}
        of_layers = own.get("per_layer_config")
        self._of_layers = dict(of_layers) if isinstance(of_layers, dict) else {}
        self.source = source

    def number(self, *names: str, default: int | None = None) -> int:
        """The first of these fields that is a whole number from 0; the mean of one that has a
        number for each layer. Raises ConfigError if there is none, and no ``default``."""
        for name in names:
            value = self._raw.get(name)
            each = value if isinstance(value, list | tuple) else [value]
            if each and all(type(one) is int and 0 <= one < _MOST for one in each):
                return round(sum(each) / len(each))
        if default is None:
            raise ConfigError(f"{self.source}: {names[0]} is missing; this is not a model's config")
        return default

    def text(self, *names: str) -> str:
        return next((v for n in names if isinstance(v := self._raw.get(n), str)), "")

    def flag(self, name: str) -> bool:
        return self._raw.get(name) is True

    def has(self, name: str) -> bool:
        return self._raw.get(name) is not None

    def list(self, *names: str) -> list[Any]:
        """The first of these fields that is a list with something in it."""
        found = (self._raw.get(name) for name in names)
        return next((value for value in found if isinstance(value, list) and value), [])

    def of_layer(self, place: int) -> Fields:
        """The fields as they are for one layer, from 0: of those with a number for each layer its
        own, and what ``per_layer_config`` says of it."""
        count = self.number("num_hidden_layers", "n_layer", "num_layers", default=0)
        each = {
            name: value[place]
            for name, value in self._raw.items()
            if isinstance(value, list) and len(value) == count > place
        }
        for name, own in self._of_layers.items():
            if str(name).isdecimal() and int(name) == place and isinstance(own, dict):
                each |= own
        if not each:
            return self
        layer = copy.copy(self)
        layer._raw = {**self._raw, **each}
        return layer

    def part(self, name: str) -> Fields:
        """The fields of an object in it."""
        value = self._raw.get(name)
        return Fields(value if isinstance(value, dict) else {}, f"{self.source}, {name}")


def read_fields(path: Path) -> tuple[Fields, Path]:
    """Of the model in a folder, or of a config.json; and the file. Raises ConfigError."""
    file = path / "config.json" if path.is_dir() else path
    try:
        with file.open("rb") as opened:
            read = json.loads(opened.read(MAX_BYTES))  # transformers writes NaN and Infinity, too
    except (OSError, ValueError, RecursionError):
        read = read_json(file).value  # which says what is wrong
    if not isinstance(read, dict):
        raise ConfigError(f"{file}: must hold an object")
    return Fields(read, str(file)), file
