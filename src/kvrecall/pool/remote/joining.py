"""Joins the remote tier that settings ask for to the tier above it."""

from __future__ import annotations

import dataclasses

from kvrecall.config import RemoteConfig
from kvrecall.pool.arena import Arena
from kvrecall.pool.cascade import Cascade
from kvrecall.pool.cipher import Cipher
from kvrecall.pool.remote.kinds import make_store
from kvrecall.pool.remote.sealed import SealedStore
from kvrecall.pool.remote.tier import RemoteTier
from kvrecall.pool.tier import NullTier, Tier


def with_remote(
    above: Tier, config: RemoteConfig, arena: Arena, cipher: Cipher | None = None
) -> Tier:
    """``above`` (perhaps none) with the remote tier below it; takes it over. Raises ConfigError
    or TierError, and leaves ``above`` open, if the store cannot be had. ``cipher`` seals what
    leaves the host."""
    share = 2 if isinstance(above, NullTier) else 4  # of the arena may wait to be stored
    queued = min(config.max_queued_bytes, arena.nbytes // share)
    store = make_store(config.kind, config.options)
    if cipher is not None:
        store = SealedStore(store, cipher)
    store.attach(arena.memory)
    remote = RemoteTier(store, dataclasses.replace(config, max_queued_bytes=queued))
    if isinstance(above, NullTier):
        return remote
    return Cascade(above, remote)
