"""Digest rows in eight bits, and their products with queries: the same bits by every library."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from kvrecall.attention import kernels
from kvrecall.attention.digest import DIGESTS, coded_width, decode, encode
from kvrecall.attention.kernels import search
from kvrecall.attention.kernels.search import Placed, Search, Sought, is_compiled
from kvrecall.attention.selection import best_products, choose, code_query
from kvrecall.attention.settings import RetrievalSettings


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Gives each thread of a search some of its digests, however few they are."""
    monkeypatch.setattr(search, "_CHUNK_BYTES", 4096)
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def rows_of(*shape: int) -> torch.Tensor:
    """Coordinates as keys have them: a few channels ten times as large."""
    rows = torch.randn(*shape)
    rows[..., :3] *= 10
    return rows


def best(query: torch.Tensor, rows: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    return best_products(code_query(query), rows, scale)


def best_by_hand(query: torch.Tensor, rows: torch.Tensor, scale: float) -> torch.Tensor:
    """In whole numbers of 64 bits."""
    codes, of_query = code_query(query)
    width = query.shape[-1]
    sums = torch.einsum("hgw,hbrw->hgbr", codes.long(), rows[..., :width].long())
    scales = rows[:, :, 0, width:].contiguous().view(torch.float32)
    return sums.amax(-1).float() * (of_query * scale * scales.transpose(1, 2))


def test_a_coordinate_is_off_by_half_a_step_at_most() -> None:
    rows = rows_of(2, 5, 8, 64)
    coded = encode(rows)
    assert (coded.shape, coded.dtype) == ((2, 5, 8, coded_width(64)), torch.int8)
    step = rows.abs().amax((-1, -2), keepdim=True) / 127
    assert ((decode(coded) - rows).abs() <= step * 0.5001).all()


@pytest.mark.parametrize(
    ("heads", "blocks", "rows", "group", "width"),
    [(4, 900, 8, 4, 256), (2, 5, 3, 1, 64), (3, 7, 2, 16, 128), (1, 1, 1, 7, 192),
     (8, 61, 2, 2, 1024), (2, 9, 4, 17, 64), (2, 9, 4, 3, 80), (3, 40, 2, 2, 3000)],
)  # fmt: skip
def test_the_best_products_are_those_of_whole_numbers_to_the_bit(
    heads: int, blocks: int, rows: int, group: int, width: int
) -> None:
    coded = encode(10 * torch.randn(heads, blocks, rows, width))
    query = torch.randn(heads, group, width)
    want = best_by_hand(query, coded, 0.3)
    assert torch.equal(best(query, coded, 0.3), want)


def test_largest_and_smallest_codes_do_not_run_over() -> None:
    coded = torch.full((2, 40, 3, 4096 + 4), 127, dtype=torch.int8)
    coded[:, ::2] = -127
    coded[..., 4096:] = torch.ones(1).view(torch.int8)
    query = torch.tensor([1.0, -1.0]).view(1, 2, 1).expand(2, 2, 4096)
    want = best_by_hand(query, coded, 1.0)
    assert float(want.abs().min()) == pytest.approx(127 * 4096)
    assert torch.equal(best(query, coded), want)


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("overflows", "value", "share"),
    [
        ("a query", NAN, 0.2),
        ("a query", INF, 0.02),
        ("all queries", NAN, 0.02),
        ("a key", INF, 0.2),
        ("all keys", NAN, 0.2),
        ("all keys", INF, 0.02),
        ("products", NAN, 0.02),
        ("nothing that was ever a digest", NAN, 0.2),
    ],
)
def test_a_model_that_overflows_is_given_blocks_of_its_sequence(
    overflows: str, value: float, share: float
) -> None:
    """As many as it seeks, each once, whatever they are worth: a number that is none of the
    sequence's would have attention read anywhere. Heads that did not overflow find what they do
    without."""
    if not is_compiled():
        pytest.skip("nothing is compiled here")
    layout = RetrievalSettings(topk_share=share).layout(128)
    keys, query = torch.randn(2, 61, 128, 32), torch.randn(2, 3, 32)
    if overflows == "a query":
        query[0, 1, 5] = value
    elif overflows == "all queries":
        query[0] = value
    elif overflows == "a key":
        keys[0, 30, 7, 3] = value
    elif overflows == "all keys":
        keys[0] = value
    elif overflows == "products":
        keys[0] *= 1e30
        query[0] *= 1e30
    rows, ids = encode(layout.rows_of(keys)), torch.arange(60, 3, -1)
    if overflows.startswith("nothing"):
        rows[0] = torch.randint(-128, 128, rows[0].shape)
    coarse = rows[:, :, layout.coarse_rows].contiguous() if layout.coarse else None
    table = torch.full((2, 9), -7, dtype=torch.int32)
    sought = Search((2, 3, 32), layout, [Sought([ids.numpy()], 7, table=table.numpy())], (2, 1, 1))
    sought.found[0].fill_(1 << 40)
    sought.run(query.view(1, 6, 32), [Placed(layout, [(rows, coarse)])], 0.2)
    for head, found in enumerate(sought.found[0].tolist()):
        assert sorted(set(found)) == found
        assert found[0] >= 0
        assert found[-1] < len(ids)
        assert table[head, :7].tolist() == [int(ids[place]) * 2 + head for place in found]
    want = choose(layout, query[1:], rows[1:, ids], 7, 0.2)
    assert torch.equal(sought.found[0][1:], want.sort(-1).values)


