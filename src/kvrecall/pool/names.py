"""Names: numbers for the keys of blocks, so that what is kept of each block is a cell in a column.

Two forms: a dictionary for some ten thousand keys, fast and large; and a hash table in plain memory
for millions, about 80 bytes a key, without Python objects and without long pauses when it grows.
"""

from __future__ import annotations

import mmap
import os
import struct
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Literal

import numpy as np
import numpy.ma  # which unique() imports at its first call, in 6 ms: not under a lock
import numpy.typing as npt

from kvrecall.block import NAMESPACE_BYTES, BlockKey

Numbers = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]
_BYTES = {"B": 1, "i": 4, "I": 4, "q": 8, "Q": 8, "d": 8}
Kind = Literal["B", "i", "I", "q", "Q", "d"]
_MORE = 64  # numbers that a dictionary of names makes at once
_NO_KEY = BlockKey(b"")
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, which Python does not name
_POPULATED_BYTES = 64 << 10  # at once, as Python's lock is held
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

    def keep_all(self, numbers: Sequence[int]) -> None:
        """``keep`` of each."""
        for number in numbers:
            self.keep(number)

    @abstractmethod
    def drop(self, number: int) -> None:
        """Undoes ``keep``; the last one frees the number."""

    def drop_all(self, numbers: Sequence[int]) -> None:
        """``drop`` of each."""
        for number in numbers:
            self.drop(number)

    @abstractmethod
    def sweep(self, numbers: Sequence[int]) -> None:
        """Frees those of these numbers that are not kept."""

    @abstractmethod
    def column(self, kind: Kind, width: int = 1, is_rare: bool = False) -> Column:
        """A new column with ``width`` cells of a kind (of ``array``) for each number, all zero.
        ``is_rare``: most may stay zero, so no memory is taken for them ahead."""

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

    def sweep(self, numbers: Sequence[int]) -> None:
        refs = self._refs
        for number in numbers:
            if refs[number]:
                continue
            key = self._keys[number]
            if self._numbers.get(key) == number:
                del self._numbers[key]
                self._free.append(number)

    def column(self, kind: Kind, width: int = 1, is_rare: bool = False) -> Column:
        assert width == 1, "wide columns are for compact names"
        self._columns.append([0] * len(self._keys))
        return Column(self._columns[-1])

    def numbers(self, keys: Sequence[BlockKey]) -> Sequence[int]:
        get = self._numbers.get
        return [get(key, -1) for key in keys]


class MemoryColumn(Column):
    """A column in plain memory, of which only pages that were written take room."""

    __slots__ = ("is_rare", "kind", "pages", "width")

    def __init__(
        self, kind: Kind, width: int, room: int, is_rare: bool = False, most: int = 0
    ) -> None:
        """With cells of ``room`` numbers, or if the address space allows of ``most``."""
        self.kind, self.width, self.is_rare = kind, width, is_rare
        size = width * _BYTES[kind]
        try:
            self.pages = mmap.mmap(-1, max(room, most) * size, flags=_PRIVATE | _NORESERVE)
        except OSError:  # a limit of this process, or of the system
            self.pages = mmap.mmap(-1, room * size, flags=_PRIVATE)
        if most > room:
            # Where huge pages are the rule, the first cell would take 2 MiB.
            with suppress(OSError):  # a kernel without them
                self.pages.madvise(mmap.MADV_NOHUGEPAGE)
        super().__init__(memoryview(self.pages).cast(kind))

    def take_all(self) -> None:
        """Takes the memory of all cells, which are zero, from the system: two milliseconds for 4
        MiB, and more in a virtual machine that never used it before. NumPy lets go of Python's lock
        meanwhile if that is more than 2 MiB."""
        np.frombuffer(self.pages, np.uint8)[:: mmap.PAGESIZE] = 0

    def populate(self, start: int, stop: int) -> None:
        """Takes the memory of the cells of these numbers from the system, as the first write to
        them would. Changes no cell, and so needs no lock of the names' owner."""
        size = self.width * _BYTES[self.kind]
        begin = start * size // mmap.PAGESIZE * mmap.PAGESIZE
        end = min(stop * size, len(self.pages))
        with suppress(OSError):  # a kernel before 5.14: the first write does it
            for at in range(begin, end, _POPULATED_BYTES):
                self.pages.madvise(_POPULATE_WRITE, at, min(_POPULATED_BYTES, end - at))

    def grow(self, room: int) -> None:
        """Makes room for that many numbers. Without the address space for them the system moves
        the pages, which copies nothing, but takes a millisecond for 250 MiB and makes each page
        slow to reach once more."""
        size = room * self.width * _BYTES[self.kind]
        if size <= len(self.pages):
            return
        self.cells.release()
        self.pages.resize(size)
        self.cells = memoryview(self.pages).cast(self.kind)

    def array(self) -> npt.NDArray[Any]:
        """The cells as an array [numbers, width]; must be gone before the names grow."""
        cells = np.frombuffer(self.pages, dtype=np.dtype(self.kind))
        return cells if self.width == 1 else cells.reshape(-1, self.width)


