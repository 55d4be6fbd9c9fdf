"""The measurements of docs/eviction.md.

``python -m bench.eviction rates TRACE [KIND ...]``, kinds as in ``_CAPACITIES``, and
``... study cost [CAPACITY]``.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from kvrecall.block import BlockKey
from kvrecall.pool.eviction import POLICY_NAMES, EvictionPolicy, make_policy
from kvrecall.simulate.replay import TierSpec, clairvoyant_hits, replay
from kvrecall.simulate.trace import Trace, block_key, read_trace
from kvrecall.simulate.workload import WORKLOADS, doubled, make_workload, part, thinned

_CAPACITIES = {
    "conversation": (1_000, 5_859, 10_000, 30_000, 50_000, 97_656),
    "variant": (1_000, 5_859, 30_000),
    "synthetic": (500, 2_000, 8_000),
}


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
        case ["cost"]:
            cost()
        case ["cost", capacity] if capacity.isdecimal():
            cost(int(capacity))
        case _:
            sys.exit("usage: python -m bench.eviction rates TRACE [KIND ...] | cost [N]")


if __name__ == "__main__":
    main(sys.argv[1:])
