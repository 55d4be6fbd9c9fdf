"""The same workload against each kind of server, one after the other; percentiles of each."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from kvrecall.errors import EngineError, KvrecallError
from kvrecall.lab.bench.model import BenchModel
from kvrecall.lab.bench.report import Report, quantiles
from kvrecall.lab.bench.serving.clients import Run, play
from kvrecall.lab.bench.serving.field import Field
from kvrecall.lab.bench.serving.variants import Variant
from kvrecall.lab.bench.serving.workload import ANSWER_TOKENS, Workload, longest_prompt
from kvrecall.lab.engines.server import Progress

BLOCK = 64
SOURCES = ("device", "host", "disk", "remote", "unspecified")
"""``unspecified``: what another project's connector brought."""


@dataclass(frozen=True, slots=True)
class Room:
    """Room of the tiers as shares of the KV cache of all that is asked."""

    device: float = 0.25
    host: float = 0.75
    disk: float = 4.0


def measure_serving(
    workload: Workload,
    variants: Sequence[Variant],
    room: Room,
    progress: Progress,
    budget_s: float = math.inf,
) -> Report:
    """Plays ``workload`` against every variant and reports them side by side.

    A variant whose servers do not start, or fail a request, or that would presumably end more than
    ``budget_s`` seconds after the beginning, is in the report with the reason. Raises EngineError
    if that is so of all.
    """
    # smaller than other benchmarks': every kind of server has 120,000 tokens to compute
    model = BenchModel(hidden=512, layers=6, heads=8)
    longest = longest_prompt(workload) + 2 * ANSWER_TOKENS * len(workload.sessions[0].turns) + 256
    unique = max(_unique_tokens(workload), 2 * longest) * model.token_bytes
    figures: dict[str, Mapping[str, object]] = {}
    absent: dict[str, str] = {}
    end, longest_s = time.monotonic() + budget_s, 0.0
    with tempfile.TemporaryDirectory(prefix="kvrecall-bench-") as name:
        path = model.write(Path(name) / "bench-qwen3", longest)
        for variant in variants:
            folder = Path(name) / variant.name
            folder.mkdir()
            field = Field(
                model=path,
                folder=folder,
                max_model_len=longest,
                device_bytes=max(int(unique * room.device), 2 * longest * model.token_bytes),
                host_bytes=int(unique * room.host),
                disk_bytes=int(unique * room.disk) + (64 << 20),
                block_size=BLOCK,
                dtype=model.dtype,
            )
            begin = time.monotonic()
            if figures and begin + longest_s > end:
                absent[variant.name] = f"no time: {budget_s:.0f} seconds for all"
                continue
            progress(f"{variant.name}: {variant.story}")
            try:
                figures[variant.name] = _figures(_measured(workload, variant, field, progress))
                longest_s = max(longest_s, time.monotonic() - begin)
            except (KvrecallError, OSError, httpx.HTTPError) as error:
                absent[variant.name] = f"{type(error).__name__}: {error}"[-2000:]
                progress(f"without {variant.name}: {error}")
    if not figures:
        raise EngineError(f"no variant could be measured: {absent}")
    return _report(workload, variants, figures, absent, unique)


def _measured(workload: Workload, variant: Variant, field: Field, progress: Progress) -> Run:
    """One variant's run, after a request to each server that is not counted."""
    total = sum(len(session.turns) for session in workload.sessions)
    with variant.servers(field, progress) as urls:
        for url in urls:
            body = {"inputs": "warm up " * 40, "parameters": {"max_new_tokens": 4}}
            httpx.post(f"{url}/generate", json=body, timeout=300).raise_for_status()

        def note(done: int) -> None:
            if done % max(1, total // 8) == 0:
                progress(f"  {done} of {total} requests")

        return play(workload, urls, note)


def _unique_tokens(workload: Workload) -> int:
    """Tokens a pool would have to hold to keep everything: prefixes in common count once."""
    prefixes: set[int] = set()
    answers = 0
    for session in workload.sessions:
        text = session.opening + "".join(turn.question for turn in session.turns)
        prefixes.update(hash(text[:end]) for end in range(BLOCK, len(text) + 1, BLOCK))
        answers += ANSWER_TOKENS * len(session.turns)
    return BLOCK * len(prefixes) + answers


def _figures(run: Run) -> dict[str, object]:
    """What a variant gave: seconds, tokens a second, hit rates as shares of prompt tokens."""
    samples = run.samples
    prompt = sum(sum(sample.recalled.values()) for sample in samples)
    hits = {s: sum(sample.recalled.get(s, 0) for sample in samples) for s in SOURCES}
    return {
        "requests": len(samples),
        "seconds": round(run.seconds, 2),
        "prompt_tokens": prompt,
        "tokens_per_s": round(prompt / run.seconds, 1),
        "ttft_s": quantiles([sample.ttft_s for sample in samples]),
        "tpot_s": quantiles([sample.tpot_s for sample in samples]),
        "hit_rate": round(sum(hits.values()) / prompt, 4),
        "hit_rate_by_tier": {s: round(n / prompt, 4) for s, n in hits.items()},
    }


def _report(
    workload: Workload,
    variants: Sequence[Variant],
    figures: Mapping[str, Mapping[str, object]],
    absent: Mapping[str, str],
    unique: int,
) -> Report:
    columns = ("served with", "s", "prompt tok/s", "hit rate", "TTFT p50", "p95", "p99", "TPOT p50")
    rows = []
    for variant in variants:
        if variant.name in absent:
            continue
        found = figures[variant.name]
        ttft, tpot = found["ttft_s"], found["tpot_s"]
        assert isinstance(ttft, dict)
        assert isinstance(tpot, dict)
        rows.append(
            (
                variant.name,
                f"{found['seconds']:.0f}",
                f"{found['tokens_per_s']:.0f}",
                f"{found['hit_rate']:.3f}",
                *(f"{ttft[name]:.2f}" for name in ("p50", "p95", "p99")),
                f"{tpot['p50'] * 1e3:.0f} ms",
            )
        )
    notes = (
        f"{workload.story}; {workload.prompt_tokens} prompt tokens in all, "
        f"{unique / 2**20:.0f} MiB of KV cache; the device holds a quarter of it",
        *(f"{variant.name}: {variant.story}" for variant in variants),
        *(f"left out: {name}: {reason.splitlines()[0]}" for name, reason in absent.items()),
    )
    shown = {
        "story": workload.story,
        "prompt_tokens": workload.prompt_tokens,
        "unique_bytes": unique,
        "variants": figures,
        "absent": dict(absent),
    }
    return Report(workload.name, columns, tuple(rows), shown, notes)
