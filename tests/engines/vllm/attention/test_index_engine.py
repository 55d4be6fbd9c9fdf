"""Real engines that decode by vector indexes: on the device, off it, and with the pool."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from engines.vllm.attention.test_engine import activity, spent
from engines.vllm.attention.test_offload import settings
from engines.vllm.engine import Engine, EngineFailed, prompt_of

pytestmark = pytest.mark.engine

ENVIRON = settings(2600)
TOKENS, ANSWER = (1500, 3000), 70  # on the device and off it


@pytest.fixture(scope="module")
def setup(setup: dict[str, Any]) -> dict[str, Any]:
    return {**setup, "pool": {"host_size": "96MiB", "load_or_compute": "load"}}


OTHER = pytest.param("faiss-ivf", marks=pytest.mark.long)


@pytest.fixture(scope="module", params=["faiss-flat", OTHER])
def indexed(
    request: pytest.FixtureRequest, start: Callable[..., Engine], setup: dict[str, Any]
) -> Engine:
    return start(**setup, env={**ENVIRON, "VLLM_RETRIEVAL_INDEX": request.param})


def test_it_decodes(indexed: Engine) -> None:
    """A block of every layer but the dense one goes into an index once each time that its sequence
    runs, on the device or off it; and again from the pool, as it was."""
    first = []
    for tokens in TOKENS:
        before = activity(indexed)
        first.append(indexed.ask(prompt_of(tokens, tokens), max_tokens=ANSWER, temperature=0))
        did = spent(indexed, before)
        assert did["steps_sparse"] == ANSWER - 1
        middle = (tokens + ANSWER - 1 - 256) // 128 - 1
        assert (did["sequences_offloaded"] > 0) == (tokens > 2600)
        assert did["blocks_indexed"] == 3 * middle
    for tokens, want in zip(TOKENS, first, strict=True):
        indexed.forget_device()
        again = indexed.ask(prompt_of(tokens, tokens), max_tokens=ANSWER, temperature=0)
        assert again["cached"] > 1000
        assert again["tokens"] == want["tokens"]


def test_an_index_that_does_not_exist_ends_the_start(
    start: Callable[..., Engine], setup: dict[str, Any]
) -> None:
    with pytest.raises(EngineFailed, match="VLLM_RETRIEVAL_INDEX is 'faiss'"):
        start(**setup, env={**ENVIRON, "VLLM_RETRIEVAL_INDEX": "faiss"})
