"""Why blocks are not in a tier: the last departures and refusals, by the names of their keys."""

from __future__ import annotations

import enum
from array import array
from collections.abc import Callable
from typing import NamedTuple

from kvrecall.block import BlockKey
from kvrecall.pool.changes import Cause
from kvrecall.pool.names import Names

MOST_DEPARTURES = 65_536
"""Departures that a tier remembers."""


class Refusal(enum.StrEnum):
    """Why a block was not accepted by a tier."""

    POLICY = "policy"  # worth no more than the blocks that it would displace
    QUOTA = "quota"  # its tenant is at its limit, with blocks that cannot be evicted now
    ROOM = "room"  # every block is in use, or still to be written below
    READ_ONLY = "read-only"  # an operator marked its namespace, or the pool


_KINDS: tuple[Cause | Refusal, ...] = (*Cause, *Refusal)
_CODES = {(type(kind), str(kind)): code for code, kind in enumerate(_KINDS)}


class BlockDeparture(NamedTuple):
    """Why a block left a tier, or was refused by it, and when (wall-clock seconds)."""

    what: Cause | Refusal
    at: float


class Departures:
    """The last ``most`` departures and refusals of a tier; of a key the latest counts.

    A ring of 9 bytes each (13 with the number of its name), and a column of 4 bytes over the names
    of the tier, which the eviction policy's memory of evicted blocks uses too: a name that both
    remember is there once. Not thread-safe; a microsecond or two for each departure.
    """

    def __init__(self, names: Names, now: Callable[[], float], most: int = MOST_DEPARTURES) -> None:
        """``now``: the wall clock, which does not go back."""
        self._names = names
        self._now = now
        self._most = most
        self._place = names.column("I")  # of the latest in the ring, plus one, or 0
        self._numbers = array("i")
        self._at = array("d")
        self._what = array("B")
        self._next = 0

    def note(self, key: BlockKey, what: Cause | Refusal) -> None:
        self.note_n(self._names.meet(key), what)

    def note_n(self, number: int, what: Cause | Refusal) -> None:
        place, code = self._next, _CODES[type(what), str(what)]
        self._names.keep(number)
        if place == len(self._numbers):
            self._numbers.append(number)
            self._at.append(self._now())
            self._what.append(code)
        else:
            old = self._numbers[place]
            if self._place.cells[old] == place + 1:
                self._place.cells[old] = 0
            self._numbers[place], self._at[place], self._what[place] = number, self._now(), code
            self._names.drop(old)
        self._place.cells[number] = place + 1
        self._next = (place + 1) % self._most

    def of(self, key: BlockKey) -> BlockDeparture | None:
        """The latest departure of a block; None if none is remembered."""
        number = self._names.number(key)
        return self.of_n(number) if number >= 0 else None

    def of_n(self, number: int) -> BlockDeparture | None:
        place = self._place.cells[number]
        if not place:
            return None
        return BlockDeparture(_KINDS[self._what[place - 1]], self._at[place - 1])
