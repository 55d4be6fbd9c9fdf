"""The arena: one piece of shared memory that pool and engine workers map."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import logging
import mmap
import os
import platform
import resource
import struct
import threading
import time
from collections.abc import Collection
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvrecall.errors import ConfigError, TierError
from kvrecall.pool.base import ArenaHandle

_LOG = logging.getLogger(__name__)
_LIBC = ctypes.CDLL(None, use_errno=True)
_MADV_POPULATE_WRITE = 23  # Linux 5.14
_PREFERRED, _INTERLEAVE, _MOVE = 1, 3, 2  # of mbind
_OF_ADDRESS = 3  # of get_mempolicy: the node of a page
_SYSCALLS = {"x86_64": (237, 239), "aarch64": (235, 236)}  # mbind, get_mempolicy
_STEP = 64 << 20  # bytes populated at a time; the first step is done before ``create`` returns
_GIB = 1 << 30


def available_memory() -> int:
    """Bytes that can be allocated now: the machine's, bounded by this process's cgroups."""
    meminfo = Path("/proc/meminfo").read_text()
    free = next(line for line in meminfo.splitlines() if line.startswith("MemAvailable:"))
    room = int(free.split()[1]) * 1024
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        root = Path("/sys/fs/cgroup") / controllers
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
        limit_name, usage_name, of = names if controllers else ("memory.max", "memory.current", "")
        folder = root / path.lstrip("/")
        for level in (folder, *folder.parents):
            limit, usage = _number(level / limit_name), _number(level / usage_name)
            if limit is not None and usage is not None:
                room = min(room, limit - usage + _cached(level, of))
            if level == root:
                break
    return max(0, room)


def private_bytes() -> int:
    """Memory of this process without what it shares, such as the arena."""
    _, resident, shared, *_ = Path("/proc/self/statm").read_bytes().split()
    return (int(resident) - int(shared)) * mmap.PAGESIZE


def _number(path: Path) -> int | None:
    """The number in a kernel file; None if there is no such file or no number in it ("max")."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _cached(cgroup: Path, prefix: str) -> int:
    """Bytes of files, such as loaded weights, that count as used in a cgroup although the kernel
    drops them as soon as a process needs the memory."""
    try:
        lines = (cgroup / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    figures = dict(line.split(" ", 1) for line in lines)
    return sum(int(figures.get(f"{prefix}{name}", 0)) for name in ("inactive_file", "active_file"))


def check_memory(nbytes: int, cure: str) -> None:
    """Raises ConfigError if the machine does not have that much free memory."""
    room = available_memory()
    room -= room // 20  # for other programs
    if nbytes > room:
        raise ConfigError(
            f"host_size: {nbytes / _GIB:.2f} GiB is more than the {room / _GIB:.2f} GiB of "
            f"memory this machine (or container) has left; {cure}"
        )


def _limits() -> str:
    """The limits of this process that a mapping may exceed."""
    kinds = {"ulimit -v": resource.RLIMIT_AS, "ulimit -f": resource.RLIMIT_FSIZE}
    limits = {name: resource.getrlimit(kind)[0] for name, kind in kinds.items()}
    shown = {resource.RLIM_INFINITY: "unlimited"}
    return ", ".join(f"{n}: {shown.get(v, f'{v / _GIB:.2f} GiB')}" for n, v in limits.items())


def _allocated(fd: int) -> int:
    """Bytes of a memory file that have pages: the first ones, because its owner populates it from
    the start."""
    return os.fstat(fd).st_blocks * 512


def open_arena(handle: ArenaHandle, mode: int = os.O_RDONLY) -> int:
    """A descriptor of the memory file of another process's arena, which the caller closes. Raises
    TierError if that arena is gone, or replaced by another one."""
    try:
        fd = os.open(f"/proc/{handle.pid}/fd/{handle.fd}", mode | os.O_CLOEXEC)
    except OSError as error:
        raise TierError(
            f"cannot map the arena of process {handle.pid}: {os.strerror(error.errno or 0)}; "
            "is that process alive and of the same user?"
        ) from error
    status = os.fstat(fd)
    if status.st_size != handle.nbytes or handle.inode not in (0, status.st_ino):
        os.close(fd)
        raise TierError(f"process {handle.pid} no longer has an arena of {handle.nbytes} bytes")
    return fd


def take_seat(fd: int, seat: int, alone: bool = False) -> bool:
    """Locks the byte ``seat`` of an arena for the open file of ``fd``: shared, or ``alone``. False
    if another open file holds it.

    The kernel holds the lock until the last descriptor and the last mapping of the open file are
    gone, in whatever process (stopped, forked, of any capability), so one that gets it ``alone``
    knows that no process maps the arena through this seat, and that none will. Raises OSError if
    the kernel has no such locks.
    """
    kind = fcntl.F_WRLCK if alone else fcntl.F_RDLCK
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", kind, os.SEEK_SET, seat, 1, 0))
    except BlockingIOError:
        return False
    return True


class Arena:
    """A fixed number of bytes of anonymous shared memory. ``create`` creates one (the owner),
    ``attach`` maps another process's. The memory has no name and the kernel frees it with its last
    holder. Its size is sealed, so that it cannot shrink under a reader.

    Bytes below ``ready_bytes`` are backed by real pages, so accessing them can neither fault nor
    fail; a background thread raises ``ready_bytes`` to the owner's ``goal_bytes``. The rest is
    address space only, which takes no memory until ``grow``.

    ``memory`` is the whole arena as a writable memoryview; for torch use
    ``torch.frombuffer(arena.memory, dtype=torch.uint8)`` and slice, for numpy ``array``.
    """

    def __init__(self, fd: int, nbytes: int, goal_bytes: int | None) -> None:
        """``goal_bytes``: bytes that the owner populates at first; None for attaching processes,
        which map the pages present at that time, and the others as they access them."""
        self._fd = fd
        self._handle = ArenaHandle(os.getpid(), fd, nbytes, os.fstat(fd).st_ino)
        self.nbytes = nbytes
        self.goal_bytes = min(nbytes, _allocated(fd)) if goal_bytes is None else goal_bytes
        self._map = mmap.mmap(fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        self._map.madvise(mmap.MADV_HUGEPAGE)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.memory = memoryview(self._map)
        self.ready_bytes = 0
        self._stop = threading.Event()
        self._filler: threading.Thread | None = None
        if self.goal_bytes:
            self._step()
        self._populate()

    @classmethod
    def create(cls, nbytes: int, most_bytes: int = 0) -> Arena:
        """A new arena of ``nbytes`` that can grow to ``most_bytes``. Raises ConfigError if the
        machine does not have that much free memory, or this process may not map it."""
        check_memory(nbytes, "set a smaller host_size")
        most_bytes = max(nbytes, most_bytes)
        with contextlib.ExitStack() as undo:
            try:
                fd = os.memfd_create("kvrecall-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
                undo.callback(os.close, fd)
                os.ftruncate(fd, most_bytes)
                seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
                arena = cls(fd, most_bytes, nbytes)
            except (OSError, MemoryError) as error:
                raise ConfigError(
                    f"host_size: {most_bytes / _GIB:.2f} GiB cannot be mapped by this process "
                    f"({_limits()}): {error}; raise the limit, or set a smaller host_size (or "
                    "host_max_size)"
                ) from error
            undo.pop_all()
            return arena

    @classmethod
    def attach(cls, handle: ArenaHandle) -> Arena:
        """Maps the arena of another process of the same user, in its engine's seat. Raises
        TierError if the arena is gone, or the seat was closed."""
        fd = open_arena(handle, os.O_RDWR)
        try:
            is_seated = not handle.seat or take_seat(fd, handle.seat)
        except OSError as error:
            os.close(fd)
            raise TierError(
                f"cannot lock the arena of process {handle.pid}: {os.strerror(error.errno or 0)}; "
                "the pool service needs a kernel with open file description locks"
            ) from error
        if not is_seated:
            os.close(fd)
            raise TierError(
                f"cannot map the arena of process {handle.pid}: its service saw this engine end"
            )
        return cls(fd, handle.nbytes, None)

    def grow(self, nbytes: int) -> None:
        """Populates the first ``nbytes`` bytes (at most the arena's); no effect if they are
        populated. Raises ConfigError if the machine does not have that much free memory. For one
        thread of the owner at a time."""
        if nbytes <= self.goal_bytes:
            return
        check_memory(nbytes - self.goal_bytes, "grow by less")
        self.wait_ready()
        self.goal_bytes = min(nbytes, self.nbytes)
        self._populate()

    def handle(self) -> ArenaHandle:
        """How other processes attach; valid while this process holds the arena."""
        return self._handle

    def view(self, offset: int, nbytes: int) -> memoryview:
        return self.memory[offset : offset + nbytes]

    def array(self) -> npt.NDArray[np.uint8]:
        """The whole arena as a numpy array, shape (nbytes,), sharing its memory."""
        return np.frombuffer(self.memory, dtype=np.uint8)

    def populated(self) -> int:
        """How many of the leading bytes the owner has backed with pages so far."""
        return min(self.nbytes, _allocated(self._fd))

    def prefer(self, nodes: Collection[int]) -> bool:
        """Takes its memory from these NUMA nodes of this host as long as they have any, one after
        the other if there are several. Moves the pages that only this process maps. False if the
        kernel refuses (containers may)."""
        mbind = _SYSCALLS.get(platform.machine(), (0, 0))[0]
        mask = ctypes.c_ulong(sum(1 << node for node in set(nodes)))
        mode = _PREFERRED if len(set(nodes)) == 1 else _INTERLEAVE
        return mbind > 0 and max(nodes, default=64) < 64 and not _LIBC.syscall(
            ctypes.c_long(mbind), ctypes.c_void_p(self._address), ctypes.c_size_t(self.nbytes),
            ctypes.c_int(mode), ctypes.byref(mask), ctypes.c_ulong(65), ctypes.c_uint(_MOVE),
        )  # fmt: skip

    def node(self) -> int | None:
        """The NUMA node of its first page. None if the kernel does not tell."""
        get_mempolicy = _SYSCALLS.get(platform.machine(), (0, 0))[1]
        node = ctypes.c_int(-1)
        failed = _LIBC.syscall(
            ctypes.c_long(get_mempolicy), ctypes.byref(node), None, ctypes.c_ulong(0),
            ctypes.c_void_p(self._address), ctypes.c_ulong(_OF_ADDRESS),
        )  # fmt: skip
        return None if failed or node.value < 0 else node.value

    def wait_ready(self) -> None:
        """Waits until every page up to ``goal_bytes`` is populated, or the kernel has none left."""
        if self._filler is not None:
            self._filler.join()

    def close(self) -> None:
        """Releases the memory. Views that others still hold stay valid. Idempotent."""
        if self._fd < 0:
            return
        self._stop.set()
        self.wait_ready()
        os.close(self._fd)
        self._fd = -1
        try:
            self.memory.release()
            self._map.close()
        except BufferError:
            _LOG.debug("arena views are still in use; the memory is freed with the last of them")

    def _populate(self) -> None:
        if self.ready_bytes < self.goal_bytes:
            self._filler = threading.Thread(target=self._fill, name="kvrecall-arena", daemon=True)
            self._filler.start()

    def _fill(self) -> None:
        began = time.perf_counter()
        while self.ready_bytes < self.goal_bytes and not self._stop.is_set():
            if not self._step():
                return
        seconds = time.perf_counter() - began
        _LOG.info("arena: %.2f GiB populated in %.1f s", self.ready_bytes / _GIB, seconds)

    def _step(self) -> bool:
        """Backs the next bytes with pages. False if the kernel has none left."""
        start = self.ready_bytes
        length = min(_STEP, self.goal_bytes - start)
        address, size = ctypes.c_void_p(self._address + start), ctypes.c_size_t(length)
        if _LIBC.madvise(address, size, _MADV_POPULATE_WRITE) != 0:
            code = ctypes.get_errno()
            if code != errno.EINVAL:
                why, goal = os.strerror(code), self.goal_bytes
                _LOG.warning("arena: stopped at %d of %d bytes: %s", start, goal, why)
                return False
            os.posix_fallocate(self._fd, start, length)  # a kernel before 5.14
        self.ready_bytes = start + length
        return True
