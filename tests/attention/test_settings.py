"""Settings, regimes, and how a sequence is split."""

from __future__ import annotations

import hypothesis
import pytest
from hypothesis import strategies as st

from kvrecall.attention.selection import split_of
from kvrecall.attention.settings import MODES, Regime, RetrievalSettings
from kvrecall.errors import ConfigError


@pytest.mark.parametrize(
    ("mode", "own"), [("default", (128, 1024, 0.05)), ("retrievalkv", (1024, 7192, 0.2))]
)
def test_defaults(mode: str, own: tuple[int, int, float]) -> None:
    settings = RetrievalSettings.from_environ({"PATH": "/bin", "VLLM_RETRIEVAL_MODE": mode})
    assert (settings.init_tokens, settings.local_tokens, settings.topk_share) == own
    assert (settings.dense_boundary, settings.offload_boundary) == (32768, 65536)
    assert mode != "default" or settings == RetrievalSettings()


def test_every_variable_is_read() -> None:
    given = (
        "INIT_TOKENS_NUM=1 LOCAL_TOKENS_NUM=2 TOPK_PERCENT=0.5 DENSE_BOUNDARY=32K "
        "OFFLOAD_BOUNDARY=64k DIGEST=mean DIGEST_TOKENS=32 DENSE_LAYERS=0 GATE=off "
        "CACHE_PERCENT=0.1 LEAST_BLOCKS=3 INDEX=faiss-flat MODE=default"
    )  # 32K as the seed writes it, 64k as vLLM reads it
    environ = dict(f"VLLM_RETRIEVAL_{each}".split("=") for each in given.split())
    assert RetrievalSettings.from_environ(environ) == RetrievalSettings(
        1, 2, 0.5, 32768, 64000, "mean", 32, 0, False, 0.1, 3, "faiss-flat", "default"
    )


def test_the_reference_mode_is_the_documents() -> None:
    settings = RetrievalSettings.from_environ(
        {"VLLM_RETRIEVAL_MODE": "retrievalkv", "VLLM_RETRIEVAL_TOPK_PERCENT": "0.1"}
    )
    assert (settings.init_tokens, settings.local_tokens, settings.topk_share) == (1024, 7192, 0.1)
    assert (settings.dense_layers, settings.fewest_blocks, settings.gate) == (0, 1, False)
    layout = settings.layout(128)
    assert (layout.kind.name, layout.rows, layout.coarse) == ("mean", 1, 0)


@pytest.mark.parametrize(
    "name", ["DIGEST", "DIGEST_TOKENS", "DENSE_LAYERS", "GATE", "LEAST_BLOCKS"]
)
def test_what_the_reference_mode_fixes_is_refused_beside_it(name: str) -> None:
    given = {"DIGEST": "mean", "GATE": "0"}.get(name, "1")
    environ = {"VLLM_RETRIEVAL_MODE": "retrievalkv", f"VLLM_RETRIEVAL_{name}": given}
    with pytest.raises(ConfigError, match=f"VLLM_RETRIEVAL_{name} .*MODE=retrievalkv"):
        RetrievalSettings.from_environ(environ)


@pytest.mark.parametrize(
    "given",
    (
        "INIT_TOKENS_NUM=-1 INIT_TOKENS_NUM=1x LOCAL_TOKENS_NUM=0 TOPK_PERCENT=20 TOPK_PERCENT=0 "
        "TOPK_PERCENT=nan OFFLOAD_BOUNDARY=100 DIGEST=median GATE=maybe CACHE_PERCENT=2 "
        "LEAST_BLOCKS=-1 TOP_K=1 DIGEST_TOKENS=1e9 TOPK_PERCENT=20% TOPK_PERCENT=inf GATE= INDEX= "
        "MODE=RetrievalKV"
    ).split(),
)
def test_what_is_wrong_is_named(given: str) -> None:
    name, text = given.split("=")
    with pytest.raises(ConfigError, match=f"VLLM_RETRIEVAL_{name}"):
        RetrievalSettings.from_environ({f"VLLM_RETRIEVAL_{name}": text})


@pytest.mark.parametrize("around", [" {}", "{}\t", "  {}  "])
def test_spaces_around_a_value_mean_nothing(around: str) -> None:
    given = {"GATE": "on", "INIT_TOKENS_NUM": "7", "DIGEST": "mean", "TOPK_PERCENT": "1e-3"}
    environ = {f"VLLM_RETRIEVAL_{name}": around.format(text) for name, text in given.items()}
    wanted = RetrievalSettings(init_tokens=7, topk_share=0.001, digest="mean", gate=True)
    assert RetrievalSettings.from_environ(environ) == wanted


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("boundary", [1, 255, 256, 257, 1000])
def test_exact_blocks_are_those_that_no_step_decodes_sparsely(mode: str, boundary: int) -> None:
    """The pool compares them with what another engine has computed in a prompt."""
    settings = RetrievalSettings(dense_boundary=boundary, offload_boundary=2000, mode=mode)
    exact, decoded_sparsely = settings.exact_blocks(128), set()
    for prompt in range(1, 1200):
        for tokens in (prompt + 1, boundary, boundary + 1):  # a decoded one is the last of them
            if tokens > prompt and settings.regime(tokens, prompt) is not Regime.DENSE:
                decoded_sparsely.add((tokens - 1) // 128)
    assert exact == max(1, min(decoded_sparsely))


@hypothesis.settings(deadline=None)
@hypothesis.given(
    tokens=st.integers(1, 5000),
    block=st.sampled_from([1, 16, 128]),
    init=st.integers(0, 3000),
    local=st.integers(1, 3000),
    share=st.floats(0.001, 1),
    least=st.integers(1, 20),
)
def test_init_and_local_tokens_always_take_part(
    tokens: int, block: int, init: int, local: int, share: float, least: int
) -> None:
    settings = RetrievalSettings(
        init_tokens=init, local_tokens=local, topk_share=share, least_blocks=least
    )
    split = split_of(tokens, block, settings)
    assert split.blocks == -(-tokens // block)
    assert split.init * block >= min(init, tokens)
    assert split.local * block <= max(tokens - local, split.init * block)
    assert 0 <= split.init <= split.local <= split.blocks
    assert split.middle * share <= split.chosen <= split.middle
    assert split.chosen >= min(least, split.middle)
    assert 1 <= split.last_tokens <= block
    if split.middle:
        assert split.local < split.blocks
        assert split.attended_tokens <= tokens
    if split.chosen == split.middle:
        assert split.attended_tokens == tokens
