"""LMCache's backends as stores: its memory objects, its CPU backend, its local-disk backend."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvrecall.lab.bench.tiers.base import Store, StoreError

_DEADLINE_S = 60.0


class _Lmcache(Store):
    """What both backends need: LMCache's memory, and blocks in it."""

    def __init__(self, nbytes: int, block_bytes: int, **config: Any) -> None:
        os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")
        os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")  # it would report home
        import torch
        from lmcache.v1.config import LMCacheEngineConfig
        from lmcache.v1.memory_management import MemoryFormat
        from lmcache.v1.metadata import LMCacheMetadata
        from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

        shape = (2, 1, 64, block_bytes // 128)  # K and V, one layer, 64 tokens: the bytes count
        self._how = (torch.Size(shape), torch.uint8, MemoryFormat.KV_2LTD)
        self.config = LMCacheEngineConfig.from_defaults(
            local_cpu=True, max_local_cpu_size=nbytes / 2**30, **config
        )
        metadata = LMCacheMetadata("bench", 1, 1, 0, 0, torch.uint8, (1, 2, 64, 1, shape[3]))
        self.cpu: Any = LocalCPUBackend(self.config, metadata, "cpu")

    def key(self, name: bytes) -> Any:
        from lmcache.utils import CacheEngineKey

        return CacheEngineKey("bench", 1, 0, int.from_bytes(name[:8]) >> 1, self._how[1])

    def filled(self, block: memoryview) -> Any:
        """A memory object with the bytes of ``block``."""
        made = self.cpu.allocate(*self._how)
        if made is None:
            raise StoreError("LMCache has no memory left")
        memoryview(made.byte_array).cast("B")[:] = block
        return made


class LmcacheCpu(_Lmcache):
    """``LocalCPUBackend``: allocate, copy in, submit; get, copy out, release."""

    def put(self, names: Sequence[bytes], blocks: Sequence[memoryview]) -> None:
        made = [self.filled(block) for block in blocks]
        self.cpu.batched_submit_put_task([self.key(name) for name in names], made)
        for one in made:
            one.ref_count_down()

    def get(self, names: Sequence[bytes], into: Sequence[memoryview]) -> None:
        for name, place in zip(names, into, strict=True):
            found = self.cpu.get_blocking(self.key(name))
            if found is None:
                raise StoreError("LMCache has lost a block")
            place[:] = memoryview(found.byte_array).cast("B")
            found.ref_count_down()

    def remove(self, names: Sequence[bytes]) -> None:
        for name in names:
            self.cpu.remove(self.key(name))

    def close(self) -> None:
        self.cpu.close()


class LmcacheDisk(_Lmcache):
    """``LocalDiskBackend`` between LMCache's own memory objects and its files.

    It keeps no block in memory here; a put ends when its worker has written the file.
    """

    def __init__(self, folder: Path, nbytes: int, block_bytes: int, direct: bool) -> None:
        super().__init__(
            nbytes,
            block_bytes,
            local_disk=str(folder),
            max_local_disk_size=2 * nbytes / 2**30,
            extra_config={"use_odirect": direct},
        )
        from lmcache.v1.storage_backend.local_disk_backend import LocalDiskBackend

        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._disk: Any = LocalDiskBackend(self.config, self._loop, self.cpu, "cpu")
        self._objects: list[Any] = []

    def prepare(self, names: Sequence[bytes], blocks: Sequence[memoryview]) -> None:
        self._objects = [self.filled(block) for block in blocks]

    def put(self, names: Sequence[bytes], blocks: Sequence[memoryview]) -> None:
        keys = [self.key(name) for name in names]
        self._disk.batched_submit_put_task(keys, self._objects)
        until = time.monotonic() + _DEADLINE_S
        while any(map(self._disk.exists_in_put_tasks, keys)):
            if time.monotonic() > until:
                raise StoreError("LMCache does not end writing")
            time.sleep(0.0005)
        self._let_go()

    def get(self, names: Sequence[bytes], into: Sequence[memoryview]) -> None:
        found = self._disk.batched_get_blocking([self.key(name) for name in names])
        self._objects = [one for one in found if one is not None]
        if len(self._objects) != len(names):
            raise StoreError("LMCache has lost a block")

    def landed(self, into: Sequence[memoryview]) -> Sequence[memoryview]:
        for place, one in zip(into, self._objects, strict=True):
            place[:] = memoryview(one.byte_array).cast("B")
        self._let_go()
        return into

    def _let_go(self) -> None:
        for one in self._objects:
            one.ref_count_down()
        self._objects = []

    def remove(self, names: Sequence[bytes]) -> None:
        for name in names:
            self._disk.remove(self.key(name))

    def close(self) -> None:
        self._disk.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10.0)
        self.cpu.close()
