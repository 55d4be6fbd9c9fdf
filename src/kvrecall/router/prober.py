"""Asks every instance, again and again, whether it is there."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter

from kvrecall.router.instance import Fleet, Instance
from kvrecall.router.prefixes import PrefixMap
from kvrecall.router.upstream import Upstream

log = logging.getLogger("kvrecall.router")

_STRIKES = 2  # probes in a row that fail before an instance counts as down


class Prober:
    """Keeps ``Instance.healthy`` right. One that went down has lost what was known of it."""

    def __init__(
        self, fleet: Fleet, upstream: Upstream, prefixes: PrefixMap, every_s: float
    ) -> None:
        self._fleet = fleet
        self._upstream = upstream
        self._prefixes = prefixes
        self._every_s = every_s
        self._strikes: Counter[str] = Counter()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self.round()
            await asyncio.sleep(self._every_s)

    async def round(self) -> None:
        """Probes all instances once, at the same time."""
        await asyncio.gather(*(self._probe(instance) for instance in self._fleet.all))

    def lost(self, instance: Instance, why: str) -> None:
        """A request found that ``instance`` is gone."""
        if instance.healthy:
            instance.healthy = False
            self._prefixes.forget(instance)
            log.warning("%s instance %s is down: %s", instance.role, instance.url, why)

    async def _probe(self, instance: Instance) -> None:
        if await self._upstream.probe(instance):
            self._strikes[instance.url] = 0
            if not instance.healthy:
                instance.healthy = True
                log.info("%s instance %s is up", instance.role, instance.url)
            return
        self._strikes[instance.url] += 1
        if self._strikes[instance.url] >= _STRIKES:
            self.lost(instance, "it does not answer /health")
