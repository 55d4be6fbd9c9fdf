"""A model whose layers have different numbers of KV heads (NVIDIA's Nemotron-NAS family)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from safetensors.torch import load_file, save_file

from kvrecall.bench.model import WEIGHTS
from kvrecall_lab.models import write_model

CONFIGURATION = '''
from transformers import LlamaConfig


class Named(dict):
    """A mapping whose entries are attributes."""

    def __getattr__(self, name):
        if name not in self:
            raise AttributeError(name)
        value = self[name]
        return Named(value) if isinstance(value, dict) else value


class DeciLMConfig(LlamaConfig):
    model_type = "nemotron-nas"

    def __init__(self, block_configs=(), **others):
        super().__init__(**others)
        self.block_configs = [Named(block) for block in block_configs]
'''


def write_nemotron(path: Path, kv_heads: Sequence[int], heads: int = 4, dim: int = 64) -> Path:
    """Writes a model with a layer for each number of ``kv_heads``. vLLM must trust its code, as
    that of the models in the family: the folder brings its configuration's class."""
    write_model(
        path, "llama", heads=heads, kv_heads=heads, head_dim=dim, layers=len(kv_heads), vocab=512
    )
    weights = load_file(path / WEIGHTS)
    for layer, count in enumerate(kv_heads):
        for part in "kv":
            name = f"model.layers.{layer}.self_attn.{part}_proj.weight"
            weights[name] = weights[name][: count * dim].contiguous()
    save_file(weights, path / WEIGHTS)
    config = json.loads((path / "config.json").read_text())
    size = config["intermediate_size"]
    del config["num_key_value_heads"]
    config |= {
        "architectures": ["DeciLMForCausalLM"],
        "model_type": "nemotron-nas",
        "auto_map": {"AutoConfig": "configuration_decilm.DeciLMConfig"},
        "block_configs": [
            {
                "attention": {"no_op": False, "n_heads_in_group": heads // count},
                "ffn": {"no_op": False, "intermediate_size": size},
            }
            for count in kv_heads
        ],
    }
    (path / "config.json").write_text(json.dumps(config))
    (path / "configuration_decilm.py").write_text(CONFIGURATION)
    return path
