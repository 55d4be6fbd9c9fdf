"""What the run counted, and what follows from it."""

from __future__ import annotations

import json
import threading
from collections import Counter
from typing import Any

FIGURES = ("requests", "service_kills", "engine_kills", "corruptions")
FAULTS = ("wrong", "hung", "failed", "lost_committed", "leaked_bytes")
"""Each of these must be 0."""


class Tally:
    """Counts of a run. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._rejoins: list[float] = []
        self.faults: list[str] = []

    def add(self, name: str, count: int = 1) -> None:
        with self._lock:
            self._counts[name] += count

    def fault(self, name: str, what: str, count: int = 1) -> None:
        """Something that must not happen did."""
        with self._lock:
            self._counts[name] += count
            self.faults.append(f"{name}: {what}")

    def rejoined(self, seconds: float) -> None:
        """An engine was connected again so long after the service was ready."""
        with self._lock:
            self._rejoins.append(max(0.0, seconds))

    def __getitem__(self, name: str) -> int:
        return self._counts[name]

    @property
    def is_clean(self) -> bool:
        """Whether nothing happened that must not, and something was asked at all."""
        return self["requests"] > 0 and not any(self[name] for name in FAULTS)

    def summary(self) -> dict[str, Any]:
        """The last line: the figures and faults, then whatever else was counted."""
        names = (*FIGURES, *FAULTS)
        with self._lock:
            rest = {n: c for n, c in sorted(self._counts.items()) if n not in names}
            rejoins = {
                "rejoins": len(self._rejoins),
                "rejoin_s_max": round(max(self._rejoins, default=0.0), 2),
            }
        return {**{name: self[name] for name in names}, **rest, **rejoins}

    def line(self, **more: Any) -> str:
        return json.dumps({**self.summary(), **more}, separators=(",", ":"))
