"""`kvrecall bench crowd`, small: both engines run, and its figures are correct."""

from __future__ import annotations

import pytest

from .commands import figures_of

pytestmark = [pytest.mark.engine, pytest.mark.long]


def test_prompts_in_the_pool_decode_together_off_the_device() -> None:
    words = "--context 16384 --sequences 3 --decoded 6 --dense-fits 1 --pooled"
    figures = figures_of("crowd", *words.split())
    assert figures["at_once"]["dense"] == 1
    assert figures["at_once"]["offload"] == 3
    assert figures["prefix_bytes"]["offload"] > figures["prefix_bytes"]["dense"], (
        "digests beside KV"
    )
    assert figures["bytes_at_hit"]["dense"] >= figures["prefix_bytes"]["dense"]
    assert figures["bytes_at_hit"]["offload"] < figures["prefix_bytes"]["offload"] / 2
