"""The wire format of KV events, which is vLLM's (vllm/distributed/kv_events.py).

A batch is MessagePack of ``[seconds, events, data-parallel rank]``. Publishers number their batches
from 0. An event is a map with ``type``: ``BlockStored``, ``BlockRemoved`` or ``AllBlocksCleared``,
which voids all that was published before, in every tier.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from kvrecall.block import NAMESPACE_BYTES, BlockKey, TierName, is_tail
from kvrecall.pool.changes import Change, Restart, Stored

Event = dict[str, Any]
Batch = tuple[int, bytes]
"""A batch's number and its bytes."""
Hash = int | bytes
"""A block hash as engines publish it: an integer of 64 bits, or all of its bytes."""
BlockHash = int
"""The last 64 bits of vLLM's block hash, as vLLM publishes it by default."""

STORED, REMOVED, CLEARED = "BlockStored", "BlockRemoved", "AllBlocksCleared"
DEVICE_MEDIUM = "GPU"
PLACE = ("medium", "locality", "ownership", "group_idx")
"""Fields that say where the blocks of an event are."""
_MEDIA = {TierName.HOST: "CPU", TierName.DISK: "STORAGE", TierName.REMOTE: "STORAGE"}
_TIERS = {
    DEVICE_MEDIUM: TierName.DEVICE,
    "CPU": TierName.HOST,
    "STORAGE": TierName.DISK,
    "DISK": TierName.DISK,
}
_MOST = 4096  # blocks of an event


def short_hash(published: Hash) -> BlockHash:
    """The last 64 bits of a hash."""
    if isinstance(published, bytes):
        return int.from_bytes(published[-8:], "big")
    return published & ((1 << 64) - 1)


# -- writing --------------------------------------------------------------------------------


def encode(events: Sequence[Event], rank: Any = 0) -> bytes:
    """A batch of this moment."""
    return msgspec.msgpack.encode([time.time(), events, rank])


def events_of(
    changes: Iterable[Change],
    groups: Mapping[bytes, int],
    abandoned: Mapping[bytes, int] | None = None,
    store: str | None = None,
    hash_of: Callable[[bytes], Hash] = short_hash,
) -> list[Event]:
    """The events of a pool's changes, as few as their order allows: a chain stored in one tier is
    one event, and so are removals that follow each other.

    Leaves out unfinished blocks, and those of namespaces that are in neither mapping; ``groups``:
    the KV group of each. Blocks of ``abandoned`` namespaces are removed, whatever their change was.
    ``store``: names the remote store. ``hash_of``: a hash as it is published.
    """
    events: list[Event] = []
    hashes: list[Hash] = []  # of the last event
    goes_on: tuple[bool, TierName, bytes] | None = None  # what a further block of it has
    last: BlockKey | None = None
    for change in changes:
        if isinstance(change, Restart):
            events.append({"type": CLEARED})
            goes_on = None
            continue
        digest = change.key[:NAMESPACE_BYTES]
        parent = change.parent if isinstance(change, Stored) else None
        is_stored, group = isinstance(change, Stored), groups.get(digest)
        if group is None and abandoned:
            is_stored, group = False, abandoned.get(digest)
        if group is None or is_tail(change.key):
            continue
        kind = is_stored, change.tier, digest
        if kind != goes_on or len(hashes) >= _MOST or (is_stored and parent != last):
            hashes, goes_on = [], kind
            event: Event = {"type": STORED if is_stored else REMOVED, "block_hashes": hashes}
            if is_stored:
                is_inner = parent is not None and parent[:NAMESPACE_BYTES] == digest
                above = hash_of(parent[NAMESPACE_BYTES:]) if parent and is_inner else None
                event |= {"parent_block_hash": above, **_WITHOUT_TOKENS}
            events.append(event | _place(change.tier, digest, group, store))
        hashes.append(hash_of(change.key[NAMESPACE_BYTES:]))
        last = change.key
    return events


_WITHOUT_TOKENS = {"token_ids": [], "block_size": 0, "lora_id": None, "lora_name": None}
"""The pool does not know the tokens: as in the events of vLLM's own offloading, there are none."""


def _place(tier: TierName, digest: bytes, group: int, store: str | None) -> Event:
    place = {"medium": _MEDIA[tier], "group_idx": group, "locality": "LOCAL"}
    if tier is TierName.REMOTE:
        place["locality"] = "REMOTE"
        if store is not None:  # equal for all engines and hosts that can recall these blocks
            place["ownership"] = f"{store}/{digest.hex()[:8]}"
    return place


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
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None

    @property
    def salt(self) -> tuple[bool, str | None]:
        """Whether the hash of the first block is of its tokens and a salt alone, and the salt."""
        keys = (self.extra_keys or [None])[0]
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


def decode(payload: bytes) -> EventBatch:
    """Raises msgspec.DecodeError if it is no batch."""
    try:
        batch = _batches.decode(payload)
    except RecursionError:
        raise msgspec.DecodeError("nested too deep") from None
    if not math.isfinite(batch.ts):
        raise msgspec.ValidationError("no time")
    return batch


def tier_of_event(event: BlockStored | BlockRemoved) -> TierName | None:
    """The tier of an event's blocks. None if its medium is unknown."""
    if event.locality == "REMOTE":
        return TierName.REMOTE
    return TierName.DEVICE if event.medium is None else _TIERS.get(event.medium.upper())
