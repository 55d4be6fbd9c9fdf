"""What a block is called in a store, and the header that travels with it.

The header says whose bytes follow, how many, and what they must add up to. So whatever a store
hands out, old, short, torn or another's, is either the block that was asked for or a miss.
"""

from __future__ import annotations

import hashlib
import struct

import xxhash

from kvrecall.block import NAMESPACE_BYTES, BlockKey

VERSION = 1
HEADER_BYTES = 64

_MAGIC = b"kvrc"
_FIELDS = struct.Struct("<4sIQ16s16s16x")  # magic, version, nbytes, digest of the key, checksum
assert _FIELDS.size == HEADER_BYTES


def name_of(key: BlockKey) -> str:
    """``v1.<namespace>.<block hash>``, both in hex; the same on every host."""
    return f"v{VERSION}.{key[:NAMESPACE_BYTES].hex()}.{key[NAMESPACE_BYTES:].hex()}"


def header_of(key: BlockKey, data: memoryview) -> bytearray:
    """The header of the block ``data`` (its bytes and no more)."""
    digest = hashlib.blake2b(key, digest_size=16).digest()
    return bytearray(_FIELDS.pack(_MAGIC, VERSION, data.nbytes, digest, _checksum(key, data)))


def is_intact(key: BlockKey, header: bytes | bytearray, data: memoryview) -> bool:
    """Whether ``header`` and ``data`` are the block ``key``, whole and unchanged."""
    return bytes(header) == bytes(header_of(key, data))


def _checksum(key: BlockKey, data: memoryview) -> bytes:
    """Of a block's bytes under its key: the same bytes under another key differ."""
    seed: int = xxhash.xxh3_64_intdigest(key)
    digest: bytes = xxhash.xxh3_128_digest(data, seed)
    return digest
