"""Weights that change in a running engine: old blocks are not recalled under the new ones, and new
ones are not saved under the old name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvrecall.lab.models import write_changed

from .engine import Engine, prompt_of
from .exactness import BLOCK, hits

pytestmark = pytest.mark.engine

PROMPT = prompt_of(3 * BLOCK + 5, 1)
OTHER = prompt_of(3 * BLOCK + 5, 2)
WHOLE = (0, 3 * BLOCK, 0)
NONE = (0, 0, 0)


def flipped(weights: dict[str, Any]) -> None:
    name = "model.layers.1.self_attn.k_proj.weight"
    weights[name] = weights[name].flip(0)


@pytest.fixture(scope="module")
def folders(model_folder: Callable[..., Path]) -> tuple[Path, Path]:
    """A model, and one with another matrix."""
    first = model_folder("qwen3")
    return first, write_changed(first.with_name("flipped"), first, flipped)


@pytest.fixture(scope="module")
def engine(
    start: Callable[..., Engine], folders: tuple[Path, Path], tmp_path_factory: Any
) -> Engine:
    disk = tmp_path_factory.mktemp("pool")
    pool = {"host_size": "16MiB", "disk_path": str(disk), "disk_size": "64MiB"}
    return start(
        model=str(folders[0]),
        dtype="float32",
        pool={**pool, "load_or_compute": "load"},
        num_gpu_blocks_override=38,
    )


def test_a_reload_ends_the_namespace_and_another_brings_it_back(
    engine: Engine, folders: tuple[Path, Path]
) -> None:
    first = engine.ask(PROMPT)
    assert engine.forget_device()
    assert hits(engine.ask(PROMPT)) == WHOLE
    name = engine.namespace()
    engine.rpc(method="reload_weights", weights_path=str(folders[1]))
    changed = engine.ask(PROMPT)
    assert hits(changed) == NONE, "neither the device's blocks nor the pool's are of these weights"
    assert changed["logprobs"] != first["logprobs"]
    assert engine.forget_device()
    again = engine.ask(PROMPT)
    assert hits(again) == WHOLE
    assert again["tokens"] == changed["tokens"]
    engine.ask(OTHER)
    assert engine.namespace() != name
    engine.rpc(method="reload_weights", weights_path=str(folders[0]))
    assert engine.namespace() == name
    back = engine.ask(OTHER)
    assert hits(back) == NONE
    assert engine.forget_device()
    engine.ask(PROMPT)  # proves what lies there
    assert engine.forget_device()
    last = engine.ask(PROMPT)
    assert hits(last) == WHOLE
    assert last["tokens"] == first["tokens"]
