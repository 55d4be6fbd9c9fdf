"""A device whose small items are moved by the Triton kernel, in its interpreter."""

from __future__ import annotations

import torch

from kvrecall.attention.kernels.device import Piece, move
from kvrecall.engines.vllm.device.base import Addresses
from kvrecall.engines.vllm.device.inline import InlineDevice


class InterpretedDevice(InlineDevice):
    """Otherwise the CPU."""

    def move(self, sources: Addresses, targets: Addresses, piece: Piece) -> None:
        move(sources, targets, piece, torch.device("cpu"))
