"""Every setting of the installed vLLM is decided, and the decisions do what they say."""

from __future__ import annotations

import copy
import dataclasses
import enum
import importlib
import json
import os
import pkgutil
import subprocess
import sys
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import vllm.config
import vllm.envs as envs
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs

from kvrecall.engines.vllm.compat.versions import BUILT_ON, VERSIONS, minor
from kvrecall.engines.vllm.identity import fields
from kvrecall.engines.vllm.identity.fields import Fate
from kvrecall_lab.models import write_model

ROOT = Path(__file__).parents[4]
DECIDE = (
    "Decide each in src/kvrecall/engines/vllm/identity/fields.toml. Does it choose kernels, "
    "precision or what a token attends to: IN_NAMESPACE. Is it a size of steps or of memory, an "
    "address, a log: NO_EFFECT. In doubt: IN_NAMESPACE. Then run "
    "`python -m kvrecall_lab.reference`"
)


@pytest.fixture(scope="module", autouse=True)
def variables_as_they_were() -> Iterator[None]:
    """vLLM sets variables while it makes a configuration."""
    with patch.dict(os.environ):
        yield


def all_classes() -> dict[str, type[Any]]:
    """The dataclasses of ``vllm.config``."""
    modules = [
        importlib.import_module(f"vllm.config.{module.name}")
        for module in pkgutil.iter_modules(vllm.config.__path__)
    ]
    return {
        name: found
        for module in modules
        for name, found in vars(module).items()
        if is_configuration(found) and found.__module__ == module.__name__
    }


def is_configuration(found: Any) -> bool:
    return isinstance(found, type) and dataclasses.is_dataclass(found)


def inside(kind: Any) -> Iterator[Any]:
    yield kind
    for argument in typing.get_args(kind):
        yield from inside(argument)


def reached(config: type[Any], found: dict[str, type[Any]]) -> dict[str, type[Any]]:
    """The configuration classes that a class's fields may hold, itself included."""
    found[config.__name__] = config
    known = {**vars(vllm.config), **vars(sys.modules[config.__module__])}
    for field in dataclasses.fields(config):
        declared = field.type
        kind = eval(declared, known) if isinstance(declared, str) else declared
        for part in inside(kind):
            own = is_configuration(part) and part.__module__.startswith("vllm.config.")
            if own and part.__name__ not in found:
                reached(part, found)
    return found


REACHED = reached(VllmConfig, {})
HERE = minor(vllm.__version__)


def names_of(config: type[Any]) -> set[str]:
    return {field.name for field in dataclasses.fields(config)}


def test_every_field_is_decided() -> None:
    undecided = [
        f"{name}.{field}"
        for name, config in REACHED.items()
        if name not in fields.ELSEWHERE
        for field in sorted(names_of(config) - set(fields.decisions(name)))
    ]
    assert not undecided, f"vLLM's settings without a decision: {undecided}. {DECIDE}"


OTHERS = {name for names in fields.OTHER_VERSIONS.values() for name in names}
NOT_HERE = {
    name
    for versions, names in fields.OTHER_VERSIONS.items()
    if HERE not in versions.split()
    for name in names
}
"""Decided settings that the installed vLLM does not have."""
on_the_version_decided_for = pytest.mark.skipif(
    HERE != BUILT_ON, reason=f"the tables are complete for each version, and lean for {BUILT_ON}"
)


@on_the_version_decided_for
def test_no_decided_field_is_gone() -> None:
    gone = {
        f"{name}.{field}"
        for name in fields.TABLE
        for field in set(fields.decisions(name)) - names_of(REACHED.get(name, Nothing))
    }
    assert gone == {name for name in OTHERS if "." in name}, (
        "decided, and no setting of the installed vLLM. Take them out, or name the versions that "
        "have them in other_versions"
    )


