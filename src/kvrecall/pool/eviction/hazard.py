"""The hazard policy: keeps the blocks with the soonest expected use, learned from past uses."""

from __future__ import annotations

import ctypes
from array import array
from bisect import bisect_left, insort
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, TypeVar

import numpy as np

from kvrecall.pool.eviction.base import EvictionPolicy
from kvrecall.pool.eviction.lifetable import AgeBins, LifeTable
from kvrecall.pool.eviction.queues import Links, LruPolicy
from kvrecall.pool.names import Names

_USES = (0, 0, 1, 2, 3, 3, 4, 4, 4, 4, 5)  # uses -> group; more uses: the last
_GROUPS = 6
# Classes: group x (in a chain, ended its request or not), then group of what hangs on a chain,
_INNER = 3 * _GROUPS  # what hangs there and was neither used nor at the end of a request,
_BARE = _INNER + 1  # and what can serve no hit as things are.
_CLASSES = _BARE + 1
_TICK = 0.25  # seconds; what happens within one counts as happening at once
_SLACK = 8.0  # the same for blocks without a request, as after a restart
_REFRESH = 64.0  # requests between two looks at the life table
_FADE = 0.995  # what then stays of the old counts: half after 139 looks, about 9,000 requests
_EVIDENCE = 4.0  # requests' worth of blocks that a class needs to be believed half
_RETURNS = 16  # ticks in which blocks came back, before the tables are believed at all
_MEMBERS = 4096  # of a cohort: so many names are forgotten at once
_DROPPED = 1024  # numbers that are given up at once, at least
_GOING = 1 << 17  # numbers to be given up before no more names are forgotten
_GROWN = 256  # cohorts that move to another bin at once
_LARGE = 1 << 20  # names that a large tier remembers at least
# What is known of a name:
_RESIDENT = 1
_GHOST = 2  # remembered for a while after it was evicted or refused
_KNOWN = _RESIDENT | _GHOST
_HELD = 4
_HANGS = 8


T = TypeVar("T")
_untrack = ctypes.pythonapi.PyObject_GC_UnTrack
_untrack.argtypes, _untrack.restype = (ctypes.py_object,), None


def _untracked(it: T) -> T:
    """Hides an object from the garbage collector, which otherwise visits it in every full
    collection. It must never be part of a cycle."""
    _untrack(it)
    return it


_NONE = array("i")  # shared and never appended to


class _Cohort:
    """The blocks of one class with the same time of last use: they age together.

    There are very many blocks, and tens of thousands of cohorts: the garbage collector sees neither
    them nor the arrays of their blocks.
    """

    __slots__ = (
        "alive",
        "begin",
        "bin",
        "born",
        "ended",
        "first",
        "forgotten",
        "kind",
        "names",
        "number",
        "rest",
    )

    def __init__(self, number: int, kind: int, born: float) -> None:
        self.number = number
        self.kind = kind
        self.born = born
        self.bin = 0
        self.alive = 0  # members not used again since, resident or remembered
        self.names = _untracked(array("i"))  # who joined; some may have moved on
        # Who became resident, oldest first, as runs down a chain; some may have left since. The
        # first run, then the others; the first block of each of these is inverted (~number).
        self.first = _NONE
        self.rest = _NONE
        self.begin = 0  # of ``rest``: what is before is in ``first`` or gone
        self.ended = False  # has no members and gets no more
        self.forgotten = False  # names are no longer remembered when they are evicted
        _untrack(self)

    def settle(self, number: int, parent: int) -> None:
        """A member became resident."""
        if self.begin < len(self.rest):
            last = self.rest[-1]
            self.rest.append(number if parent >= 0 and max(last, ~last) == parent else ~number)
        elif self.first and parent >= 0 and self.first[-1] == parent:
            self.first.append(number)
        elif self.rest is _NONE:
            self.rest = _untracked(array("i", (~number,)))
        else:
            self.rest.append(~number)

    def next_run(self) -> bool:
        """Makes the next run the first one. False if there is none."""
        rest, begin = self.rest, self.begin
        if begin == len(rest):
            if begin:
                self.rest, self.begin = _NONE, 0
            return False
        self.begin = _end_of(rest, begin)
        self.first = _untracked(rest[begin : self.begin])
        self.first[0] = ~self.first[0]
        return True

    def members(self) -> Iterator[int]:
        """Those that became resident: the first run first, each from its end."""
        yield from reversed(self.first)
        rest, begin = self.rest, self.begin
        while begin < len(rest):
            end = _end_of(rest, begin)
            yield from reversed(rest[begin + 1 : end])
            yield ~rest[begin]
            begin = end


