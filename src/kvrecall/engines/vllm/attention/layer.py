"""One sparse layer: the digests of its blocks, the selection, and attention over selected blocks.

Digests have checksums. A block's bytes are verified when they come from a disk or from another
host; in memory they are not, and are read once for every use. Digests are read once for a
sequence's whole life, and a damaged digest silently selects wrong blocks; but it can be recomputed
from the block's keys.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import xxhash

from kvrecall.attention.digest import Layout, coded_width, encode
from kvrecall.attention.index.base import index_factory
from kvrecall.attention.index.search import SequenceIndex
from kvrecall.attention.kernels import int8
from kvrecall.attention.kernels.device import pieces_of
from kvrecall.attention.kernels.search import Placed, Search, is_compiled
from kvrecall.attention.residency import DeviceResidency, Flags, Ints, Residency
from kvrecall.attention.selection import Split, selector_of
from kvrecall.attention.settings import RetrievalSettings
from kvrecall.engines.vllm.attention.activity import Activity
from kvrecall.engines.vllm.attention.indexed import SequenceIndexes
from kvrecall.engines.vllm.attention.offloaded import (
    OffloadedSequence,
    checksums_of_layer,
    digests_of_layer,
)
from kvrecall.engines.vllm.attention.step import (
    LeftBlocks,
    RowKernel,
    SparseSequence,
    SparseStep,
    Terms,
)
from kvrecall.engines.vllm.compat.config import layer_index
from kvrecall.engines.vllm.device import device_of
from kvrecall.engines.vllm.device.base import Event

CHECKSUM_BYTES = 8
"""Checksum bytes of a block's digests in a layer."""

_SEEN_EVERY = 16
"""Selected blocks are recorded in one of this many sparse steps."""

_SPARE = 64
"""Extra blocks to allocate when the memory must grow."""

_Seen = tuple[tuple[int, Split, Ints], ...]
"""Sequences of a step by their places in it, with their middle blocks' ids."""

_ODD = 0x9E3779B97F4A7C15 - (1 << 64)  # of the golden ratio, as a signed number


