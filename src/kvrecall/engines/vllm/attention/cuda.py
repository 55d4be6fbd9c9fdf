"""Retrieval on GPUs: selection of blocks and sparse attention over them by kvrecall's own Triton
kernels, and vLLM's attention backends for NVIDIA GPUs with it, whose kernels do prefill and dense
decoding.

All that a layer's kernels read is on the device when they are launched: a step's facts and buffers
(``DeviceStep``), digests and slots (``DeviceSelection``). The host waits for nothing but blocks in
memory that the device cannot read. What they read has its place for good, and grids follow from
the number of sequences, so vLLM captures a step in which each decodes a token as one CUDA graph,
and replays it when the step's facts are written. Others are captured between the layers' attention
(piecewise), and launch the same kernels.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

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
    DeviceResidency,
    DeviceStep,
    Ints,
    LeftTables,
    SequenceFacts,
    StepBuffers,
)
from kvrecall.attention.selection import LAUNCHES, LAUNCHES_A_BLOCK, DeviceSpeed, Split
from kvrecall.attention.settings import RetrievalSettings
from kvrecall.engines.vllm.attention.activity import Activity, RecallCounts
from kvrecall.engines.vllm.attention.backend import RetrievalAttention, RetrievalBuilder
from kvrecall.engines.vllm.attention.base import (
    SEEN_EVERY_REPLAYS,
    AttentionKernel,
    AttentionParameters,
    DigestStore,
    KernelShape,
    RetrievalLayer,
    SparseSequence,
    SparseStep,
)
from kvrecall.engines.vllm.attention.copies import KeptLayer, copied
from kvrecall.engines.vllm.attention.offloaded import OffloadedSequence, Records
from kvrecall.engines.vllm.attention.plugin import active_settings
from kvrecall.engines.vllm.attention.room import GRAPH_ROWS, Most, cache_bytes, most_of
from kvrecall.engines.vllm.attention.step import BatchRow, DenseOffload, StepWork
from kvrecall.engines.vllm.compat import runner
from kvrecall.engines.vllm.compat.config import (
    fp8_type,
    most_of_ranks,
    padded_requests,
    replays_graphs,
)
from kvrecall.engines.vllm.device import device_of
from kvrecall.engines.vllm.device.base import FETCHED_BYTES, Event, Stream
from kvrecall.errors import EngineError

logger = logging.getLogger("vllm.kvrecall")

_TRIES = 5
"""Measurements of which the least counts: the host, which launches, has other work, too."""

_LAYERS_A_GRAPH = 16
"""Of a graph that is measured, whose own launch is to count as little as in a model's."""

_MOST_UNSEEN = 16
"""Steps of a layer whose selected blocks may be on their way to the host, to be recorded there."""

_SAMPLED = 4
"""Blocks of the sequence that is attended to before the engine serves."""

FORKS = True
"""Whether blocks are fetched beside attention to those that are there: a launch more in a layer."""

_TOLD_EVERY_S = 10.0
"""While kernels are compiled."""

_PADDING = SequenceFacts(0, 0, 0, 0, 0, 0)

_Sample = tuple[RetrievalLayer, torch.Tensor, torch.Tensor, torch.Tensor]

_Seen = tuple[tuple[int, Split, Ints], ...]
"""Sequences of a step by their places in it, with their middle blocks' ids."""


