"""What the router counts, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvrecall.router.fleet import Fleet

_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class _State(Collector):
    """Gauges read from the fleet when they are scraped."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def collect(self) -> Iterator[Metric]:
        up = GaugeMetricFamily(
            "kvrecall_router_instance_up", "Whether it answers.", labels=["role", "instance"]
        )
        inflight = GaugeMetricFamily(
            "kvrecall_router_inflight", "Requests under way.", labels=["role", "instance"]
        )
        for instance in self._fleet.all:
            labels = [str(instance.role), instance.name]
            up.add_metric(labels, float(instance.healthy))
            inflight.add_metric(labels, float(instance.inflight))
        yield up
        yield inflight
        yield GaugeMetricFamily(
            "kvrecall_router_prefixes", "Prefix hashes remembered.", value=len(self._fleet.prefixes)
        )


class RouterMetrics:
    """The router's counters, in a registry of their own."""

    def __init__(self, fleet: Fleet) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_State(fleet))
        self.requests = self._counter("requests", "Requests by outcome.", "outcome")
        self.prefills = self._counter("prefills", "Prompts by what became of them.", "outcome")
        self.failures = self._counter(
            "instance_failures", "Requests an instance failed.", "role", "instance"
        )
        self.retries = self._counter("retries", "Requests sent to another instance.", "role")
        self.affinity = self._counter(
            "affinity", "Requests by whether they went where their prefix is.", "role", "outcome"
        )
        self.tokens = self._counter(
            "prompt_tokens", "Prompt tokens by role and where they came from.", "role", "source"
        )
        self.prefill_seconds = Histogram(
            "kvrecall_router_prefill_seconds",
            "From sending a prompt until its blocks are promised.",
            registry=self._registry,
            buckets=_BUCKETS,
        )
        self.first_byte_seconds = Histogram(
            "kvrecall_router_first_byte_seconds",
            "From a request to the first byte of its reply.",
            registry=self._registry,
            buckets=_BUCKETS,
        )

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"kvrecall_router_{name}", text, labels, registry=self._registry)

    def count_tokens(self, role: str, split: Mapping[str, int]) -> None:
        """Adds where a prompt's tokens came from at an instance of ``role``."""
        for source, count in split.items():
            if count > 0:
                self.tokens.labels(role, source).inc(count)

    def page(self) -> bytes:
        """The text Prometheus scrapes."""
        return generate_latest(self._registry)
