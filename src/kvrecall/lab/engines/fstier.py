"""vLLM's own file-system offload tier as a library, for the benchmark that compares tiers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import ReqContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager

from kvrecall.errors import EngineError

_DEADLINE_S = 60.0
_BLOCK_TOKENS = 64


class FsTier:
    """``FileSystemTierManager`` with the threads it has by default, over ``memory``.

    ``memory`` is what vLLM calls the primary tier: ``[blocks * block_bytes]`` bytes. Places are
    numbers of blocks in it.
    """

    def __init__(self, folder: Path, memory: memoryview, block_bytes: int) -> None:
        view = memory.cast("B", (len(memory) // block_bytes, block_bytes))
        self._tier = FileSystemTierManager(_spec(block_bytes), view, "fs", str(folder))
        self._job = 0

    def store(self, names: Sequence[bytes], places: Sequence[int]) -> None:
        """Returns when the tier calls the blocks stored. Raises EngineError."""
        self._tier.submit_store(self._transfer(names, places, promotion=False))
        self._await()

    def load(self, names: Sequence[bytes], places: Sequence[int]) -> None:
        """Returns when the blocks are in their places. Raises EngineError."""
        self._tier.submit_load(self._transfer(names, places, promotion=True))
        self._await()

    def path_of(self, name: bytes) -> Path:
        """The file of a block."""
        return Path(self._tier.file_mapper.get_file_name(make_offload_key(name, 0)))

    def _transfer(
        self, names: Sequence[bytes], places: Sequence[int], promotion: bool
    ) -> TransferJob:
        self._job += 1
        keys = [make_offload_key(name, 0) for name in names]
        chunks = np.asarray(places, dtype=np.int64)
        return TransferJob(self._job, keys, chunks, promotion, ReqContext(f"bench-{self._job}"))

    def _await(self) -> None:
        until = time.monotonic() + _DEADLINE_S
        while time.monotonic() < until:
            for done in self._tier.get_finished_jobs():
                if not done.success:
                    raise EngineError("vLLM's file-system tier failed")
                return
            time.sleep(0.0001)
        raise EngineError(f"vLLM's file-system tier did not end within {_DEADLINE_S:.0f} s")

    def close(self) -> None:
        self._tier.shutdown()


def _spec(block_bytes: int) -> Any:
    """What the tier reads of an OffloadingSpec: one group, one worker, a block a file."""
    config = OffloadingConfig(
        groups=(OffloadingGroupConfig(_BLOCK_TOKENS, ("layer",), 0),),
        worker_kv_bytes_per_block=block_bytes,
        enable_kv_cache_events=False,
        extra_config={},
        engine_id="bench",
        model=OffloadingModelConfig("bench", "uint8"),
        cache=OffloadingCacheConfig(_BLOCK_TOKENS, 1),
        parallel=OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, True),
    )
    return SimpleNamespace(
        config=config, blocks_per_chunk=1, kv_events_config=SimpleNamespace(), extra_config={}
    )