class RetrievalLayer:
    """Digests of one layer, coded in eight bits, and attention over the blocks they select.

    Memory: about ``rows * parts / (4 * block_size)`` of a layer's KV cache of 16 bits (a
    thirty-second by default), allocated as blocks are first digested and never more.
    """

    def __init__(
        self,
        name: str,
        settings: RetrievalSettings,
        kernel: RowKernel,
        activity: Activity,
        note: Callable[[Ints, Ints, int], None] | None = None,
    ) -> None:
        """``name``: vLLM's. ``note``: records where blocks are selected, as ``HeatTotals.note``."""
        self._name = name
        self._note = note
        self._kernel = kernel
        self._shape = shape = kernel.shape
        self._activity = activity
        self._layout = settings.layout(shape.block_size, narrows=not kernel.chooses)
        self._selector = selector_of(self._layout)
        if kernel.device.type == "cpu":
            int8.prepare()
            is_compiled()
        self._store: DigestStore | None = None
        self._placed: tuple[Placed, ...] = ()
        self._checksums = torch.empty(0, CHECKSUM_BYTES, dtype=torch.uint8)
        self._written = torch.empty(0, dtype=torch.int64)
        self._recalled: dict[str, RecalledBlocks] = {}
        self._shared: SharedBlocks | None = None
        self._unseen: deque[tuple[Event, torch.Tensor, _Seen]] = deque()
        factory, self._indexes = index_factory(settings.index), None
        if factory is not None:
            sizes = self._layout, shape.kv_heads, shape.head_dim
            self._indexes = SequenceIndexes(partial(SequenceIndex, factory, *sizes), activity)

    def digest(self, kv_cache: torch.Tensor, block_ids: torch.Tensor) -> None:
        """Computes the digests of these blocks from the keys they hold: full blocks, on the host
        or the kernel's device; negative numbers are none."""
        if not len(block_ids):
            return
        store, ids = self._store_for(kv_cache), self._sent(block_ids)
        self._kernel.digest(kv_cache, ids, store.rows, self._layout)
        self._wrote(ids)

    def sign(self, block_ids: torch.Tensor) -> None:
        """These blocks, whose digests are fresh, go to the pool: stores their digests'
        checksums."""
        ids = self._sent(block_ids)
        self._checksums[ids] = checksums_of(self._rows[:, ids].transpose(0, 1))

    def damaged(self, block_ids: torch.Tensor) -> torch.Tensor:
        """The blocks among these, which came from the pool, whose digests are damaged. Accepts the
        digests of the others."""
        ids = self._sent(block_ids)
        assert self._store is not None
        self._wrote(ids)
        rows = self._store.rows[:, ids].transpose(0, 1)
        damaged = block_ids[damaged_among(rows, self._checksums[ids]).cpu()]
        self._activity.digests_mended += len(damaged)
        return damaged

    def depart(
        self,
        sequence: OffloadedSequence,
        block_ids: Sequence[int] | torch.Tensor,
        kv_cache: torch.Tensor,
    ) -> None:
        """Keeps the digests of blocks that are about to leave the device."""
        store = self._store_for(kv_cache)
        if sequence.key not in self._recalled:
            self._begin(sequence, kv_cache)
        ids = self._sent(torch.as_tensor(block_ids, dtype=torch.int64))
        self._recalled[sequence.key].depart(store.rows[:, ids])

    def arrive(self, sequence: OffloadedSequence, kv_cache: torch.Tensor) -> None:
        """Takes the digests of a sequence that begins off the device from its blocks' records.
        Damaged digests are recomputed from the blocks' keys."""
        records, offsets = sequence.records, sequence.offsets
        heads, _, nbytes = self.digest_rows(kv_cache).transpose(0, 1).shape
        pages = records.pages(offsets, digests_of_layer(self._name), heads * nbytes)
        signed = records.pages(offsets, checksums_of_layer(self._name), CHECKSUM_BYTES)
        stored = torch.from_numpy(pages).view(self._rows.dtype)
        stored = stored.view(len(pages), heads, *self._rows.shape[2:])
        sums = checksums_of if self._kernel.device.type == "cpu" else sums_of
        damaged = (sums(stored) != torch.from_numpy(signed)).any(-1).nonzero().flatten()
        stored = self._sent(stored)  # verified on the host, which does not wait for the device
        if len(damaged):
            kept = records.pages(offsets[damaged.numpy()], self._name, kv_cache[0].nbytes)
            blocks = _blocks_of(self._sent(torch.from_numpy(kept)), kv_cache)
            ids = self._sent(torch.arange(len(blocks)))
            stored[self._sent(damaged)] = self._digests_of(blocks, ids)
            self._activity.digests_mended += len(damaged)
        self._begin(sequence, kv_cache)
        self._recalled[sequence.key].depart(stored.transpose(0, 1))
        self._activity.bytes_digests += pages.nbytes + signed.nbytes

    def _begin(self, sequence: OffloadedSequence, kv_cache: torch.Tensor) -> None:
        """Starts a sequence without offloaded blocks."""
        kernel, digests = self._kernel, DigestStore(self._kernel, self._layout)
        if kernel.chooses and self._shared is None:
            residency = kernel.residency(len(kv_cache))
            self._shared = SharedBlocks(digests, residency, sequence.records.layers[self._name])
        self._recalled[sequence.key] = RecalledBlocks(
            sequence, self._name, kernel, kv_cache, self._shared or digests, self._activity
        )

    def digest_rows(self, kv_cache: torch.Tensor) -> torch.Tensor:
        """The digests' bytes, a row a block: uint8 ``[blocks, kv_heads, bytes]``, a view."""
        return self._store_for(kv_cache).rows.flatten(2).view(torch.uint8).transpose(0, 1)

    def checksum_rows(self, kv_cache: torch.Tensor) -> torch.Tensor:
        """The digests' checksums, a row a block: uint8 ``[blocks, CHECKSUM_BYTES]``, not a copy."""
        self._store_for(kv_cache)
        return self._checksums

    def collect(self, wait: bool = False) -> None:
        """Counts what the device has recalled: as of ``RowKernel.collect``."""
        self._kernel.collect(self._activity, wait)

    def forget(self, key: str) -> None:
        """The sequence has ended. With the last one memory for its kind is given back."""
        recalled = self._recalled.pop(key, None)
        if recalled is not None:
            recalled.end()
        if not self._recalled:
            self._shared = None
        if self._indexes is not None:
            self._indexes.forget(key)

    def attend(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        step: SparseStep,
        terms: Terms,
        output: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Writes the attention of the step's sparse tokens to their places in ``output``, and
        returns it. ``query``, ``output``: ``[tokens, heads, dim]``, of the whole batch."""
        output = torch.empty_like(query) if output is None else output
        self.choose(query, step, terms.scale * terms.key_scale)
        if self._shared is not None:
            self._kernel.fetch(step, kv_cache, self._shared.left)
        self._kernel.attend(query, kv_cache, step, output, terms)
        return output

    def choose(self, query: torch.Tensor, step: SparseStep, scale: float) -> None:
        """Chooses every sequence's blocks, as ``attend`` does. ``query``: ``[tokens, heads,
        dim]``; ``scale``: of its products with keys as they are stored."""
        activity = self._activity
        activity.count_layer(step.counts, self._shape.kv_heads)
        sampled = self._note is not None and activity.steps_sparse % _SEEN_EVERY == 1
        if step.search is not None:
            self._search(step.search, query, step, scale)
            if sampled:
                choosing = (one for one in step.sequences if one.split.middle)
                for sequence, places in zip(choosing, step.search.found, strict=True):
                    self._tell(sequence.split, places)
        elif self._kernel.chooses:
            self._choose_there(query, step, scale, sampled)
        else:
            self._choose_each(query, step, scale, sampled)

    def _search(self, search: Search, query: torch.Tensor, step: SparseStep, scale: float) -> None:
        """By compiled code, which enters what it finds into the plan. Few steps of Python: after a
        layer's attention each waits for memory (docs/log.md)."""
        if not self._recalled:
            search.run(query, self._placed, scale)
            return
        placed = [self._placed_for(one) for one in step.sequences if one.split.middle]
        search.run(query, placed, scale)
        self._activity.blocks_in_place += search.left

    def _choose_there(
        self, query: torch.Tensor, step: SparseStep, scale: float, sampled: bool
    ) -> None:
        """By the kernel, on its device."""
        assert self._store is not None
        kernel, heads, off = self._kernel, self._shape.kv_heads, None
        if self._shared is not None and any(one.offloaded is not None for one in step.sequences):
            off = self._shared.left
        kernel.choose(query, step, self._store.rows, self._layout, scale, off)
        if sampled:
            self._tell_heat(step)
        for at, sequence in enumerate(step.sequences):
            split, offloaded = sequence.split, sequence.offloaded
            if not split.middle or offloaded is None or offloaded.is_readable:
                continue
            rows = step.plan.table[at * heads : (at + 1) * heads]
            # Waits for the device, which cannot fetch blocks of this sequence.
            named = rows[:, split.init : split.init + split.chosen].cpu().numpy()
            places = torch.from_numpy(_places_of(named, sequence.blocks.numpy()))
            self._enter(step, at, places)

    def _choose_each(
        self, query: torch.Tensor, step: SparseStep, scale: float, sampled: bool
    ) -> None:
        """One sequence after another, by PyTorch or an index."""
        shape = self._shape
        find = self._plainly if self._indexes is None else self._by_index
        if self._indexes is not None:
            self._indexes.begin_step()
        for at, sequence in enumerate(step.sequences):
            if not sequence.split.middle:
                continue
            grouped = query[sequence.token].reshape(shape.kv_heads, shape.group, shape.head_dim)
            # In the sequence's order, so that the sum does not depend on where blocks lie.
            places = find(sequence, grouped, scale).sort(-1).values
            self._enter(step, at, places)
            if sampled:
                self._tell(sequence.split, places)

    def _tell(self, split: Split, places: torch.Tensor) -> None:
        """Notes which of a sequence's middle blocks are chosen: ``[kv_heads, chosen]``."""
        assert self._note is not None
        middle = np.arange(split.init, split.local)
        self._note(middle, places.numpy() + split.init, split.blocks)

    def _enter(self, step: SparseStep, at: int, places: torch.Tensor) -> None:
        """The step's sequence ``at`` attends to these of its middle blocks: ``[kv_heads, chosen]``.
        Recalls them to the device where the kernel does not read them in place."""
        sequence, kernel = step.sequences[at], self._kernel
        offloaded = sequence.offloaded
        if offloaded is not None and kernel.in_place:
            found = self._recalled[offloaded.key].find(places.numpy(), sequence.blocks.numpy())
            kernel.enter_in_place(step, at, found)
            return
        ids = sequence.blocks[places]
        if offloaded is not None:
            left = places < offloaded.count
            slots = self._recalled[offloaded.key].fetch(places.numpy(), left.numpy())
            ids = torch.where(left, offloaded.slots[torch.from_numpy(slots)], ids)
        kernel.enter(step, at, ids)

    def _tell_heat(self, step: SparseStep) -> None:
        """Notes what a device chose once that is here; the host does not wait for it."""
        assert self._note is not None
        heads = self._shape.kv_heads
        while self._unseen and self._unseen[0][0].is_reached():
            _, table, seen = self._unseen.popleft()
            for at, split, blocks in seen:
                rows = table[at * heads : (at + 1) * heads, split.init : split.init + split.chosen]
                found = _places_of(rows.numpy(), blocks)
                self._note(np.arange(split.init, split.local), found + split.init, split.blocks)
        if len(self._unseen) < _SEEN_EVERY:
            table, event = device_of(self._kernel.device).fetch(step.plan.table)
            seen = tuple(
                (at, one.split, one.blocks.numpy().copy()) for at, one in enumerate(step.sequences)
            )
            self._unseen.append((event, table, seen))

    def _placed_for(self, sequence: SparseSequence) -> Placed:
        """For a ``Search`` of its middle blocks: the digests of those that left, then of the
        device's blocks."""
        if sequence.offloaded is not None:
            assert self._store is not None
            return self._recalled[sequence.offloaded.key].placed_before(self._store)
        (placed,) = self._placed
        return placed

    def _plainly(self, sequence: SparseSequence, query: torch.Tensor, scale: float) -> torch.Tensor:
        """Places of the chosen blocks among the middle ones, by PyTorch's search: int64
        ``[kv_heads, chosen]``. ``query``: ``[kv_heads, group, dim]``."""
        assert self._store is not None
        offloaded = sequence.offloaded
        left = 0 if offloaded is None else offloaded.count
        runs = [self._store.part(self._sent(sequence.blocks[left:]))]
        if offloaded is not None:
            runs.insert(0, self._recalled[offloaded.key].digests)
        digests = [digests for digests, _ in runs]
        coarse = [coarse for _, coarse in runs if coarse is not None]
        return self._selector.choose(query, digests, sequence.split.chosen, scale, coarse or None)

    def _by_index(
        self, sequence: SparseSequence, query: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """The same, by the sequence's vector index."""
        assert self._indexes is not None
        split, offloaded = sequence.split, sequence.offloaded
        digests = partial(self._from, sequence)
        if offloaded is not None:
            index = self._indexes.off_device(offloaded.key, split.middle, digests)
        else:
            ids = sequence.blocks.to(torch.int64)
            index = self._indexes.on_device(ids, self._written[ids], digests)
        return index.choose(query, split.chosen, scale)

    def _from(self, sequence: SparseSequence, first: int) -> torch.Tensor:
        """The digests of its middle blocks from a place on: int8 ``[kv_heads, blocks, rows,
        width]``."""
        assert self._store is not None
        offloaded = sequence.offloaded
        if offloaded is None or first >= offloaded.count:
            return self._store.part(sequence.blocks[first:])[0]
        left = self._recalled[offloaded.key].digests[0][:, first:]
        return torch.cat([left, self._store.part(sequence.blocks[offloaded.count :])[0]], 1)

    def _wrote(self, ids: torch.Tensor) -> None:
        """The digests of these blocks were written."""
        assert self._store is not None
        self._store.wrote(ids)
        if self._indexes is not None:
            self._written[ids] += 1

    def _sent(self, values: torch.Tensor) -> torch.Tensor:
        """On the kernel's device."""
        device = self._kernel.device
        return values if values.device == device else device_of(device).send(values)

    def _digests_of(self, kv_cache: torch.Tensor, block_ids: torch.Tensor) -> torch.Tensor:
        """Digests in storage form: int8 ``[blocks, kv_heads, rows, width]``."""
        return encode(self._layout.rows_of(self._kernel.read_keys(kv_cache, block_ids)))

    @property
    def _rows(self) -> torch.Tensor:
        """Of all blocks on the device."""
        assert self._store is not None
        return self._store.rows

    def _store_for(self, kv_cache: torch.Tensor) -> DigestStore:
        if self._store is None:
            blocks = len(kv_cache)
            self._kernel.check(kv_cache)
            self._store = DigestStore(self._kernel, self._layout, blocks)
            self._placed = (Placed(self._layout, [self._store.whole]),)
            self._written = torch.zeros(blocks, dtype=torch.int64)
            self._checksums = torch.empty(
                blocks, CHECKSUM_BYTES, dtype=torch.uint8, device=kv_cache.device
            )
        return self._store


class SharedBlocks:
    """The offloaded blocks of all sequences in one sparse layer, by their numbers, on a device
    whose kernels recall them. Owned by the worker's thread."""

    def __init__(self, digests: DigestStore, residency: DeviceResidency, layer_at: int) -> None:
        self._digests = digests
        self._residency = residency
        self._layer_at = layer_at

    @property
    def left(self) -> LeftBlocks:
        return LeftBlocks(self._digests.rows, self._residency, self._layer_at)

    def take(self, numbers: Ints, digests: torch.Tensor, slots: torch.Tensor) -> None:
        """Blocks with these digests have these new numbers, and a sequence these new slots; on the
        host but for ``digests``."""
        send, most = device_of(digests.device).send, int(numbers.max(initial=-1)) + 1
        there = send(torch.from_numpy(numbers))
        self._digests.reach(most)
        self._digests.write(there, digests)
        self._residency.begin(there, send(slots.to(torch.int64)), most)


class RecalledBlocks:
    """A partially offloaded sequence in one sparse layer: its digests, and the device slots it
    recalls into. Owned by the worker's thread."""

    def __init__(
        self,
        sequence: OffloadedSequence,
        layer: str,
        kernel: RowKernel,
        kv_cache: torch.Tensor,
        digests: DigestStore | SharedBlocks,
        activity: Activity,
    ) -> None:
        """``kv_cache``: the layer's; pages in the arena have the layout of its blocks. ``digests``:
        those of leaving blocks."""
        self._sequence = sequence
        self._layer = layer
        self._kernel = kernel
        self._cache = kv_cache
        self._block, self._head, self._piece = pieces_of(kv_cache)
        self._activity = activity
        self._residency = Residency(kernel.shape.kv_heads)
        self._digests = digests
        self._placed: Placed | None = None
        self._count = self._slots = 0
        self._away = np.empty(0, dtype=np.int64)

    @property
    def digests(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Of the blocks that left, as ``DigestStore.part``, where the kernel does not choose."""
        assert isinstance(self._digests, DigestStore)
        return self._digests.part(slice(0, self._count))

    def placed_before(self, others: DigestStore) -> Placed:
        """For a ``Search``: its digests, and then others, which never grow."""
        if self._placed is None:
            assert isinstance(self._digests, DigestStore)
            both = [self._digests.whole, others.whole]
            self._placed = Placed(others.layout, both, self._away)
        return self._placed

    def depart(self, digests: torch.Tensor) -> None:
        """Takes the digests of the next leaving blocks, ``[kv_heads, blocks, rows, width]``; the
        sequence already includes them."""
        self._require_inside()
        sequence = self._sequence
        first, self._count = self._count, self._count + digests.shape[1]
        held, self._slots = self._slots, len(sequence.slots)
        if isinstance(self._digests, SharedBlocks):
            self._kernel.number(sequence)
            numbers = sequence.numbers[first : self._count]
            self._digests.take(numbers, digests, sequence.slots[held:])
            here = sequence.addresses(self._layer), self._cache[0].nbytes
            sequence.is_readable &= device_of(self._kernel.device).can_read(*here)
        else:
            self._digests.reach(self._count)
            self._placed = None
            self._digests.write(torch.arange(first, self._count, device=digests.device), digests)
        self._away = sequence.addresses(self._layer)[: self._count] - self._cache.data_ptr()
        self._residency.grow(self._slots, self._count)

    def end(self) -> None:
        """The sequence has ended."""
        self._kernel.forget(self._sequence)

    def _require_inside(self) -> None:
        """Raises IndexError if ``fetch`` would read or write beside the arena or the cache."""
        sequence, slots = self._sequence, self._sequence.slots.tolist()
        begins = sequence.offsets + sequence.records.layers[self._layer]
        last = len(sequence.records.memory) - self._cache[0].nbytes
        inside = begins.min(initial=0) >= 0 and begins.max(initial=0) <= last
        if not (inside and all(0 <= slot < len(self._cache) for slot in slots)):
            raise IndexError(f"blocks of {sequence.key} lie outside of the arena or of the cache")

    def find(self, places: Ints, blocks: Ints) -> Ints:
        """Where these middle blocks begin, in bytes from the start of the cache: ``[kv_heads,
        count]``, as ``places``. ``blocks``: device blocks of all middle ones that have not left."""
        begins = self._away
        if self._count < len(blocks):
            here = blocks[self._count :].astype(np.int64) * self._block
            begins = np.concatenate([begins, here])
        self._activity.blocks_in_place += int((places < self._count).sum())
        found: Ints = begins[places]
        return found

    def fetch(self, blocks: Ints, wanted: Flags) -> Ints:
        """Recalls blocks to the device; returns places in the sequence's slots, valid until the
        next call. ``blocks``: ``[kv_heads, count]``, those of a head distinct; only where
        ``wanted``."""
        admission = self._residency.admit(blocks, wanted)
        self._activity.blocks_hit += admission.hits
        self._activity.blocks_loaded += len(admission.heads)
        slots = self._sequence.slots.numpy()[admission.into].astype(np.int64)
        heads = admission.heads * self._head
        sources = self._sequence.addresses(self._layer)[admission.blocks] + heads
        targets = self._cache.data_ptr() + slots * self._block + heads
        self._kernel.move(sources, targets, self._piece)
        self._activity.bytes_loaded += self._piece.count * self._piece.nbytes * len(slots)
        return admission.slots


class DigestStore:
    """The digests of blocks, by their numbers, in one layer. On a CPU the system gives memory as it
    is written."""

    def __init__(self, kernel: RowKernel, layout: Layout, blocks: int = 0) -> None:
        self._kernel = kernel
        self.layout = layout
        self._width = coded_width(layout.kind.parts * kernel.shape.head_dim)
        self._blocks = blocks
        self.rows = self._new(layout.rows)
        self._coarse = self._new(layout.coarse) if layout.coarse else None

    def write(self, block_ids: torch.Tensor, rows: torch.Tensor) -> None:
        """``rows``: ``[kv_heads, blocks, rows, width]``, coded."""
        self.rows[:, block_ids] = rows
        self.wrote(block_ids)

    def wrote(self, block_ids: torch.Tensor) -> None:
        """The rows of these blocks were written through a view."""
        if self._coarse is not None:
            self._coarse[:, block_ids] = self.rows[:, block_ids, self.layout.coarse_rows]

    @property
    def whole(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As ``part`` of all blocks; not copies."""
        return self.rows, self._coarse

    def part(self, blocks: slice | torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Of these blocks all rows, and the coarse ones, side by side; None if there are none.
        Views for a slice, else copies."""
        coarse = None if self._coarse is None else self._coarse[:, blocks]
        return self.rows[:, blocks], coarse

    def reach(self, blocks: int) -> None:
        """Grows to at least that many blocks; present ones stay."""
        if blocks <= self._blocks:
            return
        before, self._blocks = self._blocks, blocks + _SPARE
        rows, coarse = self.rows, self._coarse
        self.rows = self._new(self.layout.rows)
        self.rows[:, :before] = rows
        if coarse is not None:
            self._coarse = self._new(self.layout.coarse)
            self._coarse[:, :before] = coarse

    def _new(self, rows: int) -> torch.Tensor:
        return self._kernel.digests(self._blocks, rows, self._width)


def share_beside(specs: Mapping[str, Any], settings: RetrievalSettings, copies: bool) -> float:
    """What the digests of all blocks, and with ``copies`` as many pages of dense layers, take of a
    GPU's memory for them and the KV cache. ``specs``: the layers' KV cache specs of vLLM's, by
    name."""
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


def _places_of(named: Ints, blocks: Ints) -> Ints:
    """Where each of ``named`` is among the blocks."""
    order = np.argsort(blocks)
    found: Ints = order[np.searchsorted(blocks[order], named)]
    return found


def checksums_of(rows: torch.Tensor) -> torch.Tensor:
    """Of rows ``[blocks, ...]``: uint8 ``[blocks, CHECKSUM_BYTES]``."""
    if not len(rows):
        return torch.empty(0, CHECKSUM_BYTES, dtype=torch.uint8, device=rows.device)
    if not rows.is_cpu:
        return sums_of(rows)
    bytes_of = rows.contiguous().view(len(rows), -1).view(torch.uint8).numpy()
    sums = b"".join(xxhash.xxh3_64_digest(row) for row in bytes_of)
    return torch.from_numpy(np.frombuffer(sums, np.uint8).copy()).view(len(rows), CHECKSUM_BYTES)


def sums_of(rows: torch.Tensor) -> torch.Tensor:
    """Like ``checksums_of``, with operations of every device: a sum of words, each times an odd
    number of its place, modulo 2**64, so any one changed word is detected. The number of bytes is a
    multiple of four."""
    words = rows.contiguous().view(len(rows), -1).view(torch.int32).to(torch.int64)
    places = torch.arange(1, 2 * words.shape[1], 2, device=rows.device) * _ODD
    return (words * places).sum(1, keepdim=True).view(torch.uint8)


def damaged_among(rows: torch.Tensor, checksums: torch.Tensor) -> torch.Tensor:
    """Which of the rows do not match their checksums: bool ``[blocks]``."""
    return (checksums_of(rows) != checksums).any(-1)


def _blocks_of(pages: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Pages in storage form, uint8 ``[blocks, bytes]``, as blocks of a cache like that."""
    values = pages.view(like.dtype)
    return values.as_strided((len(values), *like.shape[1:]), (values.shape[1], *like.stride()[1:]))
