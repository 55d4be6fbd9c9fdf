"""``bench throttle``: load or recompute on a slow disk, at several bandwidths.

A real engine on a pool service whose disk reads at a configurable speed. The prefix is on that
disk only. Every hit is between two computations of new prompts of the same length, and is
compared with their mean, so that temporary load on the machine affects both. The engine
does not know the throttle: the first hit after each change uses an outdated estimate.
"""

from __future__ import annotations

import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from kvrecall.bench.model import BLOCK, TAIL, BenchModel, Texts
from kvrecall.bench.report import Report, Times, Tokens, progress
from kvrecall.block import Namespace
from kvrecall.config import DiskConfig, PoolConfig
from kvrecall.errors import EngineError
from kvrecall.pool.arena import Arena
from kvrecall.pool.disk import DiskTier
from kvrecall.pool.disk.slabs import FileIo
from kvrecall.pool.pool import Pool
from kvrecall.pool.service.endpoint import ServiceThread
from kvrecall.testing.blocks import chain
from kvrecall_lab.engines.engine import Answer, EngineProcess, Question

GOAL = 1.1
"""Maximum time of a hit relative to computing."""

SPEEDS = (30.0, 3.0, 1.5, 1.0, 0.7, 0.3, 0.03, 10.0)
"""Bandwidths tried in this order, relative to the one at which loading takes as long as computing.
The last shows that a disk that has recovered is used again."""

_RECOVERY = 6  # hits after which a recovered disk is certainly used again
_SETTLE_S = 120.0
_FILLER = Namespace.of({"purpose": "pushes everything else out of the host"})


@dataclass(frozen=True, slots=True)
class Sample:
    """A hit beside its computations, seconds to the first token; ``loaded``: share of the prefix
    that came from disk."""

    level: str
    hit_s: float
    computed_s: float
    loaded: float

    @property
    def ratio(self) -> float:
        return self.hit_s / self.computed_s


class ThrottledIo(FileIo):
    """A disk that reads ``bytes_per_s`` (0: as fast as it can), all readers together. May be
    changed while in use."""

    def __init__(self) -> None:
        self.bytes_per_s = 0.0
        self._one = threading.Lock()

    def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        got = super().read(fd, buffers, offset)
        with self._one:
            left, at = float(got), time.monotonic()
            while self.bytes_per_s and left > 0:
                time.sleep(min(0.01, left / self.bytes_per_s))
                now = time.monotonic()
                left, at = left - (now - at) * self.bytes_per_s, now
        return got


class _Bench:
    """The engine, the throttled pool under it, and the samples taken."""

    def __init__(self, folder: Path, tokens: int, stack: ExitStack) -> None:
        self._tokens = tokens
        model = BenchModel()
        block_bytes = BLOCK * model.token_bytes
        self.prefix_bytes = tokens * model.token_bytes
        self._path = model.write(folder / "model", tokens + 256)
        self._texts = Texts()
        self._questions = 0
        self.samples: list[Sample] = []
        self.io = ThrottledIo()
        self._host_blocks = tokens // BLOCK * 5 // 4

        def open_pool(config: PoolConfig) -> Pool:
            disk = DiskConfig(folder / "disk", 256 * self.prefix_bytes)
            return Pool(Arena.create(config.host_bytes), DiskTier(disk, io=self.io))

        self._service = ServiceThread(
            PoolConfig(self._host_blocks * block_bytes), folder / "pool.sock", make=open_pool
        )
        stack.callback(self._service.close)
        self._service.pool.register(_FILLER, block_bytes)
        progress("starting an engine")
        setup = {
            "model": str(self._path),
            "max_model_len": tokens + 256,
            "max_num_batched_tokens": 512,
            "env": {"VLLM_CPU_KVCACHE_SPACE": "1"},
            "pool": {"backend": "service", "socket": str(folder / "pool.sock")},
        }
        self._engine = EngineProcess("engine", setup, folder / "engine.log")
        stack.callback(self._engine.bury)
        self._engine.wait_ready()
        self.known = self.new_prompt()

    def new_prompt(self) -> tuple[int, ...]:
        return self._texts.tokens(self._tokens + TAIL)

    def ask(self, prompt: tuple[int, ...]) -> Answer:
        """Sends a prompt with empty device and host; waits until its blocks are stored."""
        self._engine.forget_device()
        pool = self._service.pool
        filler = chain(_FILLER, self._host_blocks, str(self._questions))
        pool.reserve(filler)  # evicts everything else from the host
        pool.abandon(filler)
        self._questions += 1
        (answer,) = self._engine.answers([Question(str(self._questions), prompt, 2)])
        # Writes, and reads whose request has ended, without the throttle.
        speed, self.io.bytes_per_s = self.io.bytes_per_s, 0.0
        until = time.monotonic() + _SETTLE_S
        while (stats := pool.stats()).queued_writes or stats.queued_reads:
            if time.monotonic() > until:
                raise EngineError(f"the pool is still busy after {_SETTLE_S:.0f} s")
            time.sleep(0.02)
        self.io.bytes_per_s = speed
        return answer

    def computed(self) -> float:
        """Seconds to the first token of a new prompt."""
        return self.ask(self.new_prompt()).ttft_s

    def sample(self, level: str, before: float, place: str) -> float:
        """A hit, then a computation, whose seconds are returned; ``before``: seconds of the
        previous computation."""
        hit = self.ask(self.known)
        if hit.sources.get("host") or hit.sources.get("device"):
            raise EngineError(f"meant to measure the disk, the hit came from {dict(hit.sources)}")
        after = self.computed()
        computed_s = (before + after) / 2
        loaded = hit.sources.get("disk", 0) / self._tokens
        self.samples.append(Sample(level, hit.ttft_s, computed_s, loaded))
        progress(
            f"{level}, {place}: hit {hit.ttft_s:.2f} s, computing {computed_s:.2f} s "
            f"({hit.ttft_s / computed_s:.2f}), {loaded:.0%} loaded"
        )
        return after


