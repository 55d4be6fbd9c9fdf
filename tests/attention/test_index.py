"""Vector indexes in place of the exact search."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from engines.vllm.attention.sequences import Bench, Sequence, shape_of

from kvrecall.attention.digest import DIGESTS, Layout, encode
from kvrecall.attention.index import (
    INDEXES,
    Factory,
    VectorIndex,
    index_factory,
    require_index,
)
from kvrecall.attention.index.faiss import InvertedFile
from kvrecall.attention.selection import choose
from kvrecall.attention.settings import RetrievalSettings
from kvrecall.engines.vllm.attention.host_selection import SequenceIndex
from kvrecall.engines.vllm.attention.step import BatchRow
from kvrecall.errors import ConfigError
from kvrecall.testing.index_contract import IndexContract

KV_HEADS, GROUP, DIM, BLOCK = 2, 3, 32, 128


def factory(name: str) -> Factory:
    made = index_factory(name)
    assert made is not None
    return made


class TestFlat(IndexContract):
    FOUND = 1.0

    def make(self, width: int) -> VectorIndex:
        return factory("faiss-flat")(width)


class TestInvertedFile(IndexContract):
    def make(self, width: int) -> VectorIndex:
        return factory("faiss-ivf")(width)


def coded(layout: Layout, blocks: int, seed: int = 0) -> torch.Tensor:
    """Digests of random keys: int8 ``[kv_heads, blocks, rows, width + 4]``."""
    random = torch.Generator().manual_seed(seed)
    keys = torch.randn(blocks, KV_HEADS, BLOCK, DIM, generator=random)
    return encode(layout.rows_of(keys)).transpose(0, 1)


@pytest.mark.parametrize("digest", DIGESTS)
@pytest.mark.parametrize("count", [1, 8, 40])
def test_an_exact_index_selects_as_the_exact_search(digest: str, count: int) -> None:
    """Where the query heads of a group agree, and but for a tie of rounded queries."""
    layout = Layout(DIGESTS[digest], 0, 1 if digest == "mean" else 8)
    rows = coded(layout, 40)
    query = torch.randn(KV_HEADS, 1, DIM, generator=torch.Generator().manual_seed(2))
    query = query.expand(KV_HEADS, GROUP, DIM)
    index = SequenceIndex(factory("faiss-flat"), layout, KV_HEADS, DIM)
    index.add(rows[:, :33])
    for at in range(33, 40):
        index.add(rows[:, at : at + 1])
    chosen = index.choose(query, count, 0.18)
    exact = choose(layout, query, rows, count, 0.18)
    for ours, theirs in zip(chosen.tolist(), exact.tolist(), strict=True):
        assert len(set(ours)) == count
        assert len(set(ours) & set(theirs)) >= max(1, count - 1)
    assert index.blocks == 40
    index.close()


class FindsNothing(VectorIndex):
    def add(self, vectors):  # type: ignore[no-untyped-def]
        pass

    def search(self, queries, count):  # type: ignore[no-untyped-def]
        import numpy as np

        size = (len(queries), count)
        return np.full(size, -np.inf, dtype=np.float32), np.full(size, -1, dtype=np.int64)

    def close(self):  # type: ignore[no-untyped-def]
        pass


def test_where_nothing_is_found_the_last_blocks_are_taken() -> None:
    layout = Layout(DIGESTS["mean"], 0, 1)
    index = SequenceIndex(lambda _: FindsNothing(), layout, KV_HEADS, DIM)
    index.add(coded(layout, 9))
    chosen = index.choose(torch.randn(KV_HEADS, GROUP, DIM), 3, 1.0)
    assert chosen.sort(-1).values.tolist() == [[6, 7, 8]] * KV_HEADS


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", INDEXES)
def test_a_model_that_overflows_ends_no_index(name: str, value: float) -> None:
    layout = Layout(DIGESTS["bounds"], 0, 8)
    random = torch.Generator().manual_seed(8)
    keys = torch.randn(520, KV_HEADS, BLOCK, DIM, generator=random)
    keys[7, 0, 3, 1] = value
    query = torch.randn(KV_HEADS, GROUP, DIM, generator=random)
    query[1, 2, 4] = value
    index = SequenceIndex(factory(name), layout, KV_HEADS, DIM)
    index.add(encode(layout.rows_of(keys)).transpose(0, 1))
    for chosen in index.choose(query, 9, 0.18).tolist():
        assert len(set(chosen)) == 9
        assert 0 <= min(chosen) <= max(chosen) < 520
    index.close()


class FindsTooMuch(FindsNothing):
    def search(self, queries, count):  # type: ignore[no-untyped-def]
        products, numbers = super().search(queries, count)
        return products, numbers + 73


def test_numbers_that_are_no_vectors_are_refused() -> None:
    layout = Layout(DIGESTS["bounds"], 0, 8)
    index = SequenceIndex(lambda _: FindsTooMuch(), layout, KV_HEADS, DIM)
    index.add(coded(layout, 9))
    with pytest.raises(IndexError, match="VLLM_RETRIEVAL_INDEX found vector 72 of 72"):
        index.choose(torch.randn(KV_HEADS, GROUP, DIM), 3, 1.0)


class Fails(FindsNothing):
    def __init__(self, width: int) -> None:
        raise RuntimeError(f"no room for vectors of {width}")


class Flattens(FindsNothing):
    def __init__(self, width: int) -> None:
        pass

    def search(self, queries, count):  # type: ignore[no-untyped-def]
        return [one[0] for one in super().search(queries, count)]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (f"{__name__}:Fails", "cannot be used: RuntimeError: no room for vectors of 64"),
        (f"{__name__}:FindsNothing", "cannot be used: TypeError"),
        (f"{__name__}:Flattens", r"returns arrays of shapes \(2,\) and \(2,\); both must be"),
    ],
)
def test_an_index_that_cannot_work_ends_the_start(name: str, said: str) -> None:
    """Of a layer's builder, not of the first long sequence."""
    with pytest.raises(ConfigError, match=f"VLLM_RETRIEVAL_INDEX is .*{said}"):
        require_index(name, 64)
    for known in ("exact", *INDEXES):
        require_index(known, 64)


