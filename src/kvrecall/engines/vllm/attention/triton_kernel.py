"""Sparse attention of decoded tokens over vLLM's own layout of keys and values, on a GPU."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import torch

from kvrecall.attention.digest import Layout, coded_width
from kvrecall.attention.kernels.device import (
    Addresses,
    Bucket,
    DeviceStep,
    Facts,
    Piece,
    attend_by_triton,
    choose_by_triton,
    digest_by_triton,
    fetch_by_triton,
)
from kvrecall.attention.residency import BlockNumbers, DeviceResidency
from kvrecall.attention.selection import LAUNCHES, LAUNCHES_A_BLOCK, DeviceSpeed, Split
from kvrecall.attention.settings import RetrievalSettings
from kvrecall.engines.vllm.attention.activity import Activity
from kvrecall.engines.vllm.attention.offloaded import OffloadedSequence
from kvrecall.engines.vllm.attention.step import (
    KernelShape,
    LeftBlocks,
    RowKernel,
    SparseSequence,
    SparseStep,
    Terms,
)
from kvrecall.engines.vllm.device import device_of
from kvrecall.engines.vllm.device.base import Event
from kvrecall.errors import EngineError

_TRIES = 5
"""Measurements of which the least counts: the host, which launches, has other work, too."""


class TritonKernel(RowKernel):
    """Our own kernel. Cache of any strides, blocks of a power of two of tokens."""

    chooses = True
    in_place = False

    def __init__(self, shape: KernelShape, device: torch.device) -> None:
        """Raises EngineError for blocks and heads that it cannot read."""
        if shape.block_size < 16 or shape.block_size & (shape.block_size - 1):
            raise EngineError(
                f"retrieval attention on {device.type} needs a block size that is a power of two "
                f"of at least 16, and it is {shape.block_size}; pass --block-size 128"
            )
        if shape.head_dim % 4:
            raise EngineError(
                f"retrieval attention on {device.type} needs heads of a multiple of 4, and they "
                f"have {shape.head_dim}. Remove `retrieval` from VLLM_PLUGINS"
            )
        self.shape = shape
        self.device = device
        self.overhead_bytes = DeviceSpeed().overhead_bytes(shape.block_size)
        self._numbers = BlockNumbers(device)
        self._counts = torch.zeros(2, dtype=torch.int64, device=device)  # see DeviceResidency
        self._collected = [0, 0]
        self._untold = False  # whether blocks were recalled since counts were last asked for
        self._asked: deque[tuple[Event, torch.Tensor]] = deque()

    def measure(self, settings: RetrievalSettings, rounds: int = 20) -> DeviceSpeed:
        """Measures the device, and sets ``overhead_bytes`` by it: once, before serving. It also
        compiles the kernels. Takes a quarter of a GiB while it runs."""
        shape, device = self.shape, self.device
        bandwidth = _bandwidth(device, rounds)
        size, layout = shape.block_size, settings.layout(shape.block_size, narrows=False)
        split = Split(4, 1, 3, 1, size, size)
        ids = torch.arange(4, dtype=torch.int32)
        sequence = SparseSequence(0, 0, split, ids)
        step = self.plan(ids[1:2].to(torch.int64), [sequence])
        sizes = (4, shape.kv_heads, size, 2 * shape.head_dim)
        cache = torch.zeros(sizes, dtype=shape.dtype, device=device)
        query = torch.zeros(1, shape.heads, shape.head_dim, dtype=shape.dtype, device=device)
        output = torch.empty_like(query)
        rows = self.digests(4, layout.rows, coded_width(layout.kind.parts * shape.head_dim))
        rows.zero_()

        def layer() -> None:
            self.digest(cache, step.stale, rows, layout)
            self.choose(query, step, rows, layout, 1.0)
            self.attend(query, cache, step, output, Terms(1.0))

        spent = min(_seconds(device, layer, rounds) for _ in range(_TRIES))
        speed = DeviceSpeed(spent / (LAUNCHES + LAUNCHES_A_BLOCK), bandwidth)
        self.overhead_bytes = speed.overhead_bytes(size)
        return speed

    def check(self, kv_cache: torch.Tensor) -> None:
        shape = self.shape
        want = (shape.kv_heads, shape.block_size, 2 * shape.head_dim)
        if tuple(kv_cache.shape[1:]) != want or kv_cache.dtype != shape.dtype:
            raise EngineError(
                f"retrieval attention takes KV caches of {shape.dtype} and shape [blocks, "
                f"{', '.join(map(str, want))}]; this one is of {kv_cache.dtype} and "
                f"{list(kv_cache.shape)}. Remove `retrieval` from VLLM_PLUGINS"
            )

    def read_keys(self, kv_cache: torch.Tensor, block_ids: torch.Tensor) -> torch.Tensor:
        return kv_cache[..., : self.shape.head_dim].index_select(0, block_ids)

    def move(self, sources: Addresses, targets: Addresses, piece: Piece) -> None:
        device_of(self.device).move(sources, targets, piece)

    def digests(self, blocks: int, rows: int, width: int) -> torch.Tensor:
        """A block's together, as the pool keeps them."""
        size = (blocks, self.shape.kv_heads, rows, width)
        return torch.empty(size, dtype=torch.int8, device=self.device).transpose(0, 1)

    def digest(
        self, kv_cache: torch.Tensor, block_ids: torch.Tensor, rows: torch.Tensor, layout: Layout
    ) -> None:
        digest_by_triton(self._halves(kv_cache)[0], rows, block_ids, layout.kind.name == "bounds")

    def plan(self, stale: torch.Tensor, sequences: Sequence[SparseSequence]) -> SparseStep:
        """All that the kernels read is sent at once."""
        facts = [_facts_of(sequence) for sequence in sequences]
        bucket = Bucket.of(self.shape.kv_heads, facts, len(stale))
        tables = [sequence.table.numpy() for sequence in sequences]
        none = torch.empty(0, dtype=torch.int32)
        slots = [none if (one := s.offloaded) is None else one.slots for s in sequences]
        given = [one.numpy() for one in slots]
        packed = torch.from_numpy(bucket.pack(facts, tables, stale.numpy(), given))
        there = device_of(self.device).send(packed)
        plan = DeviceStep(there, bucket, self.shape.group)
        return SparseStep(plan.stale, tuple(sequences), plan)

    def choose(
        self,
        query: torch.Tensor,
        step: SparseStep,
        rows: torch.Tensor,
        layout: Layout,
        scale: float,
        left: LeftBlocks | None = None,
    ) -> None:
        plan, bounds = step.plan, layout.kind.name == "bounds"
        off = None if left is None else left.digests
        residency = left.residency if left is not None and plan.recalls else None
        choose_by_triton(query, rows, plan, scale, bounds, off, residency)

    def fetch(self, step: SparseStep, kv_cache: torch.Tensor, left: LeftBlocks) -> None:
        if step.plan.recalls:
            addresses = self._numbers.addresses
            fetch_by_triton(step.plan, left.residency, addresses, left.layer_at, kv_cache)
            self._untold = True

    def residency(self, blocks: int) -> DeviceResidency:
        return DeviceResidency(self.shape.kv_heads, blocks, self._counts)

    def number(self, sequence: OffloadedSequence) -> None:
        known = len(sequence.numbers)
        if known < sequence.count:
            new = self._numbers.take(sequence.count - known)
            sequence.numbers = np.concatenate([sequence.numbers, new])
            send = device_of(self.device).send
            begins = send(torch.from_numpy(sequence.begins[known:]))
            self._numbers.addresses.index_copy_(0, send(torch.from_numpy(new)), begins)

    def forget(self, sequence: OffloadedSequence) -> None:
        self._numbers.give(sequence.numbers)
        sequence.numbers = sequence.numbers[:0]

    def collect(self, activity: Activity, wait: bool = False) -> None:
        if self._untold:
            totals, event = device_of(self.device).fetch(self._counts)
            self._asked.append((event, totals))
            self._untold = False
        while self._asked:
            event, totals = self._asked[0]
            if wait:
                event.wait()
            elif not event.is_reached():
                break
            self._asked.popleft()
            hits, loaded = (n - m for n, m in zip(totals.tolist(), self._collected, strict=True))
            self._collected = totals.tolist()
            shape = self.shape
            activity.blocks_hit += hits
            activity.blocks_loaded += loaded
            activity.bytes_loaded += loaded * shape.block_size * shape.token_bytes // shape.kv_heads

    def enter(self, step: SparseStep, at: int, ids: torch.Tensor) -> None:
        heads, init = self.shape.kv_heads, step.sequences[at].split.init
        rows = step.plan.table[at * heads : (at + 1) * heads]
        rows[:, init : init + ids.shape[1]] = device_of(self.device).send(ids)

    def attend(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        step: SparseStep,
        output: torch.Tensor,
        terms: Terms,
    ) -> None:
        keys, values = self._halves(kv_cache)
        told = terms.scale, terms.softcap, terms.sinks
        attend_by_triton(query, keys, values, step.plan, output, *told)

    def _halves(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Keys and values: ``[blocks, tokens, kv_heads, dim]``."""
        return torch.split(kv_cache.transpose(1, 2), self.shape.head_dim, -1)


def _seconds(device: torch.device, work: Callable[[], object], times: int) -> float:
    """Of one time, on the device, after a first one."""
    stream = device_of(device).current()
    work()
    begin = stream.record()
    for _ in range(times):
        work()
    end = stream.record()
    end.wait()
    return end.seconds_since(begin) / times


def _bandwidth(device: torch.device, rounds: int) -> float:
    """Bytes a second that a copy on the device reads and writes."""
    room = torch.zeros(2, 1 << 27, dtype=torch.uint8, device=device)
    return room.nbytes / _seconds(device, lambda: room[0].copy_(room[1]), rounds)


def _facts_of(sequence: SparseSequence) -> Facts:
    split, token = sequence.split, sequence.token
    length, offloaded, slots = split.attended_tokens, sequence.offloaded, 0
    if offloaded is not None and offloaded.is_readable:
        slots = len(offloaded.slots)
        if slots < min(split.chosen, offloaded.count):
            raise EngineError(
                f"{offloaded.key} has {slots} slots for {split.chosen} chosen blocks of "
                f"{offloaded.count} that are off the device"
            )
    return Facts(token, split.init, split.middle, split.chosen, split.blocks, length, slots)
