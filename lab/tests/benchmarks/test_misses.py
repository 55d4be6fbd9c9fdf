"""``kvrecall bench misses``: few requests of each cause, on live servers."""

from __future__ import annotations

import pytest
from lab_commands import figures_of


@pytest.mark.engine
@pytest.mark.longest
def test_each_cause_is_reported() -> None:
    figures = figures_of("misses", "--requests", "60")
    assert figures["right"] == 1.0
    assert figures["requests"] >= 60
    assert {"new", "short", "diverged", "namespace", "evicted", "damaged"} <= set(
        figures["reasons"]
    )
