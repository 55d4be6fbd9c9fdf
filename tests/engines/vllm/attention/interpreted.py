"""A device whose small items are moved by the Triton kernel, in its interpreter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from kvrecall.attention.kernels.device import DeviceStep, Piece, fetch_by_triton, move
from kvrecall.engines.vllm.device import device_of
from kvrecall.engines.vllm.device.base import Addresses
from kvrecall.engines.vllm.device.inline import InlineDevice


def fetch(step: DeviceStep, residency: Any, addresses: torch.Tensor, *more: Any) -> None:
    """``fetch_by_triton`` of such a device."""
    used = step.facts[:, 6].repeat_interleave(step.kv_heads).bool()
    for row in step.missed[used]:
        sources = addresses[row[1 : 1 + row[0]].long()].numpy()
        assert device_of(addresses.device).can_read(sources, 1), "an illegal address"
    fetch_by_triton(step, residency, addresses, *more)


class InterpretedDevice(InlineDevice):
    """Otherwise the CPU; but it cannot read host memory that was unlocked."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._unlocked: dict[int, int] = {}

    def lock(self, memory: torch.Tensor, populated: Callable[[], int]) -> None:
        self._unlocked.pop(memory.data_ptr(), None)

    def unlock(self, memory: torch.Tensor) -> None:
        self._unlocked[memory.data_ptr()] = memory.numel()

    def can_read(self, addresses: Addresses, nbytes: int) -> bool:
        return not any(
            ((begin <= addresses) & (addresses < begin + size)).any()
            for begin, size in self._unlocked.items()
        )

    def move(self, sources: Addresses, targets: Addresses, piece: Piece) -> None:
        assert self.can_read(sources, 1), "an illegal address"
        if len(sources):
            move(torch.from_numpy(np.stack([sources, targets])), piece)
