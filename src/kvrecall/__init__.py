"""kvrecall: keeps KV-cache blocks in a pool of tiers and recalls them instead of recomputing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvrecall.pool import Pool

__version__ = "0.1.0"
__all__ = ["Pool", "__version__"]


def __getattr__(name: str) -> Any:
    """Loads the pool on first use, so that ``kvrecall --help`` stays quick."""
    if name == "Pool":
        from kvrecall.pool import Pool

        return Pool
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
