"""The existence cache: remembers for a short while which blocks a store has."""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from kvrecall.block import BlockKey

_OWN_S = 120.0  # what this host stored itself
_THERE_S = 10.0  # what the store answered it has
_ABSENT_S = 0.25  # what the store answered it has not; promised blocks come a moment later
_DROPPED_S = 60.0  # what was dropped here
_MAX_ENTRIES = 1 << 18


class Existence(enum.Enum):
    """What the cache knows of a block in a store."""

    UNKNOWN = "unknown"
    THERE = "there"
    ABSENT = "absent"
    DROPPED = "dropped"  # absent, whatever the store says


@dataclass(frozen=True, slots=True)
class _Answer:
    """``depth`` is None where the block was not stored by this host."""

    existence: Existence
    until: float
    nbytes: int = 0
    depth: int | None = None


class ExistenceCache:
    """A bounded cache of answers, each good for some seconds. Not thread-safe."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._entries: OrderedDict[BlockKey, _Answer] = OrderedDict()
        self.blocks = 0  # believed to be there
        self.nbytes = 0

    def of(self, key: BlockKey) -> Existence:
        entry = self._entries.get(key)
        if entry is None or entry.until < self._monotonic():
            return Existence.UNKNOWN
        return entry.existence

    def depth_of(self, key: BlockKey) -> int | None:
        entry = self._entries.get(key)
        return None if entry is None or entry.existence is not Existence.THERE else entry.depth

    def stored(self, key: BlockKey, nbytes: int, depth: int) -> None:
        """Records that this host stored the block."""
        self._note(key, _Answer(Existence.THERE, self._monotonic() + _OWN_S, nbytes, depth))

    def answered(self, key: BlockKey, is_there: bool, nbytes: int) -> None:
        """Records an answer of the store. Blocks dropped here stay dropped."""
        if self.of(key) is Existence.DROPPED:
            return
        if is_there:
            self._note(key, _Answer(Existence.THERE, self._monotonic() + _THERE_S, nbytes))
        else:
            self._note(key, _Answer(Existence.ABSENT, self._monotonic() + _ABSENT_S))

    def dropped(self, key: BlockKey) -> None:
        """Records a dropped block: it is not found any more."""
        self._note(key, _Answer(Existence.DROPPED, self._monotonic() + _DROPPED_S))

    def drop_all(self) -> None:
        """Drops all known blocks: they are not found any more."""
        for key in [k for k, entry in self._entries.items() if entry.existence is Existence.THERE]:
            self.dropped(key)

    def invalidate(self, key: BlockKey) -> None:
        """The store did not answer for the block. What was dropped here stays dropped."""
        entry = self._entries.get(key)
        if entry is not None and entry.existence is not Existence.DROPPED:
            self._count(self._entries.pop(key), -1)

    def invalidate_all(self) -> None:
        """The store may have changed altogether."""
        kept = [(k, e) for k, e in self._entries.items() if e.existence is Existence.DROPPED]
        self._entries = OrderedDict(kept)
        self.blocks = self.nbytes = 0

    def _note(self, key: BlockKey, entry: _Answer) -> None:
        self._count(self._entries.pop(key, None), -1)
        self._entries[key] = entry
        self._count(entry, 1)
        if len(self._entries) > _MAX_ENTRIES:
            self._count(self._entries.popitem(last=False)[1], -1)

    def _count(self, entry: _Answer | None, sign: int) -> None:
        if entry is not None and entry.existence is Existence.THERE:
            self.blocks += sign
            self.nbytes += sign * entry.nbytes
