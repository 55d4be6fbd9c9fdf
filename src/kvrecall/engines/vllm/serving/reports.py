"""What the engines' connectors report with each step's statistics: where prompts came from, and
where in their contexts the layers chose blocks.

vLLM hands a connector's last word on a request to the API process only when the *engine* ends it;
a stop string is found outside the engine, which then merely aborts the request. So the split of
every request also travels with the step's statistics, and lies here for the reply to pick up.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from vllm.v1.metrics.loggers import StatLoggerBase

from kvrecall.engines.vllm.serving.heat import HeatTotals

_REMEMBERED = 16_384
_CHILD = re.compile(r"^\d+_")  # one of several samples of a request
_SUFFIX = re.compile(r"-[0-9a-f]{8}$")  # vLLM's own, to make ids unique


class ConnectorReports:
    """The latest splits by request, as many as can be under way at once, and the sum of what the
    workers' layers chose. Owned by the served engine; not thread-safe."""

    def __init__(self, remembered: int = _REMEMBERED) -> None:
        self._splits: OrderedDict[str, Mapping[str, int]] = OrderedDict()
        self._remembered = remembered
        self.heat = HeatTotals()

    def take(self, payload: Mapping[str, Any]) -> None:
        """Takes one payload of ``RecallStats``. Of several samples of one request the first split
        counts: the others hit what it computed."""
        for engine_id, split in payload.get("splits", {}).items():
            self._splits.setdefault(_CHILD.sub("", _SUFFIX.sub("", engine_id)), split)
        while len(self._splits) > self._remembered:
            self._splits.popitem(last=False)
        self.heat.add(payload.get("heat", {}))

    def split_of(self, request_id: str) -> Mapping[str, int] | None:
        """The split of a request by the name the API gave it."""
        return self._splits.get(_CHILD.sub("", request_id))

    def stat_logger(self, vllm_config: Any, engine_index: int = 0) -> StatLoggerBase:
        """One of vLLM's stat loggers, which feeds this."""
        return _Reader(self)


class _Reader(StatLoggerBase):
    def __init__(self, reports: ConnectorReports) -> None:
        self._reports = reports

    def record(self, scheduler_stats: Any, *args: Any, **kwargs: Any) -> None:
        payload = getattr(scheduler_stats, "kv_connector_stats", None)
        if payload:
            self._reports.take(payload)

    def log_engine_initialized(self) -> None:
        """Nothing to say."""
