"""``python -m tests.pool.remote.pool_host SETTINGS``: a pool that takes orders on its stdin."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

from kvrecall.block import BlockKey
from kvrecall.config import RecallSettings
from kvrecall.pool.base import RecallState
from kvrecall.pool.pool import Pool
from kvrecall.testing import chain, content, namespace
from pool.inside import retry_writes

NAMESPACE = namespace()
NBYTES = 100_000


def save(pool: Pool, keys: list[BlockKey], deadline_s: float) -> dict[str, Any]:
    """Saves a chain; ``stored``: whether the store has all of it before the deadline."""
    for key, reservation in zip(keys, pool.reserve(keys), strict=True):
        if reservation.offset >= 0:
            pool.arena.view(reservation.offset, NBYTES)[:] = content(key, NBYTES)
    pool.commit(keys)
    until = time.monotonic() + deadline_s
    while not (stored := pool.flush(keys, 1.0)) and time.monotonic() < until:
        retry_writes(pool)
        time.sleep(0.1)
    return {"stored": stored}


def recall(pool: Pool, keys: list[BlockKey], deadline_s: float) -> dict[str, Any]:
    """Finds and recalls as a request does. ``right``: whether every byte is."""
    until = time.monotonic() + deadline_s
    while pool.find(keys).pending and time.monotonic() < until:
        time.sleep(0.002)
    ticket = pool.acquire(keys, deadline_s)
    while (got := pool.poll(ticket)).state is RecallState.PENDING:
        time.sleep(0.002)
    pairs = zip(keys, got.offsets, strict=False)
    right = all(bytes(pool.arena.view(at, NBYTES)) == content(key, NBYTES) for key, at in pairs)
    pool.release(ticket)
    return {"tiers": [str(tier) for tier in got.tiers], "right": right}


def main() -> None:
    logging.basicConfig(stream=sys.stderr)
    with Pool.open(RecallSettings.from_mapping(json.loads(sys.argv[1])).pool) as pool:
        pool.register(NAMESPACE, NBYTES)
        for line in sys.stdin:
            order = json.loads(line)
            keys = chain(NAMESPACE, order.get("count", 0), order.get("chain", ""))
            what, deadline_s = order["do"], order.get("deadline_s", 20.0)
            if what == "counts":
                reply = {"corrupt": pool.stats().tiers[-1].corrupt}
            else:
                reply = (save if what == "save" else recall)(pool, keys, deadline_s)
            print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
