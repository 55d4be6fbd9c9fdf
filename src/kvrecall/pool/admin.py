"""The administration of a pool: listing, pinning, dropping and expiring blocks."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Protocol

from kvrecall.block import BlockKey, TierName
from kvrecall.config import PoolTerms
from kvrecall.errors import ConfigError
from kvrecall.pool.changes import Cause
from kvrecall.pool.disk import DiskTier
from kvrecall.pool.entries import BlockInfo

_AT_ONCE = 64  # blocks, in a millisecond or two, so that engines are answered in between
_EXPIRY_S = 60.0
_GIB = 1 << 30


class HostSide(Protocol):
    """What ``PoolAdmin`` needs of a pool; see ``Pool``."""

    def host_blocks(self, unused_since: float | None = None) -> list[BlockInfo]: ...
    def is_in_host(self, key: BlockKey) -> bool: ...
    def drop(self, keys: Sequence[BlockKey], cause: Cause) -> None: ...
    def pin(self, keys: Collection[BlockKey]) -> None: ...
    def unpin(self, keys: Collection[BlockKey]) -> None: ...
    def pin_room(self) -> tuple[int, int]: ...


class PoolAdmin:
    """Administers the host and the disk of one pool, from any thread. Calls hold the pool's lock
    for milliseconds at most, whatever the number of blocks."""

    def __init__(
        self,
        pool: HostSide,
        disk: DiskTier | None,
        terms: PoolTerms,
        clock: Callable[[], float],
    ) -> None:
        """``clock``, which never goes back, dates the uses of the pool's blocks."""
        self.pool = pool
        self.disk = disk
        """The pool's disk tier, if it has one."""
        self._terms = terms
        self.now = clock
        ages = [t.ttl_s for t in terms.tenants.all if t.ttl_s is not None]
        self._expiry_s = min([_EXPIRY_S, *(age / 4 for age in ages)]) if ages else None
        self._expire_at = float("-inf")

    def blocks(self) -> Iterator[BlockInfo]:
        """Every block in every local tier, those on disk as they are when their turn comes; a block
        in both appears twice."""
        yield from self.pool.host_blocks()
        if self.disk is not None:
            yield from self.disk.catalog.infos()

    # -- dropping --------------------------------------------------------------------------

    def drop(self, keys: Collection[BlockKey], cause: Cause = Cause.DROPPED) -> None:
        """Drops blocks from every tier, pinned ones too; leased ones stay in the host."""
        for part in _parts(keys):
            self._unpin(part)
            self.pool.drop(part, cause)

    def expire(self) -> None:
        """Drops blocks unused for longer than their tenant's TTL from this host, if a check is
        due."""
        now = self.now()
        if self._expiry_s is None or now < self._expire_at:
            return
        self._expire_at = now + self._expiry_s
        for keys in _parts(self._expired(now)):
            self.drop(keys, Cause.EXPIRED)

    def _expired(self, now: float) -> Iterator[BlockKey]:
        """Keys of blocks that are too old, and not pinned, in every tier they are in. Those on disk
        are looked at when their turn comes."""
        rules = self._terms.tenants
        youngest = min(terms.ttl_s for terms in rules.all if terms.ttl_s is not None)

        def is_old(block: BlockInfo) -> bool:
            ttl_s = rules.of(block.tenant).ttl_s
            return ttl_s is not None and now - block.used > ttl_s and not block.pinned

        host = {block.key for block in self.pool.host_blocks(now - youngest) if is_old(block)}
        if self.disk is not None:
            for block in self.disk.catalog.infos(now - youngest):
                if is_old(block) and (block.key in host or not self.pool.is_in_host(block.key)):
                    host.discard(block.key)
                    yield block.key
        yield from (key for key in host if self.disk is None or not self.disk.contains(key))

    # -- pins ------------------------------------------------------------------------------

    def pin(self, keys: Collection[BlockKey]) -> None:
        """Protects blocks from eviction, expiry and quotas, in their present tiers and in those
        they move to. All or none: raises ConfigError if they exceed a tier's limit."""
        wanted = frozenset(keys)
        more = [block for block in self.blocks() if block.key in wanted and not block.pinned]
        _check_pins(more, TierName.HOST, *self.pool.pin_room())
        if self.disk is not None:
            _check_pins(
                more, TierName.DISK, self.disk.catalog.pinned_bytes, self.disk.catalog.pin_limit
            )
        for part in _parts(wanted):
            self.pool.pin(part)
            if self.disk is not None:
                self.disk.catalog.pin(part)
        self._wait_durable()

    def unpin(self, keys: Collection[BlockKey]) -> None:
        for part in _parts(keys):
            self._unpin(part)
        self._wait_durable()

    def _unpin(self, keys: Collection[BlockKey]) -> None:
        self.pool.unpin(keys)
        if self.disk is not None:
            self.disk.catalog.unpin(keys)

    def _wait_durable(self) -> None:
        if self.disk is not None and not self.disk.wait_pins_durable(10.0):
            raise ConfigError("the disk does not answer: pins may not survive a restart")


def _check_pins(more: Iterable[BlockInfo], tier: TierName, pinned: int, limit: int) -> None:
    nbytes = sum(block.slot_bytes for block in more if block.tier is tier)
    if nbytes and pinned + nbytes > limit:
        raise ConfigError(
            f"pin: {nbytes / _GIB:.3f} GiB more would make {(pinned + nbytes) / _GIB:.3f} "
            f"GiB pinned in the {tier}, and its pin_limit is {limit / _GIB:.3f} GiB; unpin "
            "some blocks, or raise pin_limit"
        )


def _parts(keys: Iterable[BlockKey]) -> Iterable[list[BlockKey]]:
    rest = iter(keys)
    while part := list(itertools.islice(rest, _AT_ONCE)):
        yield part
        time.sleep(0)  # a turn for threads that wait for the lock, or the interpreter
