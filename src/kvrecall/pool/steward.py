"""Looks after a pool: what is in it, what stays, what goes, how large it is."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Protocol

from kvrecall.block import BlockKey, TierName
from kvrecall.config import PoolTerms
from kvrecall.errors import ConfigError
from kvrecall.pool.accounts import TenantUse
from kvrecall.pool.arena import Arena
from kvrecall.pool.disk import DiskTier
from kvrecall.pool.held import Held
from kvrecall.pool.host import HostStore

_AT_ONCE = 1000  # blocks, so that engines are answered in between
_EXPIRY_S = 60.0
_GIB = 1 << 30


class Droppable(Protocol):
    """What a steward needs of its pool."""

    def drop(self, keys: Sequence[BlockKey]) -> None: ...

    def lost_below(self, keys: Sequence[BlockKey]) -> None: ...

    @property
    def arena(self) -> Arena: ...


class Steward:
    """The administration of one pool, from any thread. Calls hold the pool's lock for
    milliseconds at most, however many blocks they are about."""

    def __init__(
        self,
        pool: Droppable,
        host: HostStore,
        disk: DiskTier | None,
        lock: threading.Condition,
        terms: PoolTerms,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._pool = pool
        self._host = host
        self._lock = lock
        self._growth = threading.Lock()
        self._terms = terms
        self._clock = clock
        self.disk = disk
        """The pool's disk tier, if it has one."""
        ages = [t.ttl_s for t in terms.tenants.all if t.ttl_s is not None]
        self._expiry_s = min([_EXPIRY_S, *(age / 4 for age in ages)]) if ages else None
        self._expire_at = float("-inf")
        if disk is not None:
            host.pins.update(disk.pinned_keys())

    # -- what is there ---------------------------------------------------------------------

    def host_blocks(self, unused_since: float | None = None) -> list[Held]:
        """Every block in the host, or those not used since that wall-clock second."""
        with self._lock:
            blocks = list(self._host.blocks.values())
        tier = TierName.HOST
        return [
            Held(b.key, tier, b.tenant, b.parent, b.depth, b.slot_bytes, b.used, b.pinned)
            for b in blocks
            if unused_since is None or b.used < unused_since
        ]

    def blocks(self) -> list[Held]:
        """Every block in every local tier: one in both is named twice."""
        return self.host_blocks() + ([] if self.disk is None else self.disk.held())

    def host_uses(self) -> list[TenantUse]:
        """Tenants in the host."""
        with self._lock:
            return self._host.accounts.uses()

    # -- dropping --------------------------------------------------------------------------

    def drop(self, keys: Collection[BlockKey]) -> None:
        """Drops blocks from every tier, pinned ones too; leased ones stay in the host."""
        rest = list(keys)
        while rest:
            part = rest[-_AT_ONCE:]
            with self._lock:
                self._host.unpin(part)
            if self.disk is not None:
                self.disk.unpin(part)
            self._pool.drop(part)
            del rest[-_AT_ONCE:]

    def damaged(self, key: BlockKey) -> None:
        """The block is no longer on disk; a copy in the host is stored when used next."""
        self._pool.lost_below([key])

    def expire(self) -> None:
        """Drops what was not used for longer than its tenant's TTL, if it is time to look."""
        now = time.monotonic()
        if self._expiry_s is None or now < self._expire_at:
            return
        self._expire_at = now + self._expiry_s
        self.drop(self._expired(self._clock()))

    def _expired(self, now: float) -> set[BlockKey]:
        """Keys of blocks that are too old in every tier they are in."""
        rules = self._terms.tenants
        youngest = min(terms.ttl_s for terms in rules.all if terms.ttl_s is not None)
        idle = self.host_blocks(now - youngest)
        idle += [] if self.disk is None else self.disk.held(now - youngest)
        old: dict[BlockKey, int] = {}
        pinned = set()
        for block in idle:
            ttl_s = rules.of(block.tenant).ttl_s
            if block.pinned:
                pinned.add(block.key)
            elif ttl_s is not None and now - block.used > ttl_s:
                old[block.key] = old.get(block.key, 0) + 1
        return {
            key
            for key, tiers in old.items()
            if key not in pinned and tiers == self._tiers_with(key)
        }

    def _tiers_with(self, key: BlockKey) -> int:
        on_disk = self.disk is not None and self.disk.contains(key)
        return int(key in self._host.blocks) + int(on_disk)

    # -- pins ------------------------------------------------------------------------------

    def pin(self, keys: Collection[BlockKey]) -> None:
        """Keeps blocks from being evicted, expired and dropped for a limit, in the tiers they
        are in and those they come to. All or none: ConfigError if they are too many for a tier.
        """
        wanted = frozenset(keys)
        held = [block for block in self.blocks() if block.key in wanted and not block.pinned]
        with self._lock:
            _check_pins(held, TierName.HOST, self._host.pinned_bytes, self._host.pin_limit)
        if self.disk is not None:
            _check_pins(held, TierName.DISK, self.disk.pinned_bytes, self.disk.pin_limit)
        for part in _parts(wanted):
            with self._lock:
                self._host.pin(part)
            if self.disk is not None:
                self.disk.pin(part)
        self._settle()

    def unpin(self, keys: Collection[BlockKey]) -> None:
        """Takes ``pin`` back."""
        for part in _parts(keys):
            with self._lock:
                self._host.unpin(part)
            if self.disk is not None:
                self.disk.unpin(part)
        self._settle()

    def _settle(self) -> None:
        if self.disk is not None and not self.disk.wait_pins_durable(10.0):
            raise ConfigError("the disk does not answer: what was pinned may not survive a restart")

    # -- size ------------------------------------------------------------------------------

    def resize_host(self, nbytes: int) -> None:
        """Sets how much of the arena is used. Shrinking goes on in the background, see
        ``host_surplus``. The memory itself stays with the service. ConfigError if the arena cannot
        grow so far, the machine has not that much memory, or too much is pinned."""
        room = self._host.room
        if nbytes > room.nbytes:
            raise ConfigError(
                f"host: {nbytes / _GIB:.2f} GiB is more than the {room.nbytes / _GIB:.2f} GiB this "
                "pool can grow to; shared memory that engines map has its bound at the start: "
                "start the pool with host_max_size (or a larger host_size)"
            )
        with self._growth:
            self._pool.arena.grow(nbytes)
        with self._lock:
            pinned = self._host.pinned_bytes
            if pinned > self._terms.pin_limit * nbytes:
                raise ConfigError(
                    f"host: {pinned / _GIB:.2f} GiB are pinned, more than pin_limit "
                    f"({self._terms.pin_limit:g}) allows of {nbytes / _GIB:.2f} GiB; unpin some"
                )
            room.limit_bytes = nbytes
            self._lock.notify_all()

    def host_surplus(self) -> int:
        """Bytes in use above what the host may use now."""
        room = self._host.room
        return max(0, room.used_bytes - room.limit_bytes)


def _check_pins(held: Iterable[Held], tier: TierName, pinned: int, limit: int) -> None:
    more = sum(block.slot_bytes for block in held if block.tier is tier)
    if more and pinned + more > limit:
        raise ConfigError(
            f"pin: {more / _GIB:.3f} GiB more would make {(pinned + more) / _GIB:.3f} GiB pinned "
            f"in the {tier}, and its pin_limit is {limit / _GIB:.3f} GiB; unpin something, or "
            "raise pin_limit"
        )


def _parts(keys: Collection[BlockKey]) -> Iterable[list[BlockKey]]:
    rest = list(keys)
    for start in range(0, len(rest), _AT_ONCE):
        yield rest[start : start + _AT_ONCE]
