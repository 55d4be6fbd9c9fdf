"""What the connector costs a step of vLLM's scheduler."""

from __future__ import annotations

from typing import Any

from kvrecall_lab.bench.step import measure_step


def test_step_figures() -> None:
    figures: Any = measure_step("3", block_size=16, steps=32).figures
    assert figures["sequences"] == 3
    assert figures["us_a_step"] > 0
    assert figures["us"]["n"] == 32
    assert figures["parts_us"]["build_connector_meta"] > 0
    assert figures["blocks_saved"] == 2 * 3  # each sequence passes two ends in 32 tokens
