"""The hazard policy: keeps the blocks with the soonest expected use, learned from past uses."""

from __future__ import annotations

import ctypes
import heapq
from array import array
from bisect import bisect_left, insort
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import ClassVar, TypeVar

import numpy as np

from kvrecall.pool.eviction.base import PART, EvictionPolicy
from kvrecall.pool.eviction.classes import (
    BARE,
    CLASSES,
    INNER,
    class_of,
    feature,
    feature_of,
    levels,
)
from kvrecall.pool.eviction.lifetable import AgeBins, LifeTable
from kvrecall.pool.eviction.queues import Links, LruPolicy
from kvrecall.pool.eviction.rival import Rival
from kvrecall.pool.hints import Advice
from kvrecall.pool.names import Names

_TICK = 0.25  # seconds; what happens within one counts as happening at once
_SLACK = 8.0  # the same for blocks without a request, as after a restart
_REFRESH = 32.0  # requests between two looks at the life table
_FADE = 0.9975  # what then stays of the old counts: half after 277 looks, about 9,000 requests
_EVIDENCE = 4.0  # requests' worth of blocks that a class needs to be believed half
_RETURNS = 16  # ticks in which blocks came back, before the tables are believed at all
_MEMBERS = 1024  # of a cohort: more would take too long to prune at once
_FORGOTTEN = 1024  # names with a request, or twice as many as it has blocks
_FORGOTTEN_AT_ONCE = 512
_FORGOTTEN_FOR_ONE = 4  # with a new block
_GROWN = 64  # cohorts that move to another bin at once
_GROWN_BEFORE_USE = 4  # times so many before a request
_PRUNED = 256  # names of cohorts that are pruned at once; one more cohort may exceed it
_PRUNED_FROM = 16  # names of a cohort, and twice as many as it has members
_LARGE = 1 << 20  # names that a large tier remembers at least
_KEPT_SHARE = 0.5  # of a tier: what the pins of all tenants' hints may keep
# What is known of a name:
_RESIDENT = 1
_GHOST = 2  # remembered for a while after it was evicted or refused
_KNOWN = _RESIDENT | _GHOST
_HELD = 4
_HANGS = 8
_KEPT = 16  # by the pin of a hint
_STAYS = _RESIDENT | _HELD | _KEPT  # of these only the first, if it may be given up


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

    @property
    def size(self) -> int:
        """Entries of names."""
        return len(self.names) + len(self.rest)

    def prune(self, of: Sequence[int], state: Sequence[int]) -> None:
        """Frees the memory of those that moved on. ``of``: the cohort of each name."""
        own = self.number
        names = [n for n in self.names if of[n] == own and state[n] & _KNOWN]
        self.names = _untracked(array("i", names))
        rest, at, runs = array("i"), self.begin, self.rest
        while at < len(runs):
            end = _end_of(runs, at)
            run = [~runs[at], *runs[at + 1 : end]]
            run = [n for n in run if of[n] == own and state[n] & _KNOWN]
            if run:
                run[0] = ~run[0]
                rest.extend(run)
            at = end
        self.rest, self.begin = _untracked(rest) if rest else _NONE, 0

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
        self._capacity = capacity_blocks
        self._bins = AgeBins()
        self._table = LifeTable(CLASSES, self._bins, levels())
        # By name; parents and what hangs plus one, 0 for none.
        self._state = self.names.column("B")
        self._used = self.names.column("B")  # times, up to 255
        self._cohort = self.names.column("I")
        self._parent = self.names.column("i")
        self._children = self.names.column("i")  # resident ones, of a resident name or not
        self._hung = self.names.column("i", is_rare=True)  # the first of those that hang on it
        self._hung_next = self.names.column("i", is_rare=True)
        self._ghosts = 0
        # Pins of hints: until when, and whose; and their ends, a heap with the blocks.
        self._kept: dict[int, tuple[float, str]] = {}
        self._kept_by: dict[str, int] = {}
        self._pins_end: list[tuple[float, int, list[int]]] = []
        self._pins = 0
        self._rival = Rival(capacity_blocks)
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
        self._ready: list[dict[int, None]] = [{} for _ in range(CLASSES * self._bins.count)]
        self._is_taught = False  # has seen enough blocks come back to refuse others
        # The order until taught for the first time. It goes at once then, and so keeps no names.
        self._recency: LruPolicy | None = LruPolicy(self.names, links, keeps=False)
        self._returns = 0  # ticks in which blocks came back
        self._returned_at = -1.0  # the last of them
        self._worth = memoryview(b"").cast("d")
        self._chances: list[float] | None = None  # by cell, made when asked for
        self._order = memoryview(b"").cast("q")  # cells, least worth first
        self._place = memoryview(b"").cast("q")  # inverse of _order
        self._filled: list[int] = []  # places whose cell holds a ready cohort, ascending
        self._now = 0.0
        self._uses = 0  # block uses seen, and at how many the table is looked at again
        self._refresh_at = 0
        self._mean_chain = 1.0
        self._lesson: Iterator[None] | None = None  # begun, not ended
        self._to_grow = 0  # times that some cohorts may still, for this request
        self._to_forget = 0  # names, at most, for the last request
        deque(self._learn(), maxlen=0)

    # -- what happens to blocks ------------------------------------------------------------

    def access_in_parts(
        self,
        chain: Sequence[int],
        now: float,
        hanging: Sequence[int] = (),
        ending: Sequence[int] = (),
        advice: Advice | None = None,
    ) -> Iterator[None]:
        if not (chain or hanging or ending):
            return
        if now - self._now >= _TICK:  # not if some are late: ``tend`` is for them
            self._advance(now)
        if self._recency is not None:
            parts = self._recency.access_in_parts(chain, now, hanging)
            # Taught meanwhile, its links may be those of other blocks in other queues already.
            while self._recency is not None and next(parts, parts) is None:
                yield
        for start in range(0, len(hanging), PART):
            state = self._state.cells
            for number in hanging[start : start + PART]:
                if number >= 0 and state[number] & _KNOWN:
                    self._use(number, 1)
            yield
        state = self._state.cells
        for number in ending:
            if not state[number] & _KNOWN:
                self._meet(number, -1, 1, 0.0, True)
                self._remember_it(number)
            elif self._cohorts[self._cohort.cells[number]].kind == INNER:
                self._move(number, class_of(self._used.cells[number], 1, True))
        if not chain:
            return
        self._mean_chain += 0.01 * (len(chain) - self._mean_chain)
        self._uses += len(chain)
        yield from self._use_chain(chain, advice)
        self._to_forget = max(_FORGOTTEN, 2 * len(chain))

    def tend(self, now: float) -> bool:
        if now - self._now >= _TICK:
            self._to_grow = _GROWN_BEFORE_USE
        if self._to_grow:
            self._to_grow -= 1
            self._advance(now)
            if self._is_late and self._to_grow:
                return True
            self._to_grow = 0
        if self._lesson is None and self._uses >= self._refresh_at:
            self._to_forget = 0  # for once: more names than usual are no harm
            self._lesson = self._learn(_FADE)
        if self._lesson is not None:
            if next(self._lesson, self._lesson) is None:
                return True
            self._lesson = None
            return False
        if not self._to_forget or self._ghosts <= self._remember:
            return False
        some = min(self._to_forget, _FORGOTTEN_AT_ONCE)
        self._to_forget -= some
        self._forget(some)
        return bool(self._to_forget) and self._ghosts > self._remember

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
                state[number] = state[number] & _KEPT | _HANGS * hangs
        else:
            if now - self._now >= _TICK:
                self._advance(now)
            self._meet(number, parent, 0, _SLACK, hangs, self._feature_below(parent))
        if self._recency is not None:
            self._recency.insert_n(number, parent, depth, now, hangs)
            if state[number] & _KEPT:
                self._recency.hold_n(number)
        state[number] = state[number] & (_HANGS | _KEPT) | _RESIDENT
        cohort = self._cohorts[self._cohort.cells[number]]
        above = self._parent.cells[number] - 1
        cohort.settle(number, above)
        self._make_ready(cohort)
        if above >= 0:
            self._children.cells[above] += 1
        if hangs and not self._has_groups:
            self._has_groups = True
            self._rival.end()
        if self._has_groups:
            self._settle(number)
        if self._ghosts > self._remember:
            self._forget(_FORGOTTEN_FOR_ONE)

    def remove_n(self, number: int) -> None:
        state = self._state.cells
        if not state[number] & _RESIDENT:
            return
        if self._recency is not None:
            self._recency.remove_n(number)
        if state[number] & _KEPT:
            self._unkeep(number)
        state[number] &= _HANGS
        cohort = self._cohorts[self._cohort.cells[number]]
        for child in self._hung_on(number):
            self._move(child, BARE)
        above = self._parent.cells[number] - 1
        if above >= 0:
            hangs = state[number] & _HANGS
            if hangs:
                self._unhang(number, above)
            left = self._children.cells[above] - 1
            self._children.cells[above] = left
            if not left and state[above] & _RESIDENT:
                self._make_ready(self._cohorts[self._cohort.cells[above]])
                if hangs or cohort.kind == BARE:
                    self._move(above, BARE)
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
            if self._recency is not None and not state[number] & _KEPT:
                self._recency.release_n(number)

    # -- what to give up -------------------------------------------------------------------

    def admit_n(
        self, number: int, parent: int, depth: int, now: float, hangs: bool = False
    ) -> bool:
        if not self._is_taught or self._rival.is_better:
            return True
        self._advance(now)
        known = self._state.cells[number] if number >= 0 else 0
        if known & _KEPT:
            return True
        mine = self._worth[self._cell_of(number if known & _GHOST else -1, hangs, parent)]
        for cohort in self._candidates():
            if self._trim(cohort):
                return self._worth[self._cell(cohort)] < mine
        return True

    def chance_n(self, number: int, now: float) -> float | None:
        if not self._is_taught:
            return None
        self._advance(now)
        if self._chances is None:
            self._chances = self._table.chances().ravel().tolist()
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
        """Ready cohorts, least worth first; or the oldest first, while recency is better."""
        if not self._rival.is_better:
            for place in self._filled:
                yield from map(self._cohorts.__getitem__, self._ready[self._order[place]])
            return
        for _, places in groupby(self._filled, lambda place: self._order[place] % self._bins.count):
            cells = (
                map(self._cohorts.__getitem__, self._ready[self._order[place]]) for place in places
            )
            yield from heapq.merge(*cells, key=lambda cohort: cohort.born)

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
            if cohorts[number] != own or state[number] & _STAYS != _RESIDENT:
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
            if state[above] & _STAYS != _RESIDENT or not self._is_leaf(above, going):
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
        self,
        number: int,
        parent: int,
        ended: int,
        slack: float = 0.0,
        hangs: bool = False,
        feature: int = 0,
    ) -> None:
        """A name is used for the first time, up to ``slack`` seconds ago."""
        self.names.keep(number)
        self._state.cells[number] = _HANGS * hangs
        self._used.cells[number] = 1
        if parent >= 0:
            self._adopt(number, parent)
        self._enter(number, self._join(class_of(1, ended, hangs, feature), slack))

    def _adopt(self, number: int, parent: int) -> None:
        """Records the parent of a name."""
        self.names.keep(parent)
        self._parent.cells[number] = parent + 1

    def _remember_it(self, number: int) -> None:
        self._state.cells[number] |= _GHOST
        self._ghosts += 1

    def _unlearn(self, number: int) -> None:
        """Forgets a name that is neither resident nor remembered."""
        if self._state.cells[number] & _KEPT:
            self._unkeep(number)
        self._state.cells[number] = 0
        self._rival.forget((number,))
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

    def _use_chain(self, chain: Sequence[int], advice: Advice | None) -> Iterator[None]:
        """``_use`` of each of a chain, or its first use, in parts."""
        known_blocks, hits, pause = self._continues(chain)
        self._rival.use(chain, hits)
        plain = own = feature(len(chain) - known_blocks, pause)
        begin = len(chain)
        if advice is not None:  # which is about what no other chain shares
            begin = self._fork(chain)
            own = feature(0, None, advice.kind) if advice.kind else plain
        for start in range(0, len(chain), PART):
            yield
            self._use_part(chain, start, begin, plain, own)
        if advice is not None and advice.pin_s:
            yield
            self._keep(chain[begin:], advice)

    def _use_part(self, chain: Sequence[int], start: int, begin: int, plain: int, own: int) -> None:
        """``_use`` of each of a part of a chain, or its first use: the innermost loop, written out.
        ``own``: the feature of its blocks from ``begin`` on, ``plain`` that of the others."""
        state, parents, used = self._state.cells, self._parent.cells, self._used.cells
        of, cohorts, uses_seen = self._cohort.cells, self._cohorts, self._table.used
        last, parent = len(chain) - 1, chain[start - 1] if start else -1
        kind, cohort, is_ready = -1, None, False
        new_kind, new = -1, None  # class and cohort of the last one that was met
        met: list[int] = []  # and parents: to be kept
        for index, number in enumerate(chain[start : start + PART], start):
            known = state[number]
            here = plain if index < begin else own
            if not known & _KNOWN:
                now_kind = class_of(1, int(index == last), False, here)
                if now_kind == new_kind and new is not None and len(new.names) < _MEMBERS:
                    new.alive += 1
                    self._table.entered[now_kind][0] += 1.0
                else:
                    new_kind, new = now_kind, self._join(now_kind)
                met.append(number)
                state[number], used[number], of[number] = _GHOST, 1, new.number
                new.names.append(number)
                if parent >= 0:
                    met.append(parent)
                    parents[number] = parent + 1
                self._ghosts += 1
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
            now_kind = class_of(uses, int(index == last), bool(known & _HANGS), here)
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
        self.names.keep_all(met)

    def _continues(self, chain: Sequence[int]) -> tuple[int, int, float | None]:
        """The numbers of leading blocks that are known and that are resident, and the seconds
        since the last known one was used; None if that is the root, which many have in common, or
        there is none."""
        state, count, hits = self._state.cells, 0, -1
        for number in chain:
            known = state[number]
            if not known & _RESIDENT:
                if hits < 0:
                    hits = count
                if not known & _KNOWN:
                    break
            count += 1
        hits = count if hits < 0 else hits
        deepest = count - 1 - (count == len(chain))  # the last may end many chains
        if deepest < 1:
            return count, hits, None
        return count, hits, self._now - self._cohorts[self._cohort.cells[chain[deepest]]].born

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
        self._enter(number, self._join(class_of(uses[number], ended, hangs)))
        self._bury(old)

    def _move(self, number: int, kind: int) -> None:
        """Puts a known block into another class, without a use."""
        old = self._cohorts[self._cohort.cells[number]]
        old.alive -= 1
        self._enter(number, self._join(kind))
        self._bury(old)

    # -- hints -----------------------------------------------------------------------------

    def _fork(self, chain: Sequence[int]) -> int:
        """Where a chain's own part begins: behind its last block with children in two chains."""
        children = self._children.cells
        for index in range(len(chain) - 1, 0, -1):
            if children[chain[index - 1]] > 1:
                return index
        return 0

    def _keep(self, numbers: Sequence[int], advice: Advice) -> None:
        """Pins blocks for a time, the first of them, as far as there is room for pins."""
        tenant, until = advice.tenant, self._now + advice.pin_s
        left = int(min(
            self._capacity * advice.share - self._kept_by.get(tenant, 0),
            self._capacity * _KEPT_SHARE - len(self._kept),
        ))  # fmt: skip
        state, pinned = self._state.cells, []
        for number in numbers:
            if not state[number] & _KNOWN:  # forgotten since this chain's use was recorded
                continue
            if state[number] & _KEPT:
                self._kept[number] = (max(until, self._kept[number][0]), self._kept[number][1])
            elif left > 0:
                left -= 1
                state[number] |= _KEPT
                self._kept[number] = (until, tenant)
                self._kept_by[tenant] = self._kept_by.get(tenant, 0) + 1
                if self._recency is not None and state[number] & _RESIDENT:
                    self._recency.hold_n(number)
            else:
                break
            pinned.append(number)
        if pinned:
            self._pins += 1
            heapq.heappush(self._pins_end, (until, self._pins, pinned))

    def _unkeep(self, number: int) -> None:
        self._state.cells[number] &= ~_KEPT
        _, tenant = self._kept.pop(number)
        left = self._kept_by.pop(tenant) - 1
        if left:
            self._kept_by[tenant] = left

    def _end_pins(self) -> None:
        """Lets go of blocks whose pins are past."""
        while self._pins_end and self._pins_end[0][0] <= self._now:
            for number in heapq.heappop(self._pins_end)[2]:
                if number not in self._kept or self._kept[number][0] > self._now:
                    continue
                self._unkeep(number)
                state = self._state.cells[number]
                if state & _RESIDENT and not state & _HELD:
                    self._make_ready(self._cohorts[self._cohort.cells[number]])
                    if self._recency is not None:
                        self._recency.release_n(number)

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
                self._move(number, BARE)

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
        if self._cohorts[self._cohort.cells[number]].kind == BARE:
            uses = self._used.cells[number]
            hangs = bool(self._state.cells[number] & _HANGS)
            self._move(number, class_of(uses, int(uses > 1), hangs))

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

    def _cell_of(self, number: int, hangs: bool = False, parent: int = -1) -> int:
        """The cell of a block; of one that is not known, or was given up as bare: a new one's."""
        if number >= 0 and self._state.cells[number] & _KNOWN:
            cohort = self._cohorts[self._cohort.cells[number]]
            if cohort.kind != BARE:
                return self._cell(cohort)
        return class_of(1, 0, hangs, self._feature_below(parent)) * self._bins.count

    def _feature_below(self, parent: int) -> int:
        """The feature of a block that no request used yet: its parent's."""
        if parent < 0 or not self._state.cells[parent] & _KNOWN:
            return 0
        return feature_of(self._cohorts[self._cohort.cells[parent]].kind)

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
        if self._pins_end:
            self._end_pins()
        left, pruned = _GROWN, 0
        for queue, end in zip(reversed(self._by_bin), reversed(self._bins.ends), strict=True):
            while queue and left:
                cohort = self._cohorts[next(iter(queue))]
                if cohort.alive == 0:
                    self._drop(cohort)
                elif self._now - cohort.born >= end:
                    del queue[cohort.number]
                    self._grow(cohort)
                    size = cohort.size
                    if size > 2 * (cohort.alive + _PRUNED_FROM) and pruned < _PRUNED:
                        # Those who were used again: a cohort stays as long as one of its blocks
                        # was not, and there may be as many cohorts as blocks.
                        pruned += size
                        cohort.prune(self._cohort.cells, self._state.cells)
                else:
                    break
                left -= 1
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

    def _forget(self, left: int) -> None:
        """Forgets up to ``left`` of the oldest names beyond what may be remembered."""
        state, cohorts, parents = self._state.cells, self._cohort.cells, self._parent.cells
        going: list[int] = []
        above: list[int] = []
        while self._ghosts > self._remember and self._memory and left > 0:
            cohort = self._cohorts[next(iter(self._memory))]
            cohort.forgotten = True
            names = cohort.names[-left:]
            del cohort.names[-left:]
            left -= len(names)
            for number in names:
                if cohorts[number] == cohort.number and state[number] & _GHOST:
                    self._ghosts -= 1
                    cohort.alive -= 1
                    if state[number] & _KEPT:
                        self._unkeep(number)
                    state[number] = 0
                    going.append(number)
                    if parents[number]:
                        above.append(parents[number] - 1)
                        parents[number] = 0
            if not cohort.names:
                del self._memory[cohort.number]
            self._bury(cohort)
        self._rival.forget(going)
        self.names.drop_all(going + above)

    def _learn(self, fade: float = 1.0) -> Iterator[None]:
        """Looks at the life table again, and ranks the cells by it, in parts."""
        evidence = _EVIDENCE * self._mean_chain
        seen = sum(map(sum, self._table.used))
        is_taught = self._returns >= _RETURNS and seen >= evidence
        yield from self._table.refresh(evidence, self._mean_chain, fade)
        self._is_taught = is_taught
        if is_taught:
            self._recency = None
        self._chances = None
        yield
        self._rank()

    def _rank(self) -> None:
        """Ranks the cells by the life table."""
        self._rival.look(self._mean_chain)
        if self._rival.is_better:
            table = np.tile(-np.arange(self._bins.count, dtype=np.float64), (CLASSES, 1))
        else:
            table = self._table.worth()
        table[BARE] = table.min() - 1.0
        worth = table.ravel()
        order = len(worth) - 1 - np.argsort(worth[::-1], kind="stable")  # ties: the older first
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        self._worth, self._order = memoryview(worth.data), memoryview(order.data)
        self._place = memoryview(place.data)
        self._filled = sorted(self._place[cell] for cell, ready in enumerate(self._ready) if ready)
        self._refresh_at = self._uses + int(_REFRESH * self._mean_chain) + 1
