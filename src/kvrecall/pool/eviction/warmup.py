"""A learned policy that is LRU until it has learned something, and wherever LRU hits more."""

from __future__ import annotations

import heapq
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from typing import ClassVar

from kvrecall.pool.eviction.base import EvictionPolicy, RequestUse
from kvrecall.pool.eviction.hazard import HazardPolicy
from kvrecall.pool.eviction.queues import LruPolicy, QueueLinks
from kvrecall.pool.hints import Advice

_SAMPLE = 4096  # blocks in the shadow cache, at most
_TRIAL = 16  # looks until the two are compared, and until it was filled so many times:
_TURNS = 2.0  # before, it shows what was kept in another order
_CHANCE = 1.0  # standard deviations of the difference: what may be lost by chance
_WORTH = 0.002  # of the shadow's hits: a smaller difference does not matter
_FADE = 0.98  # of the hits, with each further look
_FIRST_PAUSE = 80  # looks for which the loser rests; twice as long each time that it loses again
_LONGEST_PAUSE = 1024
_PINNED_SHARE = 0.5  # of a tier: what the pins of all tenants' hints may keep


class WarmUp(EvictionPolicy):
    """``hazard`` as a tier uses it. Until ``HazardPolicy`` is warm this is ``LruPolicy``, to the
    block, and admits all. From then on the blocks are ranked by what was learned; by age, while a
    shadow cache shows that LRU would hit more. What hints pin is never a victim.
    """

    learns: ClassVar[bool] = True

    def __init__(
        self, capacity_blocks: int, links: QueueLinks, remember: int | None = None
    ) -> None:
        self._shadow = ShadowCache(capacity_blocks)
        self._pins = HintPins(capacity_blocks)
        self._ranked = HazardPolicy(
            capacity_blocks, links.names, remember, self._shadow.compare, self._forget
        )
        # Gone once the other is warm, and so it keeps no names.
        self._lru: LruPolicy | None = LruPolicy(links, keeps=False)
        self._orders: tuple[EvictionPolicy, ...] = (self._lru, self._ranked)
        self._held: set[int] = set()

    def _forget(self, numbers: Sequence[int]) -> None:
        self._shadow.forget(numbers)
        self._pins.drop(numbers)

    def insert(self, number: int, parent: int, now: float, hangs: bool = False) -> None:
        if hangs:
            self._shadow.end()
        for order in self._orders:
            order.insert(number, parent, now, hangs)
        if number in self._pins:
            self._hold(number)

    def access(self, use: RequestUse[int]) -> None:
        chain, advice = use.chain, use.advice
        self._end_pins(use.now)
        pinned: Sequence[int] = ()
        self._ranked.maintain(use.now)
        if chain:
            self._shadow.use(chain, self._ranked.leading_residents(chain))
            if advice is not None and advice.pin_s:
                pinned = chain[self._ranked.own_part(chain) :]
        for order in reversed(self._orders):
            order.access(use)
        if self._ranked.is_warm:
            self._lru, self._orders = None, (self._ranked,)
        if advice is not None and pinned:
            known = [number for number in pinned if self._ranked.is_known(number)]
            for number in self._pins.add(known, use.now, advice):
                self._hold(number)

    def remove(self, number: int) -> None:
        self._pins.drop((number,))
        self._held.discard(number)
        for order in self._orders:
            order.remove(number)

    def hold(self, number: int) -> None:
        self._held.add(number)
        self._hold(number)

    def _hold(self, number: int) -> None:
        for order in self._orders:
            order.hold(number)

    def release(self, number: int) -> None:
        self._held.discard(number)
        self._release(number)

    def _release(self, number: int) -> None:
        if number not in self._held and number not in self._pins:
            for order in self._orders:
                order.release(number)

    def _end_pins(self, now: float) -> None:
        for number in self._pins.end(now):
            self._release(number)

    def victims(self, count: int, evictable: Callable[[int], bool], now: float) -> list[int]:
        self._end_pins(now)
        if self._lru is None:
            return self._ranked.victims(count, evictable, now)
        pins = self._pins
        if not len(pins):
            return self._lru.victims(count, evictable, now)
        # Used since it was pinned, a block is in the queue again.
        return self._lru.victims(count, lambda n: n not in pins and evictable(n), now)

    def admit(self, number: int, parent: int, now: float, hangs: bool = False) -> bool:
        return number in self._pins or self._ranked.admit(number, parent, now, hangs)

    def chance(self, number: int, now: float) -> float | None:
        return self._ranked.chance(number, now)


