"""What the page is told at each poll."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from kvrecall import __version__
from kvrecall.engines.insight import Heat, Insight, RequestView
from kvrecall.server.dashboard.history import EVERY_S, KEPT, History

_MOST_LIVE = 200
_NO_HEAT = (
    "Retrieval attention has chosen no blocks yet. It acts on long sequences where it is switched "
    "on (docs/retrieval.md)."
)


class Figures:
    """Over the engine and the history. Work and size of an answer are bounded."""

    def __init__(self, insight: Insight, history: History) -> None:
        self._insight = insight
        self._history = history
        self._boot = secrets.token_hex(8)
        self._began = time.time()

    def tell(self, since: float, ended_since: float) -> dict[str, Any]:
        """Everything now, and of the history what came after ``since`` and ``ended_since``."""
        live, total = self._insight.live(_MOST_LIVE)
        heat = self._insight.heat()
        now = time.time()
        return {
            "boot": self._boot,
            "now": now,
            "version": __version__,
            "uptime_s": now - self._began,
            "model": self._insight.model,
            "pool": self._insight.pooled,
            "every_s": EVERY_S,
            "kept_samples": KEPT,
            "kept_requests": self._insight.remembered,
            "sample": asdict(self._history.latest()),
            "samples": [asdict(sample) for sample in self._history.since(since)],
            "live": _plain(live),
            "live_total": total,
            "ended": _plain(self._insight.ended(ended_since)),
            "heat": None if heat is None else _heat(heat),
            "heat_note": _NO_HEAT,
        }


def _plain(views: Sequence[RequestView]) -> list[dict[str, Any]]:
    return [
        {
            "id": view.id,
            "state": str(view.phase),
            "began": view.began,
            "ended": view.ended,
            "prompt_tokens": view.prompt_tokens,
            "output_tokens": view.output_tokens,
            "ttft_s": view.ttft_s,
            "split": dict(view.split),
        }
        for view in views
    ]


def _heat(heat: Heat) -> dict[str, Any]:
    shares = [
        [chosen / there if there else None for there, chosen in zip(*rows, strict=True)]
        for rows in zip(heat.considered, heat.selected, strict=True)
    ]
    return {"layers": list(heat.layers), "shares": shares}
