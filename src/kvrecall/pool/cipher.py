"""AES-256-GCM over blocks: sealed under a fresh nonce, opened only by the right key."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvrecall.errors import ConfigError
from kvrecall.pool.keyfile import read_keys

if TYPE_CHECKING:
    from collections.abc import Callable

_ID_BYTES = 4
_NONCE_BYTES = 12
_TAG_BYTES = 16
PROOF_BYTES = _ID_BYTES + _NONCE_BYTES + _TAG_BYTES
"""Bytes of a proof: which key, the nonce, the tag."""


class Cipher:
    """Seals bytes with the first of its keys and opens them with any. Thread-safe.

    A *proof* is what must be kept beside the sealed bytes, which have the length of the plain
    ones. ``label`` is bound to them (GCM's associated data): they open under the same only.

    Nonces are random, so a key should seal no more than 2**32 blocks; at a MiB a block that is
    4 PiB.
    """

    def __init__(self, keys: Sequence[bytes]) -> None:
        """ConfigError if the library is missing."""
        self._make = _library()
        self._keys = {_id_of(key): key for key in reversed(keys)}
        self._first = _id_of(keys[0])

    def __repr__(self) -> str:
        return f"Cipher({', '.join(key_id.hex() for key_id in self._keys)})"  # never a key

    @property
    def key_id(self) -> str:
        """Tells keys apart without telling anything about them: of the key that seals."""
        return self._first.hex()

    def knows(self, proof: bytes) -> bool:
        """Whether the key that made this proof is one of these."""
        return len(proof) == PROOF_BYTES and proof[:_ID_BYTES] in self._keys

    @property
    def key_ids(self) -> list[str]:
        """Of all keys, the one that seals first."""
        return [self.key_id, *(i.hex() for i in self._keys if i != self._first)]

    def seal(self, label: bytes, data: Sequence[memoryview], into: Sequence[memoryview]) -> bytes:
        """Writes the sealed pieces of ``data`` into those of ``into`` (of the same lengths, other
        memory); returns the proof of them all."""
        nonce = os.urandom(_NONCE_BYTES)
        encryptor = self._make(self._keys[self._first], nonce, None).encryptor()
        encryptor.authenticate_additional_data(label)
        for piece, place in zip(data, into, strict=True):
            encryptor.update_into(piece, place)
        encryptor.finalize()
        tag: bytes = encryptor.tag
        return self._first + nonce + tag

    def open(
        self,
        label: bytes,
        proof: bytes,
        data: Sequence[memoryview],
        into: Sequence[memoryview],
    ) -> bool:
        """Writes the plain pieces of ``data`` into ``into`` (as in ``seal``). False if they are
        not what was sealed under ``label``, or the key is none of these; bytes that were not
        proven are never left in ``into``."""
        if not self.knows(proof):
            return False
        nonce, tag = proof[_ID_BYTES:-_TAG_BYTES], proof[-_TAG_BYTES:]
        decryptor = self._make(self._keys[proof[:_ID_BYTES]], nonce, tag).decryptor()
        decryptor.authenticate_additional_data(label)
        for piece, place in zip(data, into, strict=True):
            decryptor.update_into(piece, place)
        from cryptography.exceptions import InvalidTag

        try:
            decryptor.finalize()
        except InvalidTag:
            for place in into:
                place[:] = bytes(place.nbytes)
            return False
        return True


def read_cipher(key_file: Path | None) -> Cipher | None:
    """The cipher with the keys in a file; None without one. ConfigError if it cannot be had."""
    return None if key_file is None else Cipher(read_keys(key_file))


def _library() -> Callable[[bytes, bytes, bytes | None], Any]:
    try:
        from cryptography.hazmat.primitives.ciphers import Cipher as Aes
        from cryptography.hazmat.primitives.ciphers import algorithms, modes
    except ImportError as error:
        raise ConfigError(
            "encryption_key_file needs the package cryptography; "
            "run: pip install 'kvrecall[encryption]'"
        ) from error

    def make(key: bytes, nonce: bytes, tag: bytes | None) -> Any:
        return Aes(algorithms.AES(key), modes.GCM(nonce, tag))

    return make


def _id_of(key: bytes) -> bytes:
    return hashlib.blake2b(key, digest_size=_ID_BYTES, person=b"kvrecall key id").digest()
