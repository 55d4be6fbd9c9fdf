"""``python -m kvrecall_lab.bench decode`` measures retrieval, or fails if it does not act."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from kvrecall.errors import KvrecallError
from kvrecall_lab.bench.decode import measure_decode

SMALL: dict[str, Any] = {"rounds": 1, "local": 256, "init_tokens": 128, "least_blocks": 1}


def test_figures() -> None:
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
