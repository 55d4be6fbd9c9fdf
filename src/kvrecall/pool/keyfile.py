"""The file with the keys that blocks at rest are sealed with: read and checked, made, rotated."""

from __future__ import annotations

import base64
import binascii
import errno
import os
import secrets
import stat
from pathlib import Path

from kvrecall.errors import ConfigError

KEY_BYTES = 32
_MAX_BYTES = 64 << 10
_WRITE = "write 64 hexadecimal digits or base64 of 32 bytes; `kvrecall pool key FILE` makes one"


def read_keys(path: Path, name: str = "encryption_key_file") -> tuple[bytes, ...]:
    """The keys in a file: exactly 32 bytes, or text with one key a line, hexadecimal or base64
    (empty lines and ``#`` comments are skipped). The first seals, all of them open.

    ConfigError, which never shows a key, if it cannot be read, is not the owner's alone or holds
    something else.
    """
    raw = _read_private(path, name)
    if len(raw) == KEY_BYTES:
        return (_checked(raw, f"{name}: {path}"),)
    try:
        lines = raw.decode("ascii").splitlines()
    except UnicodeDecodeError:
        raise ConfigError(
            f"{name}: {path} holds {len(raw)} bytes that are no text; a binary key has {KEY_BYTES}"
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
    """Writes a new random key to a new file of the owner's alone. ConfigError if it exists."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise ConfigError(
            f"{path} exists and is left alone; name another file, or add --rotate to put a new "
            "key before those in it"
        ) from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be made: {error.strerror}") from error
    _write(fd, (secrets.token_bytes(KEY_BYTES),))


def rotate_key_file(path: Path) -> int:
    """Puts a new key before those in the file, atomically; returns how many are in it now."""
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


def _read_private(path: Path, name: str) -> bytes:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise ConfigError(
            f"{name}: there is no file {path}; make one: kvrecall pool key {path}"
        ) from None
    except OSError as error:
        raise ConfigError(f"{name}: {path}: {error.strerror}") from error
    try:
        _check_private(os.fstat(fd), path, name)
        with os.fdopen(fd, "rb", closefd=False) as file:
            raw = file.read(_MAX_BYTES + 1)
    except OSError as error:
        why = os.strerror(error.errno or errno.EIO)
        raise ConfigError(f"{name}: {path} cannot be read: {why}") from error
    finally:
        os.close(fd)
    if len(raw) > _MAX_BYTES:
        raise ConfigError(f"{name}: {path} is larger than {_MAX_BYTES >> 10} KiB; it is no key")
    return raw


def _check_private(status: os.stat_result, path: Path, name: str) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError(f"{name}: {path} is not a file; {_WRITE}")
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o077:
        raise ConfigError(
            f"{name}: {path} has mode {mode:04o}, so others may read the key; run: chmod 600 {path}"
        )
    if status.st_uid not in (os.geteuid(), 0):
        raise ConfigError(
            f"{name}: {path} belongs to user {status.st_uid}, who could change the key; it must "
            f"belong to user {os.geteuid()} or to root"
        )


def _key_of(text: str, where: str) -> bytes:
    """The key of one line. Errors tell its length only."""
    try:
        if len(text) == 2 * KEY_BYTES:
            return _checked(bytes.fromhex(text), where)
        key = base64.b64decode(text.replace("-", "+").replace("_", "/"), validate=True)
    except (ValueError, binascii.Error):
        key = b""
    if len(key) != KEY_BYTES:
        raise ConfigError(f"{where}: these {len(text)} characters are no key; {_WRITE}")
    return _checked(key, where)


def _checked(key: bytes, where: str) -> bytes:
    if len(set(key)) < KEY_BYTES // 4:
        raise ConfigError(
            f"{where}: this key is not random; `kvrecall pool key FILE` makes a good one"
        )
    return key
