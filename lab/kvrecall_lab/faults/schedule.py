"""One schedule, which follows from its seed: a pool lives, its machine fails, and it lives on."""

from __future__ import annotations

import contextlib
import errno
import gc
import logging
import mmap
import random
import shutil
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from unittest.mock import patch

from kvrecall.block import NAMESPACE_BYTES, BlockKey, Namespace, TierName
from kvrecall.config import (
    DEFAULT_POLICY,
    Amount,
    Compression,
    DiskConfig,
    PoolTerms,
    RemoteConfig,
    TenantRules,
    TenantTerms,
    Watermarks,
)
from kvrecall.errors import ConfigError, TierError
from kvrecall.pool import Pool
from kvrecall.pool.arena import Arena
from kvrecall.pool.base import RecallState, Verdict
from kvrecall.pool.cascade import Cascade
from kvrecall.pool.cipher import Cipher
from kvrecall.pool.clock import Clock
from kvrecall.pool.disk import DiskTier, codec, index, reclaimer, slabs
from kvrecall.pool.disk import tier as disk_tier
from kvrecall.pool.disk.codec import make_codec
from kvrecall.pool.remote.tier import RemoteTier
from kvrecall.pool.slots import slot_bytes_of
from kvrecall.pool.tier import Tier
from kvrecall_lab.faults.machine import Dead, Machine, Names, Stuck, simulated
from kvrecall_lab.faults.medium import ALL, CHANGES, GROWS, Disk, Fault, System, Troubles
from kvrecall_lab.faults.oracle import Oracle, Verdicts
from kvrecall_lab.faults.sqlite import SimulatedVfs
from kvrecall_lab.faults.store import TROUBLES, Peer, SimulatedStore

_YEAR_S = 365 * 86400.0
_DISK_BYTES = 8 << 20
_ARENA_BYTES = 1 << 20  # at most, but for eight slots
_PROGRESS_S = 180.0  # from the last fault to the next block on disk, at most
_IDLE_S = 60.0
_LATE_S = 30.0  # a call beyond its deadline
_MOST_CALLS = 150  # of a fault that is to come at the n-th call
_COMPRESSIONS: tuple[Compression, ...] = ("none", "none", "none", "none", "zstd")
_FEW_CALLS = 40  # of one that is to come at the n-th call of a kind
KINDS = (
    "calm", "cut", "cut", "kill", "error", "error", "sync", "lies", "rot", "flips", "hangs",
    "clock", "store", "memory", "squeeze", "service",
)  # fmt: skip
"""What fails, beside the power; `squeeze`: nothing else, but blocks are evicted, moved and dropped
while they are read, all the time; `service`: see ``service``."""

LISTED = {errno.ENOSPC: GROWS, errno.EDQUOT: GROWS, errno.EIO: ALL, errno.EROFS: CHANGES}
"""Which calls fail with which errno."""


@dataclass
class Outcome:
    """What a schedule was and what it found."""

    seed: int
    kind: str = ""
    verdicts: Verdicts = field(default_factory=Verdicts)
    cuts: int = 0
    kills: int = 0
    faults: int = 0
    calls: int = 0
    acknowledged: int = 0
    recalled: int = 0
    story: list[str] = field(default_factory=list)


