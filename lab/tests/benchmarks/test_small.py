"""Benchmarks without servers, at a small scale."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvrecall.errors import KvrecallError
from kvrecall.gpu_check.servers import SCALED
from kvrecall_lab.bench.decode import measure_decode
from kvrecall_lab.bench.index import measure_index
from kvrecall_lab.bench.long import measure_long
from kvrecall_lab.bench.step import measure_step

SMALL: dict[str, Any] = {"rounds": 1, "local": 256, "init_tokens": 128, "least_blocks": 1}


def test_decode_figures() -> None:
    figures: Any = measure_decode("4K", **SMALL).figures
    assert figures["active"]
    assert figures["dense_ms"] > 0
    assert figures["attention_ratio"] > 0
    assert figures["selected_share"] == pytest.approx(0.1, abs=0.03)


@pytest.mark.long
def test_in_a_process_that_has_multiplied_nothing_yet() -> None:
    """AMX tiles must be requested before vLLM's kernel uses them."""
    begin = [sys.executable, "-m", "kvrecall_lab.bench", "decode"]
    words = ["--json", "--contexts", "16K,64K", "--rounds", "1"]
    run = subprocess.run([*begin, *words], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    figures = json.loads(run.stdout.splitlines()[-1])
    assert figures["offload_ratio"] > 0
    assert [one["context"] for one in figures["all"]] == [16384, 65536]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"digest_tokens": 7}, "not a multiple of VLLM_RETRIEVAL_DIGEST_TOKENS=7;"),
        ({"local": 4000}, "no blocks to select from"),
        # 15 blocks between
        ({"contexts": "10K", "local": 7192, "least_blocks": 32}, "at least 32 blocks"),
    ],
)
def test_what_cannot_be_measured_is_an_error(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(KvrecallError, match=said):
        measure_decode(**{"contexts": "4K", **SMALL, **changed})


def test_index_figures(tmp_path: Path) -> None:
    figures: Any = measure_index(6000, "lru", tmp_path, repeats=2, passes=2).figures
    json.dumps(figures)
    assert figures["find_1000_us"] > 0
    assert figures["find_beside_eviction_us_p999"] >= figures["find_beside_eviction_us_p99"] > 0
    assert figures["bytes_a_block"] > 0
    assert list(tmp_path.iterdir()) == []


def test_step_figures() -> None:
    figures: Any = measure_step("3", block_size=16, steps=32).figures
    assert figures["sequences"] == 3
    assert figures["us_a_step"] > 0
    assert figures["us"]["n"] == 32
    assert figures["parts_us"]["build_connector_meta"] > 0
    assert figures["blocks_saved"] == 2 * 3  # each sequence passes two ends in 32 tokens


@pytest.mark.engine
@pytest.mark.longest
def test_a_sequence_is_longer_than_the_device_cache() -> None:
    settings = {**SCALED, "VLLM_RETRIEVAL_OFFLOAD_BOUNDARY": "2048"}
    figures: Any = measure_long("16K", 8, 3, device=0.06, dense=False, **settings).figures
    assert figures["device_share"] < 0.06
    assert figures["tokens_read"] == pytest.approx(128 * (4 + 125 / 10), abs=300)
    record = 128 * 3 * 2 * 64 * 2  # a block's KV
    assert 3 * record < figures["loaded_mib"] * 2**20 < 6 * record
    assert figures["disk_first_s"] > 0
