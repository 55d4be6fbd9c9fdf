"""Retrieval on GPUs: selection of blocks and sparse attention over them by kvrecall's own Triton
kernels, and vLLM's attention backends for NVIDIA GPUs with it, whose kernels do prefill and dense
decoding.

All that a layer's kernels read is on the device when they are launched: a step's facts and buffers
(``DeviceStep``), digests and slots (``DeviceSelection``). The host waits for nothing but blocks in
memory that the device cannot read. A step depends on the lengths of its sequences, so attention is
not captured in CUDA graphs: vLLM captures what lies between the layers' attention (piecewise).
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadataBuilder,
)

from kvrecall.attention.digest import Layout
from kvrecall.attention.kernels import device as kernels
from kvrecall.attention.kernels.device import (
    BlockNumbers,
    Bucket,
    DeviceResidency,
    DeviceStep,
    Ints,
    SequenceFacts,
)
from kvrecall.attention.selection import LAUNCHES, LAUNCHES_A_BLOCK, DeviceSpeed, Split
from kvrecall.attention.settings import RetrievalSettings
from kvrecall.engines.vllm.attention.activity import Activity, RecallCounts
from kvrecall.engines.vllm.attention.backend import RetrievalAttention, RetrievalBuilder
from kvrecall.engines.vllm.attention.base import (
    AttentionKernel,
    AttentionParameters,
    DigestStore,
    KernelShape,
    RetrievalLayer,
    SparseSequence,
    SparseStep,
)
from kvrecall.engines.vllm.attention.offloaded import OffloadedSequence, Records
from kvrecall.engines.vllm.attention.plugin import active_settings
from kvrecall.engines.vllm.attention.room import MostLeft, cache_bytes, most_left
from kvrecall.engines.vllm.attention.step import BatchRow, DenseOffload, KeptCopy, OffloadedRow
from kvrecall.engines.vllm.compat import runner
from kvrecall.engines.vllm.compat.config import most_of_ranks
from kvrecall.engines.vllm.device import device_of
from kvrecall.engines.vllm.device.base import FETCHED_BYTES, Event
from kvrecall.errors import EngineError

logger = logging.getLogger("vllm.kvrecall")

_TRIES = 5
"""Measurements of which the least counts: the host, which launches, has other work, too."""

_MOST_UNSEEN = 16
"""Steps of a layer whose selected blocks may be on their way to the host, to be recorded there."""

_TOLD_EVERY_S = 10.0
"""While kernels are compiled."""

_Trial = tuple[RetrievalLayer, torch.Tensor, torch.Tensor, torch.Tensor]

_Seen = tuple[tuple[int, Split, Ints], ...]
"""Sequences of a step by their places in it, with their middle blocks' ids."""


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
        blocks, heads, counts = len(kv_cache), shape.kv_heads, self._kernel.counts.totals
        most = self._kernel.hold(blocks)
        store = DigestStore(shape, layout, blocks, self._kernel.device, by_block=True)
        self._left = store.like(most)
        self._residency = DeviceResidency(heads, blocks, most, counts)
        # Partially offloaded sequences, and how many of their blocks and slots the layer knows.
        self._gone: dict[str, tuple[OffloadedSequence, int, int]] = {}
        self._unseen: deque[tuple[Event, torch.Tensor, _Seen]] = deque()
        return store

    def select(self, query: torch.Tensor, step: SparseStep, scale: float, noted: bool) -> None:
        plan: DeviceStep = step.plan
        # One with blocks off the device has slots.
        left, residency = (self._left.rows, self._residency) if plan.recalls else (None, None)
        kernels.choose_by_triton(query, self.store.rows, plan, scale, self._bounds, left, residency)
        if noted:
            self._note_later(step)
        if residency is None:
            return
        for at, one in enumerate(step.sequences):
            if one.split.middle and one.offloaded is not None and not one.offloaded.is_readable:
                self._fetch_by_host(plan, at, one.offloaded, residency)
        addresses = self._kernel.numbers.addresses
        kernels.fetch_by_triton(plan, residency, addresses, self._layer_at, self._cache)
        self._kernel.counts.changed = True

    def leave(
        self, sequence: OffloadedSequence, digests: torch.Tensor, kv_cache: torch.Tensor
    ) -> None:
        sequence.require_inside(self.name, kv_cache)
        self._layer_at = sequence.records.layers[self.name]
        _, first, held = self._gone.get(sequence.key, (sequence, 0, 0))
        end = first + digests.shape[1]
        self._gone[sequence.key] = sequence, end, len(sequence.slots)
        self._kernel.number(sequence)
        numbers, send = sequence.numbers[first:end], self._device.send
        there = send(torch.from_numpy(numbers))
        self._left.write(there, digests)
        self._residency.begin(there, send(sequence.slots[held:].to(torch.int64)))
        pages = sequence.addresses(self.name)
        sequence.is_readable &= self._device.can_read(pages, kv_cache[0].nbytes)

    def forget(self, key: str) -> None:
        if self._is_open and key in self._gone:
            sequence = self._gone.pop(key)[0]
            self._kernel.numbers.give(sequence.numbers)
            sequence.numbers = sequence.numbers[:0]

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
        block, head, piece = kernels.pieces_of(self._cache)
        blocks = _places_of(numbers, offloaded.numbers)
        sources = offloaded.addresses(self.name)[blocks] + heads * head
        self._device.move(sources, self._cache.data_ptr() + slots * block + heads * head, piece)
        rows[:, 0] = 0

    def _note_later(self, step: SparseStep) -> None:
        """Notes what the device has chosen once that is here; the host does not wait for it. Of the
        first sequences, if there are many."""
        while self._unseen and self._unseen[0][0].is_reached():
            _, table, seen = self._unseen.popleft()
            for at, split, blocks in seen:
                found = _places_of(self._chosen(table, at, split).numpy(), blocks)
                self.note_selected(split, found)
        table = step.plan.table
        some = max(1, FETCHED_BYTES // (self._shape.kv_heads * table[0].nbytes))
        table = table[: self._rows(some).start]
        if len(self._unseen) < _MOST_UNSEEN and self._device.can_fetch(table.nbytes):
            here, event = self._device.fetch(table)
            seen = tuple(
                (at, one.split, one.blocks.numpy().copy())
                for at, one in enumerate(step.sequences[:some])
            )
            self._unseen.append((event, here, seen))

    def _chosen(self, table: torch.Tensor, at: int, split: Split) -> torch.Tensor:
        """The part of the step's sequence ``at`` of its table in which selected blocks are."""
        return table[self._rows(at), split.init : split.init + split.chosen]

    def _rows(self, at: int) -> slice:
        heads = self._shape.kv_heads
        return slice(at * heads, (at + 1) * heads)


class TritonKernel(AttentionKernel):
    """Our own kernels. Cache of any strides, blocks of a power of two of tokens."""

    on_host = False
    layers = DeviceSelection
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
        self.most_left = MostLeft(1 / 8, 1 << 20)
        """The builder knows the engine's."""
        self.numbers = BlockNumbers(device, 0)
        self._blocks = 0
        block_bytes = shape.block_size * shape.token_bytes // shape.kv_heads
        self.counts = RecallCounts(device, block_bytes)
        self._last: DeviceStep | None = None

    def measure(self, settings: RetrievalSettings, rounds: int = 20) -> DeviceSpeed:
        """Measures the device, and sets ``overhead_bytes`` by it: once, before serving. Takes a
        quarter of a GiB while it runs."""
        device, size = self.device, self.shape.block_size
        bandwidth = _bandwidth(device, rounds)
        layer, cache, query, output = self._trial(settings)
        step = self._trial_step(settings)

        def once() -> None:
            self.digest(cache, step.stale, layer.store)
            layer.select(query, step, 1.0, False)
            self.attend(query, cache, step, output, AttentionParameters(1.0))

        spent = min(_seconds(device, once, rounds) for _ in range(_TRIES))
        speed = DeviceSpeed(spent / (LAUNCHES + LAUNCHES_A_BLOCK), bandwidth)
        self.overhead_bytes = speed.overhead_bytes(size)
        return speed

    def warm(
        self,
        settings: RetrievalSettings,
        recalls: bool,
        terms: Sequence[AttentionParameters],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Compiles every kernel that a step may launch, before there is one: that takes seconds
        each, unless Triton's cache has them. ``recalls``: whether blocks are to leave the device;
        ``terms``: of the layers."""
        layer, cache, query, output = self._trial(settings)
        by_tokens = cache.transpose(1, 2).contiguous().transpose(1, 2)  # vLLM's other layout
        step, device = self._trial_step(settings), device_of(self.device)
        bounds = settings.layout(self.shape.block_size).kind.name == "bounds"

        def attend(of: AttentionParameters) -> None:
            self.attend(query, cache, step, output, of)

        def recall() -> None:
            """Of a sequence whose blocks are all there, so that nothing is read."""
            away, rows = self._trial_step(settings, recalls=True).plan, layer.store.rows
            held = DeviceResidency(self.shape.kv_heads, len(cache), len(cache), self.counts.totals)
            kernels.choose_by_triton(query, rows, away, 1.0, bounds, rows, held)
            away.missed.zero_()
            addresses = torch.zeros(len(cache), dtype=torch.int64, device=self.device)
            for one in (cache, by_tokens):
                kernels.fetch_by_triton(away, held, addresses, 0, one)
            self.counts.totals.zero_()
            source, nbytes = np.array([cache.data_ptr()]), cache[0].nbytes
            device.move(source, source + nbytes, kernels.Piece(1, nbytes, 0))

        work: list[Callable[[], None]] = [
            lambda: self.digest(cache, step.stale, layer.store),
            lambda: layer.select(query, step, 1.0, False),
            *(partial(attend, one) for one in terms),
            *[recall] * recalls,
        ]
        began = told = clock()
        for at, one in enumerate(work):
            if clock() - told > _TOLD_EVERY_S:
                told = clock()
                logger.info("kvrecall: retrieval: compiling kernels, %d of %d", at, len(work))
            one()
        device.current().record().wait()
        logger.info("kvrecall: retrieval: kernels ready after %.1f s", clock() - began)

    def _trial(self, settings: RetrievalSettings) -> _Trial:
        """A layer of its own over a cache of a few blocks, a token's query, and its output."""
        shape = self.shape
        size = 4, shape.kv_heads, shape.block_size, 2 * shape.head_dim
        cache = torch.zeros(size, dtype=shape.dtype, device=self.device)
        query = cache.new_zeros((1, shape.heads, shape.head_dim))
        layer = TritonKernel(shape, self.device).layer("", settings, Activity())
        layer.digest_rows(cache).zero_()
        return layer, cache, query, torch.empty_like(query)

    def _trial_step(self, settings: RetrievalSettings, recalls: bool = False) -> SparseStep:
        """Of one sequence, and a block to digest. ``recalls``: with two blocks off the device."""
        size, ids = self.shape.block_size, torch.arange(4, dtype=torch.int32)
        away = None
        if recalls:
            records, numbers = Records(np.empty(0, np.uint8), {}), np.arange(2)
            away = OffloadedSequence("", 1, numbers, ids[1:3], records, None, numbers)
        table = ids if away is None else away.named(ids)
        sequence = SparseSequence(0, 0, Split(4, 1, 3, 1, size, size), table, away)
        layout = settings.layout(size, narrows=False)
        return self.schedule(ids[1:2].to(torch.int64), [sequence], layout)

    def digest(self, kv_cache: torch.Tensor, block_ids: torch.Tensor, store: DigestStore) -> None:
        keys, bounds = self._halves(kv_cache)[0], store.layout.kind.name == "bounds"
        kernels.digest_by_triton(keys, store.rows, block_ids.to(torch.int32), bounds)

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
        halves, of = self._halves(kv_cache), parameters
        kernels.attend_by_triton(query, *halves, step.plan, output, of.scale, of.softcap, of.sinks)

    def hold(self, blocks: int) -> int:
        """The layers' caches have so many blocks. Returns what exceeds every number of a block off
        the device."""
        most = self.most_left.of(blocks)
        if blocks != self._blocks:
            self._blocks, self.numbers = blocks, BlockNumbers(self.device, most)
        return most

    def has_room(self, count: int) -> bool:
        return count <= self.numbers.room

    def number(self, sequence: OffloadedSequence) -> None:
        """Numbers the sequence's offloaded blocks that have no number yet."""
        known = len(sequence.numbers)
        if known < sequence.count:
            new = self.numbers.take(sequence.count - known)
            sequence.numbers = np.concatenate([sequence.numbers, new])
            send = device_of(self.device).send
            begins = send(torch.from_numpy(sequence.begins[known:]))
            self.numbers.addresses.index_copy_(0, send(torch.from_numpy(new)), begins)

    def _halves(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values: ``[blocks, tokens, kv_heads, dim]``."""
        keys, values = torch.split(kv_cache.transpose(1, 2), self.shape.head_dim, -1)
        return keys, values


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


class CopiedDense:
    """One layer's dense attention over partially offloaded sequences. Owned by the worker's thread.

    It needs all of a sequence's keys, and vLLM's kernels for GPUs read one cache. So the sequence's
    blocks of this layer, those in the arena and those on the device, are copied into one. A dense
    layer has as many pages for them as its KV cache has blocks, allocated when they are first
    needed: a block that is full is copied once. Where a sequence has no pages all of its blocks are
    copied in each step, side by side, for the time of the call.
    """

    def __init__(self, name: str, activity: Activity) -> None:
        self._name = name
        self._activity = activity
        self._pages: torch.Tensor | None = None

    def attend(
        self,
        row: OffloadedRow,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        parameters: AttentionParameters,
        plainly: Callable[[torch.Tensor, Any], torch.Tensor],
    ) -> torch.Tensor:
        return plainly(self.copy(kv_cache, row, len(query)), row.metadata)

    def copy(self, kv_cache: torch.Tensor, row: OffloadedRow, new_tokens: int) -> torch.Tensor:
        """A cache, of the same strides in a block, with the sequence's blocks: in its pages, or in
        their order. ``new_tokens``: its last, which this step computes, and might yet again."""
        count, kept, sequence = -(-row.tokens // kv_cache.shape[2]), row.kept, row.sequence
        if kept is None:
            copies, first, into = _like(kv_cache, count), 0, np.arange(count, dtype=np.int64)
        else:
            if self._pages is None or len(self._pages) != len(kv_cache):
                self._pages = _like(kv_cache, len(kv_cache))
            copies, first = self._pages, kept.copied.get(self._name, 0)
            into = kept.pages[first:count]
        ids, size = row.table[:count].numpy().astype(np.int64), kv_cache.element_size()
        sources = kv_cache.data_ptr() + ids * (kv_cache.stride(0) * size)
        middle = slice(sequence.init, sequence.init + sequence.count)
        sources[middle] = sequence.addresses(self._name)
        nbytes = kv_cache[0].numel() * size
        targets = copies.data_ptr() + into * nbytes
        device_of(kv_cache.device).move(sources[first:], targets, kernels.Piece(1, nbytes, 0))
        self._activity.bytes_staged += nbytes * len(into)
        if kept is not None:
            kept.copied[self._name] = (row.tokens - new_tokens) // kv_cache.shape[2]
        return copies


def _like(kv_cache: torch.Tensor, blocks: int) -> torch.Tensor:
    """A cache of so many blocks, one behind the other, each like the other cache's."""
    elements = kv_cache[0].numel()
    made = torch.empty(blocks * elements, dtype=kv_cache.dtype, device=kv_cache.device)
    return made.as_strided((blocks, *kv_cache.shape[1:]), (elements, *kv_cache.stride()[1:]))


class DeviceBuilder(RetrievalBuilder):
    """Retrieval beside the dense metadata of a backend for GPUs."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER
    supports_update_block_table: bool = False
    device: torch.device
    use_full_cuda_graph: bool
    """FlashAttention's builder would keep its plan in one buffer, but a step may need two."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.use_full_cuda_graph = False

    def make_kernel(self, kv_cache_spec: Any) -> TritonKernel:
        heads, spec = next(iter(self._impls().values())).num_heads, kv_cache_spec
        shape = (heads, spec.num_kv_heads, spec.head_size, self.block_size, spec.dtype, "")
        kernel = TritonKernel(KernelShape(*shape), self.device)
        settings = active_settings()
        kernel.most_left = most_left(self.vllm_config, settings, self.specs())
        on_host = self.device.type == "cpu"  # one that interprets is no measure
        if not on_host:
            kernel.warm(settings, kernel.most_left.most > 0, self._terms())
        if settings.gate and not on_host:
            speed = kernel.measure(settings)
            kernel.overhead_bytes = most_of_ranks(kernel.overhead_bytes, stages=False)
            logger.info(
                "kvrecall: retrieval: launching a kernel takes %.1f microseconds, and it "
                "reads %.2f TB/s",
                speed.launch_s * 1e6,
                speed.bandwidth / 1e12,
            )
        return kernel

    def _terms(self) -> list[AttentionParameters]:
        """Of the group's layers, one of each kind that is compiled by itself."""
        terms = {
            (bool(impl.logits_soft_cap), impl.sinks is not None): AttentionParameters(
                impl.scale, impl.logits_soft_cap or 0.0, impl.sinks
            )
            for impl in self._impls().values()
        }
        return list(terms.values())

    def make_dense(self, name: str) -> DenseOffload:
        return CopiedDense(name, self._activity).attend

    def alone(
        self, common: Any, rows: Sequence[BatchRow], at: int, key: str
    ) -> tuple[Any, KeptCopy | None]:
        blocks = -(-rows[at].tokens // self.block_size)
        # While its prompt is computed all layers attend to it densely: too many to keep copies.
        kept = self._group.copies.of(key, blocks) if rows[at].decodes else None
        if kept is None:
            places = torch.arange(blocks, dtype=torch.int32, device=self.device)
        else:
            pages = torch.from_numpy(kept.pages[:blocks].astype(np.int32))
            places = device_of(self.device).send(pages)
        return self.part(common, rows, [at], places[None])[1], kept


class DeviceAttention(RetrievalAttention):
    """Retrieval over the dense attention of a backend for GPUs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        runner.leave_room(cache_bytes)

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        return False


class FlashBuilder(DeviceBuilder, FlashAttentionMetadataBuilder):
    """With FlashAttention's metadata."""


class FlashImpl(DeviceAttention, FlashAttentionImpl):
    """With FlashAttention."""


class FlashBackend(FlashAttentionBackend):
    """Registered in place of FLASH_ATTN under its name: the KV bytes are the same."""

    get_impl_cls = staticmethod(lambda: FlashImpl)
    get_builder_cls = staticmethod(lambda: FlashBuilder)


class TritonBuilder(DeviceBuilder, TritonAttentionMetadataBuilder):
    """With the metadata of vLLM's Triton attention."""


class TritonImpl(DeviceAttention, TritonAttentionImpl):
    """With vLLM's Triton attention."""


class TritonBackend(TritonAttentionBackend):
    """Registered in place of TRITON_ATTN under its name."""

    get_impl_cls = staticmethod(lambda: TritonImpl)
    get_builder_cls = staticmethod(lambda: TritonBuilder)
