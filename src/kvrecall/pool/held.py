"""A block as those who look after a pool see it."""

from __future__ import annotations

from dataclasses import dataclass

from kvrecall.block import BlockKey, Tenant, TierName


@dataclass(frozen=True, slots=True)
class Held:
    """A block in one tier, when it was looked at. ``used``: wall-clock second of its last use."""

    key: BlockKey
    tier: TierName
    tenant: Tenant
    parent: BlockKey | None
    depth: int
    slot_bytes: int
    used: float
    pinned: bool
