"""The format of blocks in slots on disk: with a checksum or encrypted, plain or compressed."""

from __future__ import annotations

import mmap
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal

from kvrecall.block import BlockKey
from kvrecall.config import Compression
from kvrecall.errors import TierError
from kvrecall.pool.checksum import CHECKSUM_BYTES, checksum_of
from kvrecall.pool.cipher import TAG_BYTES, Cipher
from kvrecall.pool.compression import FRAME_BYTES, Codec, Compressor, unpack
from kvrecall.pool.slots import ALIGNMENT
from kvrecall.pool.tier import Put

_SIZES = 32
"""Sizes of slots for compressed blocks of one plain size: few, so that slots are used again; many,
so that a block wastes a sixty-fourth of its plain size on average."""


class ScratchBuffers:
    """Page-aligned memory of each thread, as much as it needed at once so far."""

    def __init__(self) -> None:
        self._of_thread = threading.local()

    def buffer(self, nbytes: int) -> memoryview:
        """The thread's memory; the same again at its next call."""
        room: memoryview | None = getattr(self._of_thread, "buffer", None)
        if room is None or len(room) < nbytes:
            room = self._of_thread.buffer = memoryview(mmap.mmap(-1, max(nbytes, ALIGNMENT)))
        return room[:nbytes]

    def pieces(self, sizes: Sequence[int]) -> list[memoryview]:
        """Pieces of it, one after the other."""
        room, begin, pieces = self.buffer(sum(sizes)), 0, []
        for nbytes in sizes:
            pieces.append(room[begin : begin + nbytes])
            begin += nbytes
        return pieces


