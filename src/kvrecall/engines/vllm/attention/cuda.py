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
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
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

from kvrecall.attention.digest import Layout, coded_width
from kvrecall.attention.kernels import device as kernels
from kvrecall.attention.kernels.device import (
    BlockNumbers,
    DeviceResidency,
    DeviceStep,
    Ints,
    LeftTables,
    SequenceFacts,
    StepBuffers,
    next_power,
)
from kvrecall.attention.selection import LAUNCHES, LAUNCHES_A_BLOCK, DeviceSpeed, Split
from kvrecall.attention.settings import RetrievalSettings
from kvrecall.engines.vllm.attention.activity import Activity, RecallCounts
from kvrecall.engines.vllm.attention.backend import RetrievalAttention, RetrievalBuilder
from kvrecall.engines.vllm.attention.base import (
    CHECKSUM_BYTES,
    SEEN_EVERY_REPLAYS,
    AttentionKernel,
    AttentionParameters,
    DigestStore,
    KernelShape,
    RetrievalLayer,
    SparseSequence,
    SparseStep,
)
from kvrecall.engines.vllm.attention.checks import offload_hindrance
from kvrecall.engines.vllm.attention.offloaded import OffloadedSequence
from kvrecall.engines.vllm.attention.plugin import active_settings
from kvrecall.engines.vllm.attention.step import (
    BatchRow,
    DenseOffload,
    KeptCopy,
    OffloadedRow,
    StepWork,
)
from kvrecall.engines.vllm.compat import runner
from kvrecall.engines.vllm.compat.config import (
    layer_index,
    most_of_ranks,
    padded_requests,
    replays_graphs,
)
from kvrecall.engines.vllm.device import device_of
from kvrecall.engines.vllm.device.base import Event, Ring
from kvrecall.errors import EngineError

logger = logging.getLogger("vllm.kvrecall")

_TRIES = 5
"""Measurements of which the least counts: the host, which launches, has other work, too."""

_LAYERS_A_GRAPH = 16
"""Of a graph that is measured, whose own launch is to count as little as in a model's."""

_MOST_UNSEEN = 16
"""Steps of a layer whose selected blocks may be on their way to the host, to be recorded there."""

GRAPH_ROWS = 64
"""Requests of a step for which a graph is replayed, at most: of longer ones, 2 MiB of buffers each
where they have 512K tokens."""

