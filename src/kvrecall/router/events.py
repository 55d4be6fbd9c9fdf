"""Follows the KV events of publishers, of engines and of pool services, in vLLM's wire format.

A publisher has a PUB socket with batches numbered from 0, and a ROUTER socket that repeats its last
batches. The router asks it for all that it still has when it begins, and for what is missing when a
number was left out.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from kvrecall.block import TierName
from kvrecall.router.holdings import Holdings, short_hash

log = logging.getLogger("kvrecall.router")

_REPLAY_S = 5.0  # without a further batch
_BUSY_S = 60.0  # of a publisher that is there: it makes a large replay, or another reader's
_RETRY_S = 2.0
_LOOK_MS = 500
_AT_ONCE = 256  # replayed batches applied while nothing else runs
_QUEUED = 100_000  # batches that wait to be read: the publisher's own limit
_MEDIA = {
    "GPU": TierName.DEVICE,
    "CPU": TierName.HOST,
    "STORAGE": TierName.DISK,
    "DISK": TierName.DISK,
}
_Hash = int | bytes


class _BlockStored(msgspec.Struct, tag="BlockStored", gc=False):
    block_hashes: list[_Hash]
    parent_block_hash: _Hash | None = None
    token_ids: list[Any] = []
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


class _BlockRemoved(msgspec.Struct, tag="BlockRemoved", gc=False):
    block_hashes: list[_Hash]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class _AllBlocksCleared(msgspec.Struct, tag="AllBlocksCleared"):
    pass


class _StoredRow(_BlockStored, tag="BlockStored", array_like=True, gc=False):
    """As some versions of vLLM publish it: an array in place of a map."""


class _RemovedRow(_BlockRemoved, tag="BlockRemoved", array_like=True, gc=False):
    pass


class _ClearedRow(_AllBlocksCleared, tag="AllBlocksCleared", array_like=True):
    pass


class _Batch(msgspec.Struct, array_like=True):
    """vLLM's ``EventBatch``; fields that only a newer version knows are skipped."""

    ts: float
    events: list[_BlockStored | _BlockRemoved | _AllBlocksCleared]
    data_parallel_rank: int | None = None


class _BatchOfRows(_Batch, array_like=True):
    events: list[_StoredRow | _RemovedRow | _ClearedRow]  # type: ignore[assignment]


_maps, _rows = msgspec.msgpack.Decoder(_Batch), msgspec.msgpack.Decoder(_BatchOfRows)


def _decode(payload: bytes) -> _Batch:
    """Raises msgspec.DecodeError if it is no batch."""
    try:
        return _maps.decode(payload)
    except msgspec.ValidationError:
        return _rows.decode(payload)


def _tier_of(medium: str | None, locality: str | None) -> TierName | None:
    if locality == "REMOTE":
        return TierName.REMOTE
    return TierName.DEVICE if medium is None else _MEDIA.get(medium.upper())


def _salt_of(event: _BlockStored) -> tuple[bool, str | None]:
    """Whether the hash of an event's first block is of its tokens and a salt alone, and the
    salt."""
    keys = (event.extra_keys or [None])[0]
    if event.lora_name is not None or (keys and (len(keys) > 1 or not isinstance(keys[0], str))):
        return False, None
    return True, keys[0] if keys else None


# -- batches in order -----------------------------------------------------------------------


class Verdict(enum.Enum):
    """What became of a batch."""

    APPLIED = "applied"
    KNOWN = "known"  # it was applied before
    GAP = "gap"  # batches before it are missing
    UNREADABLE = "unreadable"


