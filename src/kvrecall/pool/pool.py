"""The pool in its owner's process: arena and host store above, one asynchronous tier below."""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

from kvrecall.block import (
    NAMESPACE_BYTES,
    SHARED,
    BlockKey,
    Namespace,
    Tenant,
    TierName,
    is_tenant,
)
from kvrecall.config import DEFAULT_POLICY, PoolConfig, PoolTerms
from kvrecall.errors import ConfigError
from kvrecall.pool.accounts import TenantUse
from kvrecall.pool.admin import PoolAdmin
from kvrecall.pool.arena import Arena
from kvrecall.pool.base import (
    Absence,
    ArenaHandle,
    Found,
    Located,
    PoolStats,
    Presence,
    Recall,
    RecallState,
    Reservation,
    TierStats,
    Verdict,
    check_parents,
)
from kvrecall.pool.cascade import Cascade
from kvrecall.pool.changes import MADE_ROOM, Cause, Watcher
from kvrecall.pool.cipher import read_cipher
from kvrecall.pool.clock import Clock
from kvrecall.pool.departures import Departures, Refusal
from kvrecall.pool.disk import DiskTier
from kvrecall.pool.disk.codec import make_codec
from kvrecall.pool.disk.folder import MediumFails
from kvrecall.pool.entries import BlockInfo, EntryTable, hangs
from kvrecall.pool.eviction import make_policy
from kvrecall.pool.evictor import Evictor
from kvrecall.pool.hints import Hint, HintRecord
from kvrecall.pool.host import Block, HostStore
from kvrecall.pool.names import DictNames
from kvrecall.pool.remote.backends import store_name, with_remote
from kvrecall.pool.slots import ArenaSlots, slot_bytes_of
from kvrecall.pool.tier import Done, Get, NullTier, Outcome, Tier
from kvrecall.pool.write_policy import RemoteWriteBack, make_write_policy
from kvrecall.pool.writer import Writer

_LOG = logging.getLogger(__name__)
_TICK_S = 0.1
_RETRY_S = 0.02
_TRIMMED_AT_ONCE = 256
_LOOKED_UP = 1024  # keys below the host, before the first miss among them counts
_PENALTY_S = 30.0  # how long a tier with an overdue load is not asked
_GIB = 1 << 30
_PENDING = Recall(RecallState.PENDING)
_PRESENT = Reservation(Verdict.PRESENT)
_REFUSED = Reservation(Verdict.REFUSED)
_UNKNOWN = Absence(Presence.UNKNOWN)
_MOST_NAMESPACES = 64  # of which a block that is in none of its own is looked up
_MOST_UNREADABLE = 4096
_UNGOT = {Outcome.CORRUPT: Cause.CORRUPT, Outcome.ERROR: Cause.CORRUPT}


@dataclass(slots=True, eq=False)
class Ticket:
    """The state of one recall: its blocks, leased as they arrive, None while they are ``missing``.
    Used under its pool's lock.

    Methods that shorten it return the blocks whose lease the caller must release.
    """

    deadline: float
    blocks: list[Block | None]
    tiers: list[TierName]
    missing: int
    result: Recall | None = None  # once it stands, or the caller no longer waits

    def waiting(self) -> list[int]:
        return [place for place, block in enumerate(self.blocks) if block is None]

    def fill(self, place: int, block: Block) -> bool:
        """A block arrived. False if the recall does not need it any more."""
        if place >= len(self.blocks):
            return False
        self.blocks[place] = block
        self.missing -= 1
        return True

    def cut(self, place: int) -> list[Block]:
        """The block at ``place`` cannot arrive: the recall ends before it."""
        beyond = self.blocks[place:]
        del self.blocks[place:], self.tiers[place:]
        leased = [block for block in beyond if block is not None]
        self.missing -= len(beyond) - len(leased)
        return leased

    def settle(self, now: float) -> tuple[Recall, list[Block]]:
        if self.result is not None:
            return self.result, []
        if self.missing and now < self.deadline:
            return _PENDING, []
        beyond = self.cut(self.waiting()[0]) if self.missing else []
        offsets = tuple([block.offset for block in self.blocks if block is not None])
        self.result = Recall(RecallState.READY, offsets, tuple(self.tiers))
        return self.result, beyond


@dataclass(slots=True, eq=False)
class _Loading:
    """A block being promoted: its target slot and the recalls that wait for it."""

    block: Block
    tier: TierName
    due: float  # when the first of them stops waiting
    overdue: bool = False  # and that has been noticed
    wanted: bool = True  # False: it is out of date on arrival unless a recall waits for it
    waiters: list[tuple[Ticket, int]] = field(default_factory=list)


