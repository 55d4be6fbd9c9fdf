"""The state that the connector's worker side and the attention layers of a KV group share."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import torch

from kvrecall.attention.kernels.device import Ints
from kvrecall.engines.vllm.attention.activity import Activity, HeatTotals
from kvrecall.engines.vllm.attention.base import AttentionKernel, RetrievalLayer, SparseStep
from kvrecall.engines.vllm.attention.copies import KeptLayer
from kvrecall.engines.vllm.attention.offloaded import (
    NearArena,
    OffloadedSequence,
    Records,
    checksums_of_layer,
    digests_of_layer,
)
from kvrecall.engines.vllm.attention.step import Freshness
from kvrecall.engines.vllm.device import device_of
from kvrecall.engines.vllm.wire import Arrival, Departure, OffloadOrders
from kvrecall.errors import EngineError
from kvrecall.pool.base import ArenaHandle

logger = logging.getLogger("vllm.kvrecall")


class RetrievalGroup:
    """The retrieval layers of one KV group in a worker: which digests are fresh, and which
    sequences are partially offloaded.

    Owned by the worker's thread. The metadata builder creates it and adds the layers; the connector
    registers the KV caches, and from then on reports every copy between the device and the pool.
    """

    def __init__(
        self,
        activity: Activity,
        heat: HeatTotals,
        kernel: AttentionKernel,
        settle_gate: Callable[[int], None] = lambda overhead_bytes: None,
    ) -> None:
        """``settle_gate``: tells the layers' gate the ``overhead_bytes`` that all of the engine
        decide by."""
        self.heat = heat
        self.overhead_bytes = kernel.overhead_bytes
        self.settle_gate = settle_gate
        self.freshness = Freshness()
        self._activity = activity
        self._kernel = kernel
        self._near: dict[ArenaHandle | None, NearArena] = {}
        self._caches: Mapping[str, torch.Tensor] = {}
        self.layer_names: list[str] = []
        """Those of its layers, sparse or not."""
        self._sparse: dict[str, RetrievalLayer] = {}
        self._kept: dict[str, KeptLayer] = {}
        self._told = False
        self._sequences: dict[str, OffloadedSequence] = {}
        self._rows: dict[int, str] = {}

    # ---- as the metadata builder and the layers ask ---------------------------------------

    def add(self, name: str, sparse: RetrievalLayer | None, kept: KeptLayer | None = None) -> None:
        """``sparse``: None if the layer stays dense; then ``kept``, if it keeps copies."""
        self.layer_names.append(name)
        if sparse is not None:
            self._sparse[name] = sparse
            self.freshness.follow(sparse)
        elif kept is not None:
            self._kept[name] = kept

    def sequence(self, last_block: int) -> OffloadedSequence | None:
        """The offloaded sequence whose last token of this step is written into that block."""
        key = self._rows.get(last_block)
        return None if key is None else self._sequences[key]

    @property
    def is_idle(self) -> bool:
        """Whether no sequence of this step is offloaded."""
        return not self._rows

    @property
    def needs_host(self) -> bool:
        """Whether an offloaded sequence of this step takes work of the host's: its prompt may still
        be computed, the device cannot read its blocks, or dense layers lack copies of them."""
        here = [self._sequences[key] for key in self._rows.values()]
        return not (all(one.decodes and one.is_readable for one in here) and self.keeps(here))

    def keeps(self, sequences: Iterable[OffloadedSequence]) -> bool:
        """Whether dense layers, if any, keep copies of all these sequences' blocks that left."""
        has_dense = len(self._sparse) < len(self.layer_names)
        return not has_dense or (bool(self._kept) and all(one.is_kept for one in sequences))

    def counted(self, wait: bool = False) -> Activity:
        """The activity, with what a device has told by now; ``wait``: with all that it did."""
        if self._kernel.counts is not None:
            self._kernel.counts.add_to(self._activity, wait)
        return self._activity

    def replay(self, step: SparseStep) -> None:
        """As of ``RetrievalLayer``, for all layers."""
        for layer in self._sparse.values():
            layer.replay(step)

    # ---- as the connector asks -----------------------------------------------------------

    def register(self, caches: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Registers the device KV cache, one tensor per layer. Returns what the pool stores beside
        the KV of the group: each sparse layer's digests and their checksums, a row per block."""
        self._caches = caches
        for name, kept in self._kept.items():
            kept.open(caches[name])
        pages = {}
        for name, layer in self._sparse.items():
            pages[digests_of_layer(name)] = layer.digest_rows(caches[name])
            pages[checksums_of_layer(name)] = layer.checksum_rows(caches[name])
        return pages

    def note_overwritten(self, block_ids: Iterable[int]) -> None:
        """A load writes these blocks, outside the engine's forward pass."""
        self.freshness.wrote_blocks(block_ids)

    def note_restored(self, block_ids: Iterable[int]) -> None:
        """These blocks, or the null block, came from the pool with their digests. Damaged digests
        are stale; so are all, if they are still on their way and cannot be verified."""
        if self._kernel.device.type != "cpu":
            return
        real = torch.tensor([block for block in block_ids if block], dtype=torch.int64)
        self.freshness.restored_blocks(real.tolist())
        for sparse in self._sparse.values():
            self.freshness.wrote_blocks(sparse.damaged(real).tolist())

    def before_store(self, block_ids: Sequence[int]) -> None:
        """These blocks go to the pool: recomputes their stale digests, and adds checksums. They are
        full, or the null block."""
        real = torch.tensor([block for block in block_ids if block], dtype=torch.int64)
        stale = self.freshness.take_stale(real)
        self._activity.blocks_digested += len(stale)
        real, stale = self._sent(real), self._sent(stale)
        for name, sparse in self._sparse.items():
            sparse.digest(self._caches[name], stale)
            sparse.sign(real)

    def _sent(self, ids: torch.Tensor) -> torch.Tensor:
        """On the device, once for all layers."""
        return device_of(next(iter(self._caches.values())).device).send(ids)

    def take(self, orders: OffloadOrders | None, records: Records | None) -> set[str]:
        """Executes a step's orders, before the step writes any device block.

        ``records``: of the arena of arrivals and departures; None: it cannot be reached. Returns
        the sequences for which the orders could not be executed: their blocks are lost, and the
        step's results for them are meaningless.
        """
        self._rows = {}
        if orders is None:
            return set()
        for key in orders.ended:
            self._forget(key)
        carried: list[Arrival | Departure] = [*orders.arrivals, *orders.departures]
        lost = {order.request_id for order in carried if not self._carry_out(order, records)}
        self._rows = {block: key for block, key in orders.rows.items() if key in self._sequences}
        return lost

    @property
    def arenas(self) -> set[ArenaHandle]:
        """Arenas that sequences read."""
        found = {sequence.records.arena for sequence in self._sequences.values()}
        return {arena for arena in found if arena is not None}

    def _near_arena(self, records: Records) -> NearArena | None:
        """The arena for layers that read it in place. Raises EngineError."""
        if self._kernel.on_host and records.arena not in self._near:
            self._near[records.arena] = NearArena(records, self._caches)
        return self._near.get(records.arena)

    def _forget(self, key: str) -> None:
        """The sequence has ended. With the last one in an arena that arena is unmapped: its owner
        may have died, and its memory be needed."""
        gone = self._sequences.pop(key, None)
        if gone is None:
            return
        for sparse in self._sparse.values():
            sparse.forget(key)
        arena = gone.records.arena
        if arena in self._near and not any(
            sequence.records.arena == arena for sequence in self._sequences.values()
        ):
            self._near.pop(arena).close()

    def _carry_out(self, order: Arrival | Departure, records: Records | None) -> bool:
        """False if the arena of a starting sequence is unreachable, or the device has no memory for
        more."""
        is_new = order.request_id not in self._sequences
        if not self._kernel.has_room(len(order.offsets), int(is_new)):
            logger.error(
                "kvrecall: no room for the digests of %d blocks more off the device, so %s is "
                "computed again; lower --max-num-seqs, or raise VLLM_RETRIEVAL_OFFLOAD_BOUNDARY",
                len(order.offsets),
                order.request_id,
            )
            self._forget(order.request_id)
            return False
        sequence = None if isinstance(order, Arrival) else self._sequences.get(order.request_id)
        if sequence is None:
            if records is None:
                return False
            self._forget(order.request_id)
            try:
                near = self._near_arena(records)
            except EngineError as error:
                logger.error("kvrecall: %s", error)
                return False
            none = torch.empty(0, dtype=torch.int32)
            sequence = OffloadedSequence(
                order.request_id, order.init, np.empty(0, np.int64), none, records, near
            )
            self._sequences[sequence.key] = sequence
        added = np.array(order.offsets, dtype=np.int64)
        sequence.offsets = np.concatenate([sequence.offsets, added])
        sequence.slots = torch.cat([sequence.slots, torch.tensor(order.slots, dtype=torch.int32)])
        if isinstance(order, Arrival):
            self._activity.blocks_left += len(added)
            for name, sparse in self._sparse.items():
                sparse.arrive(sequence, self._caches[name])
            self._keep(sequence, len(added))
            return True
        self._activity.blocks_offloaded += len(added)
        leaving = torch.tensor(order.block_ids, dtype=torch.int64)
        stale = self._sent(self.freshness.take_stale(leaving))
        leaving = self._sent(leaving)
        for name, sparse in self._sparse.items():
            sparse.digest(self._caches[name], stale)
            sparse.depart(sequence, leaving, self._caches[name])
        self._keep(sequence, len(added), np.array(order.block_ids, dtype=np.int64))
        return True

    def _keep(self, sequence: OffloadedSequence, added: int, ids: Ints | None = None) -> None:
        for name, kept in self._kept.items():
            kept.leave(sequence, added, self._caches[name], ids)
        if self._kept and not sequence.is_kept and not self._told:
            self._told = True
            logger.info(
                "kvrecall: retrieval: dense layers have no room for copies of all that left the "
                "device: steps are slow; lower --max-num-seqs, or VLLM_RETRIEVAL_DENSE_LAYERS"
            )
