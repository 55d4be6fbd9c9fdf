"""Attacks on what leaves the host: Mooncake's ports, object stores, folders of other users."""

from __future__ import annotations

import json
import os
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvrecall.block import BlockKey, Namespace
from kvrecall.config import RecallSettings
from kvrecall.errors import ConfigError
from kvrecall.lab.hostile.attack import GotIn, NotHere, attack
from kvrecall.lab.masters import Master
from kvrecall.pool.base import RecallState
from kvrecall.pool.pool import Pool
from kvrecall.testing.blocks import chain, namespace, wait_until

_NAMESPACE = namespace()
_NBYTES = 64 << 10
_MARK = b"another tenant's KV, which no store was ever given. "
_DATA_HEADER = struct.Struct("<QQB7x")
_READ, _WRITE = 0, 1
_METADATA = 1  # a request to the handshake port


class _Victim:
    """A pool over Mooncake whose memory holds a block that was never put to the store, and what
    a stranger on the network finds out about it."""

    def __init__(self, pool: Pool, key: BlockKey, offset: int) -> None:
        self.pool = pool
        self.key = key
        self._offset = offset
        ports = _listening(_client_of_this())
        self.handshake, self.data = _told_apart(ports)

    @property
    def block(self) -> bytes:
        return bytes(self.pool.arena.view(self._offset, _NBYTES))

    def buffers(self) -> list[tuple[int, int]]:
        """Address and length of all memory that the client tells of to anyone who asks."""
        told = _metadata(self.handshake)["buffers"]
        return [(int(buffer["addr"]), int(buffer["length"])) for buffer in told]


@contextmanager
def _victim(folder: Path) -> Iterator[_Victim]:
    master = _master(folder)
    settings = {
        "host_size": "32MiB",
        "remote_write": "off",
        "remote": {"kind": "mooncake", **master.options(0), "allow_plaintext": True},
    }
    try:
        with Pool.open(RecallSettings.from_mapping(settings).pool) as pool:
            pool.register(_NAMESPACE, _NBYTES)
            [key] = chain(_NAMESPACE, 1, "secret")
            [reservation] = pool.reserve([key])
            text = _MARK * (_NBYTES // len(_MARK) + 1)
            pool.arena.view(reservation.offset, _NBYTES)[:] = text[:_NBYTES]
            pool.commit([key])
            absent = chain(_NAMESPACE, 1, "absent")
            wait_until(lambda: not pool.find(absent).pending)  # the client is connected
            yield _Victim(pool, key, reservation.offset)
    finally:
        master.kill()


def _master(folder: Path) -> Master:
    try:
        import mooncake.store  # noqa: F401
    except (ImportError, OSError) as error:
        raise NotHere(f"Mooncake does not run here: {error}") from None
    master = Master(folder / "master.log")
    master.start()
    return master
