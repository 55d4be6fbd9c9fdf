"""What the pool's process and the process of Mooncake's client say to each other.

Over a pair of sockets for each call that is under way: a length and a MessagePack array, one
request, then one reply. KV bytes do not travel here: both processes map the arena.
"""

from __future__ import annotations

import socket
import struct
from typing import Any

import msgspec

_LENGTH = struct.Struct("<I")

Piece = tuple[int, int] | bytes | int
"""Of a value: offset and length in the arena; or bytes to put; or how many bytes to get."""


HOT_BYTES = 1 << 20
"""Of small pieces in one request: they lie in memory of the client that Mooncake knows."""


class Orders(msgspec.Struct, frozen=True):
    """What the client's process is started with. ``parent``: the process it ends with. ``arena``:
    file descriptor, offset and size. ``wires``: file descriptors, one per thread. ``at_a_time``:
    calls of Mooncake of one direction; further ones wait in that process, ready to begin."""

    parent: int
    arena: tuple[int, int, int]
    wires: list[int]
    setup: dict[str, str]
    at_a_time: int


class Request(msgspec.Struct, frozen=True, array_like=True):
    """``op``: exists, put, get, remove or close. ``values`` has the pieces of each name."""

    op: str
    names: list[str]
    values: list[list[Piece]] = []


class Reply(msgspec.Struct, frozen=True, array_like=True):
    """Mooncake's code for each name, the small pieces that were got, or what went wrong."""

    codes: list[int]
    smalls: list[list[bytes]] = []
    error: str = ""


_ENCODER = msgspec.msgpack.Encoder()
_REQUEST: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_REPLY: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def send(wire: socket.socket, message: Request | Reply) -> None:
    body = _ENCODER.encode(message)
    wire.sendall(_LENGTH.pack(len(body)) + body)


def receive_request(wire: socket.socket) -> Request | None:
    """None: the other side is gone."""
    body = _receive(wire)
    return None if body is None else _REQUEST.decode(body)


def receive_reply(wire: socket.socket) -> Reply | None:
    """None: the other side is gone. Raises TimeoutError."""
    body = _receive(wire)
    return None if body is None else _REPLY.decode(body)


def _receive(wire: socket.socket) -> bytearray | None:
    head = _exactly(wire, _LENGTH.size)
    return None if head is None else _exactly(wire, _LENGTH.unpack(head)[0])


def _exactly(wire: socket.socket, count: int) -> bytearray | None:
    data = bytearray(count)
    view: Any = memoryview(data)
    while view:
        try:
            got = wire.recv_into(view)
        except (ConnectionError, BrokenPipeError):
            return None
        if got == 0:
            return None
        view = view[got:]
    return data
