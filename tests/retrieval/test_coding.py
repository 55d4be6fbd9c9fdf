"""Digest rows in eight bits."""

from __future__ import annotations

import pytest
import torch

from kvrecall.attention import coding
from kvrecall.attention.coding import (
    CodedQuery,
    coded_products,
    coded_width,
    decode,
    decode_fine,
    encode,
)


def rows_of(*shape: int) -> torch.Tensor:
    """Coordinates as keys have them: a few channels ten times as large."""
    rows = torch.randn(*shape)
    rows[..., :3] *= 10
    return rows


def products(query: torch.Tensor, rows: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    return coded_products(CodedQuery.of(query), rows, scale)


def test_a_coordinate_is_off_by_half_a_step_at_most() -> None:
    rows = rows_of(2, 5, 8, 64)
    coded = encode(rows)
    assert (coded.shape, coded.dtype) == ((2, 5, 8, coded_width(64)), torch.int8)
    step = rows.abs().amax((-1, -2), keepdim=True) / 127
    assert ((decode(coded) - rows).abs() <= step * 0.5001).all()


def test_fine_rows_are_small_and_exact() -> None:
    rows = torch.randn(3, 5, 16)
    rows[:, 3] *= 0.001
    coded = encode(rows, fine=2)
    assert coded.shape == (3, 7, coded_width(16))
    off = (decode_fine(coded, 2) - rows[:, 3:]).abs()
    assert (off <= rows[:, 3:].abs().amax(-1, keepdim=True) / 254**2 * 1.1).all()
    assert torch.equal(coded[:, :3], encode(rows[:, :3]))
    assert (decode(encode(rows))[:, 3] == 0).all(), "with the scale of the others"


@pytest.mark.parametrize("width", [16, 256, 1536])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_near_those_of_the_rows(width: int, dtype: torch.dtype) -> None:
    """Within what both roundings, each by half a step at most, can add up to."""
    rows, query = rows_of(2, 7, 4, width), torch.randn(2, 3, width).to(dtype)
    got = products(query, encode(rows))
    assert got.shape == (2, 3, 28)
    coded, query = decode(encode(rows)).flatten(1, 2), query.float()
    want = torch.einsum("hgw,hrw->hgr", query, rows.flatten(1, 2))
    of_rows = rows.abs().amax((2, 3)).repeat_interleave(4, 1) / 254
    of_query = query.abs().amax(-1) / 254
    most = query.abs().sum(-1)[..., None] * of_rows[:, None]
    most = most + coded.abs().sum(-1)[:, None] * of_query[..., None]
    assert ((got - want).abs() <= 1.001 * most).all()
    assert ((got - want).abs().mean() <= 0.2 * most.mean()).all()


@pytest.mark.parametrize("width", [16, 256, 1536])
def test_products_do_not_depend_on_the_processor(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, query = encode(rows_of(2, 7, 4, width)), torch.randn(2, 3, width)
    first = products(query, rows)
    has_it = hasattr(torch, "_int_mm")
    for multiplies, rows_first in ((False, False), (has_it, False), (has_it, has_it)):
        monkeypatch.setattr(coding, "_MULTIPLIES_BYTES", multiplies)
        monkeypatch.setattr(coding, "_ROWS_FIRST", rows_first)
        assert torch.equal(products(query, rows), first)


def test_products_are_scaled() -> None:
    rows, query = encode(rows_of(2, 7, 4, 16)), torch.randn(2, 3, 16)
    whole, half = (
        products(query, rows),
        products(query, rows, 0.5),
    )
    assert torch.allclose(half, whole / 2)


def test_products_do_not_depend_on_how_blocks_lie() -> None:
    rows, query = encode(rows_of(2, 37, 8, 128)), torch.randn(2, 4, 128)
    whole = products(query, rows)
    parts = [products(query, part) for part in rows.split([1, 30, 6], dim=1)]
    assert torch.equal(torch.cat(parts, -1), whole)
    order = torch.randperm(37)
    shuffled = products(query, rows[:, order])
    assert torch.equal(shuffled, whole.view(2, 4, 37, 8)[:, :, order].flatten(2))


def test_nothing_and_zeros() -> None:
    query = torch.randn(2, 3, 16)
    assert products(query, encode(torch.randn(2, 0, 4, 16))).shape == (2, 3, 0)
    assert not products(query, encode(torch.zeros(2, 5, 4, 16))).any()
    assert not coded_products(
        CodedQuery.of(torch.zeros(2, 3, 16)), encode(torch.randn(2, 5, 4, 16))
    ).any()
