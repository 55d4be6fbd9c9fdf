"""Selection of blocks on the host, which reads digests and blocks where they lie: those of
sequences that have left the device are read in the arena. By the exact search, or by vector
indexes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from kvrecall.attention.digest import Layout, decode
from kvrecall.attention.index import Factory, Numbers, Vectors, index_factory
from kvrecall.attention.kernels.device import Ints
from kvrecall.attention.kernels.search import Placed, Search, Sought, is_compiled
from kvrecall.attention.selection import choose
from kvrecall.engines.vllm.attention.activity import Activity
from kvrecall.engines.vllm.attention.base import (
    DigestStore,
    KernelShape,
    RetrievalLayer,
    SparseSequence,
    SparseStep,
)
from kvrecall.engines.vllm.attention.offloaded import OffloadedSequence
from kvrecall.errors import EngineError

_IDLE_STEPS = 64
"""An index that no sequence has used for so many sparse steps is dropped: vLLM does
not tell attention layers when a sequence on the device ends."""


class HostPlan:
    """What a kernel on the host reads in a step; each layer enters the blocks that it selects.

    ``tokens``: int64, the sequences' places in the batch; ``span``: the same where they are side by
    side, else None. ``table``: int32 ``[sequences * kv_heads, width]``, in which a block of a head
    is named ``block * kv_heads + head``, or, if a sequence is partially offloaded, by its distance
    from the start of a layer's cache, in ``unit`` bytes; otherwise ``unit`` is 0.
    ``seq_lens``: int32, tokens in each row's blocks; ``starts``: int32, 0, 1, 2 ... to the number
    of rows. ``search``: finds the blocks of all sequences with middle ones and enters them; None if
    layers find them one after the other. ``work``: vLLM's plan for the kernel's threads.
    """

    def __init__(
        self, shape: KernelShape, sequences: Sequence[SparseSequence], layout: Layout | None
    ) -> None:
        """``layout``: as of ``AttentionKernel.schedule``."""
        heads = self._heads = shape.kv_heads
        head = torch.arange(heads, dtype=torch.int32)[:, None]
        head_bytes = shape.block_size * shape.token_bytes // heads
        away = [one.offloaded.unit for one in sequences if one.offloaded is not None]
        self.unit = min(away, default=0)
        named_by = self.unit or head_bytes
        self._bytes = heads * head_bytes, head_bytes, named_by
        step = head_bytes // named_by
        width = max(sequence.split.attended_blocks for sequence in sequences)
        self.table = torch.zeros(len(sequences) * heads, width, dtype=torch.int32)
        for at, sequence in enumerate(sequences):
            split, blocks = sequence.split, sequence.table
            rows, last = self.table[self._rows(at)], split.init + split.chosen
            rows[:, : split.init] = (blocks[: split.init] * heads + head) * step
            named = (blocks[split.local : split.blocks] * heads + head) * step
            rows[:, last : split.attended_blocks] = named
        lens = [sequence.split.attended_tokens for sequence in sequences]
        self.seq_lens = torch.tensor(lens, dtype=torch.int32).repeat_interleave(heads)
        self.starts = torch.arange(len(self.seq_lens) + 1, dtype=torch.int32)
        places = [sequence.token for sequence in sequences]
        first, end = places[0], places[-1] + 1
        self.tokens = torch.tensor(places)
        self.span = slice(first, end) if places == list(range(first, end)) else None
        self.work: Any = None
        self.search = None if layout is None else self._prepared(shape, sequences, layout)

    def enter(self, at: int, sequence: SparseSequence, places: Ints, away: Ints) -> None:
        """The step's sequence ``at`` attends to these of its middle blocks: ``[kv_heads, chosen]``.
        ``away``: distances from the cache of those that are off the device, in bytes."""
        columns = slice(sequence.split.init, sequence.split.init + sequence.split.chosen)
        block, head, unit = self._bytes
        here = sequence.blocks[len(away) :].numpy().astype(np.int64)
        begins = np.concatenate([away, here * block])[places]
        begins += np.arange(self._heads)[:, None] * head
        self.table.numpy()[self._rows(at), columns] = begins // unit

    def _rows(self, at: int) -> slice:
        return slice(at * self._heads, (at + 1) * self._heads)

    def _prepared(
        self, shape: KernelShape, sequences: Sequence[SparseSequence], layout: Layout
    ) -> Search | None:
        """A search for the middle blocks, which enters them."""
        sought = []
        for at, one in enumerate(sequences):
            if one.split.middle:
                here = one.blocks[one.left :].numpy().astype(np.int64)
                parts = [here] if one.offloaded is None else [np.arange(one.left), here]
                into = self.table[self._rows(at), one.split.init :].numpy()
                sought.append(Sought(parts, one.split.chosen, one.token, into, one.left))
        if not sought or not is_compiled():
            return None
        size = shape.kv_heads, shape.group, shape.head_dim
        return Search(size, layout, sought, self._bytes)


@dataclass(slots=True)
class _LeftBlocks:
    """A sequence's blocks off the device: their digests, how far from the layer's cache each
    begins, in bytes, and both for a search."""

    digests: DigestStore
    away: Ints
    placed: Placed


class HostSelection(RetrievalLayer):
    """A layer whose blocks the host selects: by compiled code for all sequences at once, else for
    one after another by PyTorch or vector indexes."""

    def open(self, kv_cache: torch.Tensor) -> DigestStore:
        if not kv_cache.is_contiguous():
            raise EngineError(
                f"retrieval attention needs each layer's KV cache in one piece; this one has shape "
                f"{tuple(kv_cache.shape)} and strides {kv_cache.stride()}. Remove `retrieval` "
                "from VLLM_PLUGINS"
            )
        shape = self._shape
        self._layout = self.settings.layout(shape.block_size)
        self.store = DigestStore(shape, self._layout, len(kv_cache))
        self._placed = (self._place(),)
        self._left: dict[str, _LeftBlocks] = {}
        factory, self._indexes = index_factory(self.settings.index), None
        if factory is not None:
            sizes = self._layout, shape.kv_heads, shape.head_dim
            made = partial(SequenceIndex, factory, *sizes)
            self._indexes = SequenceIndexes(made, self._activity)
            self.store.written = torch.zeros(len(kv_cache), dtype=torch.int64)
        return self.store

    def digest_step(self, kv_cache: torch.Tensor, step: SparseStep) -> None:
        super().digest_step(kv_cache, step)
        for one in step.indexed:
            self._index(one)

    def depart(
        self, sequence: OffloadedSequence, block_ids: torch.Tensor, kv_cache: torch.Tensor
    ) -> None:
        super().depart(sequence, block_ids, kv_cache)
        if self._indexes is not None and self.store.written is not None:
            self._indexes.depart(sequence.key, block_ids, self.store.written[block_ids])

    def select(self, query: torch.Tensor, step: SparseStep, scale: float, noted: bool) -> None:
        plan: HostPlan = step.plan
        search = plan.search
        if search is None:
            self._select_each(query, step, scale, noted)
            return
        # Few steps of Python: after a layer's attention each waits for memory (archive/log.md).
        if not self._left:
            search.run(query, self._placed, scale)
        else:
            placed = [self._placed_for(one) for one in step.sequences if one.split.middle]
            search.run(query, placed, scale)
            self._activity.blocks_in_place += search.left
        if noted:
            choosing = (one for one in step.sequences if one.split.middle)
            for sequence, places in zip(choosing, search.found, strict=True):
                self.note_selected(sequence.split, places.numpy())

    def leave(
        self, sequence: OffloadedSequence, digests: torch.Tensor, kv_cache: torch.Tensor
    ) -> None:
        sequence.require_inside(self.name, kv_cache)
        left = self._left.get(sequence.key)
        store = DigestStore(self._shape, self._layout) if left is None else left.digests
        first = 0 if left is None else len(left.away)
        count = first + digests.shape[1]
        store.reach(count)
        store.write(torch.arange(first, count), digests)
        away = sequence.addresses(self.name)[:count] - kv_cache.data_ptr()
        self._left[sequence.key] = _LeftBlocks(store, away, self._place(store, away))

    def forget(self, key: str) -> None:
        if not self._is_open:
            return
        self._left.pop(key, None)
        if self._indexes is not None:
            self._indexes.forget(key)

    def _select_each(
        self, query: torch.Tensor, step: SparseStep, scale: float, noted: bool
    ) -> None:
        shape, none = self._shape, np.empty(0, dtype=np.int64)
        if self._indexes is not None:
            self._indexes.begin_step()
        for at, one in enumerate(step.sequences):
            if not one.split.middle:
                continue
            grouped = query[one.token].reshape(shape.kv_heads, shape.group, shape.head_dim)
            # In the sequence's order, so that the sum does not depend on where blocks lie.
            places = self._find(one, grouped, scale).sort(-1).values.numpy()
            left = self._left_of(one)
            step.plan.enter(at, one, places, none if left is None else left.away)
            self._activity.blocks_in_place += int((places < one.left).sum())
            if noted:
                self.note_selected(one.split, places)

    def _left_of(self, one: SparseSequence) -> _LeftBlocks | None:
        return None if one.offloaded is None else self._left[one.offloaded.key]

    def _find(self, one: SparseSequence, query: torch.Tensor, scale: float) -> torch.Tensor:
        """Places of the chosen blocks among the sequence's middle ones: int64 ``[kv_heads,
        chosen]``. ``query``: ``[kv_heads, group, dim]``."""
        if self._indexes is not None:
            return self._index(one).choose(query, one.split.chosen, scale)
        return choose(self._layout, query, self._from(one, 0), one.split.chosen, scale)

    def _index(self, one: SparseSequence) -> SequenceIndex:
        """The sequence's, with all its middle blocks."""
        assert self._indexes is not None
        assert self.store.written is not None
        digests = partial(self._from, one)
        if one.offloaded is not None:
            return self._indexes.off_device(one.offloaded.key, one.split.middle, digests)
        ids = one.blocks.to(torch.int64)
        return self._indexes.on_device(ids, self.store.written[ids], digests)

    def _from(self, one: SparseSequence, first: int) -> torch.Tensor:
        """The digests of a sequence's middle blocks from a place on: int8 ``[kv_heads, blocks,
        rows, width]``."""
        left, ids = self._left_of(one), one.blocks[one.left :].to(torch.int64)
        if left is None:
            return self.store.rows[:, ids[first:]]
        there = left.digests.rows[:, first : len(left.away)]
        return torch.cat([there, self.store.rows[:, ids[max(0, first - len(left.away)) :]]], 1)

    def _placed_for(self, one: SparseSequence) -> Placed:
        return self._placed[0] if one.offloaded is None else self._left[one.offloaded.key].placed

    def _place(self, left: DigestStore | None = None, away: Ints | None = None) -> Placed:
        """For a search: the digests of a sequence's blocks that left, and of the device's."""
        stores = [self.store] if left is None else [left, self.store]
        return Placed(self._layout, [(one.rows, one.coarse) for one in stores], away)


