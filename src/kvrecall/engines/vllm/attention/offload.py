"""The worker's end of offloading: which sequences are off the device in part, in all layers."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np
import torch

from kvrecall.engines.vllm.attention.activity import Activity
from kvrecall.engines.vllm.attention.extent import Extent
from kvrecall.engines.vllm.attention.freshness import Freshness
from kvrecall.engines.vllm.attention.recalled import (
    OffloadedSequence,
    Records,
    digests_of_layer,
    seals_of_layer,
)
from kvrecall.engines.vllm.connector.wire import Arrival, Departure, OffloadOrders
from kvrecall.errors import EngineError
from kvrecall.pool.base import ArenaHandle

logger = logging.getLogger("vllm.kvrecall")


class Layer(Protocol):
    """What an attention layer does about offloaded sequences."""

    def forget(self, key: str) -> None:
        """The sequence is no more, or was never known."""


class SparseLayer(Layer, Protocol):
    """A layer that attends to chosen blocks, found by their digests."""

    def digest(self, kv_cache: torch.Tensor, block_ids: torch.Tensor) -> None:
        """Computes the digests of these blocks."""

    def seal(self, block_ids: torch.Tensor) -> None:
        """Notes the checksums of these blocks' digests."""

    def unsealed(self, block_ids: torch.Tensor) -> torch.Tensor:
        """Those of these blocks whose digests are not those that were sealed."""

    def depart(
        self,
        sequence: OffloadedSequence,
        departure: Departure,
        kv_cache: torch.Tensor,
        name: str,
    ) -> None:
        """Blocks are about to leave; their digests are computed, and the sequence counts them."""

    def arrive(self, sequence: OffloadedSequence, kv_cache: torch.Tensor, name: str) -> None:
        """The sequence begins off the device; its blocks' digests are in their records."""

    def digest_rows(self, kv_cache: torch.Tensor) -> torch.Tensor:
        """The digests' bytes, a row a block: uint8 ``[blocks, ...]``, a view."""

    def seal_rows(self, kv_cache: torch.Tensor) -> torch.Tensor:
        """Their checksums, a row a block: uint8 ``[blocks, ...]``, a view."""


class WholeLayer(Layer, Protocol):
    """A layer that attends to everything, and reads what is off the device from the arena."""

    in_place: bool
    """Whether it reads it where it lies, by an ``Extent``."""

    def place(self, layer_at: int) -> None:
        """Where in a block's record this layer's page is."""

    def forget(self, key: str, memory: bool = True) -> None:
        """The sequence is no more; with ``memory`` False it will be back in the next step."""


