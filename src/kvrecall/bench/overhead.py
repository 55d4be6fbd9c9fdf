"""``kvrecall bench overhead``: prefill throughput with the pool saving everything, against no pool.

Two servers take turns with documents that neither has seen. A round is several documents in a
row on one server, so that most of the pool's write-behind is measured with the pool; the order of
the two alternates. Processor time is reported beside throughput, because
it shows the cost of the pool also on a busy machine.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from kvrecall.bench.model import BenchModel, Texts
from kvrecall.bench.report import Report, Times, Tokens, cells, percentiles, progress
from kvrecall.processes.server import ServerProcess

IN_A_ROW = 3
GOAL = 0.03


def measure_overhead(tokens: Tokens = 4096, rounds: Times = 8) -> Report:
    """Prefill throughput with the pool saving everything, against no pool."""
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
    return _report(rates, cpu, tokens)


def _report(
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
        f"(p10 {cost['p10']:.2%}, p90 {cost['p90']:.2%}; goal < {GOAL:.0%}); "
        f"{more['p50']:+.2%} processor time",
    )
    figures = {"tokens": tokens, "tokens_per_s": throughput, "cost": cost, "cpu_cost": more}
    columns = ("prefill, tokens/s", "p10", "p50", "p90", "CPU s per 1,000 tokens")
    return Report("overhead", columns, rows, figures, notes)
