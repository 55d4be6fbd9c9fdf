"""`kvrecall bench crowd`, small: both engines run, and what it says of them is so."""

from __future__ import annotations

import pytest

from kvrecall.bench.crowd import Gathering, measure_crowd

pytestmark = pytest.mark.engine


def test_prompts_in_the_pool_decode_together_off_the_device() -> None:
    report = measure_crowd(Gathering(16_384, 3, 6, dense_fits=1, pooled=True), lambda text: None)
    told = report.figures
    assert told["at_once"]["dense"] == 1
    assert told["at_once"]["offload"] == 3
    assert told["prefix_bytes"]["offload"] > told["prefix_bytes"]["dense"], "digests beside KV"
    assert told["bytes_at_hit"]["dense"] >= told["prefix_bytes"]["dense"]
    assert told["bytes_at_hit"]["offload"] < told["prefix_bytes"]["offload"] / 2
