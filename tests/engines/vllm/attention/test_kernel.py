"""vLLM's CPU kernel over selected blocks, against the plain-torch oracle."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from engines.vllm.attention.sequences import BLOCK, Bench, Sequence, attended, shape_of
from kvrecall.attention.kernels.oracle import attention
from kvrecall.attention.selection import split_of
from kvrecall.attention.settings import Regime, RetrievalSettings
from kvrecall.engines.vllm.attention.base import AttentionParameters, KernelShape
from kvrecall.engines.vllm.attention.step import BatchRow

SMALL = RetrievalSettings(
    init_tokens=BLOCK,
    local_tokens=200,
    dense_boundary=0,
    offload_boundary=10**6,
    gate=False,
    least_blocks=1,
)
AWKWARD = [1000, 1023, 1024, 1025, 1153, 2047, 4097]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(7)


def oracle(sequence: Sequence, settings: RetrievalSettings) -> torch.Tensor:
    mask = attended(sequence.query, sequence.keys, BLOCK, settings)
    return attention(sequence.query, sequence.keys, sequence.values, mask)


SHORT_BLOCKS = {
    "32": (shape_of(heads=6, kv_heads=3, dtype=torch.bfloat16, block=32), 0.2),
    "32, of 3 query heads": (shape_of(heads=9, kv_heads=3, dtype=torch.float16, block=32), 0.05),
    "64, coarse digests": (shape_of(heads=5, kv_heads=1, dim=96, block=64), 0.02),
    "64, fp8": (shape_of(heads=6, kv_heads=2, fp8=torch.float8_e5m2, block=64), 0.3),
    "96, sinks": (shape_of(heads=6, kv_heads=2, block=96, sinks=True), 0.2),
    "160": (shape_of(heads=7, kv_heads=7, dim=128, dtype=torch.bfloat16, block=160), 0.1),
}


@pytest.mark.parametrize(("shape", "share"), SHORT_BLOCKS.values(), ids=list(SHORT_BLOCKS))
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_blocks_of_other_sizes(shape: KernelShape, share: float, softcap: float) -> None:
    """Three sequences of odd lengths in a batch."""
    settings = replace(SMALL, init_tokens=70, topk_share=share)
    sinks = torch.randn(shape.heads) if shape.sinks else None
    terms = AttentionParameters(shape.head_dim**-0.5, softcap, sinks)
    bench = Bench(shape, settings, 300, terms)
    sequences = [bench.sequence(tokens) for tokens in (1025, 1487, 2301)]
    for got, one in zip(bench.decode(*sequences), sequences, strict=True):
        keys, values = one.keys, one.values
        if shape.fp8 is not None:
            keys, values = (in_eight_bits(given, shape.fp8) for given in (keys, values))
        mask = attended(one.query, keys, shape.block_size, settings)
        want = attention(one.query, keys, values, mask, sinks, softcap)
        assert_close(got, want, shape.dtype)
        assert not mask.all()
        if softcap:
            assert (want - attention(one.query, keys, values, mask, sinks)).abs().max() > 1e-2


def assert_close(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(got.float(), want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("digest", ["mean", "bounds"])
def test_equals_the_oracle(digest: str) -> None:
    settings = replace(SMALL, digest=digest)
    bench = Bench(shape_of(), settings, 256)
    sequences = [bench.sequence(tokens) for tokens in (*AWKWARD, 700)]
    for got, sequence in zip(bench.decode(*sequences), sequences, strict=True):
        assert_close(got, oracle(sequence, settings), torch.float32)


OPTIONS = {
    "small share": {"topk_share": 0.05},
    "smallest share": {"topk_share": 0.02},
    "least blocks": {"topk_share": 0.05, "least_blocks": 3},
    "mean": {"digest": "mean", "topk_share": 0.6},
}


@pytest.mark.parametrize("changed", list(OPTIONS.values()), ids=list(OPTIONS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_the_oracle_with_options(changed: dict[str, Any], dtype: torch.dtype) -> None:
    """Sequences of one batch, so that rows of many lengths meet in one call of the kernel."""
    settings = replace(SMALL, **changed)
    bench = Bench(shape_of(dtype=dtype), settings, 128)
    sequences = [bench.sequence(tokens) for tokens in (1025, 2047, 4097)]
    for sequence in sequences:
        sequence.query.mul_(3)
    for got, sequence in zip(bench.decode(*sequences), sequences, strict=True):
        assert_close(got, oracle(sequence, settings), dtype)
    chosen = sum(split_of(len(s.keys), BLOCK, settings).chosen for s in sequences)
    assert bench.activity.blocks_selected == chosen * bench.shape.kv_heads


@pytest.mark.parametrize("shape", [(4, 2, 64), (7, 1, 80), (16, 4, 128)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sinks_take_part(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Each query head's own, in a batch."""
    made = shape_of(*shape, dtype=dtype, sinks=True)
    sinks = (6 + 3 * torch.randn(made.heads)).to(dtype)
    bench = Bench(made, SMALL, 128, terms=AttentionParameters(made.head_dim**-0.5, sinks=sinks))
    sequences = [bench.sequence(tokens) for tokens in (1025, 2047, 4097)]
    for got, one in zip(bench.decode(*sequences), sequences, strict=True):
        mask = attended(one.query, one.keys, BLOCK, SMALL)
        want = attention(one.query, one.keys, one.values, mask, sinks)
        assert_close(got, want, dtype)
        without = attention(one.query, one.keys, one.values, mask)
        assert (want - without).abs().max() > 0.1, "they make no difference"


