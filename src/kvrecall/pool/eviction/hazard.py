"""The hazard policy: keeps the blocks with the soonest expected use, learned from past uses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

from kvrecall.pool.eviction.ages import MOST_MEMBERS, AgeBucket, AgeRanking
from kvrecall.pool.eviction.base import EvictionPolicy, NumberRefs, RequestUse
from kvrecall.pool.eviction.lifetable import (
    CLASSES,
    INNER,
    ORPHANED,
    AgeBins,
    LifeTable,
    class_of,
    feature,
    feature_of,
    levels,
)
from kvrecall.pool.hints import Advice

_TICK = 0.25  # seconds; what happens within one counts as happening at once
_SLACK = 8.0  # the same for blocks without a request, as after a restart
_REFRESH = 32.0  # requests between two looks at the life table
_FADE = 0.9975  # what then stays of the old counts: half after 277 looks, about 9,000 requests
_EVIDENCE = 4.0  # requests' worth of blocks that a class needs to be believed half
_RETURNS = 16  # ticks in which blocks came back, before the tables are believed at all
_FORGOTTEN = 1024  # names with a request, or twice as many as it has blocks
_FORGOTTEN_AT_ONCE = 512
_FORGOTTEN_FOR_ONE = 4  # with a new block
_LARGE = 1 << 20  # names that a large tier remembers at least
# What is known of a number:
_RESIDENT = 1
_GHOST = 2  # remembered for a while after it was evicted or refused
_KNOWN = _RESIDENT | _GHOST
_HELD = 4
_HANGS = 8


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

    It *is warm* once blocks came back in ``_RETURNS`` different ticks, in all as many as
    ``_EVIDENCE`` requests have: what the tables say before is their prior (see ``WarmUp``).

    What hangs on a chain has classes of its own: by its uses, those at the end of a request among
    them; and never used, inside one. A chain's end whose last window or state was given up can
    serve no hit: it goes next. So does what hangs on a block that is gone, until that is back.

    A block with resident children is not given up before them. Memory beside that of the names:
    about 40 bytes for each resident and each remembered block; at most ``remember`` of the latter.
    """

    learns: ClassVar[bool] = True

    def __init__(
        self,
        capacity_blocks: int,
        names: NumberRefs,
        remember: int | None = None,
        prefers_age: Callable[[float], bool] = lambda chain: False,
        on_forgotten: Callable[[Sequence[int]], None] = lambda numbers: None,
    ) -> None:
        """``prefers_age(blocks)``: whether the order of use is to be preferred now, asked whenever
        the policy has learned; ``blocks`` are those of a request. ``on_forgotten``: called with
        numbers that it does not know any more, before they can be other blocks'."""
        if remember is None:
            remember = max(2 * capacity_blocks, min(16 * capacity_blocks + 32_768, 262_144))
            remember = min(remember, max(capacity_blocks // 2, _LARGE))
        self._names = names
        self._remember = remember
        self._prefers_age = prefers_age
        self._on_forgotten = on_forgotten
        self._table = LifeTable(CLASSES, AgeBins(), levels())
        self._ranking = AgeRanking(self._table, CLASSES)
        # By number; parents and what hangs plus one, 0 for none.
        self._state = names.column("B")
        self._used = names.column("B")  # times, up to 255
        self._bucket = names.column("I")
        self._parent = names.column("i")
        self._children = names.column("i")  # resident ones, of a resident block or not
        self._hung = names.column("i")  # the first of those that hang on it
        self._hung_next = names.column("i")
        self._ghosts = 0
        self._has_groups = False  # a block that hangs on a chain was seen
        self._is_by_age = False
        self.is_warm = False
        self._returns = 0  # ticks in which blocks came back
        self._returned_at = -1.0  # the last of them
        self._chances: list[float] | None = None  # by cell, made when asked for
        self._uses = 0  # block uses seen, and at how many the table is looked at again
        self._refresh_at = 0
        self._mean_chain = 1.0
        self._to_forget = 0  # names, at most, for the last request
        self._learn()

    # -- what happens to blocks ------------------------------------------------------------

    def access(self, use: RequestUse[int]) -> None:
        self.maintain(use.now)
        state, chain = self._state.cells, use.chain
        for number in use.hanging:
            if number >= 0 and state[number] & _KNOWN:
                bucket, used = self._bucket_of(number), self._used.cells
                self._table.used[bucket.kind][bucket.bin] += 1.0
                self._note_return()
                used[number] = min(255, used[number] + 1)
                self._move(number, class_of(used[number], 1, bool(state[number] & _HANGS)))
        for number in use.ending:
            if not state[number] & _KNOWN:
                self._meet(number, -1, 1, 0.0, True)
                self._remember_it(number)
            elif self._bucket_of(number).kind == INNER:
                self._move(number, class_of(self._used.cells[number], 1, True))
        if chain:
            self._mean_chain += 0.01 * (len(chain) - self._mean_chain)
            self._uses += len(chain)
            self._use_chain(chain, use.advice)
            self._to_forget = max(_FORGOTTEN, 2 * len(chain))
        self.maintain(use.now)

    def maintain(self, now: float) -> None:
        """Does what past uses and the time that passed have made due."""
        self._advance(now)
        if self._uses >= self._refresh_at:
            self._to_forget = 0  # for once: more names than usual are no harm
            self._learn(_FADE)
        while self._to_forget and self._ghosts > self._remember:
            some = min(self._to_forget, _FORGOTTEN_AT_ONCE)
            self._to_forget -= some
            self._forget(some)

    def _advance(self, now: float) -> None:
        if now - self._ranking.now >= _TICK:
            self._ranking.advance(now, self._bucket.cells, self._state.cells)

    def insert(self, number: int, parent: int, now: float, hangs: bool = False) -> None:
        state = self._state.cells
        if state[number] & _RESIDENT:
            return
        if state[number] & _GHOST:
            self._ghosts -= 1
            if parent >= 0 and not self._parent.cells[number]:
                self._adopt(number, parent)
                state[number] = _HANGS * hangs
        else:
            self._advance(now)
            self._meet(number, parent, 0, _SLACK, hangs, self._feature_below(parent))
        state[number] = state[number] & _HANGS | _RESIDENT
        bucket, above = self._bucket_of(number), self._parent.cells[number] - 1
        bucket.add_resident(number, above)
        self._ranking.make_ready(bucket)
        if above >= 0:
            self._children.cells[above] += 1
        self._has_groups = self._has_groups or hangs
        if self._has_groups:
            self._settle(number)
        if self._ghosts > self._remember:
            self._forget(_FORGOTTEN_FOR_ONE)

    def remove(self, number: int) -> None:
        state = self._state.cells
        if not state[number] & _RESIDENT:
            return
        state[number] &= _HANGS
        bucket = self._bucket_of(number)
        for child in self._hung_on(number):
            self._move(child, ORPHANED)
        above = self._parent.cells[number] - 1
        if above >= 0:
            hangs = state[number] & _HANGS
            if hangs:
                self._unhang(number, above)
            left = self._children.cells[above] - 1
            self._children.cells[above] = left
            if not left and state[above] & _RESIDENT:
                self._ranking.make_ready(self._bucket_of(above))
                if hangs or bucket.kind == ORPHANED:
                    self._move(above, ORPHANED)
        if bucket.forgotten:
            state[number] = 0
            self._on_forgotten((number,))
            self._parent.cells[number] = 0
            self._names.drop_all((number, above) if above >= 0 else (number,))
            bucket.alive -= 1
            self._ranking.drop_empty(bucket)
        else:
            self._remember_it(number)

    def hold(self, number: int) -> None:
        if self._state.cells[number] & _RESIDENT:
            self._state.cells[number] |= _HELD

    def release(self, number: int) -> None:
        if self._state.cells[number] & _HELD:
            self._state.cells[number] ^= _HELD
            self._ranking.make_ready(self._bucket_of(number))

    # -- what to give up -------------------------------------------------------------------

    def admit(self, number: int, parent: int, now: float, hangs: bool = False) -> bool:
        if not self.is_warm or self._is_by_age:
            return True
        self._advance(now)
        is_ghost = number >= 0 and self._state.cells[number] & _GHOST
        worth = self._ranking.worth(self._cell_of(number if is_ghost else -1, hangs, parent))
        for bucket in self._ranking.candidates():
            if self._trim(bucket):
                return self._ranking.worth(self._ranking.cell(bucket)) < worth
        return True

    def chance(self, number: int, now: float) -> float | None:
        if not self.is_warm:
            return None
        self._advance(now)
        if self._chances is None:
            self._chances = self._table.chances().ravel().tolist()
        return self._chances[self._cell_of(number)]

    def victims(self, count: int, evictable: Callable[[int], bool], now: float) -> list[int]:
        self._advance(now)
        state, parents, children = self._state.cells, self._parent.cells, self._children.cells
        found: dict[int, None] = {}
        going: dict[int, int] = {}  # children among the found, by parent

        def is_leaf(number: int) -> bool:
            if state[number] & (_RESIDENT | _HELD) != _RESIDENT:
                return False
            left: int = children[number] - going.get(number, 0)
            return left <= 0

        def take(number: int) -> bool:
            """True if those are enough."""
            if number not in found and evictable(number):
                found[number] = None
                above = parents[number] - 1
                if above >= 0:
                    going[above] = going.get(above, 0) + 1
            return len(found) >= count

        spent = []  # until a child of one of their blocks is removed, or one of them is released
        for bucket in self._ranking.candidates():
            if len(found) >= count:
                break
            self._trim(bucket)
            of, own, able = self._bucket.cells, bucket.number, False
            for number in bucket.residents:
                if of[number] == own and is_leaf(number):
                    able = True
                    if take(number):
                        break
            if not able:
                spent.append(bucket)
        for bucket in spent:
            self._ranking.make_unready(bucket)
        pending = list(found)  # if those are not enough: the blocks that became leaves
        for number in pending:
            if len(found) >= count:
                break
            above = parents[number] - 1
            if above >= 0 and above not in found and is_leaf(above):
                take(above)
                pending += [above] if above in found else []
        return list(found)

    def _trim(self, bucket: AgeBucket) -> bool:
        """Drops blocks that left from the front. False if no block is left."""
        state, of, own = self._state.cells, self._bucket.cells, bucket.number
        here = (n for n, b in enumerate(bucket.residents) if of[b] == own and state[b] & _RESIDENT)
        bucket.drop_residents(next(here, len(bucket.residents)))
        return bool(bucket.residents)

    # -- names -----------------------------------------------------------------------------

    def is_known(self, number: int) -> bool:
        return bool(self._state.cells[number] & _KNOWN)

    def _meet(
        self,
        number: int,
        parent: int,
        ended: int,
        slack: float = 0.0,
        hangs: bool = False,
        feature: int = 0,
    ) -> None:
        """A number is used for the first time, up to ``slack`` seconds ago."""
        self._names.keep(number)
        self._state.cells[number] = _HANGS * hangs
        self._used.cells[number] = 1
        if parent >= 0:
            self._adopt(number, parent)
        self._enter(number, self._ranking.join(class_of(1, ended, hangs, feature), slack))

    def _adopt(self, number: int, parent: int) -> None:
        self._names.keep(parent)
        self._parent.cells[number] = parent + 1

    def _remember_it(self, number: int) -> None:
        self._state.cells[number] |= _GHOST
        self._ghosts += 1

    def _forget(self, left: int) -> None:
        """Forgets up to ``left`` of the oldest names beyond what may be remembered."""
        state, of, parents = self._state.cells, self._bucket.cells, self._parent.cells
        memory = self._ranking.memory
        going: list[int] = []
        above: list[int] = []
        while self._ghosts > self._remember and memory and left > 0:
            bucket = self._ranking.by_number[next(iter(memory))]
            bucket.forgotten = True
            names = bucket.names[-left:]
            del bucket.names[-left:]
            left -= len(names)
            for number in names:
                if of[number] == bucket.number and state[number] & _GHOST:
                    self._ghosts -= 1
                    bucket.alive -= 1
                    state[number] = 0
                    going.append(number)
                    if parents[number]:
                        above.append(parents[number] - 1)
                        parents[number] = 0
            if not bucket.names:
                del memory[bucket.number]
            self._ranking.drop_empty(bucket)
        self._on_forgotten(going)
        self._names.drop_all(going + above)

    # -- uses ------------------------------------------------------------------------------

    def _bucket_of(self, number: int) -> AgeBucket:
        number_of_bucket: int = self._bucket.cells[number]
        return self._ranking.by_number[number_of_bucket]

    def _enter(self, number: int, bucket: AgeBucket) -> None:
        """A known block belongs to that bucket now."""
        self._bucket.cells[number] = bucket.number
        bucket.names.append(number)
        if self._state.cells[number] & _RESIDENT:
            bucket.add_resident(number, self._parent.cells[number] - 1)
            self._ranking.make_ready(bucket)

    def _note_return(self) -> None:
        self._returns += self._returned_at != self._ranking.now
        self._returned_at = self._ranking.now

    def _move(self, number: int, kind: int) -> None:
        """Puts a known block into another class, as if it was used now."""
        old = self._bucket_of(number)
        old.alive -= 1
        self._enter(number, self._ranking.join(kind))
        self._ranking.drop_empty(old)

    def own_part(self, chain: Sequence[int]) -> int:
        """Where a chain's own part begins: behind its last block with children in two chains."""
        children = self._children.cells
        places = range(len(chain) - 1, 0, -1)
        return next((place for place in places if children[chain[place - 1]] > 1), 0)

    def leading_residents(self, chain: Sequence[int]) -> int:
        """How many blocks of a chain are resident, before the first that is not."""
        state = self._state.cells
        absent = (place for place, n in enumerate(chain) if not state[n] & _RESIDENT)
        return next(absent, len(chain))

    def _continues(self, chain: Sequence[int]) -> tuple[int, float | None]:
        """The number of leading blocks that are known, and the seconds since the last one was used;
        None if that is the root, which many have in common, or there is none."""
        state = self._state.cells
        new = (place for place, number in enumerate(chain) if not state[number] & _KNOWN)
        count = next(new, len(chain))
        deepest = count - 1 - (count == len(chain))  # the last may end many chains
        if deepest < 1:
            return count, None
        return count, self._ranking.now - self._bucket_of(chain[deepest]).born

    def _use_chain(self, chain: Sequence[int], advice: Advice | None) -> None:
        """Records a use of each block of a chain, or its first use: the innermost loop, written
        out."""
        known_blocks, pause = self._continues(chain)
        plain = own_feature = feature(len(chain) - known_blocks, pause)
        begin = len(chain)
        if advice is not None and advice.kind:  # which is about what no other chain shares
            begin, own_feature = self.own_part(chain), feature(0, None, advice.kind)
        state, parents, used = self._state.cells, self._parent.cells, self._used.cells
        of, buckets, ranking = self._bucket.cells, self._ranking.by_number, self._ranking
        entered, uses_seen = self._table.entered, self._table.used
        last, parent = len(chain) - 1, -1
        kind, bucket, is_ready = -1, None, False
        met: list[int] = []  # and parents: to be kept
        for index, number in enumerate(chain):
            known, old = state[number], None
            if known & _KNOWN:
                if parent >= 0 and not parents[number]:
                    self._adopt(number, parent)
                    if known & _RESIDENT:
                        self._children.cells[parent] += 1
                old = buckets[of[number]]
                uses_seen[old.kind][old.bin] += 1.0
                old.alive -= 1
                uses = used[number]
                if uses < 255:
                    uses += 1
                self._note_return()
            else:
                met.append(number)
                if parent >= 0:
                    met.append(parent)
                    parents[number] = parent + 1
                state[number] = known = _GHOST
                uses = 1
                self._ghosts += 1
            used[number] = uses
            here = plain if index < begin else own_feature
            now_kind = class_of(uses, int(index == last), bool(known & _HANGS), here)
            if now_kind == kind and bucket is not None and len(bucket.names) < MOST_MEMBERS:
                bucket.alive += 1
                entered[kind][0] += 1.0
            else:
                kind, bucket = now_kind, ranking.join(now_kind)
                is_ready = False
            of[number] = bucket.number
            bucket.names.append(number)
            if known & _RESIDENT:
                bucket.add_resident(number, parents[number] - 1)
                if not is_ready:
                    ranking.make_ready(bucket)
                    is_ready = True
            if old is not None and not old.alive:
                ranking.drop_empty(old)
            parent = number
        self._names.keep_all(met)

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
            self._hung_next.cells[number] = self._hung.cells[above]
            self._hung.cells[above] = number + 1
            if not is_here:
                self._move(number, ORPHANED)

    def _hung_on(self, number: int) -> Iterator[int]:
        """Resident blocks that hang on it, the latest first."""
        following = self._hung.cells[number]
        while following:
            child = following - 1
            following = self._hung_next.cells[child]
            yield child

    def _unhang(self, number: int, parent: int) -> None:
        following, nexts = self._hung.cells, self._hung_next.cells
        if following[parent] == number + 1:
            following[parent] = nexts[number]
            return
        before = next(child for child in self._hung_on(parent) if nexts[child] == number + 1)
        nexts[before] = nexts[number]

    def _revive(self, number: int) -> None:
        """The block may serve hits again."""
        if self._bucket_of(number).kind == ORPHANED:
            uses = self._used.cells[number]
            hangs = bool(self._state.cells[number] & _HANGS)
            self._move(number, class_of(uses, int(uses > 1), hangs))

    # -- learning --------------------------------------------------------------------------

    def _cell_of(self, number: int, hangs: bool = False, parent: int = -1) -> int:
        """The cell of a block; of one that is not known, or was given up as orphaned: a new
        one's."""
        if number >= 0 and self.is_known(number):
            bucket = self._bucket_of(number)
            if bucket.kind != ORPHANED:
                return self._ranking.cell(bucket)
        return class_of(1, 0, hangs, self._feature_below(parent)) * self._table.bins.count

    def _feature_below(self, parent: int) -> int:
        """The feature of a block that no request used yet: its parent's."""
        if parent < 0 or not self.is_known(parent):
            return 0
        return feature_of(self._bucket_of(parent).kind)

    def _learn(self, fade: float = 1.0) -> None:
        evidence = _EVIDENCE * self._mean_chain
        seen = sum(map(sum, self._table.used))
        self.is_warm = self._returns >= _RETURNS and seen >= evidence
        self._table.refresh(evidence, self._mean_chain, fade)
        self._chances = None
        self._is_by_age = self._prefers_age(self._mean_chain)
        self._ranking.rank(self._table.worth(), self._is_by_age, ORPHANED)
        self._refresh_at = self._uses + int(_REFRESH * self._mean_chain) + 1
