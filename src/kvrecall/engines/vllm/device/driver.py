"""CUDA itself: copies of rows, for which vLLM has no function; batched copies and page-locking
where no vLLM is installed that brings them (``kvrecall gpu-check`` with PyTorch alone); and the
accelerators of this machine, as torch knows them."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from kvrecall.errors import EngineError


class _Attributes(ctypes.Structure):
    """CUDA's ``CUmemcpyAttributes``; both hints of places are a type and a number."""

    _fields_ = [
        ("source_order", ctypes.c_uint),
        ("source_hint", ctypes.c_int * 2),
        ("target_hint", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    ]


class Place(NamedTuple):
    """Where rows lie: the address of the first, and bytes from one to the next."""

    address: int
    step: int


_IN_STREAM_ORDER, _ANY_TIME = 1, 3  # when a source is read: when the stream gets there, or before


def swap_blocks_batch(
    sources: torch.Tensor, targets: torch.Tensor, sizes: torch.Tensor, reads_ahead: bool = False
) -> None:
    """As vLLM's function of this name: queues the copies between these addresses on the current
    stream, which must not be the default one. int64 ``[items]`` each, in host memory.
    ``reads_ahead``: no stream writes the sources. Raises EngineError."""
    attributes = _Attributes(_ANY_TIME if reads_ahead else _IN_STREAM_ORDER)
    of_item, failed = ctypes.c_size_t(0), ctypes.c_size_t(0)
    # As of CUDA 12.8, which later drivers have beside their own.
    call = _driver("cuMemcpyBatchAsync", "pppnppnpp")
    if call is None:
        raise EngineError(
            "no batched copies here: install vLLM for this device, or a driver of CUDA 12.8"
        )
    error = call(
        targets.data_ptr(), sources.data_ptr(), sizes.data_ptr(), len(sizes),
        ctypes.byref(attributes), ctypes.byref(of_item), 1, ctypes.byref(failed),
        torch.cuda.current_stream().cuda_stream,
    )  # fmt: skip
    if error:
        raise EngineError(f"cuMemcpyBatchAsync: CUDA error {error} at item {failed.value}")


@functools.cache
def _driver(name: str, arguments: str) -> Callable[..., int] | None:
    """The function of CUDA's driver with these arguments, ``p``: pointers, ``n``: sizes. None if
    there is none."""
    try:
        call = getattr(ctypes.CDLL("libcuda.so.1"), name)
    except (OSError, AttributeError):
        return None
    kinds = {"p": ctypes.c_void_p, "n": ctypes.c_size_t}
    call.argtypes = [kinds[one] for one in arguments]
    return call


class _Rows(ctypes.Structure):
    """CUDA's ``CUDA_MEMCPY2D``."""

    _fields_ = [
        (f"{side}_{name}", kind)
        for side in ("source", "target")
        for name, kind in (
            ("x", ctypes.c_size_t), ("y", ctypes.c_size_t), ("kind", ctypes.c_uint),
            ("host", ctypes.c_void_p), ("device", ctypes.c_void_p), ("array", ctypes.c_void_p),
            ("step", ctypes.c_size_t),
        )
    ] + [("nbytes", ctypes.c_size_t), ("rows", ctypes.c_size_t)]  # fmt: skip


_ROWS_COPY = "cuMemcpy2DAsync_v2", "pp"
_HOST, _DEVICE = 1, 2
MOST_STEP = (1 << 31) - 1
"""Bytes from row to row that CUDA takes."""


def copy_rows(rows: int, nbytes: int, source: Place, target: Place, is_load: bool) -> None:
    """Queues a copy of ``rows`` of ``nbytes`` on the current stream. ``is_load``: from host memory,
    which is page-locked in one call, to the device; else the other way. The bus is used to the full
    (archive/log.md), as by one copy of all their bytes. Raises EngineError."""
    sides = (_HOST, _DEVICE) if is_load else (_DEVICE, _HOST)
    told: dict[str, int] = {"nbytes": nbytes, "rows": rows}
    for side, kind, place in zip(("source", "target"), sides, (source, target), strict=True):
        where = "host" if kind == _HOST else "device"
        told |= {f"{side}_kind": kind, f"{side}_{where}": place.address, f"{side}_step": place.step}
    call = _driver(*_ROWS_COPY)
    assert call is not None
    error = call(ctypes.byref(_Rows(**told)), torch.cuda.current_stream().cuda_stream)
    if error:
        raise EngineError(f"cuMemcpy2DAsync: CUDA error {error}")


def copies_rows() -> bool:
    """Whether CUDA's driver is there for ``copy_rows``."""
    return _driver(*_ROWS_COPY) is not None


def pci_address(index: int) -> str | None:
    """Of this process's CUDA device of that number, as ``0000:3b:00.0``. None if CUDA's driver does
    not tell."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device, name = ctypes.c_int(), ctypes.create_string_buffer(32)
    failed = cuda.cuDeviceGet(ctypes.byref(device), index)
    failed = failed or cuda.cuDeviceGetPCIBusId(name, len(name), device)
    return None if failed else name.value.decode().lower()


def pinned(nbytes: int) -> torch.Tensor:
    """New page-locked host memory: uint8 ``[nbytes]``. Allocating it may stall all launches of the
    process for milliseconds (vLLM issue 37006), so never in a step."""
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


def host_register(address: int, nbytes: int) -> bool:
    """Page-locks a range, by vLLM's function for this platform, or CUDA's where no vLLM is
    installed. False if the system refuses. Leaves no error behind that a launch of another thread
    would raise, unless CUDA's keeps one for this thread, which must not launch anything."""
    try:
        from vllm.v1.kv_offload.cpu.host_register import host_register as register
    except ImportError:
        is_there = torch.cuda.is_available()
        return is_there and bool(_runtime().cudaHostRegister(address, nbytes, 0).value == 0)
    return bool(register(address, nbytes))


def host_unregister(address: int) -> None:
    """Undoes ``host_register`` of the range that begins there."""
    try:
        from vllm.v1.kv_offload.cpu.host_register import host_unregister as unregister
    except ImportError:
        unregister = _runtime().cudaHostUnregister
    unregister(address)


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


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
