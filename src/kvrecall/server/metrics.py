"""The metrics of the engine and the pool under MindIE's names, and in MindIE's JSON form
(``GET /metrics-json``).

Values are those of vLLM and the connector, summed over the engines of the server. The names are
those of ``prometheus_metrics.cpp`` in Ascend/MindIE-LLM (April 2026). Its two throughputs are
averages over the last seconds here, there those of the last batch. ``request_received_total``
counts requests that reached the engine; a request refused earlier (an unreadable body, too many
links) is in no figure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import REGISTRY
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from kvrecall.engines.base import EngineLoad
from kvrecall.nicety import nicety

Json = dict[str, object]

WINDOW = 1000  # requests that TTFT and TBT are averages of, as in MindIE

_COUNTERS = {
    "prompt_tokens": "vllm:prompt_tokens",
    "generation_tokens": "vllm:generation_tokens",
    "num_preemptions": "vllm:num_preemptions",
}
_GAUGES = {
    "num_requests_running": "vllm:num_requests_running",
    "num_requests_waiting": "vllm:num_requests_waiting",
    "npu_cache_usage_perc": "vllm:kv_cache_usage_perc",
    "all_radix_match_num": "vllm:prefix_cache_queries",
    "npu_radix_match_hit_num": "vllm:prefix_cache_hits",
}
_HISTOGRAMS = {
    "request_prompt_tokens": "vllm:request_prompt_tokens",
    "request_generation_tokens": "vllm:request_generation_tokens",
    "time_to_first_token_seconds": "vllm:time_to_first_token_seconds",
    "time_per_output_token_seconds": "vllm:request_time_per_output_token_seconds",
    "e2e_request_latency_seconds": "vllm:e2e_request_latency_seconds",
}
_FAILED = ("abort", "error")
_RATE = "Tokens a second over the last seconds, 0 if idle."
_TIERS = ("device", "host", "disk", "remote")


class MindieMetrics(Collector):
    """Exports vLLM's metrics under MindIE's names, with the label ``model_name``."""

    def __init__(
        self,
        model: str,
        load: Callable[[], EngineLoad],
        source: Callable[[], Iterable[Metric]] = REGISTRY.collect,
    ) -> None:
        self._model = model
        self._load = load
        self._source = source

    @nicety("the metrics under MindIE's names", ())
    def collect(self) -> Sequence[Metric]:
        """The families, in a fixed order."""
        return list(self._families())

    def _families(self) -> Iterator[Metric]:
        families = {family.name: family for family in self._source()}
        load = self._load()

        def of(name: str, **labels: str) -> float:
            return total(families.get(name), **labels)

        counter, gauge = CounterMetricFamily, GaugeMetricFamily
        failed = sum(of("vllm:request_success", finished_reason=reason) for reason in _FAILED)
        ended = of("vllm:request_success")
        found = {tier: of("kvrecall_prompt_tokens", source=tier) for tier in _TIERS}
        everything = of("kvrecall_prompt_tokens")
        if not everything:  # no pool: vLLM's own count for the device
            everything = of("vllm:prefix_cache_queries")
            found["device"] = of("vllm:prefix_cache_hits")
        used = of("kvrecall_tier_used_bytes", tier="host")
        room = of("kvrecall_tier_capacity_bytes", tier="host")
        rows: list[tuple[type[Any], str, str, float]] = [
            (counter, "request_received", "Requests that reached the engine.",
             ended + load.unfinished),
            (counter, "request_success", "Requests that succeeded.", ended - failed),
            (counter, "request_failed", "Requests aborted or failed.", failed),
            (gauge, "failed_request_perc", "Failed share of finished requests.",
             _share(failed, ended)),
            *((counter, name, f"As {old}.", of(old)) for name, old in _COUNTERS.items()),
            *((gauge, name, f"As {old}.", of(old)) for name, old in _GAUGES.items()),
            (gauge, "num_requests_swapped", "vLLM never swaps: 0.", 0),
            (gauge, "avg_prompt_throughput_toks_per_s", _RATE, load.prompt_throughput),
            (gauge, "avg_generation_throughput_toks_per_s", _RATE, load.generation_throughput),
            (gauge, "cpu_cache_usage_perc", "Share of the pool's host tier in use.",
             _share(used, room)),
            (gauge, "npu_prefix_cache_hit_rate", "Prompt tokens found on the device.",
             _share(found["device"], everything)),
        ]  # fmt: skip
        for kind, name, text, value in rows:
            family = kind(name, text, labels=("model_name",))
            family.add_metric((self._model,), value)
            yield family
        # MindIE's rate counts the device only; the rate of each tier is a metric of its own.
        by_tier = ("model_name", "tier")
        rates = gauge("prefix_cache_hit_rate", "Share of prompt tokens.", labels=by_tier)
        hits = counter("prefix_cache_hit_tokens", "Prompt tokens found.", labels=by_tier)
        for tier, count in found.items():
            rates.add_metric((self._model, tier), _share(count, everything))
            hits.add_metric((self._model, tier), count)
        yield from (rates, hits)
        for name, original in _HISTOGRAMS.items():
            yield self._histogram(name, f"As {original}.", families.get(original))

    def work_done(self) -> float:
        """A number that grows with every step that generates a token."""
        name = "vllm:iteration_tokens_total"
        return sum(total_of(each, f"{name}_count") for each in self._source() if each.name == name)

    def _histogram(self, name: str, text: str, original: Metric | None) -> Metric:
        family = HistogramMetricFamily(name, text, labels=("model_name",))
        buckets: dict[str, float] = {}
        total_sum = 0.0
        for sample in original.samples if original is not None else ():
            if sample.name.endswith("_bucket"):
                bound = sample.labels["le"]
                buckets[bound] = buckets.get(bound, 0) + sample.value
            elif sample.name.endswith("_sum"):
                total_sum += sample.value
        family.add_metric((self._model,), list(buckets.items()) or [("+Inf", 0)], total_sum)
        return family


def total(family: Metric | None, **labels: str) -> float:
    """The sum of a counter's or gauge's samples with these labels; 0 if there are none."""
    if family is None:
        return 0.0
    return sum(
        sample.value
        for sample in family.samples
        if not sample.name.endswith("_created")
        and all(sample.labels.get(name) == value for name, value in labels.items())
    )


def total_of(family: Metric, name: str) -> float:
    """The sum of the samples of this name."""
    return sum(sample.value for sample in family.samples if sample.name == name)


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


class MetricsVector:
    """``metrics`` in MindIE's JSON form, a vector of samples of ``instance`` (host:port).

    Five of MindIE's own come first (``JsonParse::JsonHttpMetrics`` in Ascend/MindIE-LLM, April
    2026): TTFT and TBT (averages in whole milliseconds over the last requests), waiting and
    running requests, and free blocks. The metrics that /metrics has under MindIE's names follow.
    Values are strings, as in MindIE.
    """

    def __init__(
        self, metrics: MindieMetrics, load: Callable[[], EngineLoad], instance: str
    ) -> None:
        self._metrics = metrics
        self._load = load
        self._instance = instance
        self._first = _Recent()
        self._between = _Recent()

    def body(self) -> Json:
        """The body of the reply."""
        families = {family.name: family for family in self._metrics.collect()}
        load = self._load()
        first = self._first.mean(families["time_to_first_token_seconds"])
        between = self._between.mean(families["time_per_output_token_seconds"])
        samples: list[tuple[str, Mapping[str, str], float]] = [
            ("TTFT", {}, round(first * 1000)),
            ("TBT", {}, round(between * 1000)),
            ("waitingInferRequestNum", {}, load.waiting),
            ("processingInferRequestNum", {}, load.running),
            ("remainBlocks", {}, load.free_blocks),
            *(
                (sample.name, sample.labels, sample.value)
                for family in families.values()
                for sample in family.samples
                if not sample.name.endswith(("_created", "_bucket"))
            ),
        ]
        common = {"job": "node", "instance": self._instance}
        result = [
            {"metric": [{"__name__": name, **common, **labels}], "value": _text(value)}
            for name, labels, value in samples
        ]
        return {"resultType": "vector", "result": result}


class _Recent:
    """The mean of a histogram's recent values: since the latest reading that is at least WINDOW
    values old, because only running totals are known."""

    def __init__(self) -> None:
        self._totals: deque[tuple[float, float]] = deque([(0.0, 0.0)])

    def mean(self, family: Metric) -> float:
        count = total_of(family, f"{family.name}_count")
        total = total_of(family, f"{family.name}_sum")
        while len(self._totals) > 1 and self._totals[1][0] <= count - WINDOW:
            self._totals.popleft()
        before, sum_before = self._totals[0]
        if count > self._totals[-1][0]:
            self._totals.append((count, total))
        return (total - sum_before) / (count - before) if count > before else 0.0


def _text(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(value)
