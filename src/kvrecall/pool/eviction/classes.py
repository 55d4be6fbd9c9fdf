"""Classes of blocks: what the hazard policy knows of a block at its last use."""

from __future__ import annotations

from bisect import bisect_left

import numpy as np
import numpy.typing as npt

from kvrecall.pool.hints import KINDS

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
