"""A tier below the host: stores and loads blocks of bytes asynchronously."""

from __future__ import annotations

import enum
import logging
import queue
import threading
import time
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import xxhash

from kvrecall.block import SHARED, BlockKey, Namespace, Tenant, TierName
from kvrecall.pool.base import TierStats
from kvrecall.pool.changes import Cause, Watcher
from kvrecall.pool.hints import Advice

CHECKSUM_BYTES = 16


def checksum_of(key: BlockKey, data: memoryview) -> bytes:
    """Checksum of a block's bytes under its key: the same bytes under another key differ. Releases
    Python's lock meanwhile."""
    seed: int = xxhash.xxh3_64_intdigest(key)
    digest: bytes = xxhash.xxh3_128_digest(data, seed)
    return digest


class Checksum:
    """The checksum of one block's bytes, which the first who needs it computes. Thread-safe."""

    __slots__ = ("_lock", "known")

    def __init__(self, known: bytes | None = None) -> None:
        """``known``: computed or verified before, of the same bytes under the same key."""
        self._lock = threading.Lock()
        self.known = known

    def of(self, key: BlockKey, data: memoryview) -> bytes:
        """The checksum of ``data``, which is the same at every call."""
        if self.known is not None:
            return self.known
        with self._lock:  # a tier that waits for another one's result leaves it the processor
            if self.known is None:
                self.known = checksum_of(key, data)
            return self.known


Buckets = tuple[tuple[float, int], ...]


@dataclass(frozen=True, slots=True)
class Put:
    """A block to store. ``data`` is its whole slot (a multiple of 4096 bytes, aligned to 4096),
    the block is its first ``nbytes`` bytes; it must not change until the put is done. ``shared``:
    also store it in a tier beyond this host, if there is one behind this tier. ``checksum``: of the
    block, for all tiers that store it."""

    key: BlockKey
    parent: BlockKey | None
    depth: int
    data: memoryview
    nbytes: int
    tenant: Tenant = SHARED
    shared: bool = True
    checksum: Checksum = field(default_factory=Checksum, compare=False)

    def compute_checksum(self) -> bytes:
        """The checksum of the block, computed unless it is known."""
        return self.checksum.of(self.key, self.data[: self.nbytes])

    def packed(self, data: memoryview, nbytes: int) -> Put:
        """This put with another form of the block, which has another checksum."""
        return replace(self, data=data, nbytes=nbytes, checksum=Checksum())


@dataclass(frozen=True, slots=True)
class Get:
    """A block to fetch ``into`` a slot (as ``Put.data``), which is used for nothing else until the
    get is done. If it fails, the slot's content is undefined."""

    key: BlockKey
    into: memoryview


class PutVerdict(enum.Enum):
    """Immediate answer to a put."""

    QUEUED = "queued"  # a Done will follow
    PRESENT = "present"  # stored or being stored already; no Done will follow
    SHED = "shed"  # the tier has no room in its queue now; no Done will follow


class Outcome(enum.Enum):
    """How a queued operation ended."""

    STORED = "stored"  # durable
    SHED = "shed"  # not stored: no room, the medium failed, or the tier is closing
    LOADED = "loaded"  # the bytes are in the slot and their checksum is right
    MISS = "miss"  # not present (any more)
    CORRUPT = "corrupt"  # bytes missing or wrong; the block is dropped
    ERROR = "error"  # the medium failed; the block is dropped


@dataclass(frozen=True, slots=True)
class Done:
    """End of a queued operation. ``checksum``: of the block that was loaded, as verified; None if
    the tier verifies in another way."""

    key: BlockKey
    outcome: Outcome
    checksum: bytes | None = None


