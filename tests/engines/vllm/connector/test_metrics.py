"""What the connector counts, on its way to Prometheus."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from kvrecall.engines.vllm.connector.connector import RecallConnector
from kvrecall.engines.vllm.connector.metrics import Counters, RecallStats
from kvrecall.engines.vllm.wire import EngineFacts
from kvrecall.pool import Pool


def test_counts_and_gauges_reach_prometheus_under_their_labels(pool: Pool) -> None:
    registry = CollectorRegistry()
    kinds: dict[Any, Any] = {
        kind: partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)
    }
    metrics = RecallConnector.build_prom_metrics(
        SimpleNamespace(kv_transfer_config=None),
        kinds,
        ["engine"],
        {0: ["0"]},  # type: ignore[arg-type]
    )
    counters = Counters(EngineFacts.of_one(16, 4096))
    sources = {"host": 32, "computed": 8, "disk": 0}
    counters.finished(SimpleNamespace(sources=lambda: sources), 40)  # type: ignore[arg-type]
    counters.counted("audits")
    for hits in (5, 12):
        stats = pool.stats()
        stats = replace(stats, leases=3, tiers=(replace(stats.tiers[0], hits=hits),))
        costs = SimpleNamespace(elapsed=lambda mark, hits=hits: hits / 100)
        load: Any = SimpleNamespace(costs=costs, mark=None, lowest_tier="disk")
        counters.load_done(None, load, False, None)
        gauges = counters.watch(stats)
        counters.counts["diverged:missed_tokens"] += 100
        sent = counters.take()
        assert "blocks_refused" not in sent.data["counts"], "what did not move is not sent"
        sent.data["gauges"] = gauges
        metrics.observe(RecallStats.of({}).aggregate(sent).data, 0)

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"kvrecall_{name}", {"engine": "0", **labels})

    assert value("requests_total") == 1
    assert value("prompt_tokens_total", source="host") == 32
    assert value("prompt_tokens_total", source="disk") is None
    assert value("missed_tokens_total", reason="diverged") == 200
    assert value("audits_total") == 1
    assert value("tier_hits_total", tier="host") == 12, "increments of a running total"
    assert value("tier_capacity_bytes", tier="host") == 1 << 20
    assert value("leases") == 3
    assert value("audits_failed_total") is None
    assert value("load_latency_seconds_count", tier="disk") == 2, "each load once"
    assert value("load_latency_seconds_sum", tier="disk") == pytest.approx(0.17)
    assert value("load_latency_seconds_bucket", tier="disk", le="0.05") == 1
    assert value("pool_up") == 1
    assert value("tier_full", tier="host") == 0
