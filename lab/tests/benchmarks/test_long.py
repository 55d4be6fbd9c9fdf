"""``python -m kvrecall_lab.bench long`` at a small scale."""

from __future__ import annotations

from typing import Any

import pytest

from kvrecall.gpu_check.servers import SCALED
from kvrecall_lab.bench.long import measure_long

pytestmark = [pytest.mark.engine, pytest.mark.longest]


def test_a_sequence_is_longer_than_the_device_cache() -> None:
    settings = {**SCALED, "VLLM_RETRIEVAL_OFFLOAD_BOUNDARY": "2048"}
    figures: Any = measure_long("16K", 8, 3, device=0.06, dense=False, **settings).figures
    assert figures["device_share"] < 0.06
    assert figures["tokens_read"] == pytest.approx(128 * (4 + 125 / 10), abs=300)
    record = 128 * 3 * 2 * 64 * 2  # a block's KV
    assert 3 * record < figures["loaded_mib"] * 2**20 < 6 * record
    assert figures["disk_first_s"] > 0
