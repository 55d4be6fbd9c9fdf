"""Other projects' libraries as stores: LMCache, Mooncake's client, vLLM's file tier."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from kvrecall.pool.remote.mooncake.settings import MooncakeSettings
from kvrecall.processes.service import Master
from kvrecall_lab.bench.stores import DEADLINE_S, Space, Store, StoreError, address_of

PEERS = Path(sys.prefix) / "peers" / "bench"
"""Folder for libraries that would change packages of the environment; may be absent."""

_BLOCK_TOKENS = 64


def find_peers() -> None:
    """Makes packages in ``PEERS`` importable, behind everything that is installed."""
    if PEERS.is_dir() and str(PEERS) not in sys.path:
        sys.path.append(str(PEERS))


class LmcacheCpu(Store):
    """``LocalCPUBackend``: allocate, copy in, submit; get, copy out, release. Its disk backend
    loses blocks that are put as fast as here."""

    def __init__(self, space: Space) -> None:
        os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")
        os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")  # disables telemetry
        import torch
        from lmcache.v1.config import LMCacheEngineConfig
        from lmcache.v1.memory_management import MemoryFormat
        from lmcache.v1.metadata import LMCacheMetadata
        from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

        # K and V, one layer, 64 tokens: the bytes count
        shape = (2, 1, 64, space.block_bytes // 128)
        self._how = (torch.Size(shape), torch.uint8, MemoryFormat.KV_2LTD)
        config = LMCacheEngineConfig.from_defaults(
            local_cpu=True, max_local_cpu_size=space.limit / 2**30
        )
        metadata = LMCacheMetadata("bench", 1, 1, 0, 0, torch.uint8, (1, 2, 64, 1, shape[3]))
        self._cpu: Any = LocalCPUBackend(config, metadata, "cpu")

    def _key(self, name: bytes) -> Any:
        from lmcache.utils import CacheEngineKey

        return CacheEngineKey("bench", 1, 0, int.from_bytes(name[:8]) >> 1, self._how[1])

    def put(self, names: Sequence[bytes], blocks: Sequence[memoryview]) -> None:
        made = [self._cpu.allocate(*self._how) for _ in blocks]
        if None in made:
            raise StoreError("LMCache has no memory left")
        for one, block in zip(made, blocks, strict=True):
            memoryview(one.byte_array).cast("B")[:] = block
        self._cpu.batched_submit_put_task([self._key(name) for name in names], made)
        for one in made:
            one.ref_count_down()

    def get(self, names: Sequence[bytes], into: Sequence[memoryview]) -> None:
        for name, place in zip(names, into, strict=True):
            found = self._cpu.get_blocking(self._key(name))
            if found is None:
                raise StoreError("LMCache has lost a block")
            place[:] = memoryview(found.byte_array).cast("B")
            found.ref_count_down()

    def remove(self, names: Sequence[bytes]) -> None:
        for name in names:
            self._cpu.remove(self._key(name))

    def close(self) -> None:
        self._cpu.close()


class MooncakeClient(Store):
    """``MooncakeDistributedStore`` with a master of its own, on memory that it has registered; it
    lends the memory itself, so blocks are copied locally."""

    def __init__(self, space: Space) -> None:
        os.environ.setdefault("GLOG_minloglevel", "2")
        from mooncake.store import MooncakeDistributedStore

        self._master = Master(space.folder / "master.log")
        self._master.start()
        self._client: Any = MooncakeDistributedStore()
        try:
            lent = max(2 * space.nbytes, 64 << 20)
            setup = dict(MooncakeSettings.of(self._master.options(lent)).setup)
            if self._client.setup(setup) != 0:
                raise StoreError("cannot set up Mooncake's client")
            if self._client.register_buffer(address_of(space.memory), len(space.memory)) != 0:
                raise StoreError("Mooncake cannot register memory")
        except BaseException:
            self._master.kill()
            raise

    def put(self, names: Sequence[bytes], blocks: Sequence[memoryview]) -> None:
        codes = self._client.batch_put_from(*_places(names, blocks))
        if any(codes):
            raise StoreError(f"Mooncake's put gave {sorted(set(codes))}")

    def get(self, names: Sequence[bytes], into: Sequence[memoryview]) -> None:
        codes = self._client.batch_get_into(*_places(names, into))
        if list(codes) != [len(place) for place in into]:
            raise StoreError(f"Mooncake's get gave {sorted(set(codes))}")

    def remove(self, names: Sequence[bytes]) -> None:
        self._client.batch_remove([name.hex() for name in names], True)

    def close(self) -> None:
        self._client.close()
        self._master.kill()


def _places(
    names: Sequence[bytes], blocks: Sequence[memoryview]
) -> tuple[list[str], list[int], list[int]]:
    """Arguments of the client's batch calls: names, addresses, sizes."""
    return [name.hex() for name in names], list(map(address_of, blocks)), list(map(len, blocks))


class VllmFiles(Store):
    """vLLM's ``FileSystemTierManager`` with the threads it has by default: direct I/O, a request a
    job. It moves blocks between files and one piece of memory, in which all blocks lie."""

    def __init__(self, space: Space) -> None:
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

        config = OffloadingConfig(  # one group, one worker, a block a file
            groups=(OffloadingGroupConfig(_BLOCK_TOKENS, ("layer",), 0),),
            worker_kv_bytes_per_block=space.block_bytes,
            enable_kv_cache_events=False,
            extra_config={},
            engine_id="bench",
            model=OffloadingModelConfig("bench", "uint8"),
            cache=OffloadingCacheConfig(_BLOCK_TOKENS, 1),
            parallel=OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, True),
        )
        spec: Any = SimpleNamespace(
            config=config, blocks_per_chunk=1, kv_events_config=SimpleNamespace(), extra_config={}
        )
        self._bytes = space.block_bytes
        view = space.memory.cast("B", (len(space.memory) // self._bytes, self._bytes))
        self._tier: Any = FileSystemTierManager(spec, view, "fs", str(space.folder))
        self._base = address_of(space.memory)
        self._jobs = 0
        self._job_type, self._context, self._key = TransferJob, ReqContext, make_offload_key

    def put(self, names: Sequence[bytes], blocks: Sequence[memoryview]) -> None:
        self._tier.submit_store(self._job(names, blocks, promotion=False))
        self._await()

    def get(self, names: Sequence[bytes], into: Sequence[memoryview]) -> None:
        self._tier.submit_load(self._job(names, into, promotion=True))
        self._await()

    def _job(self, names: Sequence[bytes], blocks: Sequence[memoryview], promotion: bool) -> Any:
        self._jobs += 1
        keys = [self._key(name, 0) for name in names]
        places = [(address_of(block) - self._base) // self._bytes for block in blocks]
        chunks = np.asarray(places, dtype=np.int64)
        context = self._context(f"bench-{self._jobs}")
        return self._job_type(self._jobs, keys, chunks, promotion, context)

    def _await(self) -> None:
        until = time.monotonic() + DEADLINE_S
        while time.monotonic() < until:
            for done in self._tier.get_finished_jobs():
                if not done.success:
                    raise StoreError("vLLM's file-system tier failed")
                return
            time.sleep(0.0001)
        raise StoreError(f"vLLM's file-system tier did not finish within {DEADLINE_S:.0f} s")

    def remove(self, names: Sequence[bytes]) -> None:
        for name in names:
            Path(self._tier.file_mapper.get_file_name(self._key(name, 0))).unlink()

    def close(self) -> None:
        self._tier.shutdown()
