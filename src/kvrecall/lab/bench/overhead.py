"""What saving costs: prefill throughput with the pool on (asynchronous writes, no hits) and off.

Two servers, asked in turns with documents neither has seen. A round is several documents in a
row on one server, so that most of the pool's write-behind falls into the pool's own time; the
order of the two alternates from round to round. Processor time is given beside throughput: it says
what the pool costs where the machine is busy with other work, too.
"""

from __future__ import annotations

import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from kvrecall.lab.bench.model import BLOCK, BenchModel, Texts
from kvrecall.lab.bench.report import Report, percentiles
from kvrecall.lab.engines.server import Progress, ServerProcess

IN_A_ROW = 3
GOAL = 0.03


_Series = dict[str, list[float]]


def measure_overhead(tokens: int, rounds: int, progress: Progress) -> Report:
    """Runs the benchmark with documents of ``tokens``."""
    model = BenchModel()
    document_bytes = tokens * model.token_bytes
    rates: _Series = {"off": [], "on": []}
    spent: _Series = {"off": [], "on": []}
    with tempfile.TemporaryDirectory(prefix="kvrecall-bench-") as name, ExitStack() as stack:
        folder = Path(name)
        path = model.write(folder / "bench-qwen3", tokens + 64)
        base = [str(path), "--max-model-len", str(tokens + 64), "--block-size", str(BLOCK)]
        base += ["--kv-cache-memory-bytes", str(8 * document_bytes), "--dtype", model.dtype]
        pool = ["--host-size", str(8 * document_bytes), "--disk-path", str(folder / "pool")]
        pool += ["--disk-size", str(64 * document_bytes)]
        servers: dict[str, ServerProcess] = {}
        for kind, options in (("off", ["--no-pool"]), ("on", pool)):
            progress(f"starting the server with the pool {kind}")
            server = ServerProcess([*base, *options], folder / f"{kind}.log", progress)
            servers[kind] = stack.enter_context(server)
        texts = Texts()
        for server in servers.values():
            server.ask(texts.document(tokens), 1)
        for turn in range(rounds):
            for kind in ("off", "on") if turn % 2 else ("on", "off"):
                before = servers[kind].cpu_seconds()
                rates[kind].append(_round(servers[kind], texts, tokens))
                servers[kind].settle()
                spent[kind].append(servers[kind].cpu_seconds() - before)
            progress(f"round {turn + 1} of {rounds}")
    return _report(rates, spent, tokens)


def _round(server: ServerProcess, texts: Texts, tokens: int) -> float:
    """Prefill throughput, tokens a second."""
    documents = [texts.document(tokens) for _ in range(IN_A_ROW)]
    begin = time.perf_counter()
    computed = sum(server.ask(document, 1).recalled["computed"] for document in documents)
    return computed / (time.perf_counter() - begin)


def _report(rates: _Series, spent: _Series, tokens: int) -> Report:
    shown = {kind: percentiles(values) for kind, values in rates.items()}
    cpu = {kind: percentiles(values) for kind, values in spent.items()}
    cost = percentiles([1 - on / off for on, off in zip(rates["on"], rates["off"], strict=True)])
    more = percentiles([on / off - 1 for on, off in zip(spent["on"], spent["off"], strict=True)])
    rows = tuple(
        (
            f"pool {kind}",
            *(f"{shown[kind][p]:.0f}" for p in ("p10", "p50", "p90")),
            f"{cpu[kind]['p50'] / IN_A_ROW / tokens * 1e3:.2f}",
        )
        for kind in ("off", "on")
    )
    notes = (
        f"cost of the pool, median of {cost['n']:.0f} pairs: {cost['p50']:.2%} of throughput "
        f"(p10 {cost['p10']:.2%}, p90 {cost['p90']:.2%}; goal < {GOAL:.0%}); "
        f"{more['p50']:+.2%} processor time",
    )
    figures: dict[str, object] = {
        "tokens": tokens,
        "tokens_per_s": shown,
        "cost": cost,
        "cpu_cost": more,
    }
    columns = ("prefill, tokens/s", "p10", "p50", "p90", "CPU s per 1,000 tokens")
    return Report("overhead", columns, rows, figures, notes)
