"""How blocks lie on disk: as they are with a checksum, or sealed with a key.

What a seal keeps of a block beside its bytes, in its row of the index, is its *proof*: nothing
that does not match it is ever given out.
"""

from __future__ import annotations

import mmap
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence

import xxhash

from kvrecall.block import BlockKey
from kvrecall.errors import TierError
from kvrecall.pool.cipher import Cipher
from kvrecall.pool.tier import Put

_CHECKSUM_BYTES = 16


def checksum_of(key: BlockKey, data: memoryview) -> bytes:
    """Checksum of a block's bytes under its key: the same bytes under another key differ."""
    seed: int = xxhash.xxh3_64_intdigest(key)
    digest: bytes = xxhash.xxh3_128_digest(data, seed)
    return digest


class Seal(ABC):
    """Between slots of the host and slots on disk. Thread-safe; never waits for I/O."""

    hides: bool
    """Whether what lies on disk cannot be read without a key."""

    @abstractmethod
    def knows(self, proof: bytes) -> bool:
        """Whether a block with this proof may open; if not, it never will."""

    @abstractmethod
    def write(self, puts: Sequence[Put], proofs: dict[BlockKey, bytes]) -> Sequence[memoryview]:
        """What to write into the slots of ``puts``, which are adjacent; adds their proofs to
        ``proofs``. The data of the puts is not changed. Valid until the thread's next call."""

    @abstractmethod
    def read(self, slots: Sequence[memoryview]) -> Sequence[memoryview]:
        """Where to read blocks to that shall come to ``slots``, one after the other; then call
        ``open`` for each. Valid until the thread's next call."""

    @abstractmethod
    def open(
        self, key: BlockKey, nbytes: int, proof: bytes, read: memoryview, slot: memoryview
    ) -> bool:
        """Brings the block from where it was read to its slot. False if its bytes are wrong; the
        slot's content is undefined then."""


class Checksum(Seal):
    """Blocks as they are, each with a checksum."""

    hides = False

    def knows(self, proof: bytes) -> bool:
        return len(proof) == _CHECKSUM_BYTES

    def write(self, puts: Sequence[Put], proofs: dict[BlockKey, bytes]) -> Sequence[memoryview]:
        for put in puts:
            proofs[put.key] = checksum_of(put.key, put.data[: put.nbytes])
        return [put.data for put in puts]

    def read(self, slots: Sequence[memoryview]) -> Sequence[memoryview]:
        return slots

    def open(
        self, key: BlockKey, nbytes: int, proof: bytes, read: memoryview, slot: memoryview
    ) -> bool:
        return checksum_of(key, slot[:nbytes]) == proof


class Sealed(Seal):
    """Blocks sealed with AES-256-GCM, bound to their key (namespace and hash) and length.

    Each thread that writes or reads has memory of its own for sealed bytes: as much as the largest
    run of slots it moved at once.
    """

    hides = True

    def __init__(self, cipher: Cipher) -> None:
        self._cipher = cipher
        self._memory = threading.local()

    def knows(self, proof: bytes) -> bool:
        return self._cipher.knows(proof)

    def write(self, puts: Sequence[Put], proofs: dict[BlockKey, bytes]) -> Sequence[memoryview]:
        room = self._room(sum(len(put.data) for put in puts))
        begin = 0
        for put in puts:
            end = begin + put.nbytes
            label = _label(put.key, put.nbytes)
            proofs[put.key] = self._cipher.seal(label, [put.data[: put.nbytes]], [room[begin:end]])
            begin += len(put.data)
            room[end:begin] = bytes(begin - end)
        return [room]

    def read(self, slots: Sequence[memoryview]) -> Sequence[memoryview]:
        room = self._room(sum(len(slot) for slot in slots))
        places = []
        begin = 0
        for slot in slots:
            places.append(room[begin : begin + len(slot)])
            begin += len(slot)
        return places

    def open(
        self, key: BlockKey, nbytes: int, proof: bytes, read: memoryview, slot: memoryview
    ) -> bool:
        return self._cipher.open(_label(key, nbytes), proof, [read[:nbytes]], [slot[:nbytes]])

    def _room(self, nbytes: int) -> memoryview:
        """Page-aligned memory of this thread."""
        room: memoryview | None = getattr(self._memory, "room", None)
        if room is None or len(room) < nbytes:
            room = self._memory.room = memoryview(mmap.mmap(-1, nbytes))
        return room[:nbytes]


class Shut(Seal):
    """Without a key over sealed blocks, for those who list and drop: opens and stores nothing."""

    hides = True

    def knows(self, proof: bytes) -> bool:
        return True

    def write(self, puts: Sequence[Put], proofs: dict[BlockKey, bytes]) -> Sequence[memoryview]:
        raise _no_key()

    def read(self, slots: Sequence[memoryview]) -> Sequence[memoryview]:
        raise _no_key()

    def open(
        self, key: BlockKey, nbytes: int, proof: bytes, read: memoryview, slot: memoryview
    ) -> bool:
        raise _no_key()


def make_seal(cipher: Cipher | None) -> Seal:
    """The seal for what settings ask for."""
    return Checksum() if cipher is None else Sealed(cipher)


def _no_key() -> TierError:
    return TierError("the blocks are sealed: give the file of their key, --encryption-key-file")


def _label(key: BlockKey, nbytes: int) -> bytes:
    return key + nbytes.to_bytes(8, "little")
