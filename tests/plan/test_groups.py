"""KV groups of published models by their config.json, and the same made by vLLM itself."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support import configs
from support.commands import ran
from typer.testing import CliRunner

from kvrecall.errors import ConfigError
from kvrecall.modelconfig import CacheKind
from kvrecall.plan.cli import app
from kvrecall.plan.model import Group, ModelShape, hit_unit, read_shape
from kvrecall.plan.sizing import hit_bytes
from kvrecall.simulate.cli import app as simulate
from kvrecall.simulate.replay import parse_groups
from plan import vllm_groups

CONFIGS = {name: value for name, value in vars(configs).items() if name.isupper()}
GIB = 1 << 30


def shape_of(folder: Path, config: dict[str, Any], kv_dtype: str = "auto") -> ModelShape:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return read_shape(folder, kv_dtype)


def rows(groups: tuple[Group, ...]) -> Counter[tuple[str, int, int, int, int]]:
    """Kind, reach, layers, tokens of a block and bytes of its record, with how many there are."""
    return Counter(
        (g.kind.value, g.reach, g.layers, g.block_tokens, g.record_bytes) for g in groups
    )


KIB, MIB = 1 << 10, 1 << 20
CONV, STATE = 8192 * 3 * 2, 32 * 128 * 128 * 2  # Qwen3-Next: inputs of the convolution; memory
GROUPS: dict[str, dict[tuple[str, int, int, int, int], int]] = {
    "GEMMA_3_4B": {
        ("window", 1024, 5, 128, 5 * 4 * KIB * 128): 5,
        ("window", 1024, 4, 128, 4 * 4 * KIB * 128): 1,
        ("full", 0, 5, 128, 5 * 4 * KIB * 128): 1,
    },
    "GPT_OSS_20B": {
        ("window", 128, 12, 128, 12 * 2 * KIB * 128): 1,
        ("full", 0, 12, 128, 12 * 2 * KIB * 128): 1,
    },
    "LLAMA_4_SCOUT": {
        ("chunk", 8192, 12, 128, 12 * 4 * KIB * 128): 3,
        ("full", 0, 12, 128, 12 * 4 * KIB * 128): 1,
    },
    "MISTRAL_7B": {("window", 4096, 32, 128, 32 * 4 * KIB * 128): 1},
    "QWEN3_8B": {("full", 0, 36, 128, 36 * 4 * KIB * 128): 1},
    # A page of 128 tokens and 2 KiB each does not hold 1,072 KiB: five times as many do.
    "QWEN3_NEXT_80B": {
        ("state", 0, 12, 640, 12 * (CONV + STATE)): 3,
        ("full", 0, 12, 640, 12 * 2 * KIB * 640): 1,
    },
    "JAMBA": {
        ("state", 0, 4, 128, 4 * (8192 * 3 * 2 + 8192 * 16 * 2)): 7,
        ("full", 0, 4, 128, 4 * 4 * KIB * 128): 1,
    },
    "NEMOTRON_H_8B": {  # memory in float32
        ("state", 0, 4, 1152, 4 * ((8192 + 2048) * 3 * 2 + 8192 * 128 * 4)): 6,
        ("full", 0, 4, 1152, 4 * 4 * KIB * 1152): 1,
    },
    "DEEPSEEK_V3": {("full", 0, 61, 128, 61 * 576 * 2 * 128): 1},
    "DEEPSEEK_V32": {("full", 0, 122, 128, 61 * (576 * 2 + 132) * 128): 1},
}


@pytest.mark.parametrize("name", GROUPS)
def test_groups(name: str, tmp_path: Path) -> None:
    assert rows(shape_of(tmp_path, CONFIGS[name]).groups(128)) == GROUPS[name]


@pytest.mark.parametrize(
    ("name", "params", "active"),
    [
        ("GEMMA_3_4B", 3.88, None),
        ("GPT_OSS_20B", 20.9, 3.6),
        ("LLAMA_4_SCOUT", 109, 17),
        ("QWEN3_NEXT_80B", 80, None),
        ("JAMBA", 52, 12),
        ("BAMBA_9B", 9.78, None),
        ("GRANITE_4_SMALL", 32, 9),
        ("NEMOTRON_H_8B", 8.1, None),
        ("KIMI_LINEAR_48B", 49, 3),
        ("MISTRAL_7B", 7.24, None),
    ],
)
def test_parameters_are_about_those_published(
    name: str, params: float, active: float | None, tmp_path: Path
) -> None:
    shape = shape_of(tmp_path, CONFIGS[name])
    assert shape.params / 1e9 == pytest.approx(params, rel=0.02)
    if active is not None:
        assert shape.active_params / 1e9 == pytest.approx(active, rel=0.06)


def test_the_tokens_of_a_block_are_those_that_vllm_reports_for_qwen3_next(tmp_path: Path) -> None:
    """ "Setting attention block size to 544 tokens", with its default block of 16."""
    assert {g.block_tokens for g in shape_of(tmp_path, configs.QWEN3_NEXT_80B).groups(16)} == {544}


def test_a_hit_loads_what_its_last_tokens_need(tmp_path: Path) -> None:
    gemma = shape_of(tmp_path, configs.GEMMA_3_4B).groups(128)
    token = 4 * KIB
    assert hit_unit(gemma) == 128
    # 1,023 tokens behind the end lie in the last eight blocks
    assert hit_bytes(gemma, 32768) == 5 * token * 32768 + 29 * token * 8 * 128
    assert hit_bytes(gemma, 512) == 34 * token * 512, "all layers, within the window"
    llama = shape_of(tmp_path, configs.LLAMA_4_SCOUT).groups(128)
    assert hit_bytes(llama, 16384) == 12 * token * 16384, "a chunk ends with the hit"
    assert hit_bytes(llama, 16384 + 256) == 12 * token * 16640 + 36 * token * 256
    qwen = shape_of(tmp_path, configs.QWEN3_NEXT_80B).groups(128)
    assert hit_bytes(qwen, 6400) == 12 * 2 * KIB * 6400 + 36 * (CONV + STATE), "one state a layer"


def test_a_window_takes_little_of_the_device_and_of_the_pool(tmp_path: Path) -> None:
    shape = shape_of(tmp_path, configs.GEMMA_3_4B)
    window, full = shape.groups(128)[0], shape.groups(128)[-1]
    assert (window.kind, full.kind) == (CacheKind.WINDOW, CacheKind.FULL)
    assert (window.device_blocks(32768), full.device_blocks(32768)) == (9, 256)
    assert (window.device_blocks(300), full.device_blocks(300)) == (3, 3)
    assert (window.pool_blocks(32768), full.pool_blocks(32768)) == (2 * 8, 256)
    assert (window.pool_blocks(300), full.pool_blocks(300)) == (3, 3)


def test_a_state_is_kept_where_the_prompt_ends(tmp_path: Path) -> None:
    state = shape_of(tmp_path, configs.QWEN3_NEXT_80B).groups(128)[0]
    assert state.kind is CacheKind.STATE
    assert state.device_blocks(32768) == 2
    assert (state.pool_blocks(32768), state.pool_blocks(0)) == (1, 0)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 16])
def test_ranks_hold_shards_of_states_and_heads(tmp_path: Path, ranks: int) -> None:
    shape = shape_of(tmp_path, configs.QWEN3_NEXT_80B)
    states = [g for g in shape.groups(128, ranks) if g.kind is CacheKind.STATE]
    assert {g.record_bytes for g in states} == {12 * (CONV + STATE)}, "each shard once"
    full = shape.groups(128, ranks)[-1]
    assert full.record_bytes == 12 * 2 * KIB * full.block_tokens
    heads = max(1, 2 // ranks)
    assert full.device_bytes == 12 * heads * KIB * full.block_tokens


def test_mamba2_repeats_a_group_on_ranks_that_share_it(tmp_path: Path) -> None:
    one, four = (
        next(g for g in shape_of(tmp_path, configs.GRANITE_4_SMALL).groups(128, ranks))
        for ranks in (1, 4)
    )
    assert four.record_bytes - one.record_bytes == 4 * 3 * (2 * 128) * 3 * 2, "three groups more"


@pytest.mark.parametrize(
    ("kv_dtype", "head_bytes"),
    [("fp8", 2 * 128), ("int8_per_token_head", 2 * (128 + 4)), ("fp8_per_token_head", 264)],
)
def test_quantised_kv(tmp_path: Path, kv_dtype: str, head_bytes: int) -> None:
    """Scales of a token and head are part of its record."""
    shape = shape_of(tmp_path, configs.QWEN3_8B, kv_dtype)
    assert shape.kv_bytes_per_token == 36 * 8 * head_bytes


def test_fp8_of_sparse_mla_is_packed(tmp_path: Path) -> None:
    assert shape_of(tmp_path, configs.DEEPSEEK_V32, "fp8").kv_bytes_per_token == 61 * (656 + 132)


def test_layers_that_share_another_ones_kv_own_none(tmp_path: Path) -> None:
    shared = {**configs.QWEN3_8B, "num_kv_shared_layers": 16}
    assert shape_of(tmp_path, shared).kv_bytes_per_token == 20 * 4 * KIB


def test_pages_are_made_equal_by_more_tokens_or_by_padding(tmp_path: Path) -> None:
    """Full layers of other heads: twice a window layer's page, or no multiple of it."""
    mixed = {
        **configs.QWEN3_8B, "num_hidden_layers": 4, "sliding_window": 512,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    }  # fmt: skip
    window, full = shape_of(tmp_path, {**mixed, "global_head_dim": 256}).groups(128)
    assert (window.block_tokens, full.block_tokens) == (256, 128)
    assert window.record_bytes == full.record_bytes == window.device_bytes
    window, full = shape_of(tmp_path, {**mixed, "global_head_dim": 192}).groups(128)
    assert (window.block_tokens, full.block_tokens) == (128, 128)
    assert window.device_bytes == full.device_bytes == full.record_bytes
    assert window.record_bytes == 2 * 4 * KIB * 128, "a record has no padding"


