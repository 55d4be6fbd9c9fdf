"""Which of a sequence's offloaded blocks lie on the device: a cache of slots, per KV head, LRU.

Only book-keeping: the caller copies what is missing into the slots it is told.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Admission:
    """Where blocks lie, and what must be copied there first.

    ``slots``: int64, shaped as the blocks asked for; meaningless where none was wanted. ``heads``,
    ``blocks``, ``into``: the copies to make, one a place. ``hits``: wanted blocks that were there.
    ``vain``: blocks loaded ahead that go again unused.
    """

    slots: Ints
    heads: Ints
    blocks: Ints
    into: Ints
    hits: int
    vain: int


class Residency:
    """The slots of one sequence in one layer. Every head has its own blocks in the same slots."""

    def __init__(self, heads: int) -> None:
        self._holds = np.full((heads, 0), -1, dtype=np.int64)
        self._used = np.zeros((heads, 0), dtype=np.int64)
        self._ahead = np.zeros((heads, 0), dtype=np.bool_)
        self._place = np.full((heads, 0), -1, dtype=np.int64)
        self._now = 0

    @property
    def slots(self) -> int:
        return self._holds.shape[1]

    def grow(self, slots: int, blocks: int) -> None:
        """From now on there are so many slots and so many blocks; neither ever shrinks."""
        more = ((0, 0), (0, slots - self.slots))
        self._holds = np.pad(self._holds, more, constant_values=-1)
        self._used = np.pad(self._used, more)
        self._ahead = np.pad(self._ahead, more)
        wider = ((0, 0), (0, blocks - self._place.shape[1]))
        self._place = np.pad(self._place, wider, constant_values=-1)

    def admit(self, blocks: Ints, wanted: Flags) -> Admission:
        """Slots for a step's blocks, those used longest ago making room.

        ``blocks``: ``[heads, count]``, those of a head distinct; only where ``wanted``, at most as
        many a head as there are slots. What this returns stays until the next call.
        """
        self._now += 2
        heads = np.arange(len(blocks))[:, None]
        slots = np.where(wanted, self._place[heads, np.where(wanted, blocks, 0)], 0)
        head, _ = np.nonzero(there := wanted & (slots >= 0))
        self._used[head, slots[there]] = self._now
        self._ahead[head, slots[there]] = False
        return self._load(blocks, wanted & (slots < 0), slots, len(head), self._now)

    def admit_ahead(self, blocks: Ints, wanted: Flags) -> Admission:
        """Slots for blocks that the next step may want, best first; as many as there is room for
        beside this step's. Its ``slots`` mean nothing."""
        slots = np.zeros_like(blocks)
        for head, row in enumerate(blocks):
            room = int((self._used[head] < self._now - 1).sum())
            new = wanted[head] & (self._place[head, np.where(wanted[head], row, 0)] < 0)
            new &= np.cumsum(new) <= room
            slots[head] = np.where(new, -1, 0)
        admission = self._load(blocks, slots < 0, slots, 0, self._now - 1)
        self._ahead[admission.heads, admission.into] = True
        return admission

    def _load(self, blocks: Ints, missing: Flags, slots: Ints, hits: int, used: int) -> Admission:
        """Gives the missing blocks the slots used longest ago."""
        vain = 0
        for head in np.flatnonzero(missing.any(1)):
            lacking = missing[head]
            new = blocks[head, lacking]
            into = np.argsort(self._used[head], kind="stable")[: len(new)]
            gone = self._holds[head, into]
            self._place[head, gone[gone >= 0]] = -1
            vain += int(self._ahead[head, into].sum())
            self._ahead[head, into] = False
            self._holds[head, into] = new
            self._place[head, new] = into
            self._used[head, into] = used
            slots[head, lacking] = into
        heads, _ = np.nonzero(missing)
        return Admission(slots, heads, blocks[missing], slots[missing], hits, vain)
