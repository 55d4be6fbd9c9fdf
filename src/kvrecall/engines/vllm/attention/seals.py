"""Checksums of digests, so that those that come damaged from the pool's memory are found.

A block's bytes are checked when they come from a disk or from another host; in memory they are
not, and are read once for every use. Digests are read once for a sequence's whole life, and a
wrong one silently has the wrong blocks chosen. They can be computed anew from the block's keys.
"""

from __future__ import annotations

import numpy as np
import torch
import xxhash

_ODD = 0x9E3779B97F4A7C15 - (1 << 64)  # of the golden ratio, as a signed number
SEAL_BYTES = 8
"""Of a block, in a layer."""


def seals_of(rows: torch.Tensor) -> torch.Tensor:
    """``rows``: ``[blocks, ...]``, what is kept of each block. uint8 ``[blocks, SEAL_BYTES]``."""
    if not len(rows):
        return torch.empty(0, SEAL_BYTES, dtype=torch.uint8, device=rows.device)
    if not rows.is_cpu:
        return sums_of(rows)
    bytes_of = rows.contiguous().view(len(rows), -1).view(torch.uint8).numpy()
    sums = b"".join(xxhash.xxh3_64_digest(row) for row in bytes_of)
    return torch.from_numpy(np.frombuffer(sums, np.uint8).copy()).view(len(rows), SEAL_BYTES)


def sums_of(rows: torch.Tensor) -> torch.Tensor:
    """As ``seals_of``, by what every device has: a sum of words, each times an odd number of its
    place, modulo 2**64, so any one changed word is found. Bytes are a multiple of four."""
    words = rows.contiguous().view(len(rows), -1).view(torch.int32).to(torch.int64)
    places = torch.arange(1, 2 * words.shape[1], 2, device=rows.device) * _ODD
    return (words * places).sum(1, keepdim=True).view(torch.uint8)


def broken(rows: torch.Tensor, seals: torch.Tensor) -> torch.Tensor:
    """Which of the rows are not what they were when these were their seals: bool ``[blocks]``."""
    return (seals_of(rows) != seals).any(-1)
