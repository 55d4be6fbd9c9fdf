"""Real engines, each started once for the tests that share it; and a pool whose disk is slow."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from engines.vllm.engine import Engine
from kvrecall.config import RecallSettings
from kvrecall.pool import Pool
from kvrecall_lab.models import write_model

if TYPE_CHECKING:
    from engines.vllm.connector.test_scheduler import SlowPool


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Writes a small random model once per architecture."""
    root = tmp_path_factory.mktemp("models")

    def folder(architecture: str, **shape: Any) -> Path:
        name = "-".join([architecture, *(f"{k}{v}" for k, v in sorted(shape.items()))])
        path = root / name
        if not path.exists():
            write_model(path, architecture, **shape)
        return path

    return folder


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Engine]]:
    """Starts engines and ends them with the module."""
    engines: list[Engine] = []

    def starter(**setup: Any) -> Engine:
        log = tmp_path_factory.mktemp("engine") / "log"
        engine = Engine(log, **{"max_model_len": 4096, "max_num_batched_tokens": 512, **setup})
        engines.append(engine)
        return engine

    yield starter
    for engine in engines:
        engine.close()


@pytest.fixture
def pool() -> Iterator[Pool]:
    """Of 1 MiB of host memory."""
    with Pool.open(RecallSettings.from_mapping({"host_size": "1MiB"}).pool) as pool:
        yield pool


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[SlowPool]:
    from engines.vllm.connector.test_scheduler import SlowPool

    slow = SlowPool(tmp_path / "disk")
    yield slow
    slow.io.read_gate.set()
    slow.pool.close()
