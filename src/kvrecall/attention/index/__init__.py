"""Vector indexes, which stand in for the exact search over digests, by name: the vector library
of openGauss RetrievalKV as an interface.

{vector, number} go in, in order, and an inner product finds them: one index for each KV head of a
sequence in a layer. Everything else (which vectors represent a block, which blocks a group of query
heads agrees on) is kvrecall's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvrecall.config import factory_of
from kvrecall.errors import ConfigError

Vectors = npt.NDArray[np.float32]
Numbers = npt.NDArray[np.int64]

EXACT = "exact"
"""No index: kvrecall's own search over all digests."""

INDEXES = {
    "faiss-flat": "kvrecall.attention.index.faiss:Flat",
    "faiss-ivf": "kvrecall.attention.index.faiss:InvertedFile",
}
"""``module:Factory`` of each index that has a name."""


class VectorIndex(ABC):
    """Vectors of one KV head of a sequence, numbered 0, 1, 2 ... in the order in which they are
    added. Called by one thread, in host memory; ``testing/index_contract.py`` checks one."""

    @abstractmethod
    def add(self, vectors: Vectors) -> None:
        """Appends vectors, float32 ``[count, width]``, C-contiguous: those of a prompt, step by
        step or at once, then a block's at a time as it decodes. They may change after the call."""

    @abstractmethod
    def search(self, queries: Vectors, count: int) -> tuple[Vectors, Numbers]:
        """For each query the ``count`` vectors with the largest inner products, or those that an
        approximate search takes for them: products and numbers, ``[queries, count]`` each, largest
        first. ``queries``: float32 ``[queries, width]``, C-contiguous; ``count``: 1 to the number
        of vectors. Where fewer are found the numbers at the end are -1."""

    @abstractmethod
    def close(self) -> None:
        """Its sequence has ended."""


Factory = Callable[[int], VectorIndex]
"""Makes an empty index of vectors of a width."""


def index_factory(name: str) -> Factory | None:
    """What makes indexes of that name, or of ``package.module:Factory``; None for the exact search.
    Raises ConfigError."""
    if name == EXACT:
        return None
    extras = dict.fromkeys(INDEXES, "index")
    return factory_of("VLLM_RETRIEVAL_INDEX", name, INDEXES, allowed=(EXACT,), extras=extras)


def require_index(name: str, width: int) -> None:
    """Makes an index of vectors of that width, uses it once and closes it: one that cannot be made
    ends the start, not the first long sequence. Raises ConfigError."""
    factory, setting = index_factory(name), f"VLLM_RETRIEVAL_INDEX is {name!r}"
    if factory is None:
        return
    try:
        index = factory(width)
        try:
            index.add(np.ones((2, width), np.float32))
            shapes = [np.shape(one) for one in index.search(np.ones((1, width), np.float32), 2)]
        finally:
            index.close()
    except Exception as error:
        raise ConfigError(
            f"{setting}, and an index of it cannot be used: {type(error).__name__}: {error}"
        ) from error
    if shapes != [(1, 2), (1, 2)]:
        raise ConfigError(
            f"{setting}, whose search for 2 vectors by one query returns arrays of shapes "
            f"{' and '.join(map(str, shapes))}; both must be (1, 2), with -1 where no vector was "
            "found (kvrecall.testing.index_contract checks an index)"
        )
