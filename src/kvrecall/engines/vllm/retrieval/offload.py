"""The worker's end of offloading: which sequences are off the device in part, in all layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import torch

from kvrecall.engines.vllm.retrieval.activity import Activity
from kvrecall.engines.vllm.retrieval.extent import Extent
from kvrecall.engines.vllm.retrieval.freshness import Freshness
from kvrecall.engines.vllm.retrieval.recalled import (
    OffloadedSequence,
    Records,
    digests_of_layer,
)
from kvrecall.engines.vllm.wire import Arrival, Departure, OffloadOrders
from kvrecall.pool.base import ArenaHandle


class Layer(Protocol):
    """What an attention layer does about offloaded sequences."""

    def settle(self) -> None:
        """Ends what it does in the background."""

    def forget(self, key: str) -> None:
        """The sequence is no more, or was never known."""


class SparseLayer(Layer, Protocol):
    """A layer that attends to chosen blocks, found by their digests."""

    def digest(self, kv_cache: torch.Tensor, block_ids: torch.Tensor) -> None:
        """Computes the digests of these blocks."""

    def depart(
        self,
        sequence: OffloadedSequence,
        departure: Departure,
        kv_cache: torch.Tensor,
        records: Records,
        name: str,
    ) -> None:
        """Blocks are about to leave; their digests are computed, and the sequence counts them."""

    def arrive(
        self, sequence: OffloadedSequence, kv_cache: torch.Tensor, records: Records, name: str
    ) -> None:
        """The sequence begins off the device; its blocks' digests are in their records."""

    def digest_rows(self, kv_cache: torch.Tensor) -> torch.Tensor:
        """The digests' bytes, a row a block: uint8 ``[blocks, ...]``, a view."""


class WholeLayer(Layer, Protocol):
    """A layer that attends to everything, and reads what is off the device from the arena."""

    def place(self, extent: Extent, layer_at: int) -> None:
        """Where the arena is from now on, and where in a block's record this layer's page is."""


class Offload:
    """The offloaded sequences of one KV group. Owned by the worker's thread."""

    def __init__(self, freshness: Freshness, activity: Activity, pages: int = 0) -> None:
        """``pages``: most that layers may need behind the arena; see ``Extent``."""
        self._freshness = freshness
        self._activity = activity
        self._pages = pages
        self._extent: Extent | None = None
        self._arena: ArenaHandle | None = None
        self._sparse: dict[str, SparseLayer] = {}
        self._whole: dict[str, WholeLayer] = {}
        self._sequences: dict[str, OffloadedSequence] = {}
        self._rows: dict[int, str] = {}

    def digest_pages(self, caches: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What the pool keeps of each sparse layer's digests, by the name of those pages."""
        return {
            digests_of_layer(name): layer.digest_rows(caches[name])
            for name, layer in self._sparse.items()
        }

    def refresh(self, block_ids: Sequence[int], caches: Mapping[str, torch.Tensor]) -> None:
        """Computes what is stale of these blocks' digests. They are full, or the null block."""
        real = torch.tensor([block for block in block_ids if block], dtype=torch.int32)
        stale = self._freshness.take_stale(real)
        self._activity.blocks_digested += len(stale)
        for name, sparse in self._sparse.items():
            sparse.digest(caches[name], stale)

    def add_sparse(self, name: str, layer: SparseLayer) -> None:
        self._sparse[name] = layer

    def add_whole(self, name: str, layer: WholeLayer) -> None:
        self._whole[name] = layer

    def take(
        self, orders: OffloadOrders | None, caches: Mapping[str, torch.Tensor], records: Records
    ) -> None:
        """Carries out a step's orders, before the step writes any device block."""
        layers: list[Layer] = [*self._sparse.values(), *self._whole.values()]
        if self._sequences:
            for layer in layers:
                layer.settle()
        self._rows = {} if orders is None else orders.rows
        if orders is None:
            return
        for key in orders.ended:
            self._sequences.pop(key, None)
            for layer in layers:
                layer.forget(key)
        if orders.arrivals or orders.departures:
            self._place(caches, records)
        for arrival in orders.arrivals:
            self._arrive(arrival, caches, records)
        for departure in orders.departures:
            self._depart(departure, caches, records)

    def sequence(self, last_block: int) -> OffloadedSequence | None:
        """The offloaded sequence whose last token of this step is written into that block."""
        key = self._rows.get(last_block)
        return None if key is None else self._sequences[key]

    @property
    def is_idle(self) -> bool:
        """Whether no sequence of this step is offloaded."""
        return not self._rows

    def _place(self, caches: Mapping[str, torch.Tensor], records: Records) -> None:
        """Maps the arena for layers that attend in place, if it is not mapped yet."""
        if records.arena is None or records.arena == self._arena:
            return
        assert self._extent is None, "blocks of running sequences lie in another arena"
        cache = caches[next(iter(self._whole))]
        self._extent = Extent(records.arena, cache[0].nbytes, self._pages)
        self._arena = records.arena
        for name, whole in self._whole.items():
            whole.place(self._extent, records.layers[name])

    def _arrive(
        self, arrival: Arrival, caches: Mapping[str, torch.Tensor], records: Records
    ) -> None:
        offsets = np.array(arrival.offsets, dtype=np.int64)
        slots = torch.tensor(arrival.slots, dtype=torch.int32)
        sequence = OffloadedSequence(arrival.request_id, arrival.init, offsets, slots)
        self._sequences[sequence.key] = sequence
        self._activity.blocks_left += len(offsets)
        for name, sparse in self._sparse.items():
            sparse.arrive(sequence, caches[name], records, name)

    def _depart(
        self, departure: Departure, caches: Mapping[str, torch.Tensor], records: Records
    ) -> None:
        key = departure.request_id
        sequence = self._sequences.get(key)
        if sequence is None:
            none = torch.empty(0, dtype=torch.int32)
            sequence = OffloadedSequence(key, departure.init, np.empty(0, np.int64), none)
            self._sequences[key] = sequence
        added = np.array(departure.offsets, dtype=np.int64)
        sequence.offsets = np.concatenate([sequence.offsets, added])
        slots = torch.tensor(departure.slots, dtype=torch.int32)
        sequence.slots = torch.cat([sequence.slots, slots])
        self._activity.blocks_offloaded += len(added)
        stale = self._freshness.take_stale(torch.tensor(departure.block_ids, dtype=torch.int32))
        for name, sparse in self._sparse.items():
            sparse.digest(caches[name], stale)
            sparse.depart(sequence, departure, caches[name], records, name)