class Reader:
    """Applies the batches of one publisher to its holdings, in order and each once.

    What is known is never more than what the publisher held after the last batch that was applied:
    where batches are lost for good, or the publisher has started again, it begins anew.
    """

    def __init__(self, holdings: Holdings) -> None:
        self.holdings = holdings
        self.last = -1  # number of the batch applied last
        self.last_ts = 0.0
        self.restarts = 0
        self.lost = 0  # times that batches were lost for good
        self.applied = 0  # batches
        self._begun = False

    def take(self, number: int, payload: bytes) -> Verdict:
        """A batch as published."""
        try:
            batch = _decode(payload)
        except msgspec.DecodeError:
            return Verdict.UNREADABLE
        if number <= self.last:
            return Verdict.KNOWN
        if number > self.last + 1:
            return Verdict.GAP
        self._apply(number, batch)
        return Verdict.APPLIED

    def take_from(self, number: int, payload: bytes) -> Verdict:
        """A batch, though those before it are lost for good, and with them all that was known."""
        if number > self.last + 1:
            if self._begun:
                self.begin_anew(restarted=False)
            self.last = number - 1
        return self.take(number, payload)

    def resume(self, replayed: Sequence[tuple[int, bytes]] | None) -> bool:
        """Takes what the publisher still has from ``last`` on; None: it does not answer. False if
        that is of another run of the publisher, or incomplete: everything is forgotten, and it
        should be asked for all that it has."""
        if replayed is None:
            if self._begun:
                self.begin_anew(restarted=False)
            return True
        if self._begun and not self._continues(replayed):
            is_lost = bool(replayed) and replayed[0][0] > self.last
            self.begin_anew(restarted=not is_lost)
            return False
        for number, payload in replayed:
            self.take_from(number, payload)
        return True

    def _continues(self, replayed: Sequence[tuple[int, bytes]]) -> bool:
        if not replayed or replayed[0][0] != self.last:
            return False
        try:
            return _decode(replayed[0][1]).ts == self.last_ts
        except msgspec.DecodeError:
            return False

    def begin_anew(self, restarted: bool) -> None:
        """Forgets everything: the next batch may have any number. ``restarted``: because the
        publisher began anew, not because batches are lost."""
        self.holdings.clear()
        self.last, self.last_ts, self._begun = -1, 0.0, False
        self.restarts += restarted
        self.lost += not restarted

    def _apply(self, number: int, batch: _Batch) -> None:
        self.last, self.last_ts, self._begun = number, batch.ts, True
        self.applied += 1
        for event in batch.events:
            if isinstance(event, _AllBlocksCleared):
                self.holdings.clear()
                continue
            tier = _tier_of(event.medium, event.locality)
            if tier is None:
                continue
            if tier is TierName.REMOTE and event.ownership is not None:
                self.holdings.stores.add(event.ownership)
            blocks = [short_hash(one) for one in event.block_hashes]
            if isinstance(event, _BlockRemoved):
                self.holdings.removed(tier, blocks, event.group_idx)
                continue
            self._learn(event, blocks)
            self.holdings.stored(tier, blocks, event.group_idx)

    def _learn(self, event: _BlockStored, blocks: Sequence[int]) -> None:
        self.holdings.group_is(event.group_idx, event.kv_cache_spec_kind)
        size = event.block_size
        if event.parent_block_hash is None and blocks and 0 < size <= len(event.token_ids):
            is_plain, salt = _salt_of(event)
            if is_plain:
                self.holdings.learn(blocks[0], event.token_ids, size, salt)


# -- sockets --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Publisher:
    """Where a publisher's PUB socket is, and the ROUTER socket that replays."""

    host: str
    port: int
    replay_port: int

    @property
    def name(self) -> str:
        return f"{self.host}:{self.port}"