@pytest.mark.parametrize(
    ("extra", "windows"),
    [
        ({}, 36),
        ({"layer_types": ["full_attention"] * 36}, 0),
        ({"layer_types": ["sliding_attention"] * 18 + ["full_attention"] * 18}, 18),
        ({"use_sliding_window": False}, 0),
        ({"use_sliding_window": True, "max_window_layers": 28}, 8),
        ({"sliding_window_pattern": 6}, 30),
    ],
)
def test_which_layers_have_a_window(tmp_path: Path, extra: dict[str, Any], windows: int) -> None:
    plain = {k: v for k, v in configs.QWEN3_8B.items() if "window" not in k}
    shape = shape_of(tmp_path, {**plain, "sliding_window": 4096, **extra})
    assert sum(cache.kind is CacheKind.WINDOW for cache in shape.caches) == windows


@pytest.mark.parametrize(
    "config",
    [
        {**configs.QWEN3_8B, "layer_types": ["full_attention", "wavelet"] * 18},
        {**configs.QWEN3_8B, "attn_type_list": [0, 1] * 18},
        {"model_type": "mamba", "hidden_size": 768, "num_hidden_layers": 24, "state_size": 16},
        {**configs.DEEPSEEK_V3, "model_type": "deepseek_v4", "compress_ratios": [4, 128]},
    ],
)
def test_layers_that_are_not_known_are_named_and_not_guessed(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match=r"not known here; start .* `kvrecall pool ls`"):
        shape_of(tmp_path, config)


