"""The hazard policy: keeps the blocks with the soonest expected use, learned from past uses."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import chain as joined
from typing import ClassVar

import msgspec
import numpy as np

from kvrecall.block import BlockKey
from kvrecall.pool.eviction.base import EvictionPolicy
from kvrecall.pool.eviction.lifetable import AgeBins, LifeTable
from kvrecall.pool.eviction.queues import LruPolicy

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


class _Block(msgspec.Struct, gc=False, eq=False):
    """A known name: resident, or remembered for a while after it was evicted or refused.

    There are very many of these: they hold nothing that could form a cycle, so that the garbage
    collector can skip them (otherwise it would take three times as long as everything else).
    """

    key: BlockKey
    parent: BlockKey | None
    cohort: int
    uses: int = 1
    hangs: bool = False
    resident: bool = False
    held: bool = False


class _Cohort:
    """The blocks of one class with the same time of last use: they age together."""

    __slots__ = ("alive", "bin", "born", "forgotten", "kind", "names", "number", "runs")

    def __init__(self, number: int, kind: int, born: float) -> None:
        self.number = number
        self.kind = kind
        self.born = born
        self.bin = 0
        self.alive = 0  # members not used again since, resident or remembered
        self.names: list[_Block] = []  # who joined; some may have moved on
        # Who became resident, oldest first, as runs down a chain; some may have left since.
        self.runs: deque[list[_Block]] = deque()
        self.forgotten = False  # names are no longer remembered when they are evicted

    def holds(self, block: _Block) -> bool:
        return block.cohort == self.number and block.resident

    def settle(self, block: _Block) -> None:
        """``block``, a member, is resident."""
        if self.runs and self.runs[-1] and self.runs[-1][-1].key == block.parent:
            self.runs[-1].append(block)
        else:
            self.runs.append([block])

    def trim(self) -> bool:
        """Drops blocks that left from the end of the first run. False if no block is left."""
        runs = self.runs
        while runs:
            run = runs[0]
            while run and not self.holds(run[-1]):
                run.pop()
            if run:
                return True
            runs.popleft()
        return False


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

    A block with resident children is not given up before them. Memory: about 220 bytes for each
    resident and each remembered block; at most ``remember`` of the latter. Until taught, 125 more
    for each resident one.
    """

    name: ClassVar[str] = "hazard"

    def __init__(self, capacity_blocks: int, remember: int | None = None) -> None:
        if remember is None:
            remember = max(2 * capacity_blocks, min(16 * capacity_blocks + 32_768, 262_144))
        self._remember = remember
        self._bins = AgeBins()
        self._table = LifeTable(_CLASSES, self._bins)
        self._residents: dict[BlockKey, _Block] = {}
        self._ghosts: dict[BlockKey, _Block] = {}
        self._children: dict[BlockKey, int] = {}  # resident ones, by parent, resident or not
        self._has_groups = False  # a block that hangs on a chain was seen
        self._hung: dict[BlockKey, list[_Block]] = {}  # the same, of those that hang on a chain
        self._by_bin: list[deque[_Cohort]] = [deque() for _ in range(self._bins.count)]
        self._cohorts: dict[int, _Cohort] = {}  # those with members, by number
        self._born = 0  # cohorts so far
        self._memory: deque[_Cohort] = deque()  # oldest first
        self._memory_limit = 64
        self._youngest: dict[int, _Cohort] = {}  # by class
        # Cohorts with residents that may go, by cell (class, bin); cells ordered by worth.
        self._ready: list[dict[_Cohort, None]] = [{} for _ in range(_CLASSES * self._bins.count)]
        self._is_taught = False  # has seen enough blocks come back to refuse others
        self._recency: LruPolicy | None = LruPolicy()  # the order until taught for the first time
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

    def access(
        self,
        chain: Sequence[BlockKey],
        now: float,
        hanging: Sequence[BlockKey] = (),
        ending: Sequence[BlockKey] = (),
    ) -> None:
        if not (chain or hanging or ending):
            return
        self._advance(now)
        if self._recency is not None:
            self._recency.access(chain, now, hanging)
        for key in hanging:
            block = self._residents.get(key) or self._ghosts.get(key)
            if block is not None:
                self._use(block, 1)
        for key in ending:
            block = self._residents.get(key) or self._ghosts.get(key)
            if block is None:
                self._ghosts[key] = self._meet(key, None, 1, 0.0, True)
            elif self._cohorts[block.cohort].kind == _INNER:
                self._move(block, _kind(block.uses, 1, True))
        if not chain:
            return
        self._mean_chain += 0.01 * (len(chain) - self._mean_chain)
        self._uses += len(chain)
        last = len(chain) - 1
        parent: BlockKey | None = None
        for index, key in enumerate(chain):
            block = self._residents.get(key) or self._ghosts.get(key)
            if block is None:
                self._ghosts[key] = self._meet(key, parent, int(index == last))
            else:
                if block.parent is None and parent is not None:
                    self._adopt(block, parent)
                self._use(block, int(index == last))
            parent = key
        if self._uses >= self._refresh_at:
            self._table.fade(_FADE)
            self._refresh()
        self._forget()

    def insert(
        self,
        key: BlockKey,
        parent: BlockKey | None,
        depth: int,
        now: float,
        hangs: bool = False,
    ) -> None:
        if key in self._residents:
            return
        block = self._ghosts.pop(key, None)
        if block is None:
            if now - self._now >= _TICK:
                self._advance(now)
            block = self._meet(key, parent, 0, _SLACK, hangs)
        elif block.parent is None:
            block.parent = parent
            block.hangs = hangs
        if self._recency is not None:
            self._recency.insert(key, parent, depth, now, hangs)
        block.resident = True
        self._residents[key] = block
        cohort = self._cohorts[block.cohort]
        cohort.settle(block)
        self._make_ready(cohort)
        above = block.parent
        if above is not None:
            self._children[above] = self._children.get(above, 0) + 1
        self._has_groups |= hangs
        if self._has_groups:
            self._settle(block)
        if len(self._ghosts) > self._remember or len(self._memory) > self._memory_limit:
            self._forget()

    def remove(self, key: BlockKey) -> None:
        block = self._residents.pop(key, None)
        if block is None:
            return
        if self._recency is not None:
            self._recency.remove(key)
        block.resident = block.held = False
        cohort = self._cohorts[block.cohort]
        if cohort.forgotten:
            cohort.alive -= 1
        else:
            self._ghosts[key] = block
        for child in self._hung.get(key, ()):
            self._move(child, _BARE)
        if block.parent is None:
            return
        if block.hangs:
            self._unhang(block, block.parent)
        siblings = self._children[block.parent] - 1
        if siblings:
            self._children[block.parent] = siblings
            return
        del self._children[block.parent]
        above = self._residents.get(block.parent)
        if above is not None:
            self._make_ready(self._cohorts[above.cohort])
            if block.hangs or cohort.kind == _BARE:
                self._move(above, _BARE)

    def hold(self, key: BlockKey) -> None:
        block = self._residents.get(key)
        if block is not None:
            block.held = True
            if self._recency is not None:
                self._recency.hold(key)

    def release(self, key: BlockKey) -> None:
        block = self._residents.get(key)
        if block is not None and block.held:
            block.held = False
            self._make_ready(self._cohorts[block.cohort])
            if self._recency is not None:
                self._recency.release(key)

    # -- what to give up -------------------------------------------------------------------

    def admit(
        self,
        key: BlockKey,
        parent: BlockKey | None,
        depth: int,
        now: float,
        hangs: bool = False,
    ) -> bool:
        if not self._is_taught:
            return True
        self._advance(now)
        block = self._ghosts.get(key)
        mine = self._worth[self._cell_of(block, hangs)]
        for cohort in self._candidates():
            if cohort.trim():
                return self._worth[self._cell(cohort)] < mine
        return True

    def chance(self, key: BlockKey, now: float) -> float | None:
        if not self._is_taught:
            return None
        self._advance(now)
        block = self._residents.get(key) or self._ghosts.get(key)
        if self._chances is None:
            self._chances = self._table.chances(_EVIDENCE * self._mean_chain).ravel().tolist()
        return self._chances[self._cell_of(block)]

    def victims(
        self, count: int, evictable: Callable[[BlockKey], bool], now: float
    ) -> list[BlockKey]:
        if self._recency is not None:
            return self._recency.victims(count, evictable, now)
        self._advance(now)
        found: dict[BlockKey, _Block] = {}
        going: dict[BlockKey, int] = {}  # children among the found, by parent
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
            yield from self._ready[self._order[place]]

    def _strip(
        self,
        cohort: _Cohort,
        count: int,
        evictable: Callable[[BlockKey], bool],
        found: dict[BlockKey, _Block],
        going: dict[BlockKey, int],
    ) -> bool:
        """Adds the cohort's evictable blocks to ``found``, the oldest run first, from its end.
        False if it has none until a child of one of its blocks is removed, or one of them is
        released."""
        cohort.trim()
        able = False
        for block in joined.from_iterable(map(reversed, cohort.runs)):
            if block.held or not cohort.holds(block) or not self._is_leaf(block, going):
                continue
            able = True
            if block.key not in found and evictable(block.key):
                self._give(block, found, going)
                if len(found) >= count:
                    break
        return able

    def _climb(
        self,
        count: int,
        evictable: Callable[[BlockKey], bool],
        found: dict[BlockKey, _Block],
        going: dict[BlockKey, int],
    ) -> None:
        """If those are not enough: the blocks that became leaves."""
        pending = list(found.values()) if len(found) < count else []
        for block in pending:
            above = None if block.parent is None else self._residents.get(block.parent)
            if above is None or above.key in found or above.held:
                continue
            if not self._is_leaf(above, going):
                continue
            if evictable(above.key):
                self._give(above, found, going)
                pending.append(above)
                if len(found) >= count:
                    return

    def _is_leaf(self, block: _Block, going: dict[BlockKey, int]) -> bool:
        return self._children.get(block.key, 0) <= going.get(block.key, 0)

    @staticmethod
    def _give(block: _Block, found: dict[BlockKey, _Block], going: dict[BlockKey, int]) -> None:
        found[block.key] = block
        if block.parent is not None:
            going[block.parent] = going.get(block.parent, 0) + 1

    # -- classes, cohorts and time ---------------------------------------------------------

    def _meet(
        self,
        key: BlockKey,
        parent: BlockKey | None,
        ended: int,
        slack: float = 0.0,
        hangs: bool = False,
    ) -> _Block:
        """A name used for the first time, up to ``slack`` seconds ago."""
        cohort = self._join(_kind(1, ended, hangs), slack)
        block = _Block(key, parent, cohort.number, hangs=hangs)
        cohort.names.append(block)
        return block

    def _use(self, block: _Block, ended: int) -> None:
        """Records another use of a known block and puts it with others of its kind."""
        old = self._cohorts[block.cohort]
        old.alive -= 1
        self._table.used[old.kind][old.bin] += 1.0
        if self._returned_at != self._now:
            self._returned_at = self._now
            self._returns += 1
        block.uses += 1
        cohort = self._join(_kind(block.uses, ended, block.hangs))
        block.cohort = cohort.number
        cohort.names.append(block)
        if block.resident:
            cohort.settle(block)
            self._make_ready(cohort)

    def _settle(self, block: _Block) -> None:
        """A block became resident: its parent, and what hangs on it, may serve hits again."""
        for child in self._hung.get(block.key, ()):
            self._revive(child)
        if block.parent is None:
            return
        above = self._residents.get(block.parent)
        if above is not None:
            self._revive(above)
        if block.hangs:
            self._hung.setdefault(block.parent, []).append(block)
            if above is None:
                self._move(block, _BARE)

    def _unhang(self, block: _Block, parent: BlockKey) -> None:
        others = self._hung[parent]
        others.remove(block)
        if not others:
            del self._hung[parent]

    def _revive(self, block: _Block) -> None:
        """The block may serve hits again."""
        if self._cohorts[block.cohort].kind == _BARE:
            self._move(block, _kind(block.uses, int(block.uses > 1), block.hangs))

    def _move(self, block: _Block, kind: int) -> None:
        """Puts a known block into another class, without a use."""
        self._cohorts[block.cohort].alive -= 1
        cohort = self._join(kind)
        block.cohort = cohort.number
        cohort.names.append(block)
        if block.resident:
            cohort.settle(block)
            self._make_ready(cohort)

    def _join(self, kind: int, slack: float = 0.0) -> _Cohort:
        """The cohort of ``kind`` that starts now, or ``slack`` seconds ago, with one more
        member."""
        cohort = self._youngest.get(kind)
        if cohort is None or self._now - cohort.born > slack or cohort.forgotten:
            self._born += 1
            cohort = self._youngest[kind] = _Cohort(self._born, kind, self._now)
            self._cohorts[cohort.number] = cohort
            self._by_bin[0].append(cohort)
            self._memory.append(cohort)
        cohort.alive += 1
        entered = self._table.entered[kind]
        for age in range(cohort.bin + 1):
            entered[age] += 1.0
        return cohort

    def _adopt(self, block: _Block, parent: BlockKey) -> None:
        """Records the parent of a block that was announced without one."""
        block.parent = parent
        if block.resident:
            self._count_child(parent)

    def _count_child(self, parent: BlockKey) -> None:
        self._children[parent] = self._children.get(parent, 0) + 1

    def _cell(self, cohort: _Cohort) -> int:
        return cohort.kind * self._bins.count + cohort.bin

    def _cell_of(self, block: _Block | None, hangs: bool = False) -> int:
        """The cell of a block; of one that is not known, or was given up as bare: a new one's."""
        cohort = None if block is None else self._cohorts[block.cohort]
        if cohort is None or cohort.kind == _BARE:
            return _kind(1, 0, hangs) * self._bins.count
        return self._cell(cohort)

    def _make_ready(self, cohort: _Cohort) -> None:
        cell = self._cell(cohort)
        ready = self._ready[cell]
        if not ready:
            insort(self._filled, self._place[cell])
        ready[cohort] = None

    def _make_unready(self, cohort: _Cohort) -> bool:
        """False if it was not ready."""
        cell = self._cell(cohort)
        ready = self._ready[cell]
        if cohort not in ready:
            return False
        del ready[cohort]
        if not ready:
            del self._filled[bisect_left(self._filled, self._place[cell])]
        return True

    def _advance(self, now: float) -> None:
        """Moves cohorts on to the bins of their age."""
        if now - self._now < _TICK:
            return
        self._now = now
        for queue, end in zip(reversed(self._by_bin), reversed(self._bins.ends), strict=True):
            while queue and (now - queue[0].born >= end or queue[0].alive == 0):
                self._grow(queue.popleft())

    def _grow(self, cohort: _Cohort) -> None:
        """Puts a cohort into the bin of its age; it is in no bin's queue now."""
        was_ready = self._make_unready(cohort)
        if cohort.alive == 0:
            del self._cohorts[cohort.number]
            cohort.forgotten = True
            cohort.names = []
            cohort.runs.clear()
            return
        entered, ends = self._table.entered[cohort.kind], self._bins.ends
        while self._now - cohort.born >= ends[cohort.bin]:
            cohort.bin += 1
            entered[cohort.bin] += cohort.alive
        self._by_bin[cohort.bin].append(cohort)
        if was_ready:
            self._make_ready(cohort)

    def _forget(self) -> None:
        """Drops the oldest names beyond what may be remembered."""
        memory, ghosts = self._memory, self._ghosts
        while len(ghosts) > self._remember and memory:
            cohort = memory.popleft()
            cohort.forgotten = True
            for block in cohort.names:
                if block.cohort == cohort.number and ghosts.get(block.key) is block:
                    del ghosts[block.key]
                    cohort.alive -= 1
            cohort.names = []
        if len(memory) > self._memory_limit:
            oldest, self._by_bin[-1] = self._by_bin[-1], deque()
            for cohort in oldest:
                self._grow(cohort)
            self._memory = deque(cohort for cohort in memory if not cohort.forgotten)
            self._memory_limit = 64 + 2 * len(self._memory)

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
