"""Write a checkpoint as a Hugging Face folder: `python -m ...model.export CHECKPOINT FOLDER`.

The folder then holds config.json, generation_config.json, model.safetensors (bf16),
tokenizer.json and tokenizer_config.json with the chat template. The model card (README.md)
is written by hand and left alone.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from .model import Shape
from .tokenizer import END, SPECIAL, TURN_END

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _write(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def export(checkpoint: Path, folder: Path) -> int:
    """Write all but tokenizer.json and the card; return the size of the weights in bytes."""
    state = torch.load(checkpoint, weights_only=True)["model"]
    weights = {name: weight.to(torch.bfloat16).contiguous() for name, weight in state.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    _write(folder / "config.json", Shape().to_hf())
    _write(
        folder / "generation_config.json",
        {"do_sample": False, "eos_token_id": [SPECIAL.index(TURN_END), SPECIAL.index(END)],
         "pad_token_id": SPECIAL.index(END)},
    )  # fmt: skip
    _write(
        folder / "tokenizer_config.json",
        {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 131072,
         "eos_token": TURN_END, "pad_token": END, "bos_token": None, "add_bos_token": False,
         "clean_up_tokenization_spaces": False, "chat_template": CHAT_TEMPLATE},
    )  # fmt: skip
    return (folder / "model.safetensors").stat().st_size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    print(export(args.checkpoint, args.folder), "bytes of weights")


if __name__ == "__main__":
    main()