class Tier(ABC):
    """Stores blocks under keys. No method but ``close`` waits for I/O; all are thread-safe.

    Owner: one pool. It keeps the memory of every queued put and get valid until the matching
    ``Done`` is polled; the tier returns exactly one ``Done`` for each, even if it fails or closes.
    A block that ``contains`` reports is durable in this tier.
    """

    name: TierName

    @abstractmethod
    def register(self, namespace: Namespace, block_bytes: int) -> None:
        """Blocks of ``namespace`` have ``block_bytes`` bytes. Called before puts of its keys."""

    @abstractmethod
    def contains(self, key: BlockKey) -> bool:
        """Whether the block can be fetched. A hint: it may be gone when fetched."""

    def tier_of(self, key: BlockKey) -> TierName:
        """The tier of a block that ``contains`` reports, for a tier composed of several."""
        return self.name

    def tiers_of(self, keys: Sequence[BlockKey]) -> list[TierName | None]:
        """``tier_of`` each of ``keys``; None: not here."""
        return [self.tier_of(key) if self.contains(key) else None for key in keys]

    def ask(self, keys: Sequence[BlockKey], every: bool = False) -> bool:
        """Starts a lookup of ``keys`` (the requested part of a chain, prefix first), if that takes
        remote calls. True if the state of the first of them (with ``every``: of each) is known:
        ``contains`` returns it. Does not wait."""
        return True

    def is_silent(self, key: BlockKey) -> bool:
        """Whether the tier cannot tell now if it has the block, which it may have: a store that
        does not answer."""
        return False

    @abstractmethod
    def depth_of(self, key: BlockKey) -> int | None:
        """The block's place in its chain (0 at the root), None if the block is not here."""

    @abstractmethod
    def submit_put(self, puts: Sequence[Put]) -> list[PutVerdict]:
        """Queues blocks to be stored; a chain is given prefix first."""

    @abstractmethod
    def submit_get(self, gets: Sequence[Get]) -> None:
        """Queues blocks to be fetched, most wanted first."""

    @abstractmethod
    def poll(self, timeout_s: float = 0.0) -> list[Done]:
        """Operations completed since the last call; waits up to ``timeout_s`` for the first."""

    def touch(  # noqa: B027
        self,
        chain: Sequence[BlockKey],
        hanging: Sequence[BlockKey] = (),
        ending: Sequence[BlockKey] = (),
        advice: Advice | None = None,
    ) -> None:
        """A request used ``chain`` (prefix first), and ``hanging`` blocks beside it; keys not here
        are allowed. ``advice``: what is believed of the client's hint about the chain's return,
        for the policy. For a tier that evicts by use; others need not know."""

    @abstractmethod
    def drop(self, keys: Sequence[BlockKey], cause: Cause = Cause.DROPPED) -> None:
        """Forgets blocks; they are not found from now on."""

    @abstractmethod
    def clear(self) -> None:
        """Forgets every block, also those queued to be stored."""

    def watch(self, watcher: Watcher) -> None:  # noqa: B027
        """From now on ``watcher`` is told what enters and leaves this tier."""

    def sweep(self, watcher: Watcher) -> Iterator[None]:
        """Reports every block of a tier that can be watched as stored, some with each step."""
        return iter(())

    @abstractmethod
    def stats(self) -> TierStats: ...

    def stats_of_each(self) -> tuple[TierStats, ...]:
        """``stats`` of every tier that this one is composed of, nearest first."""
        return (self.stats(),)

    @abstractmethod
    def histograms(self) -> dict[str, Buckets]:
        """Latencies by name, e.g. ``disk_read_seconds``."""

    @abstractmethod
    def queued(self) -> tuple[int, int]:
        """Puts and gets not done yet."""

    @abstractmethod
    def close(self, deadline_s: float = 10.0) -> None:
        """Finishes queued puts as far as ``deadline_s`` allows; ends all others. Idempotent."""


def ended(done: queue.Queue[Done | None], timeout_s: float) -> list[Done]:
    """The ``Done`` that a tier's threads have put into ``done``; None only ends the wait.

    Not a SimpleQueue: if another thread takes the entry that woke it up just at its timeout,
    CPython's (3.11) waits forever.
    """
    taken: list[Done | None] = []
    if timeout_s <= 0 and not done.queue:  # without its lock: what comes now is for the next call
        return []
    try:
        if timeout_s > 0:
            taken.append(done.get(timeout=timeout_s))
        while True:
            taken.append(done.get_nowait())
    except queue.Empty:
        return [one for one in taken if one is not None]