@pytest.mark.parametrize("config", [configs.WHISPER, configs.MLLAMA_11B])
def test_cross_attention_has_no_pool(tmp_path: Path, config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"attend to an encoder's output; vLLM serves no such"):
        shape_of(tmp_path, config)


# -- the command --------------------------------------------------------------------------------


def planned(folder: Path, config: dict[str, Any], *options: str) -> tuple[dict[str, Any], str]:
    shape_of(folder, config)
    done = CliRunner().invoke(app, [str(folder), *options])
    assert done.exit_code == 0, done.output
    line = CliRunner().invoke(app, [str(folder), *options, "--json"]).stdout
    return json.loads(line), done.stdout


def test_a_hybrid_model_is_sized_by_its_groups(tmp_path: Path) -> None:
    sizes = ("--host-size", "64GiB", "--disk-size", "1TiB", "--context", "32k")
    plan, text = planned(tmp_path, configs.QWEN3_NEXT_80B, *sizes)
    full, state = 12 * 2 * KIB * 640, 12 * (CONV + STATE)
    one = 52 * full + 3 * state
    assert plan["session_bytes"] == one
    assert plan["device_session_bytes"] == (52 + 3 * 2) * full
    assert plan["hit_unit"] == 640
    assert plan["hit_bytes"] == 51 * full + 3 * state
    assert plan["bytes_per_token"] == 24 * KIB
    host = plan["tiers"][0]
    assert host["sessions"] == 64 * GIB // one
    assert host["tokens"] == pytest.approx(64 * GIB / one * 32768, rel=1e-3)
    assert plan["trace_block_bytes"] == 512 * 24 * KIB + round(3 * state * 512 / 32768)
    assert [g["kind"] for g in plan["groups"]] == ["state"] * 3 + ["full"]
    row = next(line for line in text.splitlines() if " state " in line)
    cells = [cell.strip() for cell in row.split("│")[1:-1]]
    assert cells == ["3", "state", "12", "640", "12.6 MiB", "2", "1", "1"]