class DeviceSelection(RetrievalLayer):
    """A layer whose blocks the device selects, by its kernels, in buffers there: the digests of its
    blocks, those of blocks off it by their numbers, and the slots that these are recalled into."""

    _kernel: TritonKernel

    def open(self, kv_cache: torch.Tensor) -> DigestStore:
        shape = self._shape
        want = (shape.kv_heads, shape.block_size, 2 * shape.head_dim)
        if tuple(kv_cache.shape[1:]) != want or kv_cache.dtype != shape.stored:
            raise EngineError(
                f"retrieval attention takes KV caches of {shape.stored} and shape [blocks, "
                f"{', '.join(map(str, want))}]; this one is of {kv_cache.dtype} and "
                f"{list(kv_cache.shape)}. Remove `retrieval` from VLLM_PLUGINS"
            )
        layout = self.settings.layout(shape.block_size, narrows=False)
        self._bounds = layout.kind.name == "bounds"
        self._page_at = 0
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
        fetch = partial(kernels.fetch_by_triton, plan, residency, addresses, self._cache)
        plan.fetched = self._kernel.beside(fetch)

    def leave(
        self, sequence: OffloadedSequence, digests: torch.Tensor, kv_cache: torch.Tensor
    ) -> None:
        sequence.require_inside(self.name, kv_cache)
        _, first, held = self._gone.get(sequence.key, (sequence, 0, 0))
        end = first + digests.shape[1]
        self._gone[sequence.key] = sequence, end, len(sequence.slots)
        self._kernel.number(sequence)
        numbers, send = sequence.numbers[first:end], self._device.send
        page_at = sequence.records.layers[self.name]
        if page_at != self._page_at:  # a captured graph has no number of it, but its cell
            self._page_at = page_at
            send(torch.tensor([page_at]), self._residency.page_at)
        there = send(torch.from_numpy(numbers))
        self._left.write(there, digests)
        self._residency.begin(there, send(sequence.slots[held:].to(torch.int64)))
        pages = sequence.addresses(self.name)
        sequence.is_readable &= self._device.can_read(pages, kv_cache[0].nbytes)

    def forget(self, key: str) -> None:
        if self._is_open and key in self._gone:
            sequence = self._gone.pop(key)[0]
            self._kernel.give_up(sequence)

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
                named = self._chosen(table, at, split).numpy()
                named = np.where(named < 0, named | kernels.LATE, named)  # none is late by now
                found = _places_of(named, blocks)
                self.note_selected(split, found)
        width = max(one.split.init + one.split.chosen for one in step.sequences)
        some = max(1, FETCHED_BYTES // (self._shape.kv_heads * 4 * width))
        table = step.plan.table[: self._rows(some).start, :width].contiguous()
        if len(self._unseen) < _MOST_UNSEEN and self._device.can_fetch(table.nbytes):
            here, event = self._device.fetch(table)
            seen = tuple(
                (at, one.split, one.blocks.numpy().copy())
                for at, one in enumerate(step.sequences[:some])
                if one.split.middle
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

    def __init__(self, shape: KernelShape, device: torch.device, most: Most | None = None) -> None:
        """``most``: of the engine; None: as without one. Raises EngineError for blocks and heads
        that it cannot read."""
        most = most or Most()
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
        self.most = most
        self.numbers = BlockNumbers(device, 0)
        self._blocks = 0
        self._longest = max(_SAMPLED, -(-most.tokens // shape.block_size))
        self._left = LeftTables(device, most.rows if most.left else 0, self._longest)
        block_bytes = shape.block_size * shape.token_bytes // shape.kv_heads
        self.counts = RecallCounts(device, block_bytes)
        self._buffers: StepBuffers | None = None
        self._fetches: Stream | None = None

    def measure(
        self, settings: RetrievalSettings, graphs: bool = False, rounds: int = 20
    ) -> DeviceSpeed:
        """Measures the device, and sets ``overhead_bytes`` by it: once, before serving. Takes a
        quarter of a GiB while it runs. ``graphs``: whether steps are to be replayed as graphs."""
        device, size = self.device, self.shape.block_size
        bandwidth = _bandwidth(device, rounds)
        layer, cache, query, output = self._sample_layer(settings)
        step = self._sample_step(settings)

        def once() -> None:
            layer.digest_step(cache, step)
            layer.select(query, step, 1.0, False)
            self.attend(query, cache, step, output, AttentionParameters(1.0))

        layers = _LAYERS_A_GRAPH if graphs else 1

        def all_layers() -> None:
            for _ in range(layers):
                once()

        again: Callable[[], object] = all_layers
        if graphs:
            try:
                again = device_of(device).captured(all_layers)
            except RuntimeError as error:
                logger.warning("kvrecall: retrieval: measured without a CUDA graph: %s", error)
        spent = min(_seconds(device, again, rounds) for _ in range(_TRIES)) / layers
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
        """Compiles every kernel that a step may launch, replayed or not, before there is one: that
        takes seconds each, unless Triton's cache has them. ``recalls``: whether blocks are to leave
        the device; ``terms``: of the layers."""
        layer, cache, query, output = self._sample_layer(settings)
        by_tokens = cache.transpose(1, 2).contiguous().transpose(1, 2)  # vLLM's other layout
        step, device = self._sample_step(settings), device_of(self.device)
        bounds = settings.layout(self.shape.block_size).kind.name == "bounds"

        def attend(of: AttentionParameters) -> None:
            self.attend(query, cache, step, output, of)
            if recalls:
                KeptLayer("", int, Activity()).attend(query, cache, step, of, output)

        def recall() -> None:
            """Of a sequence whose blocks are all there, so that nothing is read."""
            away, rows = self._sample_step(settings, recalls=True), layer.store.rows
            held = DeviceResidency(self.shape.kv_heads, len(cache), len(cache), self.counts.totals)
            kernels.choose_by_triton(query, rows, away.plan, 1.0, bounds, rows, held)
            away.plan.missed.zero_()
            addresses = torch.zeros(len(cache), dtype=torch.int64, device=self.device)
            for one in (cache, by_tokens):
                fetch = partial(kernels.fetch_by_triton, away.plan, held, addresses, one)
                away.plan.fetched = self.beside(fetch)
            for of in terms:
                self.attend(query, cache, away, output, of)
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

    def _sample_layer(self, settings: RetrievalSettings) -> _Sample:
        """A layer of its own over a cache of a few blocks, a token's query, and its output."""
        shape = self.shape
        size = _SAMPLED, shape.kv_heads, shape.block_size, 2 * shape.head_dim
        cache = torch.zeros(size, dtype=shape.stored, device=self.device)
        output = cache.new_zeros((1, shape.heads, shape.head_dim), dtype=shape.dtype)
        layer = TritonKernel(shape, self.device).layer("", settings, Activity())
        layer.digest_rows(cache).zero_()
        return layer, cache, output.to(shape.query or shape.dtype), output

    def _sample_step(self, settings: RetrievalSettings, recalls: bool = False) -> SparseStep:
        """Of one sequence, and a block to digest. ``recalls``: with two blocks off the device."""
        size, ids = self.shape.block_size, torch.arange(_SAMPLED, dtype=torch.int32)
        away = None
        if recalls:
            records, numbers = Records(np.empty(0, np.uint8), {}), np.arange(2)
            away = OffloadedSequence("", 1, numbers, ids[1:3], records, None, numbers, place=0)
        named = ids if away is None else away.named(ids)
        sequence = SparseSequence(0, 0, Split(_SAMPLED, 1, 3, 1, size, size), named, away)
        layout, table = settings.layout(size, narrows=False), device_of(self.device).send(ids[None])
        return self.schedule(ids[1:2].to(torch.int64), [sequence], layout, table)

    def digest(self, kv_cache: torch.Tensor, block_ids: torch.Tensor, store: DigestStore) -> None:
        keys, _ = kernels.halves(kv_cache, self.shape.head_dim)
        bounds = store.layout.kind.name == "bounds"
        kernels.digest_by_triton(keys, store.rows, block_ids.to(torch.int32), bounds)

    def schedule(
        self,
        stale: torch.Tensor,
        sequences: Sequence[SparseSequence],
        layout: Layout | None,
        table: torch.Tensor,
        graph_rows: int = 0,
    ) -> SparseStep:
        """All steps share their buffers, so the kernels of a step that is launched have read them
        before the next one's write."""
        unmade, count = set(stale.tolist()), graph_rows or len(sequences)
        facts = [_PADDING._replace(token=at) for at in range(count)]
        for at, one in enumerate(sequences):
            facts[at] = made = _facts_of(one, unmade)
            unmade.discard(made.fills)
        filled = len(stale) - len(unmade)
        if filled:
            stale = torch.tensor([one for one in stale.tolist() if one in unmade])
        late = device_of(self.device).send(stale.to(torch.int32)) if len(stale) else stale
        if not count:
            return SparseStep(late, (), None)
        recalls = any(one.offloaded is not None for one in sequences)
        self.counts.changed |= recalls
        left = self._left if recalls or (graph_rows and self.most.left) else None
        buffers = self._buffers_for(count, max(one.blocks for one in facts))
        told = torch.tensor(facts, dtype=torch.int32)
        device_of(self.device).send(told, buffers.facts[:count])
        plan = DeviceStep(buffers, count, table, left)
        return SparseStep(late, tuple(sequences), plan, filled, bool(graph_rows))

    def _buffers_for(self, sequences: int, blocks: int) -> StepBuffers:
        """Made once, for the greatest step: captured graphs have their addresses."""
        most, shape = self.most, self.shape
        if self._buffers is None:
            size = most.rows, self._longest, shape.kv_heads, shape.group
            self._buffers = StepBuffers(*size, self.device)
        if not self._buffers.has_room(sequences, blocks):
            raise EngineError(
                f"a step has {sequences} tokens of sequences of up to {blocks} blocks, and "
                f"retrieval has room for {most.rows} of {self._longest}. Please report this; "
                "remove `retrieval` from VLLM_PLUGINS meanwhile"
            )
        return self._buffers

    def attend(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        step: SparseStep,
        output: torch.Tensor,
        parameters: AttentionParameters,
    ) -> None:
        plan = step.plan
        given = query, *kernels.halves(kv_cache, self.shape.head_dim), plan, output
        attend = partial(kernels.attend_by_triton, *given, **parameters.of_kernel)
        if plan.fetched is None:
            attend(turn=0 if plan.place is None else 3)
            return
        attend(turn=1)
        try:
            device_of(self.device).current().wait(plan.fetched)
            attend(turn=2)
        except BaseException:
            plan.arrived.zero_()  # what the first turn has counted
            raise

    def beside(self, fetch: Callable[[], None]) -> Event | None:
        """Queues what fetches chosen blocks beside what follows; the event when they are there.
        None: before it. In a graph that is captured the streams fork and join."""
        if not FORKS:
            fetch()
            return None
        if self._fetches is None:  # made by ``warm``, before a graph is captured
            self._fetches = device_of(self.device).stream("fetches")
        self._fetches.wait(device_of(self.device).current().record())
        self._fetches.run(fetch)
        return self._fetches.record()

    def hold(self, blocks: int) -> int:
        """The layers' caches have so many blocks. Returns what exceeds every number of a block off
        the device."""
        most = self.most.left_of(blocks)
        if blocks != self._blocks:
            self._blocks, self.numbers = blocks, BlockNumbers(self.device, most)
        return most

    def has_room(self, count: int, sequences: int) -> bool:
        return count <= self.numbers.room and sequences <= self._left.room

    def number(self, sequence: OffloadedSequence) -> None:
        """Numbers the sequence's offloaded blocks that have no number yet, and tells the kernels of
        them and of slots that it has since the last time: some come without blocks."""
        known = len(sequence.numbers)
        if known < sequence.count or sequence.placed < len(sequence.slots):
            new = self.numbers.take(sequence.count - known)
            sequence.numbers = np.concatenate([sequence.numbers, new])
            send = device_of(self.device).send
            begins, names = (send(torch.from_numpy(one)) for one in (sequence.begins[known:], new))
            self.numbers.addresses.index_copy_(0, names, begins)
            if sequence.place < 0:
                sequence.place = self._left.take()
            slots, sequence.placed = send(sequence.slots), len(sequence.slots)
            self._left.write(sequence.place, known, names.to(torch.int32), slots)

    def give_up(self, sequence: OffloadedSequence) -> None:
        """The sequence has ended."""
        self.numbers.give(sequence.numbers)
        sequence.numbers = sequence.numbers[:0]
        if sequence.place >= 0:
            self._left.give(sequence.place)
            sequence.place = -1


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


def _facts_of(sequence: SparseSequence, unmade: Collection[int]) -> SequenceFacts:
    """``unmade``: blocks whose digests must be computed."""
    split, offloaded, slots, held = sequence.split, sequence.offloaded, 0, 0
    if offloaded is not None:
        slots, held = len(offloaded.slots), offloaded.place
        if slots < min(split.chosen, offloaded.count):
            raise EngineError(
                f"{offloaded.key} has {slots} slots for {split.chosen} chosen blocks of "
                f"{offloaded.count} that are off the device"
            )
    last = int(sequence.table[split.blocks - 1]) if split.last_tokens == split.block_size else -1
    return SequenceFacts(
        sequence.token,
        split.init,
        split.middle,
        split.chosen,
        split.blocks,
        split.attended_tokens,
        slots,
        last if last in unmade else -1,
        sequence.row,
        sequence.left,
        held,
    )


class DeviceBuilder(RetrievalBuilder):
    """Retrieval beside the dense metadata of a backend for GPUs."""

    supports_update_block_table: bool = False
    device: torch.device
    use_full_cuda_graph: bool
    _kernel: TritonKernel

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not self._plain and runner.decides_graphs(self.vllm_config):
            runner.follow_graphs(self.vllm_config, self)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """A token of each request. With drafts steps have other numbers of tokens."""
        if vllm_config.speculative_config is not None or not runner.decides_graphs(vllm_config):
            logger.info(
                "kvrecall: retrieval: attention is launched piece by piece, not as one CUDA graph: "
                "the engine speculates, or this vLLM has no choice of the steps that are replayed"
            )
            return AttentionCGSupport.NEVER
        own = super().get_cudagraph_support(vllm_config, kv_cache_spec)  # type: ignore[misc]
        most = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
        return min(own, most, key=lambda support: support.value)

    def make_kernel(self, kv_cache_spec: Any) -> TritonKernel:
        impl, spec = next(iter(self._impls().values())), kv_cache_spec
        shape = KernelShape(
            impl.num_heads, spec.num_kv_heads, spec.head_size, self.block_size, spec.dtype, ""
        )
        if spec.dtype is torch.uint8:
            layers = self.vllm_config.compilation_config.static_forward_context
            if any(layers[name]._k_scale.numel() > 1 for name in self._layer_names):
                raise EngineError(
                    "retrieval attention on a GPU takes one scale of keys a layer, and this model "
                    "has one a head; leave kv_cache_dtype at auto, or remove `retrieval` from "
                    "VLLM_PLUGINS"
                )
            fp8, dtype = fp8_type(self.vllm_config), self.vllm_config.model_config.dtype
            query = fp8 if impl.supports_quant_query_input else None
            shape = replace(shape, dtype=dtype, fp8=fp8, query=query)
        settings = active_settings()
        most = most_of(self.vllm_config, settings, self.specs())
        kernel = TritonKernel(shape, self.device, most)
        on_host = self.device.type == "cpu"  # one that interprets is no measure
        if not on_host:
            kernel.warm(settings, kernel.most.left > 0, self._terms())
        if settings.gate and not on_host:
            support = self.get_cudagraph_support(self.vllm_config, spec)
            graphs = support is not AttentionCGSupport.NEVER and replays_graphs(self.vllm_config)
            speed = kernel.measure(settings, graphs)
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

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Any:
        """Also for a dummy step for which a graph is replayed: all requests are padding."""
        common = common_attn_metadata
        runner.take_batch_blocks(self._layer_names[0])
        self._captures = True
        try:
            metadata = super().build_for_cudagraph_capture(common)  # type: ignore[misc]
        finally:
            self._captures = False
        # Larger ones are captured for nothing, as vLLM captures all that it is told to.
        if not self._plain and common.num_reqs <= min(GRAPH_ROWS, self._kernel.most.rows):
            table, stale = common.block_table_tensor, torch.empty(0, dtype=torch.int64)
            step = self._kernel.schedule(stale, (), None, table, common.num_reqs)
            metadata.retrieval = StepWork(step)
        return metadata

    def hinders_graph(self, requests: int) -> bool:
        """If the batch is too large, blocks are to be recorded, or the host has work for it."""
        too_many = padded_requests(self.vllm_config, requests) > GRAPH_ROWS
        if too_many or self._group.needs_host:
            return True
        return self._was_sparse and not self._activity.steps_sparse % SEEN_EVERY_REPLAYS

    def part(self, *args: Any, **kwargs: Any) -> Any:
        """FlashAttention's builder keeps the plan that graphs read in one buffer: none of a part
        of a batch."""
        keeps = getattr(self, "use_full_cuda_graph", False)
        self.use_full_cuda_graph = False
        try:
            return super().part(*args, **kwargs)
        finally:
            self.use_full_cuda_graph = keeps

    def make_dense(self, name: str) -> DenseOffload:
        """By vLLM's kernel, which reads one cache: for the time of the call there is one."""
        copy = partial(copied, name, self._activity)
        return lambda row, _, cache, __, plainly: plainly(copy(row, cache), row.metadata)

    def make_kept(self, name: str) -> KeptLayer | None:
        most = self._kernel.most
        return KeptLayer(name, most.pages_of, self._activity) if most.left else None

    def alone(self, common: Any, rows: Sequence[BatchRow], at: int) -> Any:
        blocks = -(-rows[at].tokens // self.block_size)
        places = torch.arange(blocks, dtype=torch.int32, device=self.device)
        return self.part(common, rows, [at], places[None])[1]


class DeviceAttention(RetrievalAttention):
    """Retrieval over the dense attention of a backend for GPUs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        runner.leave_room(cache_bytes)

    def _parameters(self, layer: Any) -> AttentionParameters:
        """With the scale of a query in eight bits."""
        of = super()._parameters(layer)
        codes = layer.query_quant is not None
        return replace(of, scale=of.scale * layer._q_scale_float) if codes else of

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
