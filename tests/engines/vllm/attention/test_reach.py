"""What retrieval is served beside: speculation, adapters, ranks, compiled graphs, models of other
kinds. Each in a real engine, against one without it or against dense attention."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engines.vllm.attention.heads import write_nemotron
from engines.vllm.attention.test_engine import (
    EXTENSION,
    MIXED,
    SAMPLING,
    activity,
    retrieval,
    spent,
    tokens_of,
)
from engines.vllm.engine import Engine, EngineFailed, prompt_of
from kvrecall_lab.models.variants import write_lora

pytestmark = [pytest.mark.engine, pytest.mark.long]

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}


@pytest.fixture(scope="module")
def plain(start: Callable[..., Engine], setup: dict[str, Any]) -> Engine:
    return start(**setup, env=retrieval(0.3))


def repeated(tokens: int, seed: int) -> list[int]:
    """A prompt in which a drafter finds what came before."""
    piece = prompt_of(40, seed)
    return (piece * (tokens // len(piece) + 1))[:tokens]


def test_speculation_decodes_the_tokens_of_a_plain_engine(
    start: Callable[..., Engine], setup: dict[str, Any], plain: Engine
) -> None:
    """Every draft has the blocks that it would have as a decoded token; sequences grow past the
    boundary and past the end of blocks."""
    prompts = [repeated(tokens, 10 + at) for at, tokens in enumerate(MIXED)]
    before = activity(plain)
    want = plain.generate(prompts=prompts, max_tokens=150)
    alone = spent(plain, before)
    engine = start(**setup, env=retrieval(0.3), speculative_config=NGRAM)
    before = activity(engine)
    got = engine.generate(prompts=prompts, max_tokens=150)
    did = spent(engine, before)
    assert tokens_of(got) == tokens_of(want)
    assert did["steps_sparse"] < alone["steps_sparse"], "no draft was accepted"
    assert did["sequences_sparse"] > alone["sequences_sparse"], "none was rejected"
    assert 0 < did["blocks_selected"] < did["blocks_considered"]


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory, setup: dict[str, Any]) -> list[list[Any]]:
    folder = tmp_path_factory.mktemp("adapters")
    return [
        [f"a{at}", at, str(write_lora(folder / f"a{at}", Path(setup["model"]), seed=at))]
        for at in (1, 2)
    ]


def test_adapters(
    start: Callable[..., Engine], setup: dict[str, Any], adapters: list[list[Any]], plain: Engine
) -> None:
    """With every block chosen, dense attention's tokens, of each adapter and without, in one
    batch."""
    prompts = [prompt_of(tokens, 20 + at) for at, tokens in enumerate((1000, 1500))]
    setup = {**setup, "enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    dense, whole = start(**setup), start(**setup, env=retrieval(1.0))
    before, each = activity(whole), [None, *adapters]
    ask = {
        "prompts": [prompt for _ in each for prompt in prompts],
        "loras": [adapter for adapter in each for _ in prompts],
        "max_tokens": 60,
    }
    found = tokens_of(whole.generate(**ask))
    assert found == tokens_of(dense.generate(**ask))
    assert spent(whole, before)["blocks_selected"] > 0
    assert found[0] != found[2] != found[4] != found[0]


def test_samples_of_a_shared_prefix_are_those_of_one(plain: Engine) -> None:
    """Few blocks chosen: prompts with a prefix in common, three samples each, whose blocks are
    shared until they end, against each prompt by itself."""
    shared = prompt_of(1200, 90)
    prompts = [shared + prompt_of(tokens, 91 + tokens) for tokens in (5, 140, 301)]
    assert plain.forget_all()
    alone = []
    for prompt in prompts:
        alone.append(plain.ask(prompt, max_tokens=40)["tokens"])
        assert plain.forget_all()
    before = activity(plain)
    got = plain.generate(prompts=prompts, n=3, max_tokens=40, **SAMPLING)
    assert [len(reply["all"]) for reply in got] == [3, 3, 3]
    assert tokens_of(got) == [tokens for tokens in alone for _ in range(3)]
    did = spent(plain, before)
    assert did["sequences_sparse"] > 3 * 3 * 35
    assert 0 < did["blocks_selected"] < did["blocks_considered"]


def test_ranks_choose_for_their_own_heads(
    start: Callable[..., Engine], setup: dict[str, Any], plain: Engine
) -> None:
    prompts = [prompt_of(tokens, 30 + at) for at, tokens in enumerate(MIXED)]
    want = plain.generate(prompts=prompts, max_tokens=60)
    engine = start(**setup, tensor_parallel_size=2, env=retrieval(0.3))
    got = engine.generate(prompts=prompts, max_tokens=60)
    assert tokens_of(got) == tokens_of(want)
    one, other = engine.workers(method="retrieval_activity")
    assert one == other
    assert 0 < one["blocks_selected"] < one["blocks_considered"]


def test_compiled_graphs(start: Callable[..., Engine], setup: dict[str, Any]) -> None:
    """By Inductor; attention is between the graphs."""
    prompts = [prompt_of(tokens, 40 + at) for at, tokens in enumerate(MIXED)]
    compiled = {**setup, "enforce_eager": False, "compilation_config": {"mode": 3}}
    dense = start(**compiled, env={"TORCHDYNAMO_DISABLE": "0"})
    whole = start(**compiled, env={**retrieval(1.0), "TORCHDYNAMO_DISABLE": "0"})
    before = activity(whole)
    got = whole.generate(prompts=prompts, max_tokens=60)
    assert tokens_of(got) == tokens_of(dense.generate(prompts=prompts, max_tokens=60))
    assert spent(whole, before)["blocks_selected"] > 0
    assert "AOT compil" in whole.log.read_text(), "vLLM compiled no graph"


SHAPES: dict[str, dict[str, Any]] = {
    "gemma3_text": {"layers": 6},  # windows, and full attention in layers 2 and 5
    "gpt_oss": {},  # the same with sinks, full attention in layers 1 and 3
}


@pytest.fixture(scope="module", params=list(SHAPES))
def windows(
    request: pytest.FixtureRequest, setup: dict[str, Any], model_folder: Callable[..., Path]
) -> dict[str, Any]:
    """Windows of 256 tokens beside full attention."""
    return {**setup, "model": str(model_folder(request.param, **SHAPES[request.param]))}


def test_windows_beside_full_attention(
    start: Callable[..., Engine], windows: dict[str, Any]
) -> None:
    """With every block of the full layers chosen, dense attention's tokens; with few, others, which
    are the same when a batch is one request and when blocks come from the pool. Past the offload
    boundary, too, where such a sequence stays on the device."""
    prompts = [prompt_of(tokens, 50 + at) for at, tokens in enumerate(MIXED)]
    ask = {"prompts": prompts, "max_tokens": 60}
    dense, whole = start(**windows), start(**windows, env=retrieval(1.0))
    pool = {"host_size": "96MiB", "load_or_compute": "load"}
    few = start(**windows, pool=pool, env=retrieval(0.3))
    assert "NO SEQUENCE LEAVES THE DEVICE" in few.log.read_text()
    before = activity(whole)
    assert tokens_of(whole.generate(**ask)) == tokens_of(dense.generate(**ask))
    assert spent(whole, before)["layers_sparse"] > 2 * 3 * 50

    prompt = prompt_of(128 * 16 + 20, 60)
    first = few.ask(prompt, max_tokens=24)
    hit = few.ask(prompt, max_tokens=24)
    assert few.forget_device()
    few.generate(prompts=[prompt_of(2500, 61 + at) for at in range(3)], max_tokens=2)
    before = activity(few)
    recalled = few.ask(prompt, max_tokens=24)
    did = spent(few, before)
    assert recalled["from"]["host"] == 128 * 16
    assert recalled["logprobs"] == hit["logprobs"]
    assert recalled["tokens"] == first["tokens"]
    assert did["blocks_digested"] == 0, "they came from the pool"
    assert did["blocks_selected"] < did["blocks_considered"]
    assert first["logprobs"] != dense.ask(prompt, max_tokens=24)["logprobs"]


SHORT_BLOCKS = {"dtype": "bfloat16", "block_size": 32, "num_gpu_blocks_override": 360}


@pytest.mark.parametrize(
    ("shape", "given"),
    [
        ({}, {"kv_cache_dtype": "fp8_e4m3"}),
        ({"heads": 6, "kv_heads": 3}, {"kv_cache_dtype": "fp8_e5m2", **SHORT_BLOCKS}),
    ],
    ids=["e4m3", "e5m2, short blocks, three KV heads"],
)
def test_eight_bit_kv(
    start: Callable[..., Engine],
    setup: dict[str, Any],
    model_folder: Callable[..., Path],
    shape: dict[str, Any],
    given: dict[str, Any],
) -> None:
    prompts = [prompt_of(tokens, 70 + at) for at, tokens in enumerate(MIXED)]
    setup = {**setup, "model": str(model_folder("qwen3", **shape)), **given}
    dense, whole = start(**setup), start(**setup, env=retrieval(1.0))
    before = activity(whole)
    got = whole.generate(prompts=prompts, max_tokens=60)
    assert tokens_of(got) == tokens_of(dense.generate(prompts=prompts, max_tokens=60))
    assert spent(whole, before)["blocks_selected"] > 0


@pytest.mark.parametrize("what", ["heads", "types"])
def test_layers_whose_keys_differ(
    start: Callable[..., Engine], setup: dict[str, Any], tmp_path: Path, what: str
) -> None:
    """vLLM attends to layers of each kind in a group of their own, in the same blocks. With every
    block chosen, dense attention's tokens, also off the device and from the pool; with few, the
    same ones again from the pool, by the digests that it kept."""
    given: dict[str, Any] = {"trust_remote_code": True}
    if what == "heads":
        given["model"] = str(write_nemotron(tmp_path / "model", (4, 2, 1, 2)))
    else:
        given = {"kv_cache_dtype": "fp8_e4m3", "kv_cache_dtype_skip_layers": ["1", "3"]}
    prompts = [prompt_of(tokens, 75 + at) for at, tokens in enumerate((*MIXED, 2900))]
    ask, setup = {"prompts": prompts, "max_tokens": 60}, {**setup, **given}
    pool = {"host_size": "96MiB", "load_or_compute": "load"}
    dense, whole = start(**setup), start(**setup, pool=pool, env=retrieval(1.0))
    want, before = tokens_of(dense.generate(**ask)), activity(whole)
    assert tokens_of(whole.generate(**ask)) == want
    assert whole.forget_device()
    assert tokens_of(whole.generate(**ask)) == want
    did = spent(whole, before)
    assert did["blocks_in_place"] > 0
    assert did["blocks_left"] > 0

    few = start(**setup, pool=pool, env=retrieval(0.3))
    prompts = [prompt_of(tokens, tokens) for tokens in (1500, 2320, 2900)]  # answers fill no block
    first, hits, again = [], [], []
    for replies in (first, hits, again):
        if replies is again:
            assert few.forget_device()
        before = activity(few)
        replies += [few.ask(prompt, max_tokens=24) for prompt in prompts]
    assert [one["tokens"] for one in again] == [one["tokens"] for one in first]
    assert [one["logprobs"] for one in again] == [one["logprobs"] for one in hits]
    did = spent(few, before)
    assert did["blocks_digested"] == 0, "they came from the pool"
    assert did["digests_mended"] == 0
    assert 0 < did["blocks_selected"] < did["blocks_considered"]


def test_latent_attention(start: Callable[..., Engine], model_folder: Callable[..., Path]) -> None:
    """In a backend that a processor with AMX must be asked to use. With every block chosen, dense
    attention's tokens; with few, others."""
    setup = {
        "model": str(model_folder("deepseek_v3", heads=5)),
        "dtype": "float32",
        "block_size": 16,
        "max_num_batched_tokens": 4096,
        "attention_backend": "CPU_MLA",
        "worker_extension_cls": EXTENSION,
        "num_gpu_blocks_override": 700,
    }
    prompts = [prompt_of(tokens, 80 + at) for at, tokens in enumerate(MIXED)]
    ask = {"prompts": prompts, "max_tokens": 50}
    dense, whole = start(**setup), start(**setup, env=retrieval(1.0))
    want = tokens_of(dense.generate(**ask))
    before = activity(whole)
    assert tokens_of(whole.generate(**ask)) == want
    assert spent(whole, before)["layers_sparse"] > 3 * 3 * 40
    few = start(**setup, env=retrieval(0.05))
    got = tokens_of(few.generate(**ask))
    assert got[0] == want[0], "a short prompt is dense"
    assert got[1:] != want[1:]
    did = activity(few)
    assert 0 < did["blocks_selected"] < did["blocks_considered"] / 10


