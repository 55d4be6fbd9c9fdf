"""What ``pool stat`` and ``pool ls`` print fits 80 and 100 columns, for the largest numbers."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console, RenderableType

from kvrecall import pool_cli
from kvrecall.pool.base import PoolStats, TierStats
from kvrecall.pool.service.admin import By, Listing, ListingRow, Overview, TenantView
from kvrecall.pool.service.sessions import ClientView

TIB = 1 << 40
COUNT = 987_654_321_098
TENANT = "0123456789abcdef"
MODEL = "Qwen3MoeForCausalLM bfloat16 7f83b1657ff1fc53b92d adapter 5feceb66ffc8"
DIGEST = "3f9a41c2" * 16
TIERS = tuple(
    TierStats(
        name, 999 * TIB, 998 * TIB, COUNT, COUNT, COUNT, COUNT, 1.0, COUNT, COUNT, 1.0, COUNT,
        COUNT, COUNT, COUNT, 997 * TIB, COUNT, COUNT, full=int(name == "disk"),
    )
    for name in ("host", "disk", "remote")
)  # fmt: skip
CLIENTS = tuple(
    ClientView(pid=4_194_304, seconds=9e6, namespaces=1024, tickets=COUNT, reserved=COUNT,
               requests=COUNT, lost=lost)
    for lost in (False, True)
)  # fmt: skip
TENANTS = tuple(
    TenantView(TENANT, 999 * TIB, 999 * TIB, 999 * TIB, limit, COUNT, COUNT)
    for limit in (None, 999 * TIB)
)


def printed(shown: RenderableType, columns: int) -> str:
    out = io.StringIO()
    Console(file=out, width=columns).print(shown)
    text = out.getvalue()
    assert max(map(len, text.splitlines())) <= columns
    assert "…" not in text, text
    return text


def listed(by: By, name: str) -> Listing:
    row = ListingRow(
        name, DIGEST[:64], MODEL, "1: sliding window of 1024", TENANT, 1 << 20, 1_048_575, COUNT,
        999 * TIB, COUNT, 999 * TIB, COUNT, 3e6, 9e9, {},
    )  # fmt: skip
    return Listing(by, (row,) * 2, 10_000_000)


@pytest.mark.parametrize("columns", [80, 100])
def test_the_overview(columns: int) -> None:
    stats = PoolStats(TIERS, COUNT, COUNT, COUNT, COUNT, COUNT, COUNT, COUNT, 999 * TIB)
    now = Overview(
        4_194_304, "0.1.0", 9e6, "/run/kvrecall/pool.sock", "/var/lib/kvrecall", CLIENTS, stats,
        COUNT, TENANTS, 1000, "through",
    )  # fmt: skip
    text = printed(pool_cli.overview_of(now, now, 1.0), columns)
    for title in ("used", "of", "pinned", "blocks", "hits", "read", "written", "evicted",
                  "over quota", "shed", "no room", "errors", "corrupt"):  # fmt: skip
        assert re.search(rf"│ {title} ", text), title
    assert text.count(f"{COUNT:,}") >= 3 * 7
    assert text.count("998 TiB") == 3
    assert re.search(r"│ no room *│ *no │ *yes │ *no │", text)
    for whole in (TENANT, "4194304", "104.2 d", "988G", "lost", "its copies have ended"):
        assert whole in text, whole


@pytest.mark.parametrize("columns", [80, 100])
@pytest.mark.parametrize(
    ("by", "name"),
    [
        (By.NAMESPACE, DIGEST[:64]),
        (By.MODEL, MODEL),
        (By.TENANT, TENANT),
        (By.CHAIN, DIGEST),
        (By.BLOCK, DIGEST),
    ],
)
def test_a_listing(by: By, name: str, columns: int) -> None:
    text = printed(pool_cli.listing_of(listed(by, name)), columns)
    assert "9999998 more; see --limit" in text
    cells = [re.split("[│┃]", line) for line in text.splitlines()]
    place = 0 if by is By.MODEL else 1
    folded = "".join(row[place + 1].strip() for row in cells if len(row) > 3)
    assert MODEL.replace(" ", "") in folded.replace(" ", "")
    if by is not By.MODEL:
        assert re.search(rf"[│┃] ?{name[:12]}", text)
    for whole in ("988G", "999 TiB", "34.7 d"):
        assert whole in text
