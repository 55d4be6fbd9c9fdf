"""The router's Prometheus metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kvrecall.events.holdings import TIERS
from kvrecall.events.subscriber import Subscription, Subscriptions
from kvrecall.router.fleet import Fleet

_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)

_Values = Sequence[tuple[tuple[str, ...], float]]


def _of_each(following: Subscriptions, value: Callable[[Subscription], float]) -> _Values:
    return [((one.publisher.name,), value(one)) for one in following.of.values()]


_OF_EVENTS: tuple[tuple[str, str, Callable[[Subscription], float]], ...] = (
    ("event_batches", "Batches of KV events applied.", lambda one: one.reader.applied),
    ("event_gaps", "Times that batches were missing.", lambda one: one.gaps),
    ("event_gaps_lost",
     "Of these, times that the publisher no longer had them: all is forgotten.",
     lambda one: one.reader.lost),
    ("publisher_restarts", "Times that the publisher had been started again.",
     lambda one: one.reader.restarts),
    ("publisher_joined",
     "1 if the hashes of the publisher's blocks can be computed from tokens, else 0.",
     lambda one: one.holdings.rule is not None),
)  # fmt: skip
"""Gauges of publishers. Counts of events are gauges too: a subscription keeps them."""


class RouterMetrics:
    """The router's counters and the fleet's gauges, in a registry of their own."""

    def __init__(
        self,
        fleet: Fleet,
        subscriptions: Subscriptions,
        registry: CollectorRegistry | None = None,
    ) -> None:
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
        self.expected = self._counter(
            "expected_tokens",
            "Prompt tokens by role and tier that an instance was expected to recall; of requests "
            "that are in prompt_tokens.",
            "role",
            "source",
        )
        self.tokenized = self._counter(
            "tokenized", "Prompts by whether an instance told their tokens.", "outcome"
        )
        self.event_lag = self._seconds(
            "event_lag", "Seconds from a batch of KV events to its application."
        )
        self.prefill_seconds = self._seconds(
            "prefill", "Seconds from sending a prompt to the promise of its blocks."
        )
        self.first_byte_seconds = self._seconds(
            "first_byte", "Seconds from a request to the first byte of its reply."
        )
        self._shown: list[tuple[Gauge, Callable[[], _Values]]] = []
        shown: tuple[tuple[str, str, str, Callable[[], _Values]], ...] = (
            ("instance_up", "1 if the instance answers, else 0.", "role instance",
             lambda: [((one.role, one.name), one.healthy) for one in fleet.all]),
            ("inflight", "Requests in flight.", "role instance",
             lambda: [((x.role, x.name), x.inflight) for x in (*fleet.all, *fleet.leaving)]),
            ("prefixes", "Prefix hashes remembered.", "", lambda: [((), len(fleet.prefixes))]),
            ("blocks", "Blocks that a publisher reports, by tier.", "publisher tier",
             lambda: [((one.publisher.name, tier), one.holdings.blocks(tier))
                      for one in subscriptions.of.values() for tier in TIERS]),
            *((name, text, "publisher", partial(_of_each, subscriptions, value))
              for name, text, value in _OF_EVENTS),
        )  # fmt: skip
        for name, text, labels, values in shown:
            gauge = Gauge(f"kvrecall_router_{name}", text, labels.split(), registry=self._registry)
            self._shown.append((gauge, values))

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        made = Counter(f"kvrecall_router_{name}", text, labels, registry=self._registry)
        made.labels = cache(made.labels)  # type: ignore[method-assign]
        return made

    def _seconds(self, name: str, text: str) -> Histogram:
        name = f"kvrecall_router_{name}_seconds"
        return Histogram(name, text, registry=self._registry, buckets=_BUCKETS)

    def count_tokens(self, role: str, split: Mapping[str, int]) -> None:
        """Counts a prompt's tokens by source at an instance of ``role``."""
        for source, count in split.items():
            if count > 0:
                self.tokens.labels(role, source).inc(count)

    def page(self) -> bytes:
        """The metrics in Prometheus' text format. Gauges get their values now, by their labels:
        instances come and go."""
        for gauge, values in self._shown:
            if gauge._labelnames:
                gauge.clear()
            for labels, value in values():
                (gauge.labels(*labels) if labels else gauge).set(value)
        return generate_latest(self._registry)
