"""Opens the pool that an engine's settings describe."""

from __future__ import annotations

from kvrecall.config import RecallSettings
from kvrecall.pool.base import PoolClient
from kvrecall.pool.pool import Pool
from kvrecall.pool.service.client import ServiceClient

_STATS_AGE_S = 0.5
"""An engine requests statistics in every step; readers need them less often."""


def open_pool(settings: RecallSettings) -> PoolClient:
    """The engine's own pool (backend ``embedded``), or a client of the node's pool (``service``).
    Raises ConfigError or TierError if the former cannot be opened. The latter behaves as an empty
    pool while there is no service."""
    service = settings.service
    if service is None:
        return Pool.open(settings.pool)
    return ServiceClient(service.socket, service.call_timeout_s, _STATS_AGE_S)
