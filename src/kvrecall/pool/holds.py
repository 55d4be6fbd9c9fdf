"""Holds of a lock that end in time, however slow the machine is meanwhile."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, TypeVar

HOLD_S = 0.001
"""Of a lock, in seconds, before work lets others in; and a part of the work more."""
T = TypeVar("T")


def in_holds(lock: AbstractContextManager[Any], work: Iterator[T]) -> Iterator[list[T]]:
    """Does ``work``, a part with each ``next``, under holds of ``lock``; yields after each hold
    what its parts gave, without the lock.

    A hold ends with the first part that ends later than ``HOLD_S`` after it began: while memory is
    slow, as it is for some milliseconds now and then in a virtual machine, there are more holds
    instead of longer ones. Others may change what the lock guards between two of them: after a
    hold whoever waits for the lock, or the interpreter, goes first. Without that this thread would
    have the lock again before the one it woke is awake, dozens of times.
    """
    is_left = True
    while is_left:
        done: list[T] = []
        with lock:
            is_left, until = False, time.perf_counter() + HOLD_S
            for part in work:
                done.append(part)
                if time.perf_counter() >= until:
                    is_left = True
                    break
        if is_left:
            time.sleep(0)
        yield done
