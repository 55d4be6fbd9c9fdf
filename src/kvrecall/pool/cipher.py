"""AES-256-GCM over blocks, each under a key of its own; and the key file."""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvrecall.errors import ConfigError
from kvrecall.secret import read_private

KEY_BYTES = 32
_WRITE = "write 64 hexadecimal digits or base64 of 32 bytes; `kvrecall pool key FILE` makes one"
_ID_BYTES = 4
_SALT_BYTES, _NONCE_BYTES = 16, 12
_GCM_TAG_BYTES = 16
TAG_BYTES = _ID_BYTES + _SALT_BYTES + _NONCE_BYTES + _GCM_TAG_BYTES
"""Bytes of a block's tag: which key, the salt, the nonce, GCM's tag."""


class Cipher:
    """Encrypts bytes with the first of its keys and decrypts them with any. Thread-safe.

    A *tag* is kept beside the encrypted bytes, which have the length of the plain ones. ``label``
    is bound to them (GCM's associated data): they decrypt under the same label only.

    Each block is encrypted with a key derived from the file's and a random salt, and under a random
    nonce, so that GCM's bound on messages under one key (2**32 with random nonces) holds whatever
    number of blocks the disks, stores and hosts encrypt that share a key file.
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
        """Id of the encrypting key: distinguishes keys and reveals nothing about them."""
        return self._first.hex()

    def knows(self, tag: bytes) -> bool:
        return len(tag) == TAG_BYTES and tag[:_ID_BYTES] in self._keys

    @property
    def key_ids(self) -> list[str]:
        """The ids of all keys, the encrypting one first."""
        return [self.key_id, *(i.hex() for i in self._keys if i != self._first)]

    def encrypt(
        self, label: bytes, data: Sequence[memoryview], into: Sequence[memoryview]
    ) -> bytes:
        """Encrypts the pieces of ``data`` into those of ``into`` (of the same lengths, other
        memory); returns their common tag. ``into`` must be memory that others cannot change."""
        random = os.urandom(_SALT_BYTES + _NONCE_BYTES)
        salt, nonce = random[:_SALT_BYTES], random[_SALT_BYTES:]
        key = _derived(self._keys[self._first], salt)
        encryptor = self._make(key, nonce, None).encryptor()
        encryptor.authenticate_additional_data(label)
        for piece, place in zip(data, into, strict=True):
            encryptor.update_into(piece, place)
        encryptor.finalize()
        gcm_tag: bytes = encryptor.tag
        return self._first + random + gcm_tag

    def decrypt(
        self,
        label: bytes,
        tag: bytes,
        data: Sequence[memoryview],
        into: Sequence[memoryview],
    ) -> bool:
        """Writes the plain pieces of ``data`` into ``into`` (of the same lengths, other memory or
        the same). False if they were not encrypted under ``label``, or with another key; unverified
        bytes are never left in ``into``. ``data`` must be memory that others cannot change."""
        if not self.knows(tag):
            return False
        random, gcm_tag = tag[_ID_BYTES:-_GCM_TAG_BYTES], tag[-_GCM_TAG_BYTES:]
        key = _derived(self._keys[tag[:_ID_BYTES]], random[:_SALT_BYTES])
        decryptor = self._make(key, random[_SALT_BYTES:], gcm_tag).decryptor()
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
    """The cipher with the keys in a file; None without a file. Raises ConfigError if the file or
    the library is missing or invalid."""
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


def _derived(key: bytes, salt: bytes) -> bytes:
    """A block's key: keyed BLAKE2b of its salt."""
    return hashlib.blake2b(salt, key=key, digest_size=KEY_BYTES, person=b"kvrecall block").digest()


def _id_of(key: bytes) -> bytes:
    return hashlib.blake2b(key, digest_size=_ID_BYTES, person=b"kvrecall key id").digest()


# -- the key file ------------------------------------------------------------------------


def read_keys(path: Path, name: str = "encryption_key_file") -> tuple[bytes, ...]:
    """The keys in a file: exactly 32 bytes, or text with one key per line, hexadecimal or base64
    (empty lines and ``#`` comments are skipped). The first encrypts, all of them decrypt. Raises
    ConfigError, which never shows a key, if the file cannot be read, is accessible to other users
    or is invalid."""
    raw = read_private(path, name, f"create one: kvrecall pool key {path}")
    if len(raw) == KEY_BYTES:
        return (_checked(raw, f"{name}: {path}"),)
    try:
        lines = raw.decode("ascii").splitlines()
    except UnicodeDecodeError:
        raise ConfigError(
            f"{name}: {path} holds {len(raw)} bytes that are not text; a binary key has {KEY_BYTES}"
        ) from None
    keys = [
        _key_of(line.strip(), f"{name}: {path}:{number}")
        for number, line in enumerate(lines, 1)
        if line.strip() and not line.lstrip().startswith("#")
    ]
    if not keys:
        raise ConfigError(f"{name}: {path} holds no key; {_WRITE}")
    return tuple(dict.fromkeys(keys))


def make_key_file(path: Path) -> None:
    """Writes a new random key to a new file that only the owner can access. Raises ConfigError if
    it exists."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise ConfigError(
            f"{path} exists and is not changed; name another file, or add --rotate to put a "
            "new key before those in it"
        ) from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be created: {error.strerror}") from error
    _write(fd, (secrets.token_bytes(KEY_BYTES),))


def rotate_key_file(path: Path) -> int:
    """Puts a new key before those in the file, atomically; returns the number of keys in it."""
    keys = (secrets.token_bytes(KEY_BYTES), *read_keys(path, "key file"))
    target = path.resolve()
    fresh = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        _write(fd, keys)
        os.replace(fresh, target)
    except OSError as error:
        fresh.unlink(missing_ok=True)
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error
    return len(keys)


def _write(fd: int, keys: tuple[bytes, ...]) -> None:
    with os.fdopen(fd, "w", encoding="ascii") as file:
        file.writelines(f"{key.hex()}\n" for key in keys)
        file.flush()
        os.fsync(file.fileno())


def _key_of(text: str, where: str) -> bytes:
    """The key of one line. Errors show its length only."""
    try:
        if len(text) == 2 * KEY_BYTES:
            return _checked(bytes.fromhex(text), where)
        key = base64.b64decode(text.replace("-", "+").replace("_", "/"), validate=True)
    except (ValueError, binascii.Error):
        key = b""
    if len(key) != KEY_BYTES:
        raise ConfigError(f"{where}: these {len(text)} characters are not a key; {_WRITE}")
    return _checked(key, where)


def _checked(key: bytes, where: str) -> bytes:
    if len(set(key)) < KEY_BYTES // 4:
        raise ConfigError(
            f"{where}: this key is not random; `kvrecall pool key FILE` generates one"
        )
    return key
