"""`kvrecall bench generate`: every mode is told as it is meant, and its figures are correct."""

from __future__ import annotations

from typing import Any

import pytest
from lab_commands import figures_of

from kvrecall.attention.settings import RetrievalSettings
from kvrecall.errors import ConfigError, EngineError
from kvrecall_lab.bench import generate
from kvrecall_lab.bench.generate import MODES


@pytest.mark.parametrize("context", [4096, 32768, 65536, 131072])
@pytest.mark.parametrize("name", [name for name, mode in MODES.items() if mode.retrieval])
def test_a_mode_of_retrieval_acts_at_every_length(name: str, context: int) -> None:
    variables = MODES[name].variables(name, context, 0.1)
    assert variables.pop("VLLM_PLUGINS") == "retrieval,waits"
    settings = RetrievalSettings.from_environ(variables)
    assert settings.topk_share == 0.1
    regime = settings.regime(context + 1, context)
    assert regime.value != "dense"
    if name == "offloaded":
        assert "off the device" in regime.value
    if context > 32768:
        assert (settings.init_tokens, settings.local_tokens) == (1024, 7192)


def test_times_are_compared_round_by_round() -> None:
    def turn(seconds: float, tokens: int) -> list[dict[str, Any]]:
        return [{"seconds": seconds, "tokens": tokens}] * 3

    dense = [turn(1.0, 1), turn(4.0, 1), turn(1.0, 1)]
    other = [turn(1.0, 2), turn(4.0, 2), turn(0.5, 2)]
    assert generate._times(other, dense, "seconds") == 2.0
    assert generate._times(dense, dense, "seconds") == 1.0


def test_what_another_share_of_attention_would_gain() -> None:
    def turn(attention: float, rest: float, tokens: int = 1) -> list[dict[str, Any]]:
        seconds = {"seconds": attention + rest, "attention_seconds": attention}
        return [{**seconds, "tokens": tokens}] * 3

    dense = [turn(1.0, 1.0), turn(8.0, 8.0), turn(2.0, 2.0)]
    faster = [turn(0.25, 1.0), turn(2.0, 8.0), turn(0.5, 2.0)]
    assert generate._times_at(2 / 3, dense, dense) == 1.0
    assert generate._times_at(0.5, faster, dense) == generate._times(faster, dense, "seconds")
    assert generate._times_at(2 / 3, faster, dense) == 2.0
    # A step of three sequences, whose rest takes twice as long.
    three = [turn(0.75, 2.0, 3), turn(6.0, 16.0, 3), turn(1.5, 4.0, 3)]
    assert generate._times_at(2 / 3, three, dense) == round(3 / (0.5 + 2 / 3), 3)
    unknown = [[{"seconds": 1.0, "attention_seconds": None, "tokens": 1}]] * 3
    assert generate._times_at(2 / 3, unknown, dense) is None


def test_figures_of_an_engine_that_did_something_else_are_refused() -> None:
    idle = {"blocks_in_place": 0, "blocks_selected": 0, "sequences_gated": 0}
    generate._check("dense", idle)
    generate._check("retrieval", {**idle, "sequences_gated": 3})
    with pytest.raises(EngineError, match="retrieval: retrieval did not act"):
        generate._check("retrieval", idle)
    with pytest.raises(EngineError, match="no block was read in the arena"):
        generate._check("offloaded", {**idle, "blocks_selected": 5})


def test_unknown_words_are_refused() -> None:
    for options, said in (
        ({"modes": "fast"}, "--modes: 'fast' is not one of dense, "),
        ({"sequences": "0"}, "--sequences: '0' is not a number"),
        ({"model": "models/absent"}, "models/absent"),
    ):
        with pytest.raises(ConfigError, match=said):
            generate.measure_generate(**options)


def test_what_memory_has_no_room_for_is_left_out() -> None:
    with pytest.raises(ConfigError, match="1000000 sequences of 65,536 tokens: two engines need"):
        generate.measure_generate("small", sequences="1000000")


@pytest.mark.engine
@pytest.mark.long
def test_engines_of_every_mode() -> None:
    """Two sequences of 8,192 tokens, on device caches that hold one."""
    words = "--model models/recall-tiny --context 8K --sequences 1,2 --fits 1 --rounds 1 --steps 4"
    figures = figures_of("generate", *words.split())
    rows = figures["rows"]
    assert figures["offload_tokens_s"] == rows[3]["tokens_per_s"]
    found = {(one["mode"], one["sequences"]): one for one in rows}
    assert len(found) == len(rows) == 2 * len(MODES)
    at_once = {name: found[name, 2]["at_once"] for name in MODES}
    assert at_once == {
        "dense": 1, "dense-pool": 1, "retrieval": 1, "offloaded": 2, "retrievalkv": 2
    }  # fmt: skip
    for (name, count), one in found.items():
        assert one["device_cache_bytes"] == found["dense", 1]["device_cache_bytes"]
        sparse = MODES[name].retrieval
        assert (one["blocks_read_share"] < 0.6) == sparse, (name, count)
        assert sparse or one["blocks_read_share"] == 1.0
        off = name in ("offloaded", "retrievalkv")
        assert (one["blocks_in_place"] > 0) == off
        least = 0.6 * found["dense", 1]["peak_device_bytes"]
        assert (one["peak_device_bytes"] < least) == off, (name, count)
        assert 0 < one["attention_share"] < 1
        assert one["tokens_per_s"] > 0
    assert found["dense", 1]["loaded_bytes"] == 0
    assert found["dense-pool", 1]["loaded_bytes"] == 63 * 128 * 2048
    assert 0 < found["offloaded", 1]["loaded_bytes"] < found["dense-pool", 1]["loaded_bytes"] / 2
