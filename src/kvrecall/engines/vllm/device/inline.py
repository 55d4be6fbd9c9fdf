"""The CPU: its memory is host memory, and work is complete when it is queued."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any

import torch

from kvrecall.attention.kernels.device import Piece
from kvrecall.engines.vllm.device.base import Addresses, Batch, Device, Event, ItemRun, Stream

_WORTH_SHARING = 4 << 20
"""One thread copies batches of fewer bytes."""
_PARTS = 8  # of a batch for each thread


class Moment(Event):
    """A time, which is past."""

    __slots__ = ("_at",)

    def __init__(self) -> None:
        self._at = time.perf_counter()

    def is_reached(self) -> bool:
        return True

    def wait(self) -> None:
        return

    def seconds_since(self, earlier: Event) -> float:
        assert isinstance(earlier, Moment)
        return self._at - earlier._at


class InlineStream(Stream):
    """Shares large batches among as many threads as torch computes with in this process.

    Each takes the next part when it is done with one, as its processor may be taken: after an
    operation of torch the threads of OpenMP keep it busy for some milliseconds.
    """

    def __init__(self) -> None:
        self._helpers = torch.get_num_threads() - 1
        self._team = ThreadPoolExecutor(max(1, self._helpers), "kvrecall-copy")

    def record(self) -> Event:
        return Moment()

    def wait(self, event: Event) -> None:
        return

    def run(self, work: Callable[[], None]) -> None:
        work()

    def copy(self, batch: Batch) -> None:
        if not self._helpers or batch.nbytes < _WORTH_SHARING:
            batch.copy_here()
            return
        batch = batch.in_order()
        parts = deque(batch.runs(-(-len(batch.sizes) // ((1 + self._helpers) * _PARTS))))
        helping = [self._team.submit(_copy_parts, batch, parts) for _ in range(self._helpers)]
        _copy_parts(batch, parts)
        for helper in helping:
            if not helper.cancel():  # one that has not begun is not needed any more
                helper.result()


def _copy_parts(batch: Batch, parts: deque[ItemRun]) -> None:
    """Copies parts of a batch as long as there are any."""
    while parts:
        try:
            part = parts.popleft()
        except IndexError:  # another thread has the last one
            return
        batch.copy_run(part)


class Caller(Executor):
    """The thread that submits."""

    def submit(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(work(*args, **kwargs))
        return future


class InlineDevice(Device):
    """Its streams differ in nothing."""

    in_step = True

    def __init__(self, device: torch.device) -> None:
        self._current = InlineStream()

    def stream(self, name: str) -> Stream:
        return self._current

    def thread(self, name: str) -> Executor:
        return Caller()

    def current(self) -> Stream:
        return self._current

    def move(self, sources: Addresses, targets: Addresses, piece: Piece) -> None:
        Batch.of_pieces(sources, targets, piece).copy_here()

    def can_read(self, addresses: Addresses, nbytes: int) -> bool:
        return True

    def send(self, values: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
        return values.clone() if into is None else into.copy_(values)

    def fetch(self, values: torch.Tensor) -> tuple[torch.Tensor, Event]:
        return values.clone(), Moment()

    def lock(self, memory: torch.Tensor, populated: Callable[[], int]) -> None:
        return

    def unlock(self, memory: torch.Tensor) -> None:
        return

    def wait_locked(self, seconds: float = 0.0) -> None:
        return