Digests = Callable[[int], torch.Tensor]
"""Those of a sequence's middle blocks from a place on: int8 ``[kv_heads, blocks, rows, width]``."""


class SequenceIndex:
    """The middle blocks of one sequence in one layer: a vector index for each KV head, which holds
    the fine digests of every block."""

    def __init__(self, factory: Factory, layout: Layout, kv_heads: int, head_dim: int) -> None:
        self._layout = layout
        self._indexes = [factory(layout.kind.parts * head_dim) for _ in range(kv_heads)]
        self.blocks = 0

    def add(self, rows: torch.Tensor) -> None:
        """Appends the next blocks' digests: int8 ``[kv_heads, blocks, rows, width + 4]``."""
        fine = decode(rows[:, :, self._layout.fine_rows]).nan_to_num_(0, 0, 0)
        for index, vectors in zip(self._indexes, fine.flatten(1, 2).numpy(), strict=True):
            index.add(vectors)
        self.blocks += rows.shape[1]

    def choose(self, query: torch.Tensor, count: int, scale: float) -> torch.Tensor:
        """As ``selection.choose``: int64 ``[kv_heads, count]``. ``query``:
        ``[kv_heads, group, dim]``.

        An index is asked for as many vectors as ``count`` blocks have, which are those of at least
        that many blocks. A block that no query head of a group has found weighs nothing; where too
        few are found the last blocks are taken.
        """
        # A model that overflows has infinite keys and queries, at which libraries raise.
        points = self._layout.kind.of_query(query).float().nan_to_num(0, 0, 0).contiguous().numpy()
        asked = count * self._layout.fine
        found = (
            index.search(point, asked) for index, point in zip(self._indexes, points, strict=True)
        )
        logits = np.stack([self._logits(*one) for one in found])
        weights = torch.from_numpy(logits).mul_(scale).softmax(-1).nan_to_num_(0).mean(1)
        later = torch.arange(self.blocks, dtype=torch.float32) * torch.finfo(torch.float32).tiny
        return (weights + later).topk(count, dim=-1, sorted=False).indices

    def close(self) -> None:
        """The sequence has ended."""
        for index in self._indexes:
            index.close()

    def _logits(self, products: Vectors, numbers: Numbers) -> Vectors:
        """The best product of each block: float32 ``[group, blocks]``, -inf where none is found."""
        best = np.full((len(products), self.blocks), -np.inf, dtype=np.float32)
        group = np.broadcast_to(np.arange(len(products))[:, None], numbers.shape)
        there = numbers >= 0
        blocks = numbers[there] // self._layout.fine
        if blocks.max(initial=0) >= self.blocks:
            raise IndexError(
                f"the vector index of VLLM_RETRIEVAL_INDEX found vector {numbers.max()} of "
                f"{self.blocks * self._layout.fine}; numbers begin at 0, in the order of `add`"
            )
        np.maximum.at(best, (group[there], blocks), products[there])
        return best


