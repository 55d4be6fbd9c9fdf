"""Load or recompute on a slow disk: a hit against computing the same, at several bandwidths.

A real engine on a pool service whose disk reads as fast as it is told to. The prefix lies on that
disk only. Every hit stands between two computations of new prompts of the same length, and is
compared with their mean, so that a machine that is busy for a while is busy for both. The engine
knows nothing of the throttle; the first hit after each change finds it with the wrong belief.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from kvrecall.block import Namespace
from kvrecall.config import DiskConfig, PoolConfig
from kvrecall.errors import EngineError
from kvrecall.lab.bench.model import BLOCK, BenchModel
from kvrecall.lab.bench.report import Report, percentiles
from kvrecall.lab.disks import ThrottledIo
from kvrecall.lab.engines.process import Answer, EngineProcess, Question
from kvrecall.lab.engines.server import Progress
from kvrecall.lab.models import write_model
from kvrecall.pool.arena import Arena
from kvrecall.pool.disk import DiskTier
from kvrecall.pool.pool import Pool
from kvrecall.pool.service.serving import ServiceThread
from kvrecall.testing.blocks import chain

GOAL = 1.1
"""Most that a hit may take, relative to computing."""

SPEEDS = (30.0, 3.0, 1.5, 1.0, 0.7, 0.3, 0.03, 10.0)
"""Bandwidths tried in this order, relative to the one at which loading takes as long as computing.
The last shows that a disk that has recovered is used again."""

TAIL = 16
_DROP_TO = 0.03
_RECOVERY = 6  # hits after which a disk that has recovered is surely used again
_SETTLE_S = 120.0
_PUSH = Namespace.of({"purpose": "pushes everything else out of the host"})


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


class Course:
    """The engine, the throttled pool under it, and the prompts."""

    def __init__(self, folder: Path, tokens: int, stack: ExitStack, progress: Progress) -> None:
        self._folder = folder
        self.tokens = tokens
        self._model = BenchModel()
        self.prefix_bytes = tokens * self._model.token_bytes
        self._progress = progress
        self._stack = stack
        self._dice = random.Random(0)
        self._asked = 0
        self.io = ThrottledIo()
        self._path = write_model(
            folder / "model",
            hidden=self._model.hidden,
            layers=self._model.layers,
            heads=self._model.heads,
            kv_heads=self._model.kv_heads,
            head_dim=self._model.head_dim,
            max_position=tokens + 256,
            dtype=self._model.dtype,
        )
        self._host_blocks = tokens // BLOCK * 5 // 4
        self._service = ServiceThread(
            PoolConfig(self._host_blocks * BLOCK * self._model.token_bytes),
            folder / "pool.sock",
            make=self._open_pool,
        )
        stack.callback(self._service.close)
        self._service.pool.register(_PUSH, BLOCK * self._model.token_bytes)
        self._engine: EngineProcess | None = None
        self.new_engine()
        self.known = self.prompt()

    def _open_pool(self, config: PoolConfig) -> Pool:
        disk = DiskConfig(self._folder / "disk", 256 * self.prefix_bytes)
        return Pool(Arena.create(config.host_bytes), DiskTier(disk, io=self.io))

    def new_engine(self) -> None:
        """An engine that has measured nothing."""
        if self._engine is not None:
            self._engine.end()
        self._progress("starting an engine")
        setup = {
            "model": str(self._path),
            "max_model_len": self.tokens + 256,
            "max_num_batched_tokens": 512,
            "env": {"VLLM_CPU_KVCACHE_SPACE": "1"},
            "pool": {"backend": "service", "socket": str(self._folder / "pool.sock")},
        }
        self._engine = EngineProcess("engine", setup, self._folder / "engine.log")
        self._stack.callback(self._engine.bury)
        self._engine.wait_ready()

    def prompt(self) -> tuple[int, ...]:
        """A prompt nobody asked."""
        return tuple(self._dice.choices(range(1, 250), k=self.tokens + TAIL))

    def ask(self, prompt: tuple[int, ...]) -> Answer:
        """Asks with nothing on the device or in the host; waits until what it gave is stored."""
        assert self._engine is not None
        self._engine.forget_device()
        self._push_out()
        self._asked += 1
        (answer,) = self._engine.answers([Question(str(self._asked), prompt, 2)])
        self._settle()
        return answer

    def _push_out(self) -> None:
        pool = self._service.pool
        keys = chain(_PUSH, self._host_blocks, str(self._asked))
        pool.reserve(keys)
        pool.abandon(keys)

    def _settle(self) -> None:
        """Waits for writes, and for reads that nobody waits for any more, without the throttle."""
        speed, self.io.bytes_per_s = self.io.bytes_per_s, 0.0
        until = time.monotonic() + _SETTLE_S
        while (stats := self._service.pool.stats()).queued_writes or stats.queued_reads:
            if time.monotonic() > until:
                raise EngineError(f"the pool is still busy after {_SETTLE_S:.0f} s")
            time.sleep(0.02)
        self.io.bytes_per_s = speed

    def sample(self, level: str, before: float) -> tuple[Sample, float]:
        """A hit and a computation after it; ``before`` is the time of the one before it."""
        hit = self.ask(self.known)
        if hit.sources.get("host") or hit.sources.get("device"):
            raise EngineError(f"meant to measure the disk, the hit came from {dict(hit.sources)}")
        after = self.ask(self.prompt())
        loaded = hit.sources.get("disk", 0) / self.tokens
        mean = (before + after.ttft_s) / 2
        return Sample(level, hit.ttft_s, mean, loaded), after.ttft_s


def measure_throttle(tokens: int, repetitions: int, progress: Progress) -> Report:
    """Runs the benchmark on a prefix of ``tokens`` (a multiple of the block size)."""
    with tempfile.TemporaryDirectory(prefix="kvrecall-bench-") as name, ExitStack() as stack:
        course = Course(Path(name), tokens, stack, progress)
        course.ask(course.prompt())  # first-time costs
        course.ask(course.known)
        computed = min(course.ask(course.prompt()).ttft_s for _ in range(2))
        even = course.prefix_bytes / computed
        progress(f"computing takes {computed:.2f} s: break-even at {even / 1e6:.1f} MB/s")
        samples = _levels(course, even, computed, repetitions, progress)
        samples += _sudden(course, even, samples[-1].computed_s, repetitions, progress)
        samples += _first(course, even, repetitions, progress)
        return _report(samples, tokens, course.prefix_bytes, even)


def _levels(
    course: Course, even: float, before: float, repetitions: int, progress: Progress
) -> list[Sample]:
    samples = []
    for speed in SPEEDS:
        course.io.bytes_per_s = speed * even
        times = max(repetitions, _RECOVERY) if speed == SPEEDS[-1] else repetitions
        for number in range(times):
            sample, before = course.sample(f"{speed:g} x break-even", before)
            samples.append(sample)
            progress(_said(sample, f"{number + 1} of {times}"))
    return samples


def _sudden(
    course: Course, even: float, before: float, repetitions: int, progress: Progress
) -> list[Sample]:
    """The disk all but stops in the middle of a load."""
    samples = []
    for number in range(repetitions):
        course.io.bytes_per_s = 30 * even
        for _ in range(3):  # it is believed to be fast
            course.ask(course.known)
        course.io.then_bytes_per_s = _DROP_TO * even
        course.io.slow_after = course.prefix_bytes // 3
        sample, before = course.sample(f"30, in the middle {_DROP_TO:g}", before)
        course.io.slow_after = None
        samples.append(sample)
        progress(_said(sample, f"{number + 1} of {repetitions}"))
    return samples


def _first(course: Course, even: float, repetitions: int, progress: Progress) -> list[Sample]:
    """The first request of an engine that has measured nothing finds its prefix on a slow disk."""
    samples = []
    for number in range(max(1, repetitions // 3)):
        course.new_engine()
        course.io.bytes_per_s = _DROP_TO * even
        hit = course.ask(course.known)
        course.ask(course.prompt())
        computed = course.ask(course.prompt()).ttft_s
        loaded = hit.sources.get("disk", 0) / course.tokens
        samples.append(Sample(f"{_DROP_TO:g}, an engine's first", hit.ttft_s, computed, loaded))
        progress(_said(samples[-1], f"{number + 1}"))
    return samples


def _said(sample: Sample, place: str) -> str:
    return (
        f"{sample.level}, {place}: hit {sample.hit_s:.2f} s, computing {sample.computed_s:.2f} s "
        f"({sample.ratio:.2f}), {sample.loaded:.0%} loaded"
    )


def _report(samples: Sequence[Sample], tokens: int, nbytes: int, even: float) -> Report:
    levels = list(dict.fromkeys(sample.level for sample in samples))
    rows = []
    ratios: dict[str, dict[str, float]] = {}
    for level in levels:
        of_level = [sample for sample in samples if sample.level == level]

        def median(value: Callable[[Sample], float], some: list[Sample] = of_level) -> float:
            return percentiles([value(sample) for sample in some])["p50"]

        ratios[level] = {
            "p50": round(median(lambda s: s.ratio), 3),
            "max": round(max(sample.ratio for sample in of_level), 3),
            "first": round(of_level[0].ratio, 3),
            "loaded": round(median(lambda s: s.loaded), 3),
        }
        figures = (median(lambda s: s.hit_s), median(lambda s: s.computed_s))
        rows.append(
            (
                level,
                *(f"{seconds:.2f}" for seconds in figures),
                *(f"{ratios[level][name]:.2f}" for name in ("p50", "max", "first", "loaded")),
            )
        )
    worst = max(ratio["p50"] for ratio in ratios.values())
    notes = (
        f"prefix of {tokens} tokens, {nbytes / 2**20:.0f} MiB; break-even at {even / 1e6:.1f} MB/s",
        f"worst median {worst:.2f} (goal: at most {GOAL}); 'first': the first hit after the change",
    )
    columns = ("disk bandwidth", "hit s", "computed s", "ratio", "worst", "first", "loaded")
    data: dict[str, object] = {
        "tokens": tokens,
        "prefix_bytes": nbytes,
        "break_even_bytes_per_s": round(even),
        "ratios": ratios,
        "worst_ratio": worst,
        "worst_single": max(ratio["max"] for ratio in ratios.values()),
        "goal": GOAL,
    }
    return Report("throttle", columns, tuple(rows), data, notes)
