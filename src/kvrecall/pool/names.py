"""Names: numbers for the keys of blocks, so that what is kept of each block is a cell in a column.

Two forms: a dictionary for some ten thousand keys, fast and large; and a hash table in plain memory
for millions, about 85 bytes a key, without Python objects and without long pauses when it grows.
"""

from __future__ import annotations

import mmap
import os
import struct
from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Literal

import numpy as np
import numpy.ma  # which unique() imports at its first call, in 6 ms: not under a lock
import numpy.typing as npt

from kvrecall.block import BlockKey

Numbers = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]
Kind = Literal["B", "i", "I", "q", "Q", "d"]
_MORE = 64  # numbers that a dictionary of names makes at once
_NO_KEY = BlockKey(b"")
_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
_NORESERVE = 0x4000  # MAP_NORESERVE, which Python names from 3.13 on


class Names(ABC):
    """Numbers keys from 0 on. Owner: one tier; not thread-safe; never waits.

    A number is valid as long as it is kept; then it, and its cell in every column, is reused. Who
    keeps a number resets its own columns before it drops it.
    """

    @abstractmethod
    def number(self, key: BlockKey) -> int:
        """The key's number, -1 if it has none."""

    @abstractmethod
    def meet(self, key: BlockKey) -> int:
        """The key's number, a new one if it has none. A new one is not kept yet."""

    @abstractmethod
    def key(self, number: int) -> BlockKey: ...

    @abstractmethod
    def keep(self, number: int) -> None:
        """The number is in use once more."""

    def keep_all(self, numbers: Sequence[int] | Numbers) -> None:
        for number in numbers:
            self.keep(number)

    @abstractmethod
    def drop(self, number: int) -> None:
        """Undoes ``keep``; the last one frees the number."""

    def drop_all(self, numbers: Sequence[int] | Numbers) -> None:
        for number in numbers:
            self.drop(number)

    @abstractmethod
    def column(self, kind: Kind, width: int = 1) -> Column:
        """A new column with ``width`` cells of a kind (of ``array``) for each number, all zero."""

    def numbers(self, keys: Sequence[BlockKey]) -> Sequence[int]:
        return list(map(self.number, keys))

    def meet_all(self, keys: Sequence[BlockKey]) -> Sequence[int]:
        return list(map(self.meet, keys))


class Column:
    """Cells by number. ``cells`` is replaced when the names grow, which ``meet`` may do: do not
    hold it across that."""

    __slots__ = ("cells",)

    def __init__(self, cells: Any) -> None:
        self.cells = cells


class DictNames(Names):
    """Names in a dictionary, and columns in lists."""

    def __init__(self) -> None:
        self._numbers: dict[BlockKey, int] = {}
        self._keys: list[BlockKey] = []
        self._refs: list[int] = []
        self._free: list[int] = []
        self._columns: list[list[int]] = []

    def __len__(self) -> int:
        return len(self._numbers)

    def number(self, key: BlockKey) -> int:
        return self._numbers.get(key, -1)

    def meet(self, key: BlockKey) -> int:
        number = self._numbers.get(key)
        if number is not None:
            return number
        if not self._free:
            self._grow()
        number = self._free.pop()
        self._keys[number] = key
        self._numbers[key] = number
        return number

    def _grow(self) -> None:
        """Makes new numbers: many at once, as each costs an operation on every column."""
        size = len(self._keys)
        self._free += range(size + _MORE - 1, size - 1, -1)
        self._keys += [_NO_KEY] * _MORE
        for cells in (self._refs, *self._columns):
            cells += [0] * _MORE

    def key(self, number: int) -> BlockKey:
        return self._keys[number]

    def keep(self, number: int) -> None:
        self._refs[number] += 1

    def drop(self, number: int) -> None:
        self._refs[number] -= 1
        if not self._refs[number]:
            del self._numbers[self._keys[number]]
            self._free.append(number)

    def column(self, kind: Kind, width: int = 1) -> Column:
        assert width == 1, "wide columns are for compact names"
        self._columns.append([0] * len(self._keys))
        return Column(self._columns[-1])

    def numbers(self, keys: Sequence[BlockKey]) -> Sequence[int]:
        get = self._numbers.get
        return [get(key, -1) for key in keys]


