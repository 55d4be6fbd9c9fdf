"""Retrieval as on a GPU: vLLM's backends for GPUs in a real engine, and ours over them, Triton's
kernels in its interpreter. What it cannot show: streams, CUDA graphs, FlashAttention's kernels,
time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine.engine import Engine, prompt_of

from .test_engine import EXTENSION, activity, spent, tokens_of

pytestmark = pytest.mark.engine
pytest.importorskip("triton")

BLOCK = 32
BOUNDARIES = {
    "VLLM_RETRIEVAL_INIT_TOKENS_NUM": "32",
    "VLLM_RETRIEVAL_LOCAL_TOKENS_NUM": "32",
    "VLLM_RETRIEVAL_DENSE_BOUNDARY": "160",
    "VLLM_RETRIEVAL_OFFLOAD_BOUNDARY": "9999",
    "VLLM_RETRIEVAL_DENSE_LAYERS": "1",
    "VLLM_RETRIEVAL_GATE": "0",
    "VLLM_RETRIEVAL_LEAST_BLOCKS": "1",
}
AS_GPU = {"prelude": "retrieval.asgpu"}
INTERPRETED = {
    "TRITON_INTERPRET": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "AS_GPU": "TRITON_ATTN",
}
MIXED = [40, 157, 230]
"""Dense, growing past the boundary, sparse."""
DECODED = 4


def retrieval(share: float) -> dict[str, str]:
    return {**BOUNDARIES, "VLLM_PLUGINS": "retrieval", "VLLM_RETRIEVAL_TOPK_PERCENT": str(share)}


@pytest.fixture(scope="module")
def setup(model_folder: Callable[..., Path]) -> dict[str, Any]:
    shape = {"hidden": 64, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 32}
    return {
        "model": str(model_folder("qwen3", **shape)),
        "dtype": "float32",
        "block_size": BLOCK,
        "max_model_len": 384,
        "worker_extension_cls": EXTENSION,
        "num_gpu_blocks_override": 64,
    }


@pytest.fixture(scope="module")
def dense(start: Callable[..., Engine], setup: dict[str, Any]) -> Engine:
    return start(**setup, **AS_GPU, env=INTERPRETED)


@pytest.fixture(scope="module")
def whole(start: Callable[..., Engine], setup: dict[str, Any]) -> Engine:
    """Sparse with every middle block chosen, in a device cache too small for the mixed batch."""
    setup = {**setup, "num_gpu_blocks_override": 14}
    return start(**setup, **AS_GPU, env={**retrieval(1.0), **INTERPRETED})


@pytest.fixture(scope="module")
def sparse(start: Callable[..., Engine], setup: dict[str, Any]) -> Engine:
    pool = {"host_size": "64MiB", "load_or_compute": "load"}
    env = {**retrieval(0.3), **INTERPRETED, "VLLM_USE_V2_MODEL_RUNNER": "1"}
    return start(**setup, **AS_GPU, pool=pool, env=env)


@pytest.fixture(scope="module")
def away(start: Callable[..., Engine], setup: dict[str, Any]) -> Engine:
    """Long sequences leave the device in part."""
    pool = {"host_size": "64MiB", "load_or_compute": "load"}
    env = {**retrieval(0.3), **INTERPRETED, "VLLM_RETRIEVAL_OFFLOAD_BOUNDARY": "192"}
    env["VLLM_KV_CACHE_LAYOUT"] = "NHD"
    return start(**setup, **AS_GPU, pool=pool, env=env)


@pytest.fixture(scope="module")
def on_cpu(start: Callable[..., Engine], setup: dict[str, Any]) -> Engine:
    """The same settings with vLLM's CPU kernel."""
    return start(**setup, env=retrieval(0.3))


def prompts() -> list[list[int]]:
    return [prompt_of(tokens, seed) for seed, tokens in enumerate(MIXED)]


def answers(engine: Engine) -> list[list[int]]:
    return tokens_of(engine.generate(prompts=prompts(), max_tokens=DECODED, ignore_eos=True))


def test_the_share_of_all_gives_dense_tokens(dense: Engine, whole: Engine) -> None:
    """In one batch of all regimes, for which the device has not room at once."""
    want = answers(dense)
    assert set(activity(dense).values()) == {0}
    before = activity(whole)
    assert answers(whole) == want
    done = spent(whole, before)
    assert done["blocks_selected"] == done["blocks_considered"] > 0


def test_with_flash_attentions_metadata(
    dense: Engine, start: Callable[..., Engine], setup: dict[str, Any]
) -> None:
    """On the device and off it. FlashAttention's own kernels are not seen by this."""
    pool = {"host_size": "64MiB", "load_or_compute": "load"}
    env = {**retrieval(1.0), **INTERPRETED, "AS_GPU": "FLASH_ATTN"}
    env["VLLM_RETRIEVAL_OFFLOAD_BOUNDARY"] = "192"
    flash = start(**setup, **AS_GPU, pool=pool, env=env)
    assert answers(flash) == answers(dense)
    did = activity(flash)
    assert did["sequences_sparse"] > did["sequences_offloaded"] > 0
    assert did["blocks_loaded"] > 0
    assert flash.forget_device()
    assert answers(flash) == answers(dense)
    assert activity(flash)["blocks_left"] > 0


def test_few_blocks_give_the_tokens_of_the_cpu_kernel(sparse: Engine, on_cpu: Engine) -> None:
    before = activity(sparse)
    got = answers(sparse)
    assert got == answers(on_cpu)
    done = spent(sparse, before)
    assert 0 < done["blocks_selected"] < done["blocks_considered"]
    names = ("steps_sparse", "blocks_considered", "blocks_selected", "blocks_attended")
    there = activity(on_cpu)
    assert {name: done[name] for name in names} == {name: there[name] for name in names}


def test_a_prefix_from_the_pool_gives_the_tokens_of_a_device_hit(sparse: Engine) -> None:
    (prompt,) = prompts()[2:3]
    sparse.ask(prompt, max_tokens=1)
    want = sparse.ask(prompt, max_tokens=DECODED)
    assert sparse.forget_device()
    got = sparse.ask(prompt, max_tokens=DECODED)
    assert want["from"]["host"] == 0
    assert got["from"]["host"] == got["cached"] == want["cached"] > 0
    assert got["tokens"] == want["tokens"]
    assert got["logprobs"] == want["logprobs"]


def test_sequences_off_the_device_decode_as_on_it(sparse: Engine, away: Engine) -> None:
    """Beside others; then as prefixes from the pool, of which the middle stays there."""
    want = answers(sparse)
    for again in (False, True):
        assert away.forget_device()
        before = activity(away)
        assert answers(away) == want
        did = spent(away, before)
        assert did["blocks_left" if again else "blocks_offloaded"] > 0
        assert did["sequences_offloaded"] == DECODED - 1
        assert did["blocks_hit"] > 0
        assert did["blocks_loaded"] > 0
        assert did["bytes_loaded"] == did["blocks_loaded"] * BLOCK * 2 * 32 * 4
    assert away.pool_stats()["leases"] == 0
