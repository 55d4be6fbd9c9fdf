"""How kvrecall reaches a device: every copy, move and wait of its own goes through ``Device``, and
nothing outside this room names CUDA's streams, events or page-locking.

Forms: ``InlineDevice`` for the CPU, ``AcceleratorDevice`` for the others, and in the laboratory one
that is simulated, whose streams run late and in every order that events allow, one that counts what
is asked of it, and one without memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from kvrecall.engines.vllm.device.accelerator import AcceleratorDevice
from kvrecall.engines.vllm.device.base import Device
from kvrecall.engines.vllm.device.inline import InlineDevice

FORMS: dict[str, Callable[[torch.device], Device]] = {"cpu": InlineDevice}
"""By torch's type of a device; the form of types that are not listed is ``AcceleratorDevice``."""


@functools.cache
def device_of(device: torch.device) -> Device:
    """The device that holds such tensors: one object in a process."""
    return FORMS.get(device.type, AcceleratorDevice)(device)
