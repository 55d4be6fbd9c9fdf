"""Every configuration that transformers and vLLM know, and what a stranger's config.json may hold:
each check and estimate gives an answer or a refusal in one line. No engine is started."""

from __future__ import annotations

import copy
import importlib
import inspect
import json
import logging
import pkgutil
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace as Made
from typing import Any

import pytest
import vllm.transformers_utils.configs as vllm_configs
from transformers import CONFIG_MAPPING, PretrainedConfig

from kvrecall.attention.settings import RetrievalSettings
from kvrecall.config import RecallSettings
from kvrecall.doctor.cli import examine
from kvrecall.engines.vllm.attention.checks import offload_hindrance, require_engine
from kvrecall.engines.vllm.compat.config import prompt_token_work
from kvrecall.engines.vllm.identity.namespace import config_text
from kvrecall.errors import KvrecallError
from kvrecall.modelconfig import Fields, read_fields
from kvrecall.plan.cli import summary_of
from kvrecall.plan.layers import read_layers
from kvrecall.plan.model import read_shape
from kvrecall.plan.sizing import Site, Use, break_even, links_of, tiers_of
from kvrecall.server.servable import Asked, Machine, fields_of, refusals

CASES = 500  # configurations with values that do not belong there
VALUES: tuple[object, ...] = (
    None, 0, -1, 1, 3, 2.5, "", "text", True, [], [None], [0], [1, 2, 3], [[1]], {}, {"a": 1},
    ["full_attention"] * 3, ["linear_attention", None], {"text_config": {"hidden_size": []}},
    10**9, 10**400, float("inf"), float("nan"),
)  # fmt: skip
READ = (
    "hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim layer_types "
    "intermediate_size moe_intermediate_size num_experts num_experts_per_tok sliding_window "
    "kv_lora_rank index_topk index_head_dim linear_attn_config linear_num_value_heads "
    "attn_type_list mamba_n_heads mamba_d_head mamba_n_groups mamba_d_state mamba_d_conv "
    "conv_L_cache model_type "
    "architectures text_config thinker_config per_layer_config dtype max_position_embeddings "
    "vocab_size num_kv_shared_layers full_attention_interval attn_layer_period attn_layer_indices "
    "no_rope_layers mlp_only_layers expert_layer_period hybrid_override_pattern is_encoder_decoder"
).split()
PROCESSORS = (Machine(False), Machine(True), Machine(True, frozenset({"amx_tile"})))
ASKED = (Asked(), Asked(retrieval=True, kv_cache_dtype="fp8", step_tokens=64))


def made() -> Iterator[tuple[str, PretrainedConfig]]:
    """Every configuration class that can be made without arguments and packages."""
    kinds: dict[str, Callable[[], PretrainedConfig]] = {}
    for name in CONFIG_MAPPING:
        kinds[name] = CONFIG_MAPPING[name]
    for found in pkgutil.iter_modules(vllm_configs.__path__):
        module = importlib.import_module(f"{vllm_configs.__name__}.{found.name}")
        for name, kind in inspect.getmembers(module, inspect.isclass):
            if issubclass(kind, PretrainedConfig) and kind.__module__ == module.__name__:
                kinds[f"vllm {name}"] = kind
    for name, kind in kinds.items():
        try:
            yield name, kind()
        except Exception:  # noqa: BLE001 - it needs arguments, a package, the network
            continue


@pytest.fixture(scope="module")
def families() -> dict[str, PretrainedConfig]:
    logging.disable(logging.WARNING)  # some of them complain about their own defaults
    found = dict(made())
    logging.disable(logging.NOTSET)
    assert len(found) > 500
    return found


def plan(folder: Path) -> None:
    """What ``kvrecall plan`` computes."""
    shape = read_shape(folder)
    for ranks in (1, 8, 64):
        site, use = Site(9, 8, ranks, 80 << 30, 0.9, 1 << 40, 1 << 42, 1 << 44), Use(8192, 9, 128)
        links = links_of(4, True)
        tiers = tiers_of(shape, site, use, links)
        summary_of(shape, site, use, links, tiers, break_even(shape, use, 1000.0))


def judged(folder: Path) -> None:
    for machine in PROCESSORS:
        for asked in ASKED:
            list(refusals(fields_of(str(folder)), machine, True, asked))


def doctor(folder: Path) -> None:
    """Which reports its own exceptions as a finding."""
    from kvrecall.doctor.model import check_layout

    settings = RecallSettings.from_mapping({"disk_path": "/tmp/none", "disk_size": "1GiB"})
    list(check_layout(str(folder), settings))


