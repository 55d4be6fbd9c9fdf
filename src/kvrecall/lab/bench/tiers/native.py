"""vLLM's own file-system offload tier as a store."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvrecall.lab.bench.tiers.base import Store, address_of


class NativeFs(Store):
    """The tier moves blocks between files and one piece of memory, in which all blocks given to
    ``put`` and ``get`` lie: ``block_of`` says at which place."""

    def __init__(self, folder: Path, memory: memoryview, block_bytes: int) -> None:
        from kvrecall.lab.engines.fstier import FsTier

        self._tier = FsTier(folder, memory, block_bytes)
        self._bytes = block_bytes
        self._base = address_of(memory)

    def put(self, names: Sequence[bytes], blocks: Sequence[memoryview]) -> None:
        self._tier.store(names, self._places(blocks))

    def get(self, names: Sequence[bytes], into: Sequence[memoryview]) -> None:
        self._tier.load(names, self._places(into))

    def _places(self, blocks: Sequence[memoryview]) -> list[int]:
        return [(address_of(block) - self._base) // self._bytes for block in blocks]

    def remove(self, names: Sequence[bytes]) -> None:
        for name in names:
            self._tier.path_of(name).unlink()

    def close(self) -> None:
        self._tier.close()
