"""The wire format of KV events, which is vLLM's (vllm/distributed/kv_events.py), and ZeroMQ's.

A batch is MessagePack of ``[seconds, events, data-parallel rank]``. Publishers number their batches
from 0. An event is a map with ``type``: ``BlockStored``, ``BlockRemoved`` or ``AllBlocksCleared``,
which voids all that was published before, in every tier.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from kvrecall.block import TierName

Event = dict[str, Any]
Batch = tuple[int, bytes]
"""A batch's number and its bytes."""
Hash = int | bytes
"""A block hash as engines publish it: an integer of 64 bits, or all of its bytes."""
BlockHash = int
"""The last 64 bits of vLLM's block hash, as vLLM publishes it by default."""

STORED, REMOVED, CLEARED = "BlockStored", "BlockRemoved", "AllBlocksCleared"
DEVICE_MEDIUM = "GPU"
MEDIA = {TierName.HOST: "CPU", TierName.DISK: "STORAGE", TierName.REMOTE: "STORAGE"}
_TIERS = {
    DEVICE_MEDIUM: TierName.DEVICE,
    "CPU": TierName.HOST,
    "STORAGE": TierName.DISK,
    "DISK": TierName.DISK,
}


def short_hash(published: Hash) -> BlockHash:
    """The last 64 bits of a hash."""
    if isinstance(published, bytes):
        return int.from_bytes(published[-8:], "big")
    return published & ((1 << 64) - 1)


# -- writing --------------------------------------------------------------------------------


def encode(events: Sequence[Event], rank: Any = 0) -> bytes:
    """A batch of this moment."""
    return msgspec.msgpack.encode([time.time(), events, rank])


# -- reading --------------------------------------------------------------------------------


class BlockStored(msgspec.Struct, tag=STORED, gc=False):
    """Blocks are in a tier, each the next one's parent."""

    block_hashes: list[Hash]
    parent_block_hash: Hash | None = None
    token_ids: msgspec.Raw = msgspec.Raw()
    block_size: int = 0
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: msgspec.Raw = msgspec.Raw()
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None

    @property
    def salt(self) -> tuple[bool, str | None]:
        """Whether the hash of the first block is of its tokens and a salt alone, and the salt."""
        keys = (_extra_keys.decode(self.extra_keys or b"\xc0") or [None])[0]
        if self.lora_name is not None or (keys and (len(keys) > 1 or not isinstance(keys[0], str))):
            return False, None
        return True, keys[0] if keys else None


class BlockRemoved(msgspec.Struct, tag=REMOVED, gc=False):
    """Blocks have left a tier."""

    block_hashes: list[Hash]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(msgspec.Struct, tag=CLEARED):
    """All that was published before is void."""


class EventBatch(msgspec.Struct, array_like=True):
    """Fields that only a newer version of vLLM knows are skipped."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


_batches = msgspec.msgpack.Decoder(EventBatch)
_extra_keys = msgspec.msgpack.Decoder(list[list[Any] | None] | None)


def decode(payload: bytes) -> EventBatch:
    """Raises msgspec.DecodeError if it is no batch."""
    try:
        batch = _batches.decode(payload)
    except (RecursionError, UnicodeDecodeError) as error:
        raise msgspec.DecodeError(f"nested too deep, or no text: {error}") from None
    if not math.isfinite(batch.ts):
        raise msgspec.ValidationError("no time")
    return batch


def tier_of_event(event: BlockStored | BlockRemoved) -> TierName | None:
    """The tier of an event's blocks. None if its medium is unknown."""
    if event.locality == "REMOTE":
        return TierName.REMOTE
    return TierName.DEVICE if event.medium is None else _TIERS.get(event.medium.upper())


MOST_BYTES = 8 << 20
"""Of a message."""

_MOST_FRAMES = 8
_HANDSHAKE_S = 5.0
_SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
_MECHANISM = b"NULL".ljust(20, b"\0")
_GREETING = _SIGNATURE + b"\3\0" + _MECHANISM + bytes(32)
_MORE, _LONG, _COMMAND = 1, 2, 4


class ZmtpConnection:
    """A connection to a socket by ZeroMQ's wire protocol (ZMTP 3.0 without security), to a peer
    that is not trusted. Errors are OSErrors: of the network, or because the peer does not keep to
    the protocol.

    libzmq bounds the size of a frame and the number of messages that wait, but not the frames of
    one message: a publisher that never ends one fills the memory of its reader. Here a message is
    bounded as a whole, and what is not asked for waits at the peer."""

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
async def zmtp_connection(host: str, port: int, kind: bytes) -> AsyncIterator[ZmtpConnection]:
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
