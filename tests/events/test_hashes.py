"""vLLM's block hashes, computed without vLLM."""

from __future__ import annotations

import random

import pytest

from kvrecall.events.hashes import HashRule, rule_of
from kvrecall.events.wire import short_hash


def vllm_hashes(algorithm: str, tokens: list[int], size: int, salt: str | None) -> list[int]:
    """By vLLM's own functions."""
    from types import SimpleNamespace

    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core import kv_cache_utils as vllm

    function = get_hash_fn_by_name(algorithm)
    vllm.init_none_hash(function)
    request = SimpleNamespace(
        lora_request=None, mm_features=[], cache_salt=salt, prompt_embeds=None
    )
    parent, made = None, []
    for start in range(0, len(tokens) - size + 1, size):
        extra, _ = vllm.generate_block_hash_extra_keys(request, start, start + size, 0)  # type: ignore[arg-type]
        parent = vllm.hash_block_tokens(function, parent, tokens[start : start + size], extra)
        made.append(short_hash(parent))
    return made


@pytest.mark.parametrize("salt", [None, "a tenant's salt"])
@pytest.mark.parametrize("algorithm", ["sha256_cbor", "sha256", "xxhash", "xxhash_cbor"])
def test_hashes_are_vllms(
    algorithm: str, salt: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if algorithm.startswith("xxhash"):  # known to others if the seed is set
        monkeypatch.setenv("PYTHONHASHSEED", "7")
    tokens = random.Random(1).choices(range(200_000), k=100)
    chain = HashRule(algorithm, 16).chain(tokens, salt)
    assert list(chain) == vllm_hashes(algorithm, tokens, 16, salt)


def test_a_rule_is_found_from_one_block() -> None:
    tokens = list(range(1000, 1040))
    for algorithm in ("sha256_cbor", "sha256"):
        first = HashRule(algorithm, 16).chain(tokens, "s")[0]
        assert rule_of(first, tokens, 16, "s") == HashRule(algorithm, 16)
        assert rule_of(first, tokens, 16, "t") is None
        assert rule_of(first + 1, tokens, 16, "s") is None
