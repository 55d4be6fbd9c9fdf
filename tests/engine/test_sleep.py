"""Sleep mode takes the KV cache's memory away. From vLLM 0.33 on the connector is told, and asked
for its shard again when the engine wakes up."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from vllm.v1.engine.core import EngineCore

from kvrecall.engines.vllm.compat.versions import engine_version

from .engine import Engine, prompt_of
from .exactness import BLOCK, hits, nothing_held

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(
        not hasattr(EngineCore, "release_kv_cache_memory"), reason="vLLM 0.30 has no such call"
    ),
]


def test_an_engine_that_slept_recalls_what_it_has_computed_since(
    start: Callable[..., Engine], model_folder: Callable[..., Path]
) -> None:
    engine = start(
        model=str(model_folder("qwen3")),
        dtype="float32",
        pool={"host_size": "16MiB", "load_or_compute": "load"},
        worker_cls="napping.NappingWorker",
        num_gpu_blocks_override=38,
    )
    prompt = prompt_of(3 * BLOCK + 5, 1)
    first = engine.ask(prompt)
    assert engine.forget_device()
    assert hits(engine.ask(prompt)) == (0, 3 * BLOCK, 0)
    before = engine.namespace()
    engine.nap()
    is_told = engine_version() not in ("0.31", "0.32")
    assert engine.workers(method="naps") == [[is_told, is_told]]
    assert engine.namespace() != before, "the weights may be others now"
    computed = engine.ask(prompt)
    assert hits(computed) == (0, 0, 0)
    device = engine.ask(prompt)
    assert engine.forget_device()
    pooled = engine.ask(prompt)
    assert hits(pooled) == (0, 3 * BLOCK, 0)
    assert first["tokens"] == computed["tokens"] == pooled["tokens"]
    assert pooled["logprobs"] == device["logprobs"]
    nothing_held(engine)
