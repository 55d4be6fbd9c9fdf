"""Models with several KV groups, recalled as ``make models`` does: bit for bit a device hit, and no
byte more than the groups need."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from pool.remote.mooncake import needs_mooncake

from kvrecall_lab.shapes.row import Row
from kvrecall_lab.shapes.shapes import SHAPES, Shape
from kvrecall_lab.shapes.trial import Laboratory

pytestmark = [pytest.mark.engine, pytest.mark.long]  # 95 s without bfloat16 instructions

_CASES = 4
_SHAPES = {shape.name: shape for shape in SHAPES}


def rows(
    folder: Path,
    shape: Shape,
    *tiers: str,
    of: Callable[[Laboratory, Shape, Sequence[str]], Iterator[Row]] = Laboratory.rows,
) -> list[Row]:
    laboratory = Laboratory(folder)
    try:
        found = list(of(laboratory, replace(shape, ranks=False), tiers))
    finally:
        laboratory.engines.stop()
    for row in found:
        assert row.ok, f"{row.tier}, {row.case}: {'; '.join(row.faults())}"
    return found


def test_windows_and_full_attention_keep_vllms_hybrid_manager(tmp_path: Path) -> None:
    found = rows(tmp_path, _SHAPES["gemma3"], "host")
    assert len(found) == _CASES
    assert all(row.groups == 3 and row.hybrid_manager for row in found)


@pytest.mark.parametrize("name", [name for name in _SHAPES if name != "deepseek"])
def test_a_shape_is_recalled_from_every_tier(tmp_path: Path, name: str) -> None:
    found = rows(tmp_path, _SHAPES[name], "host", "disk", "remote")
    assert [row.run for row in found] == [True] * _CASES * 3


@needs_mooncake
@pytest.mark.parametrize("name", ["gemma3", "gpt-oss", "qwen3-next"])
def test_a_shape_is_recalled_from_a_service_and_from_mooncake(tmp_path: Path, name: str) -> None:
    found = rows(tmp_path, _SHAPES[name], "service", "mooncake")
    assert [row.tier for row in found] == ["service"] * _CASES + ["mooncake"] * _CASES
    assert all(row.run and row.restarted for row in found)


@needs_mooncake
@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_ranks_share_a_service_and_mooncake(tmp_path: Path, name: str) -> None:
    found = rows(tmp_path, _SHAPES[name], "service", "mooncake", of=Laboratory.ranks_rows)
    assert [(row.tier, row.case) for row in found] == [
        (tier, f"ranks {pair}") for tier in ("service", "mooncake") for pair in ("1 to 2", "2 to 1")
    ]


def test_a_shape_that_the_platform_cannot_recall_says_why(tmp_path: Path) -> None:
    """On a machine with AMX, vLLM caches prefixes of latent attention, and it is recalled."""
    found = rows(tmp_path, _SHAPES["deepseek"], "host")
    assert all(row.run for row in found) or "prefix caching is off" in found[0].why
