"""Reads ZeroMQ's wire protocol (ZMTP 3.0 without security), from a peer that is not trusted.

libzmq bounds the size of a frame and the number of messages that wait, but not the frames of one
message: a publisher that never ends one fills the memory of its reader. Here a message is bounded
as a whole, and what is not asked for waits at the peer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

MOST_BYTES = 8 << 20
"""Of a message."""

_MOST_FRAMES = 8
_HANDSHAKE_S = 5.0
_SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
_MECHANISM = b"NULL".ljust(20, b"\0")
_GREETING = _SIGNATURE + b"\3\0" + _MECHANISM + bytes(32)
_MORE, _LONG, _COMMAND = 1, 2, 4


class ZmtpConnection:
    """A connection to a socket. Errors are OSErrors: of the network, or because the peer does not
    keep to the protocol."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def send(self, *frames: bytes) -> None:
        """A message of short frames."""
        for place, frame in enumerate(frames, start=1):
            self._write(frame, _MORE if place < len(frames) else 0)
        await self._writer.drain()

    async def receive(self) -> list[bytes]:
        """The frames of the next message."""
        frames: list[bytes] = []
        room = MOST_BYTES
        while True:
            flags, body = await self._frame(room)
            room -= len(body)
            if flags & _COMMAND:
                if body.startswith(b"\4PING"):
                    self._write(b"\4PONG" + body[7:23], _COMMAND)
                    await self._writer.drain()
                await asyncio.sleep(0)  # there may be more of them at once
                continue
            frames.append(body)
            if len(frames) > _MOST_FRAMES:
                raise ConnectionAbortedError(f"a message of more than {_MOST_FRAMES} frames")
            if not flags & _MORE:
                return frames

    async def shake_hands(self, kind: bytes) -> None:
        """``kind``: of socket that this is: SUB or DEALER."""
        self._writer.write(_GREETING)
        greeting = await self._read(len(_GREETING))
        if greeting[:1] + greeting[9:10] != b"\xff\x7f" or greeting[10] < 3:
            raise ConnectionAbortedError("not a ZeroMQ socket")
        if greeting[12:32] != _MECHANISM:
            raise ConnectionAbortedError("a ZeroMQ socket that asks for a key")
        self._write(b"\5READY\x0bSocket-Type" + len(kind).to_bytes(4, "big") + kind, _COMMAND)
        flags, body = await self._frame(MOST_BYTES)
        if not flags & _COMMAND or not body.startswith(b"\5READY"):
            raise ConnectionAbortedError("a ZeroMQ socket of another kind")

    def _write(self, frame: bytes, flags: int) -> None:
        self._writer.write(bytes((flags, len(frame))) + frame)

    async def _frame(self, room: int) -> tuple[int, bytes]:
        flags = (await self._read(1))[0]
        size = int.from_bytes(await self._read(8 if flags & _LONG else 1), "big")
        if size > room:
            raise ConnectionAbortedError(f"a message of more than {MOST_BYTES} bytes")
        return flags, await self._read(size)

    async def _read(self, count: int) -> bytes:
        try:
            return await self._reader.readexactly(count)
        except asyncio.IncompleteReadError:
            raise ConnectionResetError("closed by the peer") from None


@asynccontextmanager
async def connection(host: str, port: int, kind: bytes) -> AsyncIterator[ZmtpConnection]:
    """A connection while the context is open. Raises OSError, a TimeoutError after five seconds."""
    async with asyncio.timeout(_HANDSHAKE_S):
        reader, writer = await asyncio.open_connection(host, port)
    try:
        made = ZmtpConnection(reader, writer)
        async with asyncio.timeout(_HANDSHAKE_S):
            await made.shake_hands(kind)
        yield made
    finally:
        writer.transport.abort()
