"""Copies blocks between the device KV cache and the arena.

One small interface with a form a kind of device: in place on the CPU, on a stream elsewhere.
On the CPU a copy a block and layer, shared among threads, keeps up with a plain copy of all bytes
and stays at it where the cores are busy; torch's own copies wait for their thread team there, down
to a twentieth (docs/log.md). Elsewhere consecutive blocks in consecutive slots are merged into one
strided copy a layer.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from kvrecall.engines.vllm.connector.pages import Pages
from kvrecall.engines.vllm.connector.wire import Copy

_PORTABLE, _MAPPED = 1, 2  # cudaHostRegister's flags

_WORTH_SHARING = 4 << 20
"""Copies of fewer bytes are made by one thread."""


@dataclass(frozen=True, slots=True)
class Run:
    """``count`` consecutive blocks from ``block``; slots from byte ``offset``, ``step`` apart."""

    block: int
    offset: int
    step: int
    count: int


def _real_rows(copy: Copy) -> list[tuple[int, int]]:
    """Device block and arena offset of each row. The null block (0) holds no tokens: left out."""
    return [row for row in zip(copy.block_ids, copy.offsets, strict=True) if row[0] != 0]


def runs_of(copy: Copy) -> Iterator[Run]:
    """Merges a copy's rows into runs."""
    rows = _real_rows(copy)
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


class InlineCopier(Copier):
    """The CPU form: device memory is host memory, a copy is done when it returns.

    Large copies are shared among as many threads as torch computes with in this process.
    """

    in_step = True

    def __init__(self, arena: torch.Tensor, pages: Sequence[Pages], shard_offset: int) -> None:
        super().__init__(arena, pages, shard_offset)
        self._bytes = arena.numpy()
        self._layers = [
            (page.rows.numpy(), offset, offset + page.page_bytes, tuple(page.rows.shape[1:]))
            for page, offset in zip(pages, self._layer_offsets, strict=True)
        ]
        self._helpers = torch.get_num_threads() - 1
        self._team = ThreadPoolExecutor(max(1, self._helpers), "kvrecall-copy")
        self._loads = 0
        self._stores = 0

    def load(self, copy: Copy) -> Moved:
        self._loads += 1
        return self._move(copy, True)

    def store(self, copy: Copy) -> Moved:
        self._stores += 1
        return self._move(copy, False)

    def _move(self, copy: Copy, to_device: bool) -> Moved:
        begin = time.perf_counter()
        rows = _real_rows(copy)
        nbytes = len(rows) * self._shard_bytes
        shares = 1 + self._helpers if nbytes >= _WORTH_SHARING else 1
        bounds = [len(rows) * share // shares for share in range(shares + 1)]
        parts = [rows[low:high] for low, high in pairwise(bounds)]
        helping = [self._team.submit(self._move_rows, part, to_device) for part in parts[1:]]
        self._move_rows(parts[0], to_device)
        for helper in helping:
            helper.result()
        return Moved(nbytes, time.perf_counter() - begin)

    def _move_rows(self, rows: Sequence[tuple[int, int]], to_device: bool) -> None:
        memory = self._bytes
        for block, offset in rows:
            for device, begin, end, shape in self._layers:
                record = memory[offset + begin : offset + end].reshape(shape)
                if to_device:
                    device[block] = record
                else:
                    record[...] = device[block]

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
        self._rows = [page.rows.view(len(page.rows), -1) for page in pages]
        self._in = _Lane(self._device)
        self._out = _Lane(self._device)
        _pin(arena, self._device)

    def load(self, copy: Copy) -> Moved:
        return Moved(self._in.submit(lambda: self._move(copy, True)), 0.0)

    def store(self, copy: Copy) -> Moved:
        return Moved(self._out.submit(lambda: self._move(copy, False)), 0.0)

    def _move(self, copy: Copy, to_device: bool) -> int:
        """Issues the copies of one order; returns their bytes."""
        rows = 0
        for run in runs_of(copy):
            rows += run.count
            for rows_of, layer_offset in zip(self._rows, self._layer_offsets, strict=True):
                device = rows_of[run.block : run.block + run.count]
                shape, steps = tuple(device.shape), (run.step, 1)
                host = self._arena.as_strided(shape, steps, run.offset + layer_offset)
                if to_device:
                    device.copy_(host, non_blocking=True)
                else:
                    host.copy_(device, non_blocking=True)
        return rows * self._shard_bytes

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
    """Page-locks the arena for the device, so that copies run at full speed and in background, and
    kernels may read it by its address."""
    if device.type != "cuda":
        return
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    status = runtime.cudaHostRegister(arena.data_ptr(), arena.numel(), _PORTABLE | _MAPPED)
    if int(status) != 0:
        raise RuntimeError(f"cudaHostRegister of {arena.numel()} bytes failed: {status}")


def make_copier(arena: torch.Tensor, pages: Sequence[Pages], shard_offset: int) -> Copier:
    """The copier for the device the pages lie on."""
    kind = InlineCopier if pages[0].rows.device.type == "cpu" else StreamCopier
    return kind(arena, pages, shard_offset)
