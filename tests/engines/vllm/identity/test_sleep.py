"""Sleep takes the KV cache's memory away, and from level 2 on the weights. What the pool has of
weights that come back stays."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from vllm.v1.engine.core import EngineCore

from engines.vllm.engine import Engine, prompt_of
from engines.vllm.exactness import BLOCK, hits, nothing_held
from kvrecall_lab.identity.setups import WORKER

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(
        not hasattr(EngineCore, "release_kv_cache_memory"), reason="vLLM 0.30 has no such call"
    ),
]
WHOLE = (0, 3 * BLOCK, 0)


@pytest.fixture(scope="module")
def model(model_folder: Callable[..., Path]) -> Path:
    return model_folder("qwen3")


@pytest.fixture(scope="module")
def engine(start: Callable[..., Engine], model: Path) -> Engine:
    return start(
        model=str(model),
        dtype="float32",
        pool={"host_size": "16MiB", "load_or_compute": "load"},
        worker_cls=WORKER,
        num_gpu_blocks_override=38,
    )


@pytest.mark.parametrize("seed", [1, 2])
def test_what_the_pool_has_outlives_the_device(engine: Engine, seed: int) -> None:
    """Whether only the KV cache is given back, or the engine sleeps at level 1."""
    prompt = prompt_of(3 * BLOCK + 5, seed)
    first, name = engine.ask(prompt), engine.namespace()
    before = engine.rpc(method="naps")[0]
    engine.nap() if seed == 1 else engine.sleep(level=1)
    seen = engine.rpc(method="naps")[0][len(before) :]
    assert seen == [True, True], "no copy is under way at the loss and at the return of the memory"
    assert engine.namespace() == name
    recalled = engine.ask(prompt)
    assert hits(recalled) == WHOLE
    assert recalled["tokens"] == first["tokens"]
    nothing_held(engine)


def test_weights_that_sleep_does_not_keep_end_the_namespace(engine: Engine, model: Path) -> None:
    prompt = prompt_of(3 * BLOCK + 5, 3)
    first, name = engine.ask(prompt), engine.namespace()
    engine.sleep(level=2)
    assert engine.namespace() != name
    assert hits(engine.ask(prompt)) == (0, 0, 0)
    engine.rpc(method="reload_weights", weights_path=str(model))
    assert engine.namespace() == name
    assert hits(engine.ask(prompt)) == (0, 2 * BLOCK, 0), "its writer is to be proved again"
    back = engine.ask_anew(prompt)
    assert hits(back) == WHOLE
    assert back["tokens"] == first["tokens"]
    nothing_held(engine)


def test_a_call_to_sleeping_workers_changes_nothing(engine: Engine) -> None:
    prompt, name = prompt_of(3 * BLOCK + 5, 4), engine.namespace()
    engine.ask(prompt)
    engine.sleep(level=1, wakes=False)
    engine.rpc(method="naps")
    engine.wake()
    assert engine.namespace() == name
    assert hits(engine.ask(prompt)) == WHOLE
