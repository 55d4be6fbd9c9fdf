"""``bench remote``: the remote tier against Mooncake's bare client, over the same wire in
one run, and a hit on another server's prefix against computing it.

A third process lends all the memory, so that every byte of tier and bare client crosses loopback
TCP.
"""

from __future__ import annotations

import ctypes
import json
import math
import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any

import typer

from kvrecall.bench.model import BLOCK, TAIL, BenchModel, Texts
from kvrecall.bench.pool import (
    NAMESPACE,
    checked_compression,
    get_all,
    keys_of,
    kv_like,
    put_all,
    slots_of,
)
from kvrecall.bench.report import Report, Times, Tokens, percentiles, progress
from kvrecall.config import Compression, RemoteConfig
from kvrecall.errors import EngineError
from kvrecall.pool.arena import Arena
from kvrecall.pool.remote.compressed import CompressedStore
from kvrecall.pool.remote.mooncake import MooncakeSettings, MooncakeStore
from kvrecall.pool.remote.mooncake.store import ENVIRONMENT
from kvrecall.pool.remote.staged import StagedStore
from kvrecall.pool.remote.store import Store
from kvrecall.pool.remote.tier import RemoteTier
from kvrecall.processes.child import orders, reply_to, worker
from kvrecall.processes.master import Master
from kvrecall.processes.server import ServerProcess

BLOCK_BYTES = 1 << 20
BLOCKS = 128
ROUNDS = 21
TIER_GOAL = 0.9
TTFT_GOAL = 3.0
_PARTIES = ("tier", "bare")
_WAYS = ("put", "get")
_REASONS = ("blocks_declined", "loads_given_up", "loads_failed")
"""Counters of reasons why a stored prefix was computed."""


