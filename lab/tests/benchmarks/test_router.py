"""``kvrecall bench router`` with two real engines, in small."""

from __future__ import annotations

import pytest
from lab_commands import figures_of

pytestmark = [pytest.mark.engine, pytest.mark.long]


def test_the_same_sessions_with_every_choice() -> None:
    figures = figures_of("router", "--sessions", "4", "--turns", "3", "--rounds", "1")
    ways = figures["ways"]
    assert list(ways) == ["turns", "least_busy", "guess", "events"]
    assert {one["requests"] for one in ways.values()} == {12}
    for one in ways.values():
        assert 0 < one["computed_tokens"] < one["prompt_tokens"]
        shares = one["computed_share"] + sum(one["by_tier"].values())
        assert shares == pytest.approx(1, abs=1e-3)
    assert ways["events"]["computed_tokens"] < ways["turns"]["computed_tokens"]