@pytest.mark.parametrize(
    ("name", "groups"),
    [
        ("GEMMA_3_4B", "full:10MiB,window:1024:58MiB"),
        ("GPT_OSS_20B", "full:12MiB,window:128:12MiB"),
        ("LLAMA_4_SCOUT", "full:24MiB,chunk:8192:72MiB"),
        ("MISTRAL_7B", "window:4096:64MiB"),
        ("QWEN3_NEXT_80B", "full:12MiB,state:7680:38592KiB"),
        ("DEEPSEEK_V32", "full:39162KiB"),
    ],
)
def test_the_groups_for_a_simulation(name: str, groups: str, tmp_path: Path) -> None:
    """Their sizes are those of the records: 512 tokens of the attention layers, or one state."""
    plan, text = planned(tmp_path, CONFIGS[name])
    assert plan["simulate_groups"] == groups
    parsed = parse_groups(groups)
    assert {str(group.kind) for group in parsed} == {group["kind"] for group in plan["groups"]}
    for kind in {group.kind for group in parsed}:
        sizes = [
            group["record_bytes"] * (1 if kind == "state" else 512 / group["block_tokens"])
            for group in plan["groups"]
            if group["kind"] == kind
        ]
        assert sum(sizes) == sum(group.nbytes for group in parsed if group.kind == kind)
    command = f"kvrecall simulate TRACE --groups {groups} --capacity SIZE"
    assert (command in text.splitlines()) == (name != "DEEPSEEK_V32")


