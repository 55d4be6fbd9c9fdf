"""The last half hour of a server's figures: a bounded ring of samples of its own metrics."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.samples import Sample as Line

EVERY_S = 2.0
KEPT = 900

_TOKENS = "kvrecall_prompt_tokens"
_TIER = "kvrecall_tier_"
_TIER_FIGURES = (
    "used_bytes capacity_bytes blocks hits evictions dropped errors corrupt".split()
)  # by their names in the metrics, without _total
_RETRIEVAL = {
    "kvrecall_retrieval_steps": "steps",
    "kvrecall_retrieval_steps_sparse": "steps_sparse",
    "kvrecall_retrieval_blocks_considered": "considered",
    "kvrecall_retrieval_blocks_selected": "selected",
}
_SERVER = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:request_success": "requests",
    "vllm:kv_cache_usage_perc": "device_share",
}
_METRICS = (_TOKENS, *(_TIER + figure for figure in _TIER_FIGURES), *_RETRIEVAL, *_SERVER)
NAMES = (*_METRICS, *(name + "_total" for name in _METRICS))  # as gauge or as counter
"""The lines that are read; other metrics cost nothing."""


@dataclass(slots=True)
class Sample:
    """Figures at one moment. Tokens and the figures of ``retrieval`` are totals since the start;
    so are a tier's hits, evictions and errors."""

    at: float
    tokens: dict[str, float] = field(default_factory=dict)
    tiers: dict[str, dict[str, float]] = field(default_factory=dict)
    retrieval: dict[str, float] = field(default_factory=dict)
    running: float = 0.0
    waiting: float = 0.0
    requests: float = 0.0


def sample(registry: CollectorRegistry, now: float) -> Sample:
    """The figures of ``registry`` now."""
    made = Sample(now)
    device = 0.0
    for line in _lines(registry):
        name = line.name.removesuffix("_total")
        if name == _TOKENS:
            _add(made.tokens, line.labels["source"], line.value)
        elif name.startswith(_TIER):
            tier = made.tiers.setdefault(line.labels["tier"], {})
            figure = name.removeprefix(_TIER)  # of the one pool that all replicas tell of
            tier[figure] = max(tier.get(figure, 0.0), line.value)
        elif name in _RETRIEVAL:
            _add(made.retrieval, _RETRIEVAL[name], line.value)
        elif _SERVER.get(name) == "device_share":
            device = max(device, line.value)
        elif name in _SERVER:
            setattr(made, _SERVER[name], getattr(made, _SERVER[name]) + line.value)
    made.tiers["device"] = {"share": device}
    return made


def _lines(registry: CollectorRegistry) -> Iterable[Line]:
    for metric in registry.restricted_registry(NAMES).collect():
        for line in metric.samples:
            if not line.name.endswith("_created"):
                yield line


def _add(into: dict[str, float], name: str, value: float) -> None:
    into[name] = into.get(name, 0.0) + value


class History:
    """Samples, one every ``EVERY_S`` seconds, the last ``KEPT`` of them."""

    def __init__(
        self,
        registry: CollectorRegistry = REGISTRY,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._registry = registry
        self._clock = clock
        self._samples: deque[Sample] = deque(maxlen=KEPT)
        self._task: asyncio.Task[None] | None = None

    def take(self) -> None:
        """Adds a sample."""
        self._samples.append(sample(self._registry, round(self._clock(), 3)))

    def since(self, moment: float) -> Sequence[Sample]:
        """Samples after ``moment`` (wall-clock seconds), oldest first."""
        return [each for each in self._samples if each.at > moment]

    def latest(self) -> Sample:
        """A sample of now, which is not kept."""
        return sample(self._registry, round(self._clock(), 3))

    def begin(self) -> None:
        """Takes samples from now on, as long as the running loop runs. Idempotent."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        while True:
            self.take()
            await asyncio.sleep(EVERY_S)
