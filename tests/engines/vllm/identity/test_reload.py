"""Weights that change in a running engine: old blocks are not recalled under the new ones, and new
ones are not saved under the old name."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engines.vllm.engine import Engine, prompt_of
from engines.vllm.exactness import BLOCK, hits
from kvrecall_lab.identity.setups import EXTENSION
from kvrecall_lab.models.variants import write_changed

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
        worker_extension_cls=EXTENSION,
        enable_prompt_embeds=True,
    )


def test_a_reload_ends_the_namespace_and_another_brings_it_back(
    engine: Engine, folders: tuple[Path, Path]
) -> None:
    first = engine.ask(PROMPT)
    assert hits(engine.ask_anew(PROMPT)) == WHOLE
    name = engine.namespace()
    engine.rpc(method="reload_weights", weights_path=str(folders[1]))
    changed = engine.ask(PROMPT)
    assert hits(changed) == NONE, "neither the device's blocks nor the pool's are of these weights"
    assert changed["logprobs"] != first["logprobs"]
    again = engine.ask_anew(PROMPT)
    assert hits(again) == WHOLE
    assert again["tokens"] == changed["tokens"]
    engine.ask(OTHER)
    assert engine.namespace() != name
    engine.rpc(method="reload_weights", weights_path=str(folders[0]))
    assert engine.namespace() == name
    back = engine.ask(OTHER)
    assert hits(back) == NONE
    engine.ask_anew(PROMPT)  # proves what lies there
    last = engine.ask_anew(PROMPT)
    assert hits(last) == WHOLE
    assert last["tokens"] == first["tokens"]


def test_a_call_that_writes_nothing_keeps_everything(engine: Engine) -> None:
    prompt = prompt_of(3 * BLOCK + 5, 3)
    engine.ask(prompt)
    name = engine.namespace()
    assert engine.rpc(method="is_opaque") in ([True], [False])
    assert hits(engine.ask(prompt)) == (3 * BLOCK, 0, 0), "the device's cache stays"
    assert hits(engine.ask_anew(prompt)) == WHOLE
    assert engine.namespace() == name


def test_tensors_of_a_trainer_are_other_weights(engine: Engine, folders: tuple[Path, Path]) -> None:
    prompt = prompt_of(3 * BLOCK + 5, 4)
    before, name = engine.ask(prompt), engine.namespace()
    engine.rpc(method="hand_over", path=str(folders[1]))
    changed = engine.ask(prompt)
    assert hits(changed) == NONE
    assert changed["logprobs"] != before["logprobs"]
    assert hits(engine.ask_anew(prompt)) == WHOLE, "pooled, under a name of their own"
    assert engine.namespace() != name
    engine.rpc(method="reload_weights", weights_path=str(folders[0]))
    assert engine.namespace() == name


def test_a_parameter_written_by_hand_is_seen(engine: Engine) -> None:
    prompt = prompt_of(3 * BLOCK + 5, 5)
    before, name = engine.ask(prompt), engine.namespace()
    engine.rpc(method="scale_norm", factor=4.0)
    changed = engine.ask(prompt)
    assert hits(changed) == NONE
    assert changed["logprobs"] != before["logprobs"]
    assert engine.namespace() != name
    engine.rpc(method="scale_norm", factor=0.25)
    assert engine.namespace() == name, "the same bytes again"


def test_requests_that_began_under_other_weights_are_not_saved(
    engine: Engine, folders: tuple[Path, Path]
) -> None:
    """Nor does another request find their blocks on the device, whose own would be saved."""
    prompt = prompt_of(3 * BLOCK + 5, 6)
    trouble = {"name": "call_workers", "method": "reload_weights", "weights_path": str(folders[1])}
    (mixed,) = engine.decode_through(
        prompts=[prompt], after_steps=3, trouble=trouble, max_tokens=2 * BLOCK
    )
    longer = [*prompt, *mixed["tokens"]]
    assert hits(engine.ask(longer)) == NONE
    device = engine.ask(longer)
    assert hits(device)[0] >= 4 * BLOCK
    pooled = engine.ask_anew(longer)
    assert sum(hits(pooled)) == hits(device)[0]
    assert pooled["logprobs"] == device["logprobs"], "of one request's blocks"
    engine.rpc(method="reload_weights", weights_path=str(folders[0]))


@pytest.mark.parametrize("steps", [0, 3])
def test_requests_start_over_if_the_model_loads_by_itself(
    engine: Engine, folders: tuple[Path, Path], steps: int
) -> None:
    """Nobody tells the engine: the next step's report does."""
    prompt = prompt_of(3 * BLOCK + 5, 7 + steps)
    before = engine.ask(prompt)
    assert engine.forget_device()
    engine.rpc(method="hand_over_later", path=str(folders[1]), steps=steps)
    changed = engine.ask(prompt)
    assert changed["logprobs"] != before["logprobs"]
    engine.rpc(method="reload_weights", weights_path=str(folders[1]))
    assert hits(engine.ask_anew(prompt)) == NONE
    tokens = changed["tokens"]
    assert any(
        engine.ask([*prompt, *tokens[:said]], max_tokens=8 - said)["tokens"] == tokens[said:]
        for said in range(steps + 1)
    ), "what was not said yet is of the new weights"
    engine.rpc(method="reload_weights", weights_path=str(folders[0]))
    engine.ask_anew(prompt)
    back = engine.ask_anew(prompt)
    assert hits(back) == WHOLE
    assert back["tokens"] == before["tokens"]