_HASH_BYTES = 32
_KEY_BYTES = NAMESPACE_BYTES + _HASH_BYTES
_SPACE_WORDS = NAMESPACE_BYTES // 8
_TAIL = b"/tail"
_TAILED = 64  # added to the form of a tail
_ODD = 255  # the form of a key that does not fit the columns
_FORM = 8  # bits of it
_SPACES = 1 << 16  # namespaces that fit
_FEW = 24  # keys that are looked up one by one
_GROUP_BITS = 2
_GROUP = 1 << _GROUP_BITS  # slots
_REACH = 8 * _GROUP  # slots from its home on in which a key may be
_HASHED = struct.Struct(f"=Q{NAMESPACE_BYTES - 8}xQ")  # of a key
_WORD = (1 << 64) - 1
_LOW = (1 << 32) - 1
_LOWER, _UPPER = (0, 1) if sys.byteorder == "little" else (1, 0)  # half of a word in memory


class _Table:
    """Numbers by hash, in groups of four slots. A slot is a word: the lower half of the key's hash
    above the number plus one, or 0 if it is free, so that a search reads no other memory until it
    has found the key. The upper bits of the hash are the home, a group; what finds it full goes
    into the next group with a free slot. The free slots of a group are its last ones."""

    def __init__(self, bits: int, at_once: bool) -> None:
        """With 2 to the power of ``bits`` groups. ``at_once``: takes the memory of all."""
        self.bits = bits
        self.shift = 64 - bits
        self.most = (1 << bits) * _GROUP * 2 // 5
        """Keys that it holds before a larger one should take its place."""
        self.slots = MemoryColumn("Q", _GROUP, (1 << bits) + _REACH)
        if at_once:
            self.slots.take_all()

    def place(self, code: int, number: int) -> bool:
        """Puts a number where its hash belongs. False if there is no free slot near its home."""
        slots, at = self.slots.cells, code >> self.shift << _GROUP_BITS
        end = at + _REACH
        while slots[at]:
            at += 1
            if at == end:
                return False
        slots[at] = (code & _LOW) << 32 | number + 1
        return True

    def remove(self, number: int, code: int, start: int, code_of: Callable[[int], int]) -> bool:
        """Removes a number; what was put behind its full group moves up. False if it is not here.
        ``start``: all groups before are empty. ``code_of``: the hash of a number's key."""
        slots, home = self.slots.cells, code >> self.shift
        word = (code & _LOW) << 32 | number + 1
        at, end = max(home, start) << _GROUP_BITS, (home << _GROUP_BITS) + _REACH
        while slots[at] != word:
            if not slots[at] or at + 1 >= end:
                return False
            at += 1
        group = behind = at >> _GROUP_BITS
        while slots[last := behind * _GROUP + _GROUP - 1]:  # full
            behind += 1
            for other in range(last + 1, last + 1 + _GROUP):
                if (word := slots[other]) and code_of((word & _LOW) - 1) >> self.shift <= group:
                    slots[at], at, group = word, other, behind
                    break
        last = group * _GROUP + _GROUP - 1
        while not slots[last]:
            last -= 1
        slots[at], slots[last] = slots[last], 0
        return True

    def remove_most(self, numbers: Numbers, codes: Words) -> npt.NDArray[np.bool_]:
        """``remove`` of each of many numbers [numbers] that stands in a home with a free slot,
        behind which nothing has to move up; of those of one home only of one. Which were."""
        slots = self.slots.array()
        homes = (codes >> np.uint64(self.shift)).astype(np.int64)
        rows = slots.take(homes, axis=0)
        words = codes << np.uint64(32) | (numbers + 1).astype(np.uint64)
        at = np.flatnonzero(rows == words[:, None])  # a word is in its row once at most
        place, cell = at >> _GROUP_BITS, at & (_GROUP - 1)
        is_easy = rows[place, -1] == 0
        place, cell = place[is_easy], cell[is_easy]
        _, first = np.unique(homes[place], return_index=True)
        place, cell = place[first], cell[first]
        homes, last = homes[place], (rows[place] != 0).sum(axis=1) - 1
        slots[homes, cell] = slots[homes, last]
        slots[homes, last] = 0
        done = np.zeros(len(numbers), np.bool_)
        done[place] = True
        return done


