from __future__ import annotations

from kvrecall_lab.variants import thinned
from kvrecall_lab.workload import make_workload


def test_variants() -> None:
    trace = make_workload("chat-lognormal")
    assert 0.15 < thinned(trace, 4).blocks / trace.blocks < 0.35
