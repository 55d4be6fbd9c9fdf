"""The number format in which this machine computes a prefill fastest."""

from __future__ import annotations

import platform
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")
_INSTRUCTIONS = {"avx512_bf16", "amx_bf16"}
ITEM_BYTES = {"bfloat16": 2, "float32": 4}


def fast_dtype(cpuinfo: Path = _CPUINFO) -> str:
    """``bfloat16``, but ``float32`` on an x86 processor that has no instructions for it: there a
    product in bfloat16 takes four to five times as long, and what is recalled would be compared
    with a prefill that nobody would run. Where there is a GPU, ``bfloat16``.
    """
    import torch

    if platform.machine() != "x86_64" or torch.cuda.is_available():
        return "bfloat16"
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return "bfloat16"
    flags = next((line for line in lines if line.startswith("flags")), "")
    return "bfloat16" if _INSTRUCTIONS & set(flags.split()) else "float32"
