"""What a call costs through the service, in calls for one block: many blocks are one message.
`kvrecall bench service` gives the times."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path

from kvrecall.pool.service.client import ServiceClient
from kvrecall.testing.blocks import chain, namespace

from .service import Service

NAMESPACE = namespace("latency")
KEYS = chain(NAMESPACE, 1000)


def median_ms(call: Callable[[], object], times: int = 100) -> float:
    seconds = []
    for _ in range(times):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return 1e3 * statistics.median(seconds)


def test_calls_are_quick(tmp_path: Path) -> None:
    with Service(tmp_path / "service") as service:
        client = service.client()
        client.register(NAMESPACE, 4096)
        client.reserve(KEYS)
        client.commit(KEYS)
        assert client.find(KEYS).blocks == 1000
        find = median_ms(lambda: client.find(KEYS))
        one = median_ms(lambda: client.find(KEYS[:1]))
        recall = median_ms(lambda: recalled(client))
        print(f"find 1000: {find:.2f} ms; find 1: {one:.3f} ms; recall 8: {recall:.3f} ms")
        assert find < 100 * one
        assert recall < 20 * one
        client.close()


def recalled(client: ServiceClient) -> int:
    ticket = client.acquire(KEYS[:8], 1.0)
    blocks = len(client.poll(ticket).offsets)
    client.release(ticket)
    return blocks
