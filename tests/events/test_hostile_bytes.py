"""What publishers of events and readers of replays may send: anything."""

from __future__ import annotations

import asyncio
import tracemalloc
from typing import Any

import msgspec
from hypothesis import example, given
from hypothesis import strategies as st
from support.hostile import bounded, fuzz, hostile, outcome

from kvrecall.events.holdings import TIERS, Holdings
from kvrecall.events.subscriber import _AT_ONCE, BatchOutcome, EventReader
from kvrecall.events.wire import (
    _GREETING,
    DEVICE_MEDIUM,
    EventBatch,
    ZmtpConnection,
    decode,
)

PACK = msgspec.msgpack.encode


def stored(**more: Any) -> dict[str, Any]:
    return {"type": "BlockStored", "block_hashes": [1, b"2" * 32, 3], "block_size": 2, **more}


EVENTS: list[dict[str, Any]] = [
    stored(token_ids=[1, 2, 3, 4, 5, 6], parent_block_hash=None, extra_keys=[["salt"], None, None]),
    stored(medium="CPU", group_idx=0, ownership="store/1", locality="REMOTE", token_ids=[1] * 9),
    stored(kv_cache_spec_kind="sliding_window", group_idx=1, medium=DEVICE_MEDIUM),
    {"type": "BlockRemoved", "block_hashes": [3, 2**64 - 1, -1], "medium": "STORAGE"},
    {"type": "AllBlocksCleared"},
]
BATCHES = [PACK([1.5, EVENTS[at:], 0]) for at in range(len(EVENTS))]


def applied(payloads: list[bytes]) -> Holdings:
    reader = EventReader(Holdings())
    for number, payload in enumerate(payloads):
        verdict = reader.take(number, payload)
        if verdict is not BatchOutcome.APPLIED:
            assert verdict is BatchOutcome.UNREADABLE or number > reader.last + 1
            reader.skip_to(number)
    return reader.holdings


@fuzz()
@given(hostile(*BATCHES))
def test_a_batch_is_read_or_refused(payload: bytes) -> None:
    read = outcome(decode, payload, msgspec.DecodeError)
    assert isinstance(read, EventBatch | msgspec.DecodeError)


@fuzz(100)
@given(st.lists(hostile(*BATCHES), max_size=4))
def test_what_is_known_adds_up_whatever_was_published(payloads: list[bytes]) -> None:
    with bounded(sum(map(len, payloads))):
        known = applied(payloads)
    assert len(known) == len(set().union(*(known.hashes(tier) for tier in TIERS)))
    assert {known.blocks(tier) - len(known.hashes(tier)) for tier in TIERS} == {0}


def packed(event: str, field: str, value: bytes) -> bytes:
    """An event with a field whose MessagePack is ``value``."""
    head = PACK({"type": event, "block_hashes": []})
    return bytes([head[0] + 1]) + head[1:] + PACK(field) + value


def test_a_large_batch_takes_little_room_and_turns() -> None:
    """It took 64 bytes of memory for each of its own, of values that nothing reads, and events that
    move no block took one turn of the event loop."""
    count = 1 << 20
    for value in (b"\xdd" + count.to_bytes(4, "big") + b"\x90" * count, b"\xc6" + bytes(4)):
        event = packed("BlockStored", "extra_keys", value)
        payload = b"\x93\xca\0\0\0\0\x91" + event + b"\0"
        tracemalloc.start()
        applied([payload])
        assert tracemalloc.get_traced_memory()[1] < 4 * len(payload) + (1 << 20)
        tracemalloc.stop()
    for event in (EVENTS[4], stored(block_hashes=[]), stored(medium="of no kind")):
        _, parts = EventReader(Holdings()).begin(0, PACK([1.5, [event] * _AT_ONCE, 0]))
        assert len(list(parts)) >= 8, event


class Sent(asyncio.Transport):
    """A writer's other end: forgets what is written."""

    def write(self, data: Any) -> None:
        pass

    def is_closing(self) -> bool:
        return False

    def close(self) -> None:
        pass


READY = b"\5READY\x0bSocket-Type\0\0\0\3PUB"
PEER = _GREETING + b"\4" + bytes([len(READY)]) + READY + b"\1\0\1\x08" + bytes(8) + b"\0\x03abc"


@fuzz(200)
@given(hostile(PEER, PEER + b"\4\x07\4PING\0\0", PEER + b"\2" + bytes(7) + b"\x05hello"))
@example(PEER + b"\2" + b"\xff" * 8)
@example(PEER + b"\1\0" * 2000)
def test_a_peer_s_messages_are_bounded(stream: bytes) -> None:
    async def reads() -> list[bytes] | OSError:
        reader = asyncio.StreamReader()
        reader.feed_data(stream)
        reader.feed_eof()
        protocol = asyncio.StreamReaderProtocol(reader)
        loop = asyncio.get_running_loop()
        made = ZmtpConnection(reader, asyncio.StreamWriter(Sent(), protocol, reader, loop))
        try:
            await made.shake_hands(b"SUB")
            return await made.receive()
        except OSError as error:
            return error

    with bounded(len(stream)):
        read = asyncio.run(reads())
    assert isinstance(read, OSError) or sum(map(len, read)) < len(stream)
