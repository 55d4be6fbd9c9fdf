"""The disk tier."""

from kvrecall.pool.disk.tier import DiskTier

__all__ = ["DiskTier"]
