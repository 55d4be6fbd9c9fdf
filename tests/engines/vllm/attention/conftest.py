"""The fixtures of the engine tests, beside those of the folder above."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engines.vllm.attention.test_engine import EXTENSION


@pytest.fixture(scope="module")
def setup(model_folder: Callable[..., Path]) -> dict[str, Any]:
    """Of an engine with a small model of random weights and 90 device blocks of 128 tokens."""
    return {
        "model": str(model_folder("qwen3")),
        "dtype": "float32",
        "worker_extension_cls": EXTENSION,
        "num_gpu_blocks_override": 90,
    }


@pytest.fixture(
    scope="module",
    params=[False, pytest.param(True, marks=pytest.mark.long)],
    ids=["in step", "ahead"],
)
def ahead(request: pytest.FixtureRequest) -> bool:
    """Whether scheduling is asynchronous. Blocks then leave one step later."""
    return bool(request.param)
