"""The format of blocks in slots on disk: with a checksum or encrypted, plain or compressed."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Sequence
from typing import Literal

from kvrecall.block import BlockKey
from kvrecall.config import Compression
from kvrecall.errors import TierError
from kvrecall.pool.cipher import TAG_BYTES, Cipher
from kvrecall.pool.compression import FRAME_BYTES, Codec, Compressor, unpack
from kvrecall.pool.slots import ALIGNMENT
from kvrecall.pool.tier import CHECKSUM_BYTES, Put, checksum_of

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


class BlockCodec:
    """Converts between slots of the host and slots on disk: plain, each block with a checksum, or
    with a cipher encrypted with AES-256-GCM and bound to its key (namespace and hash) and length.
    Thread-safe; never waits for I/O.

    The *tag* is stored in the block's row of the index: bytes that do not match it are never
    returned. ``block_bytes`` are a block's plain bytes, ``nbytes`` those on disk: fewer if it is
    compressed. Each thread that writes or reads has its own memory for bytes in another form: as
    much as the largest run of slots it moved at once.
    """

    def __init__(
        self, cipher: Cipher | None = None, packer: Packer | None = None, locked: bool = False
    ) -> None:
        """``locked``: blocks are encrypted and their key is missing: they can be listed and
        dropped, but to store or get one raises TierError."""
        self.packer = packer
        self.encrypts = cipher is not None or locked
        """Whether the blocks on disk cannot be read without a key."""
        self.tag_bytes = TAG_BYTES if self.encrypts else CHECKSUM_BYTES
        self._key = cipher
        self._scratch, self._decrypted = ScratchBuffers(), ScratchBuffers()

    @property
    def _cipher(self) -> Cipher:
        if self._key is None:
            raise TierError(
                "the blocks are encrypted; pass their key file with --encryption-key-file"
            )
        return self._key

    def knows(self, tag: bytes) -> bool:
        """Whether a block with this tag can be decoded with the present keys."""
        return len(tag) == self.tag_bytes if self._key is None else self._key.knows(tag)

    def encode(self, puts: Sequence[Put], tags: dict[BlockKey, bytes]) -> Sequence[memoryview]:
        """The bytes to write into the slots of ``puts``, which are adjacent; adds their tags to
        ``tags``. Does not change the data of the puts. Valid until the thread's next call."""
        if not self.encrypts:
            tags.update((put.key, put.compute_checksum()) for put in puts)
            return [put.data for put in puts]
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
        """Buffers of these sizes, to read the blocks for ``slots`` into, one after the other; then
        call ``decode`` for each. Plain blocks are read into their slots. Valid until the thread's
        next call."""
        own = [
            nbytes if self.encrypts or nbytes != len(slot) else 0
            for slot, nbytes in zip(slots, sizes, strict=True)
        ]
        if not any(own):
            return slots
        pieces = self._scratch.pieces(own)
        return [piece if piece else slot for piece, slot in zip(pieces, slots, strict=True)]

    def decode(
        self, key: BlockKey, nbytes: int, tag: bytes, read: memoryview, slot: memoryview,
        block_bytes: int,
    ) -> bool:  # fmt: skip
        """Decodes the block from its buffer into its slot. False if its bytes are wrong; the slot's
        content is undefined then."""
        is_plain, frame = nbytes == block_bytes, read[:nbytes]
        if not self.encrypts:
            right = checksum_of(key, frame) == tag
        else:
            into = slot[:nbytes] if is_plain else self._decrypted.buffer(nbytes)
            right = self._cipher.decrypt(_label(key, nbytes), tag, [frame], [into])
            frame = into
        return right and (is_plain or unpack(frame, slot[:block_bytes]))

    def checksum_in(self, tag: bytes, nbytes: int, block_bytes: int) -> bytes | None:
        """The checksum of the plain bytes of a block that was decoded, if its tag tells it."""
        return tag if nbytes == block_bytes and not self.encrypts else None


def make_codec(cipher: Cipher | None, compression: Compression = "none") -> BlockCodec:
    """The codec that the settings describe. Raises ConfigError."""
    return BlockCodec(cipher, None if compression == "none" else Packer(compression))


def _label(key: BlockKey, nbytes: int) -> bytes:
    return key + nbytes.to_bytes(8, "little")
