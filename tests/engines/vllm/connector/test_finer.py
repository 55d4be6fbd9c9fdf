"""Hits that end inside the blocks of one group of full attention (``match_unit``), by an engine
whose device blocks hold large values behind what was computed, and so do the records."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engines.vllm.engine import Engine, EngineFailed, prompt_of
from engines.vllm.exactness import BLOCK, hits, nothing_held, push_out_of_host

pytestmark = pytest.mark.engine

UNIT = 16
CUT = BLOCK + 7 * UNIT  # 240
BLOCK_BYTES = 4 * 2 * 2 * 64 * BLOCK * 4
COMMON = prompt_of(CUT, 1)


@pytest.fixture(scope="module")
def setup(model_folder: Callable[..., Path], tmp_path_factory: Any) -> dict[str, Any]:
    pool = {
        "host_size": 24 * BLOCK_BYTES,
        "policy": "lru",
        "disk_path": str(tmp_path_factory.mktemp("disk")),
        "disk_size": "256MiB",
        "async_write": False,
        "load_or_compute": "load",
        "match_unit": UNIT,
    }
    model = str(model_folder("qwen3"))
    own = {"module": "tainted", "connector": "TaintedConnector"}
    steps = {"max_num_batched_tokens": CUT, "max_num_seqs": 4}
    model_options = {"model": model, "dtype": "float32", "num_gpu_blocks_override": 38}
    return {**model_options, "pool": pool, **steps, **own}


@pytest.fixture(scope="module")
def engine(start: Callable[..., Engine], setup: dict[str, Any]) -> Engine:
    return start(**setup)


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return (one["tokens"], one["logprobs"]) == (other["tokens"], other["logprobs"])


@pytest.fixture(scope="module")
def answers(engine: Engine) -> dict[str, dict[str, Any]]:
    """To a prompt that shares its first 240 tokens with others, recalled from host and disk."""
    engine.ask(COMMON + prompt_of(9, 3))
    host = engine.ask_anew(COMMON + prompt_of(60, 2))
    assert hits(host) == (0, CUT, 0)
    push_out_of_host(engine, 4)
    disk = engine.ask(COMMON + prompt_of(60, 5))
    assert hits(disk) == (0, 0, CUT)
    return {"host": host, "disk": disk}


def test_of_240_common_tokens_240_are_recalled_and_bits_are_those_of_a_cut_there(
    start: Callable[..., Engine], setup: dict[str, Any], answers: dict[str, Any]
) -> None:
    """The oracle: an engine without a pool that computes 240 tokens in its first step, as the
    engine has that saved them."""
    names = ("model", "dtype", "max_num_batched_tokens", "max_num_seqs")
    reference = start(**{name: setup[name] for name in names})
    assert same(answers["host"], reference.ask(COMMON + prompt_of(60, 2)))
    assert same(answers["disk"], reference.ask_anew(COMMON + prompt_of(60, 5)))
    reference.close()


def test_prompts_that_part_inside_a_block_share_it_to_their_last_common_unit(
    engine: Engine, answers: dict[str, Any]
) -> None:
    """Neither ended there. The bits: those of the same hit on the tail of a prompt that did."""
    common = prompt_of(CUT, 21)
    engine.ask(common + prompt_of(60, 22))
    parted = engine.ask_anew(common + prompt_of(60, 23))
    assert hits(parted) == (0, CUT, 0)
    engine.ask_anew(common)
    assert hits(engine.ask_anew(common + prompt_of(3, 24), max_tokens=1)) == (0, CUT, 0)
    assert same(engine.ask_anew(common + prompt_of(60, 23)), parted)
    early = engine.ask(common[: BLOCK + 50] + prompt_of(90, 25))
    assert hits(early) == (BLOCK, 3 * UNIT, 0)
    inside_tail = engine.ask(common[: BLOCK + 50] + prompt_of(90, 25)[:40] + prompt_of(80, 26))
    assert hits(inside_tail) == (BLOCK, 5 * UNIT, 0)
    assert engine.forget_device()
    nothing_held(engine)


def test_a_prompt_again_and_the_next_turn(engine: Engine) -> None:
    """A prompt up to its last unit, from the tail that its end left; its answer likewise."""
    prompt = prompt_of(100, 9)
    first = engine.ask(prompt, max_tokens=60)
    again = engine.ask_anew(prompt, max_tokens=60)
    assert hits(again) == (0, 96, 0)
    assert again["tokens"] == first["tokens"]
    turn = prompt + first["tokens"] + prompt_of(40, 10)
    from_pool = engine.ask_anew(turn)
    assert hits(from_pool) == (0, (100 + 59) // UNIT * UNIT, 0)
    nothing_held(engine)


def test_a_block_of_the_device_goes_first(engine: Engine) -> None:
    prompt = prompt_of(2 * BLOCK + 70, 12)
    engine.ask(prompt)
    assert hits(engine.ask(prompt)) == (2 * BLOCK, 64, 0)


def test_tenants_share_no_tail(engine: Engine) -> None:
    prompt = prompt_of(100, 13)
    engine.ask(prompt, salts=["red"])
    assert hits(engine.ask_anew(prompt, salts=["blue"])) == (0, 0, 0)
    assert hits(engine.ask(prompt)) == (0, 0, 0)
    assert sum(hits(engine.ask(prompt, salts=["red"]))) == 96


def test_samples_and_logprobs_of_the_prompt(engine: Engine) -> None:
    prompt = prompt_of(BLOCK + 90, 14)
    sampling = {"n": 3, "temperature": 0.8, "seed": 5, "max_tokens": 12}
    engine.ask(prompt)
    drawn = engine.ask_anew(prompt, **sampling)
    assert sum(hits(drawn)) > 0
    assert hits(engine.ask_anew(prompt, prompt_logprobs=1)) == (0, 0, 0)


@pytest.mark.parametrize("steps", [1, 2, 3, 20])
def test_abort_inside_a_block(engine: Engine, steps: int) -> None:
    prompt = prompt_of(BLOCK + 100, 15 + steps)
    for _ in range(2):  # while it is computed, then while it is loaded
        assert engine.abort_midway(prompt=prompt, after_steps=steps, max_tokens=50) == 0
        nothing_held(engine)
        assert engine.forget_device()


def test_preemption_inside_a_block(engine: Engine) -> None:
    prompt = prompt_of(BLOCK + 100, 14)
    right = engine.ask(prompt, max_tokens=60, ignore_eos=True)["tokens"]
    assert engine.forget_device()
    (tokens,) = engine.preempt_midway(prompts=[prompt], after_steps=20, max_tokens=60)
    assert tokens == right
    nothing_held(engine)


def test_tails_survive_kill_9(
    start: Callable[..., Engine], setup: dict[str, Any], engine: Engine
) -> None:
    prompt = prompt_of(CUT + 9, 30)
    engine.ask(prompt)
    before = engine.ask_anew(prompt)
    assert hits(before) == (0, CUT, 0)
    engine.kill()
    second = start(**setup)
    assert hits(second.ask(prompt)) == (0, 0, 0)  # the first hit is audited
    after = second.ask_anew(prompt)
    assert sum(hits(after)) == CUT
    assert same(after, before)
    second.close()


@pytest.mark.long
def test_what_cannot_be_is_refused(start: Callable[..., Engine], setup: dict[str, Any]) -> None:
    for unit, cause in ((48, "does not divide the block size"), (0, "match_unit")):
        with pytest.raises(EngineFailed, match=cause):
            start(**{**setup, "pool": {**setup["pool"], "match_unit": unit}})
