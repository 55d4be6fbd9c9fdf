"""The Triton kernel of ``search.py``. Imported only where it is used."""

from __future__ import annotations

import triton
import triton.language as tl


# Triton compiles annotations as it does the rest, so there are none but its own.
@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def best_rows(  # type: ignore[no-untyped-def]
    codes, scales, coded, floats, places, best, blocks,
    coded_head, coded_block, coded_row, float_head, float_block,
    GROUP: tl.constexpr, PADDED: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, PLACED: tl.constexpr,
):  # fmt: skip
    """One program finds the best row of ``TILE`` blocks of a head, for each query head.

    Whole numbers are multiplied and added without rounding. ``TILE * ROWS``, ``WIDE`` and
    ``PADDED`` are powers of two, at least 32, 32 and 16; of ``WIDE`` codes ``WIDTH`` are real, of
    ``PADDED`` query heads ``GROUP``.
    """
    head = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * TILE
    heads = tl.arange(0, PADDED)
    codes_of = tl.arange(0, WIDE)
    q_there = (heads < GROUP)[:, None] & (codes_of < WIDTH)[None, :]
    q_at = (head * GROUP + heads)[:, None] * WIDTH + codes_of[None, :]
    q = tl.load(codes + q_at, mask=q_there, other=0)
    many = tl.arange(0, TILE * ROWS)
    at = first + many // ROWS
    there = at < blocks
    block = at.to(tl.int64)
    if PLACED:
        block = tl.load(places + head * blocks + at, mask=there, other=0)
    row = coded + head * coded_head + block * coded_block + (many % ROWS) * coded_row
    k_there = there[None, :] & (codes_of < WIDTH)[:, None]
    k = tl.load(row[None, :] + codes_of[:, None], mask=k_there, other=0)
    sums = tl.dot(q, k, out_dtype=tl.int32)
    most = tl.max(tl.reshape(sums, [PADDED, TILE, ROWS]), 2)
    tile = first + tl.arange(0, TILE)
    inside = tile < blocks
    which = tile.to(tl.int64)
    if PLACED:
        which = tl.load(places + head * blocks + tile, mask=inside, other=0)
    of_block = tl.load(
        floats + head * float_head + which * float_block + WIDTH // 4, mask=inside, other=0.0
    )
    of_query = tl.load(scales + head * GROUP + heads, mask=heads < GROUP, other=0.0)
    out = most.to(tl.float32) * (of_query[:, None] * of_block[None, :])
    out_at = (head * GROUP + heads)[:, None] * blocks + tile[None, :]
    tl.store(best + out_at, out, mask=(heads < GROUP)[:, None] & inside[None, :])
