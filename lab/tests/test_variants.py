from __future__ import annotations

import pytest

from kvrecall.simulate.replay import clairvoyant_hits
from kvrecall.simulate.workload import make_workload
from kvrecall_lab.variants import doubled, part, thinned


def test_variants() -> None:
    trace = make_workload("chat-lognormal")
    assert len(part(trace, 0.25, 0.75).requests) == pytest.approx(len(trace.requests) / 2, abs=1)
    assert 0.15 < thinned(trace, 4).blocks / trace.blocks < 0.35
    twice = doubled(trace, 10.0)
    assert twice.blocks == 2 * trace.blocks
    assert clairvoyant_hits(twice, 10**9) >= 2 * clairvoyant_hits(trace, 10**9)
