"""A device whose small items are moved by the Triton kernel, in its interpreter."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from kvrecall.attention.kernels.device import Piece, move
from kvrecall.engines.vllm.device.base import Addresses
from kvrecall.engines.vllm.device.inline import InlineDevice


class InterpretedDevice(InlineDevice):
    """Otherwise the CPU; but it cannot read host memory that was unlocked."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._unlocked: dict[int, int] = {}

    def lock(self, memory: torch.Tensor, populated: Callable[[], int]) -> None:
        self._unlocked.pop(memory.data_ptr(), None)

    def unlock(self, memory: torch.Tensor) -> None:
        self._unlocked[memory.data_ptr()] = memory.numel()

    def move(self, sources: Addresses, targets: Addresses, piece: Piece) -> None:
        for begin, nbytes in self._unlocked.items():
            assert not ((begin <= sources) & (sources < begin + nbytes)).any(), "an illegal address"
        if len(sources):
            move(torch.from_numpy(np.stack([sources, targets])), piece)
