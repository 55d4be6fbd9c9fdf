"""``bench replay``: the middle of a recorded trace on engines whose pools hold then what they would
have come to hold by serving all of the trace before it.

A block of the trace becomes one of the engine. The requests before the slice are not computed: the
pool is told of their use, and gets made-up KV under the keys that the engine looks for (LMCache
cannot be given such). The device begins empty. One request is asked at a time, so that the hits of
each can be set against the simulation of the same slice.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from kvrecall.bench.model import BenchModel
from kvrecall.bench.report import Report, latencies, progress
from kvrecall.pool.slots import slot_bytes_of
from kvrecall.simulate.replay import BLOCKS, SimulatedPool, TierSpec, tiers_of
from kvrecall.simulate.trace import TraceRequest, read_trace
from kvrecall_lab.engines.engine import Answer, EngineProcess, Engines, Question
from kvrecall_lab.shapes.shapes import environment

_POLICY = "lru"
"""What a pool holds follows from the last uses alone; vLLM's device cache has the same."""

_TAIL = 5  # tokens behind the blocks of a prompt, so that all of them can be hit
_RECORD = 512  # bytes that a record may have beside the KV
_FILLED_AT_ONCE = 50
_PATIENCE_S = 600.0
_TIERS = ("device", "host", "disk")
_Hits = Mapping[str, int]
"""Blocks by tier."""


def measure_replay(
    trace: Annotated[Path, typer.Option(help="In Mooncake's format.")],
    requests: Annotated[int, typer.Option(min=2, help="Of the slice.")] = 60,
    begin: Annotated[float, typer.Option(min=0, max=1, help="Where it begins.")] = 0.5,
    block: Annotated[int, typer.Option(min=16, help="Tokens that 512 become.")] = 32,
    device: Annotated[int, typer.Option(min=300, help="Blocks of the device cache.")] = 500,
    host: Annotated[int, typer.Option(min=300, help="Blocks in host memory.")] = 1000,
    disk: Annotated[int, typer.Option(min=300, help="Blocks on disk.")] = 4000,
) -> Report:
    """A slice from the middle of a trace, with the pool as full as it would be then."""
    whole = read_trace(trace).requests
    first = int(begin * len(whole))
    before, asked = whole[:first], whole[first : first + requests]
    prompts = [_prompt(one, block, number) for number, one in enumerate(asked)]
    accesses = sum(len(one.chain) for one in asked)
    longest = max(len(one.chain) for one in whole[: first + requests]) * block + _TAIL + 1
    model = BenchModel(hidden=512, layers=4, heads=8, kv_heads=1)
    nbytes = slot_bytes_of(block * model.token_bytes + _RECORD)
    rows: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="kvrecall-replay-") as name:
        folder = Path(name)
        engines = Engines(folder)
        options: dict[str, Any] = {"model": str(model.write(folder / "model", longest))}
        options |= {"dtype": model.dtype, "block_size": block, "max_model_len": longest}
        options |= {"kv_cache_memory_bytes": (device + 1) * block * model.token_bytes}
        pool: dict[str, Any] = {"policy": _POLICY, "audit": "off", "load_or_compute": "load"}
        pool |= {"match_unit": "off", "lookup_deadline": 5, "host_size": host * nbytes}
        on_disk = {"disk_path": str(folder / "disk"), "async_write": False}
        on_disk |= {"disk_size": (8 << 20) + disk * (nbytes + 4096)}
        variants: Mapping[str, tuple[dict[str, Any], Mapping[str, int]]] = {
            "no cache": ({"enable_prefix_caching": False}, {}),
            "device": ({}, {}),
            "device, host": ({"pool": pool}, {"host": host}),
            "device, host, disk": ({"pool": pool | on_disk}, {"host": host, "disk": disk}),
        }
        for kind, (more, sizes) in variants.items():
            progress(f"{kind}: an engine starts")
            with engines.running(kind, {**options, **more}, environment=environment()) as engine:
                if sizes:
                    held = _fill(engine, _deciding(before, max(sizes.values())), block)
                    sizes = {tier: held.get(tier, size) for tier, size in sizes.items()}
                answers = [
                    engine.answers([Question(str(number), prompt, 1)], _PATIENCE_S)[0]
                    for number, prompt in enumerate(prompts)
                ]
            simulated = [] if kind == "no cache" else _simulated(before, asked, device, sizes)
            rows[kind] = _row(answers, prompts, simulated, block) | {"sizes": sizes}
    shown = tuple(
        (
            kind,
            f"{row['computed_tokens']:,}",
            *(f"{row['ttft_s'][rank] * 1e3:,.0f}" for rank in ("p50", "p95")),
            *(f"{sum(row[hits].values()) / accesses:.4f}" for hits in ("hits", "simulated")),
            str(row["requests_that_differ"]),
            ", ".join(f"{row['hits'][tier]}/{row['simulated'][tier]}" for tier in _TIERS),
        )
        for kind, row in rows.items()
    )
    columns = ("served with", "tokens computed", "TTFT p50, ms", "p95", "hit rate", "simulated")
    more_columns = ("requests that differ", "device, host, disk: blocks hit/simulated")
    notes = (
        f"requests {first} to {first + len(asked) - 1} of {trace.name}, one at a time, blocks of "
        f"512 tokens made {block}: {accesses:,} blocks asked for",
    )
    figures = {"first": first, "requests": requests, "block": block, "variants": rows}
    return Report("replay", (*columns, *more_columns), shown, figures, notes)


