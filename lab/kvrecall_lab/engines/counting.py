"""A device that counts what it is asked for, around any other: for the benchmarks, and for tests of
what an order costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from kvrecall.attention.kernels.device import Piece
from kvrecall.engines.vllm import device as devices
from kvrecall.engines.vllm.device.accelerator import AcceleratorDevice
from kvrecall.engines.vllm.device.base import Addresses, Batch, Device, Event, Stream


@dataclass(slots=True)
class Counts:
    """``calls``: of the driver that queue copies or kernels. ``items``: runs of bytes in them, and
    ``nbytes`` of all. ``host_waits``: how often a thread was blocked until work was complete."""

    calls: int = 0
    items: int = 0
    nbytes: int = 0
    host_waits: int = 0

    def add(self, batch: Batch, calls: int) -> None:
        self.calls += calls
        self.items += len(batch.sizes)
        self.nbytes += batch.nbytes


@contextmanager
def counted(device: torch.device) -> Iterator[Counts]:
    """Counts what is asked of devices of this type by objects that are made in here, also later."""
    counts = Counts()
    plain = devices.FORMS.get(device.type)
    devices.FORMS[device.type] = lambda one: CountingDevice(
        (plain or AcceleratorDevice)(one), counts
    )
    devices.device_of.cache_clear()
    try:
        yield counts
    finally:
        del devices.FORMS[device.type]
        if plain is not None:
            devices.FORMS[device.type] = plain
        devices.device_of.cache_clear()


class CountingEvent(Event):
    def __init__(self, event: Event, counts: Counts) -> None:
        self.event = event
        self._counts = counts

    def is_reached(self) -> bool:
        return self.event.is_reached()

    def wait(self) -> None:
        self._counts.host_waits += 1
        self.event.wait()

    def seconds_since(self, earlier: Event) -> float:
        assert isinstance(earlier, CountingEvent)
        return self.event.seconds_since(earlier.event)


class CountingStream(Stream):
    def __init__(self, stream: Stream, counts: Counts) -> None:
        self._stream = stream
        self._counts = counts

    def record(self) -> Event:
        return CountingEvent(self._stream.record(), self._counts)

    def wait(self, event: Event) -> None:
        assert isinstance(event, CountingEvent)
        self._stream.wait(event.event)

    def copy(self, batch: Batch) -> None:
        self._counts.add(batch, calls=1)
        self._stream.copy(batch)


class CountingDevice(Device):
    """See the module. ``move`` counts as two calls: the addresses' copy, and the kernel."""

    def __init__(self, device: Device, counts: Counts) -> None:
        self._device = device
        self._counts = counts
        self.in_step = device.in_step

    def stream(self, name: str) -> Stream:
        return CountingStream(self._device.stream(name), self._counts)

    def thread(self, name: str) -> Executor:
        return self._device.thread(name)

    def current(self) -> Stream:
        return CountingStream(self._device.current(), self._counts)

    def move(self, sources: Addresses, targets: Addresses, piece: Piece) -> None:
        self._counts.add(Batch.of_pieces(sources, targets, piece), calls=2)
        self._device.move(sources, targets, piece)

    def can_read(self, addresses: Addresses, nbytes: int) -> bool:
        return self._device.can_read(addresses, nbytes)

    def send(self, values: torch.Tensor) -> torch.Tensor:
        self._count_one(values)
        return self._device.send(values)

    def fetch(self, values: torch.Tensor) -> tuple[torch.Tensor, Event]:
        self._count_one(values)
        here, event = self._device.fetch(values)
        return here, CountingEvent(event, self._counts)

    def _count_one(self, values: torch.Tensor) -> None:
        self._counts.calls += 1
        self._counts.items += 1
        self._counts.nbytes += values.nbytes

    def numa_node(self) -> int | None:
        return self._device.numa_node()

    def lock(self, memory: torch.Tensor, populated: Callable[[], int]) -> None:
        self._device.lock(memory, populated)

    def unlock(self, memory: torch.Tensor) -> None:
        self._device.unlock(memory)

    def wait_locked(self) -> None:
        self._device.wait_locked()