def test_settings_of_other_versions_are_theirs_alone() -> None:
    assert all(
        one in VERSIONS and one != BUILT_ON
        for versions in fields.OTHER_VERSIONS
        for one in versions.split()
    )
    here = {f"{name}.{field}" for name, config in REACHED.items() for field in names_of(config)}
    here |= set(envs.environment_variables)
    assert not NOT_HERE & here
    assert here >= OTHERS - NOT_HERE


@dataclasses.dataclass
class Nothing:
    """In place of a configuration class that vLLM no longer has."""


def test_every_configuration_is_known() -> None:
    unknown = set(all_classes()) - set(REACHED) - set(fields.ELSEWHERE)
    assert not unknown, f"configurations of vLLM that nothing is said of: {unknown}. {DECIDE}"
    if HERE == BUILT_ON:
        assert not set(fields.ELSEWHERE) & set(REACHED)
        assert set(fields.ELSEWHERE) <= set(all_classes())


def test_nothing_is_decided_twice() -> None:
    for table, decided in (*fields.TABLE.items(), ("environment", fields.ENVIRONMENT)):
        names = [name for some in decided.values() for name in some]
        assert len(names) == len(set(names)), (table, {n for n in names if names.count(n) > 1})


def test_a_part_is_a_configuration() -> None:
    """A field decided part by part must hold a class whose fields are decided."""
    holders = {
        f"{name}.{field.name}": str(field.type)
        for name, config in REACHED.items()
        for field in dataclasses.fields(config)
        if fields.decisions(name)[field.name].fate is Fate.PARTS
    }
    assert holders
    assert all(any(part in kind for part in fields.TABLE) for kind in holders.values()), holders


def test_every_variable_is_decided() -> None:
    known = set(envs.environment_variables) | set(envs.compile_factors())
    decided = {name for names in fields.ENVIRONMENT.values() for name in names}
    assert not known - decided, f"variables without a decision: {sorted(known - decided)}. {DECIDE}"
    if HERE == BUILT_ON:
        gone = decided - known - OTHERS
        assert not gone, f"decided, and unknown to vLLM: {sorted(gone)}"
    assert not set(fields.LIBRARIES) & known


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("models") / "dense"
    write_model(folder, "qwen3")
    return str(folder)