class Offload:
    """The offloaded sequences of one KV group. Owned by the worker's thread."""

    def __init__(
        self, freshness: Freshness, activity: Activity, pages: int = 0, loads_in_step: bool = True
    ) -> None:
        """``pages``: most that layers may need behind the arena; see ``Extent``.
        ``loads_in_step``: whether blocks that were loaded lie there when this is told of it."""
        self._freshness = freshness
        self._activity = activity
        self._pages = pages
        self._loads_in_step = loads_in_step
        self._extents: dict[ArenaHandle, Extent] = {}
        self._sparse: dict[str, SparseLayer] = {}
        self._whole: dict[str, WholeLayer] = {}
        self._sequences: dict[str, OffloadedSequence] = {}
        self._rows: dict[int, str] = {}

    def digest_pages(self, caches: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What the pool keeps of each sparse layer's digests, by the name of those pages."""
        pages = {}
        for name, layer in self._sparse.items():
            pages[digests_of_layer(name)] = layer.digest_rows(caches[name])
            pages[seals_of_layer(name)] = layer.seal_rows(caches[name])
        return pages

    def refresh(self, block_ids: Sequence[int], caches: Mapping[str, torch.Tensor]) -> None:
        """These blocks go to the pool: computes what is stale of their digests, and seals them.
        They are full, or the null block."""
        real = torch.tensor([block for block in block_ids if block], dtype=torch.int64)
        stale = self._freshness.take_stale(real)
        self._activity.blocks_digested += len(stale)
        for name, sparse in self._sparse.items():
            sparse.digest(caches[name], stale)
            sparse.seal(real)

    def restored(self, block_ids: Iterable[int]) -> None:
        """These blocks, or the null block, came from the pool with their digests. Those that came
        damaged are stale; and all, where they are still on their way and cannot be looked at."""
        if not self._loads_in_step:
            return
        real = torch.tensor([block for block in block_ids if block], dtype=torch.int64)
        self._freshness.restored_blocks(real.tolist())
        for sparse in self._sparse.values():
            self._freshness.wrote_blocks(sparse.unsealed(real).tolist())

    def add_sparse(self, name: str, layer: SparseLayer) -> None:
        self._sparse[name] = layer

    def add_whole(self, name: str, layer: WholeLayer) -> None:
        self._whole[name] = layer

    def take(
        self,
        orders: OffloadOrders | None,
        caches: Mapping[str, torch.Tensor],
        records: Records | None,
    ) -> set[str]:
        """Carries out a step's orders, before the step writes any device block.

        ``records``: of the arena that holds what arrives and departs; None: it cannot be reached.
        Returns the sequences for which the orders could not be carried out: their blocks are not to
        be had any more, and what the step computes of them means nothing.
        """
        self._rows = {}
        if orders is None:
            return set()
        for key in orders.ended:
            self._forget(key)
        lost = set()
        for arrival in orders.arrivals:
            if not self._arrive(arrival, caches, records):
                lost.add(arrival.request_id)
        for departure in orders.departures:
            if not self._depart(departure, caches, records):
                lost.add(departure.request_id)
        self._rows = {block: key for block, key in orders.rows.items() if key in self._sequences}
        return lost

    def sequence(self, last_block: int) -> OffloadedSequence | None:
        """The offloaded sequence whose last token of this step is written into that block."""
        key = self._rows.get(last_block)
        return None if key is None else self._sequences[key]

    @property
    def is_idle(self) -> bool:
        """Whether no sequence of this step is offloaded."""
        return not self._rows

    def _layers(self) -> list[Layer]:
        return [*self._sparse.values(), *self._whole.values()]

    def _begin(
        self,
        order: Arrival | Departure,
        caches: Mapping[str, torch.Tensor],
        records: Records | None,
    ) -> OffloadedSequence | None:
        """A sequence with nothing off the device yet. None if the arena is out of reach."""
        if records is None:
            return None
        try:
            extent = self._extent(caches, records)
        except EngineError as error:
            logger.error("kvrecall: %s", error)
            return None
        none = torch.empty(0, dtype=torch.int32)
        sequence = OffloadedSequence(
            order.request_id, order.init, np.empty(0, np.int64), none, records, extent
        )
        self._sequences[sequence.key] = sequence
        return sequence

    def _extent(self, caches: Mapping[str, torch.Tensor], records: Records) -> Extent | None:
        """Where layers attend to the arena in place; None if none does. Raises EngineError."""
        if records.arena is None or not self._whole:
            return None
        for name, whole in self._whole.items():
            whole.place(records.layers[name])
        first, whole = next(iter(self._whole.items()))
        if not whole.in_place:
            return None
        if records.arena not in self._extents:
            page = caches[first][0].nbytes
            self._extents[records.arena] = Extent(records.arena, page, self._pages)
        return self._extents[records.arena]

    def _forget(self, key: str) -> None:
        """The sequence is no more. With the last one in an arena that arena is let go: its owner
        may have died, and its memory be needed."""
        gone = self._sequences.pop(key, None)
        if gone is None:
            return
        for layer in self._layers():
            layer.forget(key)
        arena = gone.records.arena
        if arena in self._extents and not any(
            sequence.records.arena == arena for sequence in self._sequences.values()
        ):
            self._extents.pop(arena).close()

    def _arrive(
        self, arrival: Arrival, caches: Mapping[str, torch.Tensor], records: Records | None
    ) -> bool:
        sequence = self._begin(arrival, caches, records)
        if sequence is None:
            return False
        sequence.offsets = np.array(arrival.offsets, dtype=np.int64)
        sequence.slots = torch.tensor(arrival.slots, dtype=torch.int32)
        self._activity.blocks_left += len(sequence.offsets)
        for name, sparse in self._sparse.items():
            sparse.arrive(sequence, caches[name], name)
        return True

    def _depart(
        self, departure: Departure, caches: Mapping[str, torch.Tensor], records: Records | None
    ) -> bool:
        sequence = self._sequences.get(departure.request_id)
        if sequence is None:
            sequence = self._begin(departure, caches, records)
        if sequence is None:
            return False
        added = np.array(departure.offsets, dtype=np.int64)
        sequence.offsets = np.concatenate([sequence.offsets, added])
        slots = torch.tensor(departure.slots, dtype=torch.int32)
        sequence.slots = torch.cat([sequence.slots, slots])
        self._activity.blocks_offloaded += len(added)
        stale = self._freshness.take_stale(torch.tensor(departure.block_ids, dtype=torch.int32))
        for name, sparse in self._sparse.items():
            sparse.digest(caches[name], stale)
            sparse.depart(sequence, departure, caches[name], name)
        return True
