"""Injected faults: damage to the disk folder, and threads that attack the service, the engines,
their requests and the files.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import sqlite3
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from kvrecall.block import BlockKey
from kvrecall.errors import TierError
from kvrecall.pool.disk.index import reading
from kvrecall.pool.disk.slabs import offset_of, slab_of
from kvrecall.processes.service import ServiceProcess
from kvrecall_lab.chaos.fleet import Fleet, Replica
from kvrecall_lab.chaos.oracle import DurabilityOracle, Report

_QUERY = (
    "SELECT address, digest, hash, nbytes FROM blocks JOIN namespaces "
    "ON namespaces.id = blocks.namespace"
)
_AIM_S = 4.0  # maximum time to wait for an engine to load (or save)


# -- damage to a disk folder -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """A row of the index: the block's bytes are in the file ``slab`` at ``offset``."""

    key: BlockKey
    slab: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Damage:
    """``keys``: blocks that may be lost; ``count``: damaged blocks or files."""

    keys: frozenset[BlockKey]
    count: int


def stored_blocks(folder: Path) -> list[StoredBlock]:
    """Rows of the index of ``folder``, which may be in use. Changes nothing. Empty if the index
    cannot be read now."""
    try:
        with reading(folder) as connection:
            rows = connection.execute(_QUERY).fetchall()
    except (sqlite3.Error, OSError):
        return []
    return [
        StoredBlock(
            BlockKey(digest + name), f"slab-{slab_of(place):06d}.kv", offset_of(place), nbytes
        )
        for place, digest, name, nbytes in rows
    ]


class DiskFaults:
    """Damages the disk tier in ``folder``: flips bytes, cuts files short, deletes them. It reads
    the tier's index to hit blocks rather than free slots, and to know which. Deterministic for a
    folder and dice. ``slab_share``: share of the faults that destroy a whole slab."""

    def __init__(self, folder: Path, dice: random.Random, slab_share: float = 0.12) -> None:
        self._folder = folder
        self._slab_share = slab_share
        self._dice = dice

    def inject(self) -> Damage | None:
        """Damages a block or file; None if there is none."""
        rows = stored_blocks(self._folder)
        if not rows:
            return None
        whole_slab = self._dice.random() < self._slab_share
        damage = self._cut(rows) if whole_slab else self._flip(rows)
        if damage is None:
            return None
        # A slot may have been reused for another block since the index was read.
        now = {(row.slab, row.offset): row for row in stored_blocks(self._folder)}
        hit = {(row.slab, row.offset) for row in rows if row.key in damage.keys}
        later = {now[place].key for place in hit if place in now}
        if whole_slab:
            slabs = {slab for slab, _ in hit}
            later |= {row.key for row in now.values() if row.slab in slabs}
        return Damage(damage.keys | later, damage.count)

    def _flip(self, rows: list[StoredBlock]) -> Damage | None:
        keys = set()
        for row in self._dice.sample(rows, min(len(rows), self._dice.randint(1, 4))):
            with (
                contextlib.suppress(FileNotFoundError),
                (self._folder / row.slab).open("r+b", buffering=0) as slab,
            ):
                for _ in range(self._dice.randint(1, 3)):
                    if self._alter(slab.fileno(), row):
                        keys.add(row.key)
                os.fdatasync(slab)
        return Damage(frozenset(keys), len(keys)) if keys else None

    def _alter(self, fd: int, row: StoredBlock) -> bool:
        """Changes a byte of a block, or up to two whole pages, as a torn or misplaced write would.
        A changed byte rarely changes a model's output; pages do."""
        length = 1 if self._dice.random() < 0.5 else min(row.nbytes, 2 * mmap.PAGESIZE)
        place = row.offset + self._dice.randrange(row.nbytes - length + 1)
        old = os.pread(fd, length, place)
        new = bytes(byte ^ self._dice.randrange(1, 256) for byte in old)
        return os.pwrite(fd, new, place) > 0

    def _cut(self, rows: list[StoredBlock]) -> Damage | None:
        """Truncates or deletes a slab; the tier then drops all of its blocks."""
        slab = self._dice.choice(sorted({row.slab for row in rows}))
        path = self._folder / slab
        try:
            if self._dice.random() < 0.5:
                path.unlink()
            else:
                os.truncate(path, self._dice.randrange(path.stat().st_size))
        except FileNotFoundError:
            return None
        return Damage(frozenset(row.key for row in rows if row.slab == slab), 1)


# -- faults while engines run ----------------------------------------------------------------


INTERVALS = {"service": 9.0, "engine": 15.0, "disk": 4.0, "requests": 2.0}
"""Mean seconds between faults of a kind."""


