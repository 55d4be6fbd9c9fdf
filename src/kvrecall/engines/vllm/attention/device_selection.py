"""Selection of blocks by a GPU's kernels, and sparse attention over vLLM's own layout of keys and
values there. All that a layer's kernels read is on the device when they are launched: a step's
facts and buffers (``DeviceStep``), digests and slots (``DeviceSelection``). The host waits for
nothing but blocks in memory that the device cannot read."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvrecall.attention.digest import Layout
from kvrecall.attention.kernels.device import (
    Bucket,
    DeviceStep,
    SequenceFacts,
    attend_by_triton,
    choose_by_triton,
    digest_by_triton,
    fetch_by_triton,
    pieces_of,
)
from kvrecall.attention.residency import BlockNumbers, DeviceResidency, Flags, Ints, Residency
from kvrecall.attention.selection import LAUNCHES, LAUNCHES_A_BLOCK, DeviceSpeed, Split
from kvrecall.attention.settings import RetrievalSettings
from kvrecall.engines.vllm.attention.activity import Activity, RecallCounts
from kvrecall.engines.vllm.attention.base import (
    AttentionKernel,
    AttentionParameters,
    DigestStore,
    KernelShape,
    Selection,
    SparseLayer,
    SparseSequence,
    SparseStep,
)
from kvrecall.engines.vllm.attention.offloaded import OffloadedSequence
from kvrecall.engines.vllm.device import device_of
from kvrecall.engines.vllm.device.base import Event
from kvrecall.errors import EngineError

_TRIES = 5
"""Measurements of which the least counts: the host, which launches, has other work, too."""

_MOST_UNSEEN = 16
"""Steps of a layer whose selected blocks may be on their way to the host, to be recorded there."""

_Seen = tuple[tuple[int, Split, Ints], ...]
"""Sequences of a step by their places in it, with their middle blocks' ids."""


