"""The same workload against each deployment, one after the other; percentiles of each."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from kvrecall.errors import EngineError, KvrecallError
from kvrecall.lab.bench.model import BenchModel
from kvrecall.lab.bench.report import Report, latencies
from kvrecall.lab.bench.serving.deployments import Deployment, Sizes
from kvrecall.lab.bench.serving.workload import ANSWER_TOKENS, Run, Workload, play
from kvrecall.lab.engines.server import Progress

BLOCK = 64
SOURCES = ("device", "host", "disk", "remote", "unspecified")
"""``unspecified``: what another project's connector brought."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """Sizes of the tiers as shares of the KV cache of all that is asked."""

    device: float = 0.25
    host: float = 0.75
    disk: float = 4.0


def measure_serving(
    workload: Workload,
    deployments: Sequence[Deployment],
    capacity: Capacity,
    progress: Progress,
    budget_s: float = math.inf,
) -> Report:
    """Plays ``workload`` against every deployment and reports them side by side.

    A deployment whose servers do not start, or fail a request, or that would presumably end more
    than ``budget_s`` seconds after the beginning, is in the report with the reason. Raises
    EngineError if that is so of all.
    """
    # smaller than other benchmarks': every kind of server has 120,000 tokens to compute
    model = BenchModel(hidden=512, layers=6, heads=8)
    longest = workload.longest_prompt + 2 * ANSWER_TOKENS * len(workload.sessions[0].turns) + 256
    unique = max(workload.unique_tokens(BLOCK), 2 * longest) * model.token_bytes
    figures: dict[str, Mapping[str, Any]] = {}
    absent: dict[str, str] = {}
    end, longest_s = time.monotonic() + budget_s, 0.0
    with tempfile.TemporaryDirectory(prefix="kvrecall-bench-") as name:
        path = model.write(Path(name) / "bench-qwen3", longest)
        for deployment in deployments:
            folder = Path(name) / deployment.name
            folder.mkdir()
            sizes = Sizes(
                model=path,
                folder=folder,
                max_model_len=longest,
                device_bytes=max(int(unique * capacity.device), 2 * longest * model.token_bytes),
                host_bytes=int(unique * capacity.host),
                disk_bytes=int(unique * capacity.disk) + (64 << 20),
                block_size=BLOCK,
                dtype=model.dtype,
            )
            begin = time.monotonic()
            if figures and begin + longest_s > end:
                absent[deployment.name] = f"no time: {budget_s:.0f} seconds for all"
                continue
            progress(f"{deployment.name}: {deployment.story}")
            try:
                figures[deployment.name] = _figures(_play(workload, deployment, sizes, progress))
                longest_s = max(longest_s, time.monotonic() - begin)
            except (KvrecallError, OSError, httpx.HTTPError) as error:
                absent[deployment.name] = f"{type(error).__name__}: {error}"[-2000:]
                progress(f"without {deployment.name}: {error}")
    if not figures:
        raise EngineError(f"no variant could be measured: {absent}")
    return _report(workload, deployments, figures, absent, unique)


def _play(workload: Workload, deployment: Deployment, sizes: Sizes, progress: Progress) -> Run:
    """One deployment's run, after a request to each server that is not counted."""
    total = sum(len(session.turns) for session in workload.sessions)

    def note(done: int) -> None:
        if done % max(1, total // 8) == 0:
            progress(f"  {done} of {total} requests")

    with deployment.servers(sizes, progress) as urls:
        for url in urls:
            body = {"inputs": "warm up " * 40, "parameters": {"max_new_tokens": 4}}
            httpx.post(f"{url}/generate", json=body, timeout=300).raise_for_status()
        return play(workload, urls, note)


def _figures(run: Run) -> dict[str, object]:
    """What a deployment gave: seconds, tokens a second, hit rates as shares of prompt tokens."""
    samples = run.samples
    prompt = sum(sum(sample.recalled.values()) for sample in samples)
    hits = {s: sum(sample.recalled.get(s, 0) for sample in samples) for s in SOURCES}
    return {
        "requests": len(samples),
        "seconds": round(run.seconds, 2),
        "prompt_tokens": prompt,
        "tokens_per_s": round(prompt / run.seconds, 1),
        "ttft_s": latencies([sample.ttft_s for sample in samples]),
        "tpot_s": latencies([sample.tpot_s for sample in samples]),
        "hit_rate": round(sum(hits.values()) / prompt, 4),
        "hit_rate_by_tier": {s: round(n / prompt, 4) for s, n in hits.items()},
    }


def _report(
    workload: Workload,
    deployments: Sequence[Deployment],
    figures: Mapping[str, Mapping[str, Any]],
    absent: Mapping[str, str],
    unique: int,
) -> Report:
    columns = ("served with", "s", "prompt tok/s", "hit rate", "TTFT p50", "p95", "p99", "TPOT p50")
    rows = tuple(
        (
            name,
            f"{found['seconds']:.0f}",
            f"{found['tokens_per_s']:.0f}",
            f"{found['hit_rate']:.3f}",
            *(f"{seconds:.2f}" for seconds in found["ttft_s"].values()),
            f"{found['tpot_s']['p50'] * 1e3:.0f} ms",
        )
        for name, found in figures.items()
    )
    notes = (
        f"{workload.story}; {workload.prompt_tokens} prompt tokens in all, "
        f"{unique / 2**20:.0f} MiB of KV cache; the device holds a quarter of it",
        *(f"{deployment.name}: {deployment.story}" for deployment in deployments),
        *(f"left out: {name}: {reason.splitlines()[0]}" for name, reason in absent.items()),
    )
    shown = {
        "story": workload.story,
        "prompt_tokens": workload.prompt_tokens,
        "unique_bytes": unique,
        "variants": figures,
        "absent": dict(absent),
    }
    return Report(workload.name, columns, rows, shown, notes)