class Packer:
    """Compresses blocks on their way to disk. Thread-safe.

    A compressed block is a frame, padded with zeros to one of ``_SIZES`` slots; it is always
    smaller than the plain block, by which the two are told apart.
    """

    def __init__(self, compression: Codec | Literal["auto"]) -> None:
        """``compression``: a codec, or `auto`. ConfigError if the library is missing."""
        self._compressor = Compressor(compression)
        self._scratch = ScratchBuffers()

    def moved(self, nbytes: int, seconds: float, got: bool) -> None:
        """The medium read (``got``) or wrote so many bytes."""
        self._compressor.moved(nbytes, seconds, got)

    def pack(self, puts: Sequence[Put]) -> list[Put]:
        """The puts with compressed data where that is smaller by a slot's size. Valid until the
        thread's next call."""
        if not self._compressor.is_on:
            return list(puts)
        room = self._scratch.buffer(sum(len(put.data) for put in puts) + FRAME_BYTES)
        packed: list[Put] = []
        begin = 0
        for put in puts:
            used = self._compressor.pack(put.data[: put.nbytes], room[begin:])
            step = max(ALIGNMENT, len(put.data) // _SIZES // ALIGNMENT * ALIGNMENT)
            slot = -(-used // step) * step
            if slot >= len(put.data):
                packed.append(put)
                continue
            end = begin + slot
            room[begin + used : end] = bytes(slot - used)
            packed.append(put.packed(room[begin:end], slot))
            begin = end
        return packed


class BlockCodec(ABC):
    """Converts between slots of the host and slots on disk. Thread-safe; never waits for I/O.

    The *tag* is stored in the block's row of the index: bytes that do not match it are never
    returned. ``block_bytes`` are a block's plain bytes, ``nbytes`` those on disk: fewer if it is
    compressed.
    """

    encrypts: bool
    """Whether the blocks on disk cannot be read without a key."""

    tag_bytes: int

    def __init__(self, packer: Packer | None = None) -> None:
        self.packer = packer
        self._scratch = ScratchBuffers()

    @abstractmethod
    def knows(self, tag: bytes) -> bool:
        """Whether a block with this tag can be decoded with the present keys."""

    @abstractmethod
    def encode(self, puts: Sequence[Put], tags: dict[BlockKey, bytes]) -> Sequence[memoryview]:
        """The bytes to write into the slots of ``puts``, which are adjacent; adds their tags to
        ``tags``. Does not change the data of the puts. Valid until the thread's next call."""

    @abstractmethod
    def buffers(self, slots: Sequence[memoryview], sizes: Sequence[int]) -> Sequence[memoryview]:
        """Buffers of these sizes, to read the blocks for ``slots`` into, one after the other; then
        call ``decode`` for each. Valid until the thread's next call."""

    @abstractmethod
    def decode(
        self, key: BlockKey, nbytes: int, tag: bytes, read: memoryview, slot: memoryview,
        block_bytes: int,
    ) -> bool:  # fmt: skip
        """Decodes the block from its buffer into its slot. False if its bytes are wrong; the slot's
        content is undefined then."""

    def checksum_in(self, tag: bytes, nbytes: int, block_bytes: int) -> bytes | None:
        """The checksum of the plain bytes of a block that was decoded, if its tag tells it."""
        return None


class Plain(BlockCodec):
    """Blocks that are not encrypted, each with a checksum."""

    encrypts = False
    tag_bytes = CHECKSUM_BYTES

    def knows(self, tag: bytes) -> bool:
        return len(tag) == CHECKSUM_BYTES

    def encode(self, puts: Sequence[Put], tags: dict[BlockKey, bytes]) -> Sequence[memoryview]:
        for put in puts:
            tags[put.key] = put.compute_checksum()
        return [put.data for put in puts]

    def buffers(self, slots: Sequence[memoryview], sizes: Sequence[int]) -> Sequence[memoryview]:
        """Plain blocks are read into their slots."""
        own = [
            0 if nbytes == len(slot) else nbytes for slot, nbytes in zip(slots, sizes, strict=True)
        ]
        if not any(own):
            return slots
        pieces = self._scratch.pieces(own)
        return [piece if piece else slot for piece, slot in zip(pieces, slots, strict=True)]

    def decode(
        self, key: BlockKey, nbytes: int, tag: bytes, read: memoryview, slot: memoryview,
        block_bytes: int,
    ) -> bool:  # fmt: skip
        if checksum_of(key, read[:nbytes]) != tag:
            return False
        return nbytes == block_bytes or unpack(read[:nbytes], slot[:block_bytes])

    def checksum_in(self, tag: bytes, nbytes: int, block_bytes: int) -> bytes | None:
        return tag if nbytes == block_bytes else None


class Encrypted(BlockCodec):
    """Blocks encrypted with AES-256-GCM, bound to their key (namespace and hash) and length. Each
    thread that writes or reads has its own memory for encrypted bytes: as much as the largest run
    of slots it moved at once. Without a cipher they can be listed and dropped: encoding and
    decoding raise TierError."""

    encrypts = True
    tag_bytes = TAG_BYTES

    def __init__(self, cipher: Cipher | None, packer: Packer | None = None) -> None:
        super().__init__(packer)
        self._key = cipher
        self._decrypted = ScratchBuffers()

    @property
    def _cipher(self) -> Cipher:
        if self._key is None:
            raise TierError(
                "the blocks are encrypted; pass their key file with --encryption-key-file"
            )
        return self._key

    def knows(self, tag: bytes) -> bool:
        return len(tag) == TAG_BYTES if self._key is None else self._key.knows(tag)

    def encode(self, puts: Sequence[Put], tags: dict[BlockKey, bytes]) -> Sequence[memoryview]:
        room = self._scratch.buffer(sum(len(put.data) for put in puts))
        begin = 0
        for put in puts:
            end = begin + put.nbytes
            label = _label(put.key, put.nbytes)
            tags[put.key] = self._cipher.encrypt(label, [put.data[: put.nbytes]], [room[begin:end]])
            begin += len(put.data)
            room[end:begin] = bytes(begin - end)
        return [room]

    def buffers(self, slots: Sequence[memoryview], sizes: Sequence[int]) -> Sequence[memoryview]:
        return self._scratch.pieces(sizes)

    def decode(
        self, key: BlockKey, nbytes: int, tag: bytes, read: memoryview, slot: memoryview,
        block_bytes: int,
    ) -> bool:  # fmt: skip
        label = _label(key, nbytes)
        if nbytes == block_bytes:
            return self._cipher.decrypt(label, tag, [read[:nbytes]], [slot[:nbytes]])
        frame = self._decrypted.buffer(nbytes)
        right = self._cipher.decrypt(label, tag, [read[:nbytes]], [frame])
        return right and unpack(frame, slot[:block_bytes])


def make_codec(cipher: Cipher | None, compression: Compression = "none") -> BlockCodec:
    """The codec that the settings describe. Raises ConfigError."""
    packer = None if compression == "none" else Packer(compression)
    return Plain(packer) if cipher is None else Encrypted(cipher, packer)


def _label(key: BlockKey, nbytes: int) -> bytes:
    return key + nbytes.to_bytes(8, "little")