def _prompt(request: TraceRequest, block: int, number: int) -> tuple[int, ...]:
    parts = [(key, block) for key in request.chain] + [(f"tail {number}".encode(), _TAIL)]
    drawn = (random.Random(key).choices(range(1, 250), k=count) for key, count in parts)
    return tuple(token for part in drawn for token in part)


def _deciding(before: Sequence[TraceRequest], capacity: int) -> Sequence[TraceRequest]:
    """The last requests, which use twice as many blocks as a tier holds: those before them do not
    matter to what it holds then."""
    seen: set[bytes] = set()
    at = len(before)
    while at and len(seen) < 2 * capacity:
        at -= 1
        seen.update(before[at].chain)
    return before[at:]


def _fill(engine: EngineProcess, history: Sequence[TraceRequest], block: int) -> _Hits:
    """Returns how many blocks each tier that evicts holds: a disk is never quite full."""
    held: _Hits = {}
    for at in range(0, len(history), _FILLED_AT_ONCE):
        part = history[at : at + _FILLED_AT_ONCE]
        engine.send({"do": "fill", "prompts": [_prompt(one, block, 0) for one in part]})
        held = engine.await_reply("fill", _PATIENCE_S)
        progress(f"  {at + len(part)} of {len(history)} requests before the slice: {held}")
    return held


def _simulated(
    before: Sequence[TraceRequest], asked: Sequence[TraceRequest], device: int, sizes: _Hits
) -> list[dict[str, int]]:
    """What each request hits."""
    below = tiers_of([TierSpec(*size) for size in sizes.items()], _POLICY)
    if below:
        pool = SimulatedPool(below, BLOCKS)
        for one in before:
            pool.serve(one.chain, one.now)
    pool = SimulatedPool([*tiers_of([TierSpec("device", device)], _POLICY), *below], BLOCKS)
    found = []
    for one in asked:
        earlier = [count.read for count in pool.counts]
        pool.serve(one.chain, one.now)
        pairs = zip(pool.counts, earlier, strict=True)
        found.append({count.name: count.read - read for count, read in pairs})
    return found


def _row(
    answers: Sequence[Answer],
    prompts: Sequence[tuple[int, ...]],
    simulated: Sequence[_Hits],
    block: int,
) -> dict[str, Any]:
    tokens, cached = sum(map(len, prompts)), [one.cached for one in answers]
    hits = {tier: sum(one.sources.get(tier, 0) for one in answers) // block for tier in _TIERS}
    if not any(hits.values()):  # without a pool nobody tells
        hits["device"] = sum(cached) // block
    pairs = zip(cached, simulated or [{}] * len(cached), strict=True)
    return {
        "prompt_tokens": tokens,
        "computed_tokens": tokens - sum(cached),
        "ttft_s": latencies([one.ttft_s for one in answers]),
        "hits": hits,
        "simulated": {tier: sum(one.get(tier, 0) for one in simulated) for tier in _TIERS},
        "requests_that_differ": sum(mine // block != sum(one.values()) for mine, one in pairs),
    }