class HintPins:
    """The blocks that hints pin for a time, up to a share of the tier for each tenant, and half of
    it for all."""

    def __init__(self, capacity_blocks: int) -> None:
        self._capacity = capacity_blocks
        self._pinned: dict[int, tuple[float, str]] = {}  # until when, and whose
        self._by_tenant: Counter[str] = Counter()
        self._ends: list[tuple[float, int, list[int]]] = []  # a heap
        self._count = 0

    def __len__(self) -> int:
        return len(self._pinned)

    def __contains__(self, number: int) -> bool:
        return number in self._pinned

    def add(self, numbers: Sequence[int], now: float, advice: Advice) -> list[int]:
        """Pins blocks, the first of them as far as there is room. Returns those."""
        tenant, until = advice.tenant, now + advice.pin_s
        left = int(min(
            self._capacity * advice.share - self._by_tenant[tenant],
            self._capacity * _PINNED_SHARE - len(self._pinned),
        ))  # fmt: skip
        pinned: list[int] = []
        for number in numbers:
            if number in self._pinned:
                end, owner = self._pinned[number]
                self._pinned[number] = max(until, end), owner
            elif left > 0:
                left -= 1
                self._pinned[number] = until, tenant
                self._by_tenant[tenant] += 1
            else:
                break
            pinned.append(number)
        if pinned:
            self._count += 1
            heapq.heappush(self._ends, (until, self._count, pinned))
        return pinned

    def drop(self, numbers: Sequence[int]) -> None:
        for number in numbers if self._pinned else ():
            if number in self._pinned:
                _, tenant = self._pinned.pop(number)
                self._by_tenant[tenant] -= 1
                if not self._by_tenant[tenant]:
                    del self._by_tenant[tenant]

    def end(self, now: float) -> list[int]:
        """Ends the pins that are past; returns their blocks."""
        ended: list[int] = []
        while self._ends and self._ends[0][0] <= now:
            for number in heapq.heappop(self._ends)[2]:
                if number in self._pinned and self._pinned[number][0] <= now:
                    ended.append(number)
                    self.drop((number,))
        return ended


class ShadowCache:
    """An LRU tier of one block in ``every`` (SHARDS, Waldspurger et al., FAST 2015), and the hits
    of both on these blocks. Of a tier of up to 4,096 blocks it is LRU, to the block. It knows
    chains alone, so it is no measure for a tier that also holds what hangs on them."""

    def __init__(self, capacity_blocks: int) -> None:
        self.every = -(-capacity_blocks // _SAMPLE)
        self._room = max(1, capacity_blocks // self.every)
        self._resident: OrderedDict[int, None] = OrderedDict()  # the oldest first
        self._own_hits = self._shadow_hits = 0.0
        self._apart = 0.0  # the sum of squares of the difference, request by request
        self._filled = -self._room  # blocks that entered it, once it was full
        self._left = _TRIAL
        self._pause = _FIRST_PAUSE
        self.is_better = False
        """Whether the learned order should not be used at present."""
        self._is_over = False

    def end(self) -> None:
        """The learned order is used from now on."""
        self._is_over, self.is_better = True, False
        self._resident.clear()

    def use(self, chain: Sequence[int], hits: int) -> None:
        """A request used ``chain``, of which the first ``hits`` blocks were resident."""
        if self._is_over:
            return
        every, resident = self.every, self._resident
        if every > 1:
            hits = sum(not number % every for number in chain[:hits])
            chain = [number for number in chain if not number % every]
        if not self.is_better:
            found = 0
            for number in chain:
                if number not in resident:
                    break
                found += 1
            self._own_hits += hits
            self._shadow_hits += found
            self._apart += (found - hits) ** 2
        before = len(resident)
        for number in reversed(chain):
            resident[number] = None
            resident.move_to_end(number)
        self._filled += len(resident) - before
        while len(resident) > self._room:
            resident.popitem(last=False)

    def forget(self, numbers: Sequence[int]) -> None:
        """The numbers will be other blocks'."""
        for number in numbers:
            if not number % self.every:
                self._resident.pop(number, None)

    def compare(self, chain: float) -> bool:
        """Whether the learned order should not be used at present, decided now and then. The two
        are compared request by request (a paired test), since most requests hit the same in both; a
        lead of one ``chain``, the blocks of a request, is none. After a pause the comparison begins
        anew."""
        self._left -= 1
        is_early = not self.is_better and self._filled < _TURNS * self._room
        if self._left > 0 or is_early or self._is_over:
            return self.is_better
        lead = self._shadow_hits - self._own_hits - chain / self.every
        if self.is_better:
            self.is_better, self._left, keep = False, _TRIAL, 0.0
            self._filled = 0
        elif lead > max(_CHANCE * math.sqrt(self._apart), _WORTH * self._shadow_hits):
            self.is_better, self._left, keep = True, self._pause, 1.0
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        else:
            self._left, keep = 1, _FADE
            if lead < 0:
                self._pause = max(self._pause // 2, _FIRST_PAUSE)
        self._own_hits, self._shadow_hits = keep * self._own_hits, keep * self._shadow_hits
        self._apart *= keep
        return self.is_better
