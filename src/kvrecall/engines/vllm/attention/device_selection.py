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
from kvrecall.attention.residency import BlockNumbers, DeviceResidency, Ints
from kvrecall.attention.selection import LAUNCHES, LAUNCHES_A_BLOCK, DeviceSpeed, Split
from kvrecall.attention.settings import RetrievalSettings
from kvrecall.engines.vllm.attention.activity import Activity, RecallCounts
from kvrecall.engines.vllm.attention.base import (
    AttentionKernel,
    AttentionParameters,
    DigestStore,
    KernelShape,
    Note,
    RetrievalLayer,
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
        layer = self.layer("", settings, Activity())
        layer.digest_rows(cache).zero_()

        def once() -> None:
            layer.digest(cache, step.stale)
            layer.attend(query, cache, step, AttentionParameters(1.0), output)

        spent = min(_seconds(device, once, rounds) for _ in range(_TRIES))
        speed = DeviceSpeed(spent / (LAUNCHES + LAUNCHES_A_BLOCK), bandwidth)
        self.overhead_bytes = speed.overhead_bytes(size)
        return speed

    def layer(
        self, name: str, settings: RetrievalSettings, activity: Activity, note: Note | None = None
    ) -> DeviceSelection:
        return DeviceSelection(self, name, settings, activity, note)

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


class DeviceSelection(RetrievalLayer):
    """A layer whose blocks the device selects, by its kernels, in buffers there: the digests of its
    blocks, those of blocks off it by their numbers, and the slots that these are recalled into."""

    _kernel: TritonKernel

    def open(self, kv_cache: torch.Tensor) -> DigestStore:
        shape = self._shape
        want = (shape.kv_heads, shape.block_size, 2 * shape.head_dim)
        if tuple(kv_cache.shape[1:]) != want or kv_cache.dtype != shape.dtype:
            raise EngineError(
                f"retrieval attention takes KV caches of {shape.dtype} and shape [blocks, "
                f"{', '.join(map(str, want))}]; this one is of {kv_cache.dtype} and "
                f"{list(kv_cache.shape)}. Remove `retrieval` from VLLM_PLUGINS"
            )
        layout = self.settings.layout(shape.block_size, narrows=False)
        self._bounds = layout.kind.name == "bounds"
        self._cache, self._layer_at = kv_cache, 0
        self._left: DigestStore | None = None
        self._residency: DeviceResidency | None = None
        self._gone: dict[str, _Gone] = {}
        self._unseen: deque[tuple[Event, torch.Tensor, _Seen]] = deque()
        return DigestStore(shape, layout, len(kv_cache), self._kernel.device, by_block=True)

    def select(self, query: torch.Tensor, step: SparseStep, scale: float, noted: bool) -> None:
        plan: DeviceStep = step.plan
        left = self._left.rows if self._left is not None and _any_left(step) else None
        residency = self._residency if left is not None and plan.recalls else None
        choose_by_triton(query, self.store.rows, plan, scale, self._bounds, left, residency)
        if noted:
            self._note_later(step)
        if residency is None:
            return
        for at, one in enumerate(step.sequences):
            if one.split.middle and one.offloaded is not None and not one.offloaded.is_readable:
                self._fetch_by_host(plan, at, one.offloaded, residency)
        addresses = self._kernel.numbers.addresses
        fetch_by_triton(plan, residency, addresses, self._layer_at, self._cache)
        self._kernel.counts.changed = True

    def leave(
        self, sequence: OffloadedSequence, digests: torch.Tensor, kv_cache: torch.Tensor
    ) -> None:
        sequence.require_inside(self.name, kv_cache)
        if self._left is None or self._residency is None:
            layout, device = self.store.layout, self._kernel.device
            self._left = DigestStore(self._shape, layout, 0, device, by_block=True)
            counts = self._kernel.counts.totals
            self._residency = DeviceResidency(self._shape.kv_heads, len(kv_cache), counts)
            self._layer_at = sequence.records.layers[self.name]
        known = self._gone.setdefault(sequence.key, _Gone(sequence))
        first, known.count = known.count, known.count + digests.shape[1]
        held, known.slots = known.slots, len(sequence.slots)
        self._kernel.number(sequence)
        numbers, send = sequence.numbers[first : known.count], self._device.send
        there, most = send(torch.from_numpy(numbers)), int(numbers.max(initial=-1)) + 1
        self._left.reach(most)
        self._left.write(there, digests)
        self._residency.begin(there, send(sequence.slots[held:].to(torch.int64)), most)
        pages = sequence.addresses(self.name)
        sequence.is_readable &= self._device.can_read(pages, kv_cache[0].nbytes)

    def forget(self, key: str) -> None:
        """With the last sequence memory for its kind is given back."""
        if not self._is_open:
            return
        known = self._gone.pop(key, None)
        if known is not None:
            self._kernel.numbers.give(known.sequence.numbers)
            known.sequence.numbers = known.sequence.numbers[:0]
        if not self._gone:
            self._left = self._residency = None

    def _fetch_by_host(
        self, plan: DeviceStep, at: int, offloaded: OffloadedSequence, residency: DeviceResidency
    ) -> None:
        """Copies the blocks that the step's sequence ``at`` misses into their slots, which the
        device cannot: it cannot read them. Waits for the device."""
        rows = plan.missed[self._rows(at)]
        missed = rows.cpu().numpy()
        heads, places = np.nonzero(np.arange(missed.shape[1] - 1) < missed[:, :1])
        numbers = missed[heads, 1 + places]
        there = self._device.send(torch.from_numpy(np.stack([heads, numbers])))
        slots = residency.place[there[0], there[1]].cpu().numpy().astype(np.int64)
        block, head, piece = pieces_of(self._cache)
        blocks = _places_of(numbers, offloaded.numbers)
        sources = offloaded.addresses(self.name)[blocks] + heads * head
        self._device.move(sources, self._cache.data_ptr() + slots * block + heads * head, piece)
        rows[:, 0] = 0

    def _note_later(self, step: SparseStep) -> None:
        """Notes what the device has chosen once that is here; the host does not wait for it."""
        while self._unseen and self._unseen[0][0].is_reached():
            _, table, seen = self._unseen.popleft()
            for at, split, blocks in seen:
                found = _places_of(self._chosen(table, at, split).numpy(), blocks)
                self.note_selected(split, found)
        if len(self._unseen) < _MOST_UNSEEN:
            table, event = self._device.fetch(step.plan.table)
            seen = tuple(
                (at, one.split, one.blocks.numpy().copy()) for at, one in enumerate(step.sequences)
            )
            self._unseen.append((event, table, seen))

    def _chosen(self, table: torch.Tensor, at: int, split: Split) -> torch.Tensor:
        """The part of the step's sequence ``at`` of its table in which selected blocks are."""
        return table[self._rows(at), split.init : split.init + split.chosen]

    def _rows(self, at: int) -> slice:
        heads = self._shape.kv_heads
        return slice(at * heads, (at + 1) * heads)


@dataclass(slots=True)
class _Gone:
    """A partially offloaded sequence in one layer. ``count``, ``slots``: how many of its blocks and
    slots the layer knows."""

    sequence: OffloadedSequence
    count: int = 0
    slots: int = 0


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
    if offloaded is not None:
        slots = len(offloaded.slots)
        if slots < min(split.chosen, offloaded.count):
            raise EngineError(
                f"{offloaded.key} has {slots} slots for {split.chosen} chosen blocks of "
                f"{offloaded.count} that are off the device"
            )
    return SequenceFacts(token, split.init, split.middle, split.chosen, split.blocks, length, slots)
