"""Products of int8 matrices on a CPU: exact sums, by NumKong, or by PyTorch as the fallback.

PyTorch multiplies bytes fast only by large matrices, but a query has few heads: NumKong's packed
products read the digests about as fast as memory delivers them (docs/log.md).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

_LOG = logging.getLogger(__name__)
_BYTES_A_THREAD = 1 << 20
"""Minimum bytes worth waking another thread."""
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
        heads = rows.numpy()
        threads = min(torch.get_num_threads(), len(heads), 1 + rows.numel() // _BYTES_A_THREAD)
        if threads == 1:
            return torch.stack(self._of_heads(heads, range(len(heads))))
        parts = [range(at, len(heads), threads) for at in range(threads)]
        others = [_threads().submit(self._of_heads, heads, part) for part in parts[1:]]
        found = [self._of_heads(heads, parts[0]), *(other.result() for other in others)]
        return torch.stack([found[at % threads][at // threads] for at in range(len(heads))])

    def _of_heads(self, rows: Any, some: range) -> list[torch.Tensor]:
        assert self._numkong is not None
        dots = self._numkong.dots_packed
        return [torch.from_numpy(np.asarray(dots(rows[at], self._packed[at]))) for at in some]


def products_by_torch(codes: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """``PackedRows.products`` on any device: parts of sums are exact in single precision."""
    both = (torch.split(rows, _EXACT_IN_FLOAT, -1), torch.split(codes, _EXACT_IN_FLOAT, -1))
    parts = zip(*both, strict=True)
    sums = [torch.bmm(one.float(), other.float().transpose(1, 2)).int() for one, other in parts]
    return torch.stack(sums).sum(0, dtype=torch.int32)


def prepare() -> None:
    """Loads the library in advance, so that the first token does not wait for it."""
    _numkong()


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


@functools.cache
def _threads() -> ThreadPoolExecutor:
    cores = _cores()

    def spread() -> None:
        if cores:
            os.sched_setaffinity(0, cores)

    return ThreadPoolExecutor(
        max(1, torch.get_num_threads() - 1), "kvrecall-search", initializer=spread
    )


def _cores() -> set[int]:
    """The cores of this process's OpenMP threads. vLLM binds each to a core, this thread too, and
    a thread inherits the binding of the one that starts it. Empty where threads are not bound."""
    if not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) > 1:
        return set()
    cores: set[int] = set()
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # the thread has just ended
            bound = os.sched_getaffinity(int(thread))
            cores |= bound if len(bound) == 1 else set()
    return cores
