"""Names: numbers for the keys of blocks, so that what is kept of each block is a cell in a column.

Two forms: a dictionary for some ten thousand keys, fast and large; and a hash table in plain memory
for millions, about 80 bytes a key, without Python objects and without long pauses when it grows.
"""

from __future__ import annotations

import mmap
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from kvrecall.block import NAMESPACE_BYTES, BlockKey

Numbers = npt.NDArray[np.int64]
_BYTES = {"B": 1, "H": 2, "i": 4, "I": 4, "q": 8, "d": 8}
Kind = Literal["B", "H", "i", "I", "q", "d"]
_HUGE = 2 << 20  # bytes of a huge page
_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


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

    @abstractmethod
    def drop(self, number: int) -> None:
        """Undoes ``keep``; the last one frees the number."""

    @abstractmethod
    def sweep(self, numbers: Sequence[int]) -> None:
        """Frees those of these numbers that are not kept."""

    @abstractmethod
    def column(self, kind: Kind, width: int = 1) -> Column:
        """A new column with ``width`` cells of a kind (of ``array``) for each number, all zero."""

    def numbers(self, keys: Sequence[BlockKey]) -> Sequence[int]:
        """``number`` of each."""
        return list(map(self.number, keys))

    def meet_all(self, keys: Sequence[BlockKey]) -> Sequence[int]:
        """``meet`` of each."""
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
        if self._free:
            number = self._free.pop()
            self._keys[number] = key
        else:
            number = len(self._keys)
            self._keys.append(key)
            self._refs.append(0)
            for cells in self._columns:
                cells.append(0)
        self._numbers[key] = number
        return number

    def key(self, number: int) -> BlockKey:
        return self._keys[number]

    def keep(self, number: int) -> None:
        self._refs[number] += 1

    def drop(self, number: int) -> None:
        self._refs[number] -= 1
        if not self._refs[number]:
            del self._numbers[self._keys[number]]
            self._free.append(number)

    def sweep(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            key = self._keys[number]
            if not self._refs[number] and self._numbers.get(key) == number:
                del self._numbers[key]
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

    def __init__(self, kind: Kind, width: int, room: int) -> None:
        self.kind, self.width = kind, width
        self.pages = mmap.mmap(-1, room * width * _BYTES[kind], flags=_PRIVATE)
        super().__init__(memoryview(self.pages).cast(kind))

    def use_huge_pages(self, at_once: bool) -> None:
        """Asks for huge pages, which make cells all over the column cheaper to reach: ``at_once``
        (which takes a millisecond for 4 MiB), or when the kernel finds the time."""
        with suppress(OSError):  # a kernel without them
            self.pages.madvise(mmap.MADV_HUGEPAGE)
        if at_once:
            self.array()[:: _HUGE // _BYTES[self.kind]] = 0

    def grow(self, room: int) -> None:
        """Makes room for that many numbers; no cell moves in memory that it would take time to
        copy."""
        self.cells.release()
        self.pages.resize(room * self.width * _BYTES[self.kind])
        self.cells = memoryview(self.pages).cast(self.kind)

    def array(self) -> npt.NDArray[Any]:
        """The cells as an array [numbers, width]; must be gone before the names grow."""
        cells = np.frombuffer(self.pages, dtype=np.dtype(self.kind))
        return cells if self.width == 1 else cells.reshape(-1, self.width)


_HASH_BYTES = 32
_TAIL = b"/tail"
_TAILED = 64  # added to the form of a tail
_ODD = 255  # the form of a key that does not fit the columns
_PAD = 4096  # slots after the last home, so that no search wraps around
_MOVED = 4  # slots of the old table that each new key moves
_FEW = 24  # keys that are looked up one by one
_AHEAD = np.arange(8)  # slots that a look-up of many keys compares at once
_LOW = (1 << 32) - 1
_HIGH = ~_LOW


class CompactNames(Names):
    """Names in columns, found by open addressing with linear probing.

    A slot of the table holds a number plus one, and above it the upper half of the key's hash, so
    that a search reads no other memory until it has found the key. The table never shrinks, and at
    3/5 of its slots it grows to twice the size: the old table stays beside the new one, and every
    new key moves a few slots. Deleted keys leave no mark: what follows moves up. Python's own keyed
    hash is used, so that nobody can choose keys that collide.
    """

    def __init__(self, room: int = 1 << 12) -> None:
        """``room``: of how many keys there will be at least, if that is known."""
        bits = max(12, (room * 5 // 3).bit_length())
        self._mask = (1 << bits) - 1
        self._table = MemoryColumn("q", 1, self._mask + 1 + _PAD)
        self._table.use_huge_pages(at_once=True)
        self._old: MemoryColumn | None = None
        self._old_mask = 0
        self._moved = 0  # slots of the old table that are empty now
        self._size = 0  # numbers ever used
        self._free = -1  # first of the list of free numbers, linked by their hashes
        self._count = 0
        self._room = max(1 << 12, room)
        self._odd: dict[int, BlockKey] = {}
        self._spaces: dict[bytes, int] = {}
        self._space_list: list[bytes] = []
        self._columns: list[MemoryColumn] = []
        self._hash = self.column("q")
        self._digest = self.column("B", _HASH_BYTES)
        self._space = self.column("H")
        self._form = self.column("B")  # bytes of the digest, and whether it is a tail
        self._refs = self.column("i")

    def __len__(self) -> int:
        return self._count

    @property
    def size(self) -> int:
        """All numbers are below it."""
        return self._size

    def column(self, kind: Kind, width: int = 1) -> MemoryColumn:
        self._columns.append(MemoryColumn(kind, width, self._room))
        return self._columns[-1]

    # -- single keys -----------------------------------------------------------------------

    def number(self, key: BlockKey) -> int:
        code = hash(key)
        number = self._search(self._table.cells, code & self._mask, code, key)
        if number < 0 and self._old is not None:
            home = max(code & self._old_mask, self._moved)
            number = self._search(self._old.cells, home, code, key)
        return number

    def _search(self, table: Any, slot: int, code: int, key: BlockKey) -> int:
        upper = code & _HIGH
        while word := table[slot]:
            if word & _HIGH == upper:
                number: int = (word & _LOW) - 1
                if self._hash.cells[number] == code and self.key(number) == key:
                    return number
            slot += 1
        return -1

    def meet(self, key: BlockKey) -> int:
        number = self.number(key)
        return self._add(key) if number < 0 else number

    def _add(self, key: BlockKey) -> int:
        number = self._free
        if number >= 0:
            self._free = self._hash.cells[number]
            self._refs.cells[number] = 0
        else:
            number = self._size
            if number == self._room:
                self._grow()
            self._size += 1
        self._count += 1
        if self._count > (self._mask + 1) * 3 // 5 and self._old is None:
            self._old, self._old_mask, self._moved = self._table, self._mask, 0
            self._mask = 2 * self._mask + 1
            self._table = MemoryColumn("q", 1, self._mask + 1 + _PAD)
        code = hash(key)
        self._hash.cells[number] = code
        self._write(number, key)
        self._place(code & _HIGH | number + 1, code)
        if self._old is not None:
            self._move(_MOVED)
        return number

    def _grow(self) -> None:
        self._room *= 2
        for column in self._columns:
            column.grow(self._room)

    def _place(self, word: int, code: int) -> None:
        table, slot = self._table.cells, code & self._mask
        while table[slot]:
            slot += 1
        table[slot] = word

    def _move(self, count: int) -> None:
        """Moves the numbers of some more slots of the old table into the new one."""
        assert self._old is not None
        old, hashes = self._old.cells, self._hash.cells
        end = min(self._moved + count, len(old))
        for slot in range(self._moved, end):
            if word := old[slot]:
                self._place(word, hashes[(word & _LOW) - 1])
                old[slot] = 0
        self._moved = end
        if end == len(old):
            self._old = None
            self._table.use_huge_pages(at_once=False)

    def _write(self, number: int, key: BlockKey) -> None:
        space, rest, form = key[:NAMESPACE_BYTES], key[NAMESPACE_BYTES:], 0
        if rest.endswith(_TAIL):
            rest, form = rest[: -len(_TAIL)], _TAILED
        place = self._space_number(space)
        if len(rest) > _HASH_BYTES or place < 0:
            self._form.cells[number] = _ODD
            self._odd[number] = key
            return
        self._space.cells[number] = place
        self._form.cells[number] = form + len(rest)
        begin = number * _HASH_BYTES
        self._digest.cells[begin : begin + len(rest)] = rest

    def _space_number(self, space: bytes) -> int:
        """The number of a namespace; -1: it is none, or one too many."""
        place = self._spaces.get(space, -1)
        if place < 0 and len(space) == NAMESPACE_BYTES and len(self._space_list) <= 0xFFFF:
            place = self._spaces[space] = len(self._space_list)
            self._space_list.append(space)
        return place

    def key(self, number: int) -> BlockKey:
        form = self._form.cells[number]
        if form == _ODD:
            return self._odd[number]
        begin = number * _HASH_BYTES
        space = self._space_list[self._space.cells[number]]
        if form <= _HASH_BYTES:
            return BlockKey(space + self._digest.cells[begin : begin + form])
        digest = self._digest.cells[begin : begin + form - _TAILED]
        return BlockKey(space + bytes(digest) + _TAIL)

    def is_tail(self, number: int) -> bool:
        """``block.is_tail`` of the key."""
        form: int = self._form.cells[number]
        return form >= _TAILED and (form != _ODD or self._odd[number].endswith(_TAIL))

    def is_same_space(self, number: int, other: int) -> bool:
        """Whether both keys are of one namespace."""
        if _ODD in (self._form.cells[number], self._form.cells[other]):
            space = self.key(number)[:NAMESPACE_BYTES]
            return self.key(other).startswith(space)
        return bool(self._space.cells[number] == self._space.cells[other])

    def keep(self, number: int) -> None:
        self._refs.cells[number] += 1

    def drop(self, number: int) -> None:
        refs = self._refs.cells
        left = refs[number] - 1
        refs[number] = left
        if not left:
            self._delete(number)

    def sweep(self, numbers: Sequence[int]) -> None:
        refs = self._refs.cells
        for number in numbers:
            if not refs[number]:
                refs[number] = 1
                self.drop(number)

    def _delete(self, number: int) -> None:
        code = self._hash.cells[number]
        if not self._clear(self._table.cells, self._mask, code & self._mask, number):
            assert self._old is not None
            home = max(code & self._old_mask, self._moved)
            self._clear(self._old.cells, self._old_mask, home, number)
        self._odd.pop(number, None)
        self._refs.cells[number] = -1
        self._hash.cells[number] = self._free
        self._free = number
        self._count -= 1

    def _clear(self, table: Any, mask: int, slot: int, number: int) -> bool:
        """Empties the slot of a number, from ``slot`` on, and closes the gap. False if it has none
        in this table."""
        hashes = self._hash.cells
        word = hashes[number] & _HIGH | number + 1
        while table[slot] != word:
            if not table[slot]:
                return False
            slot += 1
        after = slot + 1
        while word := table[after]:
            if hashes[(word & _LOW) - 1] & mask <= slot:
                table[slot], slot = word, after
            after += 1
        table[slot] = 0
        return True

    # -- many keys -------------------------------------------------------------------------

    def numbers(self, keys: Sequence[BlockKey]) -> Sequence[int]:
        if len(keys) < _FEW:
            return list(map(self.number, keys))
        found: list[int] = self.numbers_of(keys).tolist()
        return found

    def meet_all(self, keys: Sequence[BlockKey]) -> Sequence[int]:
        numbers = list(self.numbers(keys))
        for place, number in enumerate(numbers):
            if number < 0:
                numbers[place] = self.meet(keys[place])
        return numbers

    def meet_many(self, keys: Sequence[BlockKey]) -> Numbers:
        """``meet`` of each of very many keys [keys]."""
        numbers = self.numbers_of(keys)
        new = np.flatnonzero(numbers < 0)
        fresh = [keys[place] for place in new.tolist()]
        text = b"".join(fresh)
        length = NAMESPACE_BYTES + _HASH_BYTES
        count = len(fresh)
        if (
            self._old is not None
            or self._count + count > (self._mask + 1) * 3 // 5
            or set(map(len, fresh)) != {length}
            or len(set(fresh)) < count
            or len({key[:NAMESPACE_BYTES] for key in fresh} | self._spaces.keys()) > 0xFFFF
        ):
            for place, key in zip(new.tolist(), fresh, strict=True):
                numbers[place] = self.meet(key)
            return numbers
        while self._size + count > self._room:
            self._grow()
        added = np.arange(self._size, self._size + count)
        self._size += count
        self._count += count
        numbers[new] = added
        given = np.frombuffer(text, np.uint8).reshape(count, length)
        part = slice(int(added[0]), int(added[0]) + count)
        codes = np.fromiter(map(hash, fresh), np.int64, count)
        self._hash.array()[part] = codes
        self._digest.array()[part] = given[:, NAMESPACE_BYTES:]
        self._form.array()[part] = _HASH_BYTES
        spaces = [self._space_number(key[:NAMESPACE_BYTES]) for key in fresh]
        self._space.array()[part] = spaces
        table, slots = self._table.array(), codes & self._mask
        words = codes & _HIGH | added + 1
        open_ = np.arange(count)
        while open_.size:
            free = open_[table[slots[open_]] == 0]
            table[slots[free]] = words[free]  # of those that want one slot the last gets it
            open_ = open_[table[slots[open_]] != words[open_]]
            slots[open_] += 1
        return numbers

    def keep_many(self, numbers: Numbers) -> None:
        """``keep`` of each."""
        np.add.at(self._refs.array(), numbers, 1)

    def numbers_of(self, keys: Sequence[BlockKey], exact: bool = True) -> Numbers:
        """``number`` of each of these keys [keys]. Not ``exact``: keys with the same hash of 64
        bits are taken for one."""
        count = len(keys)
        codes = np.fromiter(map(hash, keys), np.int64, count)
        found = self._search_all(self._table, codes, codes & self._mask)
        if self._old is not None:
            missing = np.flatnonzero(found < 0)
            part = codes[missing]
            home = np.maximum(part & self._old_mask, self._moved)
            found[missing] = self._search_all(self._old, part, home)
        if exact and count:
            self._verify(keys, found)
        return found

    def _search_all(self, column: MemoryColumn, codes: Numbers, slots: Numbers) -> Numbers:
        """Numbers with these hashes, -1 where there is none."""
        table, hashes = column.array(), self._hash.array()
        found = np.full(len(codes), -1)
        open_, ahead = np.arange(len(codes)), np.arange(1)  # most are in their first slot
        while open_.size:
            words = table.take(slots[:, None] + ahead)
            # A slot with the same upper half becomes its number; an empty one never does.
            lower = words ^ (codes & _HIGH)[:, None]
            lower -= 1
            hits = np.flatnonzero(lower.view(np.uint64) < _LOW)
            places, numbers = hits // len(ahead), lower.take(hits)
            same = hashes.take(numbers) == codes.take(places)
            if not same.all():
                places, numbers = places[same], numbers[same]
            found[open_.take(places)] = numbers
            left = np.flatnonzero(found.take(open_) < 0)
            left = left[words[left].all(axis=1)]
            open_, codes = open_.take(left), codes.take(left)
            slots = slots.take(left) + len(ahead)
            ahead = _AHEAD
        return found

    def _verify(self, keys: Sequence[BlockKey], found: Numbers) -> None:
        """Corrects numbers that were found by their hash alone."""
        length = NAMESPACE_BYTES + _HASH_BYTES
        text = b"".join(keys)
        if self._space_list and len(text) == length * len(keys):
            given = np.frombuffer(text, np.uint64).reshape(-1, length // 8)
            at = np.maximum(found, 0)
            digests = self._digest.array().view(np.uint64).take(at, axis=0)
            same = digests == given[:, NAMESPACE_BYTES // 8 :]
            wrong = ~(same[:, 0] & same[:, 1] & same[:, 2] & same[:, 3])
            wrong |= self._form.array()[at] != _HASH_BYTES
            if (given[:, :2] == given[0, :2]).all():  # all of one namespace
                wrong |= self._space.array()[at] != self._spaces.get(keys[0][:NAMESPACE_BYTES], -1)
            else:
                spaces = np.frombuffer(b"".join(self._space_list), np.uint64).reshape(-1, 2)
                wrong |= (spaces[self._space.array()[at]] != given[:, :2]).any(axis=1)
            suspects = np.flatnonzero(wrong & (found >= 0)).tolist()
        else:
            suspects = np.flatnonzero(found >= 0).tolist()
        for place in suspects:
            found[place] = self.number(keys[place])
