"""A process that plays an engine on a service: steps like the connector's, checks every byte.

``python player.py SOCKET ROLE SEED``. Roles: ``play`` steps until it reads a line and has seen
enough, then prints what it saw; ``hold`` reserves and leases, says so, and sleeps; ``workers`` does
so with a child that maps the arena.
"""

from __future__ import annotations

import json
import os
import random
import select
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from kvrecall.block import BlockKey
from kvrecall.errors import TierError
from kvrecall.pool.arena import Arena
from kvrecall.pool.base import ArenaHandle, RecallState, Verdict
from kvrecall.pool.service.client import ServiceClient
from kvrecall.testing import chain, content, namespace

SIZES = {"small": 9_000, "large": 70_000}
HOT, COLD = 20, 2000  # chains
LENGTH = 12


class Worker:
    """Maps the arena each order names, as the connector's worker does."""

    def __init__(self) -> None:
        self.handle: ArenaHandle | None = None
        self.arena: Arena | None = None

    def ready(self, handle: ArenaHandle) -> bool:
        if handle == self.handle:
            return True
        self.handle = None
        try:
            self.arena = Arena.attach(handle)
        except TierError:
            return False
        self.handle = handle
        return True

    def read(self, offset: int, nbytes: int) -> bytes:
        assert self.arena is not None
        return bytes(self.arena.view(offset, nbytes))

    def write(self, offset: int, data: bytes) -> None:
        assert self.arena is not None
        self.arena.view(offset, len(data))[:] = data


@dataclass
class Seen:
    steps: int = 0
    saved: int = 0
    recalled: int = 0
    wrong: int = 0
    cuts: int = 0
    lost_loads: int = 0

    @property
    def is_enough(self) -> bool:
        return min(self.saved, self.recalled) > 100 and self.cuts > 0


@dataclass
class Engine:
    """Scheduler and worker of one engine. Loads and stores of a step go with one handle."""

    client: ServiceClient
    dice: random.Random
    worker: Worker = field(default_factory=Worker)
    seen: Seen = field(default_factory=Seen)
    open: dict[int, list[BlockKey]] = field(default_factory=dict)

    def step(self) -> None:
        loads: list[tuple[int, list[BlockKey], tuple[int, ...]]] = []
        self._match()
        for ticket, keys in list(self.open.items()):
            recall = self.client.poll(ticket)
            if recall.state is RecallState.READY:
                del self.open[ticket]
                loads.append((ticket, keys, recall.offsets))
        stores = self._save() if self.dice.random() < 0.5 else []
        handle = self.client.arena_handle()
        stores += self._save()
        if self.dice.random() < 0.3:
            time.sleep(self.dice.random() * 0.01)  # the forward pass
        if self.dice.random() < 0.02:
            self._cut()
        if (loads or stores) and not self.worker.ready(handle):
            self.seen.lost_loads += len(loads)
            self.client.abandon([key for key, _ in stores])
        else:
            self._copy(loads, stores)
        for ticket, _, _ in loads:
            self.client.release(ticket)
        self.seen.steps += 1

    def _cut(self) -> None:
        """Loses the connection while copies are ordered, and takes its time to make them."""
        life = self.client._life
        if life is not None and not life.is_lost:
            life._sock.send(b"\xff" * 8)
            self.seen.cuts += 1
            time.sleep(0.05)

    def _copy(
        self,
        loads: list[tuple[int, list[BlockKey], tuple[int, ...]]],
        stores: list[tuple[BlockKey, int]],
    ) -> None:
        for _, keys, offsets in loads:
            for key, offset in zip(keys, offsets, strict=False):
                want = content(key, size_of(key))
                self.seen.wrong += self.worker.read(offset, len(want)) != want
                self.seen.recalled += 1
        for key, offset in stores:
            self.worker.write(offset, content(key, size_of(key)))
        self.client.commit([key for key, _ in stores])
        self.seen.saved += len(stores)

    def _match(self) -> None:
        keys = self._chain()
        self.client.touch(keys)
        found = self.client.find(keys).blocks
        if found:
            self.open[self.client.acquire(keys[:found], 2.0)] = keys[:found]

    def _save(self) -> list[tuple[BlockKey, int]]:
        keys = self._chain()
        rows = []
        for key, answer in zip(keys, self.client.reserve(keys), strict=True):
            if answer.verdict is Verdict.RESERVED:
                rows.append((key, answer.offset))
        return rows

    def _chain(self) -> list[BlockKey]:
        name = self.dice.choice(sorted(SIZES))
        number = self.dice.randrange(self.dice.choice((HOT, COLD)))
        return chain(namespace(name), LENGTH, str(number))


def size_of(key: BlockKey) -> int:
    return next(n for name, n in SIZES.items() if key.startswith(namespace(name).digest))


def main() -> None:
    path, role, seed = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    client = ServiceClient(path, call_timeout_s=0.5)
    for name, size in SIZES.items():
        client.register(namespace(name), size)
    engine = Engine(client, random.Random(seed))
    if role == "play":
        print("ready", flush=True)
        while not (select.select([sys.stdin], [], [], 0)[0] and engine.seen.is_enough):
            engine.step()
        print(json.dumps(engine.seen.__dict__), flush=True)
        client.close()
        return
    keys = chain(namespace("small"), 20, f"hold {seed}")
    offsets = [answer.offset for answer in client.reserve(keys)]
    client.commit(keys[:10])
    client.poll(client.acquire(keys[:10], 5.0))
    assert engine.worker.ready(client.arena_handle())
    child = os.fork() if role == "workers" else 0
    if role == "hold" or child:
        print(child, flush=True)
    while role == "workers" and not child:
        engine.worker.write(offsets[15], os.urandom(64))  # a copy that goes on and on
        time.sleep(0.01)
    time.sleep(600)


if __name__ == "__main__":
    main()
