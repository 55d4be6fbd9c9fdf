"""The search for blocks on a device: products of coded queries and digests, by a Triton kernel.

It has run in Triton's interpreter only (tests/retrieval/test_kernels.py), never on a GPU.
"""

from __future__ import annotations

import torch

from kvrecall.attention.kernels.launching import kernel_of, next_power

_ROWS_AT_ONCE = 64
"""More do not fit a multiprocessor's registers (tests/retrieval/test_kernels.py)."""


def fits(coded: torch.Tensor) -> bool:
    """Whether the kernel takes rows ``[heads, blocks, rows, width + 4]``: a power of two of them
    to a block, each a whole number of four bytes and in one piece."""
    _, _, rows, width = coded.shape
    aligned = width % 4 == 0 and all(step % 4 == 0 for step in coded.stride()[:-1])
    return rows > 0 and rows & (rows - 1) == 0 and coded.stride(-1) == 1 and aligned


def best_by_triton(
    codes: torch.Tensor, scales: torch.Tensor, coded: torch.Tensor, places: torch.Tensor | None
) -> torch.Tensor:
    """As ``coding.best_products``, for what ``fits``. ``codes``: int8 ``[heads, group, width]``;
    ``scales``: float32 ``[heads, group, 1]``."""
    heads, group, width = codes.shape
    blocks = coded.shape[1] if places is None else places.shape[1]
    rows = coded.shape[2]
    best = torch.empty(heads, group, blocks, dtype=torch.float32, device=coded.device)
    if not blocks:
        return best
    floats = coded.view(torch.float32)
    tile = max(1, _ROWS_AT_ONCE // rows)
    kernel_of("search_triton", "best_rows")[(heads, -(-blocks // tile))](
        codes.contiguous(), scales.contiguous(), coded, floats,
        coded if places is None else places.contiguous(), best, blocks,
        *coded.stride()[:3], *floats.stride()[:2],
        GROUP=group, PADDED=max(16, next_power(group)), ROWS=rows,
        WIDTH=width, WIDE=max(32, next_power(width)), TILE=tile, PLACED=places is not None,
    )  # fmt: skip
    return best
