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

_MOST_BYTES = 512 << 20  # of blocks whose content is known
_BLOCK_BYTES = 512  # of each, besides its tokens and keys
_MOST_BARE = 1 << 20  # blocks that wait for their content
_MOST_ABOUTS = 4096
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

    @property
    def nbytes(self) -> int:
        """About its memory: what may be long counts 16-fold, as Python's objects are larger."""
        varied = 0
        if self.extra is not None or isinstance(self.parent, bytes):
            varied = len(msgspec.msgpack.encode((self.parent, self.extra)))
        return _BLOCK_BYTES + len(self.tokens) + 16 * varied


class Abouts:
    """One object for all events in which the fields are equal that are not their blocks'."""

    def __init__(self, without: tuple[str, ...] = (), longest: int = 1 << 20) -> None:
        """``longest``: bytes of such fields; events with more are passed over."""
        self._known: dict[bytes, Mapping[str, Any]] = {}
        self._without = {*_OF_BLOCKS, *_OF_REQUEST, *without}
        self._longest = longest

    def contents(self, event: Mapping[str, Any]) -> Iterator[tuple[Hash, BlockContent]]:
        """The blocks of a ``BlockStored``."""
        hashes, size = event["block_hashes"], event.get("block_size") or 0
        tokens, extra = event.get("token_ids") or (), event.get("extra_keys")
        told = bool(size) and len(tokens) >= size * len(hashes)
        fields = {k: v for k, v in event.items() if k not in self._without}
        packed = msgspec.msgpack.encode(fields)
        if len(packed) > self._longest:
            return
        if len(self._known) >= _MOST_ABOUTS:
            self._known.clear()
        about = self._known.setdefault(packed, fields)
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
        self._abouts = Abouts(without=PLACE, longest=_BLOCK_BYTES)
        self._known: OrderedDict[Name, BlockContent] = OrderedDict()
        self._bytes = 0  # of these
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
            if not (content.tokens and isinstance(content.parent, int | bytes | None)):
                continue
            name = group, short_hash(block)
            with self._lock:
                if (before := self._known.pop(name, None)) is not None:
                    self._bytes -= before.nbytes
                self._known[name] = content
                self._bytes += content.nbytes
                if places := self._bare.pop(name, None):
                    self._completed.setdefault(name, {}).update(places)
                while self._bytes > _MOST_BYTES:
                    self._bytes -= self._known.popitem(last=False)[1].nbytes

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
            if known is None and (name in self._bare or len(self._bare) < _MOST_BARE):
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