class MemoryColumn(Column):
    """A column in plain memory, of which only pages that were written take room."""

    __slots__ = ("kind", "pages", "width")

    def __init__(self, kind: Kind, width: int, room: int, most: int = 0) -> None:
        """With cells of ``room`` numbers, or if the address space allows of ``most``."""
        self.kind, self.width = kind, width
        size = width * np.dtype(kind).itemsize
        try:
            self.pages = mmap.mmap(-1, max(room, most) * size, flags=_PRIVATE | _NORESERVE)
        except OSError:  # a limit of this process, or of the system
            self.pages = mmap.mmap(-1, room * size, flags=_PRIVATE)
        # Where huge pages are the rule, the first cell would take 2 MiB.
        with suppress(OSError):  # a kernel without them
            self.pages.madvise(mmap.MADV_NOHUGEPAGE)
        super().__init__(memoryview(self.pages).cast(kind))

    def grow(self, room: int) -> None:
        """Makes room for that many numbers. Without the address space for them the system moves
        the pages, which copies nothing, but takes a millisecond for 250 MiB and makes each page
        slow to reach once more."""
        size = room * self.width * np.dtype(self.kind).itemsize
        if size > len(self.pages):
            self.cells.release()
            self.pages.resize(size)
            self.cells = memoryview(self.pages).cast(self.kind)

    def array(self) -> npt.NDArray[Any]:
        """The cells as an array [numbers, width]; must be gone before the names grow."""
        cells = np.frombuffer(self.pages, dtype=np.dtype(self.kind))
        return cells if self.width == 1 else cells.reshape(-1, self.width)