class NullTier(Tier):
    """No tier: stores and finds nothing."""

    def __init__(self, name: TierName = TierName.DISK) -> None:
        self.name = name
        self._done: list[Done] = []

    def register(self, namespace: Namespace, block_bytes: int) -> None:
        pass

    def contains(self, key: BlockKey) -> bool:
        return False

    def depth_of(self, key: BlockKey) -> int | None:
        return None

    def submit_put(self, puts: Sequence[Put]) -> list[PutVerdict]:
        return [PutVerdict.SHED] * len(puts)

    def submit_get(self, gets: Sequence[Get]) -> None:
        self._done += [Done(get.key, Outcome.MISS) for get in gets]

    def poll(self, timeout_s: float = 0.0) -> list[Done]:
        done, self._done = self._done, []
        return done

    def drop(self, keys: Sequence[BlockKey], cause: Cause = Cause.DROPPED) -> None:
        pass

    def clear(self) -> None:
        pass

    def stats(self) -> TierStats:
        return TierStats(str(self.name), 0, 0, 0)

    def histograms(self) -> dict[str, Buckets]:
        return {}

    def queued(self) -> tuple[int, int]:
        return (0, len(self._done))

    def close(self, deadline_s: float = 10.0) -> None:
        pass


_LOG = logging.getLogger(__name__)
_SILENCE_S = 10.0  # between two warnings
_BOUNDS = tuple(
    base * 10.0**power for power in range(-4, 2) for base in (1.0, 2.5, 5.0)
)  # 0.1 ms to 50 s


class Histogram:
    """Counts of seconds in fixed buckets. One writer at a time; readers may read at any time."""

    __slots__ = ("_counts",)

    def __init__(self) -> None:
        self._counts = [0] * (len(_BOUNDS) + 1)

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(_BOUNDS, seconds)] += 1

    def buckets(self) -> Buckets:
        """``(upper bound in seconds, number of samples up to that)``, ascending, up to infinity."""
        bounds = (*_BOUNDS, float("inf"))
        counts = accumulate(self._counts)
        return tuple((round(at, 6), count) for at, count in zip(bounds, counts, strict=True))


class TierCounters:
    """Counters of the tier called ``name``. Thread-safe."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()  # its lock guards everything below
        self._counts: defaultdict[str, Any] = defaultdict(int)  # fields of ``TierStats``
        self._silent_until = 0.0
        self._read_latency = Histogram()
        self._write_latency = Histogram()

    def add(self, **more: float) -> None:
        """Adds to these fields of ``TierStats``."""
        with self._changed:
            for name, value in more.items():
                self._counts[name] += value

    def read_done(self, outcome: Outcome, seconds: float) -> None:
        """One get ended, ``seconds`` after it was queued."""
        with self._changed:
            self._counts["reads"] += 1
            self._counts["hits"] += outcome is Outcome.LOADED
            self._counts["corrupt"] += outcome is Outcome.CORRUPT
            self._counts["errors"] += outcome is Outcome.ERROR
            self._read_latency.observe(seconds)

    def write_done(self, outcome: Outcome, seconds: float) -> None:
        """One put ended, ``seconds`` after it was queued."""
        with self._changed:
            if outcome is Outcome.STORED:
                self._counts["writes"] += 1
                self._write_latency.observe(seconds)
            else:
                self._counts["dropped"] += 1

    def warn(self, what: str) -> None:
        """Logs a failure, unless another was logged just before."""
        now = time.monotonic()
        with self._changed:
            if now < self._silent_until:
                return
            self._silent_until = now + _SILENCE_S
        _LOG.warning("%s tier: %s", self._name, what)

    def histograms(self) -> dict[str, Buckets]:
        with self._changed:
            return {
                f"{self._name}_read_seconds": self._read_latency.buckets(),
                f"{self._name}_write_seconds": self._write_latency.buckets(),
            }

    def stats(self, capacity_bytes: int, used_bytes: int, blocks: int) -> TierStats:
        with self._changed:
            return TierStats(self._name, capacity_bytes, used_bytes, blocks, **self._counts)
