"""Run by test_kernels.py in a process of its own: Triton decides when it is first imported whether
kernels are interpreted."""

from __future__ import annotations

import pytest
import torch

from attention.test_paged import cache
from kvrecall.attention.kernels.device import Paged, attend_by_triton
from kvrecall.attention.kernels.oracle import attend_plainly


@pytest.mark.parametrize("length", [1, 127, 128, 129, 1000, 4097])
@pytest.mark.parametrize(("group", "dim"), [(1, 64), (4, 128), (7, 16)])
@pytest.mark.parametrize("share", [0, 3])
def test_the_kernel_agrees_with_the_oracle(length: int, group: int, dim: int, share: int) -> None:
    query, paged = cache([length, 300], group, dim, 128, torch.float32)
    want = attend_plainly(query, paged, dim**-0.5)
    got = attend_by_triton(query, paged, dim**-0.5, share=share)
    torch.testing.assert_close(got.output, want.output, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(got.lse, want.lse, rtol=1e-4, atol=1e-5)


def test_half_precision_and_other_layouts() -> None:
    query, paged = cache([1000, 129], 4, 64, 32, torch.float16)
    swapped = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (paged.keys, paged.values)]
    other = Paged(swapped[0], swapped[1], paged.table, paged.lengths)
    assert other.keys.stride() != paged.keys.stride()
    want = attend_plainly(query, paged, 0.125)
    got = attend_by_triton(query, other, 0.125, share=16)
    torch.testing.assert_close(got.output, want.output, rtol=5e-3, atol=5e-3)


@pytest.mark.parametrize(("dim", "softcap"), [(80, 0.0), (96, 5.0), (64, 1.0)])
def test_other_dimensions_and_capped_logits(dim: int, softcap: float) -> None:
    query, paged = cache([700, 130], 3, dim, 64, torch.float32)
    want = attend_plainly(query, paged, 0.5, softcap)
    got = attend_by_triton(query, paged, 0.5, softcap)
    torch.testing.assert_close(got.output, want.output, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(got.lse, want.lse, rtol=1e-4, atol=1e-5)


def test_a_row_by_itself_gives_the_bits_of_a_batch() -> None:
    query, paged = cache([900, 4000, 130], 2, 64, 128, torch.float32)
    whole = attend_by_triton(query, paged, 0.2)
    for row in range(3):
        part = slice(row, row + 1)
        blocks = -(-int(paged.lengths[row]) // 128)
        table = paged.table[part, :blocks].contiguous()
        alone = Paged(paged.keys, paged.values, table, paged.lengths[part])
        got = attend_by_triton(query[part], alone, 0.2)
        assert torch.equal(got.output, whole.output[part])
