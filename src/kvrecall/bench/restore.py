"""``kvrecall bench restore`` and ``overhead``: what a hit gains, and what saving costs."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from kvrecall.bench.model import BLOCK, TAIL, BenchModel, Texts
from kvrecall.bench.report import GIB_S, Report, Times, Tokens, cells, percentiles, progress
from kvrecall.errors import EngineError
from kvrecall.plan.model import read_shape
from kvrecall.plan.sizing import hit_bytes
from kvrecall.processes.server import ServerProcess

SOURCES = ("computed", "device", "host", "disk")
GOALS = {"host": 1.3, "disk": 2.5}
"""Maximum time of a hit relative to one on the device; every hit: a tenth of computing."""

IN_A_ROW = 3
OVERHEAD_GOAL = 0.03

_LOADED = "kvrecall_loaded_bytes_total"


def measure_restore(tokens: Tokens = 8192, repetitions: Times = 9) -> Report:
    """Time to first token on a prefix: computed, from device, host and disk.

    One server; three documents in turn evict each other from host memory to disk. Fails if a prefix
    comes from another tier than the measured one, or if other bytes move than its KV groups need.
    """
    from kvrecall.bench.bandwidth import measure_bandwidth  # imports torch

    tokens = tokens // BLOCK * BLOCK
    model = BenchModel()
    prefix_bytes = tokens * model.token_bytes
    seconds: dict[str, list[float]] = {source: [] for source in SOURCES}
    texts = Texts()

    with tempfile.TemporaryDirectory(prefix="kvrecall-bench-") as name:
        folder = Path(name)
        arguments = model.serve(folder, tokens + 1024, 4 * prefix_bytes)
        needed = hit_bytes(read_shape(Path(arguments[0])).groups(BLOCK), tokens)
        pool = folder / "pool.json"  # the learned order keeps a part of some documents
        pool.write_text(json.dumps({"policy": "lru"}))
        arguments += ["--pool-config", str(pool), "--host-size", str(needed * 3 // 2)]
        arguments += ["--disk-path", str(folder / "pool"), "--disk-size", str(32 * prefix_bytes)]
        progress("starting the server")
        with ServerProcess(arguments, folder / "server.log", progress) as server:

            def measure(source: str, document: str) -> None:
                loaded = server.metric(_LOADED)
                answer = server.ask(document, 2)
                found = {tier: answer.recalled.get(tier, 0) for tier in SOURCES[1:]}
                wanted = {tier: tokens if tier == source else 0 for tier in SOURCES[1:]}
                if found != wanted:
                    raise EngineError(
                        f"meant to measure {wanted} recalled tokens, the server had {found}"
                    )
                seconds[source].append(answer.ttft_s)
                server.settle()
                moved = server.metric(_LOADED) - loaded
                if moved != (needed if source in ("host", "disk") else 0):
                    raise EngineError(f"{moved:.0f} bytes moved, the hit needs {needed}")

            documents = [texts.document(tokens + TAIL) for _ in range(3)]
            server.ask(texts.document(2 * BLOCK), 2)
            for document in documents:
                server.ask(document, 2)
                server.settle()
            server.forget_device()
            for turn in range(repetitions):
                document = documents[turn % 3]
                measure("disk", document)
                measure("device", document)
                server.forget_device()
                measure("host", document)
                server.forget_device()
                if turn < max(2, repetitions // 3):  # the slowest and least noisy
                    measure("computed", texts.document(tokens + TAIL))
                    server.forget_device()
                progress(f"turn {turn + 1} of {repetitions}")
    progress("copy bandwidth")
    bandwidth = measure_bandwidth(tokens // BLOCK, model.layers, BLOCK * model.token_bytes)
    facts = {
        "tokens": tokens,
        "prefix_bytes": prefix_bytes,
        "moved_bytes": needed,
        "dtype": model.dtype,
    }
    return _report(seconds, facts, bandwidth)


def _report(
    seconds: Mapping[str, list[float]],
    facts: Mapping[str, Any],
    bandwidth: Mapping[str, float],
) -> Report:
    ttft = {source: percentiles(values) for source, values in seconds.items()}
    median = {source: found["p50"] for source, found in ttft.items()}
    worst = max(median[source] for source in SOURCES[1:])
    figures: dict[str, object] = {
        **facts,
        "ttft_s": ttft,
        "host_to_device": round(median["host"] / median["device"], 3),
        "disk_to_device": round(median["disk"] / median["device"], 3),
        "worst_hit_to_computed": round(worst / median["computed"], 4),
        **bandwidth,
    }
    notes = (
        f"a prefix of {facts['tokens']} tokens, "
        f"{facts['prefix_bytes'] / 2**20:.0f} MiB of KV cache in {facts['dtype']}, of which a hit "
        f"moves {facts['moved_bytes'] / 2**20:.0f}",
        f"goals: host <= {GOALS['host']} x device, disk <= {GOALS['disk']} x device, "
        "each hit < 0.1 of computing",
        f"arena -> device KV {bandwidth['restore_gb_s'] * GIB_S:.1f} GiB/s, a plain copy of the "
        f"same bytes {bandwidth['plain_copy_gb_s'] * GIB_S:.1f} GiB/s: "
        f"{bandwidth['restore_to_plain']:.2f} (goal 0.8)",
    )
    rows = tuple(
        (
            source,
            *cells(found, 1, 1e3),
            f"{found['p50'] / median['device']:.2f}",
            f"{median['computed'] / found['p50']:.0f}",
        )
        for source, found in ttft.items()
    )
    columns = ("prefix from", "first token after, ms: p10", "p50", "p90", "to device hit")
    return Report("restore", (*columns, "times as fast as computing"), rows, figures, notes)


def measure_overhead(tokens: Tokens = 4096, rounds: Times = 8) -> Report:
    """Prefill throughput with the pool saving everything, against no pool.

    Two servers take turns with documents that neither has seen. A round is several documents in a
    row on one server, so that most of the pool's write-behind is measured with the pool; the order
    of the two alternates. Processor time is reported beside throughput, because it shows the cost
    of the pool also on a busy machine.
    """
    model, texts = BenchModel(), Texts()
    document_bytes = tokens * model.token_bytes
    rates: dict[str, list[float]] = {"off": [], "on": []}
    cpu: dict[str, list[float]] = {"off": [], "on": []}
    with tempfile.TemporaryDirectory(prefix="kvrecall-bench-") as name, ExitStack() as stack:
        folder = Path(name)
        base = model.serve(folder, tokens + 64, 8 * document_bytes)
        pool = ["--host-size", str(8 * document_bytes), "--disk-path", str(folder / "pool")]
        pool += ["--disk-size", str(64 * document_bytes)]
        servers: dict[str, ServerProcess] = {}
        for kind, options in (("off", ["--no-pool"]), ("on", pool)):
            progress(f"starting the server with the pool {kind}")
            server = ServerProcess([*base, *options], folder / f"{kind}.log", progress)
            servers[kind] = stack.enter_context(server)
            server.ask(texts.document(tokens), 1)
        for turn in range(rounds):
            for kind in ("off", "on") if turn % 2 else ("on", "off"):
                server = servers[kind]
                before = server.cpu_seconds()
                documents = [texts.document(tokens) for _ in range(IN_A_ROW)]
                begin = time.perf_counter()
                computed = sum(server.ask(text, 1).recalled["computed"] for text in documents)
                rates[kind].append(computed / (time.perf_counter() - begin))
                server.settle()
                cpu[kind].append(server.cpu_seconds() - before)
            progress(f"round {turn + 1} of {rounds}")
    return _overhead_report(rates, cpu, tokens)


def _overhead_report(
    rates: Mapping[str, Sequence[float]], cpu: Mapping[str, Sequence[float]], tokens: int
) -> Report:
    throughput = {kind: percentiles(values) for kind, values in rates.items()}
    cost = percentiles([1 - on / off for on, off in zip(rates["on"], rates["off"], strict=True)])
    more = percentiles([on / off - 1 for on, off in zip(cpu["on"], cpu["off"], strict=True)])
    rows = tuple(
        (
            f"pool {kind}",
            *cells(throughput[kind], 0),
            f"{percentiles(cpu[kind])['p50'] / IN_A_ROW / tokens * 1e3:.2f}",
        )
        for kind in ("off", "on")
    )
    notes = (
        f"cost of the pool, median of {cost['n']:.0f} pairs: {cost['p50']:.2%} of throughput "
        f"(p10 {cost['p10']:.2%}, p90 {cost['p90']:.2%}; goal < {OVERHEAD_GOAL:.0%}); "
        f"{more['p50']:+.2%} processor time",
    )
    figures = {"tokens": tokens, "tokens_per_s": throughput, "cost": cost, "cpu_cost": more}
    columns = ("prefill, tokens/s", "p10", "p50", "p90", "CPU s per 1,000 tokens")
    return Report("overhead", columns, rows, figures, notes)
