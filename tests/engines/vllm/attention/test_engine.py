"""Real engines: dense, sparse with all blocks selected, and sparse with few selected."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from engines.vllm.engine import Engine, prompt_of

pytestmark = pytest.mark.engine

EXTENSION = "kvrecall.engines.vllm.attention.backend.ActivityExtension"
BOUNDARIES = {
    "VLLM_RETRIEVAL_INIT_TOKENS_NUM": "128",
    "VLLM_RETRIEVAL_LOCAL_TOKENS_NUM": "256",
    "VLLM_RETRIEVAL_DENSE_BOUNDARY": "1024",
    "VLLM_RETRIEVAL_OFFLOAD_BOUNDARY": "2048",
    "VLLM_RETRIEVAL_DENSE_LAYERS": "1",
    "VLLM_RETRIEVAL_GATE": "0",
    "VLLM_RETRIEVAL_LEAST_BLOCKS": "1",
}
LAYERS, HEADS = 3, 2  # sparse layers, KV heads
SAMPLING = {"temperature": 0.01, "top_k": 1}
"""As vLLM samples, but with one outcome: a seed would kill its CPU engine (0.32) in a prefill of
several steps."""
MIXED = [100, 1000, 1500, 2300, 1030]
"""Dense, growing past the boundary, sparse, past the offload boundary, just past."""


def retrieval(share: float) -> dict[str, str]:
    return {**BOUNDARIES, "VLLM_PLUGINS": "retrieval", "VLLM_RETRIEVAL_TOPK_PERCENT": str(share)}


@pytest.fixture(scope="module")
def dense(start: Callable[..., Engine], setup: dict[str, Any]) -> Engine:
    return start(**setup, env=BOUNDARIES)


@pytest.fixture(scope="module")
def whole(start: Callable[..., Engine], setup: dict[str, Any]) -> Engine:
    """Sparse with every middle block chosen, in a device cache too small for the mixed batch."""
    return start(**{**setup, "num_gpu_blocks_override": 50}, env=retrieval(1.0))


@pytest.fixture(scope="module")
def sparse(start: Callable[..., Engine], setup: dict[str, Any]) -> Engine:
    pool = {"host_size": "64MiB", "load_or_compute": "load"}
    return start(**setup, pool=pool, env=retrieval(0.3))


def activity(engine: Engine) -> dict[str, int]:
    (totals,) = engine.workers(method="retrieval_activity")
    return dict(totals)


def spent(engine: Engine, before: dict[str, int]) -> dict[str, int]:
    return {name: count - before[name] for name, count in activity(engine).items()}


def tokens_of(replies: list[dict[str, Any]]) -> list[list[int]]:
    return [one["tokens"] for reply in replies for one in reply["all"]]


def test_off_means_vllm_is_untouched(dense: Engine) -> None:
    """The plug-in is installed, VLLM_PLUGINS is unset, and the other variables have no effect."""
    dense.ask(prompt_of(1500, 1), max_tokens=4)
    assert set(activity(dense).values()) == {0}


def test_all_blocks_chosen_equals_dense(dense: Engine, whole: Engine) -> None:
    """Under batching, growth past the boundary, chunked prefill and preemption."""
    prompts = [prompt_of(tokens, 10 + at) for at, tokens in enumerate(MIXED)]
    want = dense.generate(prompts=prompts, max_tokens=60)
    before, preempted = activity(whole), whole.preemptions()
    got = whole.generate(prompts=prompts, max_tokens=60)
    assert tokens_of(got) == tokens_of(want)
    assert whole.preemptions() > preempted
    did = spent(whole, before)
    assert did["layers_sparse"] > 3 * 50 * LAYERS
    assert did["blocks_selected"] == did["blocks_considered"] > 0


def test_beam_search_equals_dense(dense: Engine, whole: Engine) -> None:
    prompt = prompt_of(1300, 40)
    ask = {"prompt": prompt, "width": 2, "max_tokens": 5}
    assert whole.beam(**ask) == dense.beam(**ask)


def test_few_blocks_are_chosen(sparse: Engine) -> None:
    before = activity(sparse)
    tokens = 128 * 14 + 5
    sparse.ask(prompt_of(tokens, 50), max_tokens=6)
    did = spent(sparse, before)
    steps, middle = 5, 14 - 1 - 2  # the first token comes from the prefill
    assert did["steps_sparse"] == did["sequences_sparse"] == steps
    assert did["layers_sparse"] == steps * LAYERS
    assert did["blocks_considered"] == steps * LAYERS * HEADS * middle
    assert did["blocks_selected"] == steps * LAYERS * HEADS * 4
    assert did["blocks_digested"] == 14, "the pool keeps digests of the first block, too"
    assert sparse.metrics()["kvrecall_retrieval_blocks_selected_total"] > 0


def test_a_mixed_batch_equals_its_members_alone(sparse: Engine) -> None:
    """Dense, sparse and prefilling requests in the same steps, few blocks chosen."""
    prompts = [prompt_of(tokens, 80 + at) for at, tokens in enumerate(MIXED)]
    alone = [sparse.ask(prompt, max_tokens=40)["tokens"] for prompt in prompts]
    assert sparse.forget_all()
    before = activity(sparse)
    together = sparse.generate(prompts=prompts, max_tokens=40)
    assert tokens_of(together) == alone
    assert spent(sparse, before)["sequences_sparse"] > 100


def test_blocks_from_the_pool_bring_their_digests_and_are_chosen_as_before(sparse: Engine) -> None:
    """Other prompts run over the device blocks in between, so kept digests would be wrong."""
    prompt = prompt_of(128 * 16 + 20, 60)
    first = sparse.ask(prompt, max_tokens=24)
    hit = sparse.ask(prompt, max_tokens=24)
    assert sparse.forget_device()
    sparse.generate(prompts=[prompt_of(2500, 61 + at) for at in range(4)], max_tokens=2)
    before = activity(sparse)
    recalled = sparse.ask(prompt, max_tokens=24)
    assert recalled["from"]["host"] == 128 * 16
    assert spent(sparse, before)["blocks_digested"] == 0
    assert recalled["logprobs"] == hit["logprobs"]
    assert recalled["tokens"] == first["tokens"]


def test_sparse_kv_is_not_shared_with_dense_engines(sparse: Engine) -> None:
    assert "topk_share=0.3" in str(sparse.namespace())


def test_offload_without_a_pool_is_said_to_be_missing_once(whole: Engine) -> None:
    for _ in range(2):
        whole.ask(prompt_of(2100, 70), max_tokens=3)
    text = whole.log.read_text()
    assert text.count("NO SEQUENCE LEAVES THE DEVICE") == 1
    assert "use RecallConnector" in text
