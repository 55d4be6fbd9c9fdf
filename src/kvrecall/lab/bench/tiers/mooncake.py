"""Mooncake's client as a store: it lends the memory itself, so a block is copied on this host."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvrecall.lab.bench.tiers.base import Store, StoreError, address_of
from kvrecall.lab.masters import Master
from kvrecall.pool.remote.mooncake import MooncakeSettings


class MooncakeClient(Store):
    """``MooncakeDistributedStore`` with a master of its own, on ``memory`` it has registered.

    All blocks given to ``put`` and ``get`` lie in ``memory``.
    """

    def __init__(self, folder: Path, nbytes: int, memory: memoryview) -> None:
        os.environ.setdefault("GLOG_minloglevel", "2")
        from mooncake.store import MooncakeDistributedStore

        self._master = Master(folder / "master.log")
        self._master.start()
        self._client: Any = MooncakeDistributedStore()
        try:
            setup = dict(MooncakeSettings.of(self._master.options(max(2 * nbytes, 64 << 20))).setup)
            if self._client.setup(setup) != 0:
                raise StoreError("Mooncake's client cannot be set up")
            if self._client.register_buffer(address_of(memory), len(memory)) != 0:
                raise StoreError("Mooncake cannot register the memory")
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
    """What the client's batch calls take: names, addresses, sizes."""
    return [name.hex() for name in names], list(map(address_of, blocks)), list(map(len, blocks))
