"""What calls of Triton kernels have in common. Triton is imported when one is first called."""

from __future__ import annotations

import importlib
from typing import Any

from kvrecall.errors import EngineError


def kernel_of(module: str, name: str) -> Any:
    """The kernel of that module of this package. Raises EngineError where there is no Triton."""
    try:
        return getattr(importlib.import_module(f"kvrecall.attention.{module}"), name)
    except ImportError as error:
        raise EngineError(
            "retrieval attention on a GPU needs triton, which vLLM for CUDA brings; install it"
        ) from error


def next_power(count: int) -> int:
    """The least power of two that is not less."""
    return 1 << (count - 1).bit_length()
