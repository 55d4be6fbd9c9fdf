"""Models to check with: their weights are random."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvrecall.lab.models import write_model


@dataclass(frozen=True, slots=True)
class Shape:
    """A Llama-like model; its sizes are told in the report."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def token_bytes(self) -> int:
        """Of KV cache a token, bfloat16."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_dim


SMALL = Shape(256, 4, 4, 2, 64)
LARGE = Shape(4096, 32, 32, 8, 128)
"""6.2 billion weights, and the KV cache of an 8B model: 128 KiB a token."""
SHALLOW = Shape(4096, 8, 32, 8, 128)
"""A quarter of its layers: 32 KiB a token, so that many long sequences fit the host's memory."""


@contextmanager
def model_folder(shape: Shape, longest: int, weights: bool) -> Iterator[tuple[Path, Path]]:
    """A folder for logs, and a model in it; without ``weights`` only its description, at the size
    of ``shape``."""
    make: Callable[..., Path] = write_model
    with tempfile.TemporaryDirectory(prefix="kvrecall-gpu-check-") as name:
        folder = Path(name)
        written = shape if weights else SMALL
        path = make(
            folder / "model",
            "llama",
            hidden=written.hidden,
            layers=written.layers,
            heads=written.heads,
            kv_heads=written.kv_heads,
            head_dim=written.head_dim,
            max_position=longest,
        )
        if not weights:
            _resize(path / "config.json", shape)
            (path / "model.safetensors").unlink()
        yield folder, path


def _resize(file: Path, shape: Shape) -> None:
    config = json.loads(file.read_text())
    config |= {
        "hidden_size": shape.hidden,
        "intermediate_size": 3 * shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
    }
    file.write_text(json.dumps(config))
