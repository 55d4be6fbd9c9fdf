"""Faults planted in the pool itself, which the schedules must find: the simulation's own test."""

from __future__ import annotations

import contextlib
import errno
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from kvrecall.pool import Pool, clock, entries
from kvrecall.pool.disk import catalog, codec, engine, flusher, index, reclaimer, slabs, tier
from kvrecall.pool.remote import tier as remote
from kvrecall.pool.service import client, link, server, sessions
from kvrecall_lab.faults.medium import Fault
from kvrecall_lab.faults.run import schedules
from kvrecall_lab.faults.schedule import KINDS


@dataclass(frozen=True, slots=True)
class Mutant:
    """A line of a function of ``owner`` is another. ``kinds``: of schedules that may find it;
    ``faults``: of their disk, if these must be others than their own."""

    why: str
    owner: Any
    name: str
    old: str
    new: str
    kinds: tuple[str, ...] = ("cut",)
    faults: tuple[Fault, ...] = ()

    @contextlib.contextmanager
    def planted(self) -> Iterator[None]:
        """Raises ValueError if the line is not there, once."""
        function = getattr(self.owner, self.name)
        source = textwrap.dedent(inspect.getsource(function))
        if source.count(self.old) != 1:
            times = source.count(self.old)
            raise ValueError(f"{function.__qualname__} has {self.old!r} {times} times")
        made: dict[str, Any] = {}
        code = compile(source.replace(self.old, self.new), inspect.getfile(function), "exec")
        exec(code, function.__globals__, made)
        with patch.object(self.owner, self.name, made[self.name]):
            yield

    def caught_by(self, most: int, first: int = 0) -> int | None:
        """The first seed of up to ``most`` schedules that finds it; None if none does."""
        seeds = (s for s in range(first, 1 << 30) if KINDS[s % len(KINDS)] in self.kinds)
        with self.planted():
            outcomes = schedules(
                (next(seeds) for _ in range(most)),
                lambda one: not one.verdicts.is_good,
                self.faults,
            )
        return None if outcomes[-1].verdicts.is_good else outcomes[-1].seed


