"""Life tables of classes of blocks: learned while serving, they predict when blocks come back and
thus their value.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvrecall.pool.hints import KINDS

_LEAST, _MOST = 1e-5, 0.98  # no bin is known to use up less or more than these shares
_SMOOTHED = 4  # times that counts are smoothed over neighbouring bins
_LEANING = 2.0  # of the weight of thin evidence: of that for one class, against its group
_SPREAD = 0.4  # variance of a smoothed count, over that of chance: of chains of unequal length
Floats = npt.NDArray[np.float64]

# What the hazard policy knows of a block at its last use:
_USES = (0, 0, 1, 2, 3, 3, 4, 4, 4, 4, 5)  # uses -> group; more uses: the last
_GROUPS = 6
_FRESH = (3, 15)  # blocks that the request added to what was known, up to which
_PAUSES = (32.0, 128.0)  # seconds since the use that it continues, up to which
_PLAIN = (len(_FRESH) + 1) * (len(_PAUSES) + 2)  # features without a hint
_FEATURES = _PLAIN + KINDS - 1
# Of chains, by group and feature; the last block of a request; what hangs on a chain,
_ENDED = _GROUPS * _FEATURES
_HANGING = _ENDED + _GROUPS
INNER = _HANGING + _GROUPS  # what hangs there and was neither used nor at the end of a request,
ORPHANED = INNER + 1  # and what can serve no hit as things are.
CLASSES = ORPHANED + 1


def feature(fresh: int, pause: float | None, hint: int = 0) -> int:
    """What is known of a request: the number of blocks that it added to a known chain, the seconds
    since the use that it continues (None: it continues none), and the kind of a believed hint."""
    if hint:
        return _PLAIN + hint - 1
    length = bisect_left(_FRESH, fresh) * (len(_PAUSES) + 2)
    return length if pause is None else length + 1 + bisect_left(_PAUSES, pause)


def class_of(uses: int, ended: int, hangs: bool, feature: int = 0) -> int:
    """The class of a block that was used ``uses`` times, was the last one of its request or not
    (of what hangs: was used or is at a request's end), and hangs on a chain or not."""
    group = _USES[uses] if uses < len(_USES) else _USES[-1]
    if hangs:
        return _HANGING + group if ended else INNER
    if ended and feature < _PLAIN:
        return _ENDED + group
    return group * _FEATURES + feature


def feature_of(kind: int) -> int:
    """The feature of a class; 0 of those without."""
    return kind % _FEATURES if kind < _ENDED else 0


def levels() -> tuple[npt.NDArray[np.intp], ...]:
    """Groupings of the classes, the coarse ones first, each refined by the next: by hint, or by
    uses if there is none; by uses, and length or hint; all apart."""
    kinds = np.arange(CLASSES)
    in_chain = kinds < _ENDED
    group, own = kinds // _FEATURES, kinds % _FEATURES
    length = np.where(own < _PLAIN, own // (len(_PAUSES) + 2), own)
    coarse = np.where(own < _PLAIN, group, _GROUPS + own)
    coarse = np.where(in_chain, coarse, CLASSES + kinds)
    middle = np.where(in_chain, group * _FEATURES + length, CLASSES + kinds)
    return tuple(np.unique(each, return_inverse=True)[1] for each in (coarse, middle, kinds))


class AgeBins:
    """Ages since last use, in seconds, cut into bins of equal ratio: bin 0 is [0, 1), each further
    one is wider by ``2 ** (1 / 3)``; the last has no end."""

    count = 48

    def __init__(self) -> None:
        self.starts = [0.0, *(2.0 ** (i / 3) for i in range(self.count - 1))]
        self.ends = [*self.starts[1:], math.inf]
        end = self.starts[-1] * 2.0 ** (1.0 / 3)
        self.widths: Floats = np.diff(np.array([*self.starts, end], dtype=np.float64))


class LifeTable:
    """For each class of blocks and bin of age: how many blocks reached that age, and how many were
    used there.

    ``entered[c][b]`` and ``used[c][b]`` are counts of blocks, faded over time so that old habits
    are forgotten. The owner adds to them directly (this is the innermost loop), and calls
    ``refresh`` now and then; ``worth`` turns what it found into ranks.

    Classes are grouped by ``levels``, the coarse groupings first: a group with little evidence is
    taken to behave as the coarser one does.
    """

    def __init__(self, classes: int, bins: AgeBins, levels: Sequence[npt.NDArray[np.intp]]) -> None:
        self.bins = bins
        self.entered: list[list[float]] = [[0.0] * bins.count for _ in range(classes)]
        self.used: list[list[float]] = [[0.0] * bins.count for _ in range(classes)]
        self._levels = tuple(_Level(of, bins.count) for of in levels)
        self._hazard: Floats = np.full((classes, bins.count), _LEAST)

    def refresh(self, weight: float, chain: float, factor: float = 1.0) -> None:
        """Learns from the counts since the last call, and multiplies all by ``factor``.

        Counts are smoothed over neighbouring ages. Where evidence is thin, a bin leans with the
        weight of ``weight`` blocks on two priors: its group relates to the coarser one at this age
        as it does at all ages; and all blocks at this age behave as they did one bin younger,
        starting from a tenth used per bin. Unseen ages are thus assumed to fade with age; but not
        from the first bin to the second, which is a quarter as wide, so no block should be ranked
        by these priors alone.

        ``chain``: the blocks of a request, on average, which come back together or not at all. A
        group departs from the coarser one only by what is more than chance among so many chains.
        """
        counts = np.asarray((self.used, self.entered))
        if factor != 1.0:
            counts = counts * factor
            self.used, self.entered = counts.tolist()
        used, entered = counts
        usual = np.empty(self.bins.count)
        share = 0.1
        for index, (hits, all_) in enumerate(_smooth(counts.sum(1)).T):
            usual[index] = share = (hits + weight * share) / (all_ + weight)
        hazard = np.broadcast_to(np.clip(usual, _LEAST, _MOST), used.shape)
        for index, level in enumerate(self._levels):
            hazard = level.refine(hazard, used, entered, _LEANING * weight, chain, index > 0)
        self._hazard = hazard

    def worth(self) -> Floats:
        """Hits per second of occupied space of a block of each class at the start of each age bin.

        Shape (classes, bins). It is the best ratio, over all ages at which the block could be
        evicted, of P(used before then) / E[seconds kept until used or evicted]: the Gittins index
        of a job that pays 1 when done. LHD (Beckmann et al., NSDI 2018) ranks by the same ratio
        without the choice of when to evict. Unlike a rate it accounts for blocks worth waiting for:
        a block one think time away from its next turn ranks above one that was used just now.
        """
        hazard, widths = self._hazard, self.bins.widths
        classes, bins = hazard.shape  # the arrays below have classes side by side, which is faster
        alive = np.ones((bins + 1, classes))
        np.cumprod(1.0 - hazard.T, axis=0, out=alive[1:])
        np.maximum(alive, 1e-12, out=alive)  # older than that: no block is left, worth nothing
        kept = np.zeros((bins + 1, classes))
        np.cumsum((alive[:-1] + alive[1:]) * 0.5 * widths[:, None], axis=0, out=kept[1:])
        index: Floats = np.empty((classes, bins))
        for age in range(bins):
            hits = alive[age] - alive[age + 1 :]
            index[:, age] = (hits / (kept[age + 1 :] - kept[age])).max(axis=0)
        return index

    def chances(self) -> Floats:
        """The probability that a block of each class, at the start of each age bin, is used before
        the end of the last bin. Shape (classes, bins)."""
        unused = np.cumprod((1.0 - self._hazard)[:, ::-1], axis=1)[:, ::-1]
        return np.asarray(1.0 - unused, dtype=np.float64)


class _Level:
    def __init__(self, of: npt.NDArray[np.intp], bins: int) -> None:
        """``of``: the group of each class."""
        self._of = of
        self._size = np.bincount(of)
        self._cells = (of[:, None] * bins + np.arange(bins)).ravel()

    def _sums(self, counts: Floats) -> Floats:
        """The counts of each group's classes together (groups, bins), added in the order of the
        classes. No product of matrices: NumPy's BLAS makes it with threads that wait for each
        other by spinning, for tens of milliseconds on busy processors."""
        sums = np.bincount(self._cells, counts.ravel()).astype(np.float64, copy=False)
        return sums.reshape(len(self._size), -1)

    def refine(
        self,
        coarse: Floats,
        used: Floats,
        entered: Floats,
        weight: float,
        chain: float,
        by_age: bool,
    ) -> Floats:
        """The probabilities of the coarser grouping, refined; ``by_age``: also what an age adds to
        the ratio of all ages must be more than chance. Shapes (classes, bins)."""
        hits, all_ = self._sums(used), self._sums(entered)
        prior = self._sums(coarse) / self._size[:, None]  # the same for all classes of a group
        found, due = hits.sum(1), (all_ * prior).sum(1)
        ratio = (found + weight) / (due + weight)
        ratio = 1.0 + _beyond_chance(found - due, due * chain) * (ratio - 1.0)
        hits, all_ = _smooth(np.stack((hits, all_)))
        expected = np.minimum(ratio[:, None] * prior, _MOST)
        fine = (hits + weight * expected) / (all_ + weight)
        if by_age:
            due = all_ * expected
            spread = _SPREAD * chain * due * (1.0 - expected)
            fine = expected + _beyond_chance(hits - due, spread) * (fine - expected)
        return np.asarray(np.clip(fine, _LEAST, _MOST)[self._of], dtype=np.float64)


def _smooth(counts: Floats) -> Floats:
    """Counts spread over neighbouring bins, the last axis: a binomial kernel of nine bins."""
    for _ in range(_SMOOTHED):
        spread = 0.5 * counts
        spread[..., :-1] += 0.25 * counts[..., 1:]
        spread[..., 1:] += 0.25 * counts[..., :-1]
        spread[..., 0] += 0.25 * counts[..., 0]
        spread[..., -1] += 0.25 * counts[..., -1]
        counts = spread
    return counts


def _beyond_chance(deviation: Floats, variance: Floats) -> Floats:
    """What to keep of a deviation: 1 - 1/z², z in standard deviations, and nothing below one
    (the positive part of James & Stein's estimator, 1961, of a single mean)."""
    kept: Floats = 1.0 - np.maximum(variance, 1e-9) / np.maximum(deviation * deviation, 1e-9)
    return np.maximum(kept, 0.0)
