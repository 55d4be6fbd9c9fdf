"""Compares KV that this rank has just computed with the pool's blocks under the same keys.

Another batch shape or another chunking of the prompt may round differently, so bytes that differ
are judged by value: per layer, the deviation that a tenth of the vectors exceed, relative to
their length. docs/identity.md says what counts as equal.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from kvrecall.engines.vllm.compat.config import SCALE_BYTES, Scaled
from kvrecall.engines.vllm.connector.pages import GroupPages, LayerPages
from kvrecall.engines.vllm.wire import Deviation

_VECTOR = 32  # elements; divides every head size, so that a vector lies within one key or value
_QUANTILE = 0.9
_FLOOR = 1e-2  # of the median length: shorter vectors are measured against that
_MOST_VECTORS = 1024  # of a layer; beyond it they are sampled evenly

_BOUNDS = {
    torch.float32: (2.0**-13, 2.0**-13),
    torch.float16: (2.0**-10, 2.0**-9),
    torch.bfloat16: (2.0**-7, 2.0**-6),
    torch.float8_e4m3fn: (2.0**-4, 2.0**-4),
    torch.float8_e5m2: (2.0**-3, 2.0**-3),
    torch.int8: (2.0**-5, 2.0**-5),
}
"""Deviation allowed in the first layer, and the increase in every further one: about three times
the difference between decoded blocks and the same blocks prefilled (archive/log.md)."""

_OPAQUE = (2.0**-3, 2.0**-3)  # bytes whose format is not known are taken as integers
_MOST = 0.5  # vectors that have nothing to do with each other deviate by 1.4


def deviation(
    group: GroupPages,
    memory: torch.Tensor,
    block_ids: Sequence[int],
    offsets: Sequence[int],
    computes: torch.dtype,
    exact: bool,
) -> Deviation:
    """Compares device blocks with records of the arena.

    ``group``: the layers of their KV group, consecutive in a record. ``memory``: the arena, uint8
    ``[bytes]``. ``offsets``: of the records of ``block_ids``. ``computes``: the dtype the model
    computes in; what it keeps more precisely is no more exact. ``exact``: kernels are
    deterministic, so bytes must be equal. Waits for the device.
    """
    device = group.pages[0].rows.device if group.pages else torch.device("cpu")
    ids = torch.tensor(block_ids, dtype=torch.int64, device=device)
    arena = memory.numpy()
    differs = np.zeros(len(block_ids), dtype=bool)
    worst = (0.0, 0.0, "")
    for depth, page in enumerate(group.pages):
        rows = [page.rows[block] for block in block_ids]
        if device.type != "cpu":
            rows = list(page.rows[ids].cpu())
        computed = [row.reshape(-1).numpy() for row in rows]
        pooled = [group.read(depth, arena[offset:]) for offset in offsets]
        # By numpy, as torch's thread team is slow to come together on busy cores.
        pairs = zip(computed, pooled, strict=True)
        unequal = [not np.array_equal(ours, theirs) for ours, theirs in pairs]
        if not any(unequal):
            continue
        differs |= unequal
        for part, dtype in _parts(page):
            relative = _relative(
                _sample([block[part] for block in computed], dtype, page.scaled),
                _sample([block[part] for block in pooled], dtype, page.scaled),
            )
            bound = _bound(dtype, computes, depth)
            worst = max(worst, (relative / bound, relative, page.name))
    times, relative, layer = worst
    return Deviation(len(ids), int(differs.sum()), times, relative, layer, exact)


def _parts(page: LayerPages) -> list[tuple[slice, torch.dtype]]:
    """The bytes of a page by the tensors in it, with their dtypes."""
    if not page.parts:
        return [(slice(None), page.scaled.dtype if page.scaled else page.dtype)]
    ends = list(itertools.accumulate(nbytes for nbytes, _ in page.parts))
    starts = [0, *ends]
    return [
        (slice(start, end), dtype)
        for start, end, (_, dtype) in zip(starts, ends, page.parts, strict=False)
    ]


def _bound(dtype: torch.dtype, computes: torch.dtype, depth: int) -> float:
    """Largest relative deviation allowed in the layer at that depth."""
    own = _BOUNDS.get(dtype, _OPAQUE)
    first, further = max(own, _BOUNDS.get(computes, own))
    return min(_MOST, first + further * depth)


def _relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The deviation that a tenth of the vectors exceed; infinite where a value is no number in
    one of them only. float32 ``[vectors, 32]``.

    In float64: a quotient that overflows makes the quantile NaN, which exceeds no bound."""
    if bool((ours.isfinite() != theirs.isfinite()).any()):
        return float("inf")
    ours, theirs = ours.nan_to_num().double(), theirs.nan_to_num().double()
    length = theirs.norm(dim=1)
    floor = max(float(length.median()) * _FLOOR, torch.finfo(torch.float32).tiny)
    ratio = (ours - theirs).norm(dim=1) / length.clamp(min=floor)
    return float(torch.quantile(ratio, _QUANTILE))


def _sample(
    blocks: Sequence[np.ndarray[Any, Any]], dtype: torch.dtype, scaled: Scaled | None = None
) -> torch.Tensor:
    """Vectors of these blocks' bytes, a limited number evenly chosen: float32 ``[vectors, 32]``."""
    known = dtype if dtype in _BOUNDS else torch.int8
    step = _VECTOR * known.itemsize
    if scaled is not None:
        step = scaled.nbytes + SCALE_BYTES
    each = max(1, _MOST_VECTORS // len(blocks))
    chosen = []
    for block in blocks:
        rows = block[: len(block) // step * step].reshape(-1, step)
        places = np.linspace(0, len(rows) - 1, min(each, len(rows))).astype(np.int64)
        chosen.append(rows[places])
    taken = torch.from_numpy(np.concatenate(chosen))
    if scaled is None:
        return taken.view(known).to(torch.float32)
    values = taken[:, : scaled.nbytes].contiguous().view(scaled.dtype).to(torch.float32)
    values *= taken[:, scaled.nbytes :].contiguous().view(torch.float32)
    return values[:, : scaled.nbytes // _VECTOR * _VECTOR].reshape(-1, _VECTOR)