MUTANTS = (
    Mutant("blocks are durable before their rows are", slabs.FileIo, "sync",
        "os.fdatasync(fd)", "pass"),
    Mutant("rows are durable when they are committed", index, "_set_up",
        "PRAGMA synchronous = FULL", "PRAGMA synchronous = OFF"),
    Mutant("a new slab is found after a cut", slabs.SlabStore, "_write_header",
        "os.fsync(folder)", "pass"),
    Mutant("a copy is durable before its row leads to it", reclaimer.Reclaimer, "_move",
        "self._store.sync(address_of(number))", "pass", ("squeeze",)),
    Mutant("a slab stays while its blocks are read", reclaimer.Reclaimer, "_remove_emptied",
        "self._emptied - self._catalog.slabs_read()", "set(self._emptied)", ("squeeze",)),
    Mutant("a clock that went back, or on by years, is not believed", clock.Clock, "since",
        "return passed if 0.0 <= passed <= _MOST_S else 0.0", "return passed", ("clock",)),
    Mutant("what a failed sync left is not durable", flusher.Flusher, "_sync",
        "self._medium_failed(error, some)", "durable += some",
        ("cut",), (Fault(frozenset({"sync"}), errno.EIO, 12, 1),)),
    Mutant("a slot is not used again while it is read", catalog.Catalog, "_forget",
        "if address in self._reading:", "if False:", ("squeeze",)),
    Mutant("the bytes of a block are verified", codec.BlockCodec, "decode",
        "right = checksum_of(key, frame) == tag", "right = True", ("rot", "flips")),
    Mutant("the bytes of a store are verified", remote, "verified",
        "if header == header_of(key, data.nbytes, checksum) else None", "", ("store",)),
    Mutant("an index that failed is tried again", engine.DiskEngine, "index_works",
        "self.is_index_failing = False", "pass", ("error", "sync")),
    Mutant("leases end with their recall", Pool, "release",
        "self._host.unlease(found.cut(0))", "pass", ("calm",)),
    Mutant("a file that takes no direct I/O is opened without", slabs.SlabStore, "_open_file",
        "if error.errno != errno.EINVAL:", "if True:", ("calm",)),
    Mutant("blocks are moved in memory that direct I/O takes", reclaimer.Reclaimer, "_move",
        "memoryview(mmap.mmap(-1, slab.slot_bytes))", "memoryview(bytearray(slab.slot_bytes))",
        ("squeeze",)),
    Mutant("blocks age though the wall clock goes back", clock.Clock, "__call__",
        "self._since_boot() + self._ahead", "self._wall()", ("clock",)),
    Mutant("a dead engine's slots are kept while its worker copies", sessions.Reaper, "run",
        "if session.is_settled or self._close_seat(session.seat):", "if True:", ("service",)),
    Mutant("a lost engine's slots are kept while it lives", sessions.Reaper, "run",
        "if session.peer.is_alive:", "if False:", ("service",)),
    Mutant("a lost engine's slots do not come back before its copies have ended",
        client.ServiceClient, "_settle", "or life.tickets or life.keys", "", ("service",)),
    Mutant("slots whose offer came too late are given back", client.ServiceClient, "reserve",
        "self._tell(life, p.Cancel(numbers[0]))", "pass", ("service",)),
    Mutant("another version is refused", server.Server, "greet",
        "if hello.protocol != p.PROTOCOL:", "if False:", ("service",)),
    Mutant("a call ends at its deadline", link.Link, "_await", "if left <= 0:", "if left <= -20:",
        ("service",)),
    Mutant("what is sent in part is sent on", link.Link, "_send",
        "view = view[self._sock.send(view) :]", "self._sock.send(view); view = view[:0]",
        ("service",)),
    Mutant("a client that does not greet is not waited for", server.Connection, "connection_made",
        'self._limit(self._server.patience.greeting_s, "no greeting arrived")', "pass",
        ("service",)),
    Mutant("an engine that ended is watched no longer", sessions.Reaper, "orphan",
        "session.peer.close()", "pass", ("service",)),
    # What the schedules found once.
    Mutant(
        "a folder that cannot be looked at is a medium that fails", engine.DiskEngine, "__init__",
        "except OSError as error:", "except ZeroDivisionError as error:",
        ("error",), (Fault(frozenset({"stat"}), errno.EIO, 3, 1),)),
    Mutant("a slab that cannot be deleted ends no thread", reclaimer.Reclaimer, "_removed",
        "except OSError as error:", "except ZeroDivisionError as error:",
        ("squeeze",), (Fault(frozenset({"unlink"}), errno.EIO, 12, 1000),)),
    Mutant("a slab that cannot be made ends no thread", reclaimer.Reclaimer, "_grow",
        "except OSError as error:", "except ZeroDivisionError as error:",
        ("error",), (Fault(frozenset({"open"}), errno.EIO, 5, 1000),)),
    Mutant(
        "a slab stays while blocks are read that were dropped since", catalog.Catalog, "slabs_read",
        "slab_of, self._reading", "slab_of, self._reading.keys() - self._doomed", ("squeeze",)),
    Mutant("a folder that cannot be listed ends no resize", engine, "aside_bytes",
        "contextlib.suppress(OSError):\n        for", "contextlib.suppress():\n        for",
        ("error",), (Fault(frozenset({"list"}), errno.EIO, 8, 1000),)),
    Mutant("a read without memory ends no thread", tier.DiskTier, "_run_reader",
        "except (OSError, MemoryError) as error:", "except ZeroDivisionError as error:",
        ("memory",)),
    Mutant("a page that is read at a later try is not damaged", index, "_unfit",
        "if code is None or int(code[1]) & 0xFF not in _NOT_DAMAGE:", "if True:",
        ("cut",), (Fault(frozenset({"read"}), errno.EIO, 26, 3),)),
    Mutant("rows that are read at a later try are not lost", index, "_read_again",
        "if tries == 1 or is_damage(error):", "if True:",
        ("cut",), (Fault(frozenset({"read"}), errno.EIO, 41, 2),)),
    Mutant("a disk that allows no index for a while stores again", engine.DiskEngine, "recover",
        "if is_closing():", "if True:",
        ("lies",), (Fault(frozenset({"read", "create", "rename"}), errno.EIO, 41, 1000),)),
    Mutant("blocks that go with their slab count as evicted", entries.EntryTable, "_leave",
        "self.evictions += cause in MADE_ROOM", "self.evictions += cause is Cause.QUOTA",
        ("squeeze",)),
    Mutant("an index that fails is told", catalog.DiskCounters, "fault",
        'self.warn(f"{what}: {error}")', "pass", ("sync", "error")),
    Mutant("an index that fails is counted", catalog.DiskCounters, "fault",
        "self.add(errors=1)", "pass", ("sync", "error")),
    Mutant("blocks that cannot be compressed end no thread", flusher.Flusher, "_pack",
        "except (OSError, MemoryError) as error:", "except ZeroDivisionError as error:",
        ("memory",)),
)  # fmt: skip
"""Those of the review first: each survived its 770 tests."""


def caught_by(number: int, most: int, first: int) -> int | None:
    """As ``Mutant.caught_by``, for another process, which is told no functions."""
    return MUTANTS[number].caught_by(most, first)
