"""The checksum of a block: XXH3 of 128 bits of its bytes under its key, the same in all tiers."""

from __future__ import annotations

import threading

import xxhash

from kvrecall.block import BlockKey

CHECKSUM_BYTES = 16


def checksum_of(key: BlockKey, data: memoryview) -> bytes:
    """Checksum of a block's bytes under its key: the same bytes under another key differ. Releases
    Python's lock meanwhile."""
    seed: int = xxhash.xxh3_64_intdigest(key)
    digest: bytes = xxhash.xxh3_128_digest(data, seed)
    return digest


class Checksum:
    """The checksum of one block's bytes, which the first who needs it computes. Thread-safe."""

    __slots__ = ("_lock", "known")

    def __init__(self, known: bytes | None = None) -> None:
        """``known``: computed or verified before, of the same bytes under the same key."""
        self._lock = threading.Lock()
        self.known = known

    def of(self, key: BlockKey, data: memoryview) -> bytes:
        """The checksum of ``data``, which is the same at every call."""
        if self.known is not None:
            return self.known
        with self._lock:  # a tier that waits for another one's result leaves it the processor
            if self.known is None:
                self.known = checksum_of(key, data)
            return self.known
