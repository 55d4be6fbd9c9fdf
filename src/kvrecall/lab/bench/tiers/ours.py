"""Our own tiers as stores."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from kvrecall.block import BlockKey, Namespace
from kvrecall.config import DiskConfig, PoolConfig
from kvrecall.lab.bench.moves import await_all
from kvrecall.lab.bench.tiers.base import Store, StoreError
from kvrecall.pool.base import RecallState, Verdict
from kvrecall.pool.disk import DiskTier
from kvrecall.pool.disk.seal import Checksum, Seal
from kvrecall.pool.pool import Pool
from kvrecall.pool.tier import Get, Outcome, Put

_NAMESPACE = Namespace.of({"kvrecall": "bench tiers"})
_DEADLINE_S = 60.0


class Unchecked(Checksum):
    """Blocks as they are, and nothing to tell whether they still are. Only to show what the
    checksum costs: no pool can be set to this."""

    _PROOF = bytes(16)

    def write(self, puts: Sequence[Put], proofs: dict[BlockKey, bytes]) -> Sequence[memoryview]:
        proofs.update((put.key, self._PROOF) for put in puts)
        return [put.data for put in puts]

    def open(
        self, key: BlockKey, nbytes: int, proof: bytes, read: memoryview, slot: memoryview
    ) -> bool:
        return True


class HostStore(Store):
    """The pool's host memory: reserve, copy in, commit; acquire, copy out, release."""

    def __init__(self, nbytes: int, block_bytes: int) -> None:
        self._bytes = block_bytes
        self._pool = Pool.open(PoolConfig(nbytes))
        self._pool.register(_NAMESPACE, block_bytes)
        arena = self._pool.arena
        while arena.ready_bytes < arena.nbytes:
            time.sleep(0.01)

    def put(self, names: Sequence[bytes], blocks: Sequence[memoryview]) -> None:
        keys = _keys(names)
        for answer, block in zip(self._pool.reserve(keys), blocks, strict=True):
            if answer.verdict is not Verdict.RESERVED:
                raise StoreError(f"the pool says {answer.verdict.value}")
            self._pool.arena.view(answer.offset, self._bytes)[:] = block
        self._pool.commit(keys)

    def get(self, names: Sequence[bytes], into: Sequence[memoryview]) -> None:
        ticket = self._pool.acquire(_keys(names), _DEADLINE_S)
        while (recall := self._pool.poll(ticket)).state is RecallState.PENDING:
            time.sleep(0.0001)
        for offset, place in zip(recall.offsets, into, strict=True):
            place[:] = self._pool.arena.view(offset, self._bytes)
        self._pool.release(ticket)

    def remove(self, names: Sequence[bytes]) -> None:
        self._pool.drop(_keys(names))

    def close(self) -> None:
        self._pool.close()


class DiskStore(Store):
    """The disk tier alone, between memory and its slab files. A put ends when it is durable."""

    def __init__(self, folder: Path, nbytes: int, block_bytes: int, seal: Seal) -> None:
        self._bytes = block_bytes
        config = DiskConfig(folder, nbytes * 2 + (64 << 20), max_queued_bytes=nbytes)
        self._tier = DiskTier(config, seal=seal)
        self._tier.register(_NAMESPACE, block_bytes)

    def put(self, names: Sequence[bytes], blocks: Sequence[memoryview]) -> None:
        keys = _keys(names)
        self._tier.submit_put(
            [
                Put(key, keys[place - 1] if place else None, place, block, self._bytes)
                for place, (key, block) in enumerate(zip(keys, blocks, strict=True))
            ]
        )
        await_all(self._tier, len(keys), Outcome.STORED, _DEADLINE_S)

    def get(self, names: Sequence[bytes], into: Sequence[memoryview]) -> None:
        gets = [Get(key, place) for key, place in zip(_keys(names), into, strict=True)]
        self._tier.submit_get(gets)
        await_all(self._tier, len(gets), Outcome.LOADED, _DEADLINE_S)

    def remove(self, names: Sequence[bytes]) -> None:
        self._tier.drop(_keys(names))

    def close(self) -> None:
        self._tier.close()


def _keys(names: Sequence[bytes]) -> list[BlockKey]:
    return [_NAMESPACE.key(name) for name in names]
