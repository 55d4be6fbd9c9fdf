"""Copies blocks between the device KV cache and the arena.

One small interface with a form a kind of device: in place on the CPU, on a stream elsewhere.
Consecutive blocks in consecutive slots are merged into one strided copy a layer. On the CPU numpy
makes it, on one thread: torch's copy is as fast on idle cores, and waits for its thread team where
the cores are busy (docs/log.md).
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from numpy.lib.stride_tricks import as_strided

from kvrecall.engines.vllm.pages import Pages
from kvrecall.engines.vllm.wire import Copy


@dataclass(frozen=True, slots=True)
class Run:
    """``count`` consecutive blocks from ``block``; slots from byte ``offset``, ``step`` apart."""

    block: int
    offset: int
    step: int
    count: int


def runs_of(copy: Copy, null_block: int = 0) -> Iterator[Run]:
    """Merges a copy's rows into runs. Rows of the null block hold no tokens and are left out."""
    rows = [
        (block, offset)
        for block, offset in zip(copy.block_ids, copy.offsets, strict=True)
        if block != null_block
    ]
    start = 0
    while start < len(rows):
        end = start + 1
        step = rows[end][1] - rows[start][1] if end < len(rows) else 0
        while (
            step > 0
            and end < len(rows)
            and rows[end][0] == rows[end - 1][0] + 1
            and rows[end][1] == rows[end - 1][1] + step
        ):
            end += 1
        count = end - start
        yield Run(rows[start][0], rows[start][1], step if count > 1 else 0, count)
        start = end


@dataclass(frozen=True, slots=True)
class Moved:
    """What one copy cost: bytes, and seconds if they are known at once (else 0)."""

    nbytes: int
    seconds: float


class Copier(ABC):
    """Moves blocks of one rank. Owned by its worker; not thread-safe.

    ``arena``: uint8 ``[arena bytes]``; ``pages``: the rank's layers; ``shard_offset``: where this
    rank's bytes start within a block's record.
    """

    in_step: bool
    """Whether copies are complete when ``load``/``store`` returns."""

    def __init__(self, arena: torch.Tensor, pages: Sequence[Pages], shard_offset: int) -> None:
        self._arena = arena
        self._pages = pages
        self._layer_offsets: list[int] = []
        at = shard_offset
        for page in pages:
            self._layer_offsets.append(at)
            at += page.page_bytes
        self._shard_bytes = at - shard_offset

    @abstractmethod
    def load(self, copy: Copy) -> Moved:
        """Arena -> device. Device blocks must not be in use."""

    @abstractmethod
    def store(self, copy: Copy) -> Moved:
        """Device -> arena, after all work queued on the device so far."""

    @abstractmethod
    def loads_done(self) -> int:
        """How many of the loads submitted so far, in order, are complete."""

    @abstractmethod
    def stores_done(self) -> int:
        """How many of the stores submitted so far, in order, are complete."""

    @abstractmethod
    def drain(self) -> None:
        """Waits until every submitted copy is complete."""

    def _move(self, copy: Copy, to_device: bool) -> int:
        """Issues the copies of one order; returns their bytes."""
        rows = 0
        for run in runs_of(copy):
            rows += run.count
            for layer, layer_offset in enumerate(self._layer_offsets):
                self._move_run(run, layer, run.offset + layer_offset, to_device)
        return rows * self._shard_bytes

    @abstractmethod
    def _move_run(self, run: Run, layer: int, offset: int, to_device: bool) -> None:
        """Copies a run's rows of one layer, which lie ``run.step`` apart from ``offset`` on."""


class InlineCopier(Copier):
    """The CPU form: device memory is host memory, a copy is done when it returns. One thread."""

    in_step = True

    def __init__(self, arena: torch.Tensor, pages: Sequence[Pages], shard_offset: int) -> None:
        super().__init__(arena, pages, shard_offset)
        self._bytes = arena.numpy()
        self._rows = [page.rows.numpy() for page in pages]
        self._loads = 0
        self._stores = 0

    def load(self, copy: Copy) -> Moved:
        self._loads += 1
        return self._timed(copy, True)

    def store(self, copy: Copy) -> Moved:
        self._stores += 1
        return self._timed(copy, False)

    def _move_run(self, run: Run, layer: int, offset: int, to_device: bool) -> None:
        device = self._rows[layer][run.block : run.block + run.count]
        host = as_strided(self._bytes[offset:], device.shape, (run.step, 1))
        if to_device:
            device[:] = host
        else:
            host[:] = device

    def _timed(self, copy: Copy, to_device: bool) -> Moved:
        begin = time.perf_counter()
        nbytes = self._move(copy, to_device)
        return Moved(nbytes, time.perf_counter() - begin)

    def loads_done(self) -> int:
        return self._loads

    def stores_done(self) -> int:
        return self._stores

    def drain(self) -> None:
        return


class StreamCopier(Copier):
    """The accelerator form: a stream for each direction, an event a copy.

    Written against ``torch.accelerator``-style streams; run on CUDA only by ``make gpu-check``.
    """

    in_step = False

    def __init__(self, arena: torch.Tensor, pages: Sequence[Pages], shard_offset: int) -> None:
        super().__init__(arena, pages, shard_offset)
        self._device = pages[0].rows.device
        self._in = _Lane(self._device)
        self._out = _Lane(self._device)
        _pin(arena, self._device)

    def load(self, copy: Copy) -> Moved:
        return Moved(self._in.submit(lambda: self._move(copy, True)), 0.0)

    def store(self, copy: Copy) -> Moved:
        return Moved(self._out.submit(lambda: self._move(copy, False)), 0.0)

    def _move_run(self, run: Run, layer: int, offset: int, to_device: bool) -> None:
        page = self._pages[layer]
        device = page.rows[run.block : run.block + run.count]
        host = self._arena.as_strided((run.count, page.page_bytes), (run.step, 1), offset)
        if to_device:
            device.copy_(host, non_blocking=True)
        else:
            host.copy_(device, non_blocking=True)

    def loads_done(self) -> int:
        return self._in.done()

    def stores_done(self) -> int:
        return self._out.done()

    def drain(self) -> None:
        self._in.drain()
        self._out.drain()


class _Lane:
    """Copies of one direction, in order, on a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.Stream(device)
        self._events: list[torch.Event] = []
        self._complete = 0

    def submit(self, issue: Any) -> int:
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        with self._stream:
            nbytes = int(issue())
        event = torch.Event(self._device)
        event.record(self._stream)
        self._events.append(event)
        return nbytes

    def done(self) -> int:
        while self._events and self._events[0].query():
            self._events.pop(0)
            self._complete += 1
        return self._complete

    def drain(self) -> None:
        self._stream.synchronize()
        self.done()


def _pin(arena: torch.Tensor, device: torch.device) -> None:
    """Page-locks the arena for the device, so that copies run at full speed and in background."""
    if device.type != "cuda":
        return
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    status = runtime.cudaHostRegister(arena.data_ptr(), arena.numel(), 0)
    if int(status) != 0:
        raise RuntimeError(f"cudaHostRegister of {arena.numel()} bytes failed: {status}")


def make_copier(arena: torch.Tensor, pages: Sequence[Pages], shard_offset: int) -> Copier:
    """The copier for the device the pages lie on."""
    kind = InlineCopier if pages[0].rows.device.type == "cpu" else StreamCopier
    return kind(arena, pages, shard_offset)
