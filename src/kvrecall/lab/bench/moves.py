"""Moves blocks between an arena and a tier, all at once, and takes the time."""

from __future__ import annotations

import time
from collections.abc import Sequence

from kvrecall.block import BlockKey
from kvrecall.errors import TierError
from kvrecall.pool.arena import Arena
from kvrecall.pool.slots import slot_bytes_of
from kvrecall.pool.tier import Get, Outcome, Put, Tier

_LIMIT_S = 120.0


def put_all(tier: Tier, arena: Arena, keys: Sequence[BlockKey], block_bytes: int) -> float:
    """Seconds until the tier has the chain ``keys``, which lies in the arena slot by slot.

    Raises TierError if a block is not stored, or all are not in two minutes.
    """
    slot_bytes = slot_bytes_of(block_bytes)
    puts = [
        Put(key, keys[n - 1] if n else None, n, arena.view(n * slot_bytes, slot_bytes), block_bytes)
        for n, key in enumerate(keys)
    ]
    began = time.perf_counter()
    tier.submit_put(puts)
    await_all(tier, len(keys), Outcome.STORED)
    return time.perf_counter() - began


def get_all(tier: Tier, arena: Arena, keys: Sequence[BlockKey], block_bytes: int) -> float:
    """Seconds until the arena has the blocks ``keys``, slot by slot. Raises TierError as above."""
    slot_bytes = slot_bytes_of(block_bytes)
    gets = [Get(key, arena.view(n * slot_bytes, slot_bytes)) for n, key in enumerate(keys)]
    began = time.perf_counter()
    tier.submit_get(gets)
    await_all(tier, len(keys), Outcome.LOADED)
    return time.perf_counter() - began


def await_all(tier: Tier, count: int, outcome: Outcome, limit_s: float = _LIMIT_S) -> None:
    """Waits until ``count`` blocks have come to ``outcome``. Raises TierError if one comes to
    another, or they have not all after ``limit_s`` seconds."""
    until = time.monotonic() + limit_s
    while count:
        for done in tier.poll(1.0):
            if done.outcome is not outcome:
                raise TierError(f"a block was {done.outcome.value}, not {outcome.value}")
            count -= 1
        if time.monotonic() > until:
            raise TierError(f"{count} blocks are not {outcome.value} after {limit_s:.0f} s")
