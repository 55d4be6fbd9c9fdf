"""vLLM's KV cache events, built from changes of a pool."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_events import (
    MEDIUM_CPU,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
)
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash

from kvrecall.block import TierName
from kvrecall.pool.runs import Run

# vLLM names its media in code, except storage, whose name older versions lack.
_MEDIA = {TierName.HOST: MEDIUM_CPU, TierName.DISK: "STORAGE", TierName.REMOTE: "STORAGE"}


def stored(run: Run, ownership: str | None) -> Any:
    """Blocks are in a tier. Their tokens are not known to the pool: as in the events of vLLM's own
    offloading, ``token_ids`` is empty and ``block_size`` 0. ``ownership``: of a remote tier's."""
    parent = run.parent
    return _event(
        BlockStored,
        block_hashes=[maybe_convert_block_hash(BlockHash(one)) for one in run.hashes],
        parent_block_hash=(None if parent is None else maybe_convert_block_hash(BlockHash(parent))),
        token_ids=[],
        block_size=0,
        lora_id=None,
        lora_name=None,
        medium=_MEDIA[run.tier],
        group_idx=run.group,
        **_place(run.tier, ownership),
    )


def removed(run: Run, ownership: str | None) -> Any:
    """Blocks have left a tier."""
    return _event(
        BlockRemoved,
        block_hashes=[maybe_convert_block_hash(BlockHash(one)) for one in run.hashes],
        medium=_MEDIA[run.tier],
        group_idx=run.group,
        **_place(run.tier, ownership),
    )


def _place(tier: TierName, ownership: str | None) -> dict[str, str | None]:
    if tier is TierName.REMOTE:
        return {"locality": "REMOTE", "ownership": ownership}
    return {"locality": "LOCAL"}


def cleared() -> Any:
    """Whatever was published before is void, in all tiers."""
    return AllBlocksCleared()


def _event(kind: Any, **fields: Any) -> Any:
    """An event without the fields that this version of vLLM does not have."""
    known = kind.__struct_fields__
    return kind(**{name: value for name, value in fields.items() if name in known})


def are_published(vllm_config: Any) -> bool:
    """Whether the engine publishes KV cache events."""
    settings = vllm_config.kv_events_config
    return settings is not None and bool(settings.enable_kv_cache_events)


class DeviceClears:
    """Detects that vLLM has emptied the device's prefix cache. It publishes ``AllBlocksCleared``
    then, which voids the pool's blocks too."""

    def __init__(self, kv_cache_manager: Any) -> None:
        self._blocks = kv_cache_manager.block_pool
        self._seen = self._blocks.cached_block_hash_to_block  # a clear makes a new one

    def happened(self) -> bool:
        """Whether it did since the last call."""
        now = self._blocks.cached_block_hash_to_block
        is_new = now is not self._seen
        self._seen = now
        return is_new
