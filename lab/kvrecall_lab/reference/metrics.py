"""Metrics, from the objects that register them. Imports vLLM."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics_core import Metric

from kvrecall.engines.base import EngineLoad
from kvrecall.events.subscriber import Publisher, Subscriptions
from kvrecall.router.fleet import Address, Fleet
from kvrecall.router.metrics import RouterMetrics
from kvrecall.server.metrics import MetricsVector, MindieMetrics
from kvrecall_lab.reference.markdown import code, sentence, table

_HEAD = """# Metrics

`GET /metrics` of a server gives vLLM's own metrics, the pool's and MindIE's names; that of a router
gives the router's. All of a server's have the label `model_name`, the pool's also `engine`. What
ends in `_total` is a counter; a histogram's samples end in `_bucket`, `_count` and `_sum`. What to
watch and when to act: [Operations](../operations.md).
"""
_IDLE = EngineLoad(running=0, waiting=0, unfinished=0, max_running=1, blocks=0, used_share=0.0)


@dataclass(frozen=True, slots=True)
class Family:
    """A metric, with the names of its labels."""

    name: str
    kind: str
    labels: tuple[str, ...]
    text: str


def page() -> str:
    names = ", ".join(code(name) for name in mindie_vector())
    return "\n".join(
        [
            _HEAD,
            "## Of the pool and of retrieval\n\nFrom each engine, under `vllm serve` with the "
            "connector as under `kvrecall serve`. Gauges update once a step.\n",
            _table(pool_families()),
            "## Of the router\n\nFrom `kvrecall router`, port 8100.\n",
            _table(router_families()),
            "## Under MindIE's names\n\nFrom `kvrecall serve`; what vLLM has is summed over its "
            "engines.\n",
            _table(mindie_families()),
            "## In MindIE's JSON form\n\n`GET /metrics-json` begins with "
            f"{names}; what stands under MindIE's names above follows.\n",
        ]
    )


def _table(families: Iterable[Family]) -> str:
    common = ("model_name", "engine")
    rows = []
    for one in families:
        labels = ", ".join(name for name in one.labels if name not in common)
        name = code(f"{one.name}{{{labels}}}" if labels else one.name)
        kind = "" if one.name.endswith("_total") else f" ({one.kind})"
        rows.append((name + kind, sentence(one.text)))
    return table(("metric", "meaning"), rows)


def pool_families() -> list[Family]:
    """The metrics that the connector registers with vLLM."""
    from kvrecall.engines.vllm.connector.metrics import RecallPromMetrics

    found: list[Family] = []

    def recorder(kind: str) -> Any:
        def record(name: str, documentation: str, labelnames: Sequence[str], **_: Any) -> None:
            suffix = "_total" if kind == "counter" else ""
            found.append(Family(name + suffix, kind, tuple(labelnames), documentation))

        return record

    kinds = {Counter: "counter", Gauge: "gauge", Histogram: "histogram"}
    types = {each: recorder(kind) for each, kind in kinds.items()}
    RecallPromMetrics(SimpleNamespace(kv_transfer_config=None), types, ["model_name", "engine"], {})
    return found


def router_families() -> list[Family]:
    """The metrics in a router's registry."""
    registry = CollectorRegistry()
    following = Subscriptions(lambda _: None)
    decode = Address("http://b:2", (Publisher("b", 3, 4),))
    fleet = Fleet((Address("http://a:1"),), (decode,), 4, (), following)
    RouterMetrics(fleet, following, registry)
    labels = {
        one.describe()[0].name: tuple(getattr(one, "_labelnames", ()))
        for one in list(getattr(registry, "_collector_to_names", ()))
    }
    return [_family(metric, labels[metric.name]) for metric in registry.collect()]


def mindie_families() -> list[Family]:
    """A server's metrics besides vLLM's, before any request."""
    return [
        _family(metric, _labels(metric.samples))
        for metric in MindieMetrics("model", lambda: _IDLE, lambda: ()).collect()
    ]


def mindie_vector() -> list[str]:
    """The additional metrics of MindIE's JSON form."""
    metrics = MindieMetrics("model", lambda: _IDLE, lambda: ())
    told: Any = MetricsVector(metrics, lambda: _IDLE, "host:port").body()["result"]
    known = {sample.name for metric in metrics.collect() for sample in metric.samples}
    names = dict.fromkeys(sample["metric"][0]["__name__"] for sample in told)
    return [name for name in names if name not in known]


def _labels(samples: Iterable[Any]) -> tuple[str, ...]:
    names = dict.fromkeys(name for sample in samples for name in sample.labels)
    return tuple(name for name in names if name != "le")


def _family(metric: Metric, labels: tuple[str, ...]) -> Family:
    suffix = "_total" if metric.type == "counter" else ""
    return Family(metric.name + suffix, metric.type, labels, metric.documentation)
