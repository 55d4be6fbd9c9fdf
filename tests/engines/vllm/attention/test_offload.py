"""Real engines with partially offloaded sequences, against one that keeps them on the device; also
with schedulers that are a step ahead of their workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from engines.vllm.attention.test_engine import SAMPLING, activity, retrieval, spent, tokens_of
from engines.vllm.engine import Engine, prompt_of

pytestmark = pytest.mark.engine

BLOCK_BYTES = 128 * 2 * 64 * 4
"""One KV head's keys and values of a block, in a layer."""

MIXED = [3100, 3500, 3900, 1500, 2000, 100]
"""Three offloaded, sparse, growing past the offload boundary, dense."""


def settings(boundary: int) -> dict[str, str]:
    return {**retrieval(0.2), "VLLM_RETRIEVAL_OFFLOAD_BOUNDARY": str(boundary)}


@pytest.fixture(scope="module")
def setup(setup: dict[str, Any], ahead: bool) -> dict[str, Any]:
    pool = {"host_size": "96MiB", "load_or_compute": "load"}
    return {**setup, **({"prelude": "engines.vllm.attention.ahead"} if ahead else {}), "pool": pool}


@pytest.fixture(scope="module")
def on_device(start: Callable[..., Engine], setup: dict[str, Any]) -> Engine:
    return start(**{**setup, "num_gpu_blocks_override": 160}, env=settings(1 << 20))


@pytest.fixture(scope="module")
def offloaded(start: Callable[..., Engine], setup: dict[str, Any], ahead: bool) -> Engine:
    engine = start(**setup, env=settings(2048))
    assert engine.is_ahead() == ahead
    return engine


@pytest.fixture(autouse=True)
def nothing_leaks(offloaded: Engine) -> Iterator[None]:
    """After every test, all device blocks and leases are released."""
    yield
    assert offloaded.free_blocks() == 89
    assert offloaded.pool_stats()["leases"] == 0


def test_an_offloaded_sequence_decodes_as_on_the_device(
    on_device: Engine, offloaded: Engine, ahead: bool
) -> None:
    prompt = prompt_of(3000, 1)
    want = on_device.ask(prompt, max_tokens=80)
    before = activity(offloaded)
    got = offloaded.ask(prompt, max_tokens=80)
    did = spent(offloaded, before)
    assert did["sequences_offloaded"] + ahead == did["sequences_sparse"] == 79
    assert did["blocks_offloaded"] == (3000 + 80 - 256) // 128 - 1
    assert 0 < did["blocks_in_place"] <= did["blocks_selected"]
    assert ahead or did["blocks_in_place"] == did["blocks_selected"]
    assert offloaded.metrics()["kvrecall_retrieval_blocks_in_place_total"] > 0
    assert did["bytes_loaded"] == 0
    assert got["tokens"] == want["tokens"]
    assert got["logprobs"] == want["logprobs"]


def test_the_freed_blocks_serve_others(on_device: Engine, offloaded: Engine, ahead: bool) -> None:
    """Five regimes in one batch, which needs 80 blocks at first and finally more than exist."""
    prompts = [prompt_of(tokens, 10 + at) for at, tokens in enumerate(MIXED)]
    want = on_device.generate(prompts=prompts, max_tokens=70)
    before, preempted = activity(offloaded), offloaded.preemptions()
    got = offloaded.generate(prompts=prompts, max_tokens=70)
    did = spent(offloaded, before)
    assert tokens_of(got) == tokens_of(want)
    assert offloaded.preemptions() == preempted
    assert did["sequences_offloaded"] > 3 * (69 - ahead)
    assert did["sequences_sparse"] > did["sequences_offloaded"]


def test_preempted_and_brought_back_from_the_pool(on_device: Engine, offloaded: Engine) -> None:
    ask: dict[str, Any] = {
        "prompts": [prompt_of(2800, 20), prompt_of(3300, 21)],
        "after_steps": 40,
        "max_tokens": 40,
    }
    want = on_device.preempt_midway(**ask)
    before = activity(offloaded)
    assert offloaded.preempt_midway(**ask) == want
    did = spent(offloaded, before)
    middle = 2800 // 128 + 3300 // 128 - 8
    assert did["blocks_offloaded"] > middle, "those that left at first"
    assert did["blocks_left"] > middle, "and stayed in the pool when their sequences came back"


def test_aborted_midway(offloaded: Engine) -> None:
    before = activity(offloaded)
    assert offloaded.abort_midway(prompt=prompt_of(3000, 30), after_steps=12, max_tokens=100) == 0
    assert spent(offloaded, before)["blocks_offloaded"] > 0


