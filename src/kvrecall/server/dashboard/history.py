"""The last half hour of a server's figures: a bounded ring of samples of its own metrics; and what
was missed in a day."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client import REGISTRY, CollectorRegistry

from kvrecall.nicety import nicety

EVERY_S = 2.0
KEPT = 900
DAY_S = 24 * 3600.0
_DAY_STEP_S = 600.0

_BY_LABEL = {
    "kvrecall_prompt_tokens": ("tokens", "source"),
    "kvrecall_loaded_blocks": ("loaded", "group"),
    "kvrecall_missed_tokens": ("missed", "reason"),
}
"""Sums by a label: the field of a Sample and the label."""
_SUMS = {
    "kvrecall_retrieval_steps": ("retrieval", "steps"),
    "kvrecall_retrieval_steps_sparse": ("retrieval", "steps_sparse"),
    "kvrecall_retrieval_blocks_considered": ("retrieval", "considered"),
    "kvrecall_retrieval_blocks_selected": ("retrieval", "selected"),
    "vllm:num_requests_running": ("counts", "running"),
    "vllm:num_requests_waiting": ("counts", "waiting"),
    "vllm:request_success": ("counts", "requests"),
    "vllm:num_preemptions": ("counts", "preemptions"),
    "vllm:prompt_tokens": ("counts", "prompt_tokens"),
    "vllm:generation_tokens": ("counts", "output_tokens"),
    "kvrecall_loaded_bytes": ("counts", "loaded_bytes"),
    "kvrecall_load_seconds": ("counts", "load_seconds"),
}
"""Sums: the field of a Sample and the name in it."""
_TIER = "kvrecall_tier_"
_TIER_FIGURES = (
    "used_bytes capacity_bytes blocks hits evictions dropped errors corrupt given_bytes "
    "compressed_bytes".split()
)  # by their names in the metrics, without _total
_DEVICE = "vllm:kv_cache_usage_perc"
_POOL_UP = "kvrecall_pool_up"
_HISTOGRAMS = {
    "vllm:time_to_first_token_seconds": "ttft",
    "vllm:request_time_per_output_token_seconds": "tpot",
    "kvrecall_load_latency_seconds": "load",
}
_METRICS = (*_BY_LABEL, *_SUMS, *(_TIER + figure for figure in _TIER_FIGURES), _DEVICE, _POOL_UP)
NAMES = (
    *_METRICS,  # as gauge
    *(name + "_total" for name in _METRICS),  # or as counter
    *(name + "_bucket" for name in _HISTOGRAMS),
)
"""The lines that are read; other metrics cost nothing."""


@dataclass(slots=True)
class Sample:
    """Figures at one moment.

    ``tokens``: prompt tokens by source. ``loaded``: blocks by kind of KV group. ``missed``: prompt
    tokens computed, by the reason of the miss. ``tiers``, ``retrieval`` and ``counts``: by their
    names in the metrics; counters are totals since the start. ``buckets``: histograms by ``ttft``,
    ``tpot`` and ``load:TIER``, as numbers of values at most the bounds that ``sample`` gives; those
    that differ from the sample before.
    """

    at: float
    tokens: dict[str, float] = field(default_factory=dict)
    loaded: dict[str, float] = field(default_factory=dict)
    missed: dict[str, float] = field(default_factory=dict)
    tiers: dict[str, dict[str, float]] = field(default_factory=lambda: {"device": {"share": 0.0}})
    retrieval: dict[str, float] = field(default_factory=dict)
    counts: dict[str, float] = field(
        default_factory=lambda: {name: 0.0 for kind, name in _SUMS.values() if kind == "counts"}
    )
    buckets: dict[str, list[int]] = field(default_factory=dict)
    pool_up: float = 1.0


Bounds = Mapping[str, Sequence[float | None]]
"""Of each histogram, the upper bounds of its buckets in seconds; None: infinity."""


def sample(registry: CollectorRegistry, now: float) -> tuple[Sample, Bounds]:
    """The figures of ``registry`` now, with all its histograms."""
    made = Sample(now)
    found: dict[str, dict[float, float]] = {}
    for metric in registry.restricted_registry(NAMES).collect():
        for line in metric.samples:
            name = line.name.removesuffix("_total")
            into, key = made.counts, ""
            if name in _BY_LABEL:
                kind, label = _BY_LABEL[name]
                into, key = getattr(made, kind), line.labels[label]
            elif name in _SUMS:
                kind, key = _SUMS[name]
                into = getattr(made, kind)
            elif name.endswith("_bucket"):
                kind = _HISTOGRAMS[name.removesuffix("_bucket")]
                kind += f":{line.labels['tier']}" if "tier" in line.labels else ""
                buckets, bound = found.setdefault(kind, {}), float(line.labels["le"])
                buckets[bound] = buckets.get(bound, 0.0) + line.value
            elif name.startswith(_TIER) and name.removeprefix(_TIER) in _TIER_FIGURES:
                tier = made.tiers.setdefault(line.labels["tier"], {})
                figure = name.removeprefix(_TIER)  # all replicas report the same pool
                tier[figure] = max(tier.get(figure, 0.0), line.value)
            elif name == _DEVICE:
                device = made.tiers["device"]
                device["share"] = max(device["share"], line.value)
            elif name == _POOL_UP:
                made.pool_up = min(made.pool_up, line.value)
            if key:
                into[key] = into.get(key, 0.0) + line.value
    made.buckets = {kind: [int(rows[at]) for at in sorted(rows)] for kind, rows in found.items()}
    bounds = {
        kind: [None if math.isinf(at) else at for at in sorted(rows)]
        for kind, rows in found.items()
    }
    return made, bounds


class History:
    """The last ``KEPT`` samples, one every ``EVERY_S`` seconds."""

    def __init__(
        self, registry: CollectorRegistry = REGISTRY, clock: Callable[[], float] = time.time
    ) -> None:
        self._registry = registry
        self._clock = clock
        self._samples: deque[Sample] = deque()
        self._day: deque[tuple[float, Mapping[str, float]]] = deque()
        self._buckets: dict[str, list[int]] = {}  # of the last sample, all of them
        self._task: asyncio.Task[None] | None = None
        self.bounds: Bounds = {}

    @nicety("the dashboard's sampling")
    def take(self) -> None:
        """Adds a sample."""
        made, self.bounds = sample(self._registry, round(self._clock(), 3))
        everything = made.buckets
        made.buckets = {k: rows for k, rows in everything.items() if self._buckets.get(k) != rows}
        self._buckets = everything
        self._samples.append(made)
        if len(self._samples) > KEPT:
            oldest = self._samples.popleft()
            self._samples[0].buckets = oldest.buckets | self._samples[0].buckets
        if not self._day or made.at >= self._day[-1][0] + _DAY_STEP_S:
            self._day.append((made.at, made.missed))
        while len(self._day) > 1 and self._day[1][0] <= made.at - DAY_S:
            self._day.popleft()

    def day(self) -> tuple[float, Mapping[str, float]]:
        """The tokens missed by reason, as of 24 hours ago (to ten minutes) or of the start, and
        when that was (wall-clock seconds)."""
        return self._day[0] if self._day else (self._clock(), {})

    def since(self, moment: float) -> Sequence[Sample]:
        """Samples after ``moment`` (wall-clock seconds), oldest first."""
        return [each for each in self._samples if each.at > moment]

    def latest(self) -> Sample:
        """A new sample, which is not kept."""
        return sample(self._registry, round(self._clock(), 3))[0]

    def begin(self) -> None:
        """Starts sampling in the running event loop. Idempotent."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        while True:
            self.take()
            await asyncio.sleep(EVERY_S)