class TritonKernel(AttentionKernel):
    """Our own kernels. Cache of any strides, blocks of a power of two of tokens."""

    on_host = False
    counts: RecallCounts

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
        self.numbers = BlockNumbers(device)
        block_bytes = shape.block_size * shape.token_bytes // shape.kv_heads
        self.counts = RecallCounts(device, block_bytes)
        self._last: DeviceStep | None = None

    def measure(self, settings: RetrievalSettings, rounds: int = 20) -> DeviceSpeed:
        """Measures the device, and sets ``overhead_bytes`` by it: once, before serving. It also
        compiles the kernels. Takes a quarter of a GiB while it runs."""
        shape, device = self.shape, self.device
        bandwidth = _bandwidth(device, rounds)
        size, layout = shape.block_size, settings.layout(shape.block_size, narrows=False)
        split = Split(4, 1, 3, 1, size, size)
        ids = torch.arange(4, dtype=torch.int32)
        sequence = SparseSequence(0, 0, split, ids)
        step = self.schedule(ids[1:2].to(torch.int64), [sequence], layout)
        sizes = (4, shape.kv_heads, size, 2 * shape.head_dim)
        cache = torch.zeros(sizes, dtype=shape.dtype, device=device)
        query = torch.zeros(1, shape.heads, shape.head_dim, dtype=shape.dtype, device=device)
        output = torch.empty_like(query)
        selection = self.selection(SparseLayer("", settings, Activity()), cache)
        selection.store.rows.zero_()

        def layer() -> None:
            self.digest(cache, step.stale, selection.store)
            selection.select(query, step, 1.0, False)
            self.attend(query, cache, step, output, AttentionParameters(1.0))

        spent = min(_seconds(device, layer, rounds) for _ in range(_TRIES))
        speed = DeviceSpeed(spent / (LAUNCHES + LAUNCHES_A_BLOCK), bandwidth)
        self.overhead_bytes = speed.overhead_bytes(size)
        return speed

    def selection(self, layer: SparseLayer, kv_cache: torch.Tensor) -> DeviceSelection:
        shape = self.shape
        want = (shape.kv_heads, shape.block_size, 2 * shape.head_dim)
        if tuple(kv_cache.shape[1:]) != want or kv_cache.dtype != shape.dtype:
            raise EngineError(
                f"retrieval attention takes KV caches of {shape.dtype} and shape [blocks, "
                f"{', '.join(map(str, want))}]; this one is of {kv_cache.dtype} and "
                f"{list(kv_cache.shape)}. Remove `retrieval` from VLLM_PLUGINS"
            )
        return DeviceSelection(self, layer, len(kv_cache))

    def digest(self, kv_cache: torch.Tensor, block_ids: torch.Tensor, store: DigestStore) -> None:
        keys, bounds = self._halves(kv_cache)[0], store.layout.kind.name == "bounds"
        digest_by_triton(keys, store.rows, block_ids, bounds)

    def schedule(
        self, stale: torch.Tensor, sequences: Sequence[SparseSequence], layout: Layout | None
    ) -> SparseStep:
        """All that the kernels read is sent at once. Steps of one bucket share their buffers, so
        the kernels of a step that is launched have read them before the next one's write."""
        send = device_of(self.device).send
        if not sequences:
            return SparseStep(send(stale.to(torch.int32)), len(stale), (), None)
        facts = [_facts_of(sequence) for sequence in sequences]
        bucket = Bucket.of(self.shape.kv_heads, facts, len(stale))
        tables = [sequence.table.numpy() for sequence in sequences]
        slots = [() if (one := s.offloaded) is None else one.slots.numpy() for s in sequences]
        packed = torch.from_numpy(bucket.pack(facts, tables, stale.numpy(), slots))
        self._last = plan = DeviceStep(send(packed), bucket, self.shape.group, self._last)
        return SparseStep(plan.stale, len(stale), tuple(sequences), plan)

    def attend(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        step: SparseStep,
        output: torch.Tensor,
        parameters: AttentionParameters,
    ) -> None:
        keys, values = self._halves(kv_cache)
        of = parameters
        attend_by_triton(query, keys, values, step.plan, output, of.scale, of.softcap, of.sinks)

    def number(self, sequence: OffloadedSequence) -> None:
        """Numbers the sequence's offloaded blocks that have no number yet."""
        known = len(sequence.numbers)
        if known < sequence.count:
            new = self.numbers.take(sequence.count - known)
            sequence.numbers = np.concatenate([sequence.numbers, new])
            send = device_of(self.device).send
            begins = send(torch.from_numpy(sequence.begins[known:]))
            self.numbers.addresses.index_copy_(0, send(torch.from_numpy(new)), begins)

    def _halves(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Keys and values: ``[blocks, tokens, kv_heads, dim]``."""
        return torch.split(kv_cache.transpose(1, 2), self.shape.head_dim, -1)


@dataclass(slots=True)
class _Recalled:
    """A partially offloaded sequence in one layer. ``count``, ``slots``: how many of its blocks and
    slots the layer knows; ``residency``: of slots that the host fills."""

    sequence: OffloadedSequence
    count: int = 0
    slots: int = 0
    residency: Residency | None = None


class DeviceSelection(Selection):
    """One layer's on a device, by its kernels, in buffers there: the digests of its blocks, those
    of blocks off it by their numbers, and the slots that these are recalled into."""

    def __init__(self, kernel: TritonKernel, layer: SparseLayer, blocks: int) -> None:
        shape, self._kernel, self._device = kernel.shape, kernel, device_of(kernel.device)
        layout = layer.settings.layout(shape.block_size, narrows=False)
        self.store = DigestStore(shape, layout, blocks, kernel.device, by_block=True)
        self._layer = layer
        self._heads = shape.kv_heads
        self._bounds = layout.kind.name == "bounds"
        self._left: DigestStore | None = None
        self._residency: DeviceResidency | None = None
        self._cache, self._layer_at = torch.empty(0), 0
        self._recalled: dict[str, _Recalled] = {}
        self._unseen: deque[tuple[Event, torch.Tensor, _Seen]] = deque()

    def select(self, query: torch.Tensor, step: SparseStep, scale: float, noted: bool) -> None:
        plan: DeviceStep = step.plan
        left = self._left.rows if self._left is not None and _any_left(step) else None
        residency = self._residency if left is not None and plan.recalls else None
        choose_by_triton(query, self.store.rows, plan, scale, self._bounds, left, residency)
        if noted:
            self._note_later(step)
        for at, one in enumerate(step.sequences):
            if one.split.middle and one.offloaded is not None and not one.offloaded.is_readable:
                self._recall_by_host(plan, at, one, one.offloaded)
        if residency is not None:
            addresses = self._kernel.numbers.addresses
            fetch_by_triton(plan, residency, addresses, self._layer_at, self._cache)
            self._kernel.counts.changed = True

    def depart(
        self, sequence: OffloadedSequence, digests: torch.Tensor, kv_cache: torch.Tensor
    ) -> None:
        sequence.require_inside(self._layer.name, kv_cache)
        if self._left is None or self._residency is None:
            shape, layout = self._kernel.shape, self.store.layout
            self._left = DigestStore(shape, layout, 0, self._kernel.device, by_block=True)
            counts = self._kernel.counts.totals
            self._residency = DeviceResidency(self._heads, len(kv_cache), counts)
            self._cache, self._layer_at = kv_cache, sequence.records.layers[self._layer.name]
        recalled = self._recalled.setdefault(sequence.key, _Recalled(sequence))
        first, recalled.count = recalled.count, recalled.count + digests.shape[1]
        held, recalled.slots = recalled.slots, len(sequence.slots)
        self._kernel.number(sequence)
        numbers, send = sequence.numbers[first : recalled.count], self._device.send
        there, most = send(torch.from_numpy(numbers)), int(numbers.max(initial=-1)) + 1
        self._left.reach(most)
        self._left.write(there, digests)
        self._residency.begin(there, send(sequence.slots[held:].to(torch.int64)), most)
        pages = sequence.addresses(self._layer.name)
        sequence.is_readable &= self._device.can_read(pages, kv_cache[0].nbytes)

    def forget(self, key: str) -> None:
        """With the last sequence memory for its kind is given back."""
        recalled = self._recalled.pop(key, None)
        if recalled is not None:
            self._kernel.numbers.give(recalled.sequence.numbers)
            recalled.sequence.numbers = recalled.sequence.numbers[:0]
        if not self._recalled:
            self._left = self._residency = None

    def _recall_by_host(
        self, plan: DeviceStep, at: int, one: SparseSequence, offloaded: OffloadedSequence
    ) -> None:
        """Recalls the blocks selected in the step's sequence ``at``, which the device cannot
        fetch. Waits for the device."""
        chosen, blocks = self._chosen(plan.table, at, one.split), one.blocks.numpy()
        places = _places_of(chosen.cpu().numpy(), blocks)
        left = places < one.left
        slots = self._fetch(self._recalled[offloaded.key], places, left)
        ids = np.where(left, offloaded.slots.numpy()[slots], blocks[places])
        chosen[:] = self._device.send(torch.from_numpy(ids))

    def _fetch(self, recalled: _Recalled, blocks: Ints, wanted: Flags) -> Ints:
        """Recalls blocks to the device; returns places in the sequence's slots, valid until the
        next call. ``blocks``: ``[kv_heads, count]``, those of a head distinct; only where
        ``wanted``."""
        sequence, cache, activity = recalled.sequence, self._cache, self._layer.activity
        if recalled.residency is None:
            recalled.residency = Residency(self._heads)
        recalled.residency.grow(len(sequence.slots), sequence.count)
        admission = recalled.residency.admit(blocks, wanted)
        block, head, piece = pieces_of(cache)
        heads = admission.heads * head
        slots = sequence.slots.numpy()[admission.into].astype(np.int64)
        sources = sequence.addresses(self._layer.name)[admission.blocks] + heads
        self._device.move(sources, cache.data_ptr() + slots * block + heads, piece)
        activity.blocks_hit += admission.hits
        activity.blocks_loaded += len(slots)
        activity.bytes_loaded += piece.count * piece.nbytes * len(slots)
        return admission.slots

    def _note_later(self, step: SparseStep) -> None:
        """Notes what the device has chosen once that is here; the host does not wait for it."""
        while self._unseen and self._unseen[0][0].is_reached():
            _, table, seen = self._unseen.popleft()
            for at, split, blocks in seen:
                found = _places_of(self._chosen(table, at, split).numpy(), blocks)
                self._layer.note_selected(split, found)
        if len(self._unseen) < _MOST_UNSEEN:
            table, event = self._device.fetch(step.plan.table)
            seen = tuple(
                (at, one.split, one.blocks.numpy().copy()) for at, one in enumerate(step.sequences)
            )
            self._unseen.append((event, table, seen))

    def _chosen(self, table: torch.Tensor, at: int, split: Split) -> torch.Tensor:
        """The part of the step's sequence ``at`` of its table in which selected blocks are."""
        rows = slice(at * self._heads, (at + 1) * self._heads)
        return table[rows, split.init : split.init + split.chosen]


def _any_left(step: SparseStep) -> bool:
    return any(one.offloaded is not None for one in step.sequences)


def _places_of(named: Ints, blocks: Ints) -> Ints:
    """Where each of ``named`` is among the blocks."""
    order = np.argsort(blocks)
    found: Ints = order[np.searchsorted(blocks[order], named)]
    return found


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


def _facts_of(sequence: SparseSequence) -> SequenceFacts:
    split, token = sequence.split, sequence.token
    length, offloaded, slots = split.attended_tokens, sequence.offloaded, 0
    if offloaded is not None and offloaded.is_readable:
        slots = len(offloaded.slots)
        if slots < min(split.chosen, offloaded.count):
            raise EngineError(
                f"{offloaded.key} has {slots} slots for {split.chosen} chosen blocks of "
                f"{offloaded.count} that are off the device"
            )
    return SequenceFacts(token, split.init, split.middle, split.chosen, split.blocks, length, slots)