class CompactNames(Names):
    """Names in columns, found by a hash table.

    The table never shrinks. Full, it grows to twice the size: the old one stays beside the new one,
    and every new key moves a group. Deleted keys leave no mark.

    The hash multiplies a word of the key's digest and one of its namespace with secret factors.
    That is fast for very many keys at once, and spreads digests as well as any; keys made to
    collide, of which more want one home than there are slots near it, go into a dictionary.
    """

    def __init__(self, room: int = 1 << 12, most: int = 0) -> None:
        """``room``: of how many keys there will be at least, if that is known. ``most``: for how
        many there is address space from the start, so that columns need not move."""
        bits = max(10, (room * 5 // 2 // _GROUP).bit_length())
        self._table = _Table(bits, at_once=True)
        self._next: _Table | None = None  # a larger one, made by ``prepare``
        self._old: _Table | None = None
        self._gone: _Table | None = None  # moved as a whole; its memory is freed by ``prepare``
        self._moved = 0  # groups of the old table that are empty now
        self._far: dict[BlockKey, int] = {}  # numbers that no table had room for
        self._size = 0  # numbers ever used
        self._free = 0  # the first free number plus one, linked by their forms; 0: none
        self._count = 0
        self._room = max(1 << 12, room)
        self._most = most
        self._odd: dict[int, BlockKey] = {}
        self._spaces: dict[bytes, int] = {}
        self._space_list: list[bytes] = []
        self._factors = tuple(np.frombuffer(os.urandom(16), np.uint64).tolist())
        self._mark = os.urandom(8)  # between keys that are looked up together
        self._columns: list[MemoryColumn] = []
        self._populated = 0  # the numbers below have memory
        self._digest = self.column("B", _HASH_BYTES)
        # Bytes of the digest, and whether it is a tail; above that the namespace.
        self._form = self.column("I")
        self._refs = self.column("i")

    def __len__(self) -> int:
        return self._count

    @property
    def size(self) -> int:
        """All numbers are below it."""
        return self._size

    def column(self, kind: Kind, width: int = 1, is_rare: bool = False) -> MemoryColumn:
        self._columns.append(MemoryColumn(kind, width, self._room, is_rare, self._most))
        return self._columns[-1]

    def prepare(self, count: int) -> None:
        """Takes the memory for ``count`` new numbers from the system, and for a larger table that
        these or some more will need. A page takes 5 to 10 us, and 2 MiB that a virtual machine
        never used before take milliseconds: not under the owner's lock. Call it without that lock,
        from one thread."""
        room = max(self._room, self._most)
        start, stop = max(self._populated, self._size), min(self._size + count, room)
        if stop - start >= count // 2:
            self._populated = stop
            for column in tuple(self._columns):
                if not column.is_rare:
                    column.populate(start, stop)
        if self._old is not None:
            return
        self._gone = None
        table, larger = self._table, self._next
        is_there = larger is not None and larger.bits > table.bits
        if not is_there and self._count + max(count, table.most >> 4) > table.most:
            self._next = _Table(table.bits + 1, at_once=True)

    # -- single keys -----------------------------------------------------------------------

    def number(self, key: BlockKey) -> int:
        return self._number(key, self._code(key))

    def _code(self, key: BlockKey) -> int:
        """The key's hash: 64 bits, of which the last is 1, so that no slot of a key is 0."""
        if len(key) < _HASHED.size:
            return hash(key) & _WORD | 1
        space, word = _HASHED.unpack_from(key)
        first, second = self._factors
        code: int = (word + space * first) * second & _WORD | 1
        return code

    def _code_of(self, number: int) -> int:
        return self._code(self.key(number))

    def _number(self, key: BlockKey, code: int) -> int:
        number = self._search(self._table, 0, code, key)
        if number < 0 and self._old is not None:
            number = self._search(self._old, self._moved, code, key)
        if number < 0 and self._far:
            number = self._far.get(key, -1)
        return number

    def _search(self, table: _Table, start: int, code: int, key: BlockKey | None) -> int:
        """The number of a key with that hash; None: of any."""
        slots, lower, home = table.slots.cells, code & _LOW, code >> table.shift
        at, end = max(home, start) << _GROUP_BITS, (home << _GROUP_BITS) + _REACH
        while (word := slots[at]) and at < end:
            if word >> 32 == lower:
                number: int = (word & _LOW) - 1
                if key is None or self.key(number) == key:
                    return number
            at += 1
        return -1

    def meet(self, key: BlockKey) -> int:
        code = self._code(key)
        number = self._number(key, code)
        return self._add(key, code) if number < 0 else number

    def _add(self, key: BlockKey, code: int) -> int:
        number = self._free - 1
        if number >= 0:
            self._free = self._form.cells[number]
            self._refs.cells[number] = 0
        else:
            number = self._size
            if number == self._room:
                self._grow()
            self._size += 1
        self._count += 1
        self._begin_growing()
        self._write(number, key)
        self._place(code, number)
        if self._old is not None:
            self._move_group(self._old)
        return number

    def _begin_growing(self) -> None:
        if self._count > self._table.most and self._old is None:
            self._old, self._moved = self._table, 0
            larger, self._next = self._next, None
            if larger is None or larger.bits <= self._old.bits:  # none, or made for a growth before
                larger = _Table(self._old.bits + 1, at_once=False)
            self._table = larger

    def _end_growing(self) -> None:
        self._gone, self._old = self._old, None

    def _grow(self) -> None:
        self._room *= 2
        for column in self._columns:
            column.grow(self._room)

    def _place(self, code: int, number: int) -> None:
        if not self._table.place(code, number):
            self._far[self.key(number)] = number

    def _move_group(self, old: _Table) -> None:
        """Moves the numbers of one more group of the old table into the new one."""
        slots = old.slots.cells
        for at in range(self._moved * _GROUP, (self._moved + 1) * _GROUP):
            if word := slots[at]:
                number = (word & _LOW) - 1
                self._place(self._code_of(number), number)
                slots[at] = 0
        self._moved += 1
        if self._moved * _GROUP == len(slots):
            self._end_growing()

    def _write(self, number: int, key: BlockKey) -> None:
        space, rest, form = key[:NAMESPACE_BYTES], key[NAMESPACE_BYTES:], 0
        if rest.endswith(_TAIL):
            rest, form = rest[: -len(_TAIL)], _TAILED
        place = self._space_number(space)
        if len(rest) > _HASH_BYTES or place < 0:
            self._form.cells[number] = _ODD
            self._odd[number] = key
            return
        self._form.cells[number] = place << _FORM | form + len(rest)
        begin = number * _HASH_BYTES
        self._digest.cells[begin : begin + len(rest)] = rest

    def _space_number(self, space: bytes) -> int:
        """The number of a namespace; -1: it is none, or one too many."""
        place = self._spaces.get(space, -1)
        if place < 0 and len(space) == NAMESPACE_BYTES and len(self._space_list) < _SPACES:
            place = self._spaces[space] = len(self._space_list)
            self._space_list.append(space)
        return place

    def key(self, number: int) -> BlockKey:
        both = self._form.cells[number]
        if both == _ODD:
            return self._odd[number]
        form, begin = both & 0xFF, number * _HASH_BYTES
        space = self._space_list[both >> _FORM]
        if form <= _HASH_BYTES:
            return BlockKey(space + self._digest.cells[begin : begin + form])
        digest = self._digest.cells[begin : begin + form - _TAILED]
        return BlockKey(space + bytes(digest) + _TAIL)

    def is_tail(self, number: int) -> bool:
        """``block.is_tail`` of the key."""
        form: int = self._form.cells[number] & 0xFF
        return form >= _TAILED and (form != _ODD or self._odd[number].endswith(_TAIL))

    def is_same_space(self, number: int, other: int) -> bool:
        """Whether both keys are of one namespace."""
        mine, its = self._form.cells[number], self._form.cells[other]
        if _ODD in (mine, its):
            space = self.key(number)[:NAMESPACE_BYTES]
            return self.key(other).startswith(space)
        return bool(mine >> _FORM == its >> _FORM)

    def keep(self, number: int) -> None:
        self._refs.cells[number] += 1

    def keep_all(self, numbers: Sequence[int]) -> None:
        if len(numbers) < _FEW:
            super().keep_all(numbers)
        else:
            self.keep_many(np.asarray(numbers, np.int64))

    def drop(self, number: int) -> None:
        refs = self._refs.cells
        left = refs[number] - 1
        refs[number] = left
        if not left:
            self._delete(number, self._code_of(number))

    def sweep(self, numbers: Sequence[int]) -> None:
        refs = self._refs.cells
        for number in numbers:
            if not refs[number]:
                refs[number] = 1
                self.drop(number)

    def drop_all(self, numbers: Sequence[int]) -> None:
        dropped = np.asarray(numbers, np.int64)
        refs = self._refs.array()
        np.subtract.at(refs, dropped, 1)
        ended = dropped[refs[dropped] == 0]
        del refs
        if not ended.size:
            return
        ended = np.unique(ended)
        codes = self._codes_of(ended)
        done = self._table.remove_most(ended, codes)
        self._release(ended[done])
        for number, code in zip(ended[~done].tolist(), codes[~done].tolist(), strict=True):
            self._delete(number, code)

    def _release(self, numbers: Numbers) -> None:
        """Frees numbers that no table has any more."""
        if not numbers.size:
            return
        for number in numbers.tolist() if self._odd else ():
            self._odd.pop(number, None)
        self._refs.array()[numbers] = -1
        self._form.array()[numbers] = np.append(self._free, numbers[:-1] + 1)
        self._free = int(numbers[-1]) + 1
        self._count -= len(numbers)

    def _delete(self, number: int, code: int) -> None:
        here = self._table.remove(number, code, 0, self._code_of)
        if not here and self._old is not None:
            here = self._old.remove(number, code, self._moved, self._code_of)
        if not here:
            del self._far[self.key(number)]
        self._odd.pop(number, None)
        self._refs.cells[number] = -1
        self._form.cells[number] = self._free
        self._free = number + 1
        self._count -= 1

    # -- many keys -------------------------------------------------------------------------

    def numbers(self, keys: Sequence[BlockKey]) -> Sequence[int]:
        if len(keys) < _FEW:
            return list(map(self.number, keys))
        found: list[int] = self.numbers_of(keys).tolist()
        return found

    def meet_all(self, keys: Sequence[BlockKey]) -> Sequence[int]:
        if len(keys) >= _FEW:
            met: list[int] = self.meet_many(keys).tolist()
            return met
        numbers = list(self.numbers(keys))
        for place, number in enumerate(numbers):
            if number < 0:
                numbers[place] = self.meet(keys[place])
        return numbers

    def meet_many(self, keys: Sequence[BlockKey]) -> Numbers:
        """``meet`` of each of very many keys [keys]."""
        given = self._given(keys)
        if given is None:
            return np.fromiter(map(self.meet, keys), np.int64, len(keys))
        codes = self._codes(given)
        numbers = self._numbers_of(keys, given, codes)
        new = np.flatnonzero(numbers < 0)
        count = new.size
        if not count:
            return numbers
        if count < len(keys):
            given, codes = given[new], codes[new]
        if (
            len(keys[0]) != _KEY_BYTES
            or count > self._table.most // 2
            or np.unique(codes).size < count
            or (places := self._space_numbers(given)) is None
        ):
            for place in new.tolist():
                numbers[place] = self.meet(keys[place])
            return numbers
        added = self._take(count)
        self._count += count
        self._begin_growing()
        numbers[new] = added
        self._digest.array().view(np.uint64)[added] = given[:, _SPACE_WORDS:-1]
        self._form.array()[added] = places << _FORM | _HASH_BYTES
        self._refs.array()[added] = 0
        self._place_all(codes, added)
        if self._old is not None:
            self._move_groups(self._old, count)
        return numbers

    def _space_numbers(self, given: Words) -> Numbers | None:
        """``_space_number`` of each [keys], or of all [1]; None if one has none."""
        words = given[:, :_SPACE_WORDS]
        spaces = words[:1] if (words == words[0]).all() else words
        numbers = np.array([self._space_number(each.tobytes()) for each in spaces], np.int64)
        return None if (numbers < 0).any() else numbers

    def _move_groups(self, old: _Table, count: int) -> None:
        """``_move_group`` of many."""
        slots = old.slots.array()
        part = slots[self._moved : self._moved + count]
        numbers = (part[part != 0] & np.uint64(_LOW)).astype(np.int64) - 1
        part[:] = 0
        if numbers.size:
            self._place_all(self._codes_of(numbers), numbers)
        self._moved = min(self._moved + count, len(slots))
        if self._moved == len(slots):
            self._end_growing()

    def _codes_of(self, numbers: Numbers) -> Words:
        """``_code_of`` of each."""
        first, second = map(np.uint64, self._factors)
        forms = self._form.array().take(numbers)
        kinds = forms & 0xFF
        is_plain = (kinds != _ODD) & (kinds & (_TAILED - 1) >= 8)
        spaces = np.frombuffer(b"".join(self._space_list), np.uint64)[::_SPACE_WORDS]
        codes = np.zeros(len(numbers), np.uint64)
        if is_plain.any():
            words = self._digest.array().view(np.uint64)[numbers[is_plain], 0]
            codes[is_plain] = (words + spaces[forms[is_plain] >> _FORM] * first) * second
            codes |= np.uint64(1)
        for place in np.flatnonzero(~is_plain).tolist():
            codes[place] = self._code_of(int(numbers[place]))
        return codes

    def _take(self, count: int) -> Numbers:
        """Free numbers, or else new ones."""
        numbers: list[int] = []
        forms = self._form.cells
        while self._free and len(numbers) < count:
            numbers.append(self._free - 1)
            self._free = forms[numbers[-1]]
        del forms
        fresh = count - len(numbers)
        while self._size + fresh > self._room:
            self._grow()
        numbers += range(self._size, self._size + fresh)
        self._size += fresh
        return np.array(numbers, np.int64)

    def _place_all(self, codes: Words, numbers: Numbers) -> None:
        """``_place`` of very many, for which the table is large enough."""
        slots, shift = self._table.slots.array().ravel(), np.uint64(self._table.shift)
        at = (codes >> shift).astype(np.int64) << _GROUP_BITS
        end = at + _REACH
        words = codes << np.uint64(32) | (numbers + 1).astype(np.uint64)
        open_ = np.arange(len(codes))
        while open_.size:
            free = open_[slots[at[open_]] == 0]
            slots[at[free]] = words[free]  # of those that want one slot the last gets it
            open_ = open_[slots[at[open_]] != words[open_]]
            at[open_] += 1
            is_far = at[open_] == end[open_]
            for number in numbers[open_[is_far]].tolist():
                self._far[self.key(number)] = number
            open_ = open_[~is_far]

    def keep_many(self, numbers: Numbers) -> None:
        """``keep`` of each."""
        np.add.at(self._refs.array(), numbers, 1)

    def numbers_of(self, keys: Sequence[BlockKey], exact: bool = True) -> Numbers:
        """``number`` of each of these keys [keys]. Not ``exact``: of absent keys some, one in 10^9,
        are taken for another one."""
        given = self._given(keys)
        if given is None:
            return np.fromiter(map(self.number, keys), np.int64, len(keys))
        return self._numbers_of(keys, given, self._codes(given), exact)

    def _numbers_of(
        self, keys: Sequence[BlockKey], given: Words, codes: Words, exact: bool = True
    ) -> Numbers:
        """``numbers_of`` keys with these words and hashes."""
        found = self._search_all(self._table, 0, codes)
        if self._old is not None:
            missing = np.flatnonzero(found < 0)
            found[missing] = self._search_all(self._old, self._moved, codes[missing])
        for place in np.flatnonzero(found < 0).tolist() if self._far else ():
            found[place] = self._far.get(keys[place], -1)
        if exact:
            self._verify(keys, given, found)
        return found

    def _given(self, keys: Sequence[BlockKey]) -> Words | None:
        """The keys' words, and the mark [keys, words + 1]; None if they are not all as long, or
        their digests not of one to four words."""
        nbytes = len(keys[0]) if keys else 0
        if nbytes % 8 or not NAMESPACE_BYTES < nbytes <= _KEY_BYTES:
            return None
        text = self._mark.join((*keys, b""))
        if len(text) != len(keys) * (nbytes + 8):
            return None
        given = np.frombuffer(text, np.uint64).reshape(len(keys), -1)
        return given if (given[:, -1] == given[-1, -1]).all() else None

    def _codes(self, given: Words) -> Words:
        """``_code`` of each [keys]."""
        first, second = map(np.uint64, self._factors)
        codes: Words = (given[:, 0] * first + given[:, _SPACE_WORDS]) * second
        codes |= np.uint64(1)
        return codes

    def _search_all(self, table: _Table, start: int, codes: Words) -> Numbers:
        """Numbers whose keys have these hashes, as far as home and slot tell; -1: none."""
        slots = table.slots.array()
        groups = (codes >> np.uint64(table.shift)).astype(np.int64)
        if start:
            groups = np.maximum(groups, start)
        # The halves of a home's slots: numbers plus one, and what they have of the hash. In rows,
        # because NumPy is fast along long ones.
        halves = np.ascontiguousarray(slots.take(groups, axis=0).view(np.uint32).T)
        same = halves[_UPPER::2] == (codes & np.uint64(_LOW)).astype(np.uint32)
        found: Numbers = (halves[_LOWER::2] * same).max(axis=0).astype(np.int64) - 1
        missing = np.flatnonzero(found < 0)
        if missing.size > _FEW:  # those whose home is full may be behind it
            ends = (groups.take(missing) << _GROUP_BITS) + (_GROUP - 1)
            missing = missing[slots.ravel().take(ends) != 0]
        for place in missing.tolist():
            found[place] = self._search(table, start, int(codes[place]), None)
        return found

    def _verify(self, keys: Sequence[BlockKey], given: Words, found: Numbers) -> None:
        """Corrects numbers that were found by their hash alone."""
        at = np.maximum(found, 0)
        width = given.shape[1] - 1 - _SPACE_WORDS
        digests = self._digest.array().view(np.uint64).take(at, axis=0)
        wrong = np.zeros(len(keys), np.bool_)
        for word in range(width):
            wrong |= digests[:, word] != given[:, _SPACE_WORDS + word]
        forms = self._form.array().take(at)
        wrong |= forms & 0xFF != 8 * width
        if all((given[:, word] == given[0, word]).all() for word in range(_SPACE_WORDS)):
            wrong |= forms >> _FORM != self._spaces.get(keys[0][:NAMESPACE_BYTES], _SPACES)
        elif self._space_list:  # several namespaces
            spaces = np.frombuffer(b"".join(self._space_list), np.uint64)
            spaces = spaces.reshape(-1, _SPACE_WORDS)
            places = np.minimum(forms >> _FORM, len(spaces) - 1)
            wrong |= (spaces[places] != given[:, :_SPACE_WORDS]).any(axis=1)
        for place in np.flatnonzero(wrong & (found >= 0)).tolist():
            found[place] = self.number(keys[place])