class _Leaving:
    """Is told of all blocks held; notes those of some namespaces, suffixes first."""

    def __init__(self, tables: Mapping[TierName, EntryTable], digests: frozenset[bytes]) -> None:
        self._tables = tables
        self._digests = digests

    def stored(self, tier: TierName, key: BlockKey, parent: BlockKey | None) -> None:
        if key[:NAMESPACE_BYTES] in self._digests and tier in self._tables:
            self._tables[tier].leaving[key] = None

    def removed(self, tier: TierName, key: BlockKey, cause: Cause) -> None: ...


class Pool:
    """A ``PoolClient`` that owns its arena and its lower tier. Thread-safe.

    Every method except ``flush`` and ``close`` returns within microseconds per key; threads of the
    lower tier do all I/O. Use as a context manager or call ``close``.
    """

    def __init__(
        self,
        arena: Arena,
        below: Tier,
        policy: str = DEFAULT_POLICY,
        clock: Callable[[], float] | None = None,
        monotonic: Callable[[], float] = time.monotonic,
        terms: PoolTerms | None = None,
    ) -> None:
        """Takes ownership of ``arena`` and ``below``. ``clock``, which never goes back, dates
        uses (default: a ``Clock``), ``monotonic`` deadlines."""
        clock = clock or Clock()
        terms = terms or PoolTerms()
        self._arena = arena
        self._below = below
        self._terms = terms
        self._monotonic = monotonic
        self._changed = threading.Condition()  # its lock guards everything below
        slots = ArenaSlots(arena.nbytes, lambda: arena.ready_bytes, arena.goal_bytes)
        self._host = HostStore(slots, policy, clock, terms)
        cascade = below if isinstance(below, Cascade) else None
        remote = None
        if cascade is not None and terms.remote_write == "back":
            remote = RemoteWriteBack(cascade.far, terms.unwritten_marks, monotonic)
        writes = make_write_policy(terms, self._host.chance)
        self._writer = Writer(self._host, below, arena, writes, remote, monotonic)
        self._evictor = Evictor(self._host, self._writer, terms)
        self._namespaces: dict[bytes, tuple[Namespace, int]] = {}  # and bytes of their blocks
        self._others: dict[bytes, tuple[tuple[bytes, tuple[str, ...]], ...]] = {}
        self._filling: dict[BlockKey, Block] = {}
        self._tickets: dict[int, Ticket] = {}
        self._hints = HintRecord()
        self._loading: dict[BlockKey, _Loading] = {}
        self._silent_until = float("-inf")
        self._numbers = itertools.count(1)
        self._lookups = self._found = self._refused = 0
        self._host_hits = self._commits = self._commit_bytes = 0
        self._closed = False
        self._retired: frozenset[bytes] = frozenset()  # namespaces
        self._unswept: frozenset[bytes] = frozenset()  # those whose blocks are not looked for yet
        self._retiring: Iterator[None] = iter(())  # looks for others', some with each step
        self._told: set[bytes] = set()  # read-only namespaces that the log has named
        self._absent: tuple[TierStats, ...] = ()  # of a disk that could not be opened
        self.store_name: str | None = None  # of the remote store, the same on all hosts
        self.describe: Callable[[bytes], object] = bytes  # takes batches of engines' KV events
        near = cascade.near if cascade else below
        disk = near if isinstance(near, DiskTier) else None
        self._disk = disk
        self._unreadable = Departures(DictNames(), self._host.now, _MOST_UNREADABLE)  # in a store
        if disk is not None:
            self._host.pins.update(disk.catalog.pinned_keys())
        self._resizing = threading.Lock()
        self.admin = PoolAdmin(self, disk, terms, clock)
        self._reaper = threading.Thread(target=self._reap, name="kvrecall-pool", daemon=True)
        self._reaper.start()

    @classmethod
    def open(cls, config: PoolConfig, clock: Clock | None = None) -> Pool:
        """Opens the pool a configuration describes, without its disk if the medium fails. Raises
        ConfigError or TierError, with nothing left behind, if the memory is not available, or the
        disk is not usable as it is set."""
        make_policy(config.policy, 1)  # before anything is touched
        cipher = read_cipher(config.encryption_key_file)
        clock = clock or Clock()
        with contextlib.ExitStack() as undo:
            arena = Arena.create(config.host_bytes, most_bytes=config.host_most_bytes)
            terms = config.terms
            is_back = terms.remote_write == "back" and terms.write_policy == "through"
            if is_back and config.disk is None:  # the store is written as such a disk is
                terms = replace(terms, write_policy="back")
            undo.callback(arena.close)
            below: Tier = NullTier()
            absent: tuple[TierStats, ...] = ()
            if config.disk is not None:
                queued = min(config.disk.max_queued_bytes, config.host_bytes // 2)
                disk = replace(config.disk, max_queued_bytes=queued)
                codec = make_codec(cipher, disk.compression)
                try:
                    below = DiskTier(disk, config.policy, clock=clock, codec=codec, terms=terms)
                except MediumFails as error:
                    _LOG.error("%s; this pool serves WITHOUT ITS DISK until the next start", error)
                    absent = (TierStats(str(TierName.DISK), 0, 0, 0, errors=1, full=1),)
                undo.callback(below.close)
            if config.remote is not None:
                below = with_remote(below, config.remote, arena.nbytes, cipher)
                undo.callback(below.close)
            pool = cls(arena, below, config.policy, clock, terms=terms)
            pool._absent = absent
            pool.store_name = store_name(config.remote) if config.remote is not None else None
            undo.pop_all()
            return pool

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def arena(self) -> Arena:
        """The arena, for workers in this process."""
        return self._arena

    def arena_handle(self) -> ArenaHandle:
        return self._arena.handle()

    def read(self, offsets: Sequence[int], at: int, nbytes: int) -> list[bytes]:
        memory = self._arena.memory
        return [bytes(memory[offset + at : offset + at + nbytes]) for offset in offsets]

    def register(self, namespace: Namespace, block_bytes: int) -> None:
        if block_bytes <= 0:
            raise ConfigError(f"block_bytes is {block_bytes}; it must be more than 0")
        slot_bytes = slot_bytes_of(block_bytes)
        host_bytes = self._arena.goal_bytes
        if slot_bytes > host_bytes:
            raise ConfigError(
                f"host_size: {host_bytes} bytes cannot hold one block of {slot_bytes} bytes"
            )
        with self._changed:
            _, known = self._namespaces.get(namespace.digest, (namespace, block_bytes))
            if known != block_bytes:
                raise ConfigError(
                    f"namespace {namespace.digest.hex()} has blocks of {known} bytes, "
                    f"not of {block_bytes}"
                )
            self._namespaces[namespace.digest] = namespace, block_bytes
            self._retired -= {namespace.digest}
            self._unswept -= {namespace.digest}
            self._set_retired()
            self._others.clear()
            self._host.fit(block_bytes)
            self._below.register(namespace, block_bytes)

    def retire(self, digests: Collection[bytes]) -> None:
        with self._changed:
            ours = {digest for digest in digests if not self._terms.spares(digest)}
            self._unswept |= self._namespaces.keys() & ours - self._retired
            self._retired |= self._unswept
            self._set_retired()

    def _tables(self) -> dict[TierName, EntryTable]:
        tables: dict[TierName, EntryTable] = {TierName.HOST: self._host}
        return tables | ({} if self._disk is None else {TierName.DISK: self._disk.catalog})

    def _set_retired(self) -> None:
        for table in self._tables().values():
            table.retired = self._retired

    def namespaces(self) -> list[tuple[Namespace, int]]:
        with self._changed:
            return list(self._namespaces.values())

    # -- recall ----------------------------------------------------------------------------

    def find(self, keys: Sequence[BlockKey]) -> Found:
        with self._changed:
            has_below = self._below_answers()
            tiers = self._tiers_of_prefix(keys, has_below)
            blocks = self._host.blocks
            rest = keys[len(tiers) :] if has_below else ()
            pending = bool(rest) and not self._below.ask([k for k in rest if k not in blocks])
            if not pending:
                self._lookups += len(keys)
                self._found += len(tiers)
        return Found(tuple(tiers), pending)

    def _tiers_of_prefix(self, keys: Sequence[BlockKey], has_below: bool) -> list[TierName]:
        """The tier of each block of the longest present prefix, of the host alone if nothing below
        answers."""
        blocks = self._host.blocks
        if has_below and blocks.keys().isdisjoint(keys):
            absent: Sequence[int] = range(len(keys))
        else:
            absent = [place for place, key in enumerate(keys) if key not in blocks]
        tiers = [TierName.HOST] * (len(keys) if has_below or not absent else absent[0])
        for start in range(0, len(absent) if has_below else 0, _LOOKED_UP):
            part = absent[start : start + _LOOKED_UP]
            is_run = part[-1] - part[0] == len(part) - 1
            asked = keys[part[0] : part[-1] + 1] if is_run else [keys[place] for place in part]
            below = self._below.tiers_of(asked)
            if is_run and below[0] is not None and below.count(below[0]) == len(below):
                tiers[part[0] : part[-1] + 1] = cast(list[TierName], below)
                continue
            for place, tier in zip(part, below, strict=True):
                if tier is None:
                    return tiers[:place]
                tiers[place] = tier
        return tiers

    def locate(self, keys: Sequence[BlockKey]) -> Located:
        host = TierName.HOST
        with self._changed:
            blocks = self._host.blocks
            tiers: list[TierName | None] = [host if key in blocks else None for key in keys]
            rest = [place for place, tier in enumerate(tiers) if tier is None]
            pending = False
            if rest and self._below_answers():
                below = self._below.tiers_of([keys[place] for place in rest])
                for place, tier in zip(rest, below, strict=True):
                    tiers[place] = tier
                absent = [keys[place] for place in rest if tiers[place] is None]
                pending = bool(absent) and not self._below.ask(absent, every=True)
            if not pending:
                self._lookups += len(tiers)
                self._found += len(tiers) - tiers.count(None)
        return Located(tuple(tiers), pending)

    def why(self, key: BlockKey) -> Absence:
        with self._changed:
            self._drain()
            if key in self._host.blocks:
                return Absence(Presence.HERE, TierName.HOST)
            if key in self._filling:
                return Absence(Presence.FILLING)
            tier, left = TierName.HOST, self._host.departures.of(key)
            disk, below, is_silent = self._disk, self._below, False
            if below is not disk and self._writer.has_below:
                if below.contains(key):
                    return self._below_has(below.tier_of(key))
                is_silent = below.is_silent(key)
                unreadable = self._unreadable.of(key)
                if unreadable is not None and (left is None or unreadable.at > left.at):
                    tier, left = TierName.REMOTE, unreadable
            if disk is not None:
                is_here, departure = disk.catalog.known_of(key)
                if is_here:
                    return self._below_has(disk.name)
                if departure is not None and (left is None or departure.at > left.at):
                    tier, left = disk.name, departure
            if left is not None and not (is_silent and left.what in MADE_ROOM):
                is_refusal = isinstance(left.what, Refusal)
                kind = Presence.REFUSED if is_refusal else Presence.GONE
                return Absence(kind, tier, left.what, left.at)
            if is_silent:
                return Absence(Presence.AWAY, TierName.REMOTE)
            return self._elsewhere(key) or _UNKNOWN

    def _below_has(self, tier: TierName) -> Absence:
        return Absence(Presence.HERE if self._below_answers() else Presence.AWAY, tier)

    def _elsewhere(self, key: BlockKey) -> Absence | None:
        """Another namespace that has a block of the same hash, and what is different there. Hashes
        contain the salt, so it is a block of the same tenant."""
        digest = key[:NAMESPACE_BYTES]
        others = self._others.get(digest)
        if others is None:
            others = self._others[digest] = self._others_than(digest)
        for other, fields in others:
            twin = BlockKey(other + key[NAMESPACE_BYTES:])
            if twin in self._host.blocks:
                return Absence(Presence.ELSEWHERE, TierName.HOST, fields=fields)
            if self._disk is not None and self._disk.contains(twin):
                return Absence(Presence.ELSEWHERE, TierName.DISK, fields=fields)
        return None

    def _others_than(self, digest: bytes) -> tuple[tuple[bytes, tuple[str, ...]], ...]:
        """Each other namespace with blocks of the same KV group, the latest first, and the fields
        in which it differs."""
        on_disk = () if self._disk is None else self._disk.namespaces()
        here = self._namespaces.values()
        known = {one.digest: set(one.parts) for one, _ in (*on_disk, *here)}
        own = known.get(digest, set())
        latest = itertools.islice(reversed(known.items()), _MOST_NAMESPACES)
        differing = [(other, {name for name, _ in own ^ parts}) for other, parts in latest if own]
        return tuple(
            (other, tuple(sorted(fields)))
            for other, fields in differing
            if other != digest and "group" not in fields
        )

    def acquire(
        self,
        keys: Sequence[BlockKey],
        deadline_s: float,
        parent: BlockKey | None = None,
        tenant: Tenant = SHARED,
        parents: Sequence[BlockKey | None] | None = None,
    ) -> int:
        _check_tenant(tenant)
        check_parents(keys, parent, parents)
        with self._changed:
            self._drain()
            ticket = self._lease_present(keys, self._monotonic() + deadline_s)
            if ticket.missing:
                self._load(keys, ticket, parents or (parent, *keys[:-1]), tenant)
            self._host_hits += ticket.tiers.count(TierName.HOST)
            number = next(self._numbers)
            self._tickets[number] = ticket
            return number

    def poll(self, ticket: int) -> Recall:
        with self._changed:
            self._drain()
            found = self._tickets[ticket]
            recall, beyond = found.settle(self._monotonic())
            self._host.unlease(beyond)
            return recall

    def release(self, ticket: int) -> None:
        with self._changed:
            found = self._tickets.pop(ticket, None)
            if found is not None:
                found.result = found.result or _PENDING
                self._host.unlease(found.cut(0))

    def touch(
        self,
        keys: Sequence[BlockKey],
        hanging: Sequence[BlockKey] = (),
        ending: Sequence[BlockKey] = (),
        hint: Hint | None = None,
        tenant: Tenant = SHARED,
    ) -> None:
        with self._changed:
            advice = self._hints.used(keys, self._monotonic(), tenant, hint)
            self._host.use(keys, hanging, ending, advice)
            if self._writer.has_below:
                self._below.touch(keys, hanging, ending, advice)
                self._writer.touched(keys, hanging)

    # -- save ------------------------------------------------------------------------------

    def reserve(
        self,
        keys: Sequence[BlockKey],
        parent: BlockKey | None = None,
        tenant: Tenant = SHARED,
        parents: Sequence[BlockKey | None] | None = None,
    ) -> tuple[Reservation, ...]:
        _check_tenant(tenant)
        check_parents(keys, parent, parents)
        with self._changed:
            self._drain()
            has_below = self._writer.has_below
            blocks, filling, holds = self._host.blocks, self._filling, self._is_below_here
            made: dict[BlockKey, Block] = {}
            depth = self._depth_of(parent) if parents is None else 0
            for place, key in enumerate(keys):
                if key in blocks or key in filling or key in made or (has_below and holds(key)):
                    continue
                if parents is None:
                    above, deep = keys[place - 1] if place else parent, depth + place
                else:
                    above = parents[place]
                    link = None if above is None else made.get(above)
                    deep = self._depth_of(above) if link is None else link.depth + 1
                made[key] = Block(key, above, deep, -1, self._size_of(key), tenant)
            if not made:
                return (_PRESENT,) * len(keys)

            def in_use() -> list[Block]:
                present = [blocks[key] for key in keys if key in blocks]
                hanging = [b.parent for b in made.values() if hangs(b.key, b.parent)]
                return [*present, *self._lines_of(hanging)]

            for block in self._place(self._accepted(made), in_use):
                filling[block.key] = block
            reserved = Verdict.RESERVED
            given: list[Reservation] = []
            for key in keys:
                new = made.get(key)
                if new is None:
                    given.append(_PRESENT)
                elif new.offset < 0:
                    given.append(_REFUSED)
                    self._refused += 1
                else:
                    given.append(Reservation(reserved, new.offset))
                    del made[key]  # named again, it is being filled
        return tuple(given)

    def commit(self, keys: Sequence[BlockKey]) -> None:
        with self._changed:
            new: list[Block] = []
            for block in [self._filling.pop(key) for key in keys if key in self._filling]:
                present = self._host.blocks.get(block.key)
                if present is None:
                    new.append(block)
                else:  # it came from a store meanwhile
                    self._host.free(block)
                    self._writer.recalled([present])
            self._host.publish(new)
            self._commit_bytes += sum([block.nbytes for block in new])
            self._commits += len(new)
            self._writer.committed(new)

    def abandon(self, keys: Sequence[BlockKey]) -> None:
        with self._changed:
            for key in keys:
                block = self._filling.pop(key, None)
                if block is not None:
                    self._host.free(block)

    def flush(self, keys: Sequence[BlockKey], deadline_s: float) -> bool:
        if not self._writer.has_below:
            return True
        until = self._monotonic() + deadline_s
        with self._changed:
            while True:
                self._drain()
                waiting = self._writer.store_until_durable(keys)
                left = until - self._monotonic()
                if waiting is not None and not waiting:
                    return True
                if waiting is None or left <= 0 or self._closed:
                    return False
                self._changed.wait(min(left, _RETRY_S))

    def is_read_only(self, namespace: bytes) -> bool:
        """Whether engines save nothing in the namespace of this digest, and clear nothing."""
        return self._terms.spares(namespace)

    def clear(self) -> None:
        if self._terms.spares_some:
            spares, held = self._terms.spares, self.admin.blocks()
            lost = {each.key for each in held if not spares(each.key[:NAMESPACE_BYTES])}
            self.admin.drop(lost, Cause.CLEARED)
            return
        with self._changed:
            self._drain()
            self._below.clear()
            self._host.unpin(list(self._host.pins))
            self._evictor.drop(list(self._host.blocks), Cause.CLEARED)
            self._expire_loads(self._loading)

    def stats(self) -> PoolStats:
        with self._changed:
            self._drain()
            host = self._host
            host_stats = TierStats(
                name=str(TierName.HOST),
                capacity_bytes=host.slots.limit_bytes,
                used_bytes=host.slots.used_bytes,
                blocks=len(host.blocks),
                hits=self._host_hits,
                writes=self._commits,
                write_bytes=self._commit_bytes,
                evictions=host.evictions,
                dropped=self._refused,
                pinned_bytes=host.pinned_bytes,
                over_quota=host.accounts.refused,
                quota_evictions=host.accounts.evicted,
            )
            below = self._below.stats_of_each() if self._writer.has_below else ()
            puts, gets = self._below.queued()
            hints = self._hints.counts
            return PoolStats(
                tiers=(host_stats, *self._absent, *below),
                leases=host.leases,
                reserved=len(self._filling),
                queued_writes=puts,
                queued_reads=gets,
                lookups=self._lookups,
                hits=self._found,
                refused=self._refused,
                hints=hints.given,
                hints_believed=hints.believed,
                hints_true=hints.true,
                hints_false=hints.false,
                unwritten_bytes=self._writer.unwritten_bytes,
                histograms=self._below.histograms(),
            )

    # -- changes ---------------------------------------------------------------------------

    def watch(self, watcher: Watcher) -> None:
        """From now on ``watcher`` is told what enters and leaves each tier; of a remote one, what
        this pool stores and finds missing."""
        with self._changed:
            self._host.watchers = (*self._host.watchers, watcher)
            self._below.watch(watcher)

    def sweep(self, watcher: Watcher) -> Iterator[None]:
        """Reports every block in every tier as stored, some with each step."""
        with self._changed:
            keys = list(self._host.blocks)
        for start in range(0, len(keys), _LOOKED_UP):
            with self._changed:
                blocks = self._host.blocks
                for key in keys[start : start + _LOOKED_UP]:
                    if key in blocks:
                        watcher.stored(TierName.HOST, key, blocks[key].parent)
            yield
        yield from self._below.sweep(watcher)

    # -- administration, for ``PoolAdmin`` --------------------------------------------------

    def drop(self, keys: Sequence[BlockKey], cause: Cause = Cause.DROPPED) -> None:
        """Drops these blocks, pinned or not, from every tier; leased ones stay in the host."""
        with self._changed:
            self._drain()
            keys = list(dict.fromkeys(keys))
            self._below.drop(keys, cause)
            self._evictor.drop([key for key in keys if key in self._host.blocks], cause)
            self._expire_loads(keys)

    def lost_below(self, keys: Sequence[BlockKey]) -> None:
        """These blocks are no longer in the lower tier; copies in the host are stored on next
        use."""
        with self._changed:
            blocks = self._host.blocks
            self._writer.lost([blocks[key] for key in keys if key in blocks])

    def is_in_host(self, key: BlockKey) -> bool:
        return key in self._host.blocks

    def host_blocks(self, unused_since: float | None = None) -> list[BlockInfo]:
        """Every block in the host, or those unused since that second."""
        with self._changed:
            blocks = list(self._host.blocks.values())
        before, found = float("inf") if unused_since is None else unused_since, []
        for start in range(0, len(blocks), _LOOKED_UP):
            with self._changed:
                found += self._host.infos(blocks[start : start + _LOOKED_UP], before)
        return found

    def host_tenants(self) -> list[TenantUse]:
        with self._changed:
            return self._host.accounts.uses()

    def pin(self, keys: Collection[BlockKey]) -> None:
        """Pins blocks of these keys, present or future: they are not evicted from the host."""
        with self._changed:
            self._host.pin(keys)

    def unpin(self, keys: Collection[BlockKey]) -> None:
        with self._changed:
            self._host.unpin(keys)

    def pin_room(self) -> tuple[int, int]:
        """Bytes of the host that are pinned, and the limit."""
        with self._changed:
            return self._host.pinned_bytes, self._host.pin_limit

    def resize_host(self, nbytes: int) -> None:
        """Sets how much of the arena is used. Shrinking continues in the background, see
        ``host_surplus``. The memory itself stays with the owner. Raises ConfigError if the arena
        cannot grow that far, the machine does not have that much memory, or too much is pinned."""
        most = self._host.slots.nbytes
        if nbytes > most:
            raise ConfigError(
                f"host: {nbytes / _GIB:.2f} GiB is more than the {most / _GIB:.2f} GiB this "
                "pool can grow to; the limit of shared memory that engines map is fixed at "
                "start: start the pool with host_max_size (or a larger host_size)"
            )
        with self._resizing:
            self._arena.grow(nbytes)
        with self._changed:
            pinned, share = self._host.pinned_bytes, self._terms.pin_limit
            if pinned > share * nbytes:
                raise ConfigError(
                    f"host: {pinned / _GIB:.2f} GiB are pinned, more than pin_limit "
                    f"({share:g}) allows of {nbytes / _GIB:.2f} GiB; unpin some blocks"
                )
            self._host.slots.limit_bytes = nbytes
            self._changed.notify_all()

    def host_surplus(self) -> int:
        """Bytes in use above the host's present limit."""
        slots = self._host.slots
        return max(0, slots.used_bytes - slots.limit_bytes)

    def close(self, deadline_s: float = 10.0) -> None:
        """See ``PoolClient``; queued writes get ``deadline_s`` seconds."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        until = self._monotonic() + deadline_s
        self._write_rest(until)
        self._below.close(max(1.0, until - self._monotonic()))
        self._reaper.join()
        with self._changed:
            self._drain()
            self._tickets.clear()
            self._host.blocks.clear()
            self._writer.has_below = False
            self._changed.notify_all()
        self._arena.close()

    # -- inside, under the lock ------------------------------------------------------------

    def _drain(self) -> None:
        """Processes the operations that the tier below has completed."""
        if self._writer.has_below:
            self._apply(self._below.poll())

    def _apply(self, done: Sequence[Done]) -> None:
        for item in done:
            if item.outcome in (Outcome.STORED, Outcome.SHED):
                self._writer.ended(item)
            else:
                self._loaded(item)

    def _size_of(self, key: BlockKey) -> int:
        known = self._namespaces.get(key[:NAMESPACE_BYTES])
        if known is None:
            raise KeyError(f"namespace {key[:NAMESPACE_BYTES].hex()} was not registered")
        return known[1]

    def _depth_of(self, parent: BlockKey | None) -> int:
        """Depth of the child of ``parent``; 0 if it is not known."""
        if parent is None:
            return 0
        block = self._host.blocks.get(parent) or self._filling.get(parent)
        if block is not None:
            return block.depth + 1
        depth = self._below.depth_of(parent)
        return 0 if depth is None else depth + 1

    def _lines_of(self, parents: Iterable[BlockKey | None]) -> list[Block]:
        """The blocks of the host among ``parents`` and all before them in their chains."""
        blocks, line = self._host.blocks, dict[BlockKey, Block]()
        for key in parents:
            while key is not None and key not in line and (block := blocks.get(key)) is not None:
                line[key] = block
                key = block.parent
        return list(line.values())

    def _accepted(self, made: Mapping[BlockKey, Block]) -> Mapping[BlockKey, Block]:
        """Those of new blocks that may be saved; the log names each read-only namespace once."""
        if self._closed:
            return {}
        if not self._terms.spares_some:
            return made
        digests = {key[:NAMESPACE_BYTES] for key in made}
        spared = {digest for digest in digests if self._terms.spares(digest)}
        for digest in spared - self._told:
            _LOG.warning(
                "pool: namespace %s is read-only by this pool's settings; no block of it is saved",
                digest.hex(),
            )
        self._told |= spared
        refused = {key: made[key] for key in made if key[:NAMESPACE_BYTES] in spared}
        self._host.refuse(refused.values(), Refusal.READ_ONLY)
        return {key: made[key] for key in made if key not in refused}

    def _place(
        self, made: Mapping[BlockKey, Block], in_use: Callable[[], Sequence[Block]]
    ) -> list[Block]:
        """Gives slots to new blocks; returns those that have one. Evicts none ``in_use``. Without a
        lower tier, the policy may refuse blocks that are worth less than those they would displace;
        otherwise the arena is on their way down and accepts all."""
        of_size: dict[int, list[Block]] = {}
        for block in made.values():
            of_size.setdefault(block.nbytes, []).append(block)
        choosy = not self._writer.has_below
        placed = [self._evictor.place(blocks, choosy, in_use) for blocks in of_size.values()]
        return [block for blocks in placed for block in blocks]

    # -- from below into the host, under the lock ------------------------------------------

    def _below_answers(self) -> bool:
        """Whether the tier below answers. After an overdue load it counts as empty, until a load
        arrives or a while has passed: a hung medium costs one deadline now and then, not one per
        request. A remote tier handles that itself."""
        if not (self._loading and self._writer.has_below):
            return self._writer.has_below
        now = self._monotonic()
        for loading in self._loading.values():
            if loading.tier is TierName.REMOTE:
                continue
            if loading.due >= now:
                break
            if not loading.overdue:
                loading.overdue = True
                self._silent_until = now + _PENALTY_S
        return now >= self._silent_until

    def _is_below_here(self, key: BlockKey) -> bool:
        """Whether the block is in a lower tier of this host, or being promoted."""
        below = self._below
        return key in self._loading or (
            below.contains(key) and below.tier_of(key) is not TierName.REMOTE
        )

    def _lease_present(self, keys: Sequence[BlockKey], deadline: float) -> Ticket:
        """Leases the blocks of the present prefix that are in the host; records those below."""
        get = self._host.blocks.get
        blocks = [get(key) for key in keys]
        tiers = [TierName.HOST] * len(blocks)
        present = [block for block in blocks if block is not None]
        if len(present) < len(blocks):
            absent = [place for place, block in enumerate(blocks) if block is None]
            below = self._below.tiers_of([keys[place] for place in absent])
            answers = self._below_answers()
            for place, tier in zip(absent, below, strict=True):
                loading = self._loading.get(keys[place])
                if not answers or (tier is None and loading is None):
                    del blocks[place:], tiers[place:]
                    break
                if tier is None and loading is not None:
                    tier = loading.tier
                assert tier is not None
                tiers[place] = tier
            present = [block for block in blocks if block is not None]
        self._host.lease(present)
        self._writer.recalled(present)
        return Ticket(deadline, blocks, tiers, len(blocks) - len(present))

    def _load(
        self,
        keys: Sequence[BlockKey],
        ticket: Ticket,
        parents: Sequence[BlockKey | None],
        tenant: Tenant,
    ) -> None:
        """Starts loading the missing blocks of ``ticket``; cuts it where space ends."""
        gets: list[Get] = []
        for place, block in self._slots_to_load(keys, ticket, tenant).items():
            block.parent = parents[place]
            tier = self._below.tier_of(block.key)
            self._loading[block.key] = _Loading(block, tier, ticket.deadline)
            gets.append(Get(block.key, self._arena.view(block.offset, block.slot_bytes)))
        for place in ticket.waiting():
            self._loading[keys[place]].waiters.append((ticket, place))
        if gets:
            self._below.submit_get(gets)

    def _slots_to_load(
        self, keys: Sequence[BlockKey], ticket: Ticket, tenant: Tenant
    ) -> dict[int, Block]:
        """Slots, by place, for the blocks to load. If there are too few, the ticket gives up blocks
        from its end, so that its beginning can be loaded instead."""
        blocks: dict[int, Block] = {}
        while True:
            wanted: dict[BlockKey, int] = {}
            for place in ticket.waiting():
                if keys[place] not in self._loading:
                    wanted.setdefault(keys[place], place)
            for place in [place for place in blocks if place >= len(ticket.blocks)]:
                self._host.free(blocks.pop(place))
            missing = [key for key, place in wanted.items() if place not in blocks]
            if not missing:
                return blocks
            for nbytes, group in itertools.groupby(missing, self._size_of):
                run = list(group)
                offsets = self._evictor.allocate(nbytes, len(run), tenant)
                for key, offset in zip(run, offsets, strict=False):
                    depth = self._below.depth_of(key) or 0
                    blocks[wanted[key]] = Block(key, None, depth, offset, nbytes, tenant)
            short = len(wanted) - len(blocks)
            if short:
                self._host.unlease(ticket.cut(len(ticket.blocks) - (short + 1) // 2))

    def _loaded(self, done: Done) -> None:
        loading = self._loading.pop(done.key)
        self._silent_until = float("-inf")
        waiters = [waiter for waiter in loading.waiters if waiter[0].result is None]
        block = loading.block
        if done.outcome is not Outcome.LOADED:
            self._host.free(block)
            if done.outcome in _UNGOT and loading.tier is TierName.REMOTE:
                self._unreadable.note(block.key, _UNGOT[done.outcome])
            for ticket, place in waiters:
                self._host.unlease(ticket.cut(place))
        elif waiters or loading.wanted:
            present = self._host.blocks.get(block.key)
            if present is None:
                durable = loading.wanted and self._writer.is_durable(block.key)
                self._host.set_stored(block, durable)
                self._writer.keep_checksum(block, done.checksum)
                self._host.publish([block])
            else:  # it was computed and committed meanwhile
                self._host.free(block)
                block = present
            for ticket, place in waiters:
                if ticket.fill(place, block):
                    self._host.lease((block,))
        else:
            self._host.free(block)

    def _expire_loads(self, keys: Iterable[BlockKey]) -> None:
        """Blocks being promoted now are outdated: they are kept only for recalls that wait for
        them."""
        for key in keys:
            if key in self._loading:
                self._loading[key].wanted = False

    # -- in the background -----------------------------------------------------------------

    def _reap(self) -> None:
        """Thread: processes completed operations of the lower tier, so that waiting calls notice;
        keeps the host between its watermarks; starts due writes; drops expired blocks."""
        more = False
        while not self._closed:
            done = self._below.poll(0.0 if more else _TICK_S) if self._writer.has_below else []
            with self._changed:
                self._apply(done)
                self._writer.store_due()
                more = self._evictor.trim(_TRIMMED_AT_ONCE)
                if done:
                    self._changed.notify_all()
                elif not (more or self._writer.has_below or self._closed):
                    self._changed.wait(_TICK_S)
            if next(self._retiring, self) is None:
                more = True
            elif self._unswept:
                more = True
                with self._changed:
                    leaving = _Leaving(self._tables(), self._unswept)
                    self._unswept = frozenset()
                self._retiring = self.sweep(leaving)
            self.admin.expire()

    def _write_rest(self, until: float) -> None:
        """Writes the blocks that the write policy kept back, as far as time allows."""
        while self._monotonic() < until:
            with self._changed:
                self._drain()
                if not self._writer.store_rest():
                    return
                self._changed.wait(_RETRY_S)


def _check_tenant(tenant: Tenant) -> None:
    if not is_tenant(tenant):
        raise ValueError(f"{tenant!r} is not a tenant; see kvrecall.block.tenant_of")