def _end_of(runs: array[int], begin: int) -> int:
    """Where the run ends that begins there."""
    end = begin + 1
    while end < len(runs) and runs[end] >= 0:
        end += 1
    return end


class HazardPolicy(EvictionPolicy):
    """Gives up the blocks with the fewest expected hits per second of room.

    Blocks are sorted into classes by what is known at their last use: how often they were used so
    far, and whether they ended the request. For each class a life table is learned while serving:
    how likely is a block to be used at each age since its last use. Names of evicted and refused
    blocks are remembered (the ghosts of ARC, Megiddo & Modha, FAST 2003), so the table also sees
    the reuse that the tier missed, and a block that comes back is not taken for a new one. A
    block's worth is the Gittins index of its class and age (``LifeTable.worth``); ranking by
    learned hit density is LHD's idea (Beckmann et al., NSDI 2018). A new block that is worth no
    more than the least valuable resident one is not admitted.

    Until it is taught the policy is ``LruPolicy``, to the block, and admits all: what the tables
    say before is their prior. It is taught once blocks came back in ``_RETURNS`` different ticks,
    in all as many as ``_EVIDENCE`` requests have. Should all that fade, it admits all again.

    What hangs on a chain has classes of its own: by its uses, those at the end of a request among
    them; and never used, inside one. A chain's end whose last window or state was given up can
    serve no hit: it goes next. So does what hangs on a block that is gone, until that is back.

    A block with resident children is not given up before them. Memory beside that of the names:
    about 40 bytes for each resident and each remembered block; at most ``remember`` of the latter.
    """

    name: ClassVar[str] = "hazard"
    learns: ClassVar[bool] = True

    def __init__(
        self,
        capacity_blocks: int,
        remember: int | None = None,
        names: Names | None = None,
        links: Links | None = None,
    ) -> None:
        super().__init__(names)
        if remember is None:
            remember = max(2 * capacity_blocks, min(16 * capacity_blocks + 32_768, 262_144))
            remember = min(remember, max(capacity_blocks // 2, _LARGE))
        self._remember = remember
        self._bins = AgeBins()
        self._table = LifeTable(_CLASSES, self._bins)
        # By name; parents and what hangs plus one, 0 for none.
        self._state = self.names.column("B")
        self._used = self.names.column("B")  # times, up to 255
        self._cohort = self.names.column("I")
        self._parent = self.names.column("i")
        self._children = self.names.column("i")  # resident ones, of a resident name or not
        self._hung = self.names.column("i")  # the first of those that hang on it
        self._hung_next = self.names.column("i")
        self._ghosts = 0
        self._going = array("i")  # forgotten names whose numbers are still kept, and their parents
        self._has_groups = False  # a block that hangs on a chain was seen
        # Cohorts with members, by number; the oldest first by age, and all that may be forgotten.
        self._cohorts: list[_Cohort] = _untracked([])
        self._unused: list[int] = _untracked([])  # numbers of cohorts that ended
        self._by_bin: list[OrderedDict[int, None]]
        self._by_bin = [_untracked(OrderedDict()) for _ in range(self._bins.count)]
        self._memory: OrderedDict[int, None] = _untracked(OrderedDict())
        self._is_late = False  # some have not reached the bins of their age
        self._youngest: dict[int, _Cohort] = {}  # by class
        # Cohorts with residents that may go, by cell (class, bin); cells ordered by worth.
        self._ready: list[dict[int, None]] = [{} for _ in range(_CLASSES * self._bins.count)]
        self._is_taught = False  # has seen enough blocks come back to refuse others
        # The order until taught for the first time.
        self._recency: LruPolicy | None = LruPolicy(self.names, links)
        self._returns = 0  # ticks in which blocks came back
        self._returned_at = -1.0  # the last of them
        self._worth: list[float] = []
        self._chances: list[float] | None = None  # by cell, made when asked for
        self._order: list[int] = []  # cells, least worth first
        self._place: list[int] = []  # inverse of _order
        self._filled: list[int] = []  # places whose cell holds a ready cohort, ascending
        self._now = 0.0
        self._uses = 0  # block uses seen, and at how many the table is looked at again
        self._refresh_at = 0
        self._mean_chain = 1.0
        self._refresh()

    # -- what happens to blocks ------------------------------------------------------------

    def access_n(
        self,
        chain: Sequence[int],
        now: float,
        hanging: Sequence[int] = (),
        ending: Sequence[int] = (),
    ) -> None:
        if not (chain or hanging or ending):
            return
        self._advance(now)
        if self._recency is not None:
            self._recency.access_n(chain, now, hanging)
        state = self._state.cells
        for number in hanging:
            if number >= 0 and state[number] & _KNOWN:
                self._use(number, 1)
        for number in ending:
            if not state[number] & _KNOWN:
                self._meet(number, -1, 1, 0.0, True)
                self._remember_it(number)
            elif self._cohorts[self._cohort.cells[number]].kind == _INNER:
                self._move(number, _kind(self._used.cells[number], 1, True))
        if not chain:
            return
        self._mean_chain += 0.01 * (len(chain) - self._mean_chain)
        self._uses += len(chain)
        self._use_chain(chain)
        if self._uses >= self._refresh_at:
            self._table.fade(_FADE)
            self._refresh()
        if self._ghosts > self._remember or self._going:
            self._forget()

    def insert_n(
        self, number: int, parent: int, depth: int, now: float, hangs: bool = False
    ) -> None:
        state = self._state.cells
        if state[number] & _RESIDENT:
            return
        if state[number] & _GHOST:
            self._ghosts -= 1
            if parent >= 0 and not self._parent.cells[number]:
                self._adopt(number, parent)
                state[number] = _HANGS * hangs
        else:
            if now - self._now >= _TICK:
                self._advance(now)
            self._meet(number, parent, 0, _SLACK, hangs)
        if self._recency is not None:
            self._recency.insert_n(number, parent, depth, now, hangs)
        state[number] = state[number] & _HANGS | _RESIDENT
        cohort = self._cohorts[self._cohort.cells[number]]
        above = self._parent.cells[number] - 1
        cohort.settle(number, above)
        self._make_ready(cohort)
        if above >= 0:
            self._children.cells[above] += 1
        self._has_groups |= hangs
        if self._has_groups:
            self._settle(number)
        if self._ghosts > self._remember or self._going:
            self._forget()

    def remove_n(self, number: int) -> None:
        state = self._state.cells
        if not state[number] & _RESIDENT:
            return
        if self._recency is not None:
            self._recency.remove_n(number)
        state[number] &= _HANGS
        cohort = self._cohorts[self._cohort.cells[number]]
        for child in self._hung_on(number):
            self._move(child, _BARE)
        above = self._parent.cells[number] - 1
        if above >= 0:
            hangs = state[number] & _HANGS
            if hangs:
                self._unhang(number, above)
            left = self._children.cells[above] - 1
            self._children.cells[above] = left
            if not left and state[above] & _RESIDENT:
                self._make_ready(self._cohorts[self._cohort.cells[above]])
                if hangs or cohort.kind == _BARE:
                    self._move(above, _BARE)
        if cohort.forgotten:
            self._unlearn(number)
            self._leave(cohort)
        else:
            self._remember_it(number)

    def hold_n(self, number: int) -> None:
        state = self._state.cells
        if state[number] & _RESIDENT:
            state[number] |= _HELD
            if self._recency is not None:
                self._recency.hold_n(number)

    def release_n(self, number: int) -> None:
        state = self._state.cells
        if state[number] & _HELD:
            state[number] ^= _HELD
            self._make_ready(self._cohorts[self._cohort.cells[number]])
            if self._recency is not None:
                self._recency.release_n(number)

    # -- what to give up -------------------------------------------------------------------

    def admit_n(
        self, number: int, parent: int, depth: int, now: float, hangs: bool = False
    ) -> bool:
        if not self._is_taught:
            return True
        self._advance(now)
        if number >= 0 and not self._state.cells[number] & _GHOST:
            number = -1
        mine = self._worth[self._cell_of(number, hangs)]
        for cohort in self._candidates():
            if self._trim(cohort):
                return self._worth[self._cell(cohort)] < mine
        return True

    def chance_n(self, number: int, now: float) -> float | None:
        if not self._is_taught:
            return None
        self._advance(now)
        if self._chances is None:
            self._chances = self._table.chances(_EVIDENCE * self._mean_chain).ravel().tolist()
        return self._chances[self._cell_of(number)]

    def victims_n(self, count: int, evictable: Callable[[int], bool], now: float) -> list[int]:
        if self._recency is not None:
            return self._recency.victims_n(count, evictable, now)
        self._advance(now)
        found: dict[int, None] = {}
        going: dict[int, int] = {}  # children among the found, by parent
        spent = []
        for cohort in self._candidates():
            if len(found) >= count:
                break
            if not self._strip(cohort, count, evictable, found, going):
                spent.append(cohort)
        for cohort in spent:
            self._make_unready(cohort)
        self._climb(count, evictable, found, going)
        return list(found)

    def _candidates(self) -> Iterator[_Cohort]:
        """Ready cohorts, least worth first."""
        for place in self._filled:
            yield from map(self._cohorts.__getitem__, self._ready[self._order[place]])

    def _trim(self, cohort: _Cohort) -> bool:
        """Drops blocks that left from the end of the first run. False if no block is left."""
        state, cohorts, own = self._state.cells, self._cohort.cells, cohort.number
        while True:
            run = cohort.first
            while run and not (cohorts[run[-1]] == own and state[run[-1]] & _RESIDENT):
                run.pop()
            if run:
                return True
            if not cohort.next_run():
                return False

    def _strip(
        self,
        cohort: _Cohort,
        count: int,
        evictable: Callable[[int], bool],
        found: dict[int, None],
        going: dict[int, int],
    ) -> bool:
        """Adds the cohort's evictable blocks to ``found``, the oldest run first, from its end.
        False if it has none until a child of one of its blocks is removed, or one of them is
        released."""
        self._trim(cohort)
        state, cohorts, own = self._state.cells, self._cohort.cells, cohort.number
        able = False
        for number in cohort.members():
            if cohorts[number] != own or state[number] & (_RESIDENT | _HELD) != _RESIDENT:
                continue
            if not self._is_leaf(number, going):
                continue
            able = True
            if number not in found and evictable(number):
                self._give(number, found, going)
                if len(found) >= count:
                    break
        return able

    def _climb(
        self,
        count: int,
        evictable: Callable[[int], bool],
        found: dict[int, None],
        going: dict[int, int],
    ) -> None:
        """If those are not enough: the blocks that became leaves."""
        state = self._state.cells
        pending = list(found) if len(found) < count else []
        for number in pending:
            above = self._parent.cells[number] - 1
            if above < 0 or above in found:
                continue
            if state[above] & (_RESIDENT | _HELD) != _RESIDENT or not self._is_leaf(above, going):
                continue
            if evictable(above):
                self._give(above, found, going)
                pending.append(above)
                if len(found) >= count:
                    return

    def _is_leaf(self, number: int, going: dict[int, int]) -> bool:
        children: int = self._children.cells[number]
        return children <= going.get(number, 0)

    def _give(self, number: int, found: dict[int, None], going: dict[int, int]) -> None:
        found[number] = None
        above = self._parent.cells[number] - 1
        if above >= 0:
            going[above] = going.get(above, 0) + 1

    # -- names -----------------------------------------------------------------------------

    def _meet(
        self, number: int, parent: int, ended: int, slack: float = 0.0, hangs: bool = False
    ) -> None:
        """A name is used for the first time, up to ``slack`` seconds ago."""
        self.names.keep(number)
        self._state.cells[number] = _HANGS * hangs
        self._used.cells[number] = 1
        if parent >= 0:
            self._adopt(number, parent)
        self._enter(number, self._join(_kind(1, ended, hangs), slack))

    def _adopt(self, number: int, parent: int) -> None:
        """Records the parent of a name."""
        self.names.keep(parent)
        self._parent.cells[number] = parent + 1

    def _remember_it(self, number: int) -> None:
        self._state.cells[number] |= _GHOST
        self._ghosts += 1

    def _unlearn(self, number: int) -> None:
        """Forgets a name that is neither resident nor remembered."""
        self._state.cells[number] = 0
        parent = self._parent.cells[number]
        self._parent.cells[number] = 0
        self.names.drop(number)
        if parent:
            self.names.drop(parent - 1)

    def _enter(self, number: int, cohort: _Cohort) -> None:
        """A known name belongs to that cohort now."""
        self._cohort.cells[number] = cohort.number
        cohort.names.append(number)
        if self._state.cells[number] & _RESIDENT:
            cohort.settle(number, self._parent.cells[number] - 1)
            self._make_ready(cohort)

    def _use_chain(self, chain: Sequence[int]) -> None:
        """``_use`` of each of a chain, or its first use: the innermost loop, written out."""
        state, parents, used = self._state.cells, self._parent.cells, self._used.cells
        of, cohorts, uses_seen = self._cohort.cells, self._cohorts, self._table.used
        last, parent = len(chain) - 1, -1
        kind, cohort, is_ready = -1, None, False
        for index, number in enumerate(chain):
            known = state[number]
            if not known & _KNOWN:
                self._meet(number, parent, int(index == last))
                self._remember_it(number)
                parent = number
                continue
            if parent >= 0 and not parents[number]:
                self._adopt(number, parent)
                if known & _RESIDENT:
                    self._children.cells[parent] += 1
            old = cohorts[of[number]]
            uses_seen[old.kind][old.bin] += 1.0
            old.alive -= 1
            uses = used[number]
            if uses < 255:
                uses += 1
                used[number] = uses
            now_kind = _kind(uses, int(index == last), bool(known & _HANGS))
            if now_kind == kind and cohort is not None and len(cohort.names) < _MEMBERS:
                cohort.alive += 1
                self._table.entered[kind][0] += 1.0
            else:
                kind, cohort = now_kind, self._join(now_kind)
                is_ready = False
            of[number] = cohort.number
            cohort.names.append(number)
            if known & _RESIDENT:
                cohort.settle(number, parents[number] - 1)
                if not is_ready:
                    self._make_ready(cohort)
                    is_ready = True
            if not old.alive:
                self._bury(old)
            if self._returned_at != self._now:
                self._returned_at = self._now
                self._returns += 1
            parent = number

    def _use(self, number: int, ended: int) -> None:
        """Records another use of a known block and puts it with others of its kind."""
        old = self._cohorts[self._cohort.cells[number]]
        self._table.used[old.kind][old.bin] += 1.0
        if self._returned_at != self._now:
            self._returned_at = self._now
            self._returns += 1
        uses = self._used.cells
        uses[number] = min(255, uses[number] + 1)
        hangs = bool(self._state.cells[number] & _HANGS)
        old.alive -= 1
        self._enter(number, self._join(_kind(uses[number], ended, hangs)))
        self._bury(old)

    def _move(self, number: int, kind: int) -> None:
        """Puts a known block into another class, without a use."""
        old = self._cohorts[self._cohort.cells[number]]
        old.alive -= 1
        self._enter(number, self._join(kind))
        self._bury(old)

    # -- what hangs on a chain -------------------------------------------------------------

    def _settle(self, number: int) -> None:
        """A block became resident: its parent, and what hangs on it, may serve hits again."""
        for child in self._hung_on(number):
            self._revive(child)
        above = self._parent.cells[number] - 1
        if above < 0:
            return
        is_here = self._state.cells[above] & _RESIDENT
        if is_here:
            self._revive(above)
        if self._state.cells[number] & _HANGS:
            self._hang(number, above)
            if not is_here:
                self._move(number, _BARE)

    def _hung_on(self, number: int) -> Iterator[int]:
        """Resident blocks that hang on it, in the order in which they came."""
        following = self._hung.cells[number]
        while following:
            child = following - 1
            following = self._hung_next.cells[child]
            yield child

    def _hang(self, number: int, parent: int) -> None:
        last = next(iter(deque(self._hung_on(parent), maxlen=1)), -1)
        if last < 0:
            self._hung.cells[parent] = number + 1
        else:
            self._hung_next.cells[last] = number + 1
        self._hung_next.cells[number] = 0

    def _unhang(self, number: int, parent: int) -> None:
        before = -1
        for child in self._hung_on(parent):
            if child == number:
                break
            before = child
        if before < 0:
            self._hung.cells[parent] = self._hung_next.cells[number]
        else:
            self._hung_next.cells[before] = self._hung_next.cells[number]

    def _revive(self, number: int) -> None:
        """The block may serve hits again."""
        if self._cohorts[self._cohort.cells[number]].kind == _BARE:
            uses = self._used.cells[number]
            hangs = bool(self._state.cells[number] & _HANGS)
            self._move(number, _kind(uses, int(uses > 1), hangs))

    # -- classes, cohorts and time ---------------------------------------------------------

    def _join(self, kind: int, slack: float = 0.0) -> _Cohort:
        """The cohort of ``kind`` that starts now, or ``slack`` seconds ago, with one more
        member."""
        cohort = self._youngest.get(kind)
        if (
            cohort is None
            or self._now - cohort.born > slack
            or cohort.forgotten
            or len(cohort.names) >= _MEMBERS
        ):
            number = self._unused.pop() if self._unused else len(self._cohorts)
            old, cohort = cohort, _Cohort(number, kind, self._now)
            self._cohorts[number : number + 1] = (cohort,)
            self._youngest[kind] = cohort
            self._by_bin[0][number] = self._memory[number] = None
            if old is not None:
                self._bury(old)
        cohort.alive += 1
        entered = self._table.entered[kind]
        for age in range(cohort.bin + 1):
            entered[age] += 1.0
        return cohort

    def _leave(self, cohort: _Cohort) -> None:
        """A member is not known any more."""
        cohort.alive -= 1
        self._bury(cohort)

    def _bury(self, cohort: _Cohort) -> None:
        """Drops a cohort without members, which nothing joins any more."""
        if cohort.alive == 0 and self._youngest.get(cohort.kind) is not cohort:
            self._drop(cohort)

    def _drop(self, cohort: _Cohort) -> None:
        if cohort.ended:
            return
        self._make_unready(cohort)
        self._by_bin[cohort.bin].pop(cohort.number, None)
        self._memory.pop(cohort.number, None)
        cohort.forgotten = cohort.ended = True
        cohort.names, cohort.first, cohort.rest = _untracked(array("i")), _NONE, _NONE
        cohort.begin = 0
        self._unused.append(cohort.number)

    def _cell(self, cohort: _Cohort) -> int:
        return cohort.kind * self._bins.count + cohort.bin

    def _cell_of(self, number: int, hangs: bool = False) -> int:
        """The cell of a block; of one that is not known, or was given up as bare: a new one's."""
        if number < 0 or not self._state.cells[number] & _KNOWN:
            return _kind(1, 0, hangs) * self._bins.count
        cohort = self._cohorts[self._cohort.cells[number]]
        if cohort.kind == _BARE:
            return _kind(1, 0, hangs) * self._bins.count
        return self._cell(cohort)

    def _make_ready(self, cohort: _Cohort) -> None:
        cell = self._cell(cohort)
        ready = self._ready[cell]
        if not ready:
            insort(self._filled, self._place[cell])
        ready[cohort.number] = None

    def _make_unready(self, cohort: _Cohort) -> bool:
        """False if it was not ready."""
        cell = self._cell(cohort)
        ready = self._ready[cell]
        if cohort.number not in ready:
            return False
        del ready[cohort.number]
        if not ready:
            del self._filled[bisect_left(self._filled, self._place[cell])]
        return True

    def _advance(self, now: float) -> None:
        """Moves cohorts on to the bins of their age; after a long pause only some at a time."""
        if now - self._now < _TICK and not self._is_late:
            return
        self._now = max(now, self._now)
        left = _GROWN
        for queue, end in zip(reversed(self._by_bin), reversed(self._bins.ends), strict=True):
            while queue:
                cohort = self._cohorts[next(iter(queue))]
                if cohort.alive == 0:
                    self._drop(cohort)
                elif self._now - cohort.born >= end and left:
                    del queue[cohort.number]
                    self._grow(cohort)
                else:
                    break
                left -= 1
                if not left:
                    break
        self._is_late = not left

    def _grow(self, cohort: _Cohort) -> None:
        """Puts a cohort into the bin of its age; it is in no bin's queue now."""
        was_ready = self._make_unready(cohort)
        entered, ends = self._table.entered[cohort.kind], self._bins.ends
        while self._now - cohort.born >= ends[cohort.bin]:
            cohort.bin += 1
            entered[cohort.bin] += cohort.alive
        self._by_bin[cohort.bin][cohort.number] = None
        if was_ready:
            self._make_ready(cohort)

    def _forget(self) -> None:
        """Forgets the oldest names beyond what may be remembered, a few thousand at once, and gives
        up some of the numbers of those that it forgot."""
        state, cohorts, parents = self._state.cells, self._cohort.cells, self._parent.cells
        going, before = self._going, len(self._going)
        while (
            self._ghosts > self._remember
            and self._memory
            and len(going) - before < 2 * _MEMBERS
            and before < _GOING
        ):
            cohort = self._cohorts[self._memory.popitem(last=False)[0]]
            cohort.forgotten = True
            names, cohort.names = cohort.names, _untracked(array("i"))
            for number in names:
                if cohorts[number] == cohort.number and state[number] & _GHOST:
                    self._ghosts -= 1
                    cohort.alive -= 1
                    state[number] = 0
                    going.append(number)
                    if parents[number]:
                        going.append(parents[number] - 1)
                        parents[number] = 0
            self._bury(cohort)
        some = slice(-max(_DROPPED, len(going) // 16), None)
        self.names.drop_all(going[some])
        del going[some]

    def _refresh(self) -> None:
        """Ranks the cells again by the life table."""
        evidence = _EVIDENCE * self._mean_chain
        seen = sum(map(sum, self._table.used))
        self._is_taught = self._returns >= _RETURNS and seen >= evidence
        if self._is_taught:
            self._recency = None
        self._chances = None
        table = self._table.worth(evidence)
        table[_BARE] = 0.0
        worth = table.ravel()
        order = len(worth) - 1 - np.argsort(worth[::-1], kind="stable")  # ties: the older first
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        self._worth, self._order, self._place = worth.tolist(), order.tolist(), place.tolist()
        self._filled = sorted(self._place[cell] for cell, ready in enumerate(self._ready) if ready)
        self._refresh_at = self._uses + int(_REFRESH * self._mean_chain) + 1


def _kind(uses: int, ended: int, hangs: bool) -> int:
    """The class of a block."""
    group = _USES[uses] if uses < len(_USES) else _USES[-1]
    if hangs:
        return 2 * _GROUPS + group if ended else _INNER
    return 2 * group + ended
