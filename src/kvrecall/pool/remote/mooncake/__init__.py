"""Mooncake Store as a store of the remote tier. Its client runs in its own process."""

from __future__ import annotations

from collections.abc import Mapping

from kvrecall.pool.remote.mooncake.settings import MooncakeSettings
from kvrecall.pool.remote.mooncake.store import MooncakeStore

__all__ = ["MooncakeSettings", "MooncakeStore", "make_store"]


def make_store(options: Mapping[str, object]) -> MooncakeStore:
    """Options: ``config``, the path of a mooncake.json; its keys, which override the file's;
    ``allow_plaintext``. Raises ConfigError."""
    return MooncakeStore(MooncakeSettings.of(options))
