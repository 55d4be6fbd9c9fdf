"""Tracks a sequence's offloaded blocks on the device: an LRU cache of slots per KV head.

Bookkeeping only: the caller copies missing blocks into the slots it is given.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Admission:
    """Slots of blocks, and the copies to make first. ``slots``: int64, with the shape of the
    requested blocks; meaningless where not wanted. ``heads``, ``blocks``, ``into``: the copies to
    make, one per place. ``hits``: wanted blocks that were present."""

    slots: Ints
    heads: Ints
    blocks: Ints
    into: Ints
    hits: int


class Residency:
    """The slots of one sequence in one layer. Every head has its own blocks in the same slots."""

    def __init__(self, heads: int) -> None:
        self._holds = np.full((heads, 0), -1, dtype=np.int64)
        self._used = np.zeros((heads, 0), dtype=np.int64)
        self._place = np.full((heads, 0), -1, dtype=np.int64)
        self._now = 0

    def grow(self, slots: int, blocks: int) -> None:
        """Grows to that many slots and blocks; neither ever shrinks."""
        more = ((0, 0), (0, slots - self._holds.shape[1]))
        self._holds = np.pad(self._holds, more, constant_values=-1)
        self._used = np.pad(self._used, more)
        wider = ((0, 0), (0, blocks - self._place.shape[1]))
        self._place = np.pad(self._place, wider, constant_values=-1)

    def admit(self, blocks: Ints, wanted: Flags) -> Admission:
        """Returns slots for a step's blocks; evicts the least recently used ones to make room.

        ``blocks``: ``[heads, count]``, distinct within a head; only those ``wanted`` are admitted,
        per head at most as many as there are slots. The result is valid until the next call.
        """
        self._now += 1
        heads = np.arange(len(blocks))[:, None]
        slots = np.where(wanted, self._place[heads, np.where(wanted, blocks, 0)], 0)
        head, _ = np.nonzero(there := wanted & (slots >= 0))
        self._used[head, slots[there]] = self._now
        missing = wanted & (slots < 0)
        for one in np.flatnonzero(missing.any(1)):
            new = blocks[one, missing[one]]
            into = np.argsort(self._used[one], kind="stable")[: len(new)]
            gone = self._holds[one, into]
            self._place[one, gone[gone >= 0]] = -1
            self._holds[one, into] = new
            self._place[one, new] = into
            self._used[one, into] = self._now
            slots[one, missing[one]] = into
        return Admission(slots, np.nonzero(missing)[0], blocks[missing], slots[missing], len(head))
