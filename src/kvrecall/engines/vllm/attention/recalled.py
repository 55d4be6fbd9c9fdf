"""An offloaded sequence in one sparse layer: its digests, and the device slots it recalls into."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from kvrecall.attention.residency import Flags, Ints, Residency
from kvrecall.engines.vllm.attention.activity import Activity
from kvrecall.engines.vllm.attention.extent import Extent
from kvrecall.engines.vllm.attention.room import DigestRoom, Digests
from kvrecall.engines.vllm.attention.rows import Bytes, SlotWriter
from kvrecall.pool.base import ArenaHandle


@dataclass(frozen=True, slots=True)
class Records:
    """The arena as a worker reads it: uint8 ``memory``, where in a block's record each layer's
    pages start (bytes), and what it is mapped by; None: nothing is attended to in place."""

    memory: Bytes
    layers: Mapping[str, int]
    arena: ArenaHandle | None = None

    def pages(self, offsets: Ints, layer: str, nbytes: int) -> Bytes:
        """Copies of a layer's pages of these records: ``[records, nbytes]``."""
        at = self.layers[layer]
        pages = np.empty((len(offsets), nbytes), dtype=np.uint8)
        for row, begin in zip(pages, (offsets + at).tolist(), strict=True):
            row[:] = self.memory[begin : begin + nbytes]
        return pages


def digests_of_layer(name: str) -> str:
    """What the pages that hold a layer's digests are called."""
    return f"{name}.digests"


def seals_of_layer(name: str) -> str:
    """What the pages that hold the checksums of a layer's digests are called."""
    return f"{name}.seals"


@dataclass(slots=True)
class OffloadedSequence:
    """A sequence whose middle blocks ``[0, count)``, counted from block ``init``, are off the
    device, in the arena of ``records`` at ``offsets``. ``slots``: int32 device blocks that it
    recalls into; every layer and KV head has its own blocks there. ``extent``: where layers attend
    to that arena in place; None: nowhere."""

    key: str
    init: int
    offsets: Ints
    slots: torch.Tensor
    records: Records
    extent: Extent | None = None

    @property
    def count(self) -> int:
        return len(self.offsets)


class RecalledBlocks:
    """Owned by the worker's thread."""

    def __init__(
        self,
        sequence: OffloadedSequence,
        writer: SlotWriter,
        digests: DigestRoom,
        layer: str,
        activity: Activity,
    ) -> None:
        """``writer``: of this layer's cache; ``digests``: room for those of blocks that leave."""
        self._sequence = sequence
        self._writer = writer
        self._memory = sequence.records.memory
        self._at = sequence.records.layers[layer]
        self._activity = activity
        self._residency = Residency(digests.heads)
        self._digests = digests
        self._count = 0

    @property
    def digests(self) -> Digests:
        """Of the blocks that left."""
        return self._digests.part(slice(0, self._count))

    def depart(self, digests: torch.Tensor) -> None:
        """Takes the digests of the next blocks that leave, ``[kv_heads, blocks, rows, width]``; the
        sequence names them by now."""
        first, self._count = self._count, self._count + digests.shape[1]
        self._digests.reach(self._count)
        self._digests.write(torch.arange(first, self._count, device=digests.device), digests)
        self._residency.grow(len(self._sequence.slots), self._count)

    def fetch(self, blocks: Ints, wanted: Flags) -> Ints:
        """Brings blocks to the device: places in the sequence's slots, valid until the next call.

        ``blocks``: ``[kv_heads, count]``, those of a head distinct; only where ``wanted``.
        """
        admission = self._residency.admit(blocks, wanted)
        self._activity.blocks_hit += admission.hits
        self._activity.blocks_loaded += len(admission.heads)
        pages = self._sequence.offsets[admission.blocks] + self._at
        slots = self._sequence.slots.numpy()[admission.into].astype(np.int64)
        self._writer.write(self._memory, pages, admission.heads, slots)
        self._activity.bytes_loaded += self._writer.nbytes * len(slots)
        return admission.slots
