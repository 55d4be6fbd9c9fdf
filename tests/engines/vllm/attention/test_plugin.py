"""Where the settings of retrieval come from in vLLM, and whether its plug-in acts."""

from __future__ import annotations

import pytest

from kvrecall.engines.vllm.attention.plugin import ask, is_requested, register


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