_CELL = 56  # bytes of a key's cell: its length, the key, zeros
_LONGEST = _CELL - 2  # bytes of a key; in a cell, one of 55 looks like the first 55 of more
_FORM = f"{_CELL}p"  # of a cell, to struct
_SEATS = 16  # of a bucket
_FILLED = 10  # of them, at most, in a table that is made for a known number of keys
_SPREAD = 8  # entries of the directory for each bucket, at most
_WORD = (1 << 64) - 1
_FEW = 32  # keys or numbers that are worked on one by one
_EACH = np.ones(_CELL // 8, np.bool_)  # any() of a cell's words as a product, which is faster
_cell_of = struct.Struct(_FORM).pack
_words_of = struct.Struct("=7Q").unpack  # of a cell


class CompactNames(Names):
    """Names in columns, found by extendible hashing (Fagin et al., 1979).

    A key's *code* is 64 bits: the sum of the words of its cell, times secret odd factors
    (multilinear hashing, Carter & Wegman, 1979), so that keys with one code, or many with the same
    upper bits, cannot be chosen from outside. Its upper bits lead through a directory to a bucket
    of 16 *seats*, each a code and the number of its key. A full bucket is split in two, and the
    directory doubles where it has but one entry for that bucket: the only step that takes longer
    with more keys (a few milliseconds with ten million). The table never shrinks.

    Each code is in the table once, and a bucket that may not be split any more stays full: further
    keys are *outside*, in a dictionary. So are keys too long for a cell.
    """

    def __init__(
        self, room: int = 1 << 12, most: int = 0, factors: Sequence[int] | None = None
    ) -> None:
        """``room``: of how many keys there will be at least, if that is known. ``most``: for how
        many there is address space from the start, so that columns need not move. ``factors``: of
        the 7 words of a cell; random ones if None."""
        self._factors = factors or [word | 1 for word in _words_of(os.urandom(_CELL))]
        self._factor_array = np.array(self._factors, np.uint64)
        self._room, self._most = max(1 << 12, room), most
        self._columns: list[MemoryColumn] = []
        self._cells = self.column("B", _CELL)
        self._refs = self.column("i")  # -1: a free number
        self._size = self._count = 0  # numbers ever used, and now
        self._free = array("i")
        self._outside: dict[BlockKey, int] = {}
        self._outside_keys: dict[int, BlockKey] = {}
        self._bits = max(1, (room // _FILLED).bit_length())
        self._buckets = 1 << self._bits
        self._directory = MemoryColumn("i", 1, self._buckets)  # buckets by the upper bits of codes
        self._directory.array()[:] = np.arange(self._buckets)
        self._bucket_room = 2 * self._buckets
        reserved = 4 * most // _SEATS
        self._codes = MemoryColumn("Q", _SEATS, self._bucket_room, reserved)  # 0: a free seat
        self._seated = MemoryColumn("i", _SEATS, self._bucket_room, reserved)
        self._bits_of = MemoryColumn("B", 1, self._bucket_room, reserved)  # that lead to a bucket
        self._bits_of.array()[: self._buckets] = self._bits

    def __len__(self) -> int:
        return self._count

    @property
    def size(self) -> int:
        """All numbers are below it."""
        return self._size

    def column(self, kind: Kind, width: int = 1) -> MemoryColumn:
        self._columns.append(MemoryColumn(kind, width, self._room, self._most))
        return self._columns[-1]

    def key(self, number: int) -> BlockKey:
        if number in self._outside_keys:
            return self._outside_keys[number]
        cell = self._cell(number)
        return BlockKey(cell[1 : 1 + cell[0]])

    def _cell(self, number: int) -> bytes:
        return bytes(self._cells.cells[number * _CELL : (number + 1) * _CELL])

    # -- one -------------------------------------------------------------------------------

    def _code(self, cell: bytes) -> int:
        a, b, c, d, e, f, g = _words_of(cell)
        o, p, q, r, s, t, u = self._factors
        code: int = a * o + b * p + c * q + d * r + e * s + f * t + g * u & _WORD
        return code ^ code >> 32 | 1

    def _seat(self, code: int) -> int:
        """Where a code is; -1: nowhere."""
        begin = self._directory.cells[code >> 64 - self._bits] * _SEATS
        codes = self._codes.cells[begin : begin + _SEATS].tolist()
        return begin + codes.index(code) if code in codes else -1

    def number(self, key: BlockKey) -> int:
        if len(key) <= _LONGEST:
            cell = _cell_of(key)
            seat = self._seat(self._code(cell))
            if seat >= 0:
                number: int = self._seated.cells[seat]
                if self._cell(number) == cell:
                    return number
        return self._outside.get(key, -1)

    def meet(self, key: BlockKey) -> int:
        number = self.number(key)
        if number < 0:
            number = self._new_numbers(1)[0]
            self._refs.cells[number] = 0
            self._count += 1
            if len(key) > _LONGEST or not self._seat_new(key, number):
                self._outside[key], self._outside_keys[number] = number, key
        return number

    def _new_numbers(self, count: int) -> array[int]:
        """Freed numbers first."""
        kept = max(0, len(self._free) - count)
        numbers = self._free[kept:]
        del self._free[kept:]
        begin, self._size = self._size, self._size + count - len(numbers)
        numbers.extend(range(begin, self._size))
        while self._size > self._room:
            self._room *= 2
            for column in self._columns:
                column.grow(self._room)
        return numbers

    def _seat_new(self, key: BlockKey, number: int) -> bool:
        """Puts a new key into the table. False if there is no seat for it."""
        cell = _cell_of(key)
        code = self._code(cell)
        while True:
            bucket = self._directory.cells[code >> 64 - self._bits]
            begin = bucket * _SEATS
            codes = self._codes.cells[begin : begin + _SEATS].tolist()
            if code in codes or not (0 in codes or self._split(bucket, code)):
                return False
            if 0 in codes:
                seat = begin + codes.index(0)
                self._codes.cells[seat], self._seated.cells[seat] = code, number
                self._cells.cells[number * _CELL : (number + 1) * _CELL] = cell
                return True

    def _split(self, bucket: int, code: int) -> bool:
        """Splits the full bucket that ``code`` leads to by one more bit of its codes. False if the
        directory would be too long for the number of buckets."""
        bits = self._bits_of.cells[bucket]
        if bits == self._bits:
            if 1 << bits >= _SPREAD * self._buckets:
                return False
            self._bits += 1
            doubled = MemoryColumn("i", 1, 1 << self._bits)
            doubled.array().reshape(-1, 2)[:] = self._directory.array()[:, None]
            self._directory = doubled
        new = self._buckets
        if new == self._bucket_room:
            self._bucket_room *= 2
            for column in (self._codes, self._seated, self._bits_of):
                column.grow(self._bucket_room)
        self._buckets += 1
        self._bits_of.cells[bucket] = self._bits_of.cells[new] = bits + 1
        half = 1 << self._bits - bits - 1
        upper = (code >> 64 - bits << self._bits - bits) + half
        self._directory.array()[upper : upper + half] = new
        codes, seated, bit = self._codes.cells, self._seated.cells, 1 << 63 - bits
        begin, to = bucket * _SEATS, new * _SEATS
        for seat, each in enumerate(codes[begin : begin + _SEATS].tolist(), begin):
            if each & bit:
                codes[to], seated[to], codes[seat] = each, seated[seat], 0
                to += 1
        return True

    def keep(self, number: int) -> None:
        self._refs.cells[number] += 1

    def drop(self, number: int) -> None:
        refs = self._refs.cells
        refs[number] -= 1
        if not refs[number]:
            if number in self._outside_keys:
                del self._outside[self._outside_keys.pop(number)]
            else:
                self._codes.cells[self._seat(self._code(self._cell(number)))] = 0
            refs[number] = -1
            self._free.append(number)
            self._count -= 1

    # -- many ------------------------------------------------------------------------------

    def numbers(self, keys: Sequence[BlockKey]) -> Sequence[int]:
        found: list[int] = self.numbers_of(keys).tolist()
        return found

    def numbers_of(self, keys: Sequence[BlockKey], exact: bool = True) -> Numbers:
        """``number`` of each [keys]. Not ``exact``: an absent key is taken for the one that has the
        same code of 64 bits, if there is one."""
        cells = self._cells_of(keys)
        if cells is None:
            return np.fromiter(map(self.number, keys), np.int64, len(keys))
        return self._find_all(keys, self._codes_of(cells), cells if exact else None)

    def _cells_of(self, keys: Sequence[BlockKey]) -> Words | None:
        """The cells of many keys [keys, 7]; None if they are few, or one does not fit."""
        if len(keys) < _FEW:
            return None
        text = struct.Struct(_FORM * len(keys)).pack(*keys)  # not cached: it is as large as they
        cells = np.frombuffer(text, np.uint64).reshape(-1, _CELL // 8)
        return cells if cells.view(np.uint8)[:, 0].max() <= _LONGEST else None

    def _codes_of(self, cells: Words) -> Words:
        """``_code`` of each [keys]."""
        codes: Words = cells @ self._factor_array
        return codes ^ codes >> np.uint64(32) | np.uint64(1)

    def _buckets_of(self, codes: Words) -> Numbers:
        entries = (codes >> np.uint64(64 - self._bits)).astype(np.int64)
        return self._directory.array().take(entries).astype(np.int64)

    def _seats(self, codes: Words) -> tuple[Numbers, npt.NDArray[np.bool_]]:
        """``_seat`` of each, and whether it is right [keys]."""
        buckets, table = self._buckets_of(codes), self._codes.array()
        seats = buckets * _SEATS
        seats += (table.take(buckets, axis=0) == codes[:, None]).argmax(axis=1)
        return seats, table.ravel().take(seats) == codes

    def _find_all(self, keys: Sequence[BlockKey], codes: Words, cells: Words | None) -> Numbers:
        """The number of each key that has one of these codes, and the cell unless None [keys]."""
        seats, is_here = self._seats(codes)
        found = self._seated.array().ravel().take(seats).astype(np.int64)
        found[~is_here] = -1
        unsure = ~is_here if self._outside else np.zeros(len(keys), np.bool_)
        if cells is not None:
            known = self._cells.array().view(np.uint64).take(found, axis=0, mode="clip")
            unsure |= is_here & ((known != cells) @ _EACH)
        for place in np.flatnonzero(unsure).tolist():
            found[place] = self.number(keys[place])
        return found

    def meet_all(self, keys: Sequence[BlockKey]) -> Sequence[int]:
        met: list[int] = self.meet_many(keys).tolist()
        return met

    def meet_many(self, keys: Sequence[BlockKey]) -> Numbers:
        """``meet`` of each [keys]."""
        cells = self._cells_of(keys)
        if cells is None:
            return np.fromiter(map(self.meet, keys), np.int64, len(keys))
        codes = self._codes_of(cells)
        numbers = self._find_all(keys, codes, cells)
        new = np.flatnonzero(numbers < 0)
        if new.size:
            keys = [keys[place] for place in new.tolist()]
            numbers[new] = self._add_all(keys, codes[new], cells[new])
        return numbers

    def _add_all(self, keys: Sequence[BlockKey], codes: Words, cells: Words) -> Numbers:
        """New numbers for keys that have none: at once for the first key of each bucket with a free
        seat, then one by one."""
        buckets, first = np.unique(self._buckets_of(codes), return_index=True)
        known = self._codes.array().take(buckets, axis=0)
        has_room = (known == 0).any(axis=1) & (known != codes[first, None]).all(axis=1)
        seats = (buckets * _SEATS + (known == 0).argmax(axis=1))[has_room]
        first = first[has_room]
        added = np.array(self._new_numbers(len(first)), np.int64)
        self._cells.array().view(np.uint64)[added] = cells[first]
        self._refs.array()[added] = 0
        self._count += len(added)
        self._codes.array().ravel()[seats] = codes[first]
        self._seated.array().ravel()[seats] = added
        numbers = np.full(len(keys), -1, np.int64)
        numbers[first] = added
        for place in np.flatnonzero(numbers < 0).tolist():
            numbers[place] = self.meet(keys[place])
        return numbers

    def keep_all(self, numbers: Sequence[int] | Numbers) -> None:
        if len(numbers) < _FEW:
            super().keep_all(numbers)
        else:
            np.add.at(self._refs.array(), np.asarray(numbers, np.int64), 1)

    def drop_all(self, numbers: Sequence[int] | Numbers) -> None:
        if len(numbers) < _FEW or self._outside:
            super().drop_all(numbers)
            return
        dropped, refs = np.asarray(numbers, np.int64), self._refs.array()
        np.subtract.at(refs, dropped, 1)
        ended = np.unique(dropped[refs[dropped] == 0])
        seats, _ = self._seats(self._codes_of(self._cells.array().view(np.uint64)[ended]))
        self._codes.array().ravel()[seats] = 0
        refs[ended] = -1
        self._free.extend(ended.tolist())
        self._count -= len(ended)
