"""The contract of every vector index. Subclass ``IndexContract`` and give it an index."""

from __future__ import annotations

import numpy as np

from kvrecall.attention.index import Numbers, VectorIndex, Vectors


def clustered(count: int, width: int, seed: int = 0) -> Vectors:
    """Unit vectors around a few centres, as the keys of a text are."""
    random = np.random.default_rng(seed)
    centres = random.normal(size=(max(1, count // 64), width))
    vectors = centres[np.arange(count) * len(centres) // count]
    vectors = vectors + 0.5 * random.normal(size=vectors.shape)
    unit: Vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return unit.astype(np.float32)


def best(vectors: Vectors, queries: Vectors, count: int) -> Numbers:
    """The exact answer: numbers ``[queries, count]``."""
    return np.argsort(-(queries @ vectors.T), axis=1, kind="stable")[:, :count]


class IndexContract:
    WIDTH = 64
    COUNT = 8192
    FOUND = 0.6
    """The least share of the exact answer that is found; 1 for an exact index."""

    def make(self, width: int) -> VectorIndex:
        """An empty index."""
        raise NotImplementedError

    def filled(self, vectors: Vectors, first: int | None = None, more: int = 8) -> VectorIndex:
        """As a sequence fills it: ``first`` vectors at once, the rest ``more`` at a time."""
        index, first = self.make(vectors.shape[1]), len(vectors) if first is None else first
        index.add(vectors[:first])
        for at in range(first, len(vectors), more):
            index.add(vectors[at : at + more])
        return index

    def check(self, index: VectorIndex, vectors: Vectors, queries: Vectors, count: int) -> float:
        """Checks an answer; returns the share of the exact one in it."""
        products, numbers = index.search(queries, count)
        assert products.shape == numbers.shape == (len(queries), count)
        found = 0
        wanted = best(vectors, queries, count)
        for query, one, product, exact in zip(queries, numbers, products, wanted, strict=True):
            there = one >= 0
            assert not (~there[:-1] & there[1:]).any(), "missing numbers are not at the end"
            one, product = one[there], product[there]
            assert len(set(one.tolist())) == len(one)
            assert (one < len(vectors)).all()
            np.testing.assert_allclose(product, vectors[one] @ query, rtol=1e-3, atol=1e-4)
            assert (np.diff(product) <= 1e-5).all(), "not the largest first"
            found += len(np.intersect1d(one, exact))
        return found / wanted.size

    def test_finds_the_largest_products(self) -> None:
        vectors, queries = clustered(self.COUNT, self.WIDTH), clustered(6, self.WIDTH, 1)
        index = self.filled(vectors)
        for count in (1, 16, self.COUNT // 50, self.COUNT // 5):
            assert self.check(index, vectors, queries, count) >= self.FOUND
        index.close()

    def test_what_is_added_while_decoding_is_found(self) -> None:
        vectors = clustered(self.COUNT, self.WIDTH)
        first = self.COUNT - 256
        index = self.filled(vectors, first)
        late = vectors[first::32].copy()
        _, numbers = index.search(late, 4)
        hits = sum(
            number in row for number, row in zip(range(first, self.COUNT, 32), numbers, strict=True)
        )
        assert hits >= self.FOUND * len(late)
        assert self.check(index, vectors, clustered(6, self.WIDTH, 2), 128) >= self.FOUND
        index.close()

    def test_few_vectors(self) -> None:
        vectors = clustered(3, self.WIDTH)
        index = self.make(self.WIDTH)
        index.add(vectors[:1])
        assert index.search(vectors[:1], 1)[1].tolist() == [[0]]
        index.add(vectors[1:])
        assert self.check(index, vectors, clustered(2, self.WIDTH, 3), 3) == 1
        index.close()

    def test_vectors_may_change_after_they_were_added(self) -> None:
        vectors = clustered(512, self.WIDTH)
        given = vectors.copy()
        index = self.make(self.WIDTH)
        index.add(given)
        given[:] = 0
        assert self.check(index, vectors, clustered(4, self.WIDTH, 4), 8) >= self.FOUND
        index.close()

    def test_two_know_nothing_of_each_other(self) -> None:
        one, other = clustered(300, self.WIDTH, 5), clustered(200, self.WIDTH, 6)
        first, second = self.filled(one), self.filled(other)
        query = clustered(1, self.WIDTH, 7)
        assert self.check(first, one, query, 8) >= self.FOUND
        second.close()
        assert self.check(first, one, query, 8) >= self.FOUND
        first.close()
