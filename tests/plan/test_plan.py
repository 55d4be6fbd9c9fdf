"""Sizing: the worked examples of Ascend's document, models of known size, and the command."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from support import configs
from typer.testing import CliRunner

from kvrecall.attention.digest import coded_width
from kvrecall.attention.settings import RetrievalSettings
from kvrecall.errors import ConfigError
from kvrecall.plan.cli import app
from kvrecall.plan.model import ModelShape, read_shape
from kvrecall.plan.sizing import links_of
from kvrecall.simulate.cli import app as simulate

ROOT = Path(__file__).parents[2]
LLAMA_8B = {
    "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256,
    "torch_dtype": "bfloat16", "max_position_embeddings": 131072,
}  # fmt: skip


def model(folder: Path, config: dict[str, Any]) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return path


def on_devices(shape: ModelShape, ranks: int) -> int:
    """Bytes of a token on all ranks together, of a model with one KV group."""
    (group,) = shape.groups(128, ranks)
    return ranks * group.device_bytes // 128


def planned(*arguments: str | Path) -> dict[str, Any]:
    done = CliRunner().invoke(app, [*map(str, arguments), "--json"])
    assert done.exit_code == 0, done.output
    result: dict[str, Any] = json.loads(done.output)
    return result


# -- links: the document's own numbers ----------------------------------------------------------


@pytest.mark.parametrize(
    ("cards", "will_grow", "links", "nbytes", "lower_by", "too_many"),
    [
        (0, False, 0, 0, 0, False),
        (1, False, 0, 0, 0, False),
        (2, False, 1, 4 * 10**6, 0.01, False),
        (8 * 16, False, 127, 508 * 10**6, 0.01, False),  # (8*16-1)*4MB = 508MB; 600MB is enough
        (8 * 16, True, 127, 508 * 10**6, 0.04, False),
        (151, False, 150, 600 * 10**6, 0.01, False),
        (152, False, 151, 604 * 10**6, 0.02, False),
        (512, False, 511, 2044 * 10**6, 0.04, False),
        (2000, False, 512, 2048 * 10**6, 0.04, True),
    ],
)
def test_links_of_cards(
    cards: int, will_grow: bool, links: int, nbytes: int, lower_by: float, too_many: bool
) -> None:
    """The factor goes down in steps of 600 MB; more than 512 links cannot stay."""
    found = links_of(cards, will_grow)
    assert (found.links, found.bytes, found.too_many) == (links, nbytes, too_many)
    assert found.lower_memory_factor_by == lower_by


# -- models -------------------------------------------------------------------------------------


def test_grouped_heads(tmp_path: Path) -> None:
    shape = read_shape(model(tmp_path, LLAMA_8B))
    assert shape.kv_bytes_per_token == 128 << 10
    assert shape.params == pytest.approx(8.03e9, rel=0.005)
    assert on_devices(shape, 8) == 128 << 10
    assert on_devices(shape, 16) == 256 << 10, "eight heads on sixteen ranks"
    assert read_shape(tmp_path, "fp8").kv_bytes_per_token == 64 << 10


def test_latent_attention_and_experts(tmp_path: Path) -> None:
    shape = read_shape(model(tmp_path, configs.DEEPSEEK_V3))
    assert shape.kv_bytes_per_token == 61 * 576 * 2
    assert shape.params == pytest.approx(671e9, rel=0.01)
    assert shape.active_params == pytest.approx(37e9, rel=0.03)
    assert on_devices(shape, 8) == 8 * 61 * 576 * 2, "every rank holds all of it"


def test_a_model_of_several_kinds_of_input(tmp_path: Path) -> None:
    shape = read_shape(model(tmp_path, {"text_config": LLAMA_8B, "vision_config": {}}))
    assert shape.kv_bytes_per_token == 128 << 10


def test_our_own_small_model_weighs_what_its_file_does() -> None:
    folder = ROOT / "models" / "recall-tiny"
    assert read_shape(folder).weight_bytes == (folder / "model.safetensors").stat().st_size


@pytest.mark.parametrize(
    ("config", "words"),
    [({}, "hidden_size is missing"), ({**LLAMA_8B, "num_hidden_layers": 0}, "more than 0")],
)
def test_what_is_no_model(tmp_path: Path, config: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_shape(model(tmp_path, config))


# -- the command --------------------------------------------------------------------------------


def test_tiers(tmp_path: Path) -> None:
    plan = planned(
        model(tmp_path, LLAMA_8B), "--hosts", 2, "--devices", 8, "--tensor-parallel", 4,
        "--device-memory", "64GB", "--host-size", "256GiB", "--disk-size", "2TB",
        "--context", "32k", "--sessions", 100, "--block-size", 128,
    )  # fmt: skip
    assert plan["bytes_per_token"] == 131072
    assert plan["block_bytes"] == 16 << 20
    assert plan["needed_bytes"] == 100 * 32768 * 131072
    device, host, disk = plan["tiers"]
    left = 16 * 64e9 * 0.92 - 4 * read_shape(tmp_path).weight_bytes
    assert device["bytes"] == pytest.approx(left, rel=1e-9)
    assert host["blocks"] == 2 * 256 * 64
    assert host["sessions"] == 2 * 256 * 64 // 256
    assert 0.94 * 4e12 < disk["blocks"] * (16 << 20) < 0.95 * 4e12
    assert plan["sessions_fit"]
    assert plan["settings"]["host_size"] == "256GiB"
    assert plan["settings"]["disk_size"] == "2TB"
    assert plan["warnings"] == []


def test_compressed_blocks_take_less_of_disk_and_store(tmp_path: Path) -> None:
    words = [
        model(tmp_path, LLAMA_8B), "--host-size", "256GiB", "--disk-size", "2TB",
        "--remote-size", "8TB",
    ]  # fmt: skip
    plain, packed = planned(*words), planned(*words, "--compressed-to", "0.5")
    before, after = ({one["tier"]: one for one in plan["tiers"]} for plan in (plain, packed))
    assert after["host"] == before["host"]
    assert after["remote"]["blocks"] == 2 * before["remote"]["blocks"]
    assert 1.9 < after["disk"]["blocks"] / before["disk"]["blocks"] < 2
    assert packed["settings"]["disk_compression"] == "zstd"
    assert "disk_compression" not in plain["settings"]


def test_links_take_room_from_the_devices(tmp_path: Path) -> None:
    arguments = [model(tmp_path, LLAMA_8B), "--device-memory", "64GB", "--hosts", 8,
                 "--devices", 16]  # fmt: skip
    alone = planned(*arguments)
    linked = planned(*arguments, "--linked-cards", 128)
    assert linked["links"]["memory_factor"] == 0.91
    lost = alone["tiers"][0]["bytes"] - linked["tiers"][0]["bytes"]
    assert lost == pytest.approx(128 * 64e9 * 0.01, rel=1e-6)


def test_the_memory_factor_names_the_option_that_applies_it(tmp_path: Path) -> None:
    words = [model(tmp_path, LLAMA_8B), "--device-memory", "64GB", "--linked-cards", "128"]
    shown = CliRunner().invoke(app, list(map(str, words)), env={"COLUMNS": "120"}).stdout
    assert "0.91: kvrecall serve ... -- --gpu-memory-utilization 0.91" in shown
    assert "VLLM_CPU_KVCACHE_SPACE=GIB" in shown


def test_break_even(tmp_path: Path) -> None:
    plan = planned(model(tmp_path, LLAMA_8B), "--prefill-rate", 10_000, "--context", "128k")
    even = plan["break_even"]
    assert even["bytes_per_s_at_start"] == 131072 * 10_000
    assert even["bytes_per_s_at_end"] < even["bytes_per_s_at_start"] / 2, "deep tokens cost more"


def test_no_rate_of_prefill_is_assumed(tmp_path: Path) -> None:
    assert planned(model(tmp_path, LLAMA_8B))["break_even"] is None


@pytest.mark.parametrize(("hosts", "gib"), [(1, 35), (3, 12)])
def test_the_host_tier_that_holds_all_sessions_is_the_settings(
    tmp_path: Path, hosts: int, gib: int
) -> None:
    """Four sessions of 64k tokens, 8 GiB each, and room for digests of retrieval attention."""
    digests = RetrievalSettings().layout(128).rows * coded_width(2 * 128) / (128 * 128 * 4)
    assert hosts * gib >= 32 * (1 + digests)
    words = ("--context", "64k", "--sessions", "4", "--hosts", hosts)
    plan = planned(model(tmp_path, LLAMA_8B), *words)
    assert plan["needed_bytes"] == 32 << 30
    assert plan["host_bytes_for_all"] == gib << 30
    assert plan["settings"] == {"host_size": f"{gib}GiB"}
    sized = planned(model(tmp_path, LLAMA_8B), *words, "--host-size", f"{gib}GiB")
    assert sized["sessions_fit"]


def test_hit_rates_are_those_of_the_simulation(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [[n % 4 * 10 + block for block in range(n % 5 + 1)] for n in range(60)]
    trace.write_text(
        "".join(
            json.dumps({"timestamp": n * 1000, "input_length": 512, "output_length": 1,
                        "hash_ids": ids}) + "\n"
            for n, ids in enumerate(rows)
        )
    )  # fmt: skip
    # 64 MiB of KV in a block of the trace: room for 16 of them in the host, 28 on disk
    plan = planned(
        model(tmp_path, LLAMA_8B), "--host-size", "1GiB", "--disk-size", "2GB", "--trace", trace
    )
    rooms = [tier["tokens"] // 512 for tier in plan["tiers"]]
    spec = f"host:{rooms[0]},disk:{rooms[1]}"
    done = CliRunner().invoke(simulate, [str(trace), "--tiers", spec, "--json"])
    expected = [tier["hit_rate_up_to_here"] for tier in json.loads(done.output)["tiers"]]
    assert [tier["hit_rate_up_to_here"] for tier in plan["tiers"]] == expected
    assert expected[1] >= expected[0] > 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--context", "many"], "--context: 'many' is not a number of tokens"),
        (["--host-size", "4 apples"], "--host-size"),
        (["--kv-dtype", "int3"], "known: auto"),
        (["--tensor-parallel", "2"], "more than all devices"),
        (["--device-memory", "8GB"], "the weights of 15 GiB do not fit 1 devices of 7.45 GiB"),
        (["--policy", "magic"], "magic"),
        (["--host-size", "1MiB", "--trace", "/x"], "/x: cannot be read: No such file"),
    ],
)
def test_wrong_arguments_are_named(tmp_path: Path, arguments: list[str], words: str) -> None:
    done = CliRunner().invoke(app, [str(model(tmp_path, LLAMA_8B)), *arguments])
    assert done.exit_code == 2
    assert re.search(words, done.output), done.output


def test_sizes_are_printed_in_binary_units_as_they_were_given(tmp_path: Path) -> None:
    arguments = [model(tmp_path, LLAMA_8B), "--host-size", "256GiB", "--disk-size", "4TB"]
    done = CliRunner().invoke(app, [str(each) for each in arguments])
    shown = done.stdout.splitlines()
    assert [line for line in shown if "host" in line and " 256 GiB " in line]
    assert [line for line in shown if "disk" in line and " 3.64 TiB " in line]
    assert '{"host_size": "256GiB", "disk_path": "/var/lib/kvrecall", "disk_size": "4TB"}' in (
        done.stdout
    )
    assert not [line for line in shown if re.search(r"\d [KMGT]B", line)][:-1], (
        "decimal units but for what one of ours is"
    )


def hub_copy(cache: Path, revision: str) -> None:
    """A model's config.json as Hugging Face's libraries keep it."""
    folder = cache / "models--Qwen--Qwen3-8B" / "snapshots" / revision
    folder.mkdir(parents=True)
    model(folder, LLAMA_8B)


def test_a_model_of_the_hub_is_looked_for_in_the_local_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    done = CliRunner().invoke(app, ["Qwen/Qwen3-8B"])
    assert done.exit_code == 2
    assert "hf download Qwen/Qwen3-8B config.json" in done.stderr
    assert str(tmp_path / "hub") in done.stderr
    assert done.stderr.count("\n") == 1
    hub_copy(tmp_path / "hub", "0a1b")
    assert planned("Qwen/Qwen3-8B")["plan"] == "Qwen/Qwen3-8B"
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    refs = tmp_path / "hub" / "models--Qwen--Qwen3-8B" / "refs"
    refs.mkdir()
    (refs / "main").write_text("0a1b")
    assert planned("Qwen/Qwen3-8B")["bytes_per_token"] == 131072


@pytest.mark.parametrize(
    ("name", "words"),
    [("folder", "has no config.json"), ("folder/x.json", "there is no such file"), ("", "folder")],
)
def test_a_path_that_is_no_model(tmp_path: Path, name: str, words: str) -> None:
    (tmp_path / "folder").mkdir()
    done = CliRunner().invoke(app, [str(tmp_path / name)])
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1)
    assert words in done.stderr


def test_notes(tmp_path: Path) -> None:
    config = model(tmp_path, LLAMA_8B)
    assert "no size is given" in planned(config)["warnings"][0]
    small = planned(config, "--host-size", "1GiB", "--context", "256k")
    assert [w.split(" ")[0] for w in small["warnings"]] == ["the", "not"]
    assert (
        "512 links" in planned(config, "--host-size", "1TB", "--linked-cards", 600)["warnings"][-1]
    )
