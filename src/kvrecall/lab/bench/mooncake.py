"""The remote tier against Mooncake's bare client, over the same wire, in one run.

A third process lends all the memory, so that every byte of both crosses loopback TCP.
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import multiprocessing as mp
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from kvrecall.block import BlockKey, Namespace
from kvrecall.config import RemoteConfig
from kvrecall.errors import EngineError
from kvrecall.lab.bench.moves import get_all, put_all
from kvrecall.lab.masters import Master
from kvrecall.pool.arena import Arena
from kvrecall.pool.remote.mooncake import MooncakeSettings, MooncakeStore
from kvrecall.pool.remote.mooncake.process import ENVIRONMENT
from kvrecall.pool.remote.tier import RemoteTier

_NAMESPACE = Namespace.of({"kvrecall": "bench remote"})
_LIMIT_S = 120.0
_CHECKS = 1000


def measure_mooncake(folder: Path, block_bytes: int, blocks: int, repeats: int) -> dict[str, Any]:
    """Bandwidths (bytes per second, medians) of put and get through the tier and of the bare
    client, their ratios, and the time of 1,000 existence checks in one call and one by one."""
    nbytes = block_bytes * blocks
    master = Master(folder / "master.log")
    master.start()
    try:
        with (
            _client(_lend, master.options(4 * nbytes), nbytes) as lender,
            _client(_carry, master.options(0), nbytes) as bare,
            _tier(master.options(0), nbytes, block_bytes) as (tier, arena),
        ):
            _ask(lender, ("ready",))
            rounds = [
                _round(bare, tier, arena, block_bytes, blocks, number) for number in range(repeats)
            ]
            checks = _checks(bare, tier)
    finally:
        master.kill()
    figures: dict[str, Any] = {"block_bytes": block_bytes, "blocks": blocks, "repeats": repeats}
    for way in ("put", "get"):
        pairs = [(times[f"bare_{way}"], times[f"tier_{way}"]) for times in rounds]
        figures[f"{way}_bare_bytes_per_s"] = nbytes / statistics.median(b for b, _ in pairs)
        figures[f"{way}_tier_bytes_per_s"] = nbytes / statistics.median(t for _, t in pairs)
        figures[f"{way}_ratio"] = round(statistics.median(b / t for b, t in pairs), 3)
    return {**figures, **checks}


def _round(
    bare: Connection, tier: RemoteTier, arena: Arena, block_bytes: int, blocks: int, number: int
) -> dict[str, float]:
    """One put and one get of everything by each, in turn; who begins changes."""
    times: dict[str, float] = {}
    keys = [_key(f"{number}/{place}") for place in range(blocks)]

    def by_bare() -> None:
        for way in ("put", "get"):
            times[f"bare_{way}"] = _ask(bare, (way, number, block_bytes, blocks))

    def by_tier() -> None:
        times["tier_put"] = put_all(tier, arena, keys, block_bytes)
        times["tier_get"] = get_all(tier, arena, keys, block_bytes)

    for step in (by_bare, by_tier) if number % 2 else (by_tier, by_bare):
        step()
    _ask(bare, ("remove", number, block_bytes, blocks))
    tier.drop(keys)
    time.sleep(0.2)  # for the store to remove them
    return times


def _checks(bare: Connection, tier: RemoteTier) -> dict[str, float]:
    """Seconds of 1,000 questions: the tier's, the bare client's one call, and its 1,000 calls."""
    found: dict[str, list[float]] = {"tier": [], "bare": [], "singly": []}
    for number in range(5):
        keys = [_key(f"absent {number}/{place}") for place in range(_CHECKS)]
        began = time.perf_counter()
        while not tier.ask(keys):
            time.sleep(0.0001)
        found["tier"].append(time.perf_counter() - began)
        for way in ("bare", "singly"):
            found[way].append(_ask(bare, (way, number, 0, _CHECKS)))
    return {f"checks_{way}_s": statistics.median(times) for way, times in found.items()}


@contextmanager
def _tier(
    options: Mapping[str, object], nbytes: int, block_bytes: int
) -> Iterator[tuple[RemoteTier, Arena]]:
    arena = Arena.create(nbytes, background=False)
    arena.memory[:] = os.urandom(1 << 20) * (nbytes >> 20)
    store = MooncakeStore(MooncakeSettings.of(options))
    store.attach(arena.memory)
    store.exists(["ready"])
    config = RemoteConfig("mooncake", max_queued_bytes=2 * nbytes, call_deadline_s=60.0)
    tier = RemoteTier(store, config)
    tier.register(_NAMESPACE, block_bytes)
    try:
        yield tier, arena
    finally:
        tier.close()
        arena.close()


# -- Mooncake's bare client, in processes of their own --------------------------------------


@contextmanager
def _client(
    main: Callable[[Connection, dict[str, str], int], None],
    options: Mapping[str, object],
    nbytes: int,
) -> Iterator[Connection]:
    ours, theirs = mp.Pipe()
    setup = dict(MooncakeSettings.of(options).setup)
    process = mp.get_context("spawn").Process(target=main, args=(theirs, setup, nbytes))
    process.start()
    theirs.close()
    try:
        yield ours
    finally:
        ours.close()
        process.join(10.0)
        process.kill()
        process.join()


def _ask(client: Connection, order: tuple[Any, ...]) -> float:
    """Seconds a client took for an order."""
    client.send(order)
    if not client.poll(_LIMIT_S):
        raise EngineError(f"Mooncake's bare client did not end {order[0]!r}")
    return float(client.recv())


def _connected(setup: dict[str, str]) -> Any:
    for name, value in ENVIRONMENT.items():  # as the tier's own client
        os.environ.setdefault(name, value)
    from mooncake.store import MooncakeDistributedStore

    client = MooncakeDistributedStore()
    if client.setup(setup) != 0:
        raise EngineError("Mooncake's client cannot be set up")
    return client


def _orders(pipe: Connection) -> Iterator[tuple[Any, ...]]:
    while True:
        try:
            yield pipe.recv()
        except EOFError:
            return


def _lend(pipe: Connection, setup: dict[str, str], nbytes: int) -> None:
    """A process that only lends memory."""
    client = _connected(setup)
    for _ in _orders(pipe):
        pipe.send(0.0)
    client.close()


def _carry(pipe: Connection, setup: dict[str, str], nbytes: int) -> None:
    """The bare client: one call for all blocks, on registered memory."""
    client = _connected(setup)
    memory = mmap.mmap(-1, nbytes)
    memory[:] = os.urandom(1 << 20) * (nbytes >> 20)
    first = ctypes.c_char.from_buffer(memory)
    address = ctypes.addressof(first)
    client.register_buffer(address, nbytes)
    for way, number, block_bytes, count in _orders(pipe):
        names = [f"bare.{number}.{place:064d}.{'0' * 32}" for place in range(count)]
        places = [address + place * block_bytes for place in range(count)]
        sizes = [block_bytes] * count
        began = time.perf_counter()
        if way == "put":
            good = client.batch_put_from(names, places, sizes) == [0] * count
        elif way == "get":
            good = client.batch_get_into(names, places, sizes) == sizes
        elif way == "remove":
            good = bool(client.batch_remove(names, True))
        elif way == "bare":
            good = len(client.batch_is_exist(names)) == count
        else:
            good = len([client.is_exist(name) for name in names]) == count
        seconds = time.perf_counter() - began
        pipe.send(seconds if good else float("nan"))
    client.close()


def _key(name: str) -> BlockKey:
    return _NAMESPACE.key(hashlib.sha256(name.encode()).digest())
