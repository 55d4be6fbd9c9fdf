"""Retrieval as on a GPU: vLLM's GPU backends in a real engine, with kvrecall's over them and
Triton's kernels in its interpreter. Does not cover streams, CUDA graphs, FlashAttention's kernels
and speed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pool.service.service import MIB, Service

from engines.vllm.attention.test_engine import EXTENSION, activity, retrieval, spent, tokens_of
from engines.vllm.attention.test_offload_faults import same
from engines.vllm.attention.test_offload_service import meanwhile
from engines.vllm.engine import Engine, prompt_of

pytestmark = [pytest.mark.engine, pytest.mark.long]
pytest.importorskip("triton")

BLOCK = 32
FEW = {
    **retrieval(0.3),
    "VLLM_RETRIEVAL_INIT_TOKENS_NUM": "32",
    "VLLM_RETRIEVAL_LOCAL_TOKENS_NUM": "32",
    "VLLM_RETRIEVAL_DENSE_BOUNDARY": "160",
    "VLLM_RETRIEVAL_OFFLOAD_BOUNDARY": "9999",
}
AS_GPU = {"prelude": "engines.vllm.attention.asgpu"}
INTERPRETED = {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "0", "AS_GPU": "TRITON_ATTN"}
MIXED = [230, 157, 40]
"""Sparse, growing past the boundary, dense."""
DECODED = 4
MIDDLE = (230 - 32) // BLOCK - 1
"""Blocks of the first prompt that may leave the device."""
WHOLE = 230 // BLOCK + 1
"""All of its blocks, also while it decodes."""


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
def sparse(start: Callable[..., Engine], setup: dict[str, Any]) -> Engine:
    pool = {"host_size": "64MiB", "load_or_compute": "load"}
    env = {**FEW, **INTERPRETED, "VLLM_USE_V2_MODEL_RUNNER": "1"}
    return start(**setup, **AS_GPU, pool=pool, env=env)


RUNNERS = {
    "V1": {"VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_KV_CACHE_LAYOUT": "NHD"},
    "V2": {"VLLM_USE_V2_MODEL_RUNNER": "1", "VLLM_KV_CACHE_LAYOUT": "HND"},
}
BACKENDS = {"V1": "TRITON_ATTN", "V2": "FLASH_ATTN"}


def offloading(runner: str, ahead: bool, pool: dict[str, Any]) -> dict[str, Any]:
    """An engine whose long sequences are partially offloaded. ``ahead``: by asynchronous
    scheduling."""
    env = {**FEW, **INTERPRETED, "AS_GPU": BACKENDS[runner], **RUNNERS[runner]}
    env |= {"AS_GPU_AHEAD": str(int(ahead)), "VLLM_RETRIEVAL_OFFLOAD_BOUNDARY": "192"}
    return {**AS_GPU, "env": env, "pool": {"load_or_compute": "load", **pool}}


@pytest.fixture(
    scope="module",
    params=[("V1", False), ("V1", True), ("V2", False), ("V2", True)],
    ids=["V1", "V1-ahead", "V2", "V2-ahead"],
)
def offloaded(
    request: pytest.FixtureRequest, start: Callable[..., Engine], setup: dict[str, Any]
) -> Iterator[Engine]:
    """Under either model runner, also with asynchronous scheduling, the default on GPUs. The last
    request of the mixed batch depends on the blocks that the first one frees in the same step."""
    runner, ahead = request.param
    given = offloading(runner, ahead, {"host_size": "64MiB"})
    engine = start(**{**setup, "num_gpu_blocks_override": 14}, **given)
    assert engine.is_ahead() == ahead
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def on_cpu(start: Callable[..., Engine], setup: dict[str, Any]) -> Engine:
    """The same settings with vLLM's CPU kernel."""
    return start(**setup, env=FEW)


def prompts() -> list[list[int]]:
    return [prompt_of(tokens, seed) for seed, tokens in enumerate(MIXED)]


PREEMPTED: dict[str, Any] = {"prompts": prompts(), "after_steps": 3, "max_tokens": DECODED}


def answers(engine: Engine) -> list[list[int]]:
    return tokens_of(engine.generate(prompts=prompts(), max_tokens=DECODED, ignore_eos=True))


def test_few_blocks_give_the_tokens_of_the_cpu_kernel(sparse: Engine, on_cpu: Engine) -> None:
    before = activity(sparse)
    got = answers(sparse)
    assert got == answers(on_cpu)
    done = spent(sparse, before)
    assert 0 < done["blocks_selected"] < done["blocks_considered"]
    names = ("steps_sparse", "blocks_considered", "blocks_selected", "blocks_attended")
    there = activity(on_cpu)
    assert {name: done[name] for name in names} == {name: there[name] for name in names}


