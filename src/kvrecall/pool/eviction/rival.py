"""The rival: recency on a sample of the blocks, which shows whether a learned order is worth it."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence

_SAMPLE = 4096  # blocks in the rival's tier, at most
_TRIAL = 6  # looks until the two are compared
_CHANCE = 0.35  # standard deviations of the hits: what may be lost by chance
_FADE = 0.99  # of the hits, with each further look
_FIRST_PAUSE = 8  # looks for which the loser rests; twice as long each time that it loses again
_LONGEST_PAUSE = 512


class Rival:
    """An LRU tier of one block in ``every`` (SHARDS, Waldspurger et al., FAST 2015), and the hits
    of both on these blocks. Of a tier of up to 4,096 blocks it is LRU, to the block. It knows
    chains alone, so it is no measure for a tier that also holds what hangs on them."""

    def __init__(self, capacity_blocks: int) -> None:
        self.every = -(-capacity_blocks // _SAMPLE)
        self._room = max(1, capacity_blocks // self.every)
        self._resident: OrderedDict[int, None] = OrderedDict()  # the oldest first
        self._ours = self._theirs = 0.0
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
            self._ours += hits
            for number in chain:
                if number not in resident:
                    break
                self._theirs += 1
        for number in reversed(chain):
            resident[number] = None
            resident.move_to_end(number)
        while len(resident) > self._room:
            resident.popitem(last=False)

    def forget(self, numbers: Sequence[int]) -> None:
        """The numbers will be other blocks'."""
        for number in numbers:
            if not number % self.every:
                self._resident.pop(number, None)

    def look(self, chain: float) -> None:
        """Decides, now and then; ``chain``: the blocks of a request, on average, which hit or miss
        together. What the learned order won or lost counts half after a pause."""
        self._left -= 1
        if self._left > 0 or self._is_over:
            return
        if self.is_better:
            self.is_better, self._left, keep = False, _TRIAL, 0.5
        elif self._theirs - self._ours > _CHANCE * math.sqrt(self._theirs * chain / self.every):
            self.is_better, self._left, keep = True, self._pause, 1.0
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        else:
            self._left, keep = 1, _FADE
            self._pause = max(self._pause // 2, _FIRST_PAUSE)
        self._ours, self._theirs = keep * self._ours, keep * self._theirs
