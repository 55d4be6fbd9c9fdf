"""Attention over chosen blocks of a paged cache: the oracle. See also test_kernels.py."""

from __future__ import annotations

import torch

from kvrecall.attention.kernels import oracle
from kvrecall.attention.kernels.device import Paged, Part, merged
from kvrecall.attention.kernels.oracle import attend_plainly


def cache(
    lengths: list[int], group: int, dim: int, size: int, dtype: torch.dtype
) -> tuple[torch.Tensor, Paged]:
    """Rows of random keys in blocks of random places; two KV heads, in turn."""
    torch.manual_seed(sum(lengths))
    width = max(-(-length // size) for length in lengths)
    blocks = torch.randperm(len(lengths) * width).view(len(lengths), width).to(torch.int32)
    table = blocks * 2 + torch.arange(len(lengths), dtype=torch.int32)[:, None] % 2
    shape = (len(lengths) * width, size, 2, dim)
    keys, values = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    query = torch.randn(len(lengths), group, dim).to(dtype)
    return query, Paged(keys, values, table, torch.tensor(lengths, dtype=torch.int32))


def test_the_oracle_agrees_with_the_one_of_masks() -> None:
    query, paged = cache([400, 400], 3, 32, 128, torch.float32)
    by_head = [paged.keys[paged.table[h].long() // 2, :, h].flatten(0, 1)[:400] for h in range(2)]
    values = [paged.values[paged.table[h].long() // 2, :, h].flatten(0, 1)[:400] for h in range(2)]
    want = oracle.attention(
        query.flatten(0, 1),
        torch.stack(by_head, 1),
        torch.stack(values, 1),
        torch.ones(2, 400, dtype=torch.bool),
    )
    got = attend_plainly(query, paged, 32**-0.5).output
    torch.testing.assert_close(got.flatten(0, 1), want, rtol=1e-4, atol=1e-5)


def test_parts_are_put_together() -> None:
    query, paged = cache([500, 500], 2, 32, 128, torch.float32)
    whole = attend_plainly(query, paged, 0.2)
    first = Paged(paged.keys, paged.values, paged.table[:, :3], torch.tensor([384, 384]))
    last = Paged(paged.keys, paged.values, paged.table[:, 3:], torch.tensor([116, 116]))
    parts = [attend_plainly(query, part, 0.2) for part in (first, last)]
    got = merged(
        Part(torch.stack([p.output for p in parts], 1), torch.stack([p.lse for p in parts], 1))
    )
    torch.testing.assert_close(got.output, whole.output)
    torch.testing.assert_close(got.lse, whole.lse)