def started(config: PretrainedConfig) -> None:
    """What the connector and retrieval attention read of a configuration when an engine starts."""
    text = config.get_text_config()
    model = Made(
        hf_config=config,
        hf_text_config=text,
        max_model_len=4096,
        get_total_num_hidden_layers=lambda: 4,
    )
    parallel = Made(tensor_parallel_size=1, pipeline_parallel_size=1)
    engine = Made(
        model_config=model,
        parallel_config=parallel,
        cache_config=Made(cache_dtype="auto"),
        speculative_config=None,
        scheduler_config=Made(disable_hybrid_kv_cache_manager=False),
        kv_transfer_config=Made(kv_connector="RecallConnector"),
    )
    flops, width = prompt_token_work(engine)
    assert flops >= 0
    assert width >= 0
    json.loads(config_text(config))
    offload_hindrance(engine)
    require_engine(engine, RetrievalSettings())


def answers(name: object, check: Callable[[Any], None], subject: object) -> None:
    """Fails the test unless the check answers, or refuses in one line."""
    try:
        check(subject)
    except KvrecallError as refusal:
        if "\n" in str(refusal):
            raise AssertionError(f"{check.__name__} of {name} says {refusal}") from refusal
    except Exception as error:
        raise AssertionError(f"{check.__name__} of {name} ends in {error!r}") from error


def test_every_family_is_answered(
    families: dict[str, PretrainedConfig], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name, config in families.items():
        (tmp_path / "config.json").write_text(json.dumps(config.to_dict(), default=str))
        for check in (plan, judged, doctor):
            answers(name, check, tmp_path)
        answers(name, started, config)
    assert "is left out" not in caplog.text, "no nicety had to be left out"


def test_what_a_stranger_may_write_is_answered(
    families: dict[str, PretrainedConfig], tmp_path: Path
) -> None:
    """By a fixed seed: up to six values that do not belong where they are, or are missing."""
    dice = random.Random(3)
    names = sorted(families)
    for _ in range(CASES):
        name = dice.choice(names)
        config = json.loads(json.dumps(families[name].to_dict(), default=str))
        changes = []
        for _ in range(dice.choice((1, 1, 2, 6))):
            inner = [part for part in config.values() if isinstance(part, dict)]
            where = dice.choice([config, config, *inner])
            key = dice.choice(READ)
            where[key] = copy.deepcopy(dice.choice(VALUES))
            if dice.random() < 0.2:
                del where[key]
            changes.append((key, where.get(key, "missing")))
        (tmp_path / "config.json").write_text(json.dumps(config))
        for check in (plan, judged, doctor):
            answers((name, changes), check, tmp_path)


def test_fields_by_layer() -> None:
    fields = Fields({"num_hidden_layers": 3, "intermediate_size": [16, 32, 36]}, "x")
    assert fields.number("intermediate_size") == 28
    assert fields.of_layer(1).number("intermediate_size") == 32
    over = {"per_layer_config": {"02": {"intermediate_size": 5}}, "num_hidden_layers": 3}
    fields = Fields({**over, "intermediate_size": 7}, "x")
    assert [fields.of_layer(at).number("intermediate_size") for at in range(3)] == [7, 7, 5]
    omni = {"thinker_config": {"text_config": {"hidden_size": 8}}, "hidden_size": 4}
    assert Fields(omni, "x").number("hidden_size") == 8


def test_numbers_that_json_does_not_have_are_read(tmp_path: Path) -> None:
    """As transformers writes them, into ``time_step_limit`` of Mamba-2, for example."""
    (tmp_path / "config.json").write_text('{"hidden_size": 8, "limit": [0.0, Infinity]}')
    assert read_fields(tmp_path)[0].number("hidden_size") == 8


def test_the_largest_families_with_values_by_layer(families: dict[str, PretrainedConfig]) -> None:
    for name in ("gemma3n", "gemma4"):
        config = families[name]
        flops, width = prompt_token_work(
            Made(
                model_config=Made(hf_text_config=config.get_text_config()),
                parallel_config=Made(tensor_parallel_size=1, pipeline_parallel_size=1),
            )
        )
        assert width == config.get_text_config().hidden_size
        assert 1e9 < flops < 1e11
    heads = {
        (cache.kind.value, cache.head_bytes)
        for layer in read_layers(Fields(families["gemma4"].to_dict(), "x"), "auto")
        for cache in layer.caches
    }
    assert heads == {("window", 1024), ("full", 2048)}, "its full layers have larger heads"


def test_minimax_m2_has_full_attention_in_every_layer(
    families: dict[str, PretrainedConfig],
) -> None:
    config = {**families["minimax_m2"].to_dict(), "attn_type_list": [1] * 62}
    layers = read_layers(Fields(config, "x"), "auto")
    assert {cache.kind.value for layer in layers for cache in layer.caches} == {"full"}
    config["attn_type_list"][5] = 0
    with pytest.raises(KvrecallError, match="size is not known here"):
        read_layers(Fields(config, "x"), "auto")


def test_a_check_of_the_doctor_that_fails_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks() -> Iterator[Any]:
        yield from ()
        raise ZeroDivisionError("of nothing")

    monkeypatch.setattr("kvrecall.doctor.cli.check_machine", breaks)
    found = [each for each in examine(imports=False) if each.area == "doctor"]
    assert [each.found for each in found] == [
        "the check itself failed: ZeroDivisionError: of nothing"
    ]
