"""What a prefill instance and a decode instance tell each other through the router."""

from __future__ import annotations

import enum
import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvrecall.block import Namespace
from kvrecall.engines.base import HANDOVER
from kvrecall.pool.base import ArenaHandle

LOOK_EVERY_S = 0.002
"""The pool is asked at most so often for blocks whose tier has not answered."""


class Handover(enum.Enum):
    """The state of a promise."""

    WAIT = "wait"
    KEPT = "kept"
    LATE = "late"


@dataclass(slots=True)
class Wait:
    """A bounded wait for blocks that the pool may get: ``longest_s`` from the first time that they
    were not there. Times are seconds of the scheduler side's clock; no step waits."""

    longest_s: float
    _until: float | None = None
    _next: float = 0.0

    def is_early(self, now: float) -> bool:
        """Whether the pool was asked a moment ago."""
        return self._until is not None and now < min(self._next, self._until)

    def goes_on(self, now: float, worth_s: float = 0.0) -> bool:
        """They are not there: whether to ask again later. ``worth_s``: waits as long, if longer."""
        if self._until is None:
            self._until = now + max(self.longest_s, worth_s)
        self._next = now + LOOK_EVERY_S
        return now < self._until


@dataclass(slots=True)
class Promise:
    """Leading tokens of a prompt whose blocks a prefill instance's receipt says are in the pool, or
    on their way. Only blocks that the decode instance finds itself count, whatever pool is between
    the two. ``hinted``: the pool that has recorded the request's hint; "": none."""

    tokens: int
    namespace: str
    hinted: str
    wait: Wait
    is_over: bool = False

    @classmethod
    def of(cls, params: object, unit: int, patience_s: float) -> Promise | None:
        """The promise in a request's ``kv_transfer_params``, in whole ``unit`` tokens; None without
        a receipt, or with an invalid one (they come from outside)."""
        given = params.get(HANDOVER) if isinstance(params, Mapping) else None
        if not isinstance(given, Mapping):
            return None
        tokens, namespace = given.get("tokens"), given.get("namespace")
        if type(tokens) is not int or tokens < unit or not isinstance(namespace, str):
            return None
        hinted = given.get("hinted")
        hinted = hinted if isinstance(hinted, str) else ""
        return cls(tokens // unit * unit, namespace, hinted, Wait(patience_s))

    def look(self, now: float, is_there: bool) -> Handover:
        """Whether to wait for the promised blocks, of which the pool has all or not."""
        if not is_there and self.wait.goes_on(now):
            return Handover.WAIT
        self.is_over = True
        return Handover.KEPT if is_there else Handover.LATE


def receipt(namespace: Namespace | None, tokens: int, hinted: str = "") -> dict[str, Any]:
    """What a prefill instance passes to a decode instance through the router: how many tokens of
    the prompt are in the pool or on their way; and which pool has recorded the request's hint, if
    it has one (``pool_id``). Empty if there are no such tokens."""
    if namespace is None or tokens <= 0:
        return {}
    promised = {"tokens": tokens, "namespace": namespace.digest.hex(), "at": time.time()}
    return {HANDOVER: {**promised, "hinted": hinted} if hinted else promised}


def held_since(params: Mapping[str, Any], arrived: float) -> float:
    """When the prefill instance had computed the prompt, by its receipt, or else when the request
    ``arrived``. Seconds of the wall clock."""
    given = params.get(HANDOVER)
    at = given.get("at") if isinstance(given, Mapping) else None
    return min(at, arrived) if isinstance(at, float) else arrived


def pool_id(arena: ArenaHandle) -> str:
    """Names a pool, equally for all engines that use it at the same time."""
    return hashlib.blake2b(repr(replace(arena, seat=0)).encode(), digest_size=8).hexdigest()
