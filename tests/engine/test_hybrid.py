"""Models with several KV groups, recalled as ``make models`` does: bit for bit a device hit, and no
byte more than the groups need."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvrecall.lab.shapes.shapes import SHAPES, Shape
from kvrecall.lab.shapes.trial import TIERS, Laboratory, Row

pytestmark = pytest.mark.engine

_CASES = 4
_SHAPES = {shape.name: shape for shape in SHAPES}


def rows(folder: Path, shape: Shape, *tiers: str) -> list[Row]:
    laboratory = Laboratory(folder)
    try:
        found = list(laboratory.rows(shape, tiers))
    finally:
        laboratory.stop()
    for row in found:
        assert row.ok, f"{row.tier}, {row.case}: {'; '.join(row.faults())}"
    return found


def test_windows_and_full_attention_keep_vllms_hybrid_manager(tmp_path: Path) -> None:
    found = rows(tmp_path, _SHAPES["gemma3"], "host")
    assert len(found) == _CASES
    assert all(row.groups == 3 and row.hybrid_manager for row in found)


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in _SHAPES if name != "deepseek"])
def test_a_shape_is_recalled_from_every_tier(tmp_path: Path, name: str) -> None:
    found = rows(tmp_path, _SHAPES[name], *TIERS)
    assert [row.run for row in found] == [True] * _CASES * len(TIERS)


@pytest.mark.long
def test_a_shape_that_the_platform_cannot_recall_says_why(tmp_path: Path) -> None:
    """On a machine with AMX, vLLM caches prefixes of latent attention, and it is recalled."""
    found = rows(tmp_path, _SHAPES["deepseek"], "host")
    assert all(row.run for row in found) or "prefix caching is off" in found[0].why
