"""The bytes of our events, read by the rules of other routers, which were taken from their sources
(2026-11): llm-d-router's pkg/kvevents/engineadapter/vllm_msgpack.go, and Dynamo's
lib/kv-router/src/zmq_wire. Neither of them runs here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from kvrecall.block import BlockKey, TierName
from kvrecall.events.history import EventHistory
from kvrecall.events.wire import events_of
from kvrecall.pool.changes import Cause, Change, Removed, Restart, Stored

NAMESPACE, OTHER = bytes(range(16)), bytes(range(16, 32))
HASHES = [bytes([one]) * 24 + bytes([255 - one]) * 8 for one in range(3)]
SHORT = [int.from_bytes(one[-8:], "big") for one in HASHES]
KEYS = [BlockKey(NAMESPACE + one) for one in HASHES]
THEIRS = [BlockKey(OTHER + one) for one in HASHES]
HOST, DISK, REMOTE = TierName.HOST, TierName.DISK, TierName.REMOTE
CHANGES: list[Change] = [
    Stored(HOST, KEYS[0], None),
    Stored(HOST, KEYS[1], KEYS[0]),
    Stored(DISK, THEIRS[1], THEIRS[0]),
    Stored(DISK, THEIRS[2], THEIRS[1]),
    Stored(REMOTE, KEYS[0], None),
    Removed(HOST, KEYS[0], Cause.CAPACITY),
    Removed(HOST, KEYS[1], Cause.DROPPED),
    Removed(REMOTE, KEYS[0], Cause.LOST),
    Restart.RESTART,
]
GROUPS = {NAMESPACE: 0, OTHER: 1}
STORE = "0123456789abcdef"


def by_the_service() -> bytes:
    return msgspec.msgpack.encode([1.5, events_of(CHANGES, GROUPS, store=STORE), 0])


def by_an_engine() -> bytes:
    """As vLLM's publisher encodes what the connector gives it."""
    from vllm.distributed.kv_events import KVEventBatch

    from kvrecall.engines.vllm.compat import events

    made = [events.of_vllm(**one) for one in events_of(CHANGES, GROUPS, store=STORE)]
    return msgspec.msgpack.encode(KVEventBatch(ts=1.5, events=made, data_parallel_rank=0))


PAYLOADS = pytest.mark.parametrize("payload", [by_the_service, by_an_engine])


def _is_uint(value: object, bits: int) -> bool:
    return type(value) is int and 0 <= value < 1 << bits


def llm_d(payload: bytes) -> list[tuple[Any, ...]]:
    """A batch is an array of at least time and events, then a rank. An event is a map with ``type``
    and, by name: hashes (uint64, or at most 64 bytes, of which the last eight count); of
    ``BlockStored`` also ``token_ids`` and ``block_size``, without which the batch fails. Unknown
    fields are skipped; a null parent is 0. ``medium`` is the device tier, as it is."""
    ts, events, rank, *_ = msgspec.msgpack.decode(payload)
    assert type(ts) is float
    assert rank is None or type(rank) is int
    read: list[tuple[Any, ...]] = []
    for event in events:
        kind = event["type"]
        assert kind in ("BlockStored", "BlockRemoved", "AllBlocksCleared")
        if kind == "AllBlocksCleared":
            read.append((kind,))
            continue
        hashes = event["block_hashes"]
        assert all(_is_uint(one, 64) for one in hashes)
        group = event.get("group_idx")
        assert group is None or type(group) is int
        if kind == "BlockRemoved":
            read.append((kind, event.get("medium", ""), hashes, group))
            continue
        assert all(_is_uint(one, 32) for one in event["token_ids"])
        assert type(event["block_size"]) is int
        parent = event.get("parent_block_hash")
        assert parent is None or _is_uint(parent, 64)
        read.append((kind, event.get("medium", ""), hashes, parent or 0, group))
    return read


MEDIA = {
    "GPU": "device",
    "CPU": "host",
    "STORAGE": "disk",
    "DISK": "disk",
    "REMOTE": "external",
}


