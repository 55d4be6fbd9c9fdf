"""What blocks contain: tokens and keys, which a pool does not know, as engines report them with the
events of their devices."""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from kvrecall.block import BlockKey, TierName
from kvrecall.events.wire import DEVICE_MEDIUM, STORED, BlockHash, Event, Hash, short_hash
from kvrecall.pool.changes import Cause, Change, Removed, Stored

_MOST_BLOCKS = 1 << 20  # whose content is known: some 300 MB; and as many that wait for theirs
_OF_BLOCKS = ("type", "block_hashes", "parent_block_hash", "token_ids", "extra_keys")
_OF_REQUEST = ("session_id",)  # fields that say why a block was reported, not what it is
PLACE = ("medium", "locality", "ownership", "group_idx")
"""Fields that say where the blocks of an event are."""

Name = tuple[int, BlockHash]
"""A block of any tier: its KV group, and its short hash."""


class BlockContent(msgspec.Struct, frozen=True, gc=False):
    """A block as an event reported it. ``about``: the fields that it shares with others of its
    event; ``tokens``: 32 bits each, empty if they were not told. Not seen by the garbage
    collector: an engine's steps would wait while it looks at each."""

    parent: Hash | None
    about: Mapping[str, Any]
    tokens: bytes = b""
    extra: Any = None


class Abouts:
    """One object for all events in which the fields are equal that are not their blocks'."""

    def __init__(self, without: tuple[str, ...] = ()) -> None:
        self._known: dict[bytes, Mapping[str, Any]] = {}
        self._without = {*_OF_BLOCKS, *_OF_REQUEST, *without}

    def contents(self, event: Mapping[str, Any]) -> Iterator[tuple[Hash, BlockContent]]:
        """The blocks of a ``BlockStored``."""
        hashes, size = event["block_hashes"], event.get("block_size") or 0
        tokens, extra = event.get("token_ids") or (), event.get("extra_keys")
        told = bool(size) and len(tokens) >= size * len(hashes)
        fields = {k: v for k, v in event.items() if k not in self._without}
        about = self._known.setdefault(msgspec.msgpack.encode(fields), fields)
        parent = event.get("parent_block_hash")
        for at, block in enumerate(hashes):
            part = array("I", tokens[at * size : (at + 1) * size]).tobytes() if told else b""
            yield block, BlockContent(parent, about, part, extra[at] if extra else None)
            parent = block

    def clear(self) -> None:
        self._known.clear()


class Contents:
    """The contents of blocks, and which blocks were published without them. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._abouts = Abouts(without=PLACE)
        self._known: OrderedDict[Name, BlockContent] = OrderedDict()
        self._bare: dict[Name, dict[tuple[TierName, BlockKey], Stored]] = {}
        self._completed: dict[Name, dict[tuple[TierName, BlockKey], Stored]] = {}

    def learn(self, payload: bytes) -> None:
        """From a batch of an engine: what its device has stored. Ignores bytes that are none."""
        try:
            for event in msgspec.msgpack.decode(payload)[1]:
                if event["type"] == STORED and event.get("medium") in (None, DEVICE_MEDIUM):
                    self._learn(event)
        except (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError):
            return

    def _learn(self, event: Event) -> None:
        group = event.get("group_idx") or 0
        for block, content in self._abouts.contents(event):
            if not content.tokens:
                continue
            name = group, short_hash(block)
            with self._lock:
                self._known[name] = content
                self._known.move_to_end(name)
                if places := self._bare.pop(name, None):
                    self._completed.setdefault(name, {}).update(places)
                if len(self._known) > _MOST_BLOCKS:
                    self._known.popitem(last=False)

    def completed(self) -> list[Change]:
        """Blocks that were published without content, and whose content is known by now: each
        leaves, and is stored again, because some readers count how often a block was stored."""
        with self._lock:
            completed, self._completed = self._completed, {}
        again = (one for places in completed.values() for one in places.values())
        return [change for one in again for change in (Removed(*one[:2], Cause.LOST), one)]

    def stored(self, name: Name, change: Stored) -> BlockContent | None:
        """What is known of a block that is published."""
        with self._lock:
            known = self._known.get(name)
            if known is None and (name in self._bare or len(self._bare) < _MOST_BLOCKS):
                self._bare.setdefault(name, {})[change.tier, change.key] = change
            return known

    def removed(self, name: Name, change: Change) -> None:
        """A block has left a tier."""
        if isinstance(change, Stored | Removed):
            with self._lock:
                for waiting in (self._bare, self._completed):
                    places = waiting.get(name, {})
                    if places.pop((change.tier, change.key), None) and not places:
                        del waiting[name]

    def cleared(self) -> None:
        """Nothing counts as published any more."""
        with self._lock:
            self._bare.clear()
            self._completed.clear()