class FaultInjector:
    """Threads that inject faults from ``start`` to ``stop``. An exception in one is a fault of the
    run."""

    def __init__(
        self,
        service: ServiceProcess,
        fleet: Fleet,
        oracle: DurabilityOracle,
        report: Report,
        seed: int,
        intervals: Mapping[str, float] = INTERVALS,
    ) -> None:
        self._service = service
        self._fleet = fleet
        self._oracle = oracle
        self._report = report
        self._disk = DiskFaults(service.disk, random.Random(f"disk {seed}"))
        self._stop = threading.Event()
        self._service_lock = threading.Lock()  # held to start, stop or damage the service
        acts = {
            "service": self._hurt_service,
            "engine": self._hurt_engine,
            "disk": self._hurt_files,
            "requests": self._hurt_requests,
        }
        self._threads = [
            threading.Thread(
                target=self._repeat, args=(act, random.Random(f"{name} {seed}"), intervals[name])
            )
            for name, act in acts.items()
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Stops the threads and leaves the service running, unless it cannot be started."""
        self._stop.set()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    def _repeat(
        self, act: Callable[[random.Random], None], dice: random.Random, mean_s: float
    ) -> None:
        try:
            while not self._stop.wait(dice.uniform(0.5, 1.5) * mean_s):
                act(dice)
        except Exception as error:  # noqa: BLE001 - any exception is a fault of the run
            self._report.fault("failed", f"{act.__name__}: {type(error).__name__}: {error}")

    def _hurt_service(self, dice: random.Random) -> None:
        with self._service_lock:
            self._oracle.observe()
            kind = dice.random()
            if kind < 0.15:
                self._report.add("service_stalls")
                self._service.stall(dice.uniform(0.05, 4.0), self._stop)
                return
            if kind < 0.25:
                self._report.add("service_stops")
                if not self._service.stop():
                    self._report.fault("hung", "the service did not end on SIGTERM")
            else:
                self._service.kill()
                self._report.add("service_kills")
            self._restart_service(dice)

    def _restart_service(self, dice: random.Random) -> None:
        """Restarts the service, sometimes after damage to its files or a pause, and looks for
        losses: durable blocks must be found unless they were evicted, before the kill (no row in
        the index) or since, while engines go on saving."""
        evictions = self._oracle.evictions
        rows = {row.key for row in stored_blocks(self._service.disk)}
        if dice.random() < 0.4:
            self._damage()
        if dice.random() < 0.7:
            self._stop.wait(dice.uniform(0.1, 3.0))
        self._service.start()
        self._report.add("service_starts")
        if not self._oracle.wait_joined():
            self._report.fault("hung", "the durability oracle did not join the service again")
            return
        missing = self._oracle.missing()
        self._oracle.observe()
        gone = {key for key in missing if key not in rows} if self._oracle.evictions else set()
        lost = [key for key in missing if key not in gone]
        self._oracle.evicted(missing)
        if len(lost) > self._oracle.evictions - evictions:
            had = sum(key in rows for key in lost)
            what = f"{len(lost)} durable blocks are lost, {had} of them had a row in the index"
            self._report.fault("lost_committed", what, len(lost))

    def _hurt_engine(self, dice: random.Random) -> None:
        """Kills an engine, in two of three cases while it loads or saves."""
        ready = [one for one in self._fleet.replicas if one.ready and not one.doomed]
        if not ready:
            return
        replica = dice.choice(ready)
        aim = dice.choice(("loading", "saving", "any"))
        if aim != "any":
            self._await(replica, aim)
        self._fleet.kill(replica, dice.choice(("engine", "engine", "group", "worker")))

    def _await(self, replica: Replica, aim: str) -> None:
        """Waits until the service sees the engine load from the pool (or save to it)."""
        process = replica.process
        until = time.monotonic() + _AIM_S
        while process is not None and time.monotonic() < until and not self._stop.is_set():
            try:
                clients = self._service.look(1.0).clients
            except TierError:
                time.sleep(0.05)
                continue
            for client in clients:
                busy = client.tickets if aim == "loading" else client.reserved
                if busy and client.pid == process.pid and not client.lost:
                    self._report.add(f"killed_while_{aim}")
                    return
            time.sleep(0.002)

    def _hurt_requests(self, dice: random.Random) -> None:
        """Cancels requests of an engine, or preempts all of them and empties its device cache."""
        replica = dice.choice(self._fleet.replicas)
        if dice.random() < 0.6:
            self._fleet.cancel(replica, dice)
        else:
            self._fleet.forget(replica)

    def _hurt_files(self, _: random.Random) -> None:
        with self._service_lock:
            self._damage()

    def _damage(self) -> None:
        damage = self._disk.inject()
        if damage is not None:
            self._oracle.damaged(damage.keys)
            self._report.add("corruptions", damage.count)
