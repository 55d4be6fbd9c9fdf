"""Slab files, whose slots hold blocks.

A slab is a preallocated file of equal slots: a header page that identifies its pool, then the
slots. Slabs are added on demand, up to a hard limit.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import mmap
import os
import struct
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from kvrecall.block import FORMAT_VERSION
from kvrecall.pool.disk.index import AGAIN_S, READ_TRIES, ROW_BYTES, WAL_BYTES
from kvrecall.pool.lockfile import leads_to
from kvrecall.pool.slots import ALIGNMENT, SlotClass

_LOG = logging.getLogger(__name__)
Bools = npt.NDArray[np.bool_]
T = TypeVar("T")
RUN_BYTES = 4 << 20  # of one system call
_RUN_BLOCKS = 512  # IOV_MAX is 1024
SLAB_BITS = 40  # of the byte offset in an address; the others are the slab's number
_MOST_SLABS = 1 << 22  # a number beyond this, times 2**SLAB_BITS, would be no address
_VERSION = FORMAT_VERSION * 100 + 1  # of the files, not of the index
_MAGIC = b"kvrecall"
_HEADER = struct.Struct("<8sI16sIQQ")  # magic, version, pool id, number, slot bytes, slots
_GIB = 1 << 30
INDEX_BASE_BYTES = WAL_BYTES + (256 << 10)
"""Bytes of the index before its first row: its log and the empty file."""


def address_of(slab: int, offset: int = 0) -> int:
    """Address of the slot at a byte offset in the file of the slab with this number."""
    return slab << SLAB_BITS | offset


def slab_of(address: int) -> int:
    """Number of the slab that holds ``address``."""
    return address >> SLAB_BITS


def offset_of(address: int) -> int:
    """Byte offset of ``address`` in the file of its slab."""
    return address & (1 << SLAB_BITS) - 1


def adjacent(items: Iterable[T], place_of: Callable[[T], tuple[int, int]]) -> Iterator[list[T]]:
    """Splits items into runs of neighbours that one system call can move. ``place_of``: the address
    of an item and its bytes."""
    run: list[T] = []
    end = size = 0
    for item in items:
        address, nbytes = place_of(item)
        is_full = len(run) == _RUN_BLOCKS or size + nbytes > RUN_BYTES
        if run and (address != end or is_full):
            yield run
            run, size = [], 0
        run.append(item)
        size += nbytes
        end = address + nbytes
    if run:
        yield run


class FileIo:
    """Plain system calls. Subclass it to inject faults. All may raise OSError."""

    def open(self, path: Path, direct: bool) -> int:
        """Opens a slab for reading and writing, creating it with mode 0600."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        return os.open(path, flags | (os.O_DIRECT if direct else 0), 0o600)

    def allocate(self, fd: int, nbytes: int) -> None:
        """Reserves the file's space on the medium."""
        os.posix_fallocate(fd, 0, nbytes)

    def write(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.pwritev(fd, buffers, offset)

    def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Returns the bytes read; fewer than requested means that the file ends there."""
        return os.preadv(fd, buffers, offset)

    def sync(self, fd: int) -> None:
        os.fdatasync(fd)


class SlabLost(OSError):
    """The file was deleted or is too short: its blocks are gone."""


@dataclass(eq=False, slots=True, weakref_slot=True)
class Slab:
    """An open slab file. It is closed once no call uses it any more."""

    number: int
    path: Path
    fd: int
    direct: bool
    slot_bytes: int
    slots: int

    def __post_init__(self) -> None:
        weakref.finalize(self, os.close, self.fd).atexit = False  # the medium may hang

    @property
    def nbytes(self) -> int:
        return ALIGNMENT + self.slot_bytes * self.slots

    @property
    def base(self) -> int:
        """Address of its first slot."""
        return address_of(self.number, ALIGNMENT)

    def check(self) -> None:
        """Raises SlabLost if the file is missing or too short."""
        status = os.fstat(self.fd)
        if status.st_nlink == 0 or status.st_size < self.nbytes:
            raise SlabLost(errno.EIO, f"{self.path.name} was deleted or truncated")


class SlabStore:
    """All slabs of a folder: allocates slots and moves their bytes. Only ``read``, ``write`` and
    ``sync`` are thread-safe.

    ``limit_bytes`` bounds slabs plus the index that so many slots can need (``INDEX_BASE_BYTES``
    and ``ROW_BYTES`` per slot).
    """

    def __init__(
        self,
        folder: Path,
        limit_bytes: int,
        pool_id: bytes,
        io: FileIo,
        direct: bool,
        fd: int | None = None,
    ) -> None:
        """``fd``: of the folder, through which its files are reached, whatever becomes of its
        path."""
        self._folder = folder
        self._place = folder if fd is None else Path(f"/proc/self/fd/{fd}")
        self.limit_bytes = limit_bytes
        self._pool_id = pool_id
        self._io = io
        self._want_direct = direct
        self._slabs: dict[int, Slab] = {}
        self._classes: dict[int, SlotClass] = {}
        self._numbers = itertools.count()
        self.full = False
        """Whether the medium refused to grow; cleared when it grows, or a slab is given back."""

    @property
    def is_direct(self) -> bool:
        """Whether all files bypass the page cache."""
        return self._want_direct and all(slab.direct for slab in self._slabs.values())

    @property
    def file_bytes(self) -> int:
        return sum(slab.nbytes for slab in self._slabs.values())

    @property
    def index_bytes(self) -> int:
        """Upper bound of the index for the present slots."""
        slots = sum(slab.slots for slab in self._slabs.values())
        return INDEX_BASE_BYTES + slots * ROW_BYTES

    def slab(self, number: int) -> Slab | None:
        return self._slabs.get(number)

    def slabs(self) -> list[Slab]:
        return list(self._slabs.values())

    def slot_class(self, slot_bytes: int) -> SlotClass:
        if slot_bytes not in self._classes:
            self._classes[slot_bytes] = SlotClass(slot_bytes)
        return self._classes[slot_bytes]

    def classes(self) -> Collection[SlotClass]:
        return self._classes.values()

    def room_for(self, slot_bytes: int) -> int:
        """Slots of that size that could still be added within the limit."""
        left = self.limit_bytes - self.file_bytes - self.index_bytes - ALIGNMENT
        return max(0, left // (slot_bytes + ROW_BYTES))

    def target_slots(self, slot_bytes: int) -> int:
        """Slots of a full-sized new slab."""
        target = max(min(self.limit_bytes // 16, _GIB), self.limit_bytes // 512)
        return max(1, target // slot_bytes)

    # -- opening ---------------------------------------------------------------------------

    def recover(self, used: Collection[int]) -> list[int]:
        """Opens the files of this pool and deletes others. ``used``: the numbers of slabs that hold
        blocks. Returns those whose file is missing, foreign or too short."""
        for path in sorted(self._place.glob("slab-*.kv")):
            slab = self._open_existing(path)
            if slab is not None and slab.number in used:
                self._slabs[slab.number] = slab
                continue
            _LOG.info("disk tier: %s/%s: no block of this pool; deleted", self._folder, path.name)
            path.unlink()
        known = [number for number in (*self._slabs, *used) if number < _MOST_SLABS]
        self._numbers = itertools.count(max(known, default=-1) + 1)
        return [number for number in used if number not in self._slabs]

    def place(self, number: int, used: Iterable[int]) -> None:
        """Makes the free slots of a recovered slab available."""
        slab = self._slabs[number]
        self.slot_class(slab.slot_bytes).add_extent(slab.base, slab.slots, used)

    def are_slots(self, addresses: Sequence[int], nbytes: Sequence[int]) -> Bools:
        """Whether each of ``addresses`` is a slot of an open slab that can hold ``nbytes`` of
        it."""
        address, size = np.asarray(addresses, np.int64), np.asarray(nbytes, np.int64)
        right = np.zeros(len(address), dtype=np.bool_)
        numbers = address >> SLAB_BITS
        for number in np.unique(numbers).tolist():
            if slab := self.slab(number):
                place, rest = np.divmod(address - slab.base, slab.slot_bytes)
                fits = (size > 0) & (size <= slab.slot_bytes) & (numbers == number)
                right |= fits & (rest == 0) & (place >= 0) & (place < slab.slots)
        return right

    def _open_existing(self, path: Path, tries: int = READ_TRIES) -> Slab | None:
        try:
            with path.open("rb") as file:
                header = file.read(_HEADER.size)
            magic, version, pool_id, number, slot_bytes, slots = _HEADER.unpack(header)
        except (struct.error, OSError) as error:
            if tries == 1 or not isinstance(error, OSError):
                return None
            time.sleep(AGAIN_S)  # a medium that fails once costs no slab
            return self._open_existing(path, tries - 1)
        ours = (magic, version, pool_id) == (_MAGIC, _VERSION, self._pool_id)
        if not ours or number >= _MOST_SLABS or path != self._path(number):
            return None
        if slot_bytes <= 0 or slot_bytes % ALIGNMENT:
            return None
        slab = Slab(number, path, *self._open_file(path), slot_bytes, slots)
        return None if os.fstat(slab.fd).st_size < slab.nbytes else slab

    def _path(self, number: int) -> Path:
        return self._place / f"slab-{number:06d}.kv"

    def _open_file(self, path: Path) -> tuple[int, bool]:
        if self._want_direct:
            try:
                return self._io.open(path, True), True
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                _LOG.warning("disk tier: no direct I/O on the file system of %s", self._folder)
        return self._io.open(path, False), False

    # -- growing and shrinking -------------------------------------------------------------

    def grow(self, slot_bytes: int) -> bool:
        """Adds a slab of that size class. False if the limit or the medium has no space."""
        slots = min(self.target_slots(slot_bytes), self.room_for(slot_bytes))
        if slots < 1:
            return False
        number = next(self._numbers)
        path = self._path(number)
        try:
            path.unlink(missing_ok=True)
            slab = Slab(number, path, *self._open_file(path), slot_bytes, slots)
            self._io.allocate(slab.fd, slab.nbytes)
            self._write_header(slab)
        except OSError as error:
            with contextlib.suppress(OSError):  # what is left is deleted at the next start
                path.unlink(missing_ok=True)
            return self.cannot_grow(error)
        self._slabs[number] = slab
        self.slot_class(slot_bytes).add_extent(slab.base, slots)
        self.full = False
        return True

    def cannot_grow(self, error: OSError) -> bool:
        """Notes that the medium refused to give room, and says so the first time. False."""
        if not self.full:
            _LOG.warning(
                "disk tier: cannot add a slab in %s: %s; new blocks only replace stored ones "
                "until there is room on its file system",
                self._folder,
                error.strerror,
            )
        self.full = True
        return False

    def _write_header(self, slab: Slab) -> None:
        page = mmap.mmap(-1, ALIGNMENT)
        fields = (_MAGIC, _VERSION, self._pool_id, slab.number, slab.slot_bytes, slab.slots)
        page[: _HEADER.size] = _HEADER.pack(*fields)
        with memoryview(page) as view:
            if self._io.write(slab.fd, [view], 0) != ALIGNMENT:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        page.close()
        self._io.sync(slab.fd)
        folder = os.open(self._place, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def remove(self, number: int) -> None:
        """Deletes a slab. Its slots must be free (or the slab is lost). Raises OSError if the
        medium fails; the slab stays then."""
        slab = self._slabs[number]
        if leads_to(slab.path, slab.fd):
            slab.path.unlink(missing_ok=True)
        slots = self.slot_class(slab.slot_bytes)
        if slab.base in slots.extents():
            slots.discard_extent(slab.base)
        self.full = False
        del self._slabs[number]

    # -- moving bytes ----------------------------------------------------------------------

    def write(self, address: int, buffers: Sequence[memoryview]) -> None:
        """Writes adjacent slots. OSError if that fails, SlabLost if the file is gone."""
        slab = self._holding(address)
        slab.check()
        expected = sum(len(buffer) for buffer in buffers)
        if self._io.write(slab.fd, buffers, offset_of(address)) != expected:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def read(self, address: int, buffers: Sequence[memoryview]) -> int:
        """Reads adjacent slots; returns the bytes read, fewer if the file ends there. OSError if
        that fails, SlabLost if the file is gone."""
        slab = self._holding(address)
        got = self._io.read(slab.fd, buffers, offset_of(address))
        slab.check()
        return got

    def sync(self, address: int) -> None:
        """Makes the writes to the slab of ``address`` durable."""
        slab = self._holding(address)
        self._io.sync(slab.fd)
        slab.check()

    def close(self) -> None:
        self._slabs.clear()

    def _holding(self, address: int) -> Slab:
        slab = self.slab(slab_of(address))
        if slab is None:
            raise SlabLost(errno.EIO, "the slab was removed")
        return slab