_PADDING = SequenceFacts(0, 0, 0, 0, 0, 0)

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
        self._layer_at = 0
        self._left: DigestStore | None = None
        self._residency: DeviceResidency | None = None
        # Partially offloaded sequences, and how many of their blocks and slots the layer knows.
        self._gone: dict[str, tuple[OffloadedSequence, int, int]] = {}
        self._unseen: deque[tuple[Event, torch.Tensor, _Seen]] = deque()
        return DigestStore(shape, layout, len(kv_cache), self._kernel.device, by_block=True)

    def select(self, query: torch.Tensor, step: SparseStep, scale: float, noted: bool) -> None:
        plan: DeviceStep = step.plan
        left, residency = None, None
        if plan.recalls and self._left is not None:
            left, residency = self._left.rows, self._residency
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
        if self._left is None or self._residency is None:
            layout, device = self.store.layout, self._kernel.device
            self._left = DigestStore(self._shape, layout, 0, device, by_block=True)
            counts = self._kernel.counts.totals
            self._residency = DeviceResidency(self._shape.kv_heads, len(kv_cache), counts)
            self._layer_at = sequence.records.layers[self.name]
        _, first, held = self._gone.get(sequence.key, (sequence, 0, 0))
        end = first + digests.shape[1]
        self._gone[sequence.key] = sequence, end, len(sequence.slots)
        self._kernel.number(sequence)
        numbers, send = sequence.numbers[first:end], self._device.send
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
        if key in self._gone:
            sequence = self._gone.pop(key)[0]
            self._kernel.give_up(sequence)
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
        block, head, piece = kernels.pieces_of(self._cache)
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
                (at, one.split, one.blocks.numpy().copy())
                for at, one in enumerate(step.sequences)
                if one.split.middle
            )
            self._unseen.append((event, table, seen))

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

    def __init__(self, shape: KernelShape, device: torch.device, most_tokens: int = 0) -> None:
        """``most_tokens``: of a sequence; 0: its buffers grow. Raises EngineError for blocks and
        heads that it cannot read."""
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
        self._left = LeftTables(device)
        block_bytes = shape.block_size * shape.token_bytes // shape.kv_heads
        self.counts = RecallCounts(device, block_bytes)
        self._most_blocks = -(-most_tokens // shape.block_size)
        self._room: tuple[StepBuffers, Ring] | None = None
        self._graph_room: tuple[StepBuffers, Ring] | None = None

    def measure(
        self, settings: RetrievalSettings, graphs: bool = False, rounds: int = 20
    ) -> DeviceSpeed:
        """Measures the device, and sets ``overhead_bytes`` by it: once, before serving. It also
        compiles the kernels. Takes a quarter of a GiB while it runs. ``graphs``: whether steps are
        to be replayed as graphs."""
        shape, device = self.shape, self.device
        bandwidth = _bandwidth(device, rounds)
        size, layout = shape.block_size, settings.layout(shape.block_size, narrows=False)
        split = Split(4, 1, 3, 1, size, size)
        ids = torch.arange(4, dtype=torch.int32)
        sequence = SparseSequence(0, 0, split, ids)
        table = device_of(device).send(ids[None])
        step = self.schedule(ids[1:2].to(torch.int64), [sequence], layout, table)
        sizes = (4, shape.kv_heads, size, 2 * shape.head_dim)
        cache = torch.zeros(sizes, dtype=shape.dtype, device=device)
        query = torch.zeros(1, shape.heads, shape.head_dim, dtype=shape.dtype, device=device)
        output = torch.empty_like(query)
        layer = self.layer("", settings, Activity())
        layer.digest_rows(cache).zero_()

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

    def digest(self, kv_cache: torch.Tensor, block_ids: torch.Tensor, store: DigestStore) -> None:
        keys, bounds = self._halves(kv_cache)[0], store.layout.kind.name == "bounds"
        kernels.digest_by_triton(keys, store.rows, block_ids, bounds)

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
            facts[one.row if graph_rows else at] = made = _facts_of(one, unmade)
            unmade.discard(made.fills)
        filled = len(stale) - len(unmade)
        if filled:
            stale = torch.tensor([one for one in stale.tolist() if one in unmade])
        late = device_of(self.device).send(stale.to(torch.int32)) if len(stale) else stale
        if not count:
            return SparseStep(late, (), None)
        left = self._left if any(one.offloaded is not None for one in sequences) else None
        plan = self._step(facts, table, left, bool(graph_rows))
        return SparseStep(late, tuple(sequences), plan, filled, bool(graph_rows))

    def captured(self, requests: int, table: torch.Tensor) -> SparseStep:
        """The step of a graph that is captured, of padding alone. ``table``: as of ``schedule``; it
        lies where it will in each step for which the graph is replayed."""
        return self.schedule(torch.empty(0, dtype=torch.int64), (), None, table, requests)

    def _step(
        self,
        facts: Sequence[SequenceFacts],
        table: torch.Tensor,
        left: LeftTables | None,
        is_graph: bool,
    ) -> DeviceStep:
        count, most = len(facts), max(one.blocks for one in facts)
        rooms = [self._graph_room] if is_graph else [self._graph_room, self._room]
        there = [room for room in rooms if room is not None and room[0].has_room(count, most)]
        buffers, ring = there[0] if there else self._make_room(count, most, is_graph)
        ring.write(facts)
        return DeviceStep(buffers, count, table, left)

    def _make_room(self, count: int, most: int, is_graph: bool) -> tuple[StepBuffers, Ring]:
        """Buffers for steps of so many sequences and blocks; of a graph, the greatest."""
        sequences = GRAPH_ROWS if is_graph else next_power(count)
        blocks = max(self._most_blocks, next_power(max(1, most)))
        heads = self.shape.kv_heads, self.shape.group
        buffers = StepBuffers(sequences, blocks, *heads, self.device)
        room = buffers, Ring(device_of(self.device), buffers.facts)
        if is_graph:
            self._graph_room = room
        else:
            self._room = room
        return room

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

    def number(self, sequence: OffloadedSequence) -> None:
        """Numbers the sequence's offloaded blocks that have no number yet."""
        known = len(sequence.numbers)
        if known < sequence.count:
            new = self.numbers.take(sequence.count - known)
            sequence.numbers = np.concatenate([sequence.numbers, new])
            send = device_of(self.device).send
            begins, names = (send(torch.from_numpy(one)) for one in (sequence.begins[known:], new))
            self.numbers.addresses.index_copy_(0, names, begins)
            if sequence.place < 0:
                sequence.place = self._left.take()
            slots = send(sequence.slots)
            self._left.write(sequence.place, known, names.to(torch.int32), slots)

    def give_up(self, sequence: OffloadedSequence) -> None:
        """The sequence has ended."""
        self.numbers.give(sequence.numbers)
        sequence.numbers = sequence.numbers[:0]
        if sequence.place >= 0:
            self._left.give(sequence.place)
            sequence.place = -1

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

    supports_update_block_table: bool = False
    device: torch.device
    use_full_cuda_graph: bool
    _kernel: TritonKernel

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._told = False
        if not self._plain and runner.decides_graphs(self.vllm_config):
            runner.follow_graphs(self.vllm_config, self)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """A token of each request. With drafts steps have other numbers of tokens."""
        if vllm_config.speculative_config is not None or not runner.decides_graphs(vllm_config):
            logger.info(
                "kvrecall: retrieval: attention is launched piece by piece, not as one CUDA graph: "
                "there is speculation, or this vLLM cannot be told which steps to replay"
            )
            return AttentionCGSupport.NEVER
        own = super().get_cudagraph_support(vllm_config, kv_cache_spec)  # type: ignore[misc]
        most = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
        return min(own, most, key=lambda support: support.value)

    def make_kernel(self, kv_cache_spec: Any) -> TritonKernel:
        heads, spec = next(iter(self._impls().values())).num_heads, kv_cache_spec
        shape = (heads, spec.num_kv_heads, spec.head_size, self.block_size, spec.dtype, "")
        most = self.vllm_config.model_config.max_model_len
        kernel = TritonKernel(KernelShape(*shape), self.device, most)
        settings = active_settings()
        if settings.gate and self.device.type != "cpu":  # one that interprets is no measure
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
        if not self._plain and common.num_reqs <= GRAPH_ROWS:
            table = common.block_table_tensor
            metadata.retrieval = StepWork(self._kernel.captured(common.num_reqs, table))
        return metadata

    def hinders_graph(self, requests: int) -> bool:
        """If the batch is too large, where blocks are to be recorded, and while a sequence has
        blocks off the device."""
        if not self._group.is_idle:
            if not self._told:
                self._told = True
                logger.info(
                    "kvrecall: retrieval: steps with a sequence past VLLM_RETRIEVAL_OFFLOAD_"
                    "BOUNDARY=%d are launched piece by piece, not as one CUDA graph: that was not "
                    "yet tried with blocks off the device",
                    self._settings.offload_boundary,
                )
            return True
        if padded_requests(self.vllm_config, requests) > GRAPH_ROWS:
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
        runner.leave_room(share_beside)

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        return False


def share_beside(vllm_config: Any, specs: Mapping[str, Any]) -> float:
    """The share of a GPU's memory for the KV cache that must be left for the digests of all blocks
    and, where sequences are to leave the device, for as many pages of dense layers as there are
    blocks. ``specs``: the layers' KV cache specs of vLLM's, by name."""
    settings = active_settings()
    long = settings.offload_boundary < vllm_config.model_config.max_model_len
    copies = long and offload_hindrance(vllm_config) is None
    kv = beside = 0
    for name, spec in specs.items():
        kv += spec.page_size_bytes
        if layer_index(name) >= settings.dense_layers:
            layout = settings.layout(spec.block_size, narrows=False)
            width = coded_width(layout.kind.parts * spec.head_size)
            beside += spec.num_kv_heads * layout.rows * width + CHECKSUM_BYTES
        elif copies:
            beside += spec.page_size_bytes
    return beside / (beside + kv)


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
