"""MindIE's config.json: errors name place, field, value and cure; valid fields become vLLM's
options and the pool's settings."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kvrecall.config import RecallSettings
from kvrecall.engines.base import Limits
from kvrecall.errors import ConfigError
from kvrecall.jsonfile import parse_json
from kvrecall.server.checks import check_pool
from kvrecall.server.mindie.planner import NOTHING, plan_config
from kvrecall.server.mindie.reader import Problems, validate
from kvrecall.server.mindie.schema import Effect, MindieConfig, effect_of
from kvrecall.server.plan import Plan, Plane
from server.configs import Json, backend, deploy, model, right, schedule, server, write

SAMPLES = Path(__file__).parent / "samples"
MODEL = "BackendConfig.ModelDeployConfig.ModelConfig[0]"
Spoil = Callable[[Json], object]


def plan_of(folder: Path, spoil: Spoil = lambda c: None, pool: Json | None = None) -> Plan:
    config = right()
    spoil(config)
    return plan_config(write(folder, config, pool))


def error_of(folder: Path, spoil: Spoil, pool: Json | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        plan_of(folder, spoil, pool)
    message = str(caught.value)
    assert "\n" not in message
    return message


WRONG: list[tuple[Spoil, list[str]]] = [
    # Types
    (lambda c: model(c).update(worldSize="8"), [f"{MODEL}.worldSize is '8'", "whole number"]),
    (lambda c: model(c).update(worldSize=True), [f"{MODEL}.worldSize is True", "whole number"]),
    (lambda c: model(c).update(worldSize=1.5), [f"{MODEL}.worldSize is 1.5", "whole number"]),
    (lambda c: model(c).update(npuMemSize="a"), [f"{MODEL}.npuMemSize is 'a'", "number"]),
    (lambda c: model(c).update(trustRemoteCode="false"), ["'false'", "true or false"]),
    (lambda c: model(c).update(modelName=None), [f"{MODEL}.modelName is None", "string"]),
    (lambda c: server(c).update(httpsEnabled=0), ["ServerConfig.httpsEnabled is 0"]),
    (lambda c: server(c).update(tlsCaFile="ca.pem"), ["ServerConfig.tlsCaFile", "a list"]),
    (lambda c: c.update(ServerConfig=[]), ["ServerConfig is []", "object"]),
    (lambda c: deploy(c).update(ModelConfig={}), ["ModelConfig is {}", "list"]),
    (lambda c: backend(c)["kvPoolConfig"].update(backend=None), ["backend is None", "string"]),
    # Ranges and choices
    (lambda c: model(c).update(worldSize=0), [f"{MODEL}.worldSize is 0", "1 to 1024"]),
    (lambda c: server(c).update(port=80), ["ServerConfig.port is 80", "1024 to 65535"]),
    (lambda c: server(c).update(maxLinkNum=5000), ["maxLinkNum is 5000", "1 to 4096"]),
    (lambda c: server(c).update(tokenTimeout=0), ["tokenTimeout is 0", "1 to 3600"]),
    (lambda c: server(c).update(maxRequestLength=101), ["is 101", "1 to 100"]),
    (lambda c: server(c).update(openAiSupport="x"), ["openAiSupport is 'x'", "vllm, openai"]),
    (lambda c: schedule(c).update(cacheBlockSize=100), ["is 100", "multiples of 16"]),
    (lambda c: schedule(c).update(cacheBlockSize=256), ["is 256", "1 to 128"]),
    (lambda c: schedule(c).update(templateType="Pure"), ["Standard, Mix"]),
    (lambda c: schedule(c).update(maxN=8193), ["maxN is 8193", "1 to 8192"]),
    (lambda c: deploy(c).update(truncation=2), ["truncation is 2", "false, true, -1, 0, 1"]),
    (lambda c: server(c).update(interCommPort=80), ["interCommPort is 80", "at least 1024"]),
    (lambda c: deploy(c).update(ModelConfig=[]), ["ModelConfig is []", "not be empty"]),
    (lambda c: model(c).update(npuMemSize=0), [f"{MODEL}.npuMemSize is 0", "-1 (automatic)"]),
    (
        lambda c: backend(c)["kvPoolConfig"].update(configPath="x" * 501),
        ["kvPoolConfig.configPath", "at most 500"],
    ),
    # Required and unknown fields
    (lambda c: c.pop("ServerConfig"), ["ServerConfig is required"]),
    (lambda c: model(c).pop("worldSize"), [f"{MODEL}.worldSize is required"]),
    (lambda c: server(c).pop("httpsEnabled"), ["ServerConfig.httpsEnabled is required"]),
    (lambda c: model(c).update(modelNam="x"), [f"{MODEL}.modelNam", "did you mean modelName?"]),
    (lambda c: server(c).update(Port=1), ["ServerConfig.Port", "did you mean port?"]),
    (
        lambda c: server(c).update(maxPrefillTokens=1),
        ["ServerConfig.maxPrefillTokens", "it belongs in BackendConfig.ScheduleConfig"],
    ),
    (lambda c: c.update(xyzzy=1), ["xyzzy is not a field of config.json"]),
    # plugin_params
    (
        lambda c: model(c).update(plugin_params="prefix_cache"),
        ["plugin_params is JSON in a string", "prefix_cache is not"],
    ),
    (lambda c: model(c).update(plugin_params='["mtp"]'), ["not a JSON object"]),
    (lambda c: model(c).update(plugin_params='{"plugin_type":"x"}'), ["'x'", "memory_decoding"]),
    (
        lambda c: model(c).update(plugin_params={"plugin_type": "mtp,la"}),
        ["la and mtp are mutually exclusive"],
    ),
    (
        lambda c: model(c).update(plugin_params={"num_speculative_tokens": "1"}),
        ["plugin_params", "num_speculative_tokens"],
    ),
    (
        lambda c: model(c).update(plugin_params='{"plugin_type":"mtp"}'),
        [f"{MODEL}.plugin_params asks for mtp", "no prediction layers"],
    ),
    # What this version does not have
    (lambda c: server(c).update(inferMode="dmi"), ["inferMode is 'dmi'", "not available"]),
    (lambda c: backend(c).update(modelInstanceNumber=2), ["modelInstanceNumber is 2"]),
    (
        lambda c: model(c).update(cp=2),
        [f"{MODEL}.cp is 2", "not available in this version, allowed: 1: with context parallel"],
    ),
    (lambda c: model(c).update(sp=8), [f"{MODEL}.sp is 8", "keeps only some of a block's tokens"]),
    (lambda c: deploy(c)["ModelConfig"].append(dict(model(c))), ["serves one model"]),
    # Relations
    (
        lambda c: schedule(c).update(maxN=9, maxBatchSize=8),
        ["maxN is 9", "maxBatchSize, which is 8"],
    ),
    (lambda c: server(c).update(ipAddress="0.0.0.0"), ["0.0.0.0", "allowAllZeroIpListening"]),
    (lambda c: server(c).update(ipAddress="::"), ["allowAllZeroIpListening"]),
    (lambda c: server(c).update(ipAddress="localhost"), ["'localhost'", "IPv4 or IPv6"]),
    (lambda c: model(c).update(worldSize=8, tp=4), ["worldSize is 8", "4 x 1 x 1 = 4"]),
    (lambda c: model(c).update(modelWeightPath="/none"), ["'/none'", "no such folder"]),
    (lambda c: server(c).update(httpsEnabled=True), ["tlsCert is required when httpsEnabled"]),
    (
        lambda c: server(c).update(
            httpsEnabled=True, tlsCert="a.pem", tlsPk="b.pem", tlsCaFile=["c.pem"]
        ),
        ["httpsEnabled is true", "there is no file", "a.pem"],
    ),
    (
        lambda c: backend(c)["kvPoolConfig"].update(backend="memcache", configPath="m.json"),
        ["kvPoolConfig.backend is 'memcache'", "not available in this version", "mooncake"],
    ),
    (
        lambda c: backend(c)["kvPoolConfig"].update(backend="mooncake", configPath="m.json"),
        ["kvPoolConfig.configPath is", "m.json", "no such file"],
    ),
    (
        lambda c: backend(c)["kvPoolConfig"].update(backend="kv_pool_backend_name", configPath="p"),
        ["is 'kv_pool_backend_name'", "allowed: '' (no pool), 'embedded'"],
    ),
    (
        lambda c: backend(c)["kvPoolConfig"].update(backend="embedded", configPath="none.json"),
        ["kvPoolConfig.configPath is", "none.json", "no such file"],
    ),
]


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


def test_every_problem_is_told() -> None:
    config = right()
    model(config)["worldSize"] = 0
    server(config)["port"] = "x"
    with pytest.raises(Problems, match="and 1 more") as caught:
        validate(parse_json(json.dumps(config), "c.json"))
    assert len(caught.value.lines) == 2


POOL_WRONG: list[tuple[Json, Spoil, list[str]]] = [
    ({"hostsize": 1}, lambda c: None, ["pool.json:2:2", "'hostsize'", "host_size"]),
    ({"host_size": "many"}, lambda c: None, ["pool.json:2:2", "'many'", "8GiB"]),
    ({"disk_path": "/d"}, lambda c: None, ["pool.json:2:2", "disk_size is not"]),
    (
        {"async_write": True},
        lambda c: backend(c)["kvPoolConfig"].update(asyncWrite=False),
        ["asyncWrite is False", "pool.json:2:2", "True"],
    ),
    (
        {"host_size": "1GiB"},
        lambda c: model(c).pop("plugin_params"),
        ["prefix_cache", "on which the KV pool builds"],
    ),
    (
        {"host_size": "1GiB"},
        lambda c: model(c).update(plugin_params='{"plugin_type":"splitfuse"}'),
        [f"{MODEL}.plugin_params has no prefix_cache"],
    ),
]


@pytest.mark.parametrize(("pool", "spoil", "words"), POOL_WRONG)
def test_wrong_pool(tmp_path: Path, pool: Json, spoil: Spoil, words: list[str]) -> None:
    message = error_of(tmp_path, spoil, pool)
    for word in words:
        assert word in message


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
    (lambda c: schedule(c).update(templateType="Mix"), "enable-chunked-prefill", True),
    (
        lambda c: model(c).update(plugin_params={"plugin_type": "splitfuse, prefix_cache"}),
        "enable-chunked-prefill",
        True,
    ),
    (lambda c: schedule(c).update(maxPrefillTokens=100), "max-num-batched-tokens", 200),
    (lambda c: schedule(c).update(cacheBlockSize=64), "block-size", 64),
    (lambda c: model(c).update(npuMemSize=2), "kv-cache-memory-bytes", 2 << 30),
    (lambda c: model(c).update(npuMemSize=0.5), "kv-cache-memory-bytes", 1 << 29),
    (lambda c: model(c).update(trustRemoteCode=True), "trust-remote-code", True),
    (lambda c: model(c).update(worldSize=4), "tensor-parallel-size", 4),
    (lambda c: model(c).update(worldSize=4, dp=2), "data-parallel-size", 2),
    (lambda c: model(c).update(worldSize=4, pp=2), "tensor-parallel-size", 2),
    (
        lambda c: model(c).update(plugin_params='{"plugin_type":"la,prefix_cache"}'),
        "speculative-config",
        {
            "method": "ngram",
            "num_speculative_tokens": 4,
            "prompt_lookup_max": 4,
            "prompt_lookup_min": 1,
        },
    ),
]


@pytest.mark.parametrize(("given", "option", "value"), RIGHT)
def test_engine_options(tmp_path: Path, given: Spoil, option: str, value: object) -> None:
    assert plan_of(tmp_path, given).spec.options.get(option) == value


def test_mtp_on_a_model_with_prediction_layers(tmp_path: Path) -> None:
    config = right()
    model(config)["plugin_params"] = (
        '{"plugin_type":"mtp,prefix_cache","num_speculative_tokens": 1}'
    )
    path = write(tmp_path, config)
    (tmp_path / "model" / "config.json").write_text('{"num_nextn_predict_layers": 1}')
    options = plan_config(path).spec.options
    assert options["speculative-config"] == {"method": "mtp", "num_speculative_tokens": 1}
    assert options["enable-prefix-caching"] is True


@pytest.mark.parametrize(
    ("given", "side"),
    [(False, "error"), (0, "error"), (True, "right"), (-1, "right"), (1, "left")],
)
def test_truncation(tmp_path: Path, given: object, side: str) -> None:
    limits = plan_of(tmp_path, lambda c: deploy(c).update(truncation=given)).spec.limits
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
    (
        {"host_size": "1GiB"},
        lambda c: backend(c)["kvPoolConfig"].update(asyncWrite=True),
        {"host_size": "1GiB", "async_write": True},
    ),
    ({"async_write": True}, lambda c: None, {"async_write": True}),
    (
        {},
        lambda c: model(c).update(cpuMemSize=5),
        {"async_write": False, "host_size": 5 << 30},
    ),
    (
        {"host_size": "1GiB"},
        lambda c: model(c).update(cpuMemSize=5),
        {"async_write": False, "host_size": "1GiB"},
    ),
    (
        {"socket": "/run/kv.sock"},
        lambda c: (
            backend(c)["kvPoolConfig"].update(backend="service"),
            model(c).update(cpuMemSize=5),
        ),
        {"async_write": False, "backend": "service", "socket": "/run/kv.sock"},
    ),
]


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
    backend(config)["kvPoolConfig"].update(backend="mooncake", asyncWrite=True)
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
    assert recall["remote"] == {
        "kind": "mooncake",
        "config": str(tmp_path / "pool.json"),
        "allow_plaintext": True,
    }

    def allowed(config: Json) -> None:
        mooncake(config)
        backend(config)["kvPoolConfig"]["allowPlaintext"] = True

    assert plan_of(tmp_path, allowed, away).spec.recall is not None


def test_pool_of_two_minds(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"kvPoolConfig\.backend is 'embedded', but .*'service'"):
        plan_of(tmp_path, lambda c: None, {"backend": "service"})


@pytest.mark.parametrize(
    ("pool", "said"),
    [
        ({"backend": "", "configPath": ""}, ""),
        ({"backend": "", "configPath": "p.json"}, "backend is empty"),
        ({"backend": "embedded", "configPath": ""}, "configPath is empty"),
        ({"backend": "embedded"}, "configPath is empty"),
    ],
)
def test_pool_off(tmp_path: Path, pool: Json, said: str) -> None:
    plan = plan_of(tmp_path, lambda c: backend(c).update(kvPoolConfig=pool))
    assert plan.spec.recall is None
    assert any(said in line for line in (*plan.notes, *plan.warnings))


def test_what_has_no_effect_is_told_once(tmp_path: Path) -> None:
    def spoil(config: Json) -> None:
        backend(config).update(npuDeviceIds=[[0]], interNodeTLSEnabled=False)
        model(config)["models"] = {"deepseekv2": {"kv_cache_options": {"enable_nz": True}}}
        schedule(config)["enablePrefixCache"] = True

    plan = plan_of(tmp_path, spoil)
    (idle,) = (note for note in plan.notes if note.startswith("accepted without effect"))
    for name in ("BackendConfig.npuDeviceIds", "interNodeTLSEnabled", f"{MODEL}.models"):
        assert idle.count(name) == 1
    assert any("enablePrefixCache is retired" in line for line in plan.warnings)


def as_string(config: Json, **fields: object) -> None:
    backend(config)["kvPoolConfig"] = json.dumps(backend(config)["kvPoolConfig"] | fields)


def test_a_pool_in_a_string(tmp_path: Path) -> None:
    """As both tables of the documents type it: std::string."""
    config = right()
    backend(config)["kvPoolConfig"].update(asyncWrite=True)
    path = write(tmp_path, config, {"host_size": "1GiB"})
    as_string(config)
    path.write_text(json.dumps(config, indent=1))
    assert plan_config(path).spec.recall == {"host_size": "1GiB", "async_write": True}


@pytest.mark.parametrize("text", ["", "{}", '{"backend":"","configPath":""}'])
def test_a_string_of_no_pool(tmp_path: Path, text: str) -> None:
    assert plan_of(tmp_path, lambda c: backend(c).update(kvPoolConfig=text)).spec.recall is None


@pytest.mark.parametrize(
    ("text", "at", "said"),
    [
        ('{"backend":"embeded"}', '"backend', "backend is 'embeded'; allowed: '' (no pool)"),
        ('{"backend":"","asyncWrit":true}', '"asyncWrit', "did you mean asyncWrite?"),
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
    (told,) = (each for each in plan.notes if each.startswith("the command line overrides"))
    assert note in told


def test_another_model_beside_the_file(tmp_path: Path) -> None:
    config = right()
    model(config)["modelWeightPath"] = "/none"
    path = write(tmp_path, config)
    plan = plan_config(path, replace(NOTHING, model=str(tmp_path / "model")))
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
    assert any("asynchronous writes are without effect" in note for note in alone.notes)
    model(config).pop("plugin_params")
    with pytest.raises(ConfigError, match="has no prefix_cache"):
        plan_config(write(tmp_path, config), beside)


def test_every_network_needs_the_files_word(tmp_path: Path) -> None:
    path = write(tmp_path, right())
    with pytest.raises(ConfigError, match=r"allowAllZeroIpListening is false, and --host is 0\."):
        plan_config(path, replace(NOTHING, host="0.0.0.0"))


def test_nothing_beside_the_file_is_no_note(tmp_path: Path) -> None:
    assert not any("command line" in note for note in plan_of(tmp_path).notes)


def test_a_memory_factor_beside_a_size(tmp_path: Path) -> None:
    """What `kvrecall plan` says of it is given to vLLM, unless the file has a size."""
    lowered = replace(NOTHING, extra_args=("--gpu-memory-utilization", "0.91"))
    config = right()
    assert plan_config(write(tmp_path, config), lowered).warnings == ()
    model(config)["npuMemSize"] = 8
    (warning,) = plan_config(write(tmp_path, config), lowered).warnings
    assert "--gpu-memory-utilization is without effect: npuMemSize 8" in warning


SILENT: list[tuple[Spoil, Json | None, str]] = [
    # Fields that do less than they say, the pool's file, the note
    (lambda c: model(c).update(moe_ep=4, worldSize=4, dp=2), None,
     "moe_ep 4: expert parallelism is on; vLLM spreads the experts over all tp x dp = 4 devices"),
    (lambda c: model(c).update(moe_tp=4), None, "moe_tp (vLLM derives it"),
    (lambda c: model(c).update(cpuMemSize=5), None, "cpuMemSize 5 is without effect: there is no"),
    (lambda c: model(c).update(cpuMemSize=5), {"host_size": "1GiB"}, "host_size is 1GiB"),
    (lambda c: (model(c).update(cpuMemSize=5),
                backend(c)["kvPoolConfig"].update(backend="service")), {},
     "cpuMemSize 5 is without effect: the pool's memory is its service's"),
    (lambda c: backend(c)["kvPoolConfig"].update(asyncWrite=True), None,
     "asynchronous writes are without"),
    (lambda c: backend(c)["kvPoolConfig"].update(allowPlaintext=True), {}, "allowPlaintext is"),
    (lambda c: (model(c).update(worldSize=8, tp=8, dp=2),
                backend(c).update(multiNodesInferEnabled=True)), None,
     "worldSize is 8 on this host; in all tp x pp x dp is 8 x 1 x 2 = 16"),
    (lambda c: schedule(c).update(templateType="Standard"), None, "templateType Standard: vLLM"),
    (lambda c: deploy(c).update(maxLoraNum=2), None, "no LoraModules: maxLoraNum"),
    (lambda c: server(c).update(tlsCert="x.pem", managementTlsPk="y.pem"), None,
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
    config = right()
    backend(config)["multiNodesInferEnabled"] = True
    path = write(tmp_path, config)
    (warning,) = plan_config(path).warnings
    assert "--data-parallel-rank 0 --data-parallel-address" in warning
    assert (
        plan_config(path, replace(NOTHING, extra_args=("--data-parallel-rank", "0"))).warnings == ()
    )


@pytest.mark.parametrize("name", ["kv_pool.txt", "kv_pool_page.txt"])
def test_repaired_samples_of_the_seeds(tmp_path: Path, name: str) -> None:
    """With the punctuation mended and a ServerConfig, every field of the samples is known."""
    text = (SAMPLES / name).read_text(encoding="utf-8")
    text = text.replace('"backend"："', '"backend":"').replace('"backend""', '"backend":"')
    text = text.rstrip().removesuffix(",") + "}"
    config = json.loads("{" + text + "}")
    config["ServerConfig"] = right()["ServerConfig"]
    backend(config)["kvPoolConfig"]["backend"] = "embedded"
    checked, _ = validate(parse_json(json.dumps(config), "c.json"))
    assert isinstance(checked, MindieConfig)
    model(config)["modelWeightPath"] = "model"
    plan = plan_config(write(tmp_path, config, {"host_size": "1GiB"}))
    assert plan.spec.options["tensor-parallel-size"] == 8
    assert plan.spec.options["data-parallel-size"] == 2
    assert plan.spec.options["enable-expert-parallel"] is True
    assert any("multiNodesInferEnabled" in line for line in plan.warnings)


def test_a_section_alone_is_recognised() -> None:
    text = (SAMPLES / "prefix_cache.txt").read_text(encoding="utf-8").rstrip().removesuffix(",")
    with pytest.raises(ConfigError, match="ModelDeployConfig belongs in BackendConfig"):
        validate(parse_json("{" + text + "}", "c.json"))


def test_every_field_says_what_it_does() -> None:
    def walk(section: type) -> None:
        for name, field in section.model_fields.items():  # type: ignore[attr-defined]
            inner = [field.annotation, *getattr(field.annotation, "__args__", ())]
            below = [kind for kind in inner if hasattr(kind, "model_fields")]
            assert below or field.description, name
            assert effect_of(field) in Effect
            for kind in () if field.description else below:
                walk(kind)

    walk(MindieConfig)
