"""A quantised form of a model that ``kvrecall_lab.models`` writes."""

from __future__ import annotations

from pathlib import Path

import torch

from kvrecall.bench.model import Tensors
from kvrecall_lab.models.variants import write_changed


def write_w8a8(path: Path, source: Path) -> Path:
    """An int8 form of the model ``source``, in the compressed-tensors format.

    Every linear layer but the head has symmetric int8 weights with a scale for each output
    channel; activations are quantised per token while running.
    """

    def quantise(weights: Tensors) -> None:
        for name in [name for name in weights if name.endswith("_proj.weight")]:
            wide = weights[name].float()
            scale = wide.abs().amax(dim=1, keepdim=True) / 127
            weights[name] = (wide / scale).round().clamp(-128, 127).to(torch.int8)
            weights[f"{name}_scale"] = scale

    integers = {"num_bits": 8, "type": "int", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": integers | {"strategy": "channel", "dynamic": False},
        "input_activations": integers | {"strategy": "token", "dynamic": True},
    }
    quantization = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }
    return write_changed(path, source, quantise, {"quantization_config": quantization})
