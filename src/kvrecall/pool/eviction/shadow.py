"""LRU on a sample of the blocks, which shows whether a learned order is worth it."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence

_SAMPLE = 4096  # blocks in the shadow cache, at most
_TRIAL = 16  # looks until the two are compared, and until it was filled so many times:
_TURNS = 2.0  # before, it shows what was kept in another order
_CHANCE = 1.0  # standard deviations of the difference: what may be lost by chance
_WORTH = 0.002  # of the shadow's hits: a smaller difference does not matter
_FADE = 0.98  # of the hits, with each further look
_FIRST_PAUSE = 80  # looks for which the loser rests; twice as long each time that it loses again
_LONGEST_PAUSE = 1024


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
