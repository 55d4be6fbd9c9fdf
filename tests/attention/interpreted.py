"""A device whose small items are moved by the Triton kernel, in its interpreter."""

from __future__ import annotations

import numpy as np
import torch

from kvrecall.attention.kernels.device import Piece, move
from kvrecall.engines.vllm.device.base import Addresses
from kvrecall.engines.vllm.device.inline import InlineDevice


class InterpretedDevice(InlineDevice):
    """Otherwise the CPU."""

    def move(self, sources: Addresses, targets: Addresses, piece: Piece) -> None:
        if len(sources):
            move(torch.from_numpy(np.stack([sources, targets])), piece)
