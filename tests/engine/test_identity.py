"""Changing any one ingredient of a block's bytes turns a hit into a miss."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec

from kvrecall.engines.vllm.fingerprint import WHOLE_FILE_BYTES, folder_digest
from kvrecall.engines.vllm.identity import Adapters, namespace_of
from kvrecall.engines.vllm.wire import Shard, ShardLayer


class Config:
    """What ``namespace_of`` reads of an engine's configuration."""

    def __init__(self, model: Path) -> None:
        self.vllm = SimpleNamespace(
            model_config=SimpleNamespace(
                model=str(model),
                seed=0,
                dtype=torch.bfloat16,
                quantization=None,
                hf_config=SimpleNamespace(to_dict=lambda: dict(self.fields)),
            ),
            load_config=SimpleNamespace(load_format="auto"),
            cache_config=SimpleNamespace(
                cache_dtype="auto", prefix_caching_hash_algo="sha256_cbor"
            ),
            parallel_config=SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1),
            speculative_config=None,
        )
        self.fields: dict[str, Any] = {"rope_theta": 1e6, "_name_or_path": "here"}
        spec = FullAttentionSpec(block_size=128, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
        self.kv = SimpleNamespace(
            kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)], kv_tp_replicas=1
        )
        self.shards = [Shard((ShardLayer("layers.0", 65536, "[2,128,256]"),), "CPU_ATTN/vec", True)]

    def digest(self) -> bytes:
        return namespace_of(self.vllm, self.kv, self.shards).digest


def set_block_size(config: Config) -> None:
    spec = config.kv.kv_cache_groups[0].kv_cache_spec
    config.kv.kv_cache_groups[0].kv_cache_spec = replace(spec, block_size=64)


def set_layout(config: Config) -> None:
    config.shards = [replace(config.shards[0], layers=(ShardLayer("layers.0", 65536, "[128,2]"),))]


CHANGES: dict[str, Callable[[Config], Any]] = {
    "dtype": lambda c: setattr(c.vllm.model_config, "dtype", torch.float16),
    "kv dtype": lambda c: setattr(c.vllm.cache_config, "cache_dtype", "fp8"),
    "quantization": lambda c: setattr(c.vllm.model_config, "quantization", "compressed-tensors"),
    "model settings": lambda c: c.fields.update(rope_theta=1e4),
    "block size": set_block_size,
    "layout": set_layout,
    "kernel": lambda c: setattr(c, "shards", [replace(c.shards[0], kernel="CPU_ATTN/amx")]),
    "ranks": lambda c: setattr(c.vllm.parallel_config, "tensor_parallel_size", 2),
    "stages": lambda c: setattr(c.vllm.parallel_config, "pipeline_parallel_size", 2),
    "replicas": lambda c: setattr(c.kv, "kv_tp_replicas", 2),
    "hash": lambda c: setattr(c.vllm.cache_config, "prefix_caching_hash_algo", "sha256"),
    "dummy weights": lambda c: setattr(c.vllm.load_config, "load_format", "dummy"),
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 64)
    return folder


@pytest.mark.parametrize("change", CHANGES)
def test_every_ingredient_counts(change: str, model: Path) -> None:
    config = Config(model)
    before = config.digest()
    assert config.digest() == before, "the same engine must find its blocks again"
    CHANGES[change](config)
    assert config.digest() != before


def test_place_of_the_folder_does_not_count(model: Path) -> None:
    before = Config(model).digest()
    moved = model.rename(model.with_name("moved"))
    config = Config(moved)
    config.fields["_name_or_path"] = "there"
    assert config.digest() == before


@pytest.mark.parametrize("at", [0, 8000, 16383])
def test_one_byte_of_the_weights_counts(model: Path, at: int) -> None:
    before = folder_digest(model)
    path = model / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)
    assert folder_digest(model) != before


def test_large_files_are_sampled_at_both_ends(model: Path) -> None:
    path = model / "model.safetensors"
    os.truncate(path, WHOLE_FILE_BYTES * 2)
    before = folder_digest(model)
    for at in (0, WHOLE_FILE_BYTES * 2 - 1):
        with path.open("r+b") as file:
            file.seek(at)
            file.write(b"\x99")
        after = folder_digest(model)
        assert after != before
        before = after


def test_unknown_weights_are_private(model: Path) -> None:
    config = Config(model)
    config.vllm.model_config.model = "somebody/some-model"
    assert config.digest() != config.digest()
    config.vllm.model_config.hf_config._commit_hash = "0123abc"
    assert config.digest() == config.digest()


def test_adapter_by_content_and_never_by_name(tmp_path: Path) -> None:
    adapters = Adapters()
    folder = tmp_path / "adapter"
    folder.mkdir()
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(b"one" * 100)
    request = SimpleNamespace(lora_path=str(folder), lora_int_id=1)
    first = adapters.digest(request)
    assert first is not None
    assert adapters.digest(request) == first

    weights.write_bytes(b"two" * 100)
    os.utime(weights, ns=(1, 1))
    assert adapters.digest(request) is None, "which weights are loaded is not known any more"
    reloaded = SimpleNamespace(lora_path=str(folder), lora_int_id=2)
    second = adapters.digest(reloaded)
    assert second not in (None, first)
    assert adapters.digest(SimpleNamespace(lora_path="hub/name", lora_int_id=3)) is None


def test_salt_and_adapter_name_are_in_the_hash() -> None:
    """vLLM's part of the identity, as far as the pool relies on it."""
    from vllm import SamplingParams
    from vllm.v1.request import Request

    init_none_hash(sha256_cbor)
    hasher = get_request_block_hasher(128, sha256_cbor)

    def first_hash(salt: str | None) -> bytes:
        params = SamplingParams(max_tokens=1)
        params.update_from_generation_config({}, eos_token_id=1)
        request = Request("r", list(range(200)), params, None, cache_salt=salt, block_hasher=hasher)
        return bytes(request.block_hashes[0])

    assert first_hash(None) == first_hash(None)
    assert len({first_hash(None), first_hash("red"), first_hash("blue")}) == 3