class World:
    """What outlives a process: the disk, the store, the true time and what the wall clock shows."""

    def __init__(self, seed: int, root: Path) -> None:
        self.chance = random.Random(seed)
        self.kind = KINDS[seed % len(KINDS)]
        self.round = seed // len(KINDS)
        self.disk = Disk(root)
        self.peer = Peer({})
        self.oracle = Oracle()
        self.oracle.is_sound = self.kind not in ("lies", "rot", "flips")
        self.has_errors = self.kind in ("error", "sync", "memory")  # so may count some
        self.outcome = Outcome(seed, self.kind, self.oracle.verdicts)
        self.boot = 0
        self.uptime = 1000.0
        self.wall_at_boot = 1.7e9
        sizes = (3000, 20_000, 65_536, 262_144, 262_144)
        spaces = [Namespace.of({"model": str(n)}) for n in range(self.chance.choice((1, 1, 2)))]
        self.spaces = {space: self.chance.choice(sizes) for space in spaces}
        self.compression = self.chance.choice(_COMPRESSIONS)
        self.is_sealed = self.chance.random() < 0.15
        if self.kind == "squeeze":
            self.compression, self.is_sealed = "none", False
            del spaces[1:]
            self.spaces = {spaces[0]: 262_144}
        room = _DISK_BYTES, 12 << 20
        self.disk_bytes = room[1] if self.kind == "squeeze" else self.chance.choice(room)
        self.disk.direct = self.chance.choice(("", "", "aligned", "refused"))
        self.disk.keeps_pages = self.round % 2 == 0
        self.slots = self.chance.choice((12, 24, 60))
        chains = self.chance.choice((4, 12, 24))
        self.chains = [
            [spaces[chain % len(spaces)].key(bytes([chain, place]) * 16) for place in range(8)]
            for chain in range(chains)
        ]
        self.fresh = iter(spaces[0].key(b"fresh" + bytes([n]) * 27) for n in range(256))
        self._sizes = {space.digest: nbytes for space, nbytes in self.spaces.items()}

    def size_of(self, key: BlockKey) -> int:
        return self._sizes[key[:NAMESPACE_BYTES]]


