"""The files of a model's folder: weights, settings, tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

Tensors = dict[str, Tensor]

WEIGHTS = "model.safetensors"
ADAPTER = "adapter_model.safetensors"

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
EOS = 258  # <|im_end|>
PAD = 259

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def save(weights: Tensors, path: Path, note_bytes: int = 0) -> None:
    whole = {name: tensor.contiguous() for name, tensor in weights.items()}
    note = {"note": " " * note_bytes} if note_bytes else {}
    save_file(whole, path, metadata={"format": "pt", **note})


def update(path: Path, settings: Mapping[str, object]) -> None:
    write(path, read(path) | dict(settings))


def read(path: Path) -> dict[str, Any]:
    known: dict[str, Any] = json.loads(path.read_text())
    return known


def write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def write_tokenizer(folder: Path, max_position: int) -> None:
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
    write(folder / "tokenizer_config.json", settings)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