POOL = {"host_size": "64MiB"}
MLA = {"block_size": 16, "attention_backend": "CPU_MLA", "max_num_batched_tokens": 4096}
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "windows in every layer": ("mistral", {}, "sliding windows in every layer; serve a model with"),
    "local chunks": ("llama4_text", {}, "layers of kind chunked_attention; serve a model with"),
    "recurrent state": ("qwen3_next", {}, "hybrid models; serve a decoder with full attention"),
    "other quantised KV": (
        "qwen3",
        {"kv_cache_dtype": "int8_per_token_head"},
        "kv_cache_dtype=int8_per_token_head; leave kv_cache_dtype at auto",
    ),
    "speculation of latent attention": (
        "deepseek_v3",
        {**MLA, "speculative_config": NGRAM},
        "speculative decoding of latent attention .MLA.; disable speculation",
    ),
    "hits inside blocks": (
        "qwen3",
        {"pool": {**POOL, "match_unit": 32}},
        "match_unit is 32, and retrieval attention is on",
    ),
}


@pytest.mark.parametrize(("model", "given", "said"), REFUSED.values(), ids=list(REFUSED))
def test_an_engine_refuses_at_start(
    start: Callable[..., Engine],
    setup: dict[str, Any],
    model_folder: Callable[..., Path],
    model: str,
    given: dict[str, Any],
    said: str,
) -> None:
    """In a line that names the thing and the cure."""
    setup = {**setup, "model": str(model_folder(model)), **given}
    with pytest.raises(EngineFailed, match=said):
        start(**setup, env=retrieval(0.3))
