"""What the hazard policy takes for chance: in its life tables, and in its shadow cache's hits."""

from __future__ import annotations

import numpy as np
import pytest

from kvrecall.pool.eviction.lifetable import AgeBins, LifeTable
from kvrecall.pool.eviction.warmup import ShadowCache

CHAIN = 20.0


def table_of(shares: tuple[float, float], blocks: float) -> LifeTable:
    """Two classes of so many blocks, of which those shares were used in the bin of 32 s."""
    bins = AgeBins()
    table = LifeTable(2, bins, (np.zeros(2, dtype=np.intp), np.arange(2)))
    place = bins.starts.index(32.0)
    for kind, share in enumerate(shares):
        for age in range(place + 1):
            table.entered[kind][age] = blocks
        table.used[kind][place] = share * blocks
        table.entered[kind][place + 1] = (1.0 - share) * blocks
    table.refresh(4 * CHAIN, CHAIN)
    return table


def test_classes_that_differ_by_chance_are_one() -> None:
    chances = table_of((0.30, 0.34), 400.0).chances()
    assert chances[0, 0] == pytest.approx(chances[1, 0], rel=1e-9)


@pytest.mark.parametrize(("shares", "blocks"), [((0.2, 0.6), 4000.0), ((0.30, 0.34), 400_000.0)])
def test_classes_that_differ_by_more_are_two(shares: tuple[float, float], blocks: float) -> None:
    chances = table_of(shares, blocks).chances()
    assert chances[1, 0] - chances[0, 0] > 0.5 * (shares[1] - shares[0])


def play(shadow: ShadowCache, requests: int, hits: int) -> list[bool]:
    """Requests of 10 blocks to 8 chains by turns, of which the tier hits so many blocks; whether
    the shadow cache is better after each 32."""
    found = []
    for number in range(requests):
        which = number % 8
        shadow.use(range(100 * which, 100 * which + 10), hits)
        if number % 4 == 0:
            shadow.use([10_000 + number], 0)  # fills the shadow cache
        if number % 32 == 31:
            found.append(shadow.compare(CHAIN))
    return found


def test_the_shadow_cache_is_better_once_it_hits_more_and_for_a_while() -> None:
    found = play(ShadowCache(100), 32 * 150, 9)
    began = found.index(True)
    assert began >= 15
    assert found[began : began + 80] == [True] * 80
    assert not all(found[began + 80 :])


@pytest.mark.parametrize("hits", [10, 11])
def test_the_shadow_cache_is_not_better_with_as_many_hits_or_fewer(hits: int) -> None:
    assert not any(play(ShadowCache(100), 32 * 100, hits))


def test_one_request_is_no_proof() -> None:
    shadow = ShadowCache(100)
    play(shadow, 32 * 20, 10)
    shadow.use(range(10), 0)
    assert not any(play(shadow, 32 * 20, 10))


def test_a_tier_that_was_not_filled_twice_proves_nothing() -> None:
    found = play(ShadowCache(1000), 32 * 40, 5)  # 320 blocks entered it
    assert not any(found)


def test_pauses_grow_while_the_shadow_cache_wins() -> None:
    found = play(ShadowCache(100), 32 * 600, 8)
    pauses, length = [], 0
    for is_better in found:
        if is_better:
            length += 1
        elif length:
            pauses.append(length)
            length = 0
    assert pauses[:2] == [80, 160]