def measure_throttle(tokens: Tokens = 2048, repetitions: Times = 3) -> Report:
    """Load or recompute: a hit on a disk of several bandwidths, against computing it."""
    tokens = tokens // BLOCK * BLOCK
    with tempfile.TemporaryDirectory(prefix="kvrecall-bench-") as name, ExitStack() as stack:
        bench = _Bench(Path(name), tokens, stack)
        bench.computed()  # first-time costs
        bench.ask(bench.known)
        before = min(bench.computed() for _ in range(2))
        even = bench.prefix_bytes / before
        progress(f"computing takes {before:.2f} s: break-even at {even / 1e6:.1f} MB/s")
        for speed in SPEEDS:
            bench.io.bytes_per_s = speed * even
            times = max(repetitions, _RECOVERY) if speed == SPEEDS[-1] else repetitions
            for number in range(times):
                place = f"{number + 1} of {times}"
                before = bench.sample(f"{speed:g} x break-even", before, place)
        return _report(bench.samples, tokens, bench.prefix_bytes, even)


def _report(samples: Sequence[Sample], tokens: int, nbytes: int, even: float) -> Report:
    rows = []
    ratios: dict[str, dict[str, float]] = {}
    for level in dict.fromkeys(sample.level for sample in samples):
        here = [sample for sample in samples if sample.level == level]
        ratios[level] = {
            "p50": round(statistics.median(sample.ratio for sample in here), 3),
            "max": round(max(sample.ratio for sample in here), 3),
            "first": round(here[0].ratio, 3),
            "loaded": round(statistics.median(sample.loaded for sample in here), 3),
        }
        seconds = (
            statistics.median(sample.hit_s for sample in here),
            statistics.median(sample.computed_s for sample in here),
        )
        rows.append((level, *(f"{value:.2f}" for value in (*seconds, *ratios[level].values()))))
    worst = max(ratio["p50"] for ratio in ratios.values())
    notes = (
        f"prefix of {tokens} tokens, {nbytes / 2**20:.0f} MiB; break-even at {even / 1e6:.1f} MB/s",
        f"worst median {worst:.2f} (goal: at most {GOAL}); 'first': the first hit after the change",
    )
    columns = ("disk bandwidth", "hit s", "computed s", "ratio", "worst", "first", "loaded")
    figures: dict[str, object] = {
        "tokens": tokens,
        "prefix_bytes": nbytes,
        "break_even_bytes_per_s": round(even),
        "ratios": ratios,
        "worst_ratio": worst,
        "worst_single": max(ratio["max"] for ratio in ratios.values()),
        "goal": GOAL,
    }
    return Report("throttle", columns, tuple(rows), figures, notes)
