"""The metrics in MindIE's JSON form: ``GET /metrics-json``.

A vector of samples with five of MindIE's own first (``JsonParse::JsonHttpMetrics`` in
Ascend/MindIE-LLM, April 2026): TTFT and TBT, averages in whole milliseconds over the last requests,
requests that wait and are processed, and free blocks. Behind them stands what /metrics has under
MindIE's names, in the same form. Values are strings, as there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping

from prometheus_client.metrics_core import Metric

from kvrecall.engines.base import Load
from kvrecall.server.descriptions import free_blocks
from kvrecall.server.figures import MindieFigures, total_of

Json = dict[str, object]

WINDOW = 1000  # requests, as in MindIE
_SKIPPED = ("_created", "_bucket")


class MetricsVector:
    """Tells ``figures`` as a vector of samples of ``instance`` (host:port)."""

    def __init__(self, figures: MindieFigures, load: Callable[[], Load], instance: str) -> None:
        self._figures = figures
        self._load = load
        self._instance = instance
        self._first = _Recent()
        self._between = _Recent()

    def told(self) -> Json:
        """The whole reply."""
        families = {family.name: family for family in self._figures.collect()}
        return {"resultType": "vector", "result": [*self._mindie(families), *self._rest(families)]}

    def _mindie(self, families: Mapping[str, Metric]) -> Iterator[Json]:
        load = self._load()
        first = self._first.mean(families["time_to_first_token_seconds"])
        between = self._between.mean(families["time_per_output_token_seconds"])
        for name, value in (
            ("TTFT", round(first * 1000)),
            ("TBT", round(between * 1000)),
            ("waitingInferRequestNum", load.waiting),
            ("processingInferRequestNum", load.running),
            ("remainBlocks", free_blocks(load)),
        ):
            yield self._sample(name, {}, str(value))

    def _rest(self, families: Mapping[str, Metric]) -> Iterator[Json]:
        for family in families.values():
            for sample in family.samples:
                if not sample.name.endswith(_SKIPPED):
                    yield self._sample(sample.name, sample.labels, _text(sample.value))

    def _sample(self, name: str, labels: Mapping[str, str], value: str) -> Json:
        metric = {"__name__": name, "job": "node", "instance": self._instance, **labels}
        return {"metric": [metric], "value": value}


class _Recent:
    """The mean of a histogram's last values: since the latest question that is at least WINDOW
    values ago, for only its running totals are known."""

    def __init__(self) -> None:
        self._asked: deque[tuple[float, float]] = deque([(0.0, 0.0)])

    def mean(self, family: Metric) -> float:
        count = total_of(family, f"{family.name}_count")
        total = total_of(family, f"{family.name}_sum")
        while len(self._asked) > 1 and self._asked[1][0] <= count - WINDOW:
            self._asked.popleft()
        before, sum_before = self._asked[0]
        if count > self._asked[-1][0]:
            self._asked.append((count, total))
        return (total - sum_before) / (count - before) if count > before else 0.0


def _text(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(value)