@dataclass(slots=True)
class _Held:
    """``ids``, ``written``: as of ``SequenceIndexes.on_device``; ``used``: in which step."""

    index: SequenceIndex
    ids: torch.Tensor
    written: torch.Tensor
    used: int = 0

    def is_of(self, ids: torch.Tensor, written: torch.Tensor) -> bool:
        """Whether it holds the leading ones of these blocks, as they are."""
        count = len(self.ids)
        if self.ids[0] != ids[0]:
            return False
        return torch.equal(self.ids, ids[:count]) and torch.equal(self.written, written[:count])


class SequenceIndexes:
    """Finds the index of a sequence, and adds what it lacks. An index of a sequence on the device
    is known by its blocks: their numbers, and how often they were digested."""

    def __init__(self, make: Callable[[], SequenceIndex], activity: Activity) -> None:
        self._make = make
        self._activity = activity
        self._held: list[_Held] = []
        self._by_key: dict[str, SequenceIndex] = {}
        self._step = 0

    def begin_step(self) -> None:
        """Drops indexes that no sequence uses."""
        self._step += 1
        if self._step % _IDLE_STEPS:
            return
        held, self._held = self._held, []
        for one in held:
            if one.used > self._step - _IDLE_STEPS:
                self._held.append(one)
            else:
                one.index.close()

    def on_device(
        self, ids: torch.Tensor, written: torch.Tensor, digests: Digests
    ) -> SequenceIndex:
        """The index of these middle blocks, complete. ``written``: how often the digest of each was
        written: int64, as ``ids``."""
        known = (one for one in self._held if one.is_of(ids, written))
        found = max(known, key=lambda one: len(one.ids), default=None)
        if found is None:
            found = _Held(self._make(), ids[:0], written[:0])
            self._held.append(found)
        self._complete(found.index, len(ids), digests)
        found.ids, found.written, found.used = ids.clone(), written.clone(), self._step
        return found.index

    def off_device(self, key: str, blocks: int, digests: Digests) -> SequenceIndex:
        """The index of a partially offloaded sequence with so many middle blocks, complete."""
        if key not in self._by_key:
            self._by_key[key] = self._make()
        self._complete(self._by_key[key], blocks, digests)
        return self._by_key[key]

    def depart(self, key: str, ids: torch.Tensor, written: torch.Tensor) -> None:
        """These blocks leave the device: their index, if it has no others, is the sequence's."""
        inside = (one for one in self._held if len(one.ids) <= len(ids) and one.is_of(ids, written))
        found = max(inside, key=lambda one: len(one.ids), default=None)
        if found is not None and key not in self._by_key:
            self._held.remove(found)
            self._by_key[key] = found.index

    def forget(self, key: str) -> None:
        """The offloaded sequence has ended."""
        index = self._by_key.pop(key, None)
        if index is not None:
            index.close()

    def _complete(self, index: SequenceIndex, blocks: int, digests: Digests) -> None:
        if index.blocks < blocks:
            self._activity.blocks_indexed += blocks - index.blocks
            index.add(digests(index.blocks))