def variant(model: str, folder: Path, **changes: Any) -> str:
    """The model's folder without its weights, with another ``config.json``."""
    folder.mkdir()
    for path in Path(model).glob("*.json"):
        (folder / path.name).write_bytes(path.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return str(folder)


@pytest.fixture(scope="module")
def experts(model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    return variant(
        model,
        tmp_path_factory.mktemp("models") / "experts",
        model_type="qwen3_moe",
        architectures=["Qwen3MoeForCausalLM"],
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        decoder_sparse_step=1,
        norm_topk_prob=True,
        mlp_only_layers=[],
    )


@pytest.fixture(scope="module")
def hearing(model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A multi-modal model; those that see need torchvision, which not every machine has."""
    text = json.loads((Path(model) / "config.json").read_text())
    return variant(
        model,
        tmp_path_factory.mktemp("models") / "hearing",
        model_type="qwen2_audio",
        architectures=["Qwen2AudioForConditionalGeneration"],
        audio_token_index=250,
        text_config={**text, "model_type": "qwen2"},
        audio_config={
            "model_type": "qwen2_audio_encoder",
            "d_model": 64,
            "encoder_layers": 2,
            "encoder_attention_heads": 4,
            "encoder_ffn_dim": 128,
            "num_mel_bins": 32,
            "max_source_positions": 100,
        },
    )


def configured(model: str, **settings: Any) -> Any:
    return EngineArgs(model=model, **settings).create_engine_config()


def ingredients(model: str, **settings: Any) -> dict[str, str]:
    return fields.ingredients(configured(model, **settings))


NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}
CONNECTOR = {
    "kv_connector": "RecallConnector",
    "kv_connector_module_path": "kvrecall.engines.vllm.connector.connector",
}
CONFIG_ONLY = {"compilation_config": {"cache_dir": "/tmp/cache", "debug_dump_path": "/tmp/dump"}}

EQUAL: dict[str, dict[str, Any]] = {
    "max_model_len": {"max_model_len": 1024},
    "requests": {"max_num_seqs": 3},
    "tokens": {"max_num_batched_tokens": 777},
    "chunks": {"long_prefill_token_threshold": 64},
    "share of memory": {"gpu_memory_utilization": 0.3},
    "memory for KV": {"kv_cache_memory_bytes": 1 << 29},
    "number of blocks": {"num_gpu_blocks_override": 100},
    "weights on the host": {"cpu_offload_gb": 1},
    "capture sizes": {"compilation_config": {"cudagraph_capture_sizes": [1, 2]}},
    "compiled sizes": {"compilation_config": {"compile_sizes": [8]}},
    "cache folders": CONFIG_ONLY,
    "names": {"served_model_name": ["a", "b"]},
    "metrics": {"disable_log_stats": True, "kv_cache_metrics": True},
    "ports": {"master_port": 1234, "data_parallel_rpc_port": 1111},
    "data-parallel ranks": {"data_parallel_size": 2, "data_parallel_address": "10.0.0.1"},
    "another rank": {"data_parallel_size": 2, "data_parallel_start_rank": 1}
    | {"data_parallel_size_local": 1},
    "executor": {"distributed_executor_backend": "mp"},
    "scheduling": {"scheduling_policy": "priority", "async_scheduling": False},
    "seed": {"seed": 7},
    "rope, through hf_config": {"hf_overrides": {"rope_theta": 123.0}},
    "sampling": {"override_generation_config": {"temperature": 0.1}, "max_logprobs": 5},
    "n-gram speculation": {"speculative_config": NGRAM},
    "download folder": {"download_dir": "/tmp/elsewhere"},
    "loading threads": {"model_loader_extra_config": {"enable_multithread_load": True}},
    "prefetching weights": {"safetensors_load_strategy": "prefetch"},
    "prefill instance": {"kv_transfer_config": {**CONNECTOR, "kv_role": "kv_producer"}},
    "decode instance": {"kv_transfer_config": {**CONNECTOR, "kv_role": "kv_consumer"}},
    "level that sets the same": {"optimization_level": 3},
    "block size and hash": {"block_size": 64, "prefix_caching_hash_algo": "sha256_cbor"},
}

DIFFERENT: dict[str, dict[str, Any]] = {
    "dtype": {"dtype": "float32"},
    "KV dtype": {"kv_cache_dtype": "fp8"},
    "layers without it": {"kv_cache_dtype": "fp8", "kv_cache_dtype_skip_layers": ["0"]},
    "eager": {"enforce_eager": True},
    "attention backend": {"attention_backend": "CPU_ATTN"},
    "quantization": {"quantization": "fp8_per_tensor"},
    "quantization of layers": {
        "quantization": "online",
        "quantization_config": {"linear": "fp8_per_channel"},
    },
    "custom operations": {"compilation_config": {"custom_ops": ["all"]}},
    "a fusion": {"compilation_config": {"pass_config": {"fuse_norm_quant": True}}},
    "inductor": {"compilation_config": {"inductor_compile_config": {"max_autotune": True}}},
    "linear kernels": {"kernel_config": {"linear_backend": "torch"}},
    "platform settings": {"additional_config": {"gdn_prefill_backend": "triton"}},
    "implementation": {"model_impl": "transformers"},
    "remote code": {"trust_remote_code": True},
    "worker's code": {"worker_extension_cls": "somewhere.Else"},
    "sliding window": {"disable_sliding_window": True},
    "pooling": {"runner": "pooling", "convert": "embed"},
    "files left out": {"ignore_patterns": ["*.pt"]},
    "fetched layers": {"offload_group_size": 2, "offload_num_in_group": 1},
}


@pytest.fixture(scope="module")
def plain(model: str) -> dict[str, str]:
    return ingredients(model)


@pytest.mark.parametrize("change", EQUAL)
def test_limits_and_places_do_not_count(change: str, model: str, plain: dict[str, str]) -> None:
    assert ingredients(model, **EQUAL[change]) == plain


def test_kernels_and_precision_count(model: str, plain: dict[str, str]) -> None:
    found = {name: ingredients(model, **settings) for name, settings in DIFFERENT.items()}
    texts = {json.dumps(one, sort_keys=True): name for name, one in found.items()}
    assert set(texts.values()) == {*found}, "each is another"
    assert json.dumps(plain, sort_keys=True) not in texts


def test_machine_does_not_count(
    model: str, plain: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = fields.environment()
    for name in ("HOME", "XDG_CACHE_HOME", "TMPDIR", "VLLM_CACHE_ROOT"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "3")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0")
    monkeypatch.setenv("VLLM_PORT", "5555")
    moved = variant(model, tmp_path / "moved")
    assert ingredients(moved, load_format="auto") == plain
    assert fields.environment() == before


def test_logging_does_not_count(model: str, plain: dict[str, str]) -> None:
    """Set afterwards: at once it would reconfigure the loggers of this process."""
    config = configured(model)
    config.logging_config.log_level = "DEBUG"
    config.compilation_config.inductor_compile_config["size_asserts"] = True  # older PyTorch
    assert fields.ingredients(config) == plain


def test_no_path_of_the_machine_is_in_it(model: str, plain: dict[str, str]) -> None:
    everything = json.dumps([plain, fields.environment()])
    assert model not in everything
    assert " at 0x" not in everything
    assert str(Path.home()) not in everything


@pytest.mark.parametrize(
    ("settings", "counts"),
    [
        ({"data_parallel_size": 2}, True),
        ({"enable_expert_parallel": True, "tensor_parallel_size": 2}, True),
        ({"all2all_backend": "deepep_low_latency"}, True),
        ({"moe_backend": "triton"}, True),
        ({"enable_lora": True}, True),  # adapters' expert kernels
        ({"data_parallel_size": 1, "data_parallel_rpc_port": 2222}, False),
        ({"max_num_seqs": 3}, False),
    ],
    ids=json.dumps,
)
def test_experts(settings: dict[str, Any], counts: bool, experts: str) -> None:
    eager = {"enforce_eager": True}
    before = ingredients(experts, **eager)
    assert (ingredients(experts, **eager, **settings) != before) is counts


def test_ranks_that_share_experts_share_blocks(experts: str) -> None:
    two = {"data_parallel_size": 2}
    first = ingredients(experts, **two, data_parallel_rank=0)
    assert ingredients(experts, **two, data_parallel_rank=1) == first


def role(name: str) -> dict[str, Any]:
    return {"kv_transfer_config": {**CONNECTOR, "kv_role": name}}


@pytest.mark.parametrize(
    ("settings", "counts"),
    [
        ({"mm_processor_kwargs": {"truncation": False}}, True),
        ({"media_io_kwargs": {"audio": {"x": 1}}}, True),
        ({"mm_encoder_attn_backend": "TORCH_SDPA"}, True),
        ({"video_pruning_rate": 0.5}, True),
        ({"language_model_only": True}, True),
        ({"limit_mm_per_prompt": {"audio": 0}}, True),
        ({"limit_mm_per_prompt": {"audio": 4}}, False),
        ({"enable_mm_embeds": True}, False),
        ({"mm_processor_cache_gb": 0}, False),
        ({"mm_hasher_algorithm": "sha256"}, False),
        ({"skip_mm_profiling": True}, False),
        (role("kv_producer"), False),
        (role("kv_consumer"), False),  # for which vLLM turns enable_mm_embeds on
    ],
    ids=json.dumps,
)
def test_media(settings: dict[str, Any], counts: bool, hearing: str) -> None:
    assert (ingredients(hearing, **settings) != ingredients(hearing)) is counts


def test_encoder_scales_count_by_content(tmp_path: Path) -> None:
    take = fields._TAKEN_AS["MultiModalConfig.mm_encoder_fp8_scale_path"]
    one, same, other = (tmp_path / name for name in ("one.json", "same.json", "other.json"))
    one.write_text('{"a": 1}')
    same.write_text('{"a": 1}')
    other.write_text('{"a": 2}')
    assert take(str(one), None) == take(str(same), None)
    assert take(str(one), None) != take(str(other), None)
    assert take(None, None) is None


def test_a_draft_model_counts(model: str) -> None:
    draft = {"method": "draft_model", "model": model, "num_speculative_tokens": 2}
    with_draft = ingredients(model, speculative_config=draft)
    assert with_draft["SpeculativeConfig.method"] == "draft_model"
    assert with_draft["SpeculativeConfig.draft_model_config.dtype"] == "torch.bfloat16"
    shorter = ingredients(model, speculative_config=draft, max_model_len=600)
    assert shorter == with_draft


ADAPTERS: dict[str, tuple[dict[str, Any], bool]] = {
    "rank": ({"max_lora_rank": 64}, True),
    "dtype": ({"lora_dtype": "float16"}, True),
    "sharding": ({"fully_sharded_loras": True}, True),
    "modules": ({"lora_target_modules": ["q_proj"]}, True),
    "number": ({"max_loras": 8, "max_cpu_loras": 9}, False),
}


@pytest.mark.parametrize("change", ADAPTERS)
def test_adapters_settings_are_theirs_alone(change: str, model: str) -> None:
    """Eager, as vLLM's CPU platform compiles nothing with LoRA on."""
    settings, counts = ADAPTERS[change]
    without = configured(model, enforce_eager=True)
    usual = configured(model, enforce_eager=True, enable_lora=True)
    changed = configured(model, enforce_eager=True, enable_lora=True, **settings)
    assert fields.ingredients(without) == fields.ingredients(usual) == fields.ingredients(changed)
    assert fields.adapter_ingredients(without) == {}
    differ = fields.adapter_ingredients(changed) != fields.adapter_ingredients(usual)
    assert differ is counts


def test_order_of_adapters_modules_does_not_count(model: str) -> None:
    def of(*modules: str) -> dict[str, str]:
        config = configured(model, enable_lora=True, lora_target_modules=list(modules))
        return fields.adapter_ingredients(config)

    assert of("q_proj", "v_proj") == of("v_proj", "q_proj")


VARIABLES: dict[str, tuple[str, bool]] = {
    "VLLM_BATCH_INVARIANT": ("1", True),
    "VLLM_FLOAT32_MATMUL_PRECISION": ("high", True),
    "VLLM_USE_DEEP_GEMM": ("0", True),
    "VLLM_DISABLED_KERNELS": ("MarlinLinearKernel", True),
    "VLLM_VIDEO_LOADER_BACKEND": ("opencv_dynamic", True),
    "VLLM_HUMMING_ONLINE_QUANT_CONFIG": ('{"b": 1, "a": 2}', True),
    "ONEDNN_DEFAULT_FPMATH_MODE": ("BF16", True),
    "VLLM_USE_DEEP_GEMM_E8M0": ("1", False),  # the default
    "VLLM_ROCM_USE_AITER_MHA": ("True", False),  # the default
    "VLLM_LOGGING_LEVEL": ("DEBUG", False),
    "VLLM_CPU_OMP_THREADS_BIND": ("0-1", False),
    "VLLM_CACHE_ROOT": ("/tmp/elsewhere", False),
    "VLLM_API_KEY": ("secret", False),
    "VLLM_LORA_ENABLE_DUAL_STREAM": ("1", False),  # the adapters' alone
}


@pytest.mark.parametrize("name", VARIABLES)
def test_variables(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = fields.environment()
    value, counts = VARIABLES[name]
    monkeypatch.setenv(name, value)
    assert (fields.environment() != before) is counts
    assert (fields.environment().get(name) is not None) is counts


def test_tuned_kernels_count_by_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def taken(folder: str, settings: str) -> str:
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "E=8.json").write_text(settings)
        monkeypatch.setenv("VLLM_TUNED_CONFIG_FOLDER", str(tmp_path / folder))
        return fields.environment()["VLLM_TUNED_CONFIG_FOLDER"]

    assert taken("here", "{}") == taken("there", "{}")
    assert taken("here", "{}") != taken("there", '{"BLOCK_SIZE_M": 16}')


def test_an_unknown_variable_counts_where_it_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    new: dict[str, Callable[[], Any]] = {"VLLM_NEW": lambda: os.getenv("VLLM_NEW", "slow")}
    monkeypatch.delenv("VLLM_NEW", raising=False)
    monkeypatch.setattr(envs, "environment_variables", {**envs.environment_variables, **new})
    before = fields.environment()
    monkeypatch.setenv("VLLM_NEW", "slow")
    assert fields.environment() == before
    monkeypatch.setenv("VLLM_NEW", "quick")
    assert fields.environment()["VLLM_NEW"] == "quick"


def extended(config: Any, **new: Any) -> Any:
    """The configuration with fields that vLLM does not have yet."""
    kind = dataclasses.make_dataclass(
        type(config).__name__, [(name, Any, None) for name in new], bases=(type(config),)
    )
    twin = copy.copy(config)
    twin.__class__ = kind
    twin.__dict__.update(new)
    return twin


def test_an_unknown_field_counts_by_its_value(model: str, plain: dict[str, str]) -> None:
    config = configured(model)
    config.cache_config = extended(config.cache_config, rotate_keys=None)
    assert fields.ingredients(config) == plain
    config.cache_config.rotate_keys = {"by": torch.float16, "on": {"v", "k"}}
    found = fields.ingredients(config)
    assert found.pop("CacheConfig.rotate_keys") == '{"by": "torch.float16", "on": ["k", "v"]}'
    assert found == plain


def test_an_unknown_value_without_stable_text_counts_by_its_type(model: str) -> None:
    config = configured(model)
    config.cache_config = extended(config.cache_config, handle=SimpleNamespace())
    assert fields.ingredients(config)["CacheConfig.handle"] == "types.SimpleNamespace"


def test_an_unknown_configuration_counts(model: str, plain: dict[str, str]) -> None:
    @dataclasses.dataclass
    class SteeringConfig:
        strength: float

    config = extended(configured(model), steering_config=SteeringConfig(0.5))
    found = fields.ingredients(config)
    assert found.pop("VllmConfig.steering_config") == '{"SteeringConfig": {"strength": 0.5}}'
    assert found == plain


class Colour(enum.IntEnum):
    RED = 1


@dataclasses.dataclass
class Loop:
    itself: Any = None


def test_canonical_text() -> None:
    loop = Loop()
    loop.itself = loop
    expected = {
        Colour.RED: "RED",
        torch.bfloat16: "torch.bfloat16",
        torch.device("cuda:3"): "cuda",
        frozenset({"b", "a"}): '["a", "b"]',
        json.dumps: "json.dumps",
        None: "null",
        "auto": "auto",
        b"\x01": "01",
    }
    assert {value: fields.canonical(value) for value in expected} == expected
    assert fields.canonical({"b": 1, "a": (True, 1.5)}) == '{"a": [true, 1.5], "b": 1}'
    assert fields.canonical(loop) == f"{__name__}.Loop"
    assert fields.canonical(object()) == "builtins.object"


def hashed(config: Any) -> set[str]:
    """The fields by which vLLM's own hash of a configuration differs."""
    before = config.compute_hash()
    found = set()
    for field in dataclasses.fields(config):
        twin = copy.copy(config)
        twin.__dict__[field.name] = "\0another"
        try:
            differs = twin.compute_hash() != before
        except (AttributeError, KeyError, TypeError, ValueError):
            differs = True
        if differs:
            found.add(field.name)
    return found


def parts_of(config: Any) -> Iterator[Any]:
    yield config
    for field in dataclasses.fields(config):
        part = getattr(config, field.name, None)
        if type(part).__name__ in REACHED:
            yield from parts_of(part)


def test_what_vllm_hashes_counts_or_has_a_reason(model: str, hearing: str) -> None:
    """A configuration without hash of its own is hashed by the one that holds it."""
    known = {name for some in fields.HASHED_ALL_THE_SAME.values() for name in some}
    checked, unexplained = set(), set()
    adapters = {"enable_lora": True, "speculative_config": NGRAM}
    for root in (configured(model, **adapters), configured(hearing)):
        by_holder: dict[str, set[str]] = {}
        for config in parts_of(root):
            name = type(config).__name__
            own = hashed(config) if hasattr(config, "compute_hash") else by_holder.get(name, set())
            for field in own:
                held = getattr(config, field, None)
                if dataclasses.is_dataclass(held) and not hasattr(held, "compute_hash"):
                    by_holder[type(held).__name__] = {f.name for f in dataclasses.fields(held)}
                fate = fields.decisions(name).get(field, fields.UNKNOWN).fate
                if fate is Fate.NO_EFFECT and f"{name}.{field}" not in known:
                    unexplained.add(f"{name}.{field}")
            checked.add(name)
    assert {"AttentionConfig", "CompilationConfig", "EPLBConfig", "LoRAConfig"} <= checked
    assert not unexplained, (
        f"vLLM holds that these change computation: {sorted(unexplained)}. Put them into the "
        "namespace, or the reason into hashed_all_the_same in fields.toml"
    )


def test_reasons_are_given_for_fields_that_have_no_effect() -> None:
    for names in fields.HASHED_ALL_THE_SAME.values():
        for name in names:
            config, _, field = name.partition(".")
            assert fields.decisions(config)[field].fate is Fate.NO_EFFECT, name


def test_unrepeatable(model: str, hearing: str) -> None:
    assert fields.unrepeatable(configured(model)) == ""
    assert fields.unrepeatable(configured(hearing)) == ""
    training = configured(model, weight_transfer_config={"backend": "nccl"})
    assert "weight_transfer_config" in fields.unrepeatable(training)
    assert "weight_transfer_config" in json.dumps(fields.ingredients(training))
    dynamic = configured(hearing)
    dynamic.model_config.multimodal_config.mm_encoder_attn_dtype = "fp8"
    assert "fp8" in fields.unrepeatable(dynamic)


ON_H100: dict[str, dict[str, Any]] = {
    "plain": {},
    "requests": {"max_num_seqs": 4},
    "tokens": {"max_num_batched_tokens": 1234},
    "length": {"max_model_len": 300000, "hf_overrides": {"max_position_embeddings": 400000}},
    "memory": {"gpu_memory_utilization": 0.5, "kv_offloading_size": 1.0},
    "sizes": {"cudagraph_capture_sizes": [1, 2, 4]},
    "ranges": {"compilation_config": {"compile_ranges_endpoints": [100], "compile_sizes": [1]}},
    "n-gram": {"speculative_config": NGRAM},
    "adapters": {"enable_lora": True},
    "two nodes": {"nnodes": 2, "data_parallel_size": 2, "node_rank": 0},
}
"""That vLLM derives other sizes from them is what makes them worth a test."""


@pytest.mark.long
def test_no_limit_leaks_where_graphs_are_captured(model: str) -> None:
    different = {"eager": {"enforce_eager": True}, "backend": {"attention_backend": "FLASH_ATTN"}}
    script = str(Path(__file__).with_name("as_h100.py"))
    done = subprocess.run(
        [sys.executable, script, model, json.dumps(ON_H100 | different)],
        env=os.environ | {"VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_LOGGING_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout[done.stdout.index('{"plain"') :])
    plain = found["plain"]
    for name in ON_H100:
        assert found[name]["ingredients"] == plain["ingredients"], name
    for name in ("requests", "tokens", "length", "sizes", "ranges", "n-gram"):
        assert found[name]["derived"] != plain["derived"], name
    for name in different:
        assert found[name]["ingredients"] != plain["ingredients"], name