def in_eight_bits(x: torch.Tensor, fp8: torch.dtype) -> torch.Tensor:
    """Rounded towards zero, as vLLM's CPU kernel stores keys and values."""
    codes = x.to(fp8).view(torch.uint8)
    codes -= (codes.view(fp8).float().abs() > x.abs()).to(torch.uint8)
    return codes.view(fp8).float()


@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.25, 2.0)])
@pytest.mark.parametrize("fp8", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_and_values_of_eight_bits(
    dtype: torch.dtype, fp8: torch.dtype, scales: tuple[float, float]
) -> None:
    """As of an oracle that has them as they were rounded; the scales are powers of two, by which
    nothing is rounded."""
    made = shape_of(dtype=dtype, fp8=fp8)
    terms = AttentionParameters(made.head_dim**-0.5, key_scale=scales[0], value_scale=scales[1])
    bench = Bench(made, SMALL, 128, terms)
    sequences = [bench.sequence(tokens) for tokens in (1025, 2047, 4097)]
    for got, one in zip(bench.decode(*sequences), sequences, strict=True):
        keys, values = (
            in_eight_bits(given.float() / scale, fp8).to(dtype) * scale
            for given, scale in zip((one.keys, one.values), scales, strict=True)
        )
        rounded = replace(one, keys=keys, values=values)
        assert_close(got, oracle(rounded, SMALL), dtype)
        assert (oracle(one, SMALL) - oracle(rounded, SMALL)).abs().max() > 1e-3


@pytest.mark.parametrize("tokens", [129, 255, 256, 257, 384, 385])
def test_equals_the_oracle_without_init_and_with_one_local_token(tokens: int) -> None:
    share = 1.0 if tokens <= 256 else 0.01  # of one middle block there is nothing to choose
    settings = replace(SMALL, init_tokens=0, local_tokens=1, topk_share=share)
    bench = Bench(shape_of(), settings, 64)
    sequence = bench.sequence(tokens)
    (got,) = bench.decode(sequence)
    assert_close(got, oracle(sequence, settings), torch.float32)


@pytest.mark.parametrize("tokens", [1, 127, 128])
def test_a_sequence_of_one_block_has_nothing_to_choose_from(tokens: int) -> None:
    settings = replace(SMALL, init_tokens=0, local_tokens=1)
    bench = Bench(shape_of(), settings, 64)
    table = bench.sequence(tokens).block_ids[None].to(torch.int32)
    assert bench.planner.plan([BatchRow(1, tokens, False)], table) is None


@pytest.mark.parametrize(
    "shape",
    [
        shape_of(dtype=torch.bfloat16),
        shape_of(dtype=torch.float16),
        shape_of(heads=2, kv_heads=2, dim=128),
        shape_of(heads=7, kv_heads=1, dim=80),
        shape_of(heads=16, kv_heads=2, dim=128, dtype=torch.bfloat16),
    ],
    ids=lambda s: f"{s.heads}-{s.kv_heads}-{s.head_dim}-{s.dtype}",
)
def test_equals_the_oracle_in_every_shape(shape: KernelShape) -> None:
    bench = Bench(shape, SMALL, 64)
    sequence = bench.sequence(1999)
    (got,) = bench.decode(sequence)
    assert_close(got, oracle(sequence, SMALL), shape.dtype)


@pytest.mark.parametrize("end", [1024, 1026, 1155])
def test_a_draft_has_the_blocks_of_a_decoded_token(end: int) -> None:
    """Of its own length, at which it may be dense yet, and the blocks may end elsewhere."""
    settings = replace(SMALL, dense_boundary=1024)
    bench = Bench(shape_of(), settings, 64)
    whole = bench.sequence(1300)
    drafts = 5
    queries = torch.randn(drafts, *whole.query.shape)
    before = bench.activity.sequences_sparse
    got = bench.verify(whole, queries, end)
    lengths = range(end - drafts + 1, end + 1)
    sparse = [length for length in lengths if settings.regime(length, 0) is not Regime.DENSE]
    assert bench.activity.sequences_sparse - before == len(sparse) > 0
    for one, query, length in zip(got, queries, lengths, strict=True):
        cut = whole.keys[:length], whole.values[:length]
        now = Sequence(*cut, query, whole.block_ids)
        everything = torch.ones(bench.shape.kv_heads, length, dtype=torch.bool)
        if length in sparse:
            assert_close(one, oracle(now, settings), torch.float32)
            alone = bench.decode(replace(now), lengths=(length,))[0]
            assert torch.equal(one, alone)
        else:
            assert_close(one, attention(query, *cut, everything), torch.float32)


def test_scattered_blocks_and_blocks_in_a_row_are_scored_alike() -> None:
    settings = replace(SMALL, topk_share=0.1)
    bench = Bench(shape_of(), settings, 400)
    for in_order in (False, True):
        sequence = bench.sequence(15_000, in_order)
        (got,) = bench.decode(sequence)
        assert_close(got, oracle(sequence, settings), torch.float32)


def test_the_sum_does_not_depend_on_where_the_blocks_lie() -> None:
    bench = Bench(shape_of(), SMALL, 400)
    first, second = bench.sequence(5000, in_order=True), bench.sequence(5000)
    second = replace(first, block_ids=second.block_ids)
    bench.write(second, 0, 5000)
    one, other = bench.decode(first, second)
    assert torch.equal(one, other)


def test_digests_follow_what_is_written_into_blocks() -> None:
    """Tokens are written a few at a time, and the blocks are reused for another sequence."""
    bench = Bench(shape_of(), SMALL, 64)
    sequence = bench.sequence(3000)
    bench.decode(sequence)
    torch.manual_seed(8)
    other = replace(
        sequence,
        keys=torch.randn_like(sequence.keys),
        values=torch.randn_like(sequence.values),
    )
    for first in range(0, 3000, 37):
        end = min(first + 37, 3000)
        bench.write(other, first, end)
        if end > 600 and first % 5 == 0:
            (got,) = bench.decode(other, lengths=(end,))
            now = replace(other, keys=other.keys[:end], values=other.values[:end])
            assert_close(got, oracle(now, SMALL), torch.float32)


def test_blocks_loaded_behind_the_engines_back_are_digested_anew() -> None:
    bench = Bench(shape_of(), SMALL, 64)
    first, second = bench.sequence(2000), bench.sequence(2000)
    bench.decode(first, second)
    bench.cache[second.block_ids] = bench.cache[first.block_ids]
    bench.freshness.wrote_blocks(second.block_ids.tolist())
    before = bench.activity.blocks_digested
    copy = replace(first, block_ids=second.block_ids)
    (got,) = bench.decode(copy)
    assert_close(got, oracle(first, SMALL), torch.float32)
    assert bench.activity.blocks_digested - before == 2000 // BLOCK - 1


def test_blocks_are_digested_once() -> None:
    bench = Bench(shape_of(), SMALL, 64)
    sequence = bench.sequence(2000)
    bench.decode(sequence)
    once = bench.activity.blocks_digested
    assert once == 2000 // BLOCK - 1
    bench.decode(sequence)
    assert bench.activity.blocks_digested == once
