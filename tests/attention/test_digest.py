"""Digests and selection against loops over every token."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from kvrecall.attention.digest import DIGESTS, Layout, decode, digests_of, encode
from kvrecall.attention.selection import choose
from kvrecall.attention.settings import RetrievalSettings


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(3)


def brute(kind: str, query: list[float], keys: list[list[float]]) -> float:
    """The score a digest of these keys must have."""
    total = 0.0
    for at, q in enumerate(query):
        column = [key[at] for key in keys]
        mean = sum(column) / len(column)
        if kind == "mean":
            total += q * mean
        else:
            total += max(q * x for x in column)
    return total


@pytest.mark.parametrize("kind", list(DIGESTS))
@pytest.mark.parametrize("tokens", [1, 4, 32])
def test_scores_equal_brute_force(kind: str, tokens: int) -> None:
    keys, query = torch.randn(3, 32, 5), torch.randn(5)
    digest = DIGESTS[kind]
    got = digests_of(digest, keys, tokens) @ digest.of_query(query)
    assert got.shape == (3, 32 // tokens)
    for block in range(3):
        for part in range(32 // tokens):
            members = keys[block, part * tokens : (part + 1) * tokens].tolist()
            want = brute(kind, query.tolist(), members)
            assert got[block, part] == pytest.approx(want, abs=1e-5)


def chosen_by_hand(query: torch.Tensor, keys: torch.Tensor, count: int) -> list[set[int]]:
    """Group mean of softmaxed scores, a block as similar as its best digest, a mean; ``keys``:
    ``[heads, blocks, digests, tokens, dim]``."""
    heads, blocks, digests = keys.shape[:3]
    picked = []
    for head in range(heads):
        mass = [0.0] * blocks
        for q in query[head]:
            scores = [
                max(float(q @ keys[head, b, d].mean(0)) * 0.5 for d in range(digests))
                for b in range(blocks)
            ]
            total = sum(math.exp(s) for s in scores)
            for block, score in enumerate(scores):
                mass[block] += math.exp(score) / total / len(query[head])
        order = sorted(range(blocks), key=lambda b: -mass[b])
        picked.append(set(order[:count]))
    return picked


def test_selection_equals_brute_force() -> None:
    keys = torch.randn(2, 20, 4, 8, 16, dtype=torch.float64).float()
    query = 4 * torch.randn(2, 3, 16)
    rows = encode(DIGESTS["mean"].of_keys(keys))
    rounded = decode(rows)[..., None, :]
    chosen = choose(Layout(DIGESTS["mean"], 0, 4), query, rows, 6, 0.5)
    assert [set(row) for row in chosen.tolist()] == chosen_by_hand(query, rounded, 6)


SMALL_SHARE = RetrievalSettings(topk_share=0.02)


@pytest.mark.parametrize("kind", list(DIGESTS))
def test_narrowing_finds_planted_keys(kind: str) -> None:
    """Of 200 blocks, 48 are scored by fine digests; those with the planted keys are among them."""
    layout = replace(SMALL_SHARE, digest=kind).layout(128)
    assert (layout.coarse, layout.narrowed(200, 8)) == (2, 48)
    keys, query = torch.randn(2, 200, 128, 16), torch.randn(2, 3, 16)
    planted = [[7, 64, 150], [3, 64, 199]]
    for head, blocks in enumerate(planted):
        for block in blocks:
            keys[head, block, 40:56] = 12 * query[head].mean(0)
    rows = encode(layout.rows_of(keys))
    choice = choose(layout, query, rows, 8, 0.25)
    for chosen, blocks in zip(choice.tolist(), planted, strict=True):
        assert len(set(chosen)) == 8
        assert set(blocks) <= set(chosen)


def test_narrowing_chooses_what_is_best_of_the_blocks_looked_at() -> None:
    """With fine digests of all blocks it is an exact search."""
    layout = SMALL_SHARE.layout(128)
    rows, query = encode(layout.rows_of(torch.randn(2, 40, 128, 16))), torch.randn(2, 3, 16)
    assert layout.narrowed(40, 10) == 40
    near = choose(layout, query, rows, 10, 0.25)
    exact = choose(replace(layout, coarse=0), query, rows[:, :, layout.fine_rows], 10, 0.25)
    assert [set(row) for row in near.tolist()] == [set(r) for r in exact.tolist()]
