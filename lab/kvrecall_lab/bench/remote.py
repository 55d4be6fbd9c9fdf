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
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer

from kvrecall.bench.model import BLOCK, TAIL, BenchModel, Texts
from kvrecall.bench.pool import NAMESPACE, get_all, keys_of, put_all, slots_of
from kvrecall.bench.report import Report, Times, Tokens, percentiles, progress
from kvrecall.config import RemoteConfig
from kvrecall.errors import EngineError
from kvrecall.pool.arena import Arena
from kvrecall.pool.remote.mooncake.settings import MooncakeSettings
from kvrecall.pool.remote.mooncake.store import ENVIRONMENT, MooncakeStore
from kvrecall.pool.remote.staged import StagedStore
from kvrecall.pool.remote.tier import RemoteTier
from kvrecall.processes.child import one_process
from kvrecall.processes.server import ServerProcess
from kvrecall.processes.service import Master

BLOCK_BYTES = 1 << 20
BLOCKS = 128
ROUNDS = 21
TIER_GOAL = 0.9
TTFT_GOAL = 3.0
_LIMIT_S = 120.0  # of a call of the bare client
_PARTIES = ("tier", "bare")
_WAYS = ("put", "get")
_REASONS = ("blocks_declined", "loads_given_up", "loads_failed")
"""Counters of reasons why a stored prefix was computed."""


def measure_remote(
    tokens: Tokens = 8192,
    repetitions: Times = 5,
    engines: Annotated[
        bool,
        typer.Option("--engines/--no-engines", help="Also compare a remote hit with computing."),
    ] = True,
) -> Report:
    """Remote tier over Mooncake against its bare client; a remote hit against computing."""
    with tempfile.TemporaryDirectory(prefix="kvrecall-bench-") as name:
        folder = Path(name)
        progress("through the tier, and Mooncake's client alone")
        figures = _compare_clients(folder, max(ROUNDS, repetitions))
        if any(isinstance(value, float) and math.isnan(value) for value in figures.values()):
            raise EngineError("a call of Mooncake's bare client failed")
        if engines:
            figures |= _measure_hits(folder, tokens // BLOCK * BLOCK, repetitions)
    return _report(figures)


# -- the tier against the bare client -------------------------------------------------------


def _compare_clients(folder: Path, repeats: int) -> dict[str, Any]:
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
            one_process(BareClient.begin, lent, 0) as lender,
            one_process(BareClient.begin, own, nbytes) as bare,
            _tier(master.options(0), nbytes) as (tier, slots),
        ):

            def of_bare(way: str, name: str) -> float:
                return bare.submit(BareClient.seconds_of, way, name).result(_LIMIT_S)

            lender.submit(BareClient.seconds_of, "ready").result(_LIMIT_S)
            for number in range(repeats):
                keys = keys_of(BLOCKS, f"{number}/")
                turn = number % len(_PARTIES)
                for who in (*_PARTIES[turn:], *_PARTIES[:turn]):
                    name = f"{who}.{number}"
                    for way in _WAYS:
                        if who == "bare":
                            spent = of_bare(way, name)
                        elif way == "put":
                            spent = put_all(tier, keys, slots, BLOCK_BYTES)
                        else:
                            spent = get_all(tier, keys, slots)
                        seconds[f"{who}_{way}"].append(spent)
                of_bare("remove", f"bare.{number}")
                tier.drop(keys)
                time.sleep(0.2)  # for the store to remove them
    finally:
        master.kill()
    figures: dict[str, Any] = {"block_bytes": BLOCK_BYTES, "blocks": BLOCKS, "repeats": repeats}
    for party, values in seconds.items():
        who, way = party.rsplit("_", 1)
        figures[f"{way}_{who}_bytes_per_s"] = nbytes / statistics.median(values)
    for way in _WAYS:
        pairs = zip(seconds[f"bare_{way}"], seconds[f"tier_{way}"], strict=True)
        low, middle, high = statistics.quantiles((bare / tier for bare, tier in pairs), n=4)
        figures[f"{way}_ratio"] = round(middle, 3)
        figures[f"{way}_ratio_quartiles"] = [round(low, 3), round(high, 3)]
    return figures


@contextmanager
def _tier(
    options: Mapping[str, object], nbytes: int
) -> Iterator[tuple[RemoteTier, list[memoryview]]]:
    arena = Arena.create(nbytes)
    arena.wait_ready()
    arena.memory[:] = os.urandom(1 << 20) * (nbytes >> 20)
    store = StagedStore(MooncakeStore(MooncakeSettings.of(options)))
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


class BareClient:
    """Mooncake's bare client, in a process of its own: all blocks in one call."""

    _here: ClassVar[BareClient]

    def __init__(self, setup: dict[str, str], nbytes: int) -> None:
        """On registered memory of ``nbytes``. With 0 it only lends the store memory."""
        for name, value in ENVIRONMENT.items():  # as the tier's own client
            os.environ.setdefault(name, value)
        from mooncake.store import MooncakeDistributedStore

        self._client = MooncakeDistributedStore()
        if self._client.setup(setup) != 0:
            raise EngineError("Mooncake's client cannot be set up")
        if nbytes:
            self._memory = mmap.mmap(-1, nbytes)
            self._memory[:] = os.urandom(1 << 20) * (nbytes >> 20)
            address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
            self._client.register_buffer(address, nbytes)
            self._places = [address + place * BLOCK_BYTES for place in range(BLOCKS)]

    @classmethod
    def begin(cls, setup: dict[str, str], nbytes: int) -> None:
        cls._here = cls(setup, nbytes)

    @classmethod
    def seconds_of(cls, way: str, name: str = "") -> float:
        """``put``, ``get`` or ``remove`` the blocks ``name``; NaN if that failed."""
        here = cls._here
        names = [f"{name}.{place:064d}.{'0' * 32}" for place in range(BLOCKS)]
        sizes = [BLOCK_BYTES] * BLOCKS
        good = True
        began = time.perf_counter()
        if way == "put":
            good = not any(here._client.batch_put_from(names, here._places, sizes))
        elif way == "get":
            good = list(here._client.batch_get_into(names, here._places, sizes)) == sizes
        elif way == "remove":
            good = bool(here._client.batch_remove(names, True))
        return time.perf_counter() - began if good else math.nan


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
        f"goal: through the tier at least {TIER_GOAL} of the bare client",
    ]
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
