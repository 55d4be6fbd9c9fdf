"""Writes small models in Hugging Face's folder format: random weights, byte-level tokenizer; and
folders that differ from another in one thing.

They stand in for real models where only the machinery matters: names and shapes are those of
the real architecture, so that vLLM and transformers load them. The weights are scaled so that
greedy output depends on the whole prompt (attention is neither flat nor on one token, and each
block adds as much to the residual stream as it contains), because tests compare outputs. Special
tokens have low logits: greedy output never ends early.

``python -m kvrecall.lab.models PATH --architecture qwen3`` writes one. ``writer`` has the
architectures; ``dense`` and ``hybrid`` draw their weights; ``variants`` changes a folder.
"""

from kvrecall.lab.models.folder import ADAPTER, WEIGHTS, Tensors
from kvrecall.lab.models.variants import (
    LONG_ROPE_FROM,
    write_blip2,
    write_changed,
    write_code,
    write_indexed,
    write_kv_scales,
    write_links,
    write_llama4,
    write_lora,
    write_over,
    write_phi3,
    write_picture,
)
from kvrecall.lab.models.writer import Architecture, write_model

__all__ = [
    "ADAPTER",
    "LONG_ROPE_FROM",
    "WEIGHTS",
    "Architecture",
    "Tensors",
    "write_blip2",
    "write_changed",
    "write_code",
    "write_indexed",
    "write_kv_scales",
    "write_links",
    "write_llama4",
    "write_lora",
    "write_model",
    "write_over",
    "write_phi3",
    "write_picture",
]
