"""Counters that go on when the service that counts them is started again."""

from __future__ import annotations

import dataclasses
from typing import Any

from kvrecall.pool.base import PoolStats, TierStats

_POOL_COUNTERS = ("lookups", "hits", "refused")
_TIER_GAUGES = ("name", "capacity_bytes", "used_bytes", "blocks", "pinned_bytes")
_TIER_COUNTERS = tuple(
    field.name for field in dataclasses.fields(TierStats) if field.name not in _TIER_GAUGES
)


class Totals:
    """Sums of the counters over all lives of a service, as one client saw them. Histograms are
    those of the present life. Not thread-safe."""

    def __init__(self) -> None:
        self._boot = b""
        self._before: dict[tuple[str, str], float] = {}
        self._seen: dict[tuple[str, str], float] = {}
        self.last = PoolStats(())

    def add(self, boot: bytes, stats: PoolStats) -> PoolStats:
        """``stats`` of the life ``boot``, with what earlier lives had counted."""
        if boot != self._boot:
            self._boot = boot
            self._before, self._seen = self._sums(), {}
        tiers = []
        for tier in stats.tiers:
            counts = {name: getattr(tier, name) for name in _TIER_COUNTERS}
            tiers.append(dataclasses.replace(tier, **self._plus(tier.name, counts)))
        counts = {name: getattr(stats, name) for name in _POOL_COUNTERS}
        self.last = dataclasses.replace(stats, tiers=tuple(tiers), **self._plus("", counts))
        return self.last

    def without_service(self) -> PoolStats:
        """The sums so far, with gauges at rest."""
        tiers = tuple(
            dataclasses.replace(t, used_bytes=0, blocks=0, pinned_bytes=0) for t in self.last.tiers
        )
        return dataclasses.replace(
            self.last,
            tiers=tiers,
            leases=0,
            reserved=0,
            queued_writes=0,
            queued_reads=0,
            unwritten_bytes=0,
        )

    def _plus(self, owner: str, counts: dict[str, float]) -> dict[str, Any]:
        for name, value in counts.items():
            self._seen[owner, name] = value
        return {name: self._before.get((owner, name), 0) + v for name, v in counts.items()}

    def _sums(self) -> dict[tuple[str, str], float]:
        names = {*self._before, *self._seen}
        return {name: self._before.get(name, 0) + self._seen.get(name, 0) for name in names}