def measure_remote(
    tokens: Tokens = 8192,
    repetitions: Times = 5,
    compression: Annotated[
        str, typer.Option(help="Compress the tier's blocks, like KV: lz4, zstd or auto.")
    ] = "none",
    engines: Annotated[
        bool,
        typer.Option("--engines/--no-engines", help="Also compare a remote hit with computing."),
    ] = True,
) -> Report:
    """Remote tier over Mooncake against its bare client; a remote hit against computing."""
    with tempfile.TemporaryDirectory(prefix="kvrecall-bench-") as name:
        folder = Path(name)
        progress("through the tier, and Mooncake's client alone")
        way = checked_compression(compression)
        figures = _compare_clients(folder, max(ROUNDS, repetitions), way)
        if any(isinstance(value, float) and math.isnan(value) for value in figures.values()):
            raise EngineError("a call of Mooncake's bare client failed")
        if engines:
            figures |= _measure_hits(folder, tokens // BLOCK * BLOCK, repetitions)
    return _report(figures)


# -- the tier against the bare client -------------------------------------------------------


def _compare_clients(folder: Path, repeats: int, compression: Compression) -> dict[str, Any]:
    """Bandwidths (bytes per second, medians) of put and get through the tier and with the bare
    client, which moves all blocks in one call, and the ratios, medians of those of each round, with
    their quartiles."""
    nbytes = BLOCK_BYTES * BLOCKS
    seconds: dict[str, list[float]] = {f"{who}_{way}": [] for who in _PARTIES for way in _WAYS}
    master = Master(folder / "master.log")
    master.start()
    lent, own = (dict(MooncakeSettings.of(master.options(n)).setup) for n in (8 * nbytes, 0))
    try:
        with (
            worker(bare_client, lent, 0) as lender,
            worker(bare_client, own, nbytes) as bare,
            _tier(master.options(0), nbytes, compression) as (tier, slots),
        ):
            reply_to(lender, "ready", "", 0, 0)
            for number in range(repeats):
                keys = keys_of(BLOCKS, f"{number}/")
                turn = number % len(_PARTIES)
                for who in (*_PARTIES[turn:], *_PARTIES[:turn]):
                    name = f"{who}.{number}"
                    for way in _WAYS:
                        if who == "bare":
                            spent = reply_to(bare, way, name, BLOCK_BYTES, BLOCKS)
                        elif way == "put":
                            spent = put_all(tier, keys, slots, BLOCK_BYTES)
                        else:
                            spent = get_all(tier, keys, slots)
                        seconds[f"{who}_{way}"].append(spent)
                reply_to(bare, "remove", f"bare.{number}", BLOCK_BYTES, BLOCKS)
                tier.drop(keys)
                time.sleep(0.2)  # for the store to remove them
            stats = tier.stats()
    finally:
        master.kill()
    figures: dict[str, Any] = {"block_bytes": BLOCK_BYTES, "blocks": BLOCKS, "repeats": repeats}
    figures["compression"] = compression
    for party, values in seconds.items():
        who, way = party.rsplit("_", 1)
        figures[f"{way}_{who}_bytes_per_s"] = nbytes / statistics.median(values)
    for way in _WAYS:
        pairs = zip(seconds[f"bare_{way}"], seconds[f"tier_{way}"], strict=True)
        low, middle, high = statistics.quantiles((bare / tier for bare, tier in pairs), n=4)
        figures[f"{way}_ratio"] = round(middle, 3)
        figures[f"{way}_ratio_quartiles"] = [round(low, 3), round(high, 3)]
    if stats.given_bytes:
        figures["compressed_to"] = round(stats.compressed_bytes / stats.given_bytes, 3)
    return figures


@contextmanager
def _tier(
    options: Mapping[str, object], nbytes: int, compression: Compression
) -> Iterator[tuple[RemoteTier, list[memoryview]]]:
    arena = Arena.create(nbytes)
    arena.wait_ready()
    filling = os.urandom(1 << 20) if compression == "none" else kv_like(1 << 20)
    arena.memory[:] = filling * (nbytes >> 20)
    store: Store = StagedStore(MooncakeStore(MooncakeSettings.of(options)))
    if compression != "none":
        store = CompressedStore(store, compression)
    store.exists(["ready"])
    config = RemoteConfig("mooncake", max_queued_bytes=2 * nbytes, call_deadline_s=60.0)
    tier = RemoteTier(store, config)
    tier.register(NAMESPACE, BLOCK_BYTES)
    slots = slots_of(arena, BLOCKS, BLOCK_BYTES)
    try:
        yield tier, slots
    finally:
        tier.close()
        slots.clear()
        arena.close()


def bare_client(pipe: Connection, setup: dict[str, str], nbytes: int) -> None:
    """A process with Mooncake's bare client, all blocks in one call, on registered memory of
    ``nbytes``. With 0 it only lends the store memory."""
    for name, value in ENVIRONMENT.items():  # as the tier's own client
        os.environ.setdefault(name, value)
    from mooncake.store import MooncakeDistributedStore

    client = MooncakeDistributedStore()
    if client.setup(setup) != 0:
        raise EngineError("Mooncake's client cannot be set up")
    address = 0
    if nbytes:
        memory = mmap.mmap(-1, nbytes)
        memory[:] = os.urandom(1 << 20) * (nbytes >> 20)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        client.register_buffer(address, nbytes)
    for way, name, block_bytes, count in orders(pipe):
        names = [f"{name}.{place:064d}.{'0' * 32}" for place in range(count)]
        places = [address + place * block_bytes for place in range(count)]
        sizes = [block_bytes] * count
        good = True
        began = time.perf_counter()
        if way == "put":
            good = not any(client.batch_put_from(names, places, sizes))
        elif way == "get":
            good = list(client.batch_get_into(names, places, sizes)) == sizes
        elif way == "remove":
            good = bool(client.batch_remove(names, True))
        seconds = time.perf_counter() - began
        pipe.send(seconds if good else math.nan)
    client.close()


# -- a hit against computing ----------------------------------------------------------------


def _measure_hits(folder: Path, tokens: int, repetitions: int) -> dict[str, Any]:
    """Times to first token of a server that computes and of another that recalls its blocks."""
    model, texts = BenchModel(), Texts()
    prefix_bytes = tokens * model.token_bytes
    words = model.serve(folder, tokens + 1024, 4 * prefix_bytes)
    master = Master(folder / "hits.log")
    master.start()

    def server(name: str) -> ServerProcess:
        progress(f"starting server {name}")
        pool = folder / f"pool-{name}.json"
        remote = {"kind": "mooncake", **master.options(8 * prefix_bytes)}
        settings = {"host_size": 4 * prefix_bytes, "remote": remote, "lookup_deadline": 1.0}
        pool.write_text(json.dumps(settings))
        arguments = [*words, "--pool-config", str(pool)]
        return ServerProcess(arguments, folder / f"{name}.log", progress)

    computed: list[float] = []
    recalled: list[float] = []
    shares: list[float] = []
    try:
        with server("A") as first, server("B") as second:
            warm_up = texts.document(2 * BLOCK + TAIL)
            for one in (first, second):  # the second server finds what the first writes
                one.ask(warm_up, 2)
                one.settle()
            for turn in range(repetitions):
                document = texts.document(tokens + TAIL)
                answer = first.ask(document, 2)
                first.settle()
                hit = second.ask(document, 2)
                if answer.tokens != hit.tokens:
                    raise EngineError(f"a hit gave {hit.tokens}, computing {answer.tokens}")
                computed.append(answer.ttft_s)
                recalled.append(hit.ttft_s)
                shares.append(hit.recalled.get("remote", 0) / tokens)
                progress(f"turn {turn + 1} of {repetitions}: {shares[-1]:.0%} recalled")
            second.settle()
            reasons = {name: second.metric(f"kvrecall_{name}_total") for name in _REASONS}
    finally:
        master.kill()
    if not any(shares):
        raise EngineError(f"nothing was recalled from the store: {reasons}")
    return {
        "tokens": tokens,
        "prefix_bytes": prefix_bytes,
        "ttft_computed_s": percentiles(computed),
        "ttft_remote_s": percentiles(recalled),
        "computed_to_remote": round(statistics.median(computed) / statistics.median(recalled), 2),
        "recalled_shares": shares,
        **reasons,
    }


def _report(figures: Mapping[str, Any]) -> Report:
    rows = [
        (
            f"{way}, GiB/s",
            f"{figures[f'{way}_tier_bytes_per_s'] / 2**30:.2f}",
            f"{figures[f'{way}_bare_bytes_per_s'] / 2**30:.2f}",
            "{:.2f} ({:.2f} to {:.2f})".format(
                figures[f"{way}_ratio"], *figures[f"{way}_ratio_quartiles"]
            ),
        )
        for way in _WAYS
    ]
    notes = [
        f"{figures['blocks']} blocks of {figures['block_bytes'] >> 10} KiB, checksums verified; "
        "both ways over loopback TCP, the memory lent by a third process",
    ]
    if "compressed_to" in figures:
        share, codec = figures["compressed_to"], figures["compression"]
        notes.append(
            f"the tier's blocks compressed to {share:.0%} ({codec}), the bare client's not"
        )
    else:
        notes.append(f"goal: through the tier at least {TIER_GOAL} of the bare client")
    if "tokens" in figures:
        notes.append(
            f"{figures['tokens']} tokens: computed {figures['ttft_computed_s']['p50']:.3f} s, "
            f"recalled by another server {figures['ttft_remote_s']['p50']:.3f} s: "
            f"{figures['computed_to_remote']:.1f} times as fast (goal {TTFT_GOAL})"
        )
        short = sum(share < 1 for share in figures["recalled_shares"])
        if short:
            why = ", ".join(f"{figures[name]:.0f} {name}" for name in _REASONS)
            notes.append(f"{short} prefixes were not recalled whole ({why}); their times count")
    return Report(
        "remote",
        ("", "tier", "bare client", "ratio"),
        tuple(rows),
        figures,
        tuple(notes),
    )
