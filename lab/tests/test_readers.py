"""Every router sees every block that a pool holds, and no other, in any order of events."""

from __future__ import annotations

from kvrecall_lab.readers import ORDERS, ROUTERS, lines


def test_every_router_sees_every_block() -> None:
    """With the events of commit aa31f340, 28 of these 42 lose 150 to 668 blocks."""
    told = [*lines()]
    assert len(told) == len(ORDERS) * len(ROUTERS)
    assert [line for line in told if line["lost"] or line["stale"]] == []
    seen = [line["blocks_seen"] for line in told]
    assert seen.count({"host": 68, "disk": 300}) == 5 * len(ROUTERS)
