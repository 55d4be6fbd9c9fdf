"""A simulated disk: one folder of files, of which is durable what was synced, and the system calls
of one process on it, which fail as they are told.

What a process sees are real files in memory, so that every call has the kernel's own meaning.
Beside each there are the bytes that a power cut leaves: those that a sync covered, and of the
others any subset, in sectors of 512 bytes and in any order. Names are durable when the folder was
synced.

After a sync that failed the page cache keeps what was not written, and no later sync writes it: as
Linux does since 4.13.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import io
import mmap
import os
import random
import shutil
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from kvrecall_lab.faults.machine import Dead, Machine

SECTOR = 512
BLOCK = 4096  # of direct I/O
_KEPT = 64  # overwritten pieces that a stale read may bring back


class Inode:
    """A file: what is durable of it, and what was written since, in order: bytes at an offset, or a
    new size."""

    def __init__(self) -> None:
        self.durable = bytearray()
        self.pending: list[tuple[int, bytes] | int] = []
        self.old: deque[tuple[int, bytes]] = deque(maxlen=_KEPT)

    def sync(self) -> None:
        for change in self.pending:
            self._apply(change)
        self.pending.clear()

    def lose(self, chance: random.Random) -> None:
        """What was not synced is gone, or in part not."""
        kept = chance.choice((0.0, 0.5, 0.9, 1.0))
        for change in self.pending:
            if chance.random() < kept:
                self._apply(change)
            elif isinstance(change, tuple) and kept:
                offset, data = change
                begin, end = offset, offset + len(data)
                while begin < end:
                    after = min(end, begin - begin % SECTOR + SECTOR)
                    if chance.random() < kept:
                        self._apply((begin, data[begin - offset : after - offset]))
                    begin = after
        self.pending.clear()

    def _apply(self, change: tuple[int, bytes] | int) -> None:
        content = self.durable
        if isinstance(change, int):
            del content[change:]
            content.extend(bytes(change - len(content)))
            return
        offset, data = change
        if len(content) < offset:
            content.extend(bytes(offset - len(content)))
        if len(data) >= SECTOR:
            self.old.append((offset, bytes(content[offset : offset + len(data)])))
        content[offset : offset + len(data)] = data


Entry = tuple[str, str, Inode | None]
"""A change of the folder: a name, the one that it was before or "", the file; None: removed."""


class Disk:
    """The folder, which outlives processes and power cuts. ``root``: where its files may lie."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._durable: dict[str, Inode] = {}
        self._count = 0
        self.changes: list[Entry] = []
        self.names: dict[str, Inode] = {}
        # "aligned": O_DIRECT works; "refused": it does not; "": it is not asked for
        self.direct = ""
        self.keeps_pages = True  # of SQLite's files, in memory: what is read twice is read once
        self.folder = self._new_folder()

    def _new_folder(self) -> Path:
        self._count += 1
        folder = self._root / str(self._count)
        folder.mkdir(mode=0o700)
        return folder

    def change(self, name: str, before: str, inode: Inode | None) -> None:
        self.changes.append((name, before, inode))
        self._apply(self.names, self.changes[-1])

    @staticmethod
    def _apply(names: dict[str, Inode], change: Entry) -> None:
        name, before, inode = change
        if before:
            inode = names.pop(before, None)
            if inode is None:
                return
        if inode is None:
            names.pop(name, None)
        else:
            names[name] = inode

    def sync_folder(self) -> None:
        self._durable = dict(self.names)
        self.changes.clear()

    def cut(self, chance: random.Random) -> None:
        """The power fails, and comes back."""
        kept = chance.choice((0.0, 0.5, 1.0))
        in_order = chance.random() < 0.7
        for change in self.changes:
            if chance.random() < kept:
                self._apply(self._durable, change)
            elif in_order:
                break
        for inode in self._durable.values():
            inode.lose(chance)
        self.rewrite()

    def rewrite(self) -> None:
        """The files are what is durable of them."""
        self.changes.clear()
        self.names = dict(self._durable)
        shutil.rmtree(self.folder)
        self.folder = self._new_folder()
        for name, inode in self.names.items():
            path = self.folder / name
            path.write_bytes(inode.durable)
            path.chmod(0o600)

    def rot(self, chance: random.Random) -> str:
        """Changes what is durable of a file, as a bad medium does: a bit, a sector that is an older
        one, or another one's. Returns what. After a cut."""
        files = {name: i for name, i in self._durable.items() if len(i.durable) >= SECTOR}
        if not files:
            return ""
        name = chance.choice(sorted(files))
        inode = files[name]
        content = inode.durable
        kind = chance.choice(("flip", "stale", "misdirected", "zeros"))
        at = chance.randrange(len(content) // SECTOR) * SECTOR
        if chance.random() < 0.3:
            at = 0  # the header
        if kind == "flip":
            content[at + chance.randrange(SECTOR)] ^= 1 << chance.randrange(8)
        elif kind == "stale" and inode.old:
            at, data = chance.choice(inode.old)
            data = data[: len(content) - at]
            content[at : at + len(data)] = data
        elif kind == "zeros":
            content[at : at + SECTOR] = bytes(SECTOR)
        else:
            other = files[chance.choice(sorted(files))].durable
            start = chance.randrange(len(other) // SECTOR) * SECTOR
            content[at : at + SECTOR] = other[start : start + SECTOR]
        self.rewrite()
        return f"{kind} in {name} at {at}"


CHANGES = frozenset({"write", "allocate", "create", "unlink", "rename", "truncate"})
GROWS = frozenset({"allocate", "create", "extend"})
ALL = CHANGES | {"sync", "open", "read", "stat", "list", "extend"}


@dataclass(slots=True)
class Fault:
    """Calls of some kinds fail: ``count`` of them from the ``first`` on. ``code``: their errno."""

    kinds: frozenset[str]
    code: int
    first: int
    count: int
    seen: int = 0

    def hits(self, kind: str) -> bool:
        if kind not in self.kinds:
            return False
        self.seen += 1
        return self.first <= self.seen < self.first + self.count


@dataclass(slots=True)
class Troubles:
    """What goes wrong with the disk of a process. ``cut_at``: the call that loses the power.
    ``lies``: syncs do nothing. ``latency_s``: of a call, at most: most take a tenth. ``hangs``:
    from which call on, and for how many seconds."""

    cut_at: int = 0
    faults: list[Fault] = field(default_factory=list)
    lies: bool = False
    latency_s: float = 0.0
    read_s: float = 0.0  # the same of a read, beside that
    hangs: tuple[int, float] = (0, 0.0)
    flips: float = 0.0  # how likely a read has a wrong bit
    stale: float = 0.0  # how likely it has what was there before the last write
    astray: float = 0.0  # how likely a write lands elsewhere in its file
    no_memory: float = 0.0  # how likely a mapping fails

    def end(self) -> None:
        """All is well from now on. The power may still fail."""
        self.faults.clear()
        self.lies, self.hangs = False, (0, 0.0)
        self.flips = self.stale = self.astray = self.no_memory = 0.0


class System:
    """The system calls of one process on a disk. Files elsewhere are not its business."""

    def __init__(self, machine: Machine, disk: Disk, troubles: Troubles) -> None:
        self.machine, self.disk, self.troubles = machine, disk, troubles
        self.calls = self.faults = 0
        self.failed: Counter[str] = Counter()  # calls, by their kind
        self.was_cut = self.has_ended = False
        self.fds: dict[int, Inode | None] = {}  # open files; None: the folder
        self._direct: set[int] = set()  # those that are read and written directly
        self._root = str(disk.folder)
        self._real: dict[str, Any] = {}
        self._hung_until = 0.0

    @property
    def is_dead(self) -> bool:
        """Whether no call has an effect any more."""
        return self.has_ended or self.machine.is_dead

    # -- what every call goes through -------------------------------------------------------

    def fails(self, kind: str) -> int:
        """The errno with which a call of that kind fails now; 0 if it does not. The machine may be
        dead after it."""
        self.calls += 1
        if self.calls == self.troubles.cut_at:
            self.was_cut = True
            self.machine.cut()
            return errno.EIO
        for fault in self.troubles.faults:
            if fault.hits(kind):
                self.faults += 1
                self.failed[kind] += 1
                return fault.code
        return 0

    def seconds(self) -> float:
        """How long the call takes."""
        chance, troubles = self.machine.chance, self.troubles
        first, seconds = troubles.hangs
        if first and self.calls >= first:
            troubles.hangs = (0, 0.0)
            self._hung_until = self.machine.now + seconds
        hung = self._hung_until - self.machine.now
        return max(0.0, hung) + chance.random() ** 4 * troubles.latency_s

    def _enter(self, kind: str) -> None:
        if self.is_dead:
            raise Dead
        code = self.fails(kind)
        if self.is_dead:
            raise Dead
        if code:
            raise OSError(code, os.strerror(code))
        if kind != "stat":
            self._pass(self.machine.chance.random() * self.troubles.read_s * (kind == "read"))

    def _pass(self, more_s: float) -> None:
        if seconds := self.seconds() + more_s:
            self.machine.sleep(seconds)
        else:
            self.machine.turn()

    def name_of(self, path: Any) -> str | None:
        """The name of a file in the folder, "" for the folder; None if it is elsewhere."""
        text = path if isinstance(path, str) else str(path)
        if text.startswith(self._root):
            return text[len(self._root) :].strip("/")
        if text.startswith("/proc/self/fd/"):
            number, _, name = text[len("/proc/self/fd/") :].partition("/")
            return name if number.isdigit() and int(number) in self.fds else None
        return None

    def failed_sync(self, inode: Inode) -> None:
        inode.lose(self.machine.chance)

    def spoil(self, inode: Inode, buffers: Sequence[Any], offset: int) -> None:
        """What a bad medium makes of bytes that are read."""
        chance, troubles = self.machine.chance, self.troubles
        if chance.random() < troubles.flips and buffers:
            self.faults += 1
            buffer = chance.choice(buffers)
            buffer[chance.randrange(len(buffer))] ^= 1
        if not troubles.stale or chance.random() >= troubles.stale:
            return
        for data in buffers:
            for at, old in inode.old:
                begin, end = max(at, offset), min(at + len(old), offset + len(data))
                if begin < end and chance.random() < 0.5:
                    self.faults += 1
                    data[begin - offset : end - offset] = old[begin - at : end - at]
            offset += len(data)

    def landing(self, inode: Inode, nbytes: int, offset: int) -> int:
        """Where a write of a bad medium lands."""
        chance, most = self.machine.chance, len(inode.durable) - nbytes
        if not self.troubles.astray or most < 0 or chance.random() >= self.troubles.astray:
            return offset
        self.faults += 1
        return chance.randrange(most // SECTOR + 1) * SECTOR

    # -- the calls -------------------------------------------------------------------------

    def open(self, path: Any, flags: int, mode: int = 0o777, **more: Any) -> int:
        real = self._real["open"]
        name = None if isinstance(path, int) else self.name_of(path)
        if name is None:
            return int(real(path, flags, mode, **more))
        is_new = bool(name) and flags & os.O_CREAT > 0 and name not in self.disk.names
        self._enter("create" if is_new else "open")
        is_direct = flags & os.O_DIRECT > 0
        if is_direct and self.disk.direct == "refused":
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        fd = int(real(path, flags & ~os.O_DIRECT, mode, **more))
        (self._direct.add if is_direct else self._direct.discard)(fd)
        if name and name not in self.disk.names:
            self.disk.change(name, "", Inode())
        self.fds[fd] = self.disk.names[name] if name else None
        return fd

    def close(self, fd: int) -> None:
        if self.is_dead and fd not in self.fds:
            return  # its number may be another file's by now
        self.fds.pop(fd, None)
        self._real["close"](fd)

    def _check_direct(self, fd: int, buffers: Sequence[Any], offset: int) -> None:
        """What the kernel asks of direct I/O."""
        if fd in self._direct:
            places = [np.frombuffer(each, np.uint8).ctypes.data for each in buffers]
            if any(place % BLOCK for place in (*places, *map(len, buffers), offset)):
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    def pwritev(self, fd: int, buffers: Sequence[Any], offset: int, flags: int = 0) -> int:
        real = self._real["pwritev"]
        inode = self.fds.get(fd)
        if inode is None:
            return int(real(fd, buffers, offset, flags))
        self._check_direct(fd, buffers, offset)
        early = self.machine.chance.random() < 0.5
        data = b"".join(buffers)
        try:
            self._enter("write")
        except Dead:
            if self.was_cut and early:
                inode.pending.append((offset, data))
            raise
        data = data if early else b"".join(buffers)
        offset = self.landing(inode, len(data), offset)
        inode.pending.append((offset, data))
        return int(real(fd, [data], offset, flags))

    def preadv(self, fd: int, buffers: Sequence[Any], offset: int, flags: int = 0) -> int:
        real = self._real["preadv"]
        inode = self.fds.get(fd)
        if inode is None:
            return int(real(fd, buffers, offset, flags))
        self._check_direct(fd, buffers, offset)
        early = self.machine.chance.random() < 0.5
        if early and not self.is_dead:
            got = int(real(fd, buffers, offset, flags))
        self._enter("read")
        if not early:
            got = int(real(fd, buffers, offset, flags))
        self.spoil(inode, buffers, offset)
        return got

    def fdatasync(self, fd: int) -> None:
        if fd not in self.fds:
            self._real["fdatasync"](fd)
            return
        inode = self.fds[fd]
        try:
            self._enter("sync")
        except OSError:
            if inode is not None:
                self.failed_sync(inode)
            raise
        if self.troubles.lies:
            self.faults += 1
        elif inode is None:
            self.disk.sync_folder()
        else:
            inode.sync()

    def posix_fallocate(self, fd: int, offset: int, length: int) -> None:
        inode = self.fds.get(fd)
        if inode is not None:
            self._enter("allocate")
            inode.pending.append(offset + length)
        self._real["posix_fallocate"](fd, offset, length)

    def fallocate(self, fd: int, mode: int, offset: Any, length: Any) -> int:
        """libc's, as the index reserves room with it: it changes no byte."""
        try:
            self._enter("allocate")
        except OSError as error:
            ctypes.set_errno(error.errno or 0)
            return -1
        return 0

    def unlink(self, path: Any, **more: Any) -> None:
        name = self.name_of(path)
        if name is not None:
            self._enter("unlink")
        self._real["unlink"](path, **more)
        if name:
            self.disk.change(name, "", None)

    def replace(self, source: Any, target: Any, **more: Any) -> None:
        before, name = self.name_of(source), self.name_of(target)
        if name is not None:
            self._enter("rename")
        self._real["replace"](source, target, **more)
        if name and before:
            self.disk.change(name, before, None)

    def _seen(self, kind: str, call: str) -> Callable[..., Any]:
        def look(path: Any = ".", *args: Any, **more: Any) -> Any:
            known = path in self.fds if isinstance(path, int) else self.name_of(path) is not None
            if known:
                self._enter(kind)
            return self._real[call](path, *args, **more)

        return look

    def file_open(self, path: Any, *args: Any, **more: Any) -> Any:
        if not isinstance(path, int) and self.name_of(path) is not None:
            self._enter("open")
        return self._real["io.open"](path, *args, **more)

    def mmap(self, *args: Any, **more: Any) -> mmap.mmap:
        if self.machine.chance.random() < self.troubles.no_memory:
            self.faults += 1
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        return mmap.mmap(*args, **more)

    # -- in place of the real ones ---------------------------------------------------------

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        calls: dict[str, Callable[..., Any]] = {
            "open": self.open,
            "close": self.close,
            "pwritev": self.pwritev,
            "preadv": self.preadv,
            "fdatasync": self.fdatasync,
            "fsync": self.fdatasync,
            "posix_fallocate": self.posix_fallocate,
            "unlink": self.unlink,
            "replace": self.replace,
            "stat": self._seen("stat", "stat"),
            "lstat": self._seen("stat", "lstat"),
            "fstat": self._seen("stat", "fstat"),
            "scandir": self._seen("list", "scandir"),
        }
        self._real = {name: getattr(os, name) for name in calls} | {"io.open": io.open}
        with contextlib.ExitStack() as stack:
            for name, call in calls.items():
                stack.enter_context(patch.object(os, name, call))
            stack.enter_context(patch.object(io, "open", self.file_open))
            yield

    def end(self) -> list[str]:
        """The process is gone. Returns what it had open."""
        left = list(self.fds)
        told = [os.readlink(f"/proc/self/fd/{fd}") for fd in left]
        for fd in left:
            os.close(fd)
        self.fds.clear()
        return told
