"""``bench windows``: ``restore`` with a model that has windows."""

from __future__ import annotations

from kvrecall.bench.model import BenchModel
from kvrecall.bench.report import Report, Times, Tokens
from kvrecall.bench.restore import measure_restore
from kvrecall_lab.models import FAMILIES


def measure_windows(tokens: Tokens = 8192, repetitions: Times = 9) -> Report:
    """Time to first token on a prefix, with Gemma-3's shape: windows in two of three layers."""
    return measure_restore(
        tokens, repetitions, BenchModel("gemma3_text", layers=9, families=FAMILIES)
    )
