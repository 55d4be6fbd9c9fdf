"""vLLM's KV cache events, built from changes of a pool."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from vllm.distributed.kv_events import (
    MEDIUM_CPU,
    MEDIUM_GPU,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
)
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    get_block_hash,
    get_group_id,
    maybe_convert_block_hash,
)

from kvrecall.block import TierName
from kvrecall.pool.runs import Run

# vLLM names its media in code, except storage, whose name older versions lack.
_MEDIA = {TierName.HOST: MEDIUM_CPU, TierName.DISK: "STORAGE", TierName.REMOTE: "STORAGE"}


def _published(hashes: Sequence[bytes]) -> list[Any]:
    """Hashes as vLLM publishes them: their last 64 bits, unless its environment says otherwise,
    which it reads for each hash."""
    if hashes and isinstance(maybe_convert_block_hash(BlockHash(hashes[0])), int):
        return [int.from_bytes(one[-8:], "big") for one in hashes]
    return list(hashes)


def stored(run: Run, ownership: str | None) -> Any:
    """Blocks are in a tier. Their tokens are not known to the pool: as in the events of vLLM's own
    offloading, ``token_ids`` is empty and ``block_size`` 0. ``ownership``: of a remote tier's."""
    return _event(
        BlockStored,
        block_hashes=_published(run.hashes),
        parent_block_hash=None if run.parent is None else _published([run.parent])[0],
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
        block_hashes=_published(run.hashes),
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


def replayed_batches(vllm_config: Any) -> int:
    """How many of the last batches vLLM's publisher can repeat. A step makes at most one."""
    return int(vllm_config.kv_events_config.buffer_steps)


class DeviceBlocks:
    """The device's prefix cache, of which vLLM publishes what changes. Used from the scheduler's
    thread."""

    def __init__(self, kv_cache_manager: Any) -> None:
        self._blocks = kv_cache_manager.block_pool
        self._seen = self._blocks.cached_block_hash_to_block  # a clear makes a new one

    def were_cleared(self) -> bool:
        """Whether vLLM has emptied the cache since the last call. It publishes
        ``AllBlocksCleared`` then, which voids the pool's blocks too."""
        now = self._blocks.cached_block_hash_to_block
        is_new = now is not self._seen
        self._seen = now
        return is_new

    def sweep(self, most: int) -> Iterator[list[Any]]:
        """Events of all blocks that the device holds, of at most ``most`` blocks with each step; as
        those of vLLM's own offloading without tokens and parents, which the cache does not know."""
        table = self._blocks.cached_block_hash_to_block
        keys = list(table._cache)
        for start in range(0, len(keys), most):
            if self._blocks.cached_block_hash_to_block is not table:
                return  # cleared
            groups: dict[int, list[bytes]] = {}
            for key in keys[start : start + most]:
                if key in table._cache:
                    groups.setdefault(get_group_id(key), []).append(get_block_hash(key))
            yield [self._held(group, hashes) for group, hashes in groups.items()]

    def _held(self, group: int, hashes: list[bytes]) -> Any:
        return _event(
            BlockStored,
            block_hashes=_published(hashes),
            parent_block_hash=None,
            token_ids=[],
            block_size=0,
            lora_id=None,
            lora_name=None,
            medium=getattr(self._blocks, "medium", MEDIUM_GPU),
            group_idx=group,
            locality="LOCAL",
        )
