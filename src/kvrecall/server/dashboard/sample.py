"""A snapshot of a server's figures, read from its own metrics."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry
from prometheus_client.samples import Sample as Line

_TOKENS = "kvrecall_prompt_tokens"
_LOADED = "kvrecall_loaded_blocks"
_MISSED = "kvrecall_missed_tokens"
_TIER = "kvrecall_tier_"
_TIER_FIGURES = (
    "used_bytes capacity_bytes blocks hits evictions dropped errors corrupt full given_bytes "
    "compressed_bytes".split()
)  # by their names in the metrics, without _total
_RETRIEVAL = {
    "kvrecall_retrieval_steps": "steps",
    "kvrecall_retrieval_steps_sparse": "steps_sparse",
    "kvrecall_retrieval_blocks_considered": "considered",
    "kvrecall_retrieval_blocks_selected": "selected",
}
_COUNTS = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:request_success": "requests",
    "vllm:num_preemptions": "preemptions",
    "vllm:prompt_tokens": "prompt_tokens",
    "vllm:generation_tokens": "output_tokens",
    "kvrecall_loaded_bytes": "loaded_bytes",
    "kvrecall_load_seconds": "load_seconds",
    "kvrecall_loads_failed": "loads_failed",
    "kvrecall_stores_failed": "stores_failed",
    "kvrecall_sequences_lost": "sequences_lost",
    "kvrecall_flushes_missed": "flushes_missed",
    "kvrecall_audits_failed": "audits_failed",
}
_DEVICE = "vllm:kv_cache_usage_perc"
_POOL_UP = "kvrecall_pool_up"
_HISTOGRAMS = {
    "vllm:time_to_first_token_seconds": "ttft",
    "vllm:request_time_per_output_token_seconds": "tpot",
    "kvrecall_load_latency_seconds": "load",
}
_METRICS = (
    _TOKENS,
    _LOADED,
    _MISSED,
    *(_TIER + figure for figure in _TIER_FIGURES),
    *_RETRIEVAL,
    *_COUNTS,
    _DEVICE,
    _POOL_UP,
)
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
    tiers: dict[str, dict[str, float]] = field(default_factory=dict)
    retrieval: dict[str, float] = field(default_factory=dict)
    counts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_COUNTS.values(), 0.0))
    buckets: dict[str, list[int]] = field(default_factory=dict)
    pool_up: float = 1.0


Bounds = Mapping[str, Sequence[float | None]]
"""Of each histogram, the upper bounds of its buckets in seconds; None: infinity."""


def sample(registry: CollectorRegistry, now: float) -> tuple[Sample, Bounds]:
    """The figures of ``registry`` now, with all its histograms."""
    made = Sample(now)
    device = 0.0
    found: dict[str, dict[float, float]] = {}
    for line in _lines(registry):
        name = line.name.removesuffix("_total")
        if name == _TOKENS:
            _add(made.tokens, line.labels["source"], line.value)
        elif name == _LOADED:
            _add(made.loaded, line.labels["group"], line.value)
        elif name == _MISSED:
            _add(made.missed, line.labels["reason"], line.value)
        elif name.startswith(_TIER):
            tier = made.tiers.setdefault(line.labels["tier"], {})
            figure = name.removeprefix(_TIER)  # all replicas report the same pool
            tier[figure] = max(tier.get(figure, 0.0), line.value)
        elif name in _RETRIEVAL:
            _add(made.retrieval, _RETRIEVAL[name], line.value)
        elif name in _COUNTS:
            _add(made.counts, _COUNTS[name], line.value)
        elif name.endswith("_bucket"):
            kind = _HISTOGRAMS[name.removesuffix("_bucket")]
            if "tier" in line.labels:
                kind = f"{kind}:{line.labels['tier']}"
            bound = float(line.labels["le"])
            buckets = found.setdefault(kind, {})
            buckets[bound] = buckets.get(bound, 0.0) + line.value
        elif name == _DEVICE:
            device = max(device, line.value)
        elif name == _POOL_UP:
            made.pool_up = min(made.pool_up, line.value)
    made.tiers["device"] = {"share": device}
    made.buckets = {kind: [int(rows[at]) for at in sorted(rows)] for kind, rows in found.items()}
    bounds = {
        kind: [None if math.isinf(at) else at for at in sorted(rows)]
        for kind, rows in found.items()
    }
    return made, bounds


def _lines(registry: CollectorRegistry) -> Iterable[Line]:
    for metric in registry.restricted_registry(NAMES).collect():
        for line in metric.samples:
            if not line.name.endswith("_created"):
                yield line


def _add(into: dict[str, float], name: str, value: float) -> None:
    into[name] = into.get(name, 0.0) + value
