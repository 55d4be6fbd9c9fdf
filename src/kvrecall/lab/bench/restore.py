"""Time to first token on a long prefix: computed, from the device, from the host, from disk.

One server, asked over HTTP. Its host memory holds one and a half prefixes, so three documents
asked in turn push each other to disk: every turn measures a disk hit, a device hit and, after the
engine's own cache was emptied, a host hit of the same prefix; some turns a new document, computed.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kvrecall.errors import EngineError
from kvrecall.lab.bench.driver import Answer, Progress, ServerProcess
from kvrecall.lab.bench.precision import ITEM_BYTES, fast_dtype
from kvrecall.lab.bench.report import Report, percentiles
from kvrecall.lab.bench.text import Texts
from kvrecall.lab.models import write_model

BLOCK = 128
TAIL = 16
"""Tokens behind the prefix: what a hit leaves to compute."""

SOURCES = ("computed", "device", "host", "disk")
GOALS = {"host": 1.3, "disk": 2.5}
"""Most a hit may take, relative to one on the device; all hits: a tenth of computing."""


@dataclass(frozen=True, slots=True)
class BenchModel:
    """A Qwen3 shape whose KV cache per token is as small, next to its weights, as real models'."""

    hidden: int = 1024
    layers: int = 8
    heads: int = 16
    kv_heads: int = 4
    head_dim: int = 64
    dtype: str = field(default_factory=fast_dtype)

    @property
    def token_bytes(self) -> int:
        """Bytes of KV cache a token."""
        return ITEM_BYTES[self.dtype] * 2 * self.layers * self.kv_heads * self.head_dim

    def write(self, folder: Path, max_position: int) -> Path:
        """Writes the model and returns its path."""
        return write_model(
            folder,
            hidden=self.hidden,
            layers=self.layers,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            max_position=max_position,
            dtype=self.dtype,
        )


@dataclass(slots=True)
class _Times:
    """Seconds to the first token by the source of the prefix."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: {s: [] for s in SOURCES})

    def note(self, source: str, answer: Answer, prefix: int) -> None:
        """Takes a time; raises EngineError if the prefix did not come from ``source``."""
        expected = 0 if source == "computed" else prefix
        found = {tier: answer.recalled.get(tier, 0) for tier in SOURCES[1:]}
        wanted = {tier: expected if tier == source else 0 for tier in SOURCES[1:]}
        if found != wanted:
            raise EngineError(f"meant to measure {wanted} recalled tokens, the server had {found}")
        self.seconds[source].append(answer.ttft_s)


def measure_restore(tokens: int, repetitions: int, progress: Progress) -> Report:
    """Runs the benchmark on a prefix of ``tokens`` (a multiple of the block size)."""
    model = BenchModel()
    prefix_bytes = tokens * model.token_bytes
    times = _Times()
    with tempfile.TemporaryDirectory(prefix="kvrecall-bench-") as name:
        folder = Path(name)
        path = model.write(folder / "bench-qwen3", tokens + 1024)
        arguments = [str(path), "--max-model-len", str(tokens + 1024), "--dtype", model.dtype]
        arguments += ["--block-size", str(BLOCK), "--kv-cache-memory-bytes", str(4 * prefix_bytes)]
        arguments += ["--host-size", str(prefix_bytes * 3 // 2)]
        arguments += ["--disk-path", str(folder / "pool"), "--disk-size", str(32 * prefix_bytes)]
        progress("starting the server")
        with ServerProcess(arguments, folder / "server.log", progress) as server:
            _measure(server, times, tokens, repetitions, progress)
    from kvrecall.lab.bench.bandwidth import measure_bandwidth

    progress("copy bandwidth")
    bandwidth = measure_bandwidth(tokens // BLOCK, model.layers, BLOCK * model.token_bytes)
    return _report(times.seconds, tokens, prefix_bytes, model.dtype, bandwidth)


def _measure(
    server: ServerProcess, times: _Times, tokens: int, repetitions: int, progress: Progress
) -> None:
    texts = Texts()
    documents = [texts.document(tokens + TAIL) for _ in range(3)]
    server.ask(texts.document(2 * BLOCK), 2)
    for document in documents:
        server.ask(document, 2)
        server.settle()
    server.forget_device()
    for turn in range(repetitions):
        document = documents[turn % 3]
        times.note("disk", server.ask(document, 2), tokens)
        for source in ("device", "host"):
            server.settle()
            if source == "host":
                server.forget_device()
            times.note(source, server.ask(document, 2), tokens)
        server.settle()
        server.forget_device()
        if turn < max(2, repetitions // 3):  # the slowest, and the least in doubt
            times.note("computed", server.ask(texts.document(tokens + TAIL), 2), tokens)
            server.settle()
            server.forget_device()
        progress(f"turn {turn + 1} of {repetitions}")


def _report(
    seconds: Mapping[str, list[float]],
    tokens: int,
    prefix_bytes: int,
    dtype: str,
    bandwidth: Mapping[str, float],
) -> Report:
    shown = {source: percentiles(values) for source, values in seconds.items()}
    device, computed = shown["device"]["p50"], shown["computed"]["p50"]
    rows = tuple(
        (
            source,
            *(f"{shown[source][p] * 1e3:.1f}" for p in ("p10", "p50", "p90")),
            f"{shown[source]['p50'] / device:.2f}",
            f"{shown[source]['p50'] / computed:.4f}",
            f"{shown[source]['n']:.0f}",
        )
        for source in SOURCES
    )
    ratios = {f"{s}_to_device": round(shown[s]["p50"] / device, 3) for s in ("host", "disk")}
    figures: dict[str, object] = {
        "tokens": tokens,
        "prefix_bytes": prefix_bytes,
        "dtype": dtype,
        "ttft_s": shown,
        **ratios,
        "worst_hit_to_computed": round(max(_p50s(shown, SOURCES[1:])) / computed, 4),
        **bandwidth,
    }
    notes = (
        f"prefix of {tokens} tokens, {prefix_bytes / 2**20:.0f} MiB of KV cache, {dtype}",
        f"goals: host <= {GOALS['host']} x device, disk <= {GOALS['disk']} x device, "
        "each hit < 0.1 of computing",
        f"arena -> device KV {bandwidth['restore_gb_s']:.1f} GB/s, a plain copy of the same bytes "
        f"{bandwidth['plain_copy_gb_s']:.1f} GB/s: {bandwidth['restore_to_plain']:.2f} (goal 0.8)",
    )
    columns = ("prefix from", "p10 ms", "p50 ms", "p90 ms", "to device", "to computed", "n")
    return Report("restore", columns, rows, figures, notes)


def _p50s(shown: Mapping[str, Mapping[str, float]], sources: Iterable[str]) -> list[float]:
    return [shown[source]["p50"] for source in sources]
