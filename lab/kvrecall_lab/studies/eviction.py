"""The measurements of docs/eviction.md.

``python -m kvrecall_lab.studies.eviction rates|known|left-out TRACE [KIND ...]``, kinds as in
 ``_CAPACITIES``,
``... tenants [CAPACITY ...] [--hours H]`` and ``... cost [CAPACITY]``.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from kvrecall.block import SHARED, BlockKey
from kvrecall.pool.eviction import POLICY_NAMES, EvictionPolicy, hazard, lifetable, make_policy
from kvrecall.pool.hints import HintRecord
from kvrecall.simulate.replay import TierSpec, clairvoyant_hits, replay
from kvrecall.simulate.trace import Trace, block_key, read_trace
from kvrecall.simulate.workload import MIXED, WORKLOAD_HOURS, WORKLOADS, make_workload
from kvrecall_lab.variants import doubled, part, silent, thinned

_CAPACITIES = {
    "conversation": (1_000, 5_859, 10_000, 30_000, 50_000, 97_656),
    "variant": (1_000, 5_859, 30_000),
    "synthetic": (500, 2_000, 8_000),
}
_LEFT_OUT = {"conversation": 5_859, "variant": 5_859, "synthetic": 500}
_AS_IT_IS = "as it is"
_CONSTANTS: Mapping[str, Mapping[str, float]] = {
    _AS_IT_IS: {},
    "evidence / 2": {"_EVIDENCE": 2.0},
    "evidence x 2": {"_EVIDENCE": 8.0},
    "smoothed once": {"_SMOOTHED": 1},
    "smoothed 8 times": {"_SMOOTHED": 8},
    "fades twice as fast": {"_FADE": 0.995},
    "fades half as fast": {"_FADE": 0.99875},
}
_FOREVER = 1 << 40
Counts = list[list[float]]


def _traces(path: Path, kinds: Collection[str]) -> Iterator[tuple[str, Trace]]:
    whole = read_trace(path)
    if "conversation" in kinds:
        yield "conversation", whole
    if "variant" in kinds:
        yield "variant", part(whole, 0.0, 0.5)
        yield "variant", part(whole, 0.5, 1.0)
        yield "variant", thinned(whole, 4)
        yield "variant", doubled(whole, 900.0)
    if "synthetic" in kinds:
        for name in WORKLOADS:
            yield "synthetic", make_workload(name, seed=1)


def rates(path: Path, kinds: Collection[str] = (), policies: Sequence[str] = POLICY_NAMES) -> None:
    """Prints the table of hit rates in Markdown, a line as soon as it is known. No kinds: all."""
    print(f"| trace | blocks | {' | '.join(policies)} | clairvoyant | gap closed |")
    print("|---" * (len(policies) + 4) + "|")
    for kind, trace in _traces(path, kinds or _CAPACITIES):
        for capacity in _CAPACITIES[kind]:
            tiers = [TierSpec("host", capacity)]
            found = {name: replay(trace, tiers, name).hit_rate for name in policies}
            best = clairvoyant_hits(trace, capacity) / trace.blocks
            gap = best - found["lru"]
            closed = f"{(found['hazard'] - found['lru']) / gap:+.0%}" if gap > 5e-4 else "-"
            cells = " | ".join(f"{found[name]:.4f}" for name in policies)
            line = f"| {trace.name} | {capacity:,} | {cells} | {best:.4f} | {closed} |"
            print(line, flush=True)


class _Learner(hazard.HazardPolicy):
    """Learns from a whole trace: forgets nothing, and old counts do not fade."""

    def __init__(self) -> None:
        super().__init__(1, remember=_FOREVER)
        self._rival.end()

    def _refresh(self, fade: float = 1.0) -> None:
        super()._refresh()

    def learn(self, trace: Trace) -> tuple[Counts, Counts, float]:
        """What it counts in ``trace``: used, entered, and the mean length of a chain."""
        hints = HintRecord()
        for request in trace.requests:
            advice = hints.used(request.chain, request.now, SHARED, request.hint)
            self.access(request.chain, request.now, advice=advice)
        table = self._table
        return table.used, table.entered, trace.blocks / len(trace.requests)


class _Known(hazard.HazardPolicy):
    """Knows the life tables of its trace in advance, and learns nothing: what `hazard` reaches if
    learning costs nothing. The tables have seen each session that they judge, so they know a little
    more than could be learned from other sessions."""

    def __init__(self, counts: tuple[Counts, Counts, float], capacity: int) -> None:
        self._counts = counts
        super().__init__(capacity, remember=_FOREVER)

    def _refresh(self, fade: float = 1.0) -> None:
        used, entered, self._mean_chain = self._counts
        self._table.used, self._table.entered = (
            [[*row] for row in used],
            [[*row] for row in entered],
        )
        self._returns = _FOREVER
        self._rival.end()
        super()._refresh()
        self._refresh_at = _FOREVER


def known(path: Path, kinds: Collection[str] = ()) -> None:
    """Prints the hit rates of `hazard` that learns while serving, and of `hazard` that knows the
    life tables of the whole trace in advance."""
    print("| trace | blocks | lru | hazard | tables known | hazard / lru | hazard / known |")
    print("|---" * 7 + "|")
    for kind, trace in _traces(path, kinds or _CAPACITIES):
        counts = _Learner().learn(trace)
        for capacity in _CAPACITIES[kind]:
            tiers = [TierSpec("host", capacity)]
            lru, learned = (replay(trace, tiers, name).hit_rate for name in ("lru", "hazard"))
            best = replay(trace, tiers, partial(_Known, counts)).hit_rate
            shares = " | ".join(f"{learned / it:.3f}" if it else "-" for it in (lru, best))
            cells = " | ".join(f"{rate:.4f}" for rate in (lru, learned, best))
            print(f"| {trace.name} | {capacity:,} | {cells} | {shares} |", flush=True)


def left_out(path: Path, kinds: Collection[str] = ()) -> None:
    """Prints the hit rates of `hazard` with other constants, at the smallest capacity of each kind,
    and with those that were the best on all other traces (by the mean of their shares of what is
    reached as it is)."""
    found: dict[str, dict[str, float]] = {}
    print(f"| trace | blocks | {' | '.join(_CONSTANTS)} |")
    print("|---" * (len(_CONSTANTS) + 2) + "|")
    for kind, trace in _traces(path, kinds or _CAPACITIES):
        capacity = _LEFT_OUT[kind]
        rates = found[trace.name] = {}
        for name, constants in _CONSTANTS.items():
            with _changed(constants):
                rates[name] = replay(trace, [TierSpec("host", capacity)], "hazard").hit_rate
        cells = " | ".join(f"{rate:.4f}" for rate in rates.values())
        print(f"| {trace.name} | {capacity:,} | {cells} |", flush=True)
    print("\n| trace | best on the others | rate with them | as it is |\n|---|---|---|---|")
    for trace_name, rates in found.items():
        others = [each for name, each in found.items() if name != trace_name]
        best = max(
            _CONSTANTS, key=lambda name: sum(each[name] / each[_AS_IT_IS] for each in others)
        )
        print(f"| {trace_name} | {best} | {rates[best]:.4f} | {rates[_AS_IT_IS]:.4f} |")


@contextmanager
def _changed(constants: Mapping[str, float]) -> Iterator[None]:
    """Other values of constants of the policy or its tables, by name."""
    places: list[tuple[Any, str, float]] = [
        (module, name, getattr(module, name))
        for module in (hazard, lifetable)
        for name in constants
        if hasattr(module, name)
    ]
    assert len(places) == len(constants)
    for module, name, _ in places:
        setattr(module, name, constants[name])
    try:
        yield
    finally:
        for module, name, before in places:
            setattr(module, name, before)


def tenants(
    capacities: Sequence[int] = (500, 1_000, 2_000, 4_000, 8_000), hours: float = WORKLOAD_HOURS
) -> None:
    """Prints the hit rates of three tenants of agents, an honest one, one that says nothing and one
    that lies: with LRU, and with `hazard` if none or all of them say what they say."""
    trace = make_workload("agents", hours=hours, hints=MIXED)
    mute = silent(trace)
    print(
        "| blocks | tenant | lru | hazard, no hints | hazard, their hints |\n|---|---|---|---|---|"
    )
    for capacity in capacities:
        tiers = [TierSpec("host", capacity)]
        runs = [replay(mute, tiers, "lru"), replay(mute, tiers, "hazard")]
        runs.append(replay(trace, tiers, "hazard"))
        for tenant in runs[0].tenants:
            cells = " | ".join(f"{run.tenants[tenant].hit_rate:.4f}" for run in runs)
            print(f"| {capacity:,} | {tenant} | {cells} |", flush=True)
        cells = " | ".join(f"{run.hit_rate:.4f}" for run in runs)
        print(f"| {capacity:,} | all | {cells} |", flush=True)


def cost(capacity: int = 100_000, chain: int = 500) -> None:
    """Prints microseconds of CPU per block of each call, for requests of ``chain`` blocks of which
    half have been seen before, in a full tier; and the longest call."""
    requests = capacity // 100
    print("| policy | access | admit | victims + remove | insert | longest call, ms |")
    print("|---|---|---|---|---|---|")
    for name in POLICY_NAMES:
        stopwatch = _Stopwatch()
        _exercise(make_policy(name, capacity), stopwatch, capacity, chain, requests)
        calls = ("access", "admit", "victims", "insert")
        cells = " | ".join(f"{stopwatch.per_block(call):.2f}" for call in calls)
        print(f"| {name} | {cells} | {stopwatch.longest * 1e3:.1f} |", flush=True)


class _Stopwatch:
    """Adds up the CPU time of calls by name, less what reading the clock takes."""

    def __init__(self) -> None:
        self._start = 0.0
        readings = sorted(-time.thread_time() + time.thread_time() for _ in range(1000))
        self._reading = readings[500]
        self.reset()

    def reset(self) -> None:
        self.longest = 0.0
        self._seconds: dict[str, float] = defaultdict(float)
        self._blocks: dict[str, int] = defaultdict(int)

    def start(self) -> None:
        self._start = time.thread_time()

    def stop(self, call: str, blocks: int) -> None:
        took = time.thread_time() - self._start - self._reading
        self.longest = max(self.longest, took)
        self._seconds[call] += took
        self._blocks[call] += blocks

    def per_block(self, call: str) -> float:
        """Microseconds."""
        return 1e6 * self._seconds[call] / max(1, self._blocks[call])


def _exercise(
    policy: EvictionPolicy, stopwatch: _Stopwatch, capacity: int, chain: int, requests: int
) -> None:
    resident: set[BlockKey] = set()
    half = chain // 2
    for number in range(requests + 2 * capacity // chain):
        if number == 2 * capacity // chain:
            stopwatch.reset()
        now = number * 0.3
        old, new = max(0, number - 200) * chain, number * chain
        ids = [*range(old, old + half), *range(new + half, new + chain)]
        keys = [block_key(i) for i in ids]
        idle = resident.difference(keys)
        stopwatch.start()
        policy.access(keys, now)
        stopwatch.stop("access", chain)
        for depth, key in enumerate(keys):
            if key in resident:
                continue
            parent = keys[depth - 1] if depth else None
            if len(resident) >= capacity:
                stopwatch.start()
                admitted = policy.admit(key, parent, depth, now)
                stopwatch.stop("admit", 1)
                if not admitted:
                    break
                stopwatch.start()
                victims = policy.victims(1, idle.__contains__, now)
                policy.remove(victims[0])
                stopwatch.stop("victims", 1)
                resident.difference_update(victims)
                idle.difference_update(victims)
            stopwatch.start()
            policy.insert(key, parent, depth, now)
            stopwatch.stop("insert", 1)
            resident.add(key)


def main(words: Sequence[str]) -> None:
    match words:
        case ["rates", path, *kinds] if set(kinds) <= set(_CAPACITIES):
            rates(Path(path), kinds)
        case ["known", path, *kinds] if set(kinds) <= set(_CAPACITIES):
            known(Path(path), kinds)
        case ["left-out", path, *kinds] if set(kinds) <= set(_CAPACITIES):
            left_out(Path(path), kinds)
        case ["tenants"]:
            tenants()
        case ["tenants", *words, "--hours", hours] if all(word.isdecimal() for word in words):
            tenants([int(word) for word in words], float(hours))
        case ["tenants", *words] if all(word.isdecimal() for word in words):
            tenants([int(word) for word in words])
        case ["cost"]:
            cost()
        case ["cost", capacity] if capacity.isdecimal():
            cost(int(capacity))
        case _:
            sys.exit(
                "usage: python -m kvrecall_lab.studies.eviction "
                "rates|known|left-out TRACE [KIND ...] | "
                "tenants [N ...] [--hours H] | cost [N]"
            )


if __name__ == "__main__":
    main(sys.argv[1:])
