"""The accelerators of this machine, as torch knows them."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """``capability``: such as ``9.0``; "" where the device's kind has none. Sizes in bytes."""

    name: str
    capability: str
    nbytes: int
    free_bytes: int


def built_for() -> str:
    """What torch is built for, such as ``CUDA 13.0``; "" for CPUs."""
    kinds = {"cuda": "CUDA", "hip": "ROCm", "xpu": "XPU", "cann": "CANN"}
    versions = {name: getattr(torch.version, kind, None) for kind, name in kinds.items()}
    return next((f"{name} {version}" for name, version in versions.items() if version), "")


def accelerators() -> list[DeviceFacts]:
    """The devices that this process sees, by number."""
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None:
        return []
    module = torch.get_device_module(kind)
    return [_facts(module, number) for number in range(torch.accelerator.device_count())]


def _facts(module: object, number: int) -> DeviceFacts:
    properties = module.get_device_properties(number)  # type: ignore[attr-defined]
    free, total = module.mem_get_info(number)  # type: ignore[attr-defined]
    numbers = getattr(properties, "major", None), getattr(properties, "minor", None)
    capability = ".".join(map(str, numbers)) if None not in numbers else ""
    return DeviceFacts(str(properties.name), capability, int(total), int(free))
