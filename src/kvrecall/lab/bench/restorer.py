"""A process that copies blocks out of a service's arena, as an engine's worker does; for
``bench service``.

``python -m kvrecall.lab.bench.restorer SOCKET NAME BLOCKS BLOCK_BYTES``: saves BLOCKS blocks, says
``ready``, then obeys lines: ``pool SECONDS`` recalls them all through the service, time after time,
and copies them to memory of its own; ``plain SECONDS`` copies the same bytes and asks nobody. The
answer is a line of JSON: bytes and seconds.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from kvrecall.block import BlockKey, Namespace
from kvrecall.pool.arena import Arena
from kvrecall.pool.base import RecallState
from kvrecall.pool.service.client import ServiceClient
from kvrecall.testing.blocks import chain

SPACE = Namespace.of({"purpose": "bench service"})
_PAGES = 8  # pieces a block is copied in: a real one goes to a place in every layer


class Restorer:
    """A client with its blocks and the memory they are copied to."""

    def __init__(self, socket: Path, name: str, blocks: int, block_bytes: int) -> None:
        self._client = ServiceClient(socket, call_timeout_s=5.0)
        self._client.register(SPACE, block_bytes)
        self._keys = chain(SPACE, blocks, name)
        self._nbytes = block_bytes
        arena = Arena.attach(self._client.arena_handle())
        arena.wait_ready()
        self._bytes = arena.array()
        answers = self._client.reserve(self._keys)
        self._offsets = [answer.offset for answer in answers]
        for offset in self._offsets:
            self._bytes[offset : offset + block_bytes] = offset % 251
        self._client.commit(self._keys)
        self._own = np.ones((blocks, block_bytes), dtype=np.uint8)

    def recall(self) -> None:
        """Find, acquire, poll, copy, release: what an engine does for a hit in the host."""
        found: Sequence[BlockKey] = self._keys[: self._client.find(self._keys).blocks]
        ticket = self._client.acquire(found, 5.0)
        recall = self._client.poll(ticket)
        while recall.state is RecallState.PENDING:
            recall = self._client.poll(ticket)
        if len(recall.offsets) != len(self._keys):
            raise SystemExit(f"{len(recall.offsets)} of {len(self._keys)} blocks came")
        self.copy(recall.offsets)
        self._client.release(ticket)

    def plain(self) -> None:
        self.copy(self._offsets)

    def copy(self, offsets: Sequence[int]) -> None:
        step = self._nbytes // _PAGES
        for row, offset in enumerate(offsets):
            for start in range(0, self._nbytes, step):
                source = self._bytes[offset + start : offset + start + step]
                self._own[row, start : start + step] = source

    def run(self, act: Callable[[], None], seconds: float) -> dict[str, float]:
        act()
        began = time.perf_counter()
        rounds = 0
        while time.perf_counter() - began < seconds:
            act()
            rounds += 1
        spent = time.perf_counter() - began
        return {"bytes": float(rounds * self._own.nbytes), "seconds": spent}

    def close(self) -> None:
        self._client.close()


def main() -> None:
    restorer = Restorer(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    print("ready", flush=True)
    for line in sys.stdin:
        order, seconds = line.split()
        act = restorer.recall if order == "pool" else restorer.plain
        print(json.dumps(restorer.run(act, float(seconds))), flush=True)
    restorer.close()


if __name__ == "__main__":
    main()