def test_nothing_and_zeros() -> None:
    query, rows = torch.randn(2, 3, 128), encode(torch.randn(2, 5, 4, 128))
    assert best(query, rows[:, :0]).shape == (2, 3, 0)
    assert not best(query, encode(torch.zeros(2, 5, 4, 128))).any()
    assert not best(torch.zeros(2, 3, 128), rows).any()


class Case:
    """Digests of random keys, and a query."""

    def __init__(self, share: float, kind: str, size: tuple[int, int, int], blocks: int) -> None:
        heads, group, dim = self.size = size
        self.layout = RetrievalSettings(topk_share=share, digest=kind).layout(128)
        self.rows = encode(self.layout.rows_of(rows_of(heads, blocks + 5, 128, dim)))
        coarse = self.rows[:, :, self.layout.coarse_rows]
        self.coarse = coarse.contiguous() if self.layout.coarse else None
        self.query = torch.randn(heads, group, dim)

    def search(self, count: int, *parts: torch.Tensor) -> torch.Tensor:
        """Over parts of the blocks, by their numbers."""
        return self.run(self.prepared(count, *parts), len(parts))

    def prepared(self, count: int, *parts: torch.Tensor) -> Search:
        sought = Sought([part.numpy() for part in parts], count)
        return Search(self.size, self.layout, [sought], (0, 0, 1))

    def run(self, prepared: Search, parts: int = 1) -> torch.Tensor:
        placed = Placed(self.layout, [(self.rows, self.coarse)] * parts)
        prepared.run(self.query.flatten(0, 1)[None], [placed], 0.125)
        return prepared.found[0]

    def plainly(self, count: int, *parts: torch.Tensor) -> torch.Tensor:
        """The same by PyTorch."""
        rows = self.rows[:, torch.cat(parts)]
        return choose(self.layout, self.query, rows, count, 0.125).sort(-1).values


@pytest.mark.parametrize("kind", list(DIGESTS))
@pytest.mark.parametrize(
    ("share", "size", "blocks", "count"),
    [(0.2, (4, 4, 128), 447, 90), (0.2, (1, 1, 16), 1, 1), (0.2, (3, 7, 80), 61, 61),
     (0.2, (1, 16, 576), 40, 3), (0.05, (2, 5, 64), 130, 16), (0.02, (2, 4, 64), 959, 20),
     (0.02, (3, 2, 96), 17, 5), (0.02, (1, 1, 64), 200, 16)],
)  # fmt: skip
def test_a_search_finds_what_pytorch_finds(
    share: float, size: tuple[int, int, int], blocks: int, count: int, kind: str, threads: int
) -> None:
    """Blocks side by side and scattered, in one tensor and in two; queries of each type."""
    case, query = Case(share, kind, size, blocks), torch.randn(size)
    lying, scattered = torch.arange(blocks) + 3, torch.randperm(blocks + 5)[:blocks]
    for ids, dtype in (
        (lying, torch.bfloat16), (scattered, torch.float32), (scattered, torch.float16),
    ):  # fmt: skip
        case.query = query.to(dtype)
        cut = blocks // 3
        for parts in ((ids,), (ids[:cut], ids[cut:]), (ids, ids[:0])):
            assert torch.equal(case.search(count, *parts), case.plainly(count, *parts))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_query_is_read_where_it_lies(dtype: torch.dtype, threads: int) -> None:
    """In a batch, beside the keys of its tokens, and with its heads apart."""
    case = Case(0.2, "bounds", (2, 3, 64), 50)
    case.query = case.query.to(dtype)
    want = case.plainly(9, torch.arange(50))
    prepared = Search(case.size, case.layout, [Sought([np.arange(50)], 9, token=2)], (0, 0, 1))
    placed = Placed(case.layout, [(case.rows, case.coarse)])
    batches = (
        torch.randn(4, 6 * 64 + 40).to(dtype)[:, : 6 * 64].unflatten(1, (6, 64)),
        torch.randn(4, 6, 65).to(dtype)[:, :, :64],
        torch.randn(4, 64, 6).to(dtype).transpose(1, 2),
    )
    for batch in batches:
        batch[2] = case.query.flatten(0, 1)
        prepared.run(batch, [placed], 0.125)
        assert torch.equal(prepared.found[0], want)


