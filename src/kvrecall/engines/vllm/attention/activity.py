"""Counts what retrieval did in this worker, to recognise a run in which it never acted."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch

from kvrecall.attention.kernels.device import Ints
from kvrecall.engines.base import Heat
from kvrecall.engines.vllm.device import device_of
from kvrecall.engines.vllm.device.base import Event

logger = logging.getLogger("vllm.kvrecall")

PLACES = 24
"""Parts of equal length that a context is divided into, to count where blocks are chosen."""


def _count(text: str) -> Any:
    """A counter with the description of its metric."""
    return field(default=0, metadata={"text": text})


@dataclass(slots=True)
class Activity:
    """Running totals, each of them a metric. Blocks are counted once per layer and KV
    head, but once for all layers when they leave the device or are digested."""

    steps: int = _count("Steps of the workers with retrieval attention on.")
    steps_sparse: int = _count("Steps with at least one sequence attended to sparsely.")
    sequences_sparse: int = _count("Decoded tokens attended to sparsely.")
    sequences_gated: int = _count("Decoded tokens left dense by the gate.")
    layers_sparse: int = _count("Sparse attentions: one per layer and decoded token.")
    blocks_considered: int = _count("Middle blocks considered, per layer and KV head.")
    blocks_selected: int = _count("Middle blocks selected, per layer and KV head.")
    blocks_attended: int = _count("Blocks attended to sparsely, per layer and KV head.")
    blocks_digested: int = _count("Blocks whose digests were computed.")
    blocks_indexed: int = _count("Blocks added to vector indexes, per layer.")
    sequences_offloaded: int = _count("Decoded tokens of partially offloaded sequences.")
    blocks_offloaded: int = _count("Blocks that left the device while their sequence ran.")
    blocks_left: int = _count("Blocks of prefixes found in the pool that were left there.")
    bytes_digests: int = _count("Bytes of digests loaded in place of such blocks.")
    digests_mended: int = _count("Digests damaged in memory and recomputed, per block and layer.")
    blocks_hit: int = _count("Selected offloaded blocks found in the slots.")
    blocks_loaded: int = _count("Selected offloaded blocks that were loaded.")
    bytes_loaded: int = _count("Bytes recalled into device slots.")
    blocks_in_place: int = _count("Selected offloaded blocks read where they lie, in the arena.")
    bytes_staged: int = _count("Bytes of offloaded sequences copied for dense attention on a GPU.")

    def count_layer(self, counts: tuple[int, int, int, int], heads: int) -> None:
        """Adds a sparse layer of so many KV heads. ``counts``: as of ``SparseStep``."""
        sequences, considered, selected, attended = counts
        self.layers_sparse += sequences
        self.blocks_considered += considered * heads
        self.blocks_selected += selected * heads
        self.blocks_attended += attended * heads

    def totals(self) -> dict[str, int]:
        return asdict(self)


def totals_of(activities: Iterable[Activity]) -> dict[str, int]:
    """The sums of their totals."""
    totals = Activity().totals()
    for activity in activities:
        for name, count in activity.totals().items():
            totals[name] += count
    return totals


class RecallCounts:
    """How many selected blocks off the device were in their slots, and how many were recalled, as
    the device counts them. The host reads copies of the counts when they have arrived."""

    def __init__(self, device: torch.device, block_bytes: int) -> None:
        """``block_bytes``: keys and values of a block, of one KV head."""
        self.totals = torch.zeros(2, dtype=torch.int64, device=device)
        """See ``DeviceResidency``."""
        self.changed = False
        """Whether the device has counted since the last copy."""
        self._block_bytes = block_bytes
        self._copy: tuple[torch.Tensor, Event] | None = None
        self._added = [0, 0]

    def add_to(self, activity: Activity, wait: bool = False) -> None:
        """Adds what has arrived, and queues the next copy. ``wait``: until all counts are added."""
        while self._copy is not None or self.changed:
            if self._copy is None:
                self._copy, self.changed = device_of(self.totals.device).fetch(self.totals), False
            totals, event = self._copy
            if wait:
                event.wait()
            elif not event.is_reached():
                return
            before, self._added, self._copy = self._added, totals.tolist(), None
            loaded = self._added[1] - before[1]
            activity.blocks_hit += self._added[0] - before[0]
            activity.blocks_loaded += loaded
            activity.bytes_loaded += loaded * self._block_bytes


class ActivityLog:
    """Logs the activity since the last report, at most once in ``every`` seconds."""

    def __init__(
        self, activity: Activity, every: float = 60.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._activity = activity
        self._every = every
        self._clock = clock
        self._said_at = float("-inf")
        self._said = activity.totals()

    def sparse_step(self) -> None:
        """Call after planning a step that attends sparsely. Its layers have not attended yet, so
        the first one is reported with the second."""
        now = self._clock()
        if now < self._said_at + self._every:
            return
        totals = self._activity.totals()
        new = {name: count - self._said[name] for name, count in totals.items()}
        if not new["layers_sparse"]:
            return
        self._said_at, self._said = now, totals
        logger.info(
            "kvrecall: retrieval: %(steps_sparse)d of %(steps)d steps sparse; "
            "%(blocks_selected)d of %(blocks_considered)d considered blocks selected; "
            "%(sequences_gated)d tokens left dense by the gate; offloaded blocks: "
            "%(blocks_hit)d found in slots, %(blocks_loaded)d loaded, "
            "%(blocks_in_place)d read in place",
            new,
        )


class HeatTotals:
    """Where in their contexts the layers chose blocks: running totals by layer, ``[2, PLACES]``
    each, considered and selected. Not thread-safe."""

    def __init__(self) -> None:
        self._layers: dict[int, Ints] = {}

    def note(self, layer: int, places: Ints, chosen: Ints, blocks: int) -> None:
        """Each KV head of layer ``layer`` selected a row of ``chosen`` (``[kv_heads, chosen]``) of
        the blocks ``places``, all of them block numbers within a context of ``blocks`` blocks."""
        totals = self._layers.setdefault(layer, np.zeros((2, PLACES), dtype=np.int64))
        totals[0] += len(chosen) * _by_place(places, blocks)
        totals[1] += _by_place(chosen.ravel(), blocks)

    def take(self) -> dict[int, list[list[int]]]:
        """The counts since the last call, by layer; plain values for the way to the API."""
        layers, self._layers = self._layers, {}
        return {layer: totals.tolist() for layer, totals in layers.items()}

    def add(self, counts: Mapping[Any, Sequence[Sequence[int]]]) -> None:
        """Adds the counts of a worker."""
        for layer, rows in counts.items():
            totals = self._layers.setdefault(int(layer), np.zeros((2, PLACES), dtype=np.int64))
            totals += np.asarray(rows, dtype=np.int64)

    def heat(self) -> Heat | None:
        """The totals; None if there are none."""
        if not self._layers:
            return None
        layers = sorted(self._layers)
        rows = [self._layers[layer].tolist() for layer in layers]
        return Heat(
            tuple(map(str, layers)),
            tuple(tuple(row[0]) for row in rows),
            tuple(tuple(row[1]) for row in rows),
        )


def _by_place(numbers: Ints, blocks: int) -> Ints:
    return np.bincount(numbers.astype(np.int64) * PLACES // blocks, minlength=PLACES)
