"""The compiled search: the same bits as PyTorch's, whatever the shapes, strides and threads."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
import torch

from kvrecall.attention import coding, selection
from kvrecall.attention.coding import CodedQuery, best_products, coded_products, encode
from kvrecall.attention.digest import DIGESTS
from kvrecall.attention.kernels import native
from kvrecall.attention.kernels.assembly import MOST_IN_A_GROUP
from kvrecall.attention.selection import ExactSelector

IS_HERE = native.native_search(4, 256) is not None
needs_it = pytest.mark.skipif(
    not IS_HERE and not torch.cpu._is_vnni_supported(),
    reason="the processor has no AVX512-VNNI; PyTorch searches",
)


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def best(
    query: torch.Tensor,
    rows: torch.Tensor,
    scale: float = 1.0,
    places: torch.Tensor | None = None,
) -> torch.Tensor:
    return best_products(CodedQuery.of(query), rows, scale, places)


def best_of_all(query: torch.Tensor, rows: torch.Tensor, scale: float) -> torch.Tensor:
    products = coded_products(CodedQuery.of(query), rows, scale)
    return products.view(*products.shape[:2], *rows.shape[1:3]).amax(-1)


def at(found: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    return found.gather(2, places[:, None].expand(-1, found.shape[1], -1))


@pytest.mark.parametrize(
    ("heads", "blocks", "rows", "group", "width"),
    [(4, 900, 8, 4, 256), (2, 5, 3, 1, 64), (3, 7, 2, MOST_IN_A_GROUP, 128), (1, 1, 1, 7, 192),
     (8, 61, 2, 2, 1024), (2, 9, 4, 17, 64), (2, 9, 4, 3, 80)],
)  # fmt: skip
def test_the_best_products_are_those_of_all_to_the_bit(
    heads: int, blocks: int, rows: int, group: int, width: int, threads: int
) -> None:
    coded = encode(10 * torch.randn(heads, blocks, rows, width))
    query = torch.randn(heads, group, width)
    want = best_of_all(query, coded, 0.3)
    assert torch.equal(best(query, coded, 0.3), want)
    places = torch.randint(0, blocks, (heads, blocks + 3))
    assert torch.equal(best(query, coded, 0.3, places), at(want, places))


def test_largest_and_smallest_codes_do_not_run_over(threads: int) -> None:
    coded = torch.full((2, 40, 3, 4096 + 4), 127, dtype=torch.int8)
    coded[:, ::2] = -127
    coded[..., 4096:] = torch.ones(1).view(torch.int8)
    query = torch.tensor([1.0, -1.0]).view(1, 2, 1).expand(2, 2, 4096)
    want = best_of_all(query, coded, 1.0)
    assert float(want.abs().min()) == pytest.approx(127 * 4096)
    assert torch.equal(best(query, coded), want)


def test_views_are_read_where_they_lie(threads: int) -> None:
    """Rows, blocks and heads of a larger tensor, as of a cache of all blocks."""
    whole, query = encode(torch.randn(4, 50, 10, 128)), torch.randn(2, 3, 128)
    part = whole[1:3, 7:44, 2:10]
    want = best_of_all(query, part.contiguous(), 1.0)
    assert torch.equal(best(query, part), want)
    places = torch.stack([torch.randperm(37), torch.randperm(37)])[:, ::3]
    assert not places.is_contiguous()
    assert torch.equal(best(query, part, 1.0, places), at(want, places))


def test_nothing_and_zeros() -> None:
    query = torch.randn(2, 3, 128)
    assert best(query, encode(torch.randn(2, 0, 4, 128))).shape == (2, 3, 0)
    none = torch.empty(2, 0, dtype=torch.int64)
    assert best_products(
        CodedQuery.of(query), encode(torch.randn(2, 5, 4, 128)), 1.0, none
    ).shape == (2, 3, 0)
    assert not best(query, encode(torch.zeros(2, 5, 4, 128))).any()


def test_pytorch_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    coded, query = encode(torch.randn(2, 37, 8, 256)), torch.randn(2, 4, 256)
    places = torch.randint(0, 37, (2, 9))
    first, some = (
        best(query, coded, 0.1),
        best(query, coded, 0.1, places),
    )
    monkeypatch.setattr(coding, "native_search", lambda group, width: None)
    assert torch.equal(best(query, coded, 0.1), first)
    assert torch.equal(best(query, coded, 0.1, places), some)


@needs_it
def test_it_is_used_where_the_processor_can() -> None:
    assert IS_HERE


@needs_it
def test_a_search_that_is_wrong_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As if the compiler had made something else of it."""
    honest = native.module_of
    native._search_of.cache_clear()
    with monkeypatch.context() as changed:
        changed.setattr(
            native, "module_of", lambda group: honest(group).replace("smax.i32", "umin.i32")
        )
        assert native.native_search(3, 256) is None
    native._search_of.cache_clear()
    assert "finds other products" in caplog.text
    assert native.native_search(3, 256) is not None


