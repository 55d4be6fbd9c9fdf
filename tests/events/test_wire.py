"""The wire format, as a pool service and an engine write it. What other routers read was taken from
their sources (2026-11): llm-d-router's pkg/kvevents/engineadapter/vllm_msgpack.go, and
Dynamo's lib/kv-router/src/zmq_wire."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from kvrecall.block import BlockKey, TierName
from kvrecall.events.history import EventHistory
from kvrecall.events.publisher import events_of
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
ABOUT = {"block_size": 16, "kv_cache_spec_kind": "full_attention"}
FIELDS = {**ABOUT, "lora_id": None, "lora_name": None}
GROUPS = {NAMESPACE: (0, FIELDS), OTHER: (1, FIELDS)}
STORE = "0123456789abcdef"


def by_the_service() -> bytes:
    return msgspec.msgpack.encode([1.5, events_of(CHANGES, GROUPS, store=STORE), 0])


def by_an_engine() -> bytes:
    """As vLLM's publisher encodes what the connector gives it."""
    from vllm.distributed.kv_events import KVEventBatch

    from kvrecall.engines.vllm.compat import events

    made = [events.of_vllm(**one) for one in events_of(CHANGES, GROUPS, store=STORE)]
    return msgspec.msgpack.encode(KVEventBatch(ts=1.5, events=made, data_parallel_rank=0))


def plain(payload: bytes) -> list[dict[str, Any]]:
    """The events of a batch, without fields that say nothing."""
    ts, events, rank = msgspec.msgpack.decode(payload)
    assert (ts, rank) == (1.5, 0)
    return [{k: v for k, v in one.items() if v is not None} for one in events]


@pytest.mark.parametrize("payload", [by_the_service, by_an_engine])
def test_what_is_published(payload: Callable[[], bytes]) -> None:
    """llm-d-router drops a ``BlockStored`` of a kind it does not know, and, recovering, a batch
    with any locality; Dynamo reads hashes only as integers of 64 bits, and no events of others."""
    stored = {"type": "BlockStored", "token_ids": [], **ABOUT}
    gone = {"type": "BlockRemoved"}
    host = {"medium": "CPU", "group_idx": 0}
    disk = {"medium": "STORAGE", "group_idx": 1}
    remote = {"medium": "STORAGE", "locality": "REMOTE", "group_idx": 0}
    remote |= {"ownership": f"{STORE}/{NAMESPACE.hex()[:8]}"}
    assert plain(payload()) == [
        stored | host | {"block_hashes": SHORT[:2]},
        stored | disk | {"block_hashes": SHORT[1:], "parent_block_hash": SHORT[0]},
        stored | remote | {"block_hashes": SHORT[:1]},
        gone | host | {"block_hashes": SHORT[:2]},
        gone | remote | {"block_hashes": SHORT[:1]},
        {"type": "AllBlocksCleared"},
    ]


def test_hashes_may_be_published_whole() -> None:
    first, *_ = events_of(CHANGES[2:4], GROUPS, hash_of=bytes)
    assert (first["parent_block_hash"], first["block_hashes"]) == (HASHES[0], HASHES[1:])


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
    cleared, first, second = msgspec.msgpack.decode(replayed, type=KVEventBatch).events
    assert type(cleared).__name__ == "AllBlocksCleared"
    assert (first.medium, first.block_hashes, first.token_ids) == ("GPU", SHORT, [*range(12)])
    assert (second.medium, second.block_hashes) == ("CPU", SHORT[:2])
