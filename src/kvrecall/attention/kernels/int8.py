"""Products of int8 matrices on a CPU: exact sums, by NumKong, or by PyTorch as the fallback.

PyTorch multiplies bytes fast only by large matrices, but a query has few heads: NumKong's packed
products read the digests about as fast as memory delivers them (docs/log.md).
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import numpy as np
import torch

_LOG = logging.getLogger(__name__)
_EXACT_IN_FLOAT = (1 << 24) // 127**2
"""Number of products of two codes that add up in single precision without rounding."""


class PackedRows:
    """int8 ``[heads, group, width]``, packed for many products. Thread-safe."""

    def __init__(self, codes: torch.Tensor) -> None:
        self._codes = codes
        self._numkong = _numkong() if codes.is_cpu else None
        if self._numkong is not None:
            heads = codes.contiguous().numpy()
            self._packed = [self._numkong.dots_pack(head, dtype="int8") for head in heads]

    def products(self, rows: torch.Tensor) -> torch.Tensor:
        """With int8 ``[heads, count, width]``, a row's bytes side by side: int32
        ``[heads, count, group]``."""
        if self._numkong is None or not rows.numel() or rows.stride(-1) != 1:
            return products_by_torch(self._codes, rows)
        dots, heads = self._numkong.dots_packed, zip(rows.numpy(), self._packed, strict=True)
        return torch.stack([torch.from_numpy(np.asarray(dots(*each))) for each in heads])


def products_by_torch(codes: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """``PackedRows.products`` on any device: parts of sums are exact in single precision."""
    both = (torch.split(rows, _EXACT_IN_FLOAT, -1), torch.split(codes, _EXACT_IN_FLOAT, -1))
    parts = zip(*both, strict=True)
    sums = [torch.bmm(one.float(), other.float().transpose(1, 2)).int() for one, other in parts]
    return torch.stack(sums).sum(0, dtype=torch.int32)


@functools.cache
def _numkong() -> Any:
    """The library; None if it is missing or computes other sums than PyTorch."""
    try:
        import numkong
    except ImportError as error:
        _LOG.warning(
            "kvrecall: the digest search falls back to PyTorch, several times slower: %s", error
        )
        return None
    codes = (torch.arange(3 * 320) * 104729 % 255 - 127).to(torch.int8).view(1, 3, 320)
    rows = (torch.arange(29 * 324) * 7919 % 255 - 127).to(torch.int8).view(1, 29, 324)[..., :320]
    packed = numkong.dots_pack(codes[0].numpy(), dtype="int8")
    found = torch.from_numpy(np.asarray(numkong.dots_packed(rows[0].numpy(), packed)))
    if not torch.equal(found, products_by_torch(codes, rows)[0]):
        _LOG.warning(
            "kvrecall: the digest search falls back to PyTorch: NumKong's products are wrong "
            "on this processor"
        )
        return None
    return numkong
