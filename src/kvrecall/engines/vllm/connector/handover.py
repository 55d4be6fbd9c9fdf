"""From a prefill instance to a decode instance: what is promised, and how long it is waited for.

A prefill instance ends a request with a *receipt*: how many tokens of its prompt lie in the pool or
are on their way there. The router hands it to the decode instance with the request, whose scheduler
side waits until the pool holds that much, or the time is over. So nobody waits inside a step, and
what counts is what the decode instance itself can find, whatever pool lies between the two.
"""

from __future__ import annotations

import enum
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvrecall.block import Namespace
from kvrecall.engines.base import HANDOVER
from kvrecall.engines.vllm.connector.metrics import Tally

logger = logging.getLogger("vllm.kvrecall")

_LOOK_EVERY_S = 0.002


class Handover(enum.Enum):
    """How a promise stands."""

    WAIT = "wait"
    KEPT = "kept"
    LATE = "late"


def receipt(namespace: Namespace | None, tokens: int) -> dict[str, Any]:
    """What to hand to a decode instance; empty if there is nothing to be found."""
    if namespace is None or tokens <= 0:
        return {}
    return {HANDOVER: {"tokens": tokens, "namespace": namespace.digest.hex()}}


@dataclass(slots=True)
class Promise:
    """Leading blocks of a prompt that are said to be in the pool, or on their way. They are
    waited for ``patience_s`` seconds from the first ``look`` on."""

    blocks: int
    namespace: str
    patience_s: float
    clock: Callable[[], float] = time.monotonic
    is_over: bool = False
    _until: float | None = None
    _next: float = 0.0

    @classmethod
    def of(cls, params: object, block_size: int, patience_s: float) -> Promise | None:
        """From a request's ``kv_transfer_params``; None if there is no receipt in them, or one
        that cannot be read (they come from outside)."""
        told = params.get(HANDOVER) if isinstance(params, Mapping) else None
        if not isinstance(told, Mapping):
            return None
        tokens, namespace = told.get("tokens"), told.get("namespace")
        if type(tokens) is not int or tokens < block_size or not isinstance(namespace, str):
            return None
        return cls(tokens // block_size, namespace, patience_s)

    def look(self, wanted: int, found: Callable[[], int]) -> Handover:
        """Whether ``wanted`` blocks are there; ``found`` asks the pool, and not at every call."""
        now = self.clock()
        if self._until is None:
            self._until = now + self.patience_s
        if now < self._next and now < self._until:
            return Handover.WAIT
        self._next = now + _LOOK_EVERY_S
        if found() >= wanted:
            self.is_over = True
            return Handover.KEPT
        if now < self._until:
            return Handover.WAIT
        self.is_over = True
        return Handover.LATE


class HandoverDesk:
    """Takes in the promises that requests bring. Owned by the scheduler side."""

    def __init__(self, block_size: int, patience_s: float, tally: Tally) -> None:
        self._block_size = block_size
        self._patience_s = patience_s
        self._tally = tally
        self._warned = False

    def accept(self, params: object, space: Namespace | None) -> Promise | None:
        """The promise in a request's ``kv_transfer_params``; None if none can be kept."""
        promise = Promise.of(params, self._block_size, self._patience_s)
        if promise is None or space is None:
            return None
        self._tally.handovers += 1
        if promise.namespace == space.digest.hex():
            return promise
        self._tally.handovers_foreign += 1
        if not self._warned:
            self._warned = True
            logger.warning(
                "kvrecall: the blocks of the prefill instance do not fit this engine (namespace "
                "%s there, %s here): prompts are computed again. Both logs list what a namespace "
                "is made of; model, dtype, block size, parallel sizes and vLLM must be the same",
                promise.namespace[:64],
                space.digest.hex(),
            )
        return None