def test_hit_rates_of_a_hybrid_model_are_those_of_the_simulation(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [[n % 6 * 10 + block for block in range(n % 5 + 1)] for n in range(60)]
    lines = [{"timestamp": n, "input_length": 512 * len(r), "output_length": 1, "hash_ids": r}
             for n, r in enumerate(rows)]  # fmt: skip
    trace.write_text("\n".join(map(json.dumps, lines)))
    sizes = ("--host-size", "1536MiB", "--disk-size", "2GiB", "--context", "2k")
    plan, _ = planned(tmp_path / "model", configs.GEMMA_3_4B, *sizes, "--trace", str(trace))
    rates = [tier["hit_rate_up_to_here"] for tier in plan["tiers"]]
    expected = []
    for tiers in ("host:1536MiB", "host:1536MiB,disk:2GiB"):
        words = [str(trace), "--groups", plan["simulate_groups"], "--tiers", tiers, "--json"]
        expected.append(json.loads(CliRunner().invoke(simulate, words).output)["hit_rate"])
    assert rates == expected
    assert 0 < rates[0] < rates[1]


def test_a_longer_step_simulates_fewer_states(tmp_path: Path) -> None:
    few, _ = planned(tmp_path, configs.QWEN3_NEXT_80B, "--context", "32k", "--step-tokens", "32768")
    many, _ = planned(tmp_path, configs.QWEN3_NEXT_80B, "--context", "32k", "--step-tokens", "2048")
    assert few["simulate_groups"] == "full:12MiB,state:32640:38592KiB"
    assert many["simulate_groups"] == "full:12MiB,state:1920:38592KiB"


def test_break_even_of_a_hybrid_model(tmp_path: Path) -> None:
    """The shortest hit loads a state for the tokens of one block; a further token its keys."""
    plan, _ = planned(tmp_path, configs.QWEN3_NEXT_80B, "--prefill-rate", "10000")
    even = plan["break_even"]
    first = (12 * 2 * KIB * 640 + 36 * (CONV + STATE)) / 640 * 10_000
    assert even["bytes_per_s_at_start"] == round(first)
    assert even["bytes_per_s_at_end"] < 24 * KIB * 10_000


def test_sessions_on_the_devices(tmp_path: Path) -> None:
    """Blocks of all groups come from the same memory."""
    plan, _ = planned(
        tmp_path, configs.GPT_OSS_20B, "--device-memory", "80GB", "--context", "32k",
    )  # fmt: skip
    (device,) = plan["tiers"]
    each = (256 + 2) * 12 * 2 * KIB * 128
    assert device["sessions"] == device["bytes"] // each
    assert plan["device_session_bytes"] == each


# -- vLLM's own ---------------------------------------------------------------------------------

_SPECS = {
    "FullAttentionSpec": CacheKind.FULL,
    "MLAAttentionSpec": CacheKind.FULL,
    "SlidingWindowSpec": CacheKind.WINDOW,
    "ChunkedLocalAttentionSpec": CacheKind.CHUNK,
    "MambaSpec": CacheKind.STATE,
}
_SMALL = {
    "vocab_size": 512, "intermediate_size": 64, "intermediate_size_mlp": 64,
    "moe_intermediate_size": 64, "shared_intermediate_size": 64, "num_local_experts": 4,
    "shared_expert_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip
"""Of no effect on what is cached."""
COMPARED = (
    "GEMMA_3_4B", "GPT_OSS_20B", "LLAMA_4_SCOUT", "MISTRAL_7B", "QWEN3_8B", "QWEN3_NEXT_80B",
    "JAMBA", "GRANITE_4_SMALL", "NEMOTRON_H_8B",
)  # fmt: skip


def text_model(name: str) -> dict[str, Any]:
    """Its language model alone, which needs no library for images."""
    config = dict(CONFIGS[name])
    if text := config.get("text_config"):
        (architecture,) = config["architectures"]
        causal = architecture.replace("ConditionalGeneration", "CausalLM")
        config = {"torch_dtype": "bfloat16", **text, "architectures": [causal]}
    return config | {key: value for key, value in _SMALL.items() if key in config}


@pytest.mark.engine
@pytest.mark.long
def test_vllm_makes_the_same_groups(tmp_path: Path) -> None:
    """Of each model as published (its layers on torch's meta device), at ``--block-size`` 64."""
    shapes = {name: shape_of(tmp_path / name, text_model(name)) for name in COMPARED}
    root = Path(__file__).parents[1]
    command = (sys.executable, "-m", "plan.vllm_groups", *(tmp_path / name for name in COMPARED))
    done = ran(*command, cwd=root, env={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"})
    mark = vllm_groups.MARK
    lines = [line for line in done.stdout.splitlines() if line.startswith(mark)]
    assert len(lines) == len(COMPARED), done.stderr[-3000:]
    for (name, shape), line in zip(shapes.items(), lines, strict=True):
        theirs = json.loads(line.removeprefix(mark))
        ours = shape.groups(vllm_groups.BLOCK)
        assert [
            (g.kind, g.layers, g.block_tokens, g.record_bytes, g.device_bytes) for g in ours
        ] == [
            (
                _SPECS[g["spec"]], g["layers"], g["block_tokens"], g["real"] * g["layers"],
                g["page"] * max(each["layers"] for each in theirs),
            )
            for g in theirs
        ], name  # fmt: skip
