"""Large numbers as people read them."""

from __future__ import annotations

_UNITS = ("B", "KB", "MB", "GB", "TB")


def of_bytes(nbytes: float) -> str:
    """Decimal units, four digits at most before the next unit: ``9,999 MB``, ``10 GB``."""
    amount, units = float(nbytes), list(_UNITS)
    while amount >= 10_000.0 and len(units) > 1:
        amount /= 1000.0
        del units[0]
    return f"{amount:,.0f} {units[0]}"
