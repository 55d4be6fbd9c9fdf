"""Whether Mooncake runs here."""

from __future__ import annotations

import importlib.util

import pytest


def _why_not() -> str:
    if importlib.util.find_spec("mooncake") is None:
        return "Mooncake is not installed"
    try:
        import mooncake.store  # noqa: F401
    except (ImportError, OSError) as error:
        return f"Mooncake's libraries are missing: {error}"
    return ""


needs_mooncake = pytest.mark.skipif(bool(_why_not()), reason=_why_not() or "there")
