"""Reports of the remote tier: against Mooncake's bare client, and a hit against computing."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvrecall.errors import EngineError
from kvrecall.lab.bench.model import BLOCK, TAIL, BenchModel, Texts
from kvrecall.lab.bench.mooncake import measure_mooncake
from kvrecall.lab.bench.report import Report, percentiles
from kvrecall.lab.engines.server import Progress, ServerProcess
from kvrecall.lab.masters import Master

BLOCK_BYTES = 1 << 20
BLOCKS = 128
ROUNDS = 21
TIER_GOAL = 0.9
TTFT_GOAL = 3.0
_REASONS = ("blocks_declined", "loads_given_up", "loads_failed")
"""Counters of why a prefix that is in the store was computed."""


def remote_report(tokens: int, repetitions: int, engines: bool, progress: Progress) -> Report:
    """Runs the benchmark; without ``engines`` only what needs none."""
    with tempfile.TemporaryDirectory(prefix="kvrecall-bench-") as name:
        folder = Path(name)
        progress("through the tier, and Mooncake's client alone")
        figures = measure_mooncake(folder, BLOCK_BYTES, BLOCKS, max(ROUNDS, repetitions))
        if any(isinstance(value, float) and math.isnan(value) for value in figures.values()):
            raise EngineError("a call of Mooncake's bare client failed")
        if engines:
            figures |= _measure_hits(folder, tokens, repetitions, progress)
    return _report(figures)


def _measure_hits(
    folder: Path, tokens: int, repetitions: int, progress: Progress
) -> dict[str, Any]:
    """First tokens of one server that computes and of another that recalls what that one stored."""
    model = BenchModel()
    path = model.write(folder / "bench-qwen3", tokens + 1024)
    prefix_bytes = tokens * model.token_bytes
    master = Master(folder / "hits.log")
    master.start()
    texts = Texts()
    computed: list[float] = []
    recalled: list[float] = []
    shares: list[float] = []
    try:
        with (
            _server("A", path, model, folder, master, tokens, progress) as first,
            _server("B", path, model, folder, master, tokens, progress) as second,
        ):
            warm_up = texts.document(2 * BLOCK + TAIL)
            for server in (first, second):  # the second proves by it what the first writes
                server.ask(warm_up, 2)
                server.settle()
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
    ratio = percentiles(computed)["p50"] / percentiles(recalled)["p50"]
    return {
        "tokens": tokens,
        "prefix_bytes": prefix_bytes,
        "ttft_computed_s": percentiles(computed),
        "ttft_remote_s": percentiles(recalled),
        "computed_to_remote": round(ratio, 2),
        "recalled_shares": shares,
        **reasons,
    }


def _server(
    name: str,
    path: Path,
    model: BenchModel,
    folder: Path,
    master: Master,
    tokens: int,
    progress: Progress,
) -> ServerProcess:
    progress(f"starting server {name}")
    prefix_bytes = tokens * model.token_bytes
    pool = folder / f"pool-{name}.json"
    remote = {"kind": "mooncake", **master.options(8 * prefix_bytes)}
    settings = {"host_size": 4 * prefix_bytes, "remote": remote, "lookup_deadline": 1.0}
    pool.write_text(json.dumps(settings))
    arguments = [str(path), "--max-model-len", str(tokens + 1024), "--block-size", str(BLOCK)]
    arguments += ["--kv-cache-memory-bytes", str(4 * prefix_bytes), "--pool-config", str(pool)]
    arguments += ["--dtype", model.dtype]
    return ServerProcess(arguments, folder / f"{name}.log", progress)


def _report(figures: Mapping[str, Any]) -> Report:
    rows = [
        (
            f"{way}, GB/s",
            f"{figures[f'{way}_tier_bytes_per_s'] / 1e9:.2f}",
            f"{figures[f'{way}_bare_bytes_per_s'] / 1e9:.2f}",
            f"{figures[f'{way}_ratio']:.2f}",
        )
        for way in ("put", "get")
    ]
    tier, bare = figures["checks_tier_s"], figures["checks_bare_s"]
    rows.append(("1,000 existence checks, ms", f"{tier * 1e3:.2f}", f"{bare * 1e3:.2f}", ""))
    notes = [
        f"{figures['blocks']} blocks of {figures['block_bytes'] >> 10} KiB, checksums verified; "
        "both ways over loopback TCP, the memory lent by a third process",
        f"the bare client's 1,000 checks one by one: {figures['checks_singly_s'] * 1e3:.0f} ms",
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
    columns = ("", "tier", "bare client", "ratio")
    return Report("remote", columns, tuple(rows), figures, tuple(notes))