@needs_it
@pytest.mark.parametrize("kind", ["mean", "bounds"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("heads", "group", "dim"), [(1, 1, 64), (4, 4, 128), (2, 7, 96), (3, 16, 320)]
)
def test_queries_are_coded_to_the_same_bits(
    kind: str, dtype: torch.dtype, heads: int, group: int, dim: int
) -> None:
    digest = DIGESTS[kind]
    if not native.codes_natively(dim, digest.split):
        assert (dim, kind) == (96, "mean")
        return
    search = native.native_search(group, digest.parts * dim)
    assert search is not None
    for size in (1e-30, 0.0, 1.0, 3e4):
        query = (torch.randn(heads, group, dim) * size).to(dtype)
        query[..., ::7] = query[..., :1] * 0.5  # halves are rounded to even
        plain = CodedQuery.of(digest.of_query(query))
        want = native.PackedQuery.of(plain.codes, plain.scales * 0.088)
        assert search.code(query, 0.088, digest.split is True).equals(want)


@needs_it
@pytest.mark.parametrize("kind", list(DIGESTS))
def test_a_search_chooses_as_pytorchs_does(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = DIGESTS[kind]
    rows = encode(torch.randn(2, 200, 8, digest.parts * 64))
    query = torch.randn(2, 4, 64).to(torch.bfloat16)
    found = ExactSelector(digest).choose(query, [rows], 40, 0.125).blocks
    monkeypatch.setattr(coding, "native_search", lambda group, width: None)
    monkeypatch.setattr(selection, "native_search", lambda group, width: None)
    assert torch.equal(ExactSelector(digest).choose(query, [rows], 40, 0.125).blocks, found)


def test_threads_may_search_at_once() -> None:
    coded, query = encode(torch.randn(2, 300, 8, 256)), torch.randn(8, 2, 4, 256)
    want = [best_of_all(one, coded, 1.0) for one in query]
    wrong: list[int] = []

    def search(number: int) -> None:
        for _ in range(30):
            if not torch.equal(best(query[number], coded), want[number]):
                wrong.append(number)

    several = [threading.Thread(target=search, args=(number,)) for number in range(8)]
    for one in several:
        one.start()
    for one in several:
        one.join()
    assert not wrong


def test_without_llvmlite_pytorch_searches() -> None:
    program = (
        "import sys; sys.modules['llvmlite'] = None; sys.modules['llvmlite.binding'] = None\n"
        "import torch; from kvrecall.attention import native, coding\n"
        "assert native.native_search(4, 256) is None\n"
        "rows = coding.encode(torch.randn(2, 9, 8, 256))\n"
        "query = coding.CodedQuery.of(torch.randn(2, 4, 256))\n"
        "assert coding.best_products(query, rows).shape == (2, 4, 9)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
