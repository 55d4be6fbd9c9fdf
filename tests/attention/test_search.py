"""Digest rows in eight bits, and their products with queries: the same bits by every library."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
import torch

from kvrecall.attention.digest import DIGESTS, SCALE_BYTES, coded_width, encode, scales_in
from kvrecall.attention.kernels import int8
from kvrecall.attention.kernels import threads as threads_of
from kvrecall.attention.selection import CodedQuery, ExactSelector, best_products, selector_of
from kvrecall.attention.settings import RetrievalSettings


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Makes a second thread take part, however small the products are."""
    monkeypatch.setattr(threads_of, "_BYTES_A_THREAD", 1)
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def rows_of(*shape: int) -> torch.Tensor:
    """Coordinates as keys have them: a few channels ten times as large."""
    rows = torch.randn(*shape)
    rows[..., :3] *= 10
    return rows


def decode(coded: torch.Tensor) -> torch.Tensor:
    return coded[..., :-SCALE_BYTES].float() * scales_in(coded)


def best(
    query: torch.Tensor,
    rows: torch.Tensor,
    scale: float = 1.0,
    places: torch.Tensor | None = None,
) -> torch.Tensor:
    return best_products(CodedQuery(query), rows, scale, places)


def best_by_hand(query: torch.Tensor, rows: torch.Tensor, scale: float) -> torch.Tensor:
    """In whole numbers of 64 bits."""
    coded = CodedQuery(query)
    width = query.shape[-1]
    sums = torch.einsum("hgw,hbrw->hgbr", coded.codes.long(), rows[..., :width].long())
    scales = rows[:, :, 0, width:].contiguous().view(torch.float32)
    return sums.amax(-1).float() * (coded.scales * scale * scales.transpose(1, 2))