class Subscription:
    """Follows one publisher while ``run`` does; ``reader`` has what is known.

    ``lag``: called with the seconds from each batch to its application, while it is followed live.
    """

    def __init__(self, publisher: Publisher, lag: Callable[[float], None]) -> None:
        self.publisher = publisher
        self.holdings = Holdings()
        self.reader = Reader(self.holdings)
        self.replays = 0
        self.gaps = 0
        self._lag = lag
        self._doubted = True
        self._warned = False

    def doubt(self) -> None:
        """The publisher may have been started again: what is known is compared with it."""
        self._doubted = True

    async def run(self) -> None:
        """Until cancelled."""
        context = zmq.asyncio.Context.instance()
        while True:
            try:
                await self._follow(context)
            except zmq.ZMQError as error:
                log.warning("events of %s: %s", self.publisher.name, error)
                await asyncio.sleep(_RETRY_S)

    async def _follow(self, context: zmq.asyncio.Context) -> None:
        """Reads what is published. After each connection what is known is compared first: a
        publisher that was started again may have reached the same numbers."""
        socket = context.socket(zmq.SUB)
        connections = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        try:
            socket.set(zmq.RCVHWM, _QUEUED)
            socket.set(zmq.LINGER, 0)
            socket.subscribe(b"")
            socket.connect(f"tcp://{self.publisher.name}")
            poller = zmq.asyncio.Poller()
            poller.register(socket, zmq.POLLIN)
            poller.register(connections, zmq.POLLIN)
            while True:
                ready = dict(await poller.poll(_LOOK_MS))
                while await connections.poll(0):
                    await connections.recv_multipart()
                    self.doubt()
                if self._doubted:
                    self._doubted = False
                    await self._catch_up(context)
                elif socket in ready:
                    frames = await socket.recv_multipart()
                    if len(frames) == 3:
                        await self._take(context, int.from_bytes(frames[1], "big"), frames[2])
        finally:
            socket.disable_monitor()
            socket.close()

    async def _take(self, context: zmq.asyncio.Context, number: int, payload: bytes) -> None:
        verdict = self.reader.take(number, payload)
        if verdict is Verdict.GAP:
            self.gaps += 1
            await self._catch_up(context)
            verdict = self.reader.take_from(number, payload)
        if verdict is Verdict.APPLIED:
            self._lag(max(0.0, time.time() - self.reader.last_ts))
        elif verdict is Verdict.UNREADABLE and not self._warned:
            self._warned = True
            log.warning(
                "events of %s: not vLLM's KV events (batch %d): is the port right?",
                self.publisher.name,
                number,
            )

    async def _catch_up(self, context: zmq.asyncio.Context) -> None:
        """Asks for the batch applied last and all after it; for all, if that does not follow on
        what is known."""
        if not await self._resume(await self._replay(context, max(0, self.reader.last))):
            await self._resume(await self._replay(context, 0))

    async def _resume(self, replayed: list[tuple[int, bytes]] | None) -> bool:
        """``Reader.resume``, with turns for others in between."""
        if not self.reader.resume(replayed and replayed[:_AT_ONCE]):
            return False
        for start in range(_AT_ONCE, len(replayed or ()), _AT_ONCE):
            await asyncio.sleep(0)
            for number, payload in (replayed or [])[start : start + _AT_ONCE]:
                self.reader.take_from(number, payload)
        return True

    async def _replay(
        self, context: zmq.asyncio.Context, start: int
    ) -> list[tuple[int, bytes]] | None:
        """What the publisher still has from ``start`` on; None if it does not answer."""
        self.replays += 1
        socket = context.socket(zmq.DEALER)
        monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        seen: list[int] = []
        silent_s = 0.0
        replayed: list[tuple[int, bytes]] = []
        try:
            socket.set(zmq.LINGER, 0)
            socket.set(zmq.RCVHWM, 0)
            socket.connect(f"tcp://{self.publisher.host}:{self.publisher.replay_port}")
            await socket.send_multipart((b"", start.to_bytes(8, "big")))
            while True:
                if not await socket.poll(_REPLAY_S * 1000):
                    silent_s += _REPLAY_S
                    while await monitor.poll(0):
                        told = parse_monitor_message(await monitor.recv_multipart())
                        seen.append(told["event"])
                    # One that went, and perhaps came back, does not know what it was asked.
                    is_there = seen == [zmq.EVENT_HANDSHAKE_SUCCEEDED]
                    if replayed or not is_there or silent_s > _BUSY_S:
                        return None
                    continue
                frames = await socket.recv_multipart()
                if not frames[-1]:
                    return replayed
                if len(frames) >= 3:
                    replayed.append((int.from_bytes(frames[-2], "big"), frames[-1]))
        finally:
            socket.disable_monitor()
            socket.close()


class Subscriptions:
    """All publishers that the router follows."""

    def __init__(self, lag: Callable[[float], None]) -> None:
        self._lag = lag
        self.of: dict[Publisher, Subscription] = {}
        self._tasks: dict[Publisher, asyncio.Task[None]] | None = None  # None: not running

    def follow(self, publisher: Publisher) -> Subscription:
        """The subscription of a publisher, the same one each time."""
        if publisher not in self.of:
            self.of[publisher] = Subscription(publisher, self._lag)
            self._begin(publisher)
        return self.of[publisher]

    def keep(self, publishers: Collection[Publisher]) -> None:
        """No other publisher is followed any more."""
        for gone in self.of.keys() - publishers:
            del self.of[gone]
            if self._tasks is not None:
                self._tasks.pop(gone).cancel()

    def _begin(self, publisher: Publisher) -> None:
        if self._tasks is not None:
            self._tasks[publisher] = asyncio.create_task(self.of[publisher].run())

    @contextlib.asynccontextmanager
    async def running(self) -> Any:
        """Follows them while the context is open."""
        self._tasks = {}
        for publisher in self.of:
            self._begin(publisher)
        try:
            yield
        finally:
            tasks, self._tasks = list(self._tasks.values()), None
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
