"""Batched copies by CUDA's driver, as they are made where no vLLM is installed: with a driver of
CUDA's signature that copies host memory."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kvrecall.engines.vllm.device import accelerator, driver
from kvrecall.errors import EngineError

STREAM = 0x51


class Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class Attributes(ctypes.Structure):
    """cuda.h of CUDA 12.8."""

    _fields_ = [
        ("srcAccessOrder", ctypes.c_int),
        ("srcLocHint", Location),
        ("dstLocHint", Location),
        ("flags", ctypes.c_uint),
    ]


@ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.POINTER(ctypes.c_uint64),
    ctypes.POINTER(ctypes.c_uint64),
    ctypes.POINTER(ctypes.c_size_t),
    ctypes.c_size_t,
    ctypes.POINTER(Attributes),
    ctypes.POINTER(ctypes.c_size_t),
    ctypes.c_size_t,
    ctypes.POINTER(ctypes.c_size_t),
    ctypes.c_void_p,
)
def cuMemcpyBatchAsync(targets, sources, sizes, count, attributes, starts, kinds, failed, stream):  # type: ignore[no-untyped-def]
    known = attributes[0].srcAccessOrder, attributes[0].flags, starts[0], kinds
    if known != (1, 0, 0, 1) or stream != STREAM:
        return 1
    for item in range(count):
        if not sizes[item]:
            failed[0] = item
            return 1
        ctypes.memmove(targets[item], sources[item], sizes[item])
    return 0


class Side(ctypes.Structure):
    _fields_ = [
        ("XInBytes", ctypes.c_size_t),
        ("Y", ctypes.c_size_t),
        ("MemoryType", ctypes.c_int),
        ("Host", ctypes.c_void_p),
        ("Device", ctypes.c_uint64),
        ("Array", ctypes.c_void_p),
        ("Pitch", ctypes.c_size_t),
    ]


class Memcpy2D(ctypes.Structure):
    """cuda.h of CUDA 13.0."""

    _fields_ = [
        ("src", Side),
        ("dst", Side),
        ("WidthInBytes", ctypes.c_size_t),
        ("Height", ctypes.c_size_t),
    ]


@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(Memcpy2D), ctypes.c_void_p)
def cuMemcpy2DAsync(told, stream):  # type: ignore[no-untyped-def]
    copy = told[0]
    begins = []
    for side in (copy.src, copy.dst):
        others = {1: (side.Device or 0), 2: (side.Host or 0)}[side.MemoryType]
        if others or side.XInBytes or side.Y or side.Array or side.Pitch < copy.WidthInBytes:
            return 1
        begins.append(side.Host if side.MemoryType == 1 else side.Device)
    if stream != STREAM or copy.src.MemoryType == copy.dst.MemoryType:
        return 1
    for row in range(copy.Height):
        to, of = begins[1] + row * copy.dst.Pitch, begins[0] + row * copy.src.Pitch
        ctypes.memmove(to, of, copy.WidthInBytes)
    return 0


@pytest.mark.parametrize("is_load", [False, True])
def test_rows_are_one_call_of_the_driver(is_load: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    address = ctypes.cast(cuMemcpy2DAsync, ctypes.c_void_p).value
    assert address is not None
    library = SimpleNamespace(cuMemcpy2DAsync_v2=ctypes.CFUNCTYPE(ctypes.c_int)(address))
    monkeypatch.setattr(ctypes, "CDLL", lambda _: library)
    stream = SimpleNamespace(cuda_stream=STREAM)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    driver._driver.cache_clear()
    try:
        assert driver.copies_rows()
        source = np.arange(100, dtype=np.uint8)
        target = np.zeros(100, dtype=np.uint8)
        of, to = driver.Place(source.ctypes.data, 20), driver.Place(target.ctypes.data + 3, 11)
        driver.copy_rows(4, 7, of, to, is_load)
        want = np.zeros(100, dtype=np.uint8)
        for row in range(4):
            want[3 + row * 11 :][:7] = source[row * 20 :][:7]
        assert np.array_equal(target, want)
        with pytest.raises(EngineError, match="cuMemcpy2DAsync: CUDA error 1"):
            driver.copy_rows(4, 12, of, to, is_load)
    finally:
        driver._driver.cache_clear()


@pytest.fixture
def libcuda(monkeypatch: pytest.MonkeyPatch) -> None:
    address = ctypes.cast(cuMemcpyBatchAsync, ctypes.c_void_p).value
    assert address is not None
    call = ctypes.CFUNCTYPE(ctypes.c_int)(address)
    monkeypatch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace(cuMemcpyBatchAsync=call))
    stream = SimpleNamespace(cuda_stream=STREAM)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    driver._driver.cache_clear()


def test_a_batch_is_one_call_of_the_driver(libcuda: None) -> None:
    source = np.arange(100, dtype=np.uint8)
    target = np.zeros(100, dtype=np.uint8)
    begins = torch.tensor([3, 50])
    driver.swap_blocks_batch(
        begins + source.ctypes.data, begins + 7 + target.ctypes.data, torch.tensor([10, 20])
    )
    want = np.zeros(100, dtype=np.uint8)
    want[10:20], want[57:77] = source[3:13], source[50:70]
    assert np.array_equal(target, want)


def test_what_the_driver_refuses_is_an_error(libcuda: None) -> None:
    item = torch.zeros(16, dtype=torch.uint8).data_ptr()
    places = torch.tensor([item, item])
    with pytest.raises(EngineError, match="CUDA error 1 at item 1"):
        driver.swap_blocks_batch(places, places + 8, torch.tensor([4, 0]))


def gone(_: str) -> SimpleNamespace:
    raise OSError("libcuda.so.1: cannot open shared object file")


@pytest.mark.parametrize("library", [gone, lambda _: SimpleNamespace()])
def test_without_such_a_driver_the_cure_is_named(
    library: Callable[[str], SimpleNamespace], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ctypes, "CDLL", library)
    driver._driver.cache_clear()
    with pytest.raises(EngineError, match=r"install vLLM .* or a driver of CUDA 12\.8"):
        driver.swap_blocks_batch(*torch.ones(3, 1, dtype=torch.int64))


def test_it_is_used_where_no_vllm_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("vllm", "vllm.v1.kv_offload.cpu.host_register"):
        monkeypatch.setitem(sys.modules, module, None)
    assert accelerator.swap_blocks_batch() is driver.swap_blocks_batch
    if not torch.cuda.is_available():
        assert not driver.host_register(4096, 4096)
    called = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    error = SimpleNamespace(value=0)
    runtime = SimpleNamespace(
        cudaHostRegister=lambda *args: called.append(args) or error,
        cudaHostUnregister=called.append,
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    assert driver.host_register(4096, 8192)
    driver.host_unregister(4096)
    assert called == [(4096, 8192, 0), 4096]
    error.value = 2
    assert not driver.host_register(4096, 8192)
