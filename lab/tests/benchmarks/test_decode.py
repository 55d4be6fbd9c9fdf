"""``python -m kvrecall_lab.bench decode`` measures retrieval, or fails if it does not act."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from kvrecall.attention.settings import RetrievalSettings
from kvrecall.errors import KvrecallError
from kvrecall_lab.bench.decode import measure_decode_report

SMALL = RetrievalSettings(init_tokens=128, local_tokens=256, least_blocks=1)


def test_figures() -> None:
    report = measure_decode_report(4096, SMALL, 1, None)
    figures = report.figures
    assert figures["active"]
    assert figures["dense_ms"] > 0  # type: ignore[operator]
    assert figures["attention_ratio"] > 0  # type: ignore[operator]
    assert figures["selected_share"] == pytest.approx(0.2, abs=0.05)


@pytest.mark.long
def test_in_a_process_that_has_multiplied_nothing_yet() -> None:
    """AMX tiles must be requested before vLLM's kernel uses them."""
    begin = [sys.executable, "-m", "kvrecall_lab.bench", "decode"]
    words = ["--json", "--context", "16384", "--rounds", "1"]
    run = subprocess.run([*begin, *words], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout.splitlines()[-1])["active"]


def test_digests_that_do_not_divide_a_block_are_an_error() -> None:
    with pytest.raises(KvrecallError, match="not a multiple of VLLM_RETRIEVAL_DIGEST_TOKENS=7;"):
        measure_decode_report(4096, replace(SMALL, digest_tokens=7), 1, None)


def test_nothing_to_choose_from_is_an_error() -> None:
    with pytest.raises(KvrecallError, match="no blocks to select from"):
        measure_decode_report(4096, replace(SMALL, local_tokens=4000), 1, None)
    with pytest.raises(KvrecallError, match=r"no blocks to select from.* at least 32 blocks"):
        measure_decode_report(10_240, RetrievalSettings(), 1, None)  # 15 blocks between
