"""How blocks lie on disk: as they are with a checksum, or encrypted.

What a codec keeps of a block beside its bytes, in its row of the index, is its *tag*: bytes that
do not match it are never given out.
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


class BlockCodec(ABC):
    """Between slots of the host and slots on disk. Thread-safe; never waits for I/O."""

    encrypts: bool
    """Whether what lies on disk cannot be read without a key."""

    @abstractmethod
    def knows(self, tag: bytes) -> bool:
        """Whether a block with this tag can be decoded at all: by one of these keys."""

    @abstractmethod
    def encode(self, puts: Sequence[Put], tags: dict[BlockKey, bytes]) -> Sequence[memoryview]:
        """What to write into the slots of ``puts``, which are adjacent; adds their tags to
        ``tags``. The data of the puts is not changed. Valid until the thread's next call."""

    @abstractmethod
    def buffers(self, slots: Sequence[memoryview]) -> Sequence[memoryview]:
        """Where to read blocks to that are for ``slots``, one after the other; then call
        ``decode`` for each. Valid until the thread's next call."""

    @abstractmethod
    def decode(
        self, key: BlockKey, nbytes: int, tag: bytes, read: memoryview, slot: memoryview
    ) -> bool:
        """Brings the block from where it was read to its slot. False if its bytes are wrong; the
        slot's content is undefined then."""


class Plain(BlockCodec):
    """Blocks as they are, each with a checksum."""

    encrypts = False

    def knows(self, tag: bytes) -> bool:
        return len(tag) == _CHECKSUM_BYTES

    def encode(self, puts: Sequence[Put], tags: dict[BlockKey, bytes]) -> Sequence[memoryview]:
        for put in puts:
            tags[put.key] = checksum_of(put.key, put.data[: put.nbytes])
        return [put.data for put in puts]

    def buffers(self, slots: Sequence[memoryview]) -> Sequence[memoryview]:
        return slots

    def decode(
        self, key: BlockKey, nbytes: int, tag: bytes, read: memoryview, slot: memoryview
    ) -> bool:
        return checksum_of(key, slot[:nbytes]) == tag


class Encrypted(BlockCodec):
    """Blocks encrypted with AES-256-GCM, bound to their key (namespace and hash) and length.

    Each thread that writes or reads has memory of its own for encrypted bytes: as much as the
    largest run of slots it moved at once.
    """

    encrypts = True

    def __init__(self, cipher: Cipher) -> None:
        self._cipher = cipher
        self._memory = threading.local()

    def knows(self, tag: bytes) -> bool:
        return self._cipher.knows(tag)

    def encode(self, puts: Sequence[Put], tags: dict[BlockKey, bytes]) -> Sequence[memoryview]:
        room = self._room(sum(len(put.data) for put in puts))
        begin = 0
        for put in puts:
            end = begin + put.nbytes
            label = _label(put.key, put.nbytes)
            tags[put.key] = self._cipher.seal(label, [put.data[: put.nbytes]], [room[begin:end]])
            begin += len(put.data)
            room[end:begin] = bytes(begin - end)
        return [room]

    def buffers(self, slots: Sequence[memoryview]) -> Sequence[memoryview]:
        room = self._room(sum(len(slot) for slot in slots))
        places = []
        begin = 0
        for slot in slots:
            places.append(room[begin : begin + len(slot)])
            begin += len(slot)
        return places

    def decode(
        self, key: BlockKey, nbytes: int, tag: bytes, read: memoryview, slot: memoryview
    ) -> bool:
        return self._cipher.open(_label(key, nbytes), tag, [read[:nbytes]], [slot[:nbytes]])

    def _room(self, nbytes: int) -> memoryview:
        """Page-aligned memory of this thread."""
        room: memoryview | None = getattr(self._memory, "room", None)
        if room is None or len(room) < nbytes:
            room = self._memory.room = memoryview(mmap.mmap(-1, nbytes))
        return room[:nbytes]


class Locked(BlockCodec):
    """Encrypted blocks without their key, to list and drop them: decodes and stores nothing."""

    encrypts = True

    def knows(self, tag: bytes) -> bool:
        return True

    def encode(self, puts: Sequence[Put], tags: dict[BlockKey, bytes]) -> Sequence[memoryview]:
        raise _no_key()

    def buffers(self, slots: Sequence[memoryview]) -> Sequence[memoryview]:
        raise _no_key()

    def decode(
        self, key: BlockKey, nbytes: int, tag: bytes, read: memoryview, slot: memoryview
    ) -> bool:
        raise _no_key()


def make_codec(cipher: Cipher | None) -> BlockCodec:
    """The codec for what settings ask for."""
    return Plain() if cipher is None else Encrypted(cipher)


def _no_key() -> TierError:
    return TierError("the blocks are sealed: give the file of their key, --encryption-key-file")


def _label(key: BlockKey, nbytes: int) -> bytes:
    return key + nbytes.to_bytes(8, "little")
