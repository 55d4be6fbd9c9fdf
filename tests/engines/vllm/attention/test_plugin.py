"""Where the settings of retrieval come from in vLLM, and whether its plug-in acts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvrecall.attention.settings import RetrievalSettings
from kvrecall.engines.vllm.attention.plugin import (
    ask,
    is_requested,
    register,
    require_on,
    settings_of,
)
from kvrecall.errors import ConfigError


def engine(extra: object) -> SimpleNamespace:
    return SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra))


def test_the_same_in_the_connectors_extra_config() -> None:
    raw = {"init_tokens_num": 1, "topk_percent": 1, "digest": "mean", "gate": False}
    got = settings_of(engine({"retrieval": raw}), {})
    assert got == RetrievalSettings(init_tokens=1, topk_share=1.0, digest="mean", gate=False)
    environ = {"VLLM_RETRIEVAL_DIGEST": "mean"}
    for extra in ({}, {"retrieval": {}}):
        assert settings_of(engine(extra), environ) == RetrievalSettings(digest="mean")


@pytest.mark.parametrize(
    ("raw", "named"),
    [
        ({"topk": 1}, r"retrieval\.topk is not a setting; known: .*retrieval\.topk_percent"),
        ({"gate": 1}, r"retrieval\.gate is 1; it must be true or false"),
        ({"init_tokens_num": True}, r"init_tokens_num is True; it must be a whole number"),
        ({"topk_percent": 20}, "TOPK_PERCENT is 20"),
        ({"digest_tokens": 8}, "set both in kv_connector_extra_config and by VLLM_RETRIEVAL_GATE"),
        (3, "it must be a mapping"),
    ],
)
def test_what_is_wrong_in_the_extra_config_is_named(raw: object, named: str) -> None:
    environ = {"VLLM_RETRIEVAL_GATE": "1"} if "both" in named else {}
    with pytest.raises(ConfigError, match=named):
        settings_of(engine({"retrieval": raw}), environ)


def test_settings_of_what_is_off_are_refused() -> None:
    config = engine({"retrieval": {}})
    require_on(config, {"VLLM_PLUGINS": "retrieval"})
    require_on(engine({}), {})
    with pytest.raises(ConfigError, match="VLLM_PLUGINS=retrieval"):
        require_on(config, {})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"TOPK_PERCENT": "0.1"}, "have no effect: VLLM_RETRIEVAL_TOPK_PERCENT;"),
        ({"MODE": "x", "GATE": "1"}, "have no effect: VLLM_RETRIEVAL_GATE, VLLM_RETRIEVAL_MODE;"),
        ({}, ""),
    ],
)
def test_variables_without_the_plugin_are_told(
    given: dict[str, str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """vLLM calls every plug-in while VLLM_PLUGINS is unset."""
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    for name, text in given.items():
        monkeypatch.setenv(f"VLLM_RETRIEVAL_{name}", text)
    register()
    told = [record.getMessage() for record in caplog.records if record.name == "vllm.kvrecall"]
    assert len(told) == bool(said)
    assert said in "".join(told)


@pytest.mark.parametrize(
    ("plugins", "then"),
    [(None, None), ("", "retrieval"), ("a,b", "a,b,retrieval"), ("retrieval", "retrieval")],
)
def test_asking_leaves_other_plugins_alone(plugins: str | None, then: str | None) -> None:
    environ = {} if plugins is None else {"VLLM_PLUGINS": plugins}
    ask(environ)
    assert is_requested(environ)
    assert environ.get("VLLM_PLUGINS") == then


@pytest.mark.parametrize(
    ("plugins", "on"),
    [
        (None, False),
        ("", False),
        ("ascend,retrieval", True),
        (" retrieval ", True),
        ("retrievals", False),
    ],
)
def test_the_plugin_acts_only_if_named(plugins: str | None, on: bool) -> None:
    assert is_requested({} if plugins is None else {"VLLM_PLUGINS": plugins}) is on