@pytest.mark.parametrize(
    ("architecture", "layers", "runner"), [("gemma3_text", 3, "V2"), ("gpt_oss", 2, "V1")]
)
def test_windows_and_sinks(
    start: Callable[..., Engine],
    model_folder: Callable[..., Path],
    setup: dict[str, Any],
    architecture: str,
    layers: int,
    runner: str,
) -> None:
    """The last layer has full attention, those before it windows in KV groups of their own; gpt-oss
    has sinks in all of them."""
    shape = {"hidden": 64, "layers": layers, "heads": 4, "kv_heads": 2, "head_dim": 32}
    setup = {**setup, "model": str(model_folder(architecture, window=64, **shape))}
    env = {**FEW, **INTERPRETED, **RUNNERS[runner]}
    device, host = start(**setup, **AS_GPU, env=env), start(**setup, env=FEW)
    assert answers(device) == answers(host)
    done = activity(device)
    assert 0 < done["blocks_selected"] < done["blocks_considered"]
    device.close()


def test_a_prefix_from_the_pool_gives_the_tokens_of_a_device_hit(sparse: Engine) -> None:
    (prompt,) = prompts()[:1]
    sparse.ask(prompt, max_tokens=1)
    want = sparse.ask(prompt, max_tokens=DECODED)
    got = sparse.ask_anew(prompt, max_tokens=DECODED)
    assert want["from"]["host"] == 0
    assert got["from"]["host"] == got["cached"] == want["cached"] > 0
    assert got["tokens"] == want["tokens"]
    assert got["logprobs"] == want["logprobs"]


@pytest.fixture(scope="module")
def undisturbed(sparse: Engine) -> list[list[int]]:
    """The tokens of an engine whose blocks stay on the device."""
    return answers(sparse)


@pytest.fixture(scope="module")
def preempted(sparse: Engine) -> list[list[int]]:
    """The same, with all requests preempted midway."""
    return sparse.preempt_midway(**PREEMPTED)


def test_sequences_off_the_device_decode_as_on_it(
    undisturbed: list[list[int]], offloaded: Engine
) -> None:
    """Beside others; then as prefixes from the pool, whose middle blocks stay there."""
    for again in (False, True):
        assert offloaded.forget_device()
        before = activity(offloaded)
        assert answers(offloaded) == undisturbed
        did = spent(offloaded, before)
        assert did["blocks_left" if again else "blocks_offloaded"] == MIDDLE
        late = 0 if again else int(offloaded.is_ahead())
        assert did["sequences_offloaded"] == DECODED - 1 - late
        assert did["sequences_sparse"] > did["sequences_offloaded"]
        assert did["blocks_hit"] > 0
        assert did["blocks_loaded"] > 0
        assert did["bytes_loaded"] == did["blocks_loaded"] * BLOCK * 2 * 32 * 4
        # The dense layer copies a block when it leaves. While the rest of a prompt is computed
        # both layers copy all.
        staged = MIDDLE + (2 * WHOLE if again else 0)
        assert did["bytes_staged"] == staged * BLOCK * 2 * 2 * 32 * 4
    assert offloaded.pool_stats()["leases"] == 0


def test_preempted_sequences_go_on_off_the_device(
    preempted: list[list[int]], offloaded: Engine
) -> None:
    """They resume from the pool, where their middle blocks stay, beside others."""
    assert offloaded.forget_all()
    before = activity(offloaded)
    steps = PREEMPTED["after_steps"] + offloaded.is_ahead()  # the last result is dropped
    assert offloaded.preempt_midway(**{**PREEMPTED, "after_steps": steps}) == preempted
    did = spent(offloaded, before)
    assert did["blocks_offloaded"] == did["blocks_left"] == MIDDLE
    assert did["sequences_offloaded"] == DECODED - 2
    assert offloaded.pool_stats()["leases"] == 0


def test_the_memory_of_a_dead_service_is_read_on(
    start: Callable[..., Engine],
    setup: dict[str, Any],
    sparse: Engine,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """The next service has an arena of its own, which the worker locks and the other not any
    more."""
    folder = tmp_path_factory.mktemp("service")
    (prompt,) = prompts()[:1]
    want = sparse.ask(prompt, max_tokens=24, ignore_eos=True)
    with Service(folder, 64 * MIB) as service:
        pool = {"backend": "service", "socket": str(service.socket), "call_timeout": 10}
        engine = start(**setup, **offloading("V2", True, pool))

        def begin_anew() -> None:
            service.kill()
            service.start()

        (got,) = meanwhile(engine, [prompt], folder / "here", begin_anew, True, 8, 24)
        same(got, want)
        assert activity(engine)["sequences_offloaded"] == 24 - 2
        engine.close()