def test_sequences_that_share_a_prefix(on_device: Engine, offloaded: Engine, ahead: bool) -> None:
    """Prompts with a common prefix, two samples each, then the same again from the pool."""
    shared = prompt_of(2500, 40)
    prompts = [shared + prompt_of(tokens, 41 + tokens) for tokens in (5, 140)]
    ask = {"prompts": prompts, "n": 2, "max_tokens": 10, **SAMPLING}
    want = on_device.generate(**ask)
    before = activity(offloaded)
    assert tokens_of(offloaded.generate(**ask)) == tokens_of(want)
    assert offloaded.forget_device()
    again = offloaded.generate(**ask)
    assert tokens_of(again) == tokens_of(want)
    assert again[0]["from"]["host"] > 2400
    did = spent(offloaded, before)
    assert did["sequences_offloaded"] == 2 * 4 * 9 - 4 * ahead
    assert did["blocks_left"] >= 2 * (2500 - 256) // 128 - 2


DIGEST_BYTES = 3 * (2 * 8 * (2 * 64 + 4) + 8)
"""Of a block: sparse layers; KV heads, digests; parts, dimension and scale, in bytes; checksum."""


@pytest.mark.parametrize("tail", [1, 100, 700])
def test_of_a_prefix_in_the_pool_the_middle_stays_there(
    on_device: Engine, offloaded: Engine, tail: int
) -> None:
    """The same text with another question: in the prompt's last block, and blocks later."""
    text = prompt_of(128 * 25 + 5, 50)
    prompt = text + prompt_of(tail, 51 + tail)
    for engine in (on_device, offloaded):
        engine.ask(text, max_tokens=1)
        assert engine.forget_device()
    want = on_device.ask(prompt, max_tokens=40)
    before, loaded = activity(offloaded), offloaded.metrics()["kvrecall_loaded_bytes_total"]
    got = offloaded.ask(prompt, max_tokens=40)
    did = spent(offloaded, before)
    loaded = offloaded.metrics()["kvrecall_loaded_bytes_total"] - loaded
    middle = min(25, (len(prompt) - 256) // 128) - 1
    assert got["from"] == want["from"]
    assert got["from"]["host"] == 25 * 128
    assert did["blocks_left"] == middle
    assert did["bytes_digests"] == middle * DIGEST_BYTES
    block = 4 * 2 * BLOCK_BYTES + DIGEST_BYTES
    assert loaded == (25 - middle) * block
    assert did["sequences_offloaded"] == 39
    assert got["tokens"] == want["tokens"]
    assert got["logprobs"] == want["logprobs"]


@pytest.mark.long
def test_prefixes_in_the_pool_in_a_batch_that_preempts(
    on_device: Engine, offloaded: Engine
) -> None:
    """Prefixes that arrive beside sequences that prefill and decode, and are preempted midway."""
    texts = [prompt_of(tokens, 60 + at) for at, tokens in enumerate((2700, 3100, 3500))]
    ask: dict[str, Any] = {
        "prompts": [
            *(text + prompt_of(30, 70 + at) for at, text in enumerate(texts)),
            *(prompt_of(tokens, 80 + tokens) for tokens in (2600, 700)),
        ],
        "after_steps": 30,
        "max_tokens": 40,
    }
    results = []
    for engine in (on_device, offloaded):
        engine.generate(prompts=texts, max_tokens=1)
        assert engine.forget_device()
        before = activity(engine)
        results.append(engine.preempt_midway(**ask))
    assert results[0] == results[1]
    assert spent(offloaded, before)["blocks_left"] > 2 * (2700 + 3100 + 3500) // 128 - 3 * 2 * 4


def test_aborted_while_it_arrives(offloaded: Engine) -> None:
    prompt = prompt_of(3000, 90)
    offloaded.ask(prompt, max_tokens=1)
    for steps in range(1, 5):
        assert offloaded.forget_device()
        assert offloaded.abort_midway(prompt=prompt, after_steps=steps, max_tokens=100) == 0


@pytest.mark.long
def test_two_ranks(start: Callable[..., Engine], setup: dict[str, Any], on_device: Engine) -> None:
    """Every rank recalls its own heads, and takes its own digests from the pool."""
    env = {**settings(2048), "VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    engine = start(**setup, tensor_parallel_size=2, env=env)
    prompt = prompt_of(2900, 100)
    want = on_device.ask(prompt, max_tokens=20)["tokens"]
    assert engine.ask(prompt, max_tokens=20)["tokens"] == want
    assert engine.ask_anew(prompt, max_tokens=20)["tokens"] == want
    for did in engine.workers(method="retrieval_activity"):
        assert did["blocks_left"] == (2900 - 256) // 128 - 1
        assert did["blocks_in_place"] > 0
    assert engine.free_blocks() == 89
    assert engine.pool_stats()["leases"] == 0
    engine.close()
