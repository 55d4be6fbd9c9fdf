"""Indexes of the faiss library (Douze et al., "The Faiss library", arXiv 2401.08281)."""

from __future__ import annotations

import math
from typing import Any

import faiss
import numpy as np
import torch

from kvrecall.attention.index import Numbers, VectorIndex, Vectors

_TRAINED_FROM = 4096
"""Vectors: with fewer an inverted file is not faster than reading them all."""

_TRAINED_BY = 64
"""Vectors for each centroid: more do not make it better (faiss's guidelines say 39 to 256)."""

_PROBED = 2.0
"""An inverted file reads this many times as many vectors as it must find."""


class _Faiss(VectorIndex):
    """Any index of faiss's that appends."""

    def __init__(self, width: int) -> None:
        faiss.omp_set_num_threads(torch.get_num_threads())
        self._width = width
        self._index: Any = faiss.IndexFlatIP(width)

    def add(self, vectors: Vectors) -> None:
        self._index.add(vectors)

    def search(self, queries: Vectors, count: int) -> tuple[Vectors, Numbers]:
        products, numbers = self._index.search(queries, count)
        return products, numbers

    def close(self) -> None:
        self._index.reset()


class Flat(_Faiss):
    """All vectors are read: exact."""


class InvertedFile(_Faiss):
    """Vectors by the nearest of some centroids, of which a search reads the lists of a few. All are
    read while there are few; it is trained again each time that they are twice as many, so that it
    is the same however they came."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self._lists = self._trained = 0

    def add(self, vectors: Vectors) -> None:
        while len(vectors):
            room = max(_TRAINED_FROM, 2 * self._trained) - self._index.ntotal
            super().add(vectors[:room])
            if len(vectors) >= room:
                self._train()
            vectors = vectors[room:]

    def search(self, queries: Vectors, count: int) -> tuple[Vectors, Numbers]:
        if self._lists:
            share = count / self._index.ntotal
            self._index.nprobe = min(self._lists, math.ceil(8 + _PROBED * share * self._lists))
        return super().search(queries, count)

    def _train(self) -> None:
        if self._lists:
            self._index.make_direct_map()
        vectors = self._index.reconstruct_n(0, self._index.ntotal)
        lists, self._trained = math.isqrt(len(vectors)), len(vectors)
        some = np.random.default_rng(0).choice(
            len(vectors), min(len(vectors), lists * _TRAINED_BY), replace=False
        )
        kept = faiss.IndexFlatIP(self._width)
        trained = faiss.IndexIVFFlat(kept, self._width, lists, faiss.METRIC_INNER_PRODUCT)
        trained.cp.min_points_per_centroid = 1
        trained.train(vectors[np.sort(some)])
        trained.add(vectors)
        self._kept = kept  # belongs to the index
        self._index, self._lists = trained, lists
