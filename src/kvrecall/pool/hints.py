"""Hints: what clients say about the return of their blocks, believed as far as it came true."""

from __future__ import annotations

import heapq
import reprlib
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvrecall.block import BlockKey, Tenant

MAX_SECONDS = 86_400.0
"""The longest time that a hint may name."""

_HORIZON_S = 900.0  # "comes back", without a time, and "not again" are about so many seconds
_DUE_S = (8.0, 32.0, 128.0, 512.0)  # edges of the classes of "in about N seconds"
_EARLY, _LATE = 0.25, 4.0  # of N: between them it came true
_SLACK_S = 5.0  # and this much later
_PRIOR = 4.0  # outcomes that a new tenant has to its credit, half of them false
_FADE = 0.98  # of a tenant's outcomes, with each new one: half after 34
_BELIEVED = 0.6  # share that must have come true, before a tenant's hints make classes
_OPEN = 4096  # hints without an outcome yet; the oldest is let go
_TENANTS = 1024  # with a record; the one that hinted least recently is forgotten
PINNED_SHARE = 0.1
"""Of a tier: what the pins of a tenant's hints may keep there, times its credit."""


class Hint(NamedTuple):
    """What a client says about the blocks of a request. It may be wrong.

    ``returns``: a request that begins with them comes, or comes not; None: not said. ``in_s``: in
    about so many seconds. ``pin_s``: they should stay for so many seconds.
    """

    returns: bool | None = None
    in_s: float | None = None
    pin_s: float | None = None


class Advice(NamedTuple):
    """What a tier's policy makes of a hint that is believed. ``kind``: a class of hints, below
    ``KINDS``; 0: none. ``pin_s``: seconds for which the blocks should stay, at most ``share`` of
    the tier for all pins of the ``tenant``."""

    kind: int = 0
    pin_s: float = 0.0
    share: float = 0.0
    tenant: str = ""


NOT_AGAIN, RETURNS = 1, 2  # kinds; those after them: by the time of the return
KINDS = RETURNS + 1 + len(_DUE_S) + 1


@dataclass(slots=True)
class HintCounts:
    """Hints so far: given, believed when they were, and with an outcome, true or false."""

    given: int = 0
    believed: int = 0
    true: int = 0
    false: int = 0


@dataclass(slots=True)
class _Record:
    true: float = _PRIOR / 2
    all: float = _PRIOR

    @property
    def credit(self) -> float:
        return self.true / self.all

    def note(self, came_true: bool) -> None:
        self.true = self.true * _FADE + came_true
        self.all = self.all * _FADE + 1.0


class _Open(NamedTuple):
    """A hint without an outcome yet, about the return of one block."""

    key: BlockKey
    tenant: Tenant
    hint: Hint
    given: float


