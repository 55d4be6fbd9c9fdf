"""The worker's end of offloading: which sequences are off the device in part, in all layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np
import torch

from kvrecall.engines.vllm.retrieval.activity import Activity
from kvrecall.engines.vllm.retrieval.freshness import Freshness
from kvrecall.engines.vllm.retrieval.recalled import OffloadedSequence, Records
from kvrecall.engines.vllm.wire import Departure, OffloadOrders


class Layer(Protocol):
    """What an attention layer does about offloaded sequences."""

    def settle(self) -> None:
        """Ends what it does in the background."""

    def forget(self, key: str) -> None:
        """The sequence is no more, or was never known."""


class SparseLayer(Layer, Protocol):
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


class WholeLayer(Layer, Protocol):
    def depart(
        self, sequence: OffloadedSequence, departure: Departure, kv_cache: torch.Tensor
    ) -> None:
        """Blocks are about to leave; the sequence counts them."""


class Offload:
    """The offloaded sequences of one KV group. Owned by the worker's thread."""

    def __init__(self, freshness: Freshness, activity: Activity) -> None:
        self._freshness = freshness
        self._activity = activity
        self._sparse: dict[str, SparseLayer] = {}
        self._whole: dict[str, WholeLayer] = {}
        self._sequences: dict[str, OffloadedSequence] = {}
        self._rows: dict[int, str] = {}

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
        for departure in orders.departures:
            self._depart(departure, caches, records)

    def sequence(self, last_block: int) -> OffloadedSequence | None:
        """The offloaded sequence whose token this step writes into that block."""
        key = self._rows.get(last_block)
        return None if key is None else self._sequences[key]

    @property
    def is_idle(self) -> bool:
        """Whether no sequence of this step is offloaded."""
        return not self._rows

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
        for name, whole in self._whole.items():
            whole.depart(sequence, departure, caches[name])