class Life:
    """One process of a pool, from its start to its end, or its machine's."""

    def __init__(self, world: World, troubles: Troubles, is_last: bool) -> None:
        self.world, self.troubles, self.is_last = world, troubles, is_last
        self.chance = world.chance
        self.machine = Machine(self.chance, self.chance.choice((0.0, 0.05, 0.3)))
        self.machine.now = world.uptime
        self.system = System(self.machine, world.disk, troubles)
        self.store = SimulatedStore(self.machine, world.peer)
        self.has_store = world.kind == "store"
        self.skew = 0.0  # of the wall clock
        self.looked_up = self.found = 0
        self.refused = ""  # why the pool did not open
        self.logged: list[str] = []
        world.oracle.now = lambda: world.wall_at_boot + self.machine.now
        world.oracle.damaged, world.oracle.unread = 0, lambda: self.system.failed["read"]
        self.pool: Pool
        self.disk: DiskTier

    # -- the process -----------------------------------------------------------------------

    def wall(self) -> float:
        return self.world.wall_at_boot + self.machine.now + self.skew

    def _ran_s(self) -> float:
        return self.machine.now - self.machine.leapt

    def run(self, vfs: SimulatedVfs) -> None:
        world = self.world
        largest = max(slot_bytes_of(nbytes) for nbytes in world.spaces.values())
        arena = Arena.create(min(world.slots * largest, max(_ARENA_BYTES, 8 * largest)))
        vfs.system = self.system
        verdicts = world.oracle.verdicts
        try:
            with self._simulated():
                self.machine.run(lambda: self._main(arena))
        except Stuck as error:
            verdicts.stuck.append(str(error))
        except Dead:
            pass
        except Exception as error:  # noqa: BLE001 - a call of the pool raised it
            verdicts.died.append(f"main: {told_of(error)}")
        finally:
            self.machine.is_dead = True
            for task in self.machine.tasks[1:]:
                if task.error is not None and not self.system.was_cut:
                    verdicts.died.append(f"{task.name}: {told_of(task.error)}")
                task.error = None
            was_closed = not (self.system.was_cut or verdicts.stuck or verdicts.died)
            # But for those that a store lets wait, in the last life.
            tasks = [one for one in self.machine.left if self.is_last and "remote" not in one]
            self.__dict__.pop("pool", None)
            self.__dict__.pop("disk", None)
            if vfs.open_files(self.system) or self.system.fds:
                gc.collect()
            open_files = vfs.open_files(self.system)
            left = self.system.end()
            if was_closed and (left or open_files or tasks):
                verdicts.leaks.append(f"still open: {left} {open_files} of SQLite, {tasks}")
            vfs.system = None
            arena.close()
        world.uptime = self.machine.now
        world.outcome.faults += self.system.faults + self.store.faults
        world.outcome.calls += self.system.calls

    @contextlib.contextmanager
    def _simulated(self) -> Iterator[None]:
        with simulated(self.machine, self.wall), on_disk(self.system), told_to(self.logged):
            yield

    def _open(self, arena: Arena) -> None:
        world, chance = self.world, self.chance
        clock = Clock(self.wall, lambda: self.machine.now, f"boot {world.boot}")
        ttl_s = world.oracle.ttl_s
        share = chance.choice((None, None, None, None, Amount(share=0.4)))
        rules = TenantRules(TenantTerms(disk=share, ttl_s=None if ttl_s == float("inf") else ttl_s))
        terms = PoolTerms(
            write_policy=chance.choice(("through", "through", "back", "selective")),
            tenants=rules,
            host_marks=chance.choice((Watermarks(1.0, 1.0), Watermarks(0.8, 0.6))),
        )
        config = DiskConfig(
            world.disk.folder,
            world.disk_bytes,
            direct_io=world.disk.direct != "",
            max_queued_bytes=chance.choice((1 << 16, 1 << 20)),
            readers=chance.choice((1, 2)),
            compression=world.compression,
        )
        below: Tier
        policy = chance.choice(("lru", "lru", "lru", DEFAULT_POLICY))
        cipher = Cipher([bytes(32)]) if world.is_sealed else None
        form = make_codec(cipher, world.compression)
        below = self.disk = DiskTier(config, policy, None, clock, form, terms)
        if self.has_store:
            remote = RemoteTier(self.store, RemoteConfig("simulated"), lambda: self.machine.now)
            below = Cascade(below, remote)
        self.pool = Pool(arena, below, policy, clock, lambda: self.machine.now, terms)
        for space, nbytes in world.spaces.items():
            self.pool.register(space, nbytes)
        oracle = world.oracle
        oracle.present.clear()
        oracle.evicted.clear()
        self.pool.watch(oracle)
        for _ in self.pool.sweep(oracle):
            pass

    def _main(self, arena: Arena) -> None:
        world = self.world
        try:
            self._open(arena)
        except (TierError, ConfigError) as error:
            self.refused = str(error)
            if self.is_last:
                world.oracle.verdicts.stuck.append(f"does not open: {error}")
            return
        if self.is_last:
            self._wait(lambda: self.disk._engine.recovered.is_set(), "the recovery")
            self._check_pins()
            self._check_acknowledged("after the restart")
        clients = self.chance.choice((1, 2, 3))
        tasks = [self.machine.spawn(self._client, f"client {n}") for n in range(clients)]
        for task in tasks:
            task.joined()
        self._check_told()
        self.troubles.end()
        world.peer.trouble = ""
        self._check_progress()
        self._check_acknowledged("in the same life")
        self._check_idle()
        if world.oracle.ttl_s != float("inf"):
            self._clock_steps(1.0)
            self._wait(self._is_expired, "the life of blocks", 2.5 * world.oracle.ttl_s, 3.0)
        began = self._ran_s()
        self.pool.close(10.0)
        if (took := self._ran_s() - began) > 10.0 + _LATE_S:
            world.oracle.verdicts.stuck.append(f"closing took {took:.0f} s")
        if self.is_last:
            self.machine.sleep(1.0)  # in which threads end

    # -- clients ---------------------------------------------------------------------------

    def _client(self) -> None:
        actions: list[tuple[Callable[[], None], float]] = [
            (self._save, 6),
            (self._recall, 5),
            (self._recall_dropped, 0.5),
            (self._flush, 4),
            (self._touch, 1),
            (self._drop, 0.7),
            (self._pin, 0.5),
            (self._clear, 0.05),
            (self._resize, 0.3),
            (self._verify, 0.2),
            (self._pause, 1),
        ]
        count = self.chance.choice((6, 15, 30))
        if self.world.kind == "squeeze":
            actions += [(self._save, 6), (self._recall_dropped, 3), (self._resize, 2)]
            count = 30
        names, weights = zip(*actions, strict=True)
        for _ in range(count):
            self._clock_steps()
            self.chance.choices(names, weights)[0]()

    def _clock_steps(self, likely: float = 0.1) -> None:
        if self.world.kind == "clock" and self.chance.random() < likely:
            self.skew = self.chance.choice((-20, -4, 0, 2, 10)) * _YEAR_S

    def _keys(self) -> list[BlockKey]:
        chain = self.chance.choice(self.world.chains)
        return chain[: self.chance.randrange(1, len(chain) + 1)]

    def _save(self) -> None:
        self._store(self._keys())

    def _store(self, keys: Sequence[BlockKey]) -> None:
        oracle = self.world.oracle
        given = self.pool.reserve(keys)
        mine = [
            (k, r.offset) for k, r in zip(keys, given, strict=True) if r.verdict is Verdict.RESERVED
        ]
        for key, offset in mine:
            size = self.world.size_of(key)
            data = oracle.filled(key, size)
            self.pool.arena.view(offset, size // 2)[:] = data[: size // 2]
            self.machine.turn()
            self.pool.arena.view(offset, size)[:] = data
        if self.chance.random() < 0.05:
            self.pool.abandon([key for key, _ in mine])
        else:
            self.pool.commit([key for key, _ in mine])

    def _recall(self) -> None:
        self._get(self._keys(), self.chance.choice((0.01, 2.0, 10.0)))

    def _recall_dropped(self) -> None:
        """Blocks are dropped and stored anew while they are being read."""
        keys = self._keys()

        def drop() -> None:
            self.pool.drop(keys)
            self._store(keys)

        self.world.oracle.dropped(keys)
        self._get(keys, 10.0, drop)

    def _get(
        self,
        keys: Sequence[BlockKey],
        deadline_s: float,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> int:
        """Recalls them, compares every byte, and returns how many blocks came."""
        pool, oracle = self.pool, self.world.oracle
        for _ in range(100):
            found = pool.find(keys)
            if not found.pending:
                self.looked_up += len(keys)
                self.found += found.blocks
                break
            self.machine.sleep(0.01)
        keys = keys[: found.blocks]
        if not keys:
            return 0
        until = self._ran_s() + deadline_s + _LATE_S
        ticket = pool.acquire(keys, deadline_s)
        meanwhile()
        while (recall := pool.poll(ticket)).state is RecallState.PENDING:
            if self._ran_s() > until:
                oracle.verdicts.stuck.append("a recall that is not READY")
                break
            self.machine.sleep(0.003)
        for _ in range(2):
            for key, offset in zip(keys, recall.offsets, strict=False):
                data = bytes(pool.arena.view(offset, self.world.size_of(key)))
                oracle.recalled(key, data, "leased")
                self.machine.sleep(self.chance.choice((0.0, 0.02)))
        pool.release(ticket)
        self.world.outcome.recalled += len(recall.offsets)
        return len(recall.offsets)

    def _flush(self) -> None:
        self._flushed(self._keys())

    def _flushed(self, keys: Sequence[BlockKey]) -> bool:
        oracle = self.world.oracle
        before = [oracle.removals[key] for key in keys]
        until = self._ran_s() + 5.0 + _LATE_S
        if not self.pool.flush(keys, 5.0):
            if self._ran_s() > until:
                oracle.verdicts.stuck.append("a flush beyond its deadline")
            return False
        for key, count in zip(keys, before, strict=True):
            if oracle.removals[key] == count:
                oracle.acknowledged[key] = self.system.calls
                self.world.outcome.acknowledged += 1
        return True

    def _touch(self) -> None:
        self.pool.touch(self._keys())

    def _drop(self) -> None:
        keys = self.chance.sample(self._keys(), 1)
        self.world.oracle.dropped(keys)
        self.pool.admin.drop(keys)

    def _pin(self) -> None:
        oracle, keys = self.world.oracle, self.chance.sample(self._keys(), 1)
        before = [oracle.removals[key] for key in keys]
        if self.chance.random() < 0.3:
            oracle.pinned.difference_update(keys)
            with contextlib.suppress(ConfigError):
                self.pool.admin.unpin(keys)
            return
        here = [self.disk.contains(key) for key in keys]
        with contextlib.suppress(ConfigError):
            self.pool.admin.pin(keys)
            for key, count, was_here in zip(keys, before, here, strict=True):
                if was_here and oracle.removals[key] == count and key in self.disk.catalog.pins:
                    oracle.pinned.add(key)

    def _clear(self) -> None:
        self.world.oracle.dropped([*self.world.oracle.acknowledged, *self.world.oracle.pinned])
        self.pool.clear()

    def _resize(self) -> None:
        for nbytes in (_DISK_BYTES, self.chance.choice((_DISK_BYTES, self.world.disk_bytes))):
            with contextlib.suppress(ConfigError):
                self.disk.resize(nbytes)
            self.machine.sleep(self.chance.choice((0.0, 0.05, 0.5)))

    def _verify(self) -> None:
        with contextlib.suppress(OSError):  # no memory for it
            for _ in self.disk.check(self._keys()):
                pass

    def _pause(self) -> None:
        self.machine.sleep(self.chance.choice((0.01, 0.2, 1.0, 7.0)))

    # -- what must be true -----------------------------------------------------------------

    def _wait(
        self, until: Callable[[], bool], what: str, most_s: float = _IDLE_S, every_s: float = 0.1
    ) -> bool:
        end = self.machine.now + most_s
        while not until():
            if self.machine.now > end:
                self.world.oracle.verdicts.stuck.append(f"{what} does not end")
                return False
            self.machine.sleep(every_s)
        return True

    def _is_expired(self) -> bool:
        """Whether all blocks that no request used for their life are gone."""
        return all(info.pinned for info in (*self.pool.host_blocks(), *self.disk.catalog.infos()))

    def _check_told(self) -> None:
        """A tier that stores nothing now says so soon, and shows it."""
        engine = self.disk._engine

        def is_told() -> bool:
            is_off = engine.is_index_failing or self.disk._flusher._broken
            stats = self.disk.stats()
            is_shown = bool(self.logged and stats.errors + stats.full)
            return is_shown or not (is_off or self.disk._store.full)

        self._wait(is_told, "the silence of a disk that is off", 5.0)

    def _check_progress(self) -> None:
        """A new block is on disk soon after all faults ended."""
        until = self.machine.now + _PROGRESS_S
        while True:
            key = next(self.world.fresh)
            if self.machine.now > until:
                log = "; ".join(self.logged[-3:]) or "and nothing was logged"
                self.world.oracle.verdicts.stuck.append(f"stores no block any more: {log}")
                return
            self._store([key])
            if self._flushed([key]):
                return
            self.machine.sleep(5.0)

    def _check_pins(self) -> None:
        oracle = self.world.oracle
        missing = oracle.pinned - self.disk.catalog.pinned_keys()
        if missing and oracle.is_sound:
            oracle.verdicts.lost.append(f"{len(missing)} pins")
        oracle.pinned.clear()

    def _check_acknowledged(self, when: str) -> None:
        """Every block that was acknowledged and did not leave since comes back."""
        oracle = self.world.oracle
        for key, call in list(oracle.acknowledged.items()):
            tries = 5  # the host may be full of blocks that are being written
            while key in oracle.acknowledged and tries and not self._get([key], 10.0):
                tries -= 1
                self.machine.sleep(1.0)
            if not tries and key in oracle.acknowledged:
                if oracle.is_sound:
                    oracle.verdicts.lost.append(f"{key.hex()[-6:]} of call {call}, {when}")
                del oracle.acknowledged[key]

    def _check_idle(self) -> None:
        """Nothing is held or owed any more, and the counters add up, once all work is done."""
        pool, disk, oracle = self.pool, self.disk, self.world.oracle
        self._wait(lambda: pool.stats().queued_writes == 0, "a write")
        self._wait(lambda: not disk.catalog.pending_free, "the deletion of rows")
        for _ in range(10):  # blocks may still be moved or evicted
            leaks, miscounted = self._owed(), self._miscounted()
            if not leaks + miscounted:
                break
            self.machine.sleep(1.0)
        oracle.verdicts.leaks += leaks
        oracle.verdicts.miscounted += miscounted
        below = disk.stats()
        if oracle.is_sound and not self.world.has_errors and (below.errors or below.corrupt):
            told = f"{below.errors} errors, {below.corrupt} corrupt, and no fault"
            oracle.verdicts.lost.append(told)

    def _owed(self) -> list[str]:
        stats, leaks = self.pool.stats(), list[str]()
        if stats.leases or stats.reserved or stats.queued_reads:
            leaks.append(f"{stats.leases} leases, {stats.reserved} reserved")
        used = sum(info.slot_bytes for info in self.pool.host_blocks())
        if used != stats.tiers[0].used_bytes:
            leaks.append(f"{stats.tiers[0].used_bytes - used} bytes of slots in the host")
        taken = sum(one.slots - one.free for one in self.disk._store.classes())
        if taken != len(self.disk.catalog):
            leaks.append(f"{taken - len(self.disk.catalog)} slots on disk")
        return leaks

    def _miscounted(self) -> list[str]:
        stats, oracle = self.pool.stats(), self.world.oracle
        told = {
            "lookups": (stats.lookups, self.looked_up),
            "hits": (stats.hits, self.found),
            "blocks in the host": (stats.tiers[0].blocks, len(oracle.present[TierName.HOST])),
            "blocks on disk": (stats.tiers[1].blocks, len(oracle.present[TierName.DISK])),
            "evicted from the host": (stats.tiers[0].evictions, oracle.evicted[TierName.HOST]),
            "evicted from disk": (stats.tiers[1].evictions, oracle.evicted[TierName.DISK]),
        }
        wrong = [
            f"{what}: {n} counted, {seen} seen" for what, (n, seen) in told.items() if n != seen
        ]
        now = self.pool.admin.now()
        for info in self.disk.catalog.infos():
            age = oracle.now() - oracle.began[info.key]
            if not -1.0 <= now - info.used <= age + 60.0:
                wrong.append(f"a block of {age:.0f} s ago is {now - info.used:.0f} s old")
        return wrong


@contextlib.contextmanager
def on_disk(system: System) -> Iterator[None]:
    """Inside, the pool's system calls are those of ``system``."""
    memory = Names(mmap, mmap=system.mmap)
    libc = Names(index._LIBC, fallocate=system.fallocate)
    plain = index._plain

    def without_pages(path: Path) -> sqlite3.Connection:
        connection = plain(path)
        connection.execute("PRAGMA cache_size = 0")
        return connection

    with contextlib.ExitStack() as stack:
        if not system.disk.keeps_pages:
            stack.enter_context(patch.object(index, "_plain", without_pages))
        stack.enter_context(system.in_place())
        stack.enter_context(patch.object(index, "_LIBC", libc))
        for module in (slabs, reclaimer, codec, disk_tier):
            stack.enter_context(patch.object(module, "mmap", memory))
        yield


@contextlib.contextmanager
def told_to(lines: list[str]) -> Iterator[None]:
    """Inside, warnings are appended there, and shown nowhere."""
    handler = _Lines(lines)
    log = logging.getLogger("kvrecall")
    with patch.object(log, "propagate", False):
        log.addHandler(handler)
        try:
            yield
        finally:
            log.removeHandler(handler)


class _Lines(logging.Handler):
    def __init__(self, lines: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(record.getMessage())


def told_of(error: BaseException) -> str:
    """An exception, and where in the pool it was raised."""
    trace, place = error.__traceback__, ""
    while trace is not None:
        code = trace.tb_frame.f_code
        if "kvrecall/pool" in code.co_filename:
            place = f"at {code.co_qualname}:{trace.tb_lineno}"
        trace = trace.tb_next
    return f"{type(error).__name__}: {error} {place}"


def _troubles(world: World, given: Sequence[Fault]) -> Troubles:
    """What goes wrong in the next life, by the kind of the schedule, or what is given."""
    chance, kind = world.chance, world.kind
    troubles = Troubles(latency_s=chance.choice((0.0, 0.01, 0.3)))
    if kind == "squeeze":
        troubles.latency_s, troubles.read_s = 0.01, chance.choice((0.0, 0.2, 2.0))
    if given:
        troubles.faults += [replace(fault) for fault in given]
    elif kind == "error":
        code = chance.choice(sorted(LISTED))
        kinds, nth = LISTED[code], 1 + world.round % _MOST_CALLS
        if code == errno.EROFS:  # every call, from then on
            nth = 1 + world.round % _FEW_CALLS
        elif chance.random() < 0.7:
            kinds, nth = frozenset({chance.choice(sorted(kinds))}), 1 + world.round % _FEW_CALLS
        count = 1000 if code == errno.EROFS else chance.choice((1, 1, 3, 1000))
        troubles.faults.append(Fault(kinds, code, nth, count))
    elif kind == "sync":
        first = chance.randrange(1, 40)
        troubles.faults.append(Fault(frozenset({"sync"}), errno.EIO, first, chance.choice((1, 2))))
    elif kind == "lies":
        troubles.lies = True
    elif kind == "flips":
        setattr(troubles, chance.choice(("flips", "stale", "astray")), chance.choice((0.01, 0.2)))
    elif kind == "hangs":
        troubles.hangs = (1 + world.round % _MOST_CALLS, chance.choice((3.0, 30.0, 100.0)))
    elif kind == "memory":
        troubles.no_memory = chance.choice((0.1, 0.5))
    return troubles


def run(seed: int, root: Path, vfs: SimulatedVfs, faults: Sequence[Fault] = ()) -> Outcome:
    """One schedule. ``root``: an empty folder in memory, which is empty again afterwards.
    ``faults``: of the disk, in each life but the last, in place of those of the seed."""
    root.mkdir(parents=True, exist_ok=True)
    world = World(seed, root)
    world.has_errors = world.has_errors or bool(faults)
    chance, oracle, outcome = world.chance, world.oracle, world.outcome
    if world.kind == "clock":
        oracle.ttl_s = 60.0
    if world.kind == "store":
        world.peer.trouble = chance.choice(TROUBLES)
        world.peer.share = chance.choice((0.1, 0.5, 1.0))
    lives = chance.choice((1, 2, 3))
    try:
        for number in range(lives + 1):
            is_last = number == lives
            troubles = Troubles() if is_last else _troubles(world, faults)
            if not is_last and world.kind != "calm" and chance.random() < 0.8:
                troubles.cut_at = chance.choice(
                    (chance.randrange(1, 200), chance.randrange(1, 1500))
                )
            life = Life(world, troubles, is_last)
            life.run(vfs)
            outcome.story.append(_told(life))
            if not outcome.verdicts.is_good:
                break
            _between(world, life)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    return outcome


def _told(life: Life) -> str:
    system = life.system
    end = "cut" if system.was_cut else f"refused ({life.refused})" if life.refused else "closed"
    return f"{end} at call {system.calls} after {system.faults} faults: {'; '.join(life.logged)}"


def _between(world: World, life: Life) -> None:
    """What becomes of the disk and the clocks until the next life."""
    chance, disk = world.chance, world.disk
    if not life.system.was_cut and chance.random() < 0.5:
        return  # the service is restarted
    if life.system.was_cut and (world.kind == "kill" or chance.random() < 0.1):
        world.outcome.kills += 1
        return
    world.outcome.cuts += 1
    disk.cut(chance)
    world.boot += 1
    down_s = chance.choice((1.0, 600.0))
    world.wall_at_boot += world.uptime + down_s - 5.0
    world.uptime = 5.0
    if world.kind == "rot":
        for _ in range(chance.choice((1, 1, 5))):
            world.outcome.story.append(disk.rot(chance))
            world.outcome.faults += 1
