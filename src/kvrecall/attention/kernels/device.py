"""Launches the Triton kernels: sparse attention, the search for blocks, copies of many pieces.

They have run in Triton's interpreter only (tests/attention/test_kernels.py), never on a GPU: see
docs/retrieval.md. Triton is imported on the first call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvrecall.errors import EngineError

Addresses = npt.NDArray[np.int64]

_TOKENS_A_PROGRAM = 512
_TOKENS_AT_ONCE = 64
_ROWS_AT_ONCE = 64
"""More do not fit a multiprocessor's registers (tests/attention/test_kernels.py)."""
_WORD = 4
_WORDS_AT_ONCE = 1024


@dataclass(frozen=True, slots=True)
class Part:
    """Attention over some tokens: float32 ``output [rows, group, dim]`` and ``lse [rows, group]``,
    the natural logarithm of the sum of exponents. A row is a (sequence, KV head)."""

    output: torch.Tensor
    lse: torch.Tensor


@dataclass(frozen=True, slots=True)
class Paged:
    """The blocks attended to. ``keys``, ``values``: ``[blocks, tokens, kv_heads, dim]``, of any
    strides. ``table``: int32 ``[rows, width]``, of ``block * kv_heads + head``; ``lengths``: int32,
    tokens in each row's blocks, at least 1; only a row's last block may be partial."""

    keys: torch.Tensor
    values: torch.Tensor
    table: torch.Tensor
    lengths: torch.Tensor

    @property
    def kv_heads(self) -> int:
        return self.keys.shape[2]


@dataclass(frozen=True, slots=True)
class Piece:
    """An item is ``count`` runs of ``nbytes`` each, ``step`` bytes apart; all of whole words of
    four bytes."""

    count: int
    nbytes: int
    step: int


def attend_by_triton(
    query: torch.Tensor, paged: Paged, scale: float, softcap: float = 0.0, share: int = 0
) -> Part:
    """Attention of decoded tokens, ``[rows, group, dim]``, over selected blocks of a paged cache.

    A program takes ``share`` of a row's blocks; 0: as many as have 512 tokens. A row's result
    therefore does not depend on other rows. Blocks of a power of two of tokens, at least 16.
    ``softcap``: bounds logits by a hyperbolic tangent; 0: they are not bounded.
    """
    kernel = _kernel("attend_rows")
    rows, group, dim = query.shape
    size, width = paged.keys.shape[1], paged.table.shape[1]
    share = share or max(1, _TOKENS_A_PROGRAM // size)
    splits = -(-width // share)
    output = torch.empty(rows, splits, group, dim, dtype=torch.float32, device=query.device)
    lse = torch.empty(rows, splits, group, dtype=torch.float32, device=query.device)
    kernel[(rows, splits)](
        query.contiguous(), paged.keys, paged.values, paged.table, paged.lengths, output, lse,
        scale, softcap, paged.kv_heads, paged.table.stride(0), share,
        *paged.keys.stride(), *paged.values.stride(),
        GROUP=group, PADDED=max(16, _next_power(group)), DIM=dim, WIDE=max(16, _next_power(dim)),
        SIZE=size, TILE=min(size, _TOKENS_AT_ONCE), CAPPED=softcap > 0,
    )  # fmt: skip
    return merged(Part(output, lse))


def merged(parts: Part) -> Part:
    """Merges partial attention: parts along the second dimension, ``output [rows, parts, group,
    dim]``; one without tokens has ``lse`` -inf, and at least one part has tokens."""
    weights = parts.lse.softmax(1)
    output = (parts.output * weights[..., None]).nansum(1)
    return Part(output, parts.lse.logsumexp(1))


def fits(coded: torch.Tensor) -> bool:
    """Whether ``best_by_triton`` takes rows ``[heads, blocks, rows, width + 4]``: a power of two of
    them to a block, each a whole number of four bytes and in one piece."""
    _, _, rows, width = coded.shape
    aligned = width % 4 == 0 and all(step % 4 == 0 for step in coded.stride()[:-1])
    return rows > 0 and rows & (rows - 1) == 0 and coded.stride(-1) == 1 and aligned


def best_by_triton(
    codes: torch.Tensor, scales: torch.Tensor, coded: torch.Tensor, places: torch.Tensor | None
) -> torch.Tensor:
    """As ``selection.best_products``, for what ``fits``. ``codes``: int8 ``[heads, group, width]``;
    ``scales``: float32 ``[heads, group, 1]``."""
    heads, group, width = codes.shape
    blocks = coded.shape[1] if places is None else places.shape[1]
    rows = coded.shape[2]
    best = torch.empty(heads, group, blocks, dtype=torch.float32, device=coded.device)
    if not blocks:
        return best
    floats = coded.view(torch.float32)
    tile = max(1, _ROWS_AT_ONCE // rows)
    _kernel("best_rows")[(heads, -(-blocks // tile))](
        codes.contiguous(), scales.contiguous(), coded, floats,
        coded if places is None else places.contiguous(), best, blocks,
        *coded.stride()[:3], *floats.stride()[:2],
        GROUP=group, PADDED=max(16, _next_power(group)), ROWS=rows,
        WIDTH=width, WIDE=max(32, _next_power(width)), TILE=tile, PLACED=places is not None,
    )  # fmt: skip
    return best


def move(sources: Addresses, targets: Addresses, piece: Piece, device: torch.device) -> None:
    """Copies items between addresses, on the device's current stream.

    A GPU reads page-locked host memory by the address it has in the process (CUDA's unified
    addressing), so blocks are fetched from the arena without a call for each. The device can read
    all sources, and write all targets, until it has copied them.
    """
    if not len(sources):
        return
    words = piece.nbytes // _WORD
    parts = -(-words // _WORDS_AT_ONCE)
    both = torch.from_numpy(np.stack([sources, targets])).to(device)
    _kernel("move_words")[(len(sources), piece.count, parts)](
        both[0], both[1], words, piece.step // _WORD, AT_ONCE=_WORDS_AT_ONCE
    )


def _kernel(name: str) -> Any:
    """Raises EngineError without Triton."""
    try:
        from kvrecall.attention.kernels import triton_kernels
    except ImportError as error:
        raise EngineError(
            "retrieval attention on a GPU needs triton, which vLLM for CUDA brings; install it"
        ) from error
    return getattr(triton_kernels, name)


def _next_power(count: int) -> int:
    """The smallest power of two that is not less."""
    return 1 << (count - 1).bit_length()
