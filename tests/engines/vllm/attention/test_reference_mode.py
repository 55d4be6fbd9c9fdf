"""VLLM_RETRIEVAL_MODE=retrievalkv, in real engines of Qwen2 shapes, against plain torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import pytest

from engines.vllm.attention.qwen2 import Qwen2, Retrieval
from engines.vllm.attention.test_engine import EXTENSION, activity, spent
from engines.vllm.engine import Engine, prompt_of

pytestmark = pytest.mark.engine

INIT, LOCAL, SHARE = 128, 300, 0.3
ENVIRON = {
    "VLLM_PLUGINS": "retrieval",
    "VLLM_RETRIEVAL_MODE": "retrievalkv",
    "VLLM_RETRIEVAL_INIT_TOKENS_NUM": str(INIT),
    "VLLM_RETRIEVAL_LOCAL_TOKENS_NUM": str(LOCAL),
    "VLLM_RETRIEVAL_TOPK_PERCENT": str(SHARE),
    "VLLM_RETRIEVAL_DENSE_BOUNDARY": "1024",
    "VLLM_RETRIEVAL_OFFLOAD_BOUNDARY": "2048",
}
SHAPES: dict[str, dict[str, Any]] = {
    "Qwen2": {"heads": 4, "kv_heads": 4, "head_dim": 64},  # each head has its own keys
    "Qwen2.5": {"hidden": 512, "heads": 8, "kv_heads": 2, "head_dim": 64, "layers": 3},
}
ANSWER = 40


@pytest.fixture(scope="module", params=["Qwen2.5", pytest.param("Qwen2", marks=pytest.mark.long)])
def folder(request: pytest.FixtureRequest, model_folder: Callable[..., Path]) -> Path:
    return model_folder("qwen2", dtype="float32", **SHAPES[request.param])


@pytest.fixture(scope="module")
def engine(start: Callable[..., Engine], folder: Path) -> Engine:
    pool = {"host_size": "256MiB", "load_or_compute": "load"}
    return start(
        model=str(folder),
        dtype="float32",
        worker_extension_cls=EXTENSION,
        num_gpu_blocks_override=90,
        pool=pool,
        env=ENVIRON,
    )


def logprobs_of(reply: dict[str, Any]) -> list[float]:
    steps = zip(reply["logprobs"], reply["tokens"], strict=True)
    return [dict(step)[token] for step, token in steps]


def apart(some: list[float], others: list[float]) -> list[float]:
    return [abs(a - b) for a, b in zip(some, others, strict=True)]


@pytest.mark.parametrize("tokens", [1500, 2300])
def test_logprobs_are_those_of_the_document(engine: Engine, folder: Path, tokens: int) -> None:
    """On the device, and from 2,048 tokens on off it. With vectors in eight bits nearly all steps
    agree, without most do: a choice between blocks that are nearly alike falls otherwise, and KV
    of later tokens depends on it."""
    before = activity(engine)
    prompt = prompt_of(tokens, 7)
    reply = engine.ask(prompt, max_tokens=ANSWER, temperature=0, logprobs=0)
    did = spent(engine, before)
    assert did["steps_sparse"] == ANSWER - 1
    assert (did["sequences_offloaded"] > 0) == (tokens > 2048)
    model, answer = Qwen2(folder), reply["tokens"]
    got = logprobs_of(reply)
    ways = [Retrieval(INIT, LOCAL, SHARE, coded) for coded in (True, False)]
    coded, plain, dense = (apart(got, model.logprobs(prompt, answer, way)) for way in (*ways, None))
    assert quantiles(coded, n=10)[8] < 1e-3, (coded, plain, dense)
    assert median(plain) < 0.02, plain
    assert median(dense) > 0.1, dense


def test_the_prompts_length_decides(engine: Engine, folder: Path) -> None:
    """A sequence that grows past the boundary stays dense."""
    before = activity(engine)
    prompt = prompt_of(1010, 8)
    reply = engine.ask(prompt, max_tokens=ANSWER, temperature=0, logprobs=0)
    assert activity(engine)["steps_sparse"] == before["steps_sparse"]
    wanted = Qwen2(folder).logprobs(prompt, reply["tokens"], None)
    assert max(apart(logprobs_of(reply), wanted)) < 1e-3