@pytest.mark.parametrize("name", ["nothing", "no.module:Here", "kvrecall.attention.index.faiss:No"])
def test_an_unknown_index_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="VLLM_RETRIEVAL_INDEX"):
        index_factory(name)


# -- in a layer -----------------------------------------------------------------------------

SHAPE = shape_of()


def settings_with(index: str) -> RetrievalSettings:
    few = RetrievalSettings(128, 256, 0.25, 512, 1 << 20, gate=False, least_blocks=1)
    return replace(few, index=index)


def test_a_layer_finds_the_same_by_an_exact_index() -> None:
    """With a whole query head to a KV head, so that a group's average cannot differ; over blocks
    that fill up, and a sequence that grows."""
    shape = shape_of(heads=2)
    outputs = []
    for index in ("exact", "faiss-flat"):
        torch.manual_seed(3)
        bench = Bench(shape, settings_with(index), 40)
        one, other = bench.sequence(2000), bench.sequence(1500)
        found = [bench.decode(one, other, lengths=(1700, 1500))]
        found += [bench.decode(one, lengths=(tokens,)) for tokens in (1800, 1900, 2000)]
        outputs.append(torch.cat(found))
    torch.testing.assert_close(*outputs, rtol=0, atol=0)
    assert bench.activity.blocks_indexed == (2000 - 256) // 128 - 1 + (1500 - 256) // 128 - 1


def test_blocks_that_another_sequence_took_over_are_indexed_anew() -> None:
    torch.manual_seed(4)
    bench = Bench(SHAPE, settings_with("faiss-flat"), 40)
    first = bench.sequence(1500)
    bench.decode(first)
    indexed = bench.activity.blocks_indexed
    size = first.keys.shape
    later = Sequence(torch.randn(size), torch.randn(size), first.query, first.block_ids)
    bench.write(later, 0, 1500)
    torch.manual_seed(4)
    fresh = Bench(SHAPE, settings_with("faiss-flat"), 40)
    alone = Sequence(later.keys, later.values, later.query, fresh.take(12))
    fresh.write(alone, 0, 1500)
    torch.testing.assert_close(bench.decode(later), fresh.decode(alone), rtol=0, atol=0)
    assert bench.activity.blocks_indexed == 2 * indexed


def test_blocks_are_indexed_as_a_prompt_is_computed() -> None:
    """As they leave the window, so that the first decoded token has no more to add."""
    torch.manual_seed(5)
    bench = Bench(SHAPE, settings_with("faiss-flat"), 40)
    sequence, first = bench.sequence(2000), 0
    for end in (400, 900, 1500, 2000):
        row, table = BatchRow(end - first, end, True), sequence.block_ids.to(torch.int32)[None]
        if (step := bench.planner.plan([row], table)) is not None:
            bench.layer.digest_step(bench.cache, step)
            assert not step.attends
        assert bench.activity.blocks_indexed == (max(0, (end - 256) // 128 - 1) if end > 512 else 0)
        first = end
    indexed = bench.activity.blocks_indexed
    bench.decode(sequence)
    assert bench.activity.blocks_indexed == indexed


def test_an_index_is_the_same_however_its_vectors_came() -> None:
    """With a prompt's steps, or at once from the pool."""
    draw = np.random.default_rng(6).standard_normal
    vectors, queries = draw((9000, DIM), np.float32), draw((50, DIM), np.float32)
    whole, parts = InvertedFile(DIM), InvertedFile(DIM)
    whole.add(vectors)
    for part in np.array_split(vectors, 7):
        parts.add(part)
    assert (whole.search(queries, 20)[1] == parts.search(queries, 20)[1]).all()


def test_indexes_that_nothing_uses_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []
    monkeypatch.setattr(SequenceIndex, "close", lambda self: closed.append(self))
    bench = Bench(SHAPE, settings_with("faiss-flat"), 40)
    one, other = bench.sequence(1500), bench.sequence(1500)
    bench.decode(one, other)
    for _ in range(128):
        bench.decode(one)
    assert len(closed) == 1
    indexed = bench.activity.blocks_indexed
    bench.decode(one, other)
    assert bench.activity.blocks_indexed == indexed * 3 // 2
