"""Counters of a chaos run, and the verdict that follows from them."""

from __future__ import annotations

import threading
from collections import Counter

FIGURES = ("requests", "service_kills", "engine_kills", "corruptions")
FAULTS = ("wrong", "hung", "failed", "lost_committed", "leaked_bytes")
"""Each of these must be 0."""


class Report:
    """Counts of a run, and a line for each fault. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._rejoins: list[float] = []
        self.faults: list[str] = []

    def add(self, name: str, count: int = 1) -> None:
        with self._lock:
            self._counts[name] += count

    def fault(self, name: str, what: str, count: int = 1) -> None:
        """Counts one of ``FAULTS``."""
        with self._lock:
            self._counts[name] += count
            self.faults.append(f"{name}: {what}")

    def rejoined(self, seconds: float) -> None:
        """Notes how many seconds after the service was ready an engine reconnected."""
        with self._lock:
            self._rejoins.append(max(0.0, seconds))

    def __getitem__(self, name: str) -> int:
        return self._counts[name]

    @property
    def is_clean(self) -> bool:
        """Whether there were requests and no faults."""
        return self["requests"] > 0 and not any(self[name] for name in FAULTS)

    def figures(self) -> dict[str, object]:
        """Figures and faults first, then the other counts."""
        names = (*FIGURES, *FAULTS)
        with self._lock:
            others = {n: c for n, c in sorted(self._counts.items()) if n not in names}
            rejoins = {
                "rejoins": len(self._rejoins),
                "rejoin_s_max": round(max(self._rejoins, default=0.0), 2),
            }
        return {**{name: self[name] for name in names}, **others, **rejoins}
