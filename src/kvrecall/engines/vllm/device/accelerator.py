"""Devices with streams: CUDA, and what else ``torch.accelerator`` knows and vLLM has batched copies
for. ``kvrecall gpu-check`` runs them on a device: an H200 so far (docs/gpu-check.md)."""

from __future__ import annotations

import fcntl
import functools
import logging
import math
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from time import monotonic, sleep

import numpy as np
import numpy.typing as npt
import torch

from kvrecall.attention.kernels import device as kernels
from kvrecall.attention.kernels.device import Piece
from kvrecall.engines.vllm.device import driver
from kvrecall.engines.vllm.device.base import (
    FETCHED_BYTES,
    Addresses,
    Batch,
    Device,
    Event,
    Stream,
    bytes_of,
)
from kvrecall.nicety import nicety

ITEMS_A_CALL = 256
"""Of the driver, which begins to copy when it has taken all items of a call, each in half a
microsecond: an H200 copies items of 64 KiB with 34 GB/s in calls of 8,192, and with 49 in calls of
256 (archive/log.md). CUDA's has crashed with 51,828 (vLLM issue 49276), ROCm's faults above 8,192
(vLLM pull request 43018)."""

FEWEST_ROWS = 4
"""That are copied as rows: a call takes as long as some items."""

LEAST_ROW_BYTES, MOST_ROW_BYTES = 16 << 10, 512 << 10
"""Of those, the latter excluded. Smaller ones are loaded by a kernel; of larger ones an H200 copies
47.8 GB/s as rows, and 49.2 by vLLM's call (docs/gpu-check.md)."""

_PARTS, _PART_BYTES = 4, 2 << 20
"""Of the ring of locked memory through which values are sent. A step sends some tens of KiB."""

_FETCHES = 128
"""Tensors that may be on their way to the host at one time."""

_ALIGNMENT = 64


class StreamEvent(Event):
    """An event of torch's, with its time."""

    def __init__(self, event: torch.Event) -> None:
        self.event = event

    def is_reached(self) -> bool:
        return bool(self.event.query())

    def wait(self) -> None:
        self.event.synchronize()

    def seconds_since(self, earlier: Event) -> float:
        assert isinstance(earlier, StreamEvent)
        return float(earlier.event.elapsed_time(self.event)) / 1000


class AcceleratorStream(Stream):
    """A stream of torch's. What is at even distances is copied as rows, one call for all of a
    layer's blocks. The rest is, as in vLLM's own offloading, calls of the driver
    (``cuMemcpyBatchAsync`` where CUDA has it), or one of a kernel: copy engines load items below
    28 KiB at a tenth of the bus (vLLM pull request 42212)."""

    def __init__(self, stream: torch.Stream, locks: dict[int, PageLock]) -> None:
        self._stream = stream
        self._locks = locks

    def record(self) -> Event:
        event = torch.Event(self._stream.device, enable_timing=True)
        event.record(self._stream)
        return StreamEvent(event)

    def wait(self, event: Event) -> None:
        assert isinstance(event, StreamEvent)
        self._stream.wait_event(event.event)

    def run(self, work: Callable[[], None]) -> None:
        with self._stream:
            work()

    def copy(self, batch: Batch) -> None:
        locks = tuple(self._locks.values())
        for lock in locks:
            batch = split(batch, lock.begin, lock.end)
        if not len(batch.sizes):  # the driver takes no empty batch
            return
        # No stream writes what is loaded, so the driver may read it ahead.
        is_load = any(lock.covers(batch.sources, batch.sizes) for lock in locks)
        ours = batch.sources if is_load else batch.targets
        begin = next((lock.begin for lock in locks if lock.covers(ours, batch.sizes)), None)
        with self._stream:
            if begin is not None and self._copies_rows():
                batch = _copy_rows(batch, is_load, ours - begin)
            if len(batch.sizes):
                self._copy_items(batch, is_load)

    def _copies_rows(self) -> bool:
        is_cuda = self._stream.device.type == "cuda" and not torch.version.hip
        return is_cuda and driver.copies_rows()

    def _copy_items(self, batch: Batch, is_load: bool) -> None:
        numbers = np.uint64 if self._stream.device.type == "xpu" else np.int64  # as vLLM has it
        items = (column.view(numbers) for column in (batch.sources, batch.targets, batch.sizes))
        columns = [torch.from_numpy(column) for column in items]
        kernel = copy_kernel(batch, self._stream.device) if is_load else None
        if kernel is not None:
            kernel(*columns)
            return
        for first in range(0, len(batch.sizes), ITEMS_A_CALL):
            part = (column[first : first + ITEMS_A_CALL] for column in columns)
            swap_blocks_batch()(*part, is_load)