def dynamo(payload: bytes) -> list[tuple[Any, ...]]:
    """A batch is an array of three: time, events, rank. Hashes are 64-bit integers, not bytes;
    ``BlockStored`` needs ``block_hashes``, ``token_ids``, ``block_size``. Events whose locality is
    not LOCAL are dropped; so is a ``BlockStored`` in which a hash comes twice, its parent among
    them. Blocks without tokens are not indexed."""
    ts, events, rank = msgspec.msgpack.decode(payload)
    assert type(ts) is float
    assert rank is None or type(rank) is int
    read: list[tuple[Any, ...]] = []
    for event in events:
        kind = event["type"]
        if kind == "AllBlocksCleared":
            read.append((kind,))
            continue
        hashes = event["block_hashes"]
        assert all(_is_uint(one, 64) for one in hashes)
        assert event.get("locality") in (None, "LOCAL", "REMOTE")
        if event.get("locality") == "REMOTE":
            continue
        tier = MEDIA[event.get("medium", "GPU")]
        if kind == "BlockRemoved":
            read.append((kind, tier, hashes))
            continue
        parent = event.get("parent_block_hash")
        chain = [*hashes] if parent is None else [parent, *hashes]
        assert len(set(chain)) == len(chain)
        size, tokens = event["block_size"], event["token_ids"]
        indexed = hashes if size and len(tokens) >= size * len(hashes) else []
        read.append((kind, tier, indexed))
    return read


@PAYLOADS
def test_llm_d_reads_them(payload: Callable[[], bytes]) -> None:
    assert llm_d(payload()) == [
        ("BlockStored", "CPU", SHORT[:2], 0, 0),
        ("BlockStored", "STORAGE", SHORT[1:], SHORT[0], 1),
        ("BlockStored", "STORAGE", SHORT[:1], 0, 0),
        ("BlockRemoved", "CPU", SHORT[:2], 0),
        ("BlockRemoved", "STORAGE", SHORT[:1], 0),
        ("AllBlocksCleared",),
    ]


@PAYLOADS
def test_dynamo_reads_them_and_indexes_none_without_tokens(payload: Callable[[], bytes]) -> None:
    assert dynamo(payload()) == [
        ("BlockStored", "host", []),
        ("BlockStored", "disk", []),
        ("BlockRemoved", "host", SHORT[:2]),
        ("AllBlocksCleared",),
    ]


def test_a_replay_of_what_is_no_longer_kept_is_read_as_the_events_were() -> None:
    """The device's blocks first, with their tokens, so that the others can be joined."""
    from vllm.distributed.kv_events import BlockStored, KVEventBatch

    device = BlockStored(
        block_hashes=SHORT,
        parent_block_hash=None,
        token_ids=list(range(12)),
        block_size=4,
        lora_id=None,
        medium="GPU",
        lora_name=None,
        group_idx=0,
        kv_cache_spec_kind="full_attention",
        session_id="a session",
    )
    history = EventHistory(1)
    payloads = [
        msgspec.msgpack.encode([1.0, [*events_of(CHANGES[:2], GROUPS)], 0]),
        msgspec.msgpack.encode(KVEventBatch(ts=2.0, events=[device], data_parallel_rank=0)),
        msgspec.msgpack.encode([3.0, [], 0]),
    ]
    for number, payload in enumerate(payloads):
        history.append((number, payload))
    ((_, replayed), _) = history.since(0)
    assert llm_d(replayed) == [
        ("AllBlocksCleared",),
        ("BlockStored", "GPU", SHORT, 0, 0),
        ("BlockStored", "CPU", SHORT[:2], 0, 0),
    ]
    assert dynamo(replayed) == [
        ("AllBlocksCleared",),
        ("BlockStored", "device", SHORT),
        ("BlockStored", "host", []),
    ]
    assert msgspec.msgpack.decode(replayed, type=KVEventBatch).events[1].token_ids == [*range(12)]


def test_both_publishers_say_the_same() -> None:
    def plain(payload: bytes) -> Any:
        ts, events, rank = msgspec.msgpack.decode(payload)
        return ts, [{k: v for k, v in one.items() if v is not None} for one in events], rank

    assert plain(by_the_service()) == plain(by_an_engine())
