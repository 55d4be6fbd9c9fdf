"""The model that benchmarks serve, and its prompts."""

from __future__ import annotations

import platform
import random
from dataclasses import dataclass, field
from pathlib import Path

from kvrecall.bench.random_model import write_model

BLOCK = 128
"""Tokens of a block."""

TAIL = 16
"""Tokens behind a prefix: what a hit leaves to compute."""

_CPUINFO = Path("/proc/cpuinfo")
_BFLOAT16 = {"avx512_bf16", "amx_bf16"}
_ITEM_BYTES = {"bfloat16": 2, "float32": 4}


def fast_dtype(cpuinfo: Path = _CPUINFO) -> str:
    """The dtype with the fastest prefill on this machine: ``bfloat16``, or ``float32`` on an x86
    processor without a GPU and without instructions for bfloat16, where products in bfloat16 take
    four to five times as long and would make hits look better than they are.
    """
    import torch

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
