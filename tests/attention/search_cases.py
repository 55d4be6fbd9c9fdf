"""Run by test_kernels.py in a process of its own: Triton decides when it is first imported whether
kernels are interpreted."""

from __future__ import annotations

import pytest
import torch

from kvrecall.attention import selection
from kvrecall.attention.digest import DIGESTS, encode
from kvrecall.attention.kernels.device import best_by_triton, fits
from kvrecall.attention.kernels.int8 import products_by_torch
from kvrecall.attention.selection import CodedQuery, best_products, selector_of
from kvrecall.attention.settings import RetrievalSettings


def rows(heads: int, blocks: int, per_block: int, width: int) -> torch.Tensor:
    torch.manual_seed(blocks + width)
    return encode(torch.randn(heads, blocks, per_block, width))


def best(
    query: CodedQuery, coded: torch.Tensor, scale: float, places: torch.Tensor | None = None
) -> torch.Tensor:
    assert fits(coded)
    return best_by_triton(query.codes, query.scales * scale, coded, places)


@pytest.mark.parametrize("blocks", [1, 3, 16, 129])
@pytest.mark.parametrize(
    ("group", "per_block", "width"), [(1, 8, 128), (4, 16, 256), (7, 2, 160), (20, 1, 16)]
)
def test_it_finds_what_torch_finds_to_the_bit(
    blocks: int, group: int, per_block: int, width: int
) -> None:
    coded = rows(3, blocks, per_block, width)
    query = CodedQuery(torch.randn(3, group, width))
    assert torch.equal(best(query, coded, 0.1), best_products(query, coded, 0.1))


def test_parts_of_rows_and_of_blocks() -> None:
    """As a selector takes them: some rows of each block, some blocks of all, in any order."""
    coded = rows(2, 70, 18, 64)[:, 5:68, 2:18]
    query = CodedQuery(torch.randn(2, 4, 64))
    want = best_products(query, coded, 1.0)
    assert torch.equal(best(query, coded, 1.0), want)
    places = torch.stack([torch.randperm(63)[:40] for _ in range(2)])
    got = best(query, coded, 1.0, places)
    assert torch.equal(got, want.gather(2, places[:, None].expand(-1, 4, -1)))
    assert best(query, coded, 1.0, places[:, :0]).shape == (2, 4, 0)


def test_what_the_kernel_does_not_take() -> None:
    assert not fits(rows(1, 4, 3, 64))
    assert not fits(rows(1, 4, 4, 62))
    assert not fits(rows(1, 4, 4, 64).transpose(2, 3))


@pytest.mark.parametrize("share", [0.2, 0.02])
def test_selection_chooses_the_same_blocks(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = RetrievalSettings(topk_share=share, least_blocks=1)
    layout = settings.layout(128)
    torch.manual_seed(1)
    keys = torch.randn(2, 300, 128, 64)
    digests = encode(layout.rows_of(keys))
    query = torch.randn(2, 4, 64)
    runs = [digests[:, :90], digests[:, 90:]]

    def chosen() -> torch.Tensor:
        chosen = selector_of(layout).choose(query, runs, 20, 0.125)
        return chosen.sort(-1).values

    want = chosen()
    monkeypatch.setattr(selection, "on_device", lambda _: True)
    assert torch.equal(chosen(), want)


@pytest.mark.parametrize("kind", list(DIGESTS))
def test_sums_where_there_is_no_kernel(kind: str) -> None:
    torch.manual_seed(2)
    width = DIGESTS[kind].parts * 1024  # wider than single precision adds exactly
    point = torch.randint(-127, 128, (2, 3, width), dtype=torch.int8)
    codes = torch.randint(-127, 128, (2, 50, width), dtype=torch.int8)
    want = torch.einsum("hgw,hnw->hng", point.long(), codes.long())
    assert torch.equal(products_by_torch(point, codes).long(), want)
