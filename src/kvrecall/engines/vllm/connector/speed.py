"""What computing a prompt token costs at the least, known before the first was computed.

The first request after a start may find its prefix on a slow disk. To say how long it may wait, the
time of computing must be known, at least roughly: that of the model's matrix products at the rate
this device was just seen to reach. Attention and everything else come on top.
"""

from __future__ import annotations

import time

import torch

_ROWS = 512  # tokens, as in a prefill step
_COLUMNS = 2048
_TIMES = 4


def least_token_seconds(flops: float, hidden: int, dtype: torch.dtype, device: str) -> float:
    """Seconds for ``flops`` operations in products of width ``hidden``; 0 if either is 0.

    Takes some milliseconds. The best of a few tries, as the first ones pay for other things.
    """
    if not (flops and hidden):
        return 0.0
    a = torch.ones((_ROWS, hidden), dtype=dtype, device=device)
    b = torch.ones((hidden, _COLUMNS), dtype=dtype, device=device)
    best = min(_product_seconds(a, b) for _ in range(_TIMES))
    return flops * best / (2.0 * _ROWS * hidden * _COLUMNS)


def _product_seconds(a: torch.Tensor, b: torch.Tensor) -> float:
    began = time.perf_counter()
    torch.mm(a, b)
    if a.device.type != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter() - began
