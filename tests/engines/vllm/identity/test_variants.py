"""The same bits from every tier, for every kind of engine a CPU can run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.quantised import write_w8a8

from engines.vllm.engine import Engine, EngineFailed, prompt_of
from engines.vllm.exactness import BLOCK, hits, nothing_held, same_bits_from_every_tier
from kvrecall_lab.models import write_model
from kvrecall_lab.models.variants import write_lora

pytestmark = [pytest.mark.engine, pytest.mark.long]

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}


def pool_at(folder: Path, block_bytes: int, blocks: int = 24) -> dict[str, Any]:
    return {
        "host_size": f"{blocks * block_bytes}B",
        "disk_path": str(folder),
        "disk_size": "256MiB",
        "async_write": True,
        "load_or_compute": "load",
    }


def windows(*kinds: str) -> dict[str, Any]:
    """Four layers, two of each kind, with a window of two blocks."""
    return {"sliding_window": 256, "layer_types": [f"{kind}_attention" for kind in kinds * 2]}


VARIANTS = {
    "all-windows-fp8-kv-unchunked": (
        "llama",
        {
            "hf_overrides": windows("sliding", "sliding"),
            "kv_cache_dtype": "fp8",
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": 4096,
        },
        1,
        5,  # of each prompt the pool keeps the window at its end, two blocks
    ),
    "some-windows-ngram-speculation": (
        "llama",
        {"hf_overrides": windows("full", "sliding"), "speculative_config": NGRAM},
        1,  # two groups: a record holds half of the layers
        24,
    ),
}
"""Several things that differ at once: each start takes its time. Architecture, options, bytes of a
value of KV, and blocks that the host holds."""


@pytest.mark.parametrize("name", VARIANTS)
def test_variant(
    name: str, start: Callable[..., Engine], model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    architecture, options, kv_bytes, blocks = VARIANTS[name]
    if options.get("kv_cache_dtype") == "fp8" and not torch.cpu._is_avx512_supported():
        pytest.skip("vLLM keeps KV in fp8 only on processors with AVX-512 or AMX")
    block_bytes = 4 * 2 * 2 * 64 * BLOCK * kv_bytes
    pool = pool_at(tmp_path, block_bytes, blocks)
    engine = start(model=str(model_folder(architecture)), pool=pool, **options)
    same_bits_from_every_tier(engine, 1)
    if "speculative_config" in options:
        repeated = prompt_of(60, 3) * 6
        first = engine.ask(repeated, max_tokens=150)
        assert engine.forget_device()
        turn = repeated + first["tokens"]
        recalled = engine.ask(turn, max_tokens=20)
        assert hits(recalled) == (0, (len(turn) - 1) // BLOCK * BLOCK, 0)
        assert recalled["logprobs"] == engine.ask(turn, max_tokens=20)["logprobs"]
    nothing_held(engine)
    engine.close()


def test_adapters_of_one_name(
    start: Callable[..., Engine], model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    """Two adapters of one name and other weights never share a block, not even at one path."""
    base = model_folder("qwen3")
    path = tmp_path / "adapter"
    pool = pool_at(tmp_path / "pool", 4 * 2 * 2 * 64 * BLOCK * 2)
    pool["async_write"] = False
    options = {"model": str(base), "pool": pool, "enable_lora": True, "max_lora_rank": 8}
    prompt = prompt_of(3 * BLOCK + 4, 1)

    write_lora(path, base, rank=8, seed=1)
    engine = start(**options)
    plain = engine.ask(prompt)
    first = engine.ask(prompt, lora=["style", 1, str(path)])
    assert hits(first) == (0, 0, 0)
    assert hits(engine.ask_anew(prompt, lora=["style", 1, str(path)])) == (0, 3 * BLOCK, 0)
    engine.close()

    for file in path.iterdir():
        file.unlink()
    write_lora(path, base, rank=8, seed=2)
    engine = start(**options)
    other = engine.ask(prompt, lora=["style", 1, str(path)])
    assert hits(other) == (0, 0, 0)
    assert other["logprobs"] != first["logprobs"]
    assert sum(hits(engine.ask(prompt))) == 2 * BLOCK  # the first hit is audited by its last block
    again = engine.ask_anew(prompt)
    assert sum(hits(again)) == 3 * BLOCK
    assert again["tokens"] == plain["tokens"]
    engine.close()


def test_two_ranks_whose_copies_are_late(
    start: Callable[..., Engine], model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    """As on a device with streams: stores are read and loads written steps after they were
    ordered. With int8 weights."""
    engine = start(
        model=str(write_w8a8(tmp_path / "w8a8", model_folder("qwen3"))),
        pool=pool_at(tmp_path / "pool", 4 * 2 * 2 * 64 * BLOCK * 2),
        tensor_parallel_size=2,
        env={"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
        module="kvrecall_lab.streams.late_engine",
        connector="LateConnector",
    )
    same_bits_from_every_tier(engine, 1)
    prompts = [prompt_of(5 * BLOCK + 9, 20 + number) for number in range(4)]
    computed = [engine.ask(prompt)["tokens"] for prompt in prompts]
    assert engine.forget_device()
    for reply in engine.generate(prompts=prompts):
        assert sum(hits(reply)[1:]) == 5 * BLOCK
    for steps in (1, 2, 3, 6):
        assert engine.abort_midway(prompt=prompts[0], after_steps=steps, max_tokens=20) == 0
        assert engine.forget_device()
    for prompt, tokens in zip(prompts, computed, strict=True):
        assert engine.ask(prompt)["tokens"] == tokens
        engine.settle()
    nothing_held(engine)
    assert engine.metrics()["kvrecall_load_seconds_total"] > 0
    engine.close()


@pytest.mark.parametrize("heads", [1, 2])
def test_any_number_of_ranks_reads_what_another_wrote(
    heads: int, start: Callable[..., Engine], tmp_path: Path
) -> None:
    """One rank fills a disk, two read it and add to it, one reads that. What is read gives bit for
    bit what a hit on the reader's own device gives, once the first hit has been audited. With one
    KV head both of the two ranks have it, and one of them writes it."""
    setup: dict[str, Any] = {
        "model": str(write_model(tmp_path / "model", "qwen3", kv_heads=heads)),
        "pool": pool_at(tmp_path / "pool", 4 * 2 * heads * 64 * BLOCK * 2),
        "dtype": "bfloat16",
    }
    prompts = [prompt_of(3 * BLOCK + 9, 40 + number) for number in range(4)]
    for ranks, old, new in ((1, (), (0, 1)), (2, (0, 1), (2, 3)), (1, (2, 3), ())):
        engine = start(
            **setup, tensor_parallel_size=ranks, env={"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        )
        for place, number in enumerate(reversed(old)):  # what was audited vouches for earlier ones
            recalled = engine.ask(prompts[number])
            assert hits(recalled) == (0, 0, (2 + place) * BLOCK), (ranks, number)
            again = engine.ask(prompts[number])
            assert hits(again) == (3 * BLOCK, 0, 0)
            if place:
                assert again["logprobs"] == recalled["logprobs"]
                assert again["tokens"] == recalled["tokens"]
        for number in new:
            engine.ask(prompts[number])
        nothing_held(engine)
        engine.close()


HAS_TILES = torch.cpu._is_amx_tile_supported()


@pytest.mark.skipif(not HAS_TILES, reason="vLLM reuses latent prefixes only on processors with AMX")
def test_latent_attention(
    start: Callable[..., Engine], model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    """DeepSeek's MLA: one vector a token instead of keys and values by head. vLLM attends to a
    prefix that it reuses by another kernel than to one that it computes, so in bfloat16 a hit on
    the device differs from computing, pool or not; hits are compared with each other."""
    folder = model_folder("deepseek_v3")
    engine = start(
        model=str(folder), pool=pool_at(tmp_path, latent_bytes(folder)), dtype="bfloat16"
    )
    same_bits_from_every_tier(engine, 1, like_computed=False)
    nothing_held(engine)
    engine.close()


def latent_bytes(folder: Path) -> int:
    """Of a block, in bfloat16."""
    config = json.loads((folder / "config.json").read_text())
    width = config["kv_lora_rank"] + config["qk_rope_head_dim"]
    return int(config["num_hidden_layers"]) * width * BLOCK * 2


@pytest.mark.skipif(HAS_TILES, reason="with AMX it can be served")
def test_what_cannot_be_served_is_refused(
    start: Callable[..., Engine], model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    """DeepSeek's MLA has no prefix reuse on a CPU without AMX; vLLM turns prefix caching off."""
    with pytest.raises(EngineFailed, match="prefix caching is off"):
        start(model=str(model_folder("deepseek_v3")), pool={"host_size": "64MiB"}, block_size=16)