def at(found: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    return found.gather(2, places[:, None].expand(-1, found.shape[1], -1))


def test_a_coordinate_is_off_by_half_a_step_at_most() -> None:
    rows = rows_of(2, 5, 8, 64)
    coded = encode(rows)
    assert (coded.shape, coded.dtype) == ((2, 5, 8, coded_width(64)), torch.int8)
    step = rows.abs().amax((-1, -2), keepdim=True) / 127
    assert ((decode(coded) - rows).abs() <= step * 0.5001).all()


@pytest.mark.parametrize("width", [16, 256, 1536])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_near_those_of_the_rows(width: int, dtype: torch.dtype) -> None:
    """Within what both roundings, each by half a step at most, can add up to."""
    rows, query = rows_of(2, 28, 1, width), torch.randn(2, 3, width).to(dtype)
    coded = encode(rows)
    got = best(query, coded)
    assert got.shape == (2, 3, 28)
    decoded, query = decode(coded).flatten(1, 2), query.float()
    want = torch.einsum("hgw,hrw->hgr", query, rows.flatten(1, 2))
    of_rows = rows.abs().amax((2, 3)) / 254
    of_query = query.abs().amax(-1) / 254
    most = query.abs().sum(-1)[..., None] * of_rows[:, None]
    most = most + decoded.abs().sum(-1)[:, None] * of_query[..., None]
    assert ((got - want).abs() <= 1.001 * most).all()
    assert ((got - want).abs().mean() <= 0.2 * most.mean()).all()


@pytest.mark.parametrize(
    ("heads", "blocks", "rows", "group", "width"),
    [(4, 900, 8, 4, 256), (2, 5, 3, 1, 64), (3, 7, 2, 16, 128), (1, 1, 1, 7, 192),
     (8, 61, 2, 2, 1024), (2, 9, 4, 17, 64), (2, 9, 4, 3, 80), (3, 40, 2, 2, 3000)],
)  # fmt: skip
def test_the_best_products_are_those_of_whole_numbers_to_the_bit(
    heads: int, blocks: int, rows: int, group: int, width: int, threads: int
) -> None:
    coded = encode(10 * torch.randn(heads, blocks, rows, width))
    query = torch.randn(heads, group, width)
    want = best_by_hand(query, coded, 0.3)
    assert torch.equal(best(query, coded, 0.3), want)
    places = torch.randint(0, blocks, (heads, blocks + 3))
    assert torch.equal(best(query, coded, 0.3, places), at(want, places))


def test_largest_and_smallest_codes_do_not_run_over(threads: int) -> None:
    coded = torch.full((2, 40, 3, 4096 + 4), 127, dtype=torch.int8)
    coded[:, ::2] = -127
    coded[..., 4096:] = torch.ones(1).view(torch.int8)
    query = torch.tensor([1.0, -1.0]).view(1, 2, 1).expand(2, 2, 4096)
    want = best_by_hand(query, coded, 1.0)
    assert float(want.abs().min()) == pytest.approx(127 * 4096)
    assert torch.equal(best(query, coded), want)


def test_views_are_read_where_they_lie(threads: int) -> None:
    """Blocks and heads of a larger tensor, as of a cache of all blocks; and some of its rows."""
    whole, query = encode(torch.randn(4, 50, 10, 128)), torch.randn(2, 3, 128)
    for part in (whole[1:3, 7:44], whole[1:3, 7:44, 2:10]):
        want = best_by_hand(query, part.contiguous(), 1.0)
        assert torch.equal(best(query, part), want)
        places = torch.stack([torch.randperm(37), torch.randperm(37)])[:, ::3]
        assert not places.is_contiguous()
        assert torch.equal(best(query, part, 1.0, places), at(want, places))


def test_products_do_not_depend_on_how_blocks_lie() -> None:
    rows, query = encode(rows_of(2, 37, 8, 128)), torch.randn(2, 4, 128)
    whole = best(query, rows)
    parts = [best(query, part) for part in rows.split([1, 30, 6], dim=1)]
    assert torch.equal(torch.cat(parts, -1), whole)
    order = torch.randperm(37)
    assert torch.equal(best(query, rows[:, order]), whole[:, :, order])


def test_nothing_and_zeros() -> None:
    query, rows = torch.randn(2, 3, 128), encode(torch.randn(2, 5, 4, 128))
    assert best(query, rows[:, :0]).shape == (2, 3, 0)
    assert best(query, rows, 1.0, torch.empty(2, 0, dtype=torch.int64)).shape == (2, 3, 0)
    assert not best(query, encode(torch.zeros(2, 5, 4, 128))).any()
    assert not best(torch.zeros(2, 3, 128), rows).any()


@pytest.mark.parametrize("kind", list(DIGESTS))
def test_pytorch_gives_the_same_bits(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = DIGESTS[kind]
    coded = encode(torch.randn(2, 200, 8, digest.parts * 64))
    query = torch.randn(2, 4, 64).to(torch.bfloat16)
    point = digest.of_query(query)
    found = best(point, coded, 0.1)
    chosen = ExactSelector(digest).choose(query, [coded], 40, 0.125)
    monkeypatch.setattr(int8, "_numkong", lambda: None)
    assert torch.equal(best(point, coded, 0.1), found)
    assert torch.equal(ExactSelector(digest).choose(query, [coded], 40, 0.125), chosen)


def test_numkong_is_used() -> None:
    assert int8._numkong() is not None


def test_a_library_that_is_wrong_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import numkong

    honest = numkong.dots_packed
    int8._numkong.cache_clear()
    with monkeypatch.context() as changed:
        changed.setattr(numkong, "dots_packed", lambda rows, packed: honest(rows[1:], packed))
        assert int8._numkong() is None
    int8._numkong.cache_clear()
    assert "products are wrong" in caplog.text
    assert int8._numkong() is not None


def test_without_numkong_pytorch_searches() -> None:
    program = (
        "import sys; sys.modules['numkong'] = None\n"
        "import torch; from kvrecall.attention import digest, selection\n"
        "rows = digest.encode(torch.randn(2, 9, 8, 256))\n"
        "query = selection.CodedQuery(torch.randn(2, 4, 256))\n"
        "assert selection.best_products(query, rows).shape == (2, 4, 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
    assert b"falls back to PyTorch" in done.stderr


@pytest.mark.parametrize("heads", [1, 3, 8])
def test_heads_are_searched_on_several_threads(
    heads: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every head once, in their order, each thread with one of PyTorch's."""
    did: list[tuple[slice, int, int]] = []

    def act(part: slice) -> torch.Tensor:
        did.append((part, threading.get_ident(), torch.get_num_threads()))
        return torch.arange(heads)[part]

    assert torch.equal(threads_of.over_heads(act, heads, 1000), torch.arange(heads))
    assert len(did) == len({thread for _, thread, _ in did}) == min(heads, threads)
    assert {count for _, _, count in did} == {1}
    assert torch.get_num_threads() == threads
    monkeypatch.setattr(threads_of, "_BYTES_A_THREAD", 2000)
    did.clear()
    threads_of.over_heads(act, heads, 1000)
    assert [part for part, *_ in did] == [slice(0, heads)], "not worth waking a thread"


@pytest.mark.parametrize("share", [0.2, 0.02])
def test_threads_choose_what_one_thread_chooses(share: float, threads: int) -> None:
    """Searching all digests, and at the small share coarse ones first."""
    layout = RetrievalSettings(topk_share=share).layout(128)
    query = torch.randn(3, 4, 64).to(torch.bfloat16)
    keys = torch.randn(3, 200, 128, 64)
    runs = list(encode(layout.rows_of(keys)).split([50, 150], 1))
    selector = selector_of(layout)
    want = [
        selector._choose(query[at : at + 1], [run[at : at + 1] for run in runs], 9, 0.1, None)
        for at in range(3)
    ]
    found = selector.choose(query, runs, 9, 0.1)
    assert torch.equal(found.sort(-1).values, torch.cat(want).sort(-1).values)


def test_threads_may_search_at_once(threads: int) -> None:
    digest = DIGESTS["bounds"]
    coded, query = encode(torch.randn(2, 300, 8, 256)), torch.randn(8, 2, 4, 128)
    selector = ExactSelector(digest)
    want = [selector._choose(one, [coded], 30, 1.0, None) for one in query]
    wrong: list[int] = []

    def search(number: int) -> None:
        for _ in range(30):
            if not torch.equal(selector.choose(query[number], [coded], 30, 1.0), want[number]):
                wrong.append(number)

    several = [threading.Thread(target=search, args=(number,)) for number in range(8)]
    for one in several:
        one.start()
    for one in several:
        one.join()
    assert not wrong