def test_embeddings_mixed_with_tokens_are_not_pooled(engine: Engine) -> None:
    """vLLM's hash has their rows, and not which of them are used."""
    tokens = prompt_of(3 * BLOCK + 5, 8)
    pure = engine.embedded(tokens=tokens, mask=None)
    assert hits(pure) == NONE
    assert engine.forget_device()
    assert hits(engine.embedded(tokens=tokens, mask=None)) == WHOLE, "the hash covers these"
    assert engine.forget_device()
    mask = [place % 2 == 0 for place in range(len(tokens))]
    mixed = engine.embedded(tokens=tokens, mask=mask)
    assert hits(mixed) == NONE
    assert mixed["logprobs"] != pure["logprobs"]
    assert engine.forget_device()
    again = engine.embedded(tokens=tokens, mask=mask)
    assert hits(again) == NONE
    assert again["miss"]["cause"] == "prompt embeddings"


@pytest.mark.long
def test_ten_swaps_of_a_training_loop(
    start: Callable[..., Engine], folders: tuple[Path, Path], tmp_path: Path
) -> None:
    """Every reply is a fresh engine's; a version's blocks are found when it comes back. Prints what
    a swap costs more than without a pool."""
    setup = {"dtype": "float32", "num_gpu_blocks_override": 38}
    fresh, plain = [], []
    for folder in folders:
        engine = start(model=str(folder), pool=None, **setup)
        fresh.append(engine.ask(OTHER)["tokens"])
        for other in folders * 2 if not plain else ():
            began = time.monotonic()
            engine.rpc(method="reload_weights", weights_path=str(other))
            plain.append(time.monotonic() - began)
        engine.close()
    pool = {"host_size": "16MiB", "disk_path": str(tmp_path), "disk_size": "64MiB"}
    engine = start(model=str(folders[0]), pool={**pool, "load_or_compute": "load"}, **setup)
    seconds, found = [], []
    for turn in range(11):
        if turn:
            began = time.monotonic()
            engine.rpc(method="reload_weights", weights_path=str(folders[turn % 2]))
            seconds.append(time.monotonic() - began)
        first, second = (OTHER, PROMPT) if turn < 2 else (PROMPT, OTHER)
        replies = [engine.ask(first)]  # audited: what was written last vouches for the other
        replies.append(engine.ask_anew(second))
        reply = replies[0 if turn < 2 else 1]
        found.append(sum(hits(reply)))
        assert reply["tokens"] == fresh[turn % 2], turn
    assert found == [0, 0, *[3 * BLOCK] * 9]
    more = statistics.median(seconds) - statistics.median(plain)
    print({"swaps": 10, "seconds_each": seconds, "without": plain, "more": more})
