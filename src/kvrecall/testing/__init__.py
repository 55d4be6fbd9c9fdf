"""Contracts that every tier, store and policy keeps, and the keys and bytes they are tested with.

The bytes of a block follow from its key."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable

from kvrecall.block import BlockKey, Namespace


def namespace(name: str = "model") -> Namespace:
    """A namespace of its own for every name."""
    return Namespace.of({"model": name})


def chain(of: Namespace, length: int, name: str = "") -> list[BlockKey]:
    """Keys of a chain of blocks, prefix first; the same arguments give the same keys."""
    return [of.key(hashlib.sha256(f"{name}/{place}".encode()).digest()) for place in range(length)]


def content(key: BlockKey, nbytes: int) -> bytes:
    """The bytes that the block ``key`` must hold."""
    seed = hashlib.sha256(key).digest()
    return (seed * (nbytes // len(seed) + 1))[:nbytes]


def wait_until(true: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Waits until ``true()`` holds. Raises AssertionError after a timeout."""
    until = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < until, "timed out"
        time.sleep(0.001)