def test_of_equal_blocks_the_first_are_found(threads: int) -> None:
    case = Case(0.2, "bounds", (2, 3, 64), 300)
    case.rows[:] = case.rows[:, :1].clone()
    assert case.search(7, torch.arange(300)).tolist() == [list(range(7))] * 2


def test_a_block_far_ahead_of_all_others_is_found() -> None:
    """The others' weights are too small for a number of 32 bits."""
    case = Case(0.2, "bounds", (1, 1, 64), 300)
    case.query *= 1000
    best = case.plainly(1, torch.arange(300))
    found = case.search(5, torch.arange(300))
    assert int(best) in found[0].tolist()
    assert found.shape == (1, 5)
    assert (found.diff() > 0).all()


@pytest.mark.parametrize("share", [0.2, 0.02])
def test_sequences_of_one_search_are_found_as_by_themselves(share: float, threads: int) -> None:
    """Of different lengths and parts, in digests of their own, for tokens in any order."""
    cases = [Case(share, "bounds", (2, 3, 64), blocks) for blocks in (90, 5, 300)]
    ids = [torch.randperm(95)[:90], torch.arange(5), torch.arange(300)]
    counts, tokens = (6, 5, 40), (3, 0, 2)
    batch = torch.randn(5, 6, 64)
    sought = []
    for one, count, token in zip(ids, counts, tokens, strict=True):
        cut = len(one) // 2
        sought.append(Sought([one[:cut].numpy(), one[cut:].numpy()], count, token))
    prepared = Search((2, 3, 64), cases[0].layout, sought, (0, 0, 1))
    placed = [Placed(case.layout, [(case.rows, case.coarse)] * 2) for case in cases]
    for _ in range(3):
        for case, token in zip(cases, tokens, strict=True):
            case.query = torch.randn(2, 3, 64)
            batch[token] = case.query.flatten(0, 1)
        prepared.run(batch, placed, 0.125)
        for case, one, count, found in zip(cases, ids, counts, prepared.found, strict=True):
            assert torch.equal(found, case.plainly(count, one))


def test_found_blocks_are_entered_by_their_distances(threads: int) -> None:
    """Of the first 40 from where they lie off the device, of the others from their numbers."""
    case, left = Case(0.2, "bounds", (2, 3, 64), 90), 40
    away = 8 * np.random.default_rng(0).integers(-(1 << 31), 1 << 31, left)
    here = left + torch.randperm(95 - left)[: 90 - left]  # none twice: equal blocks have no order
    table = np.full((5, 12), -1, np.int32)
    sought = Sought([np.arange(left), here.numpy()], 8, 0, table[1:3, 4:], left)
    prepared = Search(case.size, case.layout, [sought], (2000, 1000, 8))
    whole = case.rows, case.coarse
    prepared.run(case.query.flatten(0, 1)[None], [Placed(case.layout, [whole] * 2, away)], 0.125)
    begins = np.concatenate([away, here.numpy() * 2000])
    want = np.full((5, 12), -1, np.int64)
    found = case.plainly(8, torch.arange(left), here).numpy()
    want[1:3, 4:12] = (begins[found] + np.array([[0], [1000]])) // 8
    assert np.array_equal(table, want)
    assert prepared.left == int((found < left).sum())


@pytest.fixture
def unknown() -> Iterator[None]:
    """Whether the search is compiled is asked anew, and again afterwards."""
    search._native.cache_clear()
    is_compiled.cache_clear()
    yield
    search._native.cache_clear()
    is_compiled.cache_clear()


def test_a_search_with_another_result_is_not_used(
    unknown: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    honest = Search.run

    def run(found: Search, *args: Any) -> None:
        honest(found, *args)
        found.found[0][:] = found.found[0].roll(1, 0)

    monkeypatch.setattr(Search, "run", run)
    assert not is_compiled()
    assert "its result is not PyTorch's" in caplog.text


@pytest.mark.parametrize("missing", ["numba", "numkong"])
def test_without_a_library_pytorch_searches(
    missing: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("search", "search_loops"):  # imported anew
        monkeypatch.delitem(sys.modules, f"{kernels.__name__}.{name}", raising=False)
        monkeypatch.delattr(kernels, name, raising=False)
    monkeypatch.setitem(sys.modules, missing, None)
    assert not importlib.import_module(f"{kernels.__name__}.search").is_compiled()
    assert "without compiled kernels" in caplog.text


def test_c_functions_of_another_numkong_are_not_called(
    unknown: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import numkong

    monkeypatch.setattr(numkong, "__version__", "8.0.0")
    assert not is_compiled()
    assert "NumKong 8.0.0" in caplog.text
