"""The router's Prometheus metrics."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from operator import attrgetter

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kvrecall.router.fleet import Fleet

_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class RouterMetrics:
    """The router's counters and the fleet's gauges, in a registry of their own."""

    def __init__(self, fleet: Fleet, registry: CollectorRegistry | None = None) -> None:
        self._registry = registry or CollectorRegistry()
        self.requests = self._counter("requests", "Requests by outcome.", "outcome")
        self.prefills = self._counter("prefills", "Prompts by outcome of their prefill.", "outcome")
        self.failures = self._counter(
            "instance_failures", "Requests that failed at an instance.", "role", "instance"
        )
        self.retries = self._counter("retries", "Requests retried at another instance.", "role")
        self.affinity = self._counter(
            "affinity", "Requests by whether their instance holds their prefix.", "role", "outcome"
        )
        self.tokens = self._counter(
            "prompt_tokens", "Prompt tokens by role and source.", "role", "source"
        )
        self.prefill_seconds = Histogram(
            "kvrecall_router_prefill_seconds",
            "Seconds from sending a prompt to the promise of its blocks.",
            registry=self._registry,
            buckets=_BUCKETS,
        )
        self.first_byte_seconds = Histogram(
            "kvrecall_router_first_byte_seconds",
            "Seconds from a request to the first byte of its reply.",
            registry=self._registry,
            buckets=_BUCKETS,
        )

        up = self._gauge("instance_up", "1 if the instance answers, else 0.", "role", "instance")
        inflight = self._gauge("inflight", "Requests in flight.", "role", "instance")
        for each in fleet.all:
            up.labels(each.role, each.name).set_function(partial(attrgetter("healthy"), each))
            inflight.labels(each.role, each.name).set_function(
                partial(attrgetter("inflight"), each)
            )
        prefixes = self._gauge("prefixes", "Prefix hashes remembered.")
        prefixes.set_function(lambda: len(fleet.prefixes))

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"kvrecall_router_{name}", text, labels, registry=self._registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"kvrecall_router_{name}", text, labels, registry=self._registry)

    def count_tokens(self, role: str, split: Mapping[str, int]) -> None:
        """Counts a prompt's tokens by source at an instance of ``role``."""
        for source, count in split.items():
            if count > 0:
                self.tokens.labels(role, source).inc(count)

    def page(self) -> bytes:
        """The metrics in Prometheus' text format."""
        return generate_latest(self._registry)
