"""What must be true of every schedule, whatever failed in it."""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from kvrecall.block import BlockKey, TierName
from kvrecall.pool.changes import MADE_ROOM, Cause

_DAMAGE = (Cause.CORRUPT, Cause.LOST)


@functools.lru_cache(512)
def content(key: BlockKey, serial: int, nbytes: int) -> bytes:
    """The bytes of a block that was committed as the ``serial``-th: each sector is another."""
    unit = hashlib.blake2b(key + serial.to_bytes(8, "little"), digest_size=64).digest()
    data = np.tile(np.frombuffer(unit * 8, np.uint64), (-(-nbytes // 512), 1))
    data[:, 0], data[:, 1] = serial, np.arange(len(data))
    return data.tobytes()[:nbytes]


@dataclass
class Verdicts:
    """What went wrong, in words, by promise."""

    wrong: list[str] = field(default_factory=list)  # bytes that were not committed under their key
    lost: list[str] = field(default_factory=list)  # acknowledged as durable, and not there
    leaks: list[str] = field(default_factory=list)
    stuck: list[str] = field(default_factory=list)  # no end, or no block is stored any more
    miscounted: list[str] = field(default_factory=list)
    died: list[str] = field(default_factory=list)  # threads, by an exception

    @property
    def is_good(self) -> bool:
        return not any(vars(self).values())

    def lines(self) -> list[str]:
        return [f"{name}: {text}" for name, texts in vars(self).items() for text in texts]


class Oracle:
    """Knows what was committed and acknowledged, over all lives of a pool. A ``Watcher``."""

    def __init__(self) -> None:
        self.verdicts = Verdicts()
        self.serials = itertools.count(1)
        self.committed: dict[BlockKey, set[int]] = defaultdict(set)
        self.acknowledged: dict[BlockKey, int] = {}  # and when, for the report
        self.pinned: set[BlockKey] = set()
        self.removals: Counter[BlockKey] = Counter()  # from the disk
        self.present: dict[TierName, set[BlockKey]] = defaultdict(set)
        self.evicted: Counter[TierName] = Counter()  # in this life
        self.began: dict[BlockKey, float] = {}  # when a block was first committed, in true seconds
        self.now: Callable[[], float] = lambda: 0.0  # true seconds
        self.ttl_s = float("inf")
        self.damaged = 0  # blocks that left the disk so, in this life
        self.unread: Callable[[], int] = lambda: 0  # reads that failed: each may cost a block
        self.is_sound = True  # no medium breaks a promise of its own

    # -- as a watcher ----------------------------------------------------------------------

    def stored(self, tier: TierName, key: BlockKey, parent: BlockKey | None) -> None:
        self.present[tier].add(key)

    def removed(self, tier: TierName, key: BlockKey, cause: Cause) -> None:
        self.present[tier].discard(key)
        self.evicted[tier] += cause in MADE_ROOM
        if cause is Cause.EXPIRED and self.now() - self.began[key] < self.ttl_s:
            self.verdicts.lost.append(f"{key.hex()[-6:]} expired before its time")
        if tier is TierName.DISK:
            self.removals[key] += 1
            self.damaged += cause in _DAMAGE
            self.pinned.discard(key)
            if key in self.acknowledged:
                if cause in _DAMAGE and self.is_sound and self.damaged > self.unread():
                    self.verdicts.lost.append(f"{key.hex()[-6:]} left the disk: {cause}")
                del self.acknowledged[key]

    def dropped(self, keys: Iterable[BlockKey]) -> None:
        """Before a client drops them; of those that are not recovered yet no removal is told."""
        self.pinned.difference_update(keys)
        for key in keys:
            self.acknowledged.pop(key, None)

    # -- what a client sees ----------------------------------------------------------------

    def filled(self, key: BlockKey, nbytes: int) -> bytes:
        """What a client computes for a block."""
        serial = next(self.serials)
        self.committed[key].add(serial)
        self.began.setdefault(key, self.now())
        return content(key, serial, nbytes)

    def recalled(self, key: BlockKey, data: bytes, when: str) -> None:
        serial = int.from_bytes(data[:8], "little")
        if serial not in self.committed[key] or data != content(key, serial, len(data)):
            self.verdicts.wrong.append(f"{key.hex()[-6:]} is not what was committed, {when}")
