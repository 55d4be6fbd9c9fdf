"""Follows the KV events of publishers, of engines and of pool services, in vLLM's wire format.

A publisher has a PUB socket with batches, and a ROUTER socket that repeats its last ones. A
subscription asks it for all that it still has when it begins, and for what is missing when a number
was left out.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from kvrecall.block import TierName
from kvrecall.events.holdings import Holdings
from kvrecall.events.wire import (
    AllBlocksCleared,
    Batch,
    BlockStored,
    EventBatch,
    decode,
    short_hash,
    tier_of_event,
    zmtp_connection,
)

_LOG = logging.getLogger("kvrecall.router")

_REPLAY_S = 5.0  # without a further batch
_BUSY_S = 60.0  # of a publisher that is there: it makes a large replay, or another reader's
_PAUSE_S, _RETRY_S = 0.1, 2.0  # before the next connection: doubled each time
_LOOK_S = 0.5
_LONGEST_LAG_S = 3600.0  # that is observed: clocks of other hosts may say anything
_AT_ONCE = 4096  # blocks applied while nothing else runs
_EVENT = 16  # blocks that take as long as an event without any
_MOST_LEARNED = 1 << 20  # bytes of tokens read of a batch
_LONGEST_BLOCK = 1 << 14  # tokens
_tokens = msgspec.msgpack.Decoder(list[int])


# -- batches in order -----------------------------------------------------------------------


class BatchOutcome(enum.Enum):
    """What became of a batch."""

    APPLIED = "applied"
    KNOWN = "known"  # it was applied before
    GAP = "gap"  # batches before it are missing
    UNREADABLE = "unreadable"


class EventReader:
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
        self._to_learn = 0

    def take(self, number: int, payload: bytes) -> BatchOutcome:
        """A batch as published."""
        verdict, parts = self.begin(number, payload)
        for _ in parts:
            pass
        return verdict

    def begin(self, number: int, payload: bytes) -> tuple[BatchOutcome, Iterator[None]]:
        """``take``, in parts of some milliseconds: the batch is applied when the iterator ends."""
        try:
            batch = decode(payload)
        except msgspec.DecodeError:
            return BatchOutcome.UNREADABLE, iter(())
        if number <= self.last:
            return BatchOutcome.KNOWN, iter(())
        if number > self.last + 1:
            return BatchOutcome.GAP, iter(())
        return BatchOutcome.APPLIED, self._apply(number, batch)

    def skip_to(self, number: int) -> None:
        """The batches before this one are lost for good, and with them all that was known."""
        if number > self.last + 1:
            if self._begun:
                self.begin_anew(restarted=False)
            self.last = number - 1

    def is_followed_by(self, first: Batch | None) -> bool:
        """Whether a replay from ``last`` on goes on where this reader is; ``first``: its first
        batch, None if it has none. If not, it is of another run of the publisher, or incomplete:
        everything is forgotten, and the publisher should be asked for all that it has."""
        if not self._begun:
            return True
        number, payload = first or (-1, b"")
        with contextlib.suppress(msgspec.DecodeError):
            if number == self.last and decode(payload).ts == self.last_ts:
                return True
        self.begin_anew(restarted=number <= self.last)
        return False

    def stays_alone(self) -> None:
        """There is no replay: what was missed is not known, and so nothing is."""
        if self._begun:
            self.begin_anew(restarted=False)

    def begin_anew(self, restarted: bool) -> None:
        """Forgets everything: the next batch may have any number. ``restarted``: because the
        publisher began anew, not because batches are lost."""
        self.holdings.clear()
        self.last, self.last_ts, self._begun = -1, 0.0, False
        self.restarts += restarted
        self.lost += not restarted

    def _apply(self, number: int, batch: EventBatch) -> Iterator[None]:
        self.last, self.last_ts, self._begun = number, batch.ts, True
        self.applied += 1
        self._to_learn = _MOST_LEARNED
        done = 0
        for event in batch.events:
            done += _EVENT
            if done >= _AT_ONCE:
                done = 0
                yield
            if isinstance(event, AllBlocksCleared):
                self.holdings.clear()
                continue
            if (tier := tier_of_event(event)) is None:
                continue
            if tier is TierName.REMOTE and event.ownership is not None:
                self.holdings.uses_store(event.ownership)
            change = self.holdings.removed
            if isinstance(event, BlockStored):
                change = self.holdings.stored
                done += self._learn(event)
            for start in range(0, len(event.block_hashes), _AT_ONCE):
                some = event.block_hashes[start : start + _AT_ONCE]
                change(tier, [short_hash(one) for one in some], event.group_idx)
                done += len(some)
                if done >= _AT_ONCE:
                    done = 0
                    yield

    def _learn(self, event: BlockStored) -> int:
        """What an event says of the engine. Returns the bytes read for it, bounded for a batch."""
        self.holdings.group_is(event.group_idx, event.kv_cache_spec_kind)
        size, read = event.block_size, (event.token_ids, event.extra_keys)
        nbytes = sum(len(memoryview(one)) for one in read)
        is_first = event.parent_block_hash is None and bool(event.block_hashes)
        if not (is_first and 0 < size <= _LONGEST_BLOCK and nbytes <= self._to_learn):
            return 0
        self._to_learn -= nbytes
        with contextlib.suppress(ValueError, RecursionError):
            is_plain, salt = event.salt
            tokens = _tokens.decode(event.token_ids) if is_plain else []
            if size <= len(tokens):
                self.holdings.learn(short_hash(event.block_hashes[0]), tokens, size, salt)
        return nbytes


# -- sockets --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Publisher:
    """Where a publisher's PUB socket is, and the ROUTER socket that replays."""

    host: str
    port: int
    replay_port: int

    @property
    def name(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Subscription:
    """Follows one publisher while ``run`` does; ``reader`` has what is known.

    ``lag``: called with the seconds from each batch to its application, while it is followed live.
    """

    def __init__(self, publisher: Publisher, lag: Callable[[float], None]) -> None:
        self.publisher = publisher
        self.holdings = Holdings()
        self.reader = EventReader(self.holdings)
        self.replays = 0
        self.gaps = 0
        self._lag = lag
        self._doubted = False
        self._warned = False

    def doubt(self) -> None:
        """The publisher may have been started again: it is connected to anew, and what is known
        compared with it."""
        self._doubted = True

    async def run(self) -> None:
        """Until cancelled."""
        pause_s = _PAUSE_S
        while True:
            began = time.monotonic()
            try:
                await self._follow()
            except ConnectionAbortedError as error:
                self._warn(str(error))
            except OSError:  # it is not there, or no longer
                pass
            except Exception:  # noqa: BLE001 - logged, and connected to again
                _LOG.exception("events of %s", self.publisher.name)
            lasted = time.monotonic() - began > _RETRY_S
            pause_s = _PAUSE_S if lasted else min(2 * pause_s, _RETRY_S)
            await asyncio.sleep(pause_s)

    async def _follow(self) -> None:
        """Reads what is published, until it is in doubt. After each connection what is known is
        compared first: a publisher that was started again may have reached the same numbers."""
        async with zmtp_connection(self.publisher.host, self.publisher.port, b"SUB") as live:
            await live.send(b"\1")  # to everything
            self._doubted = False
            await self._catch_up()
            coming: asyncio.Task[list[bytes]] | None = None
            try:
                while not self._doubted:
                    coming = coming or asyncio.create_task(live.receive())
                    if (await asyncio.wait((coming,), timeout=_LOOK_S))[0]:
                        frames, coming = coming.result(), None
                        if len(frames) == 3 and len(frames[1]) == 8:
                            await self._take(int.from_bytes(frames[1], "big"), frames[2])
            finally:
                if coming is not None:
                    coming.cancel()

    async def _take(self, number: int, payload: bytes) -> None:
        verdict = await self._apply(number, payload)
        if verdict is BatchOutcome.GAP:
            self.gaps += 1
            await self._catch_up()
            self.reader.skip_to(number)
            verdict = await self._apply(number, payload)
        if verdict is BatchOutcome.APPLIED:
            self._lag(min(max(0.0, time.time() - self.reader.last_ts), _LONGEST_LAG_S))
        elif verdict is BatchOutcome.UNREADABLE:
            self._warn(f"not vLLM's KV events (batch {number}): is the port right?")

    async def _apply(self, number: int, payload: bytes) -> BatchOutcome:
        """``EventReader.take``, with turns for others in between."""
        verdict, parts = self.reader.begin(number, payload)
        for _ in parts:
            await asyncio.sleep(0)
        return verdict

    def _warn(self, why: str) -> None:
        if not self._warned:
            self._warned = True
            _LOG.warning("events of %s: %s", self.publisher.name, why)

    async def _catch_up(self) -> None:
        """Asks for the batch applied last and all after it; for all, if that does not follow on
        what is known."""
        if not await self._replay(max(0, self.reader.last)):
            await self._replay(0)

    async def _replay(self, start: int) -> bool:
        """Takes what the publisher still has from ``start`` on; forgets everything if it does not
        answer. False if that does not follow on what is known."""
        self.replays += 1
        address = self.publisher.host, self.publisher.replay_port
        before = -1
        try:
            async with zmtp_connection(*address, b"DEALER") as asked:
                await asked.send(b"", start.to_bytes(8, "big"))
                while True:
                    async with asyncio.timeout(_BUSY_S if before < 0 else _REPLAY_S):
                        frames = await asked.receive()
                    payload = frames[-1]
                    number = int.from_bytes(frames[-2][-8:], "big") if len(frames) > 1 else -1
                    if before < 0:
                        first = (number, payload) if payload else None
                        if not self.reader.is_followed_by(first):
                            return False
                    if not payload:
                        return True
                    if number <= before:
                        raise ConnectionAbortedError("a replay that has stalled")
                    before = number
                    self.reader.skip_to(number)
                    await self._apply(number, payload)
                    await asyncio.sleep(0)
        except OSError as error:
            if isinstance(error, ConnectionAbortedError):
                self._warn(str(error))
            self.reader.stays_alone()
            return True


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
            if self._tasks is not None:
                self._tasks[publisher] = asyncio.create_task(self.of[publisher].run())
        return self.of[publisher]

    def keep(self, publishers: Collection[Publisher]) -> None:
        """No other publisher is followed any more."""
        for gone in self.of.keys() - publishers:
            del self.of[gone]
            if self._tasks is not None:
                self._tasks.pop(gone).cancel()

    @contextlib.asynccontextmanager
    async def running(self) -> Any:
        """Follows them while the context is open."""
        self._tasks = {at: asyncio.create_task(one.run()) for at, one in self.of.items()}
        try:
            yield
        finally:
            tasks, self._tasks = list(self._tasks.values()), None
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
