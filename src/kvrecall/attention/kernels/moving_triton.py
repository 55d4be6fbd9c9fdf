"""The Triton kernel of ``moving.py``. Imported only where it is used."""

from __future__ import annotations

import triton
import triton.language as tl


# Triton compiles annotations as it does the rest, so there are none but its own.
@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def move_words(  # type: ignore[no-untyped-def]
    sources, targets, words, step, AT_ONCE: tl.constexpr
):  # fmt: skip
    """Program ``(item, piece, part)`` copies ``AT_ONCE`` words of four bytes, of the ``words`` of a
    piece; pieces are ``step`` words apart. ``sources``, ``targets``: addresses."""
    item = tl.program_id(0)
    first = tl.program_id(1).to(tl.int64) * step
    at = tl.program_id(2) * AT_ONCE + tl.arange(0, AT_ONCE)
    source = tl.load(sources + item).to(tl.pointer_type(tl.int32))
    target = tl.load(targets + item).to(tl.pointer_type(tl.int32))
    there = at < words
    tl.store(target + first + at, tl.load(source + first + at, mask=there, other=0), mask=there)