def _copy_rows(batch: Batch, is_load: bool, places: Addresses) -> Batch:
    """Copies those items that are rows, and returns the others. ``places``: of the items in locked
    memory, of which no copy may lie in two chunks."""
    left = np.ones(len(batch.sizes), dtype=bool)
    chunks = places // CHUNK_BYTES
    for run in batch.runs(len(left)):
        nbytes = int(batch.sizes[run.begin])
        if not run.is_even or not LEAST_ROW_BYTES <= nbytes < MOST_ROW_BYTES:
            continue
        edges: list[int] = []
        if chunks[run.begin] != chunks[run.end - 1]:
            edges = (np.flatnonzero(np.diff(chunks[run.begin : run.end])) + 1 + run.begin).tolist()
        for begin, end in pairwise((run.begin, *edges, run.end)):
            if end - begin < FEWEST_ROWS:
                continue
            source, target = (
                driver.Place(int(column[begin]), int(column[begin + 1] - column[begin]))
                for column in (batch.sources, batch.targets)
            )
            if max(source.step, target.step) <= driver.MOST_STEP:
                driver.copy_rows(end - begin, nbytes, source, target, is_load)
                left[begin:end] = False
    return Batch(batch.sources[left], batch.targets[left], batch.sizes[left])


class AcceleratorDevice(Device):
    """One device of a worker's process."""

    in_step = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._locks: dict[int, PageLock] = {}
        self._moves: Stream | None = None
        # Made once: see ``driver.pinned``.
        self._ring = driver.pinned(_PARTS * _PART_BYTES).view(_PARTS, -1)
        self._read: list[Event | None] = [None] * _PARTS  # when the device has read each part
        self._part = self._at = 0
        self._fetched = driver.pinned(_FETCHES * FETCHED_BYTES).view(_FETCHES, -1)
        self._free = list(range(_FETCHES))

    def stream(self, name: str) -> Stream:
        return AcceleratorStream(torch.Stream(self._device), self._locks)

    def thread(self, name: str) -> Executor:
        # A new thread's device is the first, on which this process has nothing to do.
        enter, which = torch.accelerator.set_device_index, self._device.index
        return ThreadPoolExecutor(1, f"kvrecall-{name}", enter, (which,))

    def current(self) -> Stream:
        stream = torch.accelerator.current_stream(self._device)
        return AcceleratorStream(stream, self._locks)

    def move(self, sources: Addresses, targets: Addresses, piece: Piece) -> None:
        """A kernel reads locked memory by the address it has in the process (CUDA's unified
        addressing), so that small items need no call for each. What is not locked it could not
        read: the driver copies then."""
        extent = (piece.count - 1) * piece.step + piece.nbytes
        if all(lock.has(sources, extent) for lock in self._locks.values()):
            if len(sources):
                both = self.send(torch.from_numpy(np.stack([sources, targets])))
                kernels.move(both, piece)
        else:
            # Not on the engine's stream, which may be the default one: it takes no batch.
            if self._moves is None:
                self._moves = self.stream("moves")
            self._moves.wait(self.current().record())
            self._moves.copy(Batch.of_pieces(sources, targets, piece))
            self.current().wait(self._moves.record())

    def can_read(self, addresses: Addresses, nbytes: int) -> bool:
        if not len(addresses):
            return True
        sizes = np.full(len(addresses), nbytes, dtype=np.int64)
        return any(lock.covers(addresses, sizes) for lock in self._locks.values())

    def send(self, values: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
        """By way of locked memory: a copy from other memory waits for the stream."""
        sent = into
        if sent is None:
            sent = torch.empty(values.shape, dtype=values.dtype, device=self._device)
        ours, theirs = (bytes_of(one) for one in (values.contiguous(), sent))
        for at in range(0, len(ours), _PART_BYTES):
            here, there = (one[at : at + _PART_BYTES] for one in (ours, theirs))
            there.copy_(self._staged(len(here)).copy_(here), non_blocking=True)
        return sent

    def _staged(self, nbytes: int) -> torch.Tensor:
        """The next bytes of the ring. Of a part, the host writes the first when the device has
        copied what was there before: the host waits only if the device is that far behind."""
        if self._at + nbytes > _PART_BYTES:
            self._read[self._part] = self.current().record()
            self._part, self._at = (self._part + 1) % _PARTS, 0
            read = self._read[self._part]
            if read is not None:
                read.wait()
        at, self._at = self._at, self._at + -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        return self._ring[self._part, at : at + nbytes]

    def captured(self, work: Callable[[], object]) -> Callable[[], object]:
        again = super().captured(work)
        if self._device.type != "cuda":
            return again
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        return graph.replay

    def fetch(self, values: torch.Tensor) -> tuple[torch.Tensor, Event]:
        if self._free and values.nbytes <= FETCHED_BYTES:
            slot = self._free.pop()
            here = self._fetched[slot, : values.nbytes].view(values.dtype).view(values.shape)
            # Before the next copy into the slot this one is made: they are on one stream.
            weakref.finalize(here, self._free.append, slot)
        else:
            here = torch.empty_like(values, device="cpu")
        here.copy_(values, non_blocking=True)
        return here, self.current().record()

    def can_fetch(self, nbytes: int) -> bool:
        return super().can_fetch(nbytes) and len(self._free) > 1  # the last is for counters

    @nicety("the search for the memory near a device")
    def numa_node(self) -> int | None:
        is_cuda = self._device.type == "cuda"
        address = driver.pci_address(self._device.index or 0) if is_cuda else None
        return None if address is None else numa_node_at(address)

    def lock(self, memory: torch.Tensor, populated: Callable[[], int]) -> None:
        lock = PageLock(memory, self._device, populated)
        self._locks[memory.data_ptr()] = lock

    def unlock(self, memory: torch.Tensor) -> None:
        lock = self._locks.pop(memory.data_ptr(), None)
        if lock is not None:
            lock.close()

    def wait_locked(self, seconds: float = math.inf) -> None:
        until = monotonic() + seconds
        for lock in self._locks.values():
            lock.settle(max(0.0, until - monotonic()))


def swap_blocks_batch() -> Callable[..., None]:
    """vLLM's batched copy for this platform, or CUDA's where no vLLM is installed."""
    try:
        from vllm import _custom_ops as ops
    except ImportError:
        return driver.swap_blocks_batch
    return ops.swap_blocks_batch


def copy_kernel(batch: Batch, device: torch.device) -> Callable[..., None] | None:
    """vLLM's kernel for small items from locked memory, under vLLM's conditions: of a few items,
    and on GPUs of AMD and Intel, the driver copies. None then."""
    try:
        from vllm.triton_utils import HAS_TRITON
        from vllm.v1.kv_offload.cpu import swap_blocks_triton as small
    except ImportError:
        return None
    most = int(batch.sizes.max())
    words = int(np.bitwise_or.reduce(batch.sources | batch.targets | batch.sizes)) % 8 == 0
    is_small = most < small.THRESHOLD_BYTES and len(batch.sizes) >= small.MIN_N
    if not (HAS_TRITON and words and is_small and device.type == "cuda") or torch.version.hip:
        return None
    chunk = min(1 << (most - 1).bit_length(), 8192)
    return functools.partial(small.swap_blocks_batch, bytes_per_chunk=chunk)


def split(batch: Batch, begin: int, end: int) -> Batch:
    """The same, without items that cross a chunk's end in the host memory ``[begin, end)``: the
    driver takes none that is in two locked ranges, or only partly in one."""
    while True:
        both = batch.sources, batch.targets
        if not any(_crosses(ours, batch.sizes, begin, end) for ours in both):
            return batch
        room = np.full(len(batch.sizes), np.iinfo(np.int64).max)  # to the end of its chunk
        for ours in both:
            inside = (ours >= begin) & (ours < end)
            room[inside] = CHUNK_BYTES - (ours[inside] - begin) % CHUNK_BYTES
        crossing = batch.sizes > room
        rest = room[crossing]
        batch = Batch(
            np.concatenate([batch.sources, batch.sources[crossing] + rest]),
            np.concatenate([batch.targets, batch.targets[crossing] + rest]),
            np.concatenate([np.minimum(batch.sizes, room), batch.sizes[crossing] - rest]),
        )


def _crosses(ours: Addresses, sizes: Addresses, begin: int, end: int) -> bool:
    """Whether an item that begins in ``[begin, end)`` goes on in the next chunk."""
    if not len(ours) or int(ours.max()) < begin or int(ours.min()) >= end:
        return False
    places = ours - begin
    crosses = places // CHUNK_BYTES < (places + sizes - 1) // CHUNK_BYTES
    return bool((crosses & (ours >= begin) & (ours < end)).any())


logger = logging.getLogger("vllm.kvrecall")

CHUNK_BYTES = 1 << 28
"""Locked in one call, during which no process of the node may launch anything: some 25 ms. A
driver's call takes less than 512 GiB."""

_IDLE_S = 1.0
"""Between two looks at whether more is populated."""

_PAUSE = 9
"""Times as long as a call takes the thread pauses in its turn, once the engine serves: then nine
tenths of the time no process of the node locks."""

_TURN_S = 10.0
"""The longest that a process waits for its turn to lock a chunk."""

DRIVER = Path("/sys/module/nvidia")
"""Processes take turns by a lock of this folder, which all containers of a node see."""


@contextmanager
def turn() -> Iterator[None]:
    """Only one process of the node is within, as long as none has waited for ``_TURN_S``. The
    driver locks memory for one process at a time, and a launch waits for all that came before."""
    try:
        folder = os.open(DRIVER, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:  # another driver, or none to see
        yield
        return
    try:
        until = monotonic() + _TURN_S
        while monotonic() < until:
            with suppress(OSError):
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            sleep(0.005)
        yield
    finally:
        os.close(folder)


class PageLock:
    """Page-locks the leading bytes of a mapping, in a thread of its own, so that copies run at full
    speed and beside the host's work, and kernels may read it by its address. Owned by its device.

    The thread locks chunk after chunk, in its process's turn: what the mapping's owner has
    populated before the engine serves, as far as that waits, and later the rest and what it grows
    by, with pauses. Locking what is not populated would populate it. Where the system refuses, the
    memory stays as it is: copies are slower, and right. Every process that copies has to lock its
    own mapping, all of it: a rank's part of a record is spread over the arena in runs of some
    10 KiB, too many to lock each."""

    def __init__(
        self, memory: torch.Tensor, device: torch.device, populated: Callable[[], int]
    ) -> None:
        """``memory``: uint8 ``[bytes]``, mapped until ``close``. ``populated``: as of
        ``Device.lock``."""
        self.begin = memory.data_ptr()
        self.end = self.begin + memory.numel()
        self._device = device
        self._populated = populated
        self._locked = 0  # leading bytes; the thread raises it
        self.settled = threading.Event()  # when all that is populated is locked, or refused
        self._seconds, self._told = 0.0, 0  # of locking, and bytes when that was told
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvrecall-page-lock", daemon=True)
        self._thread.start()

    def has(self, addresses: npt.NDArray[np.int64], nbytes: int) -> bool:
        """Whether all that lies in this memory, of ``nbytes`` from each address on, is locked."""
        inside = addresses[(addresses >= self.begin) & (addresses < self.end)]
        return int(inside.max(initial=0)) + nbytes <= self.begin + self._locked or not len(inside)

    def covers(self, addresses: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]) -> bool:
        """Whether all of these bytes lie in this memory, and are locked."""
        end = int((addresses + sizes).max())
        return self.begin <= int(addresses.min()) and end <= self.begin + self._locked

    def close(self) -> None:
        """Unlocks. No work on the memory may be queued."""
        self._stop.set()
        self._thread.join()
        with torch.accelerator.device_index(self._device.index):
            for start in range(0, self._locked, CHUNK_BYTES):
                driver.host_unregister(self.begin + start)
        self._locked = 0

    def settle(self, seconds: float) -> None:
        """Waits until all that is populated is locked, or refused; at most so long. The engine may
        serve then."""
        if not self.settled.wait(min(seconds, threading.TIMEOUT_MAX)):
            logger.warning(
                "kvrecall: after %.0f s %.1f of %.1f GiB of host memory are page-locked. The "
                "engine serves while the rest is locked, in pieces; until then copies are slower",
                seconds,
                self._locked / 2**30,
                (self.end - self.begin) / 2**30,
            )
            self.settled.set()

    def _run(self) -> None:
        """Thread."""
        try:
            self._lock_populated()
        except Exception as error:  # noqa: BLE001 - whatever a driver raises, copies are made without
            logger.warning("kvrecall: host memory is not page-locked: %s; copies are slower", error)
        self.settled.set()

    def _lock_populated(self) -> None:
        """Locks what is populated, and what will be."""
        # A new thread's device is the first, on which this process has nothing to do.
        with torch.accelerator.device_index(self._device.index):
            while not self._stop.is_set() and self._locked < self.end - self.begin:
                chunk = min(CHUNK_BYTES, self.end - self.begin - self._locked)
                if self._populated() < self._locked + chunk:
                    self._tell()
                    self.settled.set()
                    self._pause(_IDLE_S)
                    continue
                with turn():
                    began = monotonic()
                    is_locked = driver.host_register(self.begin + self._locked, chunk)
                    took = monotonic() - began
                    if is_locked and self.settled.is_set():
                        self._pause(_PAUSE * took)
                if not is_locked:
                    logger.warning(
                        "kvrecall: the system page-locked %d of the host tier's %d bytes and "
                        "refuses more: copies of the rest are slower. Make host_size smaller or "
                        "raise the limit of locked memory (ulimit -l; of a container: --ulimit "
                        "memlock=-1)",
                        self._locked,
                        self.end - self.begin,
                    )
                    break
                self._locked += chunk
                self._seconds += took
        self._tell()

    def _pause(self, seconds: float) -> None:
        self._stop.wait(seconds)

    def _tell(self) -> None:
        if self._locked > self._told:
            self._told = self._locked
            logger.info(
                "kvrecall: %.2f GiB of host memory page-locked, in %.1f s of the driver's",
                self._locked / 2**30,
                self._seconds,
            )


def numa_node_at(pci_address: str, root: Path = Path("/sys/bus/pci/devices")) -> int | None:
    """The NUMA node of a PCI device. None if the kernel does not know it."""
    try:
        node = int((root / pci_address / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None