class HintRecord:
    """The hints that the tenants of a pool gave, and how many of them came true.

    A hint is about the last block of its request. "Not again" is false once a request uses that
    block, and true after fifteen minutes without one. "Comes back" is true with such a request,
    and false after fifteen minutes; "in N seconds" is true if it comes between N/4 and 4 N + 5
    seconds, and false otherwise. A tenant's *credit* is the share of its outcomes that were true,
    half of which are forgotten after 34 more. While it is below ``_BELIEVED`` the tenant's hints
    are recorded, and have no effect: it fares as a tenant without hints. How often, and when, what
    is hinted happens is learned by the policy, from the outcomes: a hint is a class, not an order.

    Not thread-safe; never waits. Costs nothing before the first hint, then a look-up in a
    dictionary for each block of a chain. Memory: 4,096 hints and 1,024 tenants.
    """

    def __init__(self) -> None:
        self._records: OrderedDict[Tenant, _Record] = OrderedDict()
        self._open: OrderedDict[BlockKey, _Open] = OrderedDict()  # the oldest first
        self._ends: list[tuple[float, int, _Open]] = []  # a heap, some of them over
        self.counts = HintCounts()

    def used(
        self, chain: Sequence[BlockKey], now: float, tenant: Tenant, hint: Hint | None
    ) -> Advice | None:
        """A request of ``tenant`` used ``chain`` (prefix first): settles the hints about it, and
        records the request's own. Returns what the policies make of it; None: nothing."""
        if self._open:
            self._settle(chain, now)
        if hint is None or not chain:
            return None
        self.counts.given += 1
        record = self._records.setdefault(tenant, _Record())
        self._records.move_to_end(tenant)
        if len(self._records) > _TENANTS:
            self._records.popitem(last=False)
        self._record(chain[-1], now, tenant, hint)
        if record.credit < _BELIEVED:
            return None
        self.counts.believed += 1
        return Advice(_kind(hint), hint.pin_s or 0.0, PINNED_SHARE * record.credit, tenant)

    def _record(self, key: BlockKey, now: float, tenant: Tenant, hint: Hint) -> None:
        ends = now + _HORIZON_S
        if hint.in_s is not None:
            ends = now + hint.in_s * _LATE + _SLACK_S
        elif hint.pin_s is not None and hint.returns is None:
            ends = now + hint.pin_s
        self._open.pop(key, None)  # of the same request before
        mine = self._open[key] = _Open(key, tenant, hint, now)
        heapq.heappush(self._ends, (ends, self.counts.given, mine))
        if len(self._open) > _OPEN:
            self._open.popitem(last=False)
        if len(self._ends) > 2 * _OPEN:
            self._ends = [each for each in self._ends if self._is_open(each[2])]
            heapq.heapify(self._ends)

    def _is_open(self, mine: _Open) -> bool:
        return self._open.get(mine.key) is mine

    def _settle(self, chain: Sequence[BlockKey], now: float) -> None:
        """Outcomes of what was hinted about the blocks of a chain, and of what is past."""
        while self._ends and (self._ends[0][0] < now or not self._is_open(self._ends[0][2])):
            past = heapq.heappop(self._ends)[2]
            if self._is_open(past):
                self._close(past, past.hint.returns is False)
        found = self._open
        for key in chain:
            if key in found:
                mine = found[key]
                in_s = mine.hint.in_s
                is_early = in_s is not None and now - mine.given < in_s * _EARLY
                self._close(mine, mine.hint.returns is not False and not is_early)

    def _close(self, mine: _Open, came_true: bool) -> None:
        del self._open[mine.key]
        self.counts.true += came_true
        self.counts.false += not came_true
        record = self._records.get(mine.tenant)
        if record is not None:
            record.note(came_true)


def _kind(hint: Hint) -> int:
    if hint.in_s is not None and hint.returns is not False:
        return RETURNS + 1 + bisect_right(_DUE_S, hint.in_s)
    if hint.returns is None:
        return 0
    return RETURNS if hint.returns else NOT_AGAIN


def hint_of(given: object) -> Hint:
    """The hint of a JSON object with ``returns``, ``in_s`` and ``pin_s``, each of which may be
    missing or null. Raises ValueError, with the reason, for anything else."""
    if not isinstance(given, Mapping):
        raise ValueError(f"it is {shown(given)}; it must be an object with {_NAMES}")
    for name in given:
        if name not in Hint._fields:
            raise ValueError(f"{shown(name)} is unknown; known: {_NAMES}")
    returns, in_s, pin_s = (given.get(name) for name in Hint._fields)
    if returns is not None and not isinstance(returns, bool):
        raise ValueError(f"returns is {shown(returns)}; it must be true or false")
    if returns is False and (in_s is not None or pin_s is not None):
        raise ValueError("returns is false; leave out in_s and pin_s")
    return Hint(returns, _seconds("in_s", in_s), _seconds("pin_s", pin_s))


_NAMES = ", ".join(Hint._fields)


def _seconds(name: str, value: object) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} is {shown(value)}; it must be a number of seconds")
    if not 0 <= value <= MAX_SECONDS:  # nor is NaN
        raise ValueError(f"{name} is {shown(value)}; it must be 0 to {MAX_SECONDS:g} seconds")
    return float(value)


def shown(value: object) -> str:
    """What a client sent, in an error: 83 characters at most, and of nested values the outermost
    ones, however deep they are."""
    text = _SHORT.repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


_SHORT = reprlib.Repr()
_SHORT.maxlevel = 4
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = 200
