"""MindIE's config.json: errors name place, field, value and cure; valid fields become vLLM's
options and the pool's settings."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvrecall.config import RecallSettings
from kvrecall.engines.base import Limits, Role
from kvrecall.errors import ConfigError
from kvrecall.jsonfile import parse_json
from kvrecall.server import servable
from kvrecall.server.checks import check_pool
from kvrecall.server.mindie.planner import NOTHING, plan_config
from kvrecall.server.mindie.reader import validate
from kvrecall.server.mindie.schema import Effect, fields_of
from kvrecall.server.plan import Plan, Plane
from server.configs import Json, backend, deploy, kv_pool, model, right, schedule, server, write

SAMPLES = Path(__file__).parent / "samples"
MODEL = "BackendConfig.ModelDeployConfig.ModelConfig[0]"
Spoil = Callable[[Json], object]


@pytest.fixture(autouse=True)
def _with_accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servable, "most_ranks", lambda: 99)


def plan_of(
    folder: Path, spoil: Spoil = lambda c: None, pool: Json | None = None, **beside: Any
) -> Plan:
    """``beside``: what the command line says."""
    config = right()
    spoil(config)
    return plan_config(write(folder, config, pool), replace(NOTHING, **beside))


def given(section: Callable[[Json], Json], **fields: object) -> Spoil:
    return lambda config: section(config).update(fields)


def error_of(folder: Path, spoil: Spoil, pool: Json | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        plan_of(folder, spoil, pool)
    message = str(caught.value)
    assert "\n" not in message
    return message


WRONG: list[tuple[Spoil, list[str]]] = [
    # Types
    (given(model, worldSize="8"), [f"{MODEL}.worldSize is '8'", "whole number"]),
    (given(model, worldSize=True), [f"{MODEL}.worldSize is True", "whole number"]),
    (given(model, worldSize=1.5), [f"{MODEL}.worldSize is 1.5", "whole number"]),
    (given(model, npuMemSize="a"), [f"{MODEL}.npuMemSize is 'a'", "number"]),
    (given(model, trustRemoteCode="false"), ["'false'", "true or false"]),
    (given(model, modelName=None), [f"{MODEL}.modelName is None", "string"]),
    (given(server, httpsEnabled=0), ["ServerConfig.httpsEnabled is 0"]),
    (given(server, tlsCaFile="ca.pem"), ["ServerConfig.tlsCaFile", "a list"]),
    (lambda c: c.update(ServerConfig=[]), ["ServerConfig is []", "object"]),
    (given(deploy, ModelConfig={}), ["ModelConfig is {}", "list"]),
    (given(kv_pool, backend=None), ["backend is None", "string"]),
    # Ranges and choices
    (given(model, worldSize=0), [f"{MODEL}.worldSize is 0", "1 to 1024"]),
    (given(server, port=80), ["ServerConfig.port is 80", "1024 to 65535"]),
    (given(server, maxLinkNum=5000), ["maxLinkNum is 5000", "1 to 4096"]),
    (given(server, tokenTimeout=0), ["tokenTimeout is 0", "1 to 3600"]),
    (given(server, maxRequestLength=101), ["is 101", "1 to 100"]),
    (given(schedule, cacheBlockSize=100), ["is 100", "multiples of 16"]),
    (given(schedule, cacheBlockSize=256), ["is 256", "1 to 128"]),
    (given(schedule, templateType="Pure"), ["Standard, Mix"]),
    (given(schedule, maxN=8193, maxBatchSize=9000), ["maxN is 8193", "1 to 8192"]),
    (given(deploy, truncation=2), ["truncation is 2", "false, true, -1, 0, 1"]),
    (given(deploy, ModelConfig=[]), ["ModelConfig is []", "not be empty"]),
    (given(model, npuMemSize=0), [f"{MODEL}.npuMemSize is 0", "-1 (automatic)"]),
    (given(kv_pool, configPath="x" * 501), ["kvPoolConfig.configPath", "at most 500"]),
    # Required fields
    (lambda c: model(c).pop("worldSize"), [f"{MODEL}.worldSize is required"]),
    (lambda c: model(c).update(worldSiz=model(c).pop("worldSize")),
     [f"{MODEL}.worldSize is required; is worldSiz (26:6) a misspelling of it?"]),
    (lambda c: c.pop("ServerConfig"), ["tlsCert is required", "set that to false"]),
    (lambda c: server(c).pop("httpsEnabled"), ["(tlsCert, tlsPk, tlsCaFile)"]),
    # plugin_params
    (given(model, plugin_params="prefix_cache"),
     ["plugin_params is JSON in a string", "prefix_cache is not"]),
    (given(model, plugin_params='["mtp"]'), ["not a JSON object"]),
    (given(model, plugin_params='{"plugin_type":"x"}'), ["'x'", "memory_decoding"]),
    (given(model, plugin_params={"plugin_type": "mtp,la"}), ["la and mtp are mutually exclusive"]),
    (given(model, plugin_params={"num_speculative_tokens": "1"}),
     ["plugin_params", "num_speculative_tokens"]),
    (given(model, plugin_params='{"plugin_type":"mtp"}'),
     [f"{MODEL}.plugin_params asks for mtp", "no prediction layers"]),
    # What this version does not have
    (given(server, layerwiseDisaggregated=True), ["is True; not available", "edge and cloud"]),
    (given(backend, modelInstanceNumber=2), ["modelInstanceNumber is 2", "kvrecall router"]),
    (given(model, models={"qwen3": {"chat_template": "none.jinja"}}),
     [f"{MODEL}.models.qwen3.chat_template is", "none.jinja", "no such file"]),
    (given(model, cp=2),
     [f"{MODEL}.cp is 2", "not available in this version, allowed: 1: with context parallel"]),
    (given(model, sp=8), [f"{MODEL}.sp is 8", "keeps only some of a block's tokens"]),
    (lambda c: deploy(c)["ModelConfig"].append(dict(model(c))), ["serves one model"]),
    # Relations
    (given(schedule, maxN=9, maxBatchSize=8), ["maxN is 9", "maxBatchSize, which is 8"]),
    (given(server, ipAddress="0.0.0.0"), ["0.0.0.0", "allowAllZeroIpListening"]),
    (given(server, ipAddress="::"), ["allowAllZeroIpListening"]),
    (given(server, ipAddress="localhost"), ["'localhost'", "IPv4 or IPv6"]),
    (given(model, worldSize=8, tp=4), ["worldSize is 8", "4 x 1 x 1 = 4"]),
    (given(model, modelWeightPath="/none"), ["'/none'", "no such folder"]),
    (given(server, httpsEnabled=True), ["tlsCert is required when httpsEnabled"]),
    (given(server, httpsEnabled=True, tlsCert="a.pem", tlsPk="b.pem", tlsCaFile=["c.pem"]),
     ["httpsEnabled is true", "there is no file", "a.pem"]),
    (given(kv_pool, backend="memcache", configPath="m.json"),
     ["kvPoolConfig.backend is 'memcache'", "'mooncake', 'objects', package.module:Factory"]),
    (given(kv_pool, backend="mooncake", configPath="m.json"),
     ["kvPoolConfig.configPath is", "m.json", "no such file"]),
    (given(kv_pool, backend="kv_pool_backend_name", configPath="p"),
     ["is 'kv_pool_backend_name'", "allowed: '' (no pool), 'embedded'"]),
    (given(kv_pool, backend="embedded", configPath="none.json"),
     ["kvPoolConfig.configPath is", "none.json", "no such file"]),
]  # fmt: skip


@pytest.mark.parametrize(("spoil", "words"), WRONG)
def test_wrong(tmp_path: Path, spoil: Spoil, words: list[str]) -> None:
    message = error_of(tmp_path, spoil)
    assert message.startswith(f"{tmp_path}/config.json:")
    for word in words:
        assert word in message
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model"]


def test_place_of_a_value(tmp_path: Path) -> None:
    config = right()
    model(config)["worldSize"] = "8"
    path = write(tmp_path, config)
    line = path.read_text().splitlines().index('     "worldSize": "8",') + 1
    with pytest.raises(ConfigError, match=rf"config\.json:{line}:6: "):
        plan_config(path)


POOL_WRONG: list[tuple[Json, Spoil, list[str]]] = [
    ({"hostsize": 1}, lambda c: None, ["pool.json:2:2", "'hostsize'", "host_size"]),
    ({"host_size": "many"}, lambda c: None, ["pool.json:2:2", "'many'", "8GiB"]),
    ({"disk_path": "/d"}, lambda c: None, ["pool.json:2:2", "disk_size is not"]),
    ({"backend": "service"}, lambda c: None, ["backend is 'embedded', but", "says 'service'"]),
    ({"async_write": True}, given(kv_pool, asyncWrite=False),
     ["asyncWrite is False", "pool.json:2:2", "True"]),
    ({"host_size": "1GiB"}, lambda c: model(c).pop("plugin_params"),
     ["prefix_cache", "on which the KV pool builds"]),
    ({"host_size": "1GiB"}, given(model, plugin_params='{"plugin_type":"splitfuse"}'),
     [f"{MODEL}.plugin_params has no prefix_cache"]),
]  # fmt: skip


@pytest.mark.parametrize(("pool", "spoil", "words"), POOL_WRONG)
def test_wrong_pool(tmp_path: Path, pool: Json, spoil: Spoil, words: list[str]) -> None:
    message = error_of(tmp_path, spoil, pool)
    for word in words:
        assert word in message


NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4,
         "prompt_lookup_min": 1}  # fmt: skip
TOOLS = {"deepseekv2": {"tool_call_options": {"tool_call_parser": "deepseek_v31"}}}
RIGHT: list[tuple[Spoil, str, object]] = [
    # What is given, an engine option, its value
    (lambda c: None, "served-model-name", "m"),
    (lambda c: None, "max-model-len", 2560),
    (lambda c: None, "block-size", 128),
    (lambda c: None, "prefix-caching-hash-algo", "sha256_cbor"),
    (lambda c: None, "enable-prefix-caching", True),
    (lambda c: None, "max-num-seqs", 200),
    (lambda c: None, "max-num-batched-tokens", 8192),
    (lambda c: None, "override-generation-config", {"max_new_tokens": 512}),
    (lambda c: None, "kv-cache-memory-bytes", None),
    (lambda c: None, "enable-chunked-prefill", None),
    (lambda c: None, "tensor-parallel-size", None),
    (lambda c: model(c).pop("plugin_params"), "enable-prefix-caching", False),
    (given(schedule, templateType="Mix"), "enable-chunked-prefill", True),
    (given(model, plugin_params={"plugin_type": "splitfuse, prefix_cache"}),
     "enable-chunked-prefill", True),
    (given(schedule, maxPrefillTokens=100), "max-num-batched-tokens", 200),
    (given(schedule, maxBatchSize=9000, maxPrefillTokens=1), "max-num-seqs", 9000),
    (given(schedule, templateType="Mix", prefillChunkSize=512, longPrefillTokenThreshold=64),
     "long-prefill-token-threshold", 512),
    (given(model, models={"qwen3": {"enable_reasoning": True}}), "reasoning-parser", "qwen3"),
    (given(model, models=TOOLS), "tool-call-parser", "deepseek_v31"),
    (given(model, models=TOOLS), "enable-auto-tool-choice", True),
    (given(schedule, cacheBlockSize=64), "block-size", 64),
    (given(model, npuMemSize=2), "kv-cache-memory-bytes", 2 << 30),
    (given(model, npuMemSize=0.5), "kv-cache-memory-bytes", 1 << 29),
    (given(model, trustRemoteCode=True), "trust-remote-code", True),
    (given(model, worldSize=4), "tensor-parallel-size", 4),
    (given(model, worldSize=4, dp=2), "data-parallel-size", 2),
    (given(model, worldSize=4, pp=2), "tensor-parallel-size", 2),
    (given(model, plugin_params='{"plugin_type":"la,prefix_cache"}'), "speculative-config", NGRAM),
]  # fmt: skip


@pytest.mark.parametrize(("given", "option", "value"), RIGHT)
def test_engine_options(tmp_path: Path, given: Spoil, option: str, value: object) -> None:
    assert plan_of(tmp_path, given).spec.options.get(option) == value


def test_mtp_on_a_model_with_prediction_layers(tmp_path: Path) -> None:
    config = right()
    asked = '{"plugin_type":"mtp,prefix_cache","num_speculative_tokens": 1}'
    model(config)["plugin_params"] = asked
    path = write(tmp_path, config)
    (tmp_path / "model" / "config.json").write_text('{"num_nextn_predict_layers": 1}')
    options = plan_config(path).spec.options
    assert options["speculative-config"] == {"method": "mtp", "num_speculative_tokens": 1}
    assert options["enable-prefix-caching"] is True


@pytest.mark.parametrize(
    ("truncation", "side"),
    [(False, "error"), (0, "error"), (True, "right"), (-1, "right"), (1, "left")],
)
def test_truncation(tmp_path: Path, truncation: object, side: str) -> None:
    limits = plan_of(tmp_path, given(deploy, truncation=truncation)).spec.limits
    assert limits.truncation == side


def test_limits(tmp_path: Path) -> None:
    def spoil(config: Json) -> None:
        server(config).update(tokenTimeout=5, e2eTimeout=50, maxRequestLength=2, maxLinkNum=7)
        deploy(config).update(maxInputTokenLen=2560)
        schedule(config).update(maxIterTimes=33)

    plan = plan_of(tmp_path, spoil)
    limits = plan.spec.limits
    assert (limits.token_timeout_s, limits.total_timeout_s) == (5, 50)
    assert (limits.max_input_tokens, limits.max_new_tokens) == (2559, 33)
    assert (plan.max_body_bytes, plan.max_links) == (2 << 20, 7)
    assert any("lowered to 2559" in note for note in plan.notes)


@pytest.mark.parametrize(
    ("given", "most"),
    [
        ({}, 128),
        ({"maxBatchSize": 50}, 50),
        ({"maxN": 200}, 200),
        ({"maxN": 3, "maxBatchSize": 50}, 3),
        ({"maxN": 5000, "maxBatchSize": 5000}, 5000),
    ],
)
def test_sequences_of_a_request(tmp_path: Path, given: Json, most: int) -> None:
    plan = plan_of(tmp_path, lambda c: schedule(c).update(given))
    assert plan.spec.limits.max_n == most
    assert f"sequences {most} a request" in plan.summary()


POOLS: list[tuple[Json, Spoil, Json]] = [
    ({}, lambda c: None, {"async_write": False}),
    ({"host_size": "1GiB"}, given(kv_pool, asyncWrite=True),
     {"host_size": "1GiB", "async_write": True}),
    ({"async_write": True}, lambda c: None, {"async_write": True}),
    ({}, given(model, cpuMemSize=5), {"async_write": False, "host_size": 5 << 30}),
    ({"host_size": "1GiB"}, given(model, cpuMemSize=5),
     {"async_write": False, "host_size": "1GiB"}),
    ({"socket": "/run/kv.sock"},
     lambda c: (kv_pool(c).update(backend="service"), model(c).update(cpuMemSize=5)),
     {"async_write": False, "backend": "service", "socket": "/run/kv.sock"}),
]  # fmt: skip


@pytest.mark.parametrize(("pool", "spoil", "recall"), POOLS)
def test_pool(tmp_path: Path, pool: Json, spoil: Spoil, recall: Json) -> None:
    assert plan_of(tmp_path, spoil, pool).spec.recall == recall


MOONCAKE = {
    "local_hostname": "localhost",
    "metadata_server": "P2PHANDSHAKE",
    "global_segment_size": 268435456,
    "protocol": "ascend",
    "device_name": "",
    "master_server_address": "127.0.0.1:50051",
    "use_ascend_direct": True,
}
"""The sample of seed 002, with the master on this host."""


def mooncake(config: Json) -> None:
    kv_pool(config).update(backend="mooncake", asyncWrite=True)
    model(config).update(cpuMemSize=5)


def test_mooncake_takes_its_own_file(tmp_path: Path) -> None:
    recall = plan_of(tmp_path, mooncake, MOONCAKE).spec.recall
    assert recall is not None
    remote = recall["remote"]
    file = str(tmp_path / "pool.json")
    assert remote == {"kind": "mooncake", "config": file, "allow_plaintext": False}
    assert (recall["async_write"], recall["host_size"]) == (True, 5 << 30)


def test_mooncake_off_this_host_needs_a_word(tmp_path: Path) -> None:
    away = {**MOONCAKE, "master_server_address": "master_server_ip:50051"}
    plain = plan_of(tmp_path, mooncake, away).spec.recall
    assert plain is not None
    words = r"kvrecall serve --allow-plaintext, or allowPlaintext true beside kvPoolConfig.backend"
    with pytest.raises(ConfigError, match=words):
        check_pool(RecallSettings.from_mapping(plain).pool, here=False)
    config = right()
    mooncake(config)
    path = write(tmp_path, config, away)
    recall = plan_config(path, plaintext=True).spec.recall
    assert recall is not None
    assert "'allow_plaintext': True" in str(recall["remote"])
    kv_pool(config)["allowPlaintext"] = True
    assert plan_config(write(tmp_path, config, away)).spec.recall == recall


@pytest.mark.parametrize(
    ("pool", "said"),
    [
        ({"backend": "", "configPath": ""}, ""),
        ({"backend": "", "configPath": "p.json"}, "backend is empty"),
        ({"backend": "mooncake", "configPath": ""}, "configPath is empty"),
    ],
)
def test_pool_off(tmp_path: Path, pool: Json, said: str) -> None:
    plan = plan_of(tmp_path, given(backend, kvPoolConfig=pool))
    assert plan.spec.recall is None
    assert any(said in line for line in (*plan.notes, *plan.warnings))


def test_kvrecalls_own_pool_needs_no_file(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, given(backend, kvPoolConfig={"backend": "embedded"}))
    assert plan.spec.recall == {"async_write": False}
    plan = plan_of(tmp_path, given(backend, kvPoolConfig={"backend": "service"}))
    assert plan.spec.recall == {"async_write": False, "backend": "service"}


def test_what_has_no_effect_is_told_once(tmp_path: Path) -> None:
    def spoil(config: Json) -> None:
        backend(config).update(npuDeviceIds=[[0]], interNodeTLSEnabled=False)
        model(config)["models"] = {"deepseekv2": {"kv_cache_options": {"enable_nz": True}}}
        schedule(config)["enablePrefixCache"] = True

    plan = plan_of(tmp_path, spoil)
    (idle,) = (note for note in plan.notes if note.startswith("accepted without effect"))
    for name in ("BackendConfig.npuDeviceIds", "interNodeTLSEnabled", f"{MODEL}.models."):
        assert idle.count(name) == 1
    assert "enablePrefixCache (retired: plugin_params" in idle


def test_a_pool_in_a_string(tmp_path: Path) -> None:
    """As both tables of the documents type it: std::string."""
    config = right()
    kv_pool(config).update(asyncWrite=True)
    path = write(tmp_path, config, {"host_size": "1GiB"})
    backend(config)["kvPoolConfig"] = json.dumps(kv_pool(config))
    path.write_text(json.dumps(config, indent=1))
    assert plan_config(path).spec.recall == {"host_size": "1GiB", "async_write": True}


@pytest.mark.parametrize("text", ["", "{}", '{"backend":"","configPath":""}'])
def test_a_string_of_no_pool(tmp_path: Path, text: str) -> None:
    assert plan_of(tmp_path, given(backend, kvPoolConfig=text)).spec.recall is None


@pytest.mark.parametrize(
    ("text", "at", "said"),
    [
        ('{"backend":"embeded"}', '"backend', "backend is 'embeded'; allowed: '' (no pool)"),
        ('{"backend":"embedded","configPath":"n.json"}', '"configPath', "no such file"),
        ('{"backend"："x"}', "：", "kvPoolConfig is JSON in a string: expected ':'"),
        ('{"backend":"",}', ",}", "comma with nothing after it"),
        ('["embedded"]', None, "not a JSON object; write {"),
        ("embedded", "embedded", "embedded is not a JSON value"),
    ],
)
def test_a_wrong_string_has_its_place(tmp_path: Path, text: str, at: str | None, said: str) -> None:
    config = right()
    backend(config)["kvPoolConfig"] = text
    path = write(tmp_path, config)
    path.write_text(json.dumps(config, indent=1, ensure_ascii=False))
    with pytest.raises(ConfigError) as caught:
        plan_config(path)
    message = str(caught.value)
    assert said in message
    lines = path.read_text().splitlines()
    (line,) = (number for number, each in enumerate(lines, 1) if "kvPoolConfig" in each)
    written = lines[line - 1]
    mark = '"kvPoolConfig"' if at is None else at.replace('"', '\\"')
    begin = written.index(mark, 0 if at is None else written.index(": "))
    assert message.startswith(f"{path}:{line}:{begin + 1}: BackendConfig.kvPoolConfig")


BESIDE: list[tuple[Json, Callable[[Plan], object], object, str]] = [
    # What the command line says, where it must come out, as what, the note
    ({"host": "127.0.0.9", "port": 7001}, lambda p: p.address(Plane.BUSINESS), "127.0.0.9:7001",
     "--host 127.0.0.9 (file: 127.0.0.1), --port 7001 (file: 1025)"),
    ({"port": 1026}, lambda p: p.address(Plane.MANAGEMENT), "127.0.0.2:1026", "--port 1026"),
    ({"limits": Limits(max_n=3)}, lambda p: p.spec.limits.max_n, 3, "--max-n 3 (file: nothing)"),
    ({"options": {"max-model-len": "9k"}}, lambda p: p.spec.options["max-model-len"], "9k",
     "--max-model-len 9k (file: 2560)"),
    ({"options": {"max-model-len": "9k"}}, lambda p: p.spec.limits.max_input_tokens, 2048,
     "--max-model-len"),
    ({"extra_args": ("--max_num_seqs=4", "-tp", "2", "--no-enable-prefix-caching")},
     lambda p: p.spec.extra_args[1:3], ("-tp", "2"),
     "--max-num-seqs 4 (file: 200), --tensor-parallel-size 2 (file: nothing), "
     "--no-enable-prefix-caching (file: True)"),
    ({"recall": None}, lambda p: p.spec.recall, None, "--no-pool"),
    ({"recall": {"host_size": "2GiB"}}, lambda p: p.spec.recall,
     {"host_size": "2GiB", "async_write": False}, "pool host_size 2GiB (file: 1GiB)"),
    ({"recall": {"backend": "service", "socket": "/s"}}, lambda p: p.spec.recall,
     {"backend": "service", "socket": "/s", "async_write": False}, "pool backend service"),
    ({"recall": {"policy": "lru"}, "whole_pool": True}, lambda p: p.spec.recall,
     {"policy": "lru", "async_write": False}, "pool policy lru"),
]  # fmt: skip


@pytest.mark.parametrize(("beside", "found", "value", "note"), BESIDE)
def test_the_command_line_wins(
    tmp_path: Path, beside: Json, found: Callable[[Plan], object], value: object, note: str
) -> None:
    whole = bool(beside.get("whole_pool"))
    path = write(tmp_path, right(), {"host_size": "1GiB"})
    plan = plan_config(
        path, replace(NOTHING, **{k: v for k, v in beside.items() if k != "whole_pool"}), whole
    )
    assert found(plan) == value
    (told,) = (each for each in plan.notes if each.startswith("the file is overridden"))
    assert note in told


def test_another_model_beside_the_file(tmp_path: Path) -> None:
    wrong = given(model, modelWeightPath="/none")
    plan = plan_of(tmp_path, wrong, model=str(tmp_path / "model"))
    assert plan.spec.model == str(tmp_path / "model")
    assert any(f"MODEL {tmp_path}/model (file: /none)" in note for note in plan.notes)


def test_a_pool_beside_a_file_without_one(tmp_path: Path) -> None:
    config = right()
    model(config).update(cpuMemSize=2)
    beside = replace(NOTHING, recall={"policy": "lru"})
    plan = plan_config(write(tmp_path, config), beside)
    assert plan.spec.recall == {"async_write": False, "policy": "lru", "host_size": 2 << 30}
    alone = plan_config(write(tmp_path, config), replace(NOTHING, recall={"async_write": True}))
    assert alone.spec.recall is None
    assert any("asyncWrite (there is no pool)" in note for note in alone.notes)
    model(config).pop("plugin_params")
    with pytest.raises(ConfigError, match="has no prefix_cache"):
        plan_config(write(tmp_path, config), beside)


def test_every_network_needs_the_files_word(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"allowAllZeroIpListening is false, and --host is 0\."):
        plan_of(tmp_path, host="0.0.0.0")


def test_nothing_beside_the_file_is_no_note(tmp_path: Path) -> None:
    assert not any("command line" in note for note in plan_of(tmp_path).notes)


def test_a_memory_factor_beside_a_size(tmp_path: Path) -> None:
    """What `kvrecall plan` says of it is given to vLLM, unless the file has a size."""
    lowered = ("--gpu-memory-utilization", "0.91")
    assert plan_of(tmp_path, extra_args=lowered).warnings == ()
    (warning,) = plan_of(tmp_path, given(model, npuMemSize=8), extra_args=lowered).warnings
    assert "--gpu-memory-utilization is without effect: npuMemSize 8" in warning


SILENT: list[tuple[Spoil, Json | None, str]] = [
    # Fields that do less than they say, the pool's file, the note
    (given(model, moe_ep=4), None, "moe_ep (the model has no experts)"),
    (given(model, moe_tp=4), None, "moe_tp (vLLM derives it"),
    (given(model, cpuMemSize=5), None, "cpuMemSize (there is no"),
    (given(model, cpuMemSize=5), {"host_size": "1GiB"}, "cpuMemSize (host_size is 1GiB"),
    (lambda c: (model(c).update(cpuMemSize=5),
                kv_pool(c).update(backend="service")), {},
     "cpuMemSize (the pool's memory is its service's"),
    (given(kv_pool, asyncWrite=True), None, "asyncWrite (there is no pool"),
    (given(kv_pool, allowPlaintext=True), {}, "allowPlaintext (it is a store's"),
    (lambda c: (model(c).update(worldSize=8, tp=8, dp=2),
                backend(c).update(multiNodesInferEnabled=True)), None,
     "worldSize is 8 on this host; in all tp x pp x dp is 8 x 1 x 2 = 16"),
    (given(schedule, templateType="Standard"), None, "templateType Standard: vLLM"),
    (given(deploy, maxLoraNum=2), None, "maxLoraNum (there are no LoraModules"),
    (given(schedule, prefillChunkSize=64), None, "splitfuse is off"),
    (given(server, tlsCert="x.pem", managementTlsPk="y.pem"), None,
     "ServerConfig.tlsCert, ServerConfig.managementTlsPk (httpsEnabled is false)"),
]  # fmt: skip


@pytest.mark.parametrize(("spoil", "pool", "note"), SILENT)
def test_what_does_less_than_it_says_is_told(
    tmp_path: Path, spoil: Spoil, pool: Json | None, note: str
) -> None:
    plan = plan_of(tmp_path, spoil, pool)
    (told,) = (each for each in plan.notes if note in each)
    assert told
    assert not any(note in each for each in plan_of(tmp_path).notes)


def test_experts_are_spread_where_there_are_some(tmp_path: Path) -> None:
    """vLLM does not start a dense model with expert parallelism."""
    config = right()
    model(config).update(moe_ep=4, worldSize=4, dp=2)
    path = write(tmp_path, config)
    assert plan_config(path).spec.options.get("enable-expert-parallel") is None
    (tmp_path / "model" / "config.json").write_text('{"num_experts": 8}')
    plan = plan_config(path)
    assert plan.spec.options["enable-expert-parallel"] is True
    assert any("spreads the experts over all tp x dp = 4 devices" in each for each in plan.notes)


def test_relative_paths_of_an_installation(tmp_path: Path) -> None:
    """In MindIE they begin in the folder around conf/, where mindieservice_daemon is started."""
    (tmp_path / "conf").mkdir()
    path = write(tmp_path / "conf", right(), {"host_size": "1GiB"})
    assert plan_config(path).spec.model == str(tmp_path / "conf" / "model")
    (tmp_path / "conf" / "model").rename(tmp_path / "model")
    (tmp_path / "conf" / "pool.json").rename(tmp_path / "pool.json")
    plan = plan_config(path)
    assert plan.spec.model == str(tmp_path / "model")
    assert plan.spec.recall == {"host_size": "1GiB", "async_write": False}


def test_hosts_are_joined_by_vllms_options(tmp_path: Path) -> None:
    several = given(backend, multiNodesInferEnabled=True)
    (warning,) = plan_of(tmp_path, several).warnings
    assert "--data-parallel-rank 0 --data-parallel-address" in warning
    assert plan_of(tmp_path, several, extra_args=("--data-parallel-rank", "0")).warnings == ()


@pytest.mark.parametrize("name", ["kv_pool.txt", "kv_pool_page.txt", "prefix_cache.txt"])
def test_samples_of_the_seeds(tmp_path: Path, name: str) -> None:
    """As they are printed, with the model's path, the pool's and HTTPS off: they are served."""
    text = (SAMPLES / name).read_text(encoding="utf-8")
    text = re.sub('"modelWeightPath" : "[^"]*"', '"modelWeightPath" : "model"', text)
    text = text.replace("kv_pool_backend_name", "embedded")
    text = text.replace("/path/to/your/config/file", "pool.json")
    path = write(tmp_path, right(), {"host_size": "1GiB"})
    path.write_text('"ServerConfig" : {"httpsEnabled" : false},' + text)
    plan = plan_config(path)
    assert plan.spec.options["tensor-parallel-size"] == 8
    assert plan.spec.options["enable-prefix-caching"] is True
    told = "\n".join(plan.warnings)
    if name == "prefix_cache.txt":
        assert "ModelDeployConfig belongs in BackendConfig" in told
        return
    assert plan.spec.options["data-parallel-size"] == 2
    assert "config.json:18:40: expected ':'" in told
    assert "multiNodesInferEnabled" in told


def test_the_file_that_mindie_ships(tmp_path: Path) -> None:
    """Its fields, and those of the pages on SplitFuse, SLO and parallel decoding."""
    config = json.loads((SAMPLES / "every_field.json").read_text(encoding="utf-8"))
    model(config)["modelWeightPath"] = "model"
    with pytest.raises(ConfigError, match=r"ServerConfig\.httpsEnabled is true; there is no file"):
        plan_config(write(tmp_path, config))
    server(config)["httpsEnabled"] = False
    plan = plan_config(write(tmp_path, config))
    assert plan.warnings == ()
    assert plan.spec.options["tensor-parallel-size"] == 4
    assert None not in plan.spec.options.values()  # which would hide the platform's defaults


UNKNOWN: list[tuple[Spoil, str]] = [
    # A field that no section has, the warning
    (given(model, modelNam="x"), f"27:6: {MODEL}.modelNam is unknown and has no effect; "
     "did you mean modelName?"),
    (given(server, Port=1), "ServerConfig.Port is unknown and has no effect; did you mean port?"),
    (given(server, maxPrefillTokens=1), "it belongs in BackendConfig.ScheduleConfig"),
    (given(kv_pool, asyncWrit=True), "did you mean asyncWrite?"),
    (given(model, plugin_params='{"plugin_typ":"mtp"}'), "did you mean plugin_type?"),
    (lambda c: c.update(xyzzy=[{"a": 1}]), "xyzzy is unknown and has no effect"),
]  # fmt: skip


@pytest.mark.parametrize(("spoil", "said"), UNKNOWN)
def test_an_unknown_field_is_a_warning(tmp_path: Path, spoil: Spoil, said: str) -> None:
    (warning,) = plan_of(tmp_path, spoil).warnings
    assert warning.startswith(f"{tmp_path}/config.json:")
    assert warning.endswith(said)


def test_variables_of_mindie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIES_CONTAINER_IP", "127.0.0.7")
    monkeypatch.setenv("MIES_CONTAINER_MANAGEMENT_IP", "127.0.0.8")
    monkeypatch.setenv("NPU_MEMORY_FRACTION", "0.88")
    monkeypatch.setenv("MINDIE_ASYNC_SCHEDULING_ENABLE", "0")
    plan = plan_of(tmp_path)
    assert plan.address(Plane.BUSINESS) == "127.0.0.7:1025"
    assert plan.address(Plane.MANAGEMENT) == "127.0.0.8:1026"
    assert plan.spec.options["gpu-memory-utilization"] == 0.88
    assert plan.spec.options["async-scheduling"] is False
    assert "gpu-memory-utilization" not in str(plan_of(tmp_path, given(model, npuMemSize=8)).notes)
    for wrong in ("88", "0", "1.2", ".", "x"):
        monkeypatch.setenv("NPU_MEMORY_FRACTION", wrong)
        assert f"NPU_MEMORY_FRACTION is '{wrong}'" in error_of(tmp_path, lambda c: None)


def test_a_cpu_runs_it_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servable, "most_ranks", lambda: 2)
    plan = plan_of(tmp_path, given(model, worldSize=8, dp=2))
    assert plan.warnings == ("worldSize 8: no accelerators, so the model is not spread over 8",)
    assert "tensor-parallel-size" not in plan.spec.options
    assert plan_of(tmp_path, given(model, worldSize=2)).spec.options["tensor-parallel-size"] == 2


def test_disaggregation_is_the_command_lines(tmp_path: Path) -> None:
    apart = given(server, inferMode="dmi")
    (warning,) = plan_of(tmp_path, apart).warnings
    assert "--role prefill and one with --role decode over one pool, behind kvrecall" in warning
    assert plan_of(tmp_path, apart, role=Role.DECODE).warnings == ()


def test_a_store_by_name(tmp_path: Path) -> None:
    """Whatever kind of store: its file has its settings."""
    plan = plan_of(tmp_path, given(kv_pool, backend="mine:Store"), {"url": "x"})
    remote = {"kind": "mine:Store", "url": "x", "allow_plaintext": False}
    assert plan.spec.recall == {"remote": remote, "async_write": False}


def test_every_field_says_what_it_does() -> None:
    told = list(fields_of(validate(parse_json(json.dumps(right()), "c.json"))[0]))
    assert len(told) > 150
    assert all(each.text and each.effect in Effect for each in told)
