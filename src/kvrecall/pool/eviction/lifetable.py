"""Life tables: learned while serving, they predict when blocks come back and thus their value."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_LEAST, _MOST = 1e-5, 0.98  # no bin is known to use up less or more than these shares
Floats = npt.NDArray[np.float64]


class AgeBins:
    """Ages since last use, in seconds, cut into bins of equal ratio.

    Bin 0 is [0, ``first``), each further one is wider by ``2 ** (1 / per_octave)``; the last has
    no end.
    """

    def __init__(self, first: float = 1.0, per_octave: int = 3, count: int = 48) -> None:
        self.count = count
        self.starts: list[float] = [0.0] + [
            first * 2.0 ** (i / per_octave) for i in range(count - 1)
        ]
        self.ends: list[float] = [*self.starts[1:], math.inf]
        last = self.starts[-1]
        self.widths: Floats = np.diff(
            np.array([*self.starts, last * 2.0 ** (1.0 / per_octave)], dtype=np.float64)
        )


class LifeTable:
    """For each class of blocks and bin of age: how many blocks reached that age, and how many were
    used there.

    ``entered[c][b]`` and ``used[c][b]`` are counts of blocks, faded over time so that old habits
    are forgotten. The owner adds to them directly (this is the innermost loop); ``worth`` turns
    them into ranks.
    """

    def __init__(self, classes: int, bins: AgeBins, levels: Sequence[npt.NDArray[np.intp]]) -> None:
        self.bins = bins
        self._levels = levels
        self.entered: list[list[float]] = [[0.0] * bins.count for _ in range(classes)]
        self.used: list[list[float]] = [[0.0] * bins.count for _ in range(classes)]

    def fade(self, factor: float) -> None:
        """Multiplies all counts by ``factor``."""
        for table in (self.entered, self.used):
            table[:] = (np.asarray(table) * factor).tolist()

    def worth(self, weight: float) -> Floats:
        """Hits per second of occupied space of a block of each class at the start of each age bin.

        Shape (classes, bins). It is the best ratio, over all ages at which the block could be
        evicted, of P(used before then) / E[seconds kept until used or evicted]: the Gittins index
        of a job that pays 1 when done. LHD (Beckmann et al., NSDI 2018) ranks by the same ratio
        without the choice of when to evict. Unlike a rate it accounts for blocks worth waiting for:
        a block one think time away from its next turn ranks above one that was used just now.

        Where evidence is thin, a bin leans with the weight of ``weight`` blocks on two priors: its
        class relates to all blocks at this age as it does at all ages; and all blocks at this age
        behave as they did one bin younger, starting from a tenth used per bin. Unseen ages are thus
        assumed to fade with age; but not from the first bin to the second, which is a quarter as
        wide, so no block should be ranked by these priors alone.
        """
        return _gittins(self._hazard(weight), self.bins.widths)

    def chances(self, weight: float) -> Floats:
        """The probability that a block of each class, at the start of each age bin, is used before
        the end of the last bin. Shape (classes, bins); uses the priors of ``worth``."""
        unused = np.cumprod((1.0 - self._hazard(weight))[:, ::-1], axis=1)[:, ::-1]
        return np.asarray(1.0 - unused, dtype=np.float64)

    def _hazard(self, weight: float) -> Floats:
        """Shape (classes, bins): the probability that a block that reached the bin is used in
        it."""
        used, entered = np.asarray(self.used), np.asarray(self.entered)
        usual = np.empty(self.bins.count)
        share = 0.1
        for index, (hits, all_) in enumerate(zip(used.sum(0), entered.sum(0), strict=True)):
            usual[index] = share = (hits + weight * share) / (all_ + weight)
        hazard = np.broadcast_to(usual, used.shape)
        for of in self._levels:
            groups = int(of.max()) + 1
            hits, all_, prior = (np.zeros((groups, self.bins.count)) for _ in range(3))
            np.add.at(hits, of, used)
            np.add.at(all_, of, entered)
            prior[of] = hazard  # the same for all classes of a group
            ratio = (hits.sum(1) + weight) / ((all_ * prior).sum(1) + weight)
            expected = np.minimum(ratio[:, None] * prior, _MOST)
            hazard = ((hits + weight * expected) / (all_ + weight))[of]
        return np.asarray(np.clip(hazard, _LEAST, _MOST), dtype=np.float64)


def _gittins(hazard: Floats, widths: Floats) -> Floats:
    """Index per (class, bin) of P(used in bin | reached it) and the bins' widths in seconds."""
    classes, bins = hazard.shape
    alive = np.ones((classes, bins + 1))
    np.cumprod(1.0 - hazard, axis=1, out=alive[:, 1:])
    np.maximum(alive, 1e-12, out=alive)  # older than that: no block is left, worth nothing
    kept = np.zeros((classes, bins + 1))
    np.cumsum((alive[:, :-1] + alive[:, 1:]) * 0.5 * widths, axis=1, out=kept[:, 1:])
    hits = alive[:, :-1, None] - alive[:, None, 1:]
    room = kept[:, None, 1:] - kept[:, :-1, None]
    later = np.triu(np.ones((bins, bins), dtype=bool))
    ratio = np.where(later, hits / np.where(later, room, 1.0), 0.0)
    index: Floats = ratio.max(axis=2)
    return index
