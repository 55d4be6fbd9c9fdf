"""The slots of offloaded sequences: what lies where, and attention over it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from kvrecall.engines.vllm.retrieval.extent import Extent
from kvrecall.engines.vllm.retrieval.kernel import attend, halves, schedule
from kvrecall.engines.vllm.retrieval.recalled import OffloadedSequence, Records
from kvrecall.engines.vllm.retrieval.steps import BatchRow
from kvrecall.engines.vllm.wire import Departure
from kvrecall.pool.arena import Arena
from kvrecall.pool.slots import ALIGNMENT
from kvrecall.retrieval.residency import Admission, Residency
from kvrecall.retrieval.settings import RetrievalSettings
from kvrecall.retrieval.split import slots_of, split_of

from .sequences import BLOCK, Bench, Sequence, shape_of

SETTINGS = RetrievalSettings(
    init_tokens=100,
    local_tokens=300,
    dense_boundary=0,
    offload_boundary=0,
    gate=False,
    least_blocks=1,
)


class Shelf:
    """The copies a residency asks for, made with labels instead of bytes."""

    def __init__(self, heads: int, slots: int, blocks: int) -> None:
        self.residency = Residency(heads)
        self.residency.grow(slots, blocks)
        self.labels = np.full((heads, slots), -1)

    def copy(self, admission: Admission) -> None:
        self.labels[admission.heads, admission.into] = admission.blocks


def test_every_block_asked_for_is_in_its_slot() -> None:
    rng = np.random.default_rng(0)
    shelf = Shelf(3, 12, 40)
    for _ in range(200):
        blocks = np.stack([rng.permutation(40)[:10] for _ in range(3)])
        wanted = rng.random((3, 10)) < 0.8
        admission = shelf.residency.admit(blocks, wanted)
        shelf.copy(admission)
        held = np.take_along_axis(shelf.labels, admission.slots, 1)
        assert (held[wanted] == blocks[wanted]).all()
        assert admission.hits + len(admission.heads) == wanted.sum()
        ahead = np.stack([rng.permutation(40)[:6] for _ in range(3)])
        shelf.copy(shelf.residency.admit_ahead(ahead, np.ones_like(ahead, dtype=np.bool_)))
        held = np.take_along_axis(shelf.labels, admission.slots, 1)
        assert (held[wanted] == blocks[wanted]).all(), "loading ahead overwrote this step's"
        for row in shelf.labels:
            present = row[row >= 0]
            assert len(set(present)) == len(present)


def step(residency: Residency, *blocks: int) -> Admission:
    asked = np.array([blocks])
    return residency.admit(asked, np.ones_like(asked, dtype=np.bool_))


def test_the_longest_unused_goes_first() -> None:
    residency = Residency(1)
    residency.grow(3, 10)
    for blocks in ((1, 2), (2, 3), (4,)):
        step(residency, *blocks)
    assert step(residency, 2, 3).hits == 2
    assert step(residency, 1).hits == 0


def test_what_was_loaded_ahead_is_a_hit_or_was_in_vain() -> None:
    residency = Residency(1)
    residency.grow(4, 10)
    step(residency, 1, 2)
    ahead = residency.admit_ahead(np.array([[2, 3, 4, 5]]), np.ones((1, 4), dtype=np.bool_))
    assert ahead.blocks.tolist() == [3, 4], "best first, as many as there is room for"
    assert step(residency, 3, 1).hits == 2
    assert step(residency, 6).vain == 1, "block 4, which was never asked for"
    assert step(residency, 7).vain == 0


def test_slots_grow_with_the_sequence() -> None:
    residency = Residency(1)
    residency.grow(1, 2)
    step(residency, 1)
    residency.grow(3, 5)
    assert step(residency, 1, 4, 3).hits == 1


LAYER_AT = 256
"""Where in a record the layer's page begins."""


def offload(
    bench: Bench, sequence: Sequence, tokens: int, gone: int, settings: RetrievalSettings
) -> OffloadedSequence:
    """Takes the first ``gone`` middle blocks off the device: their device blocks are wiped."""
    split = split_of(tokens, BLOCK, settings)
    ids = sequence.block_ids[split.init : split.init + gone]
    rows = bench.cache.view(len(bench.cache), -1).view(torch.uint8)
    page = rows.shape[1]
    arena = Arena.create(gone * (page + ALIGNMENT) + 512)
    offsets = tuple(at * (page + ALIGNMENT) for at in range(gone))
    for offset, block in zip(offsets, ids.tolist(), strict=True):
        begin = offset + LAYER_AT
        arena.array()[begin : begin + page] = rows[block].numpy()
    slots = slots_of(split, gone, settings)[1]
    free = bench.take(slots)
    departure = Departure("one", split.init, tuple(ids.tolist()), offsets, tuple(free.tolist()))
    away = OffloadedSequence(
        "one", split.init, np.array(offsets, dtype=np.int64), free.to(torch.int32)
    )
    bench.layer.digest(bench.cache, bench.freshness.take_stale(ids))
    records = Records(arena.array(), {"layer": LAYER_AT}, arena.handle())
    bench.layer.depart(away, departure, bench.cache, records, "layer")
    bench.whole.place(Extent(arena.handle(), page, 64), LAYER_AT)
    bench.cache[ids] = float("nan")
    return away


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [769, 1000, 1153, 4097])
@pytest.mark.parametrize("stay", [0, 1])
def test_recalled_blocks_give_the_same_bits(tokens: int, stay: int, dtype: torch.dtype) -> None:
    torch.manual_seed(tokens)
    settings = replace(SETTINGS, topk_share=0.3, prefetch_share=0.05)
    bench = Bench(shape_of(dtype=dtype), settings, 100)
    sequence = bench.sequence(tokens)
    queries = [torch.randn_like(sequence.query) for _ in range(4)]
    want = [bench.decode(replace(sequence, query=query)) for query in queries]
    dense = whole(bench, sequence, tokens)
    gone = split_of(tokens, BLOCK, settings).middle - stay
    away = offload(bench, sequence, tokens, gone, settings)
    table = sequence.block_ids.to(torch.int32)[None]
    planned = bench.planner.plan([BatchRow(1, tokens, False)], table, {0: away})
    assert planned is not None
    scale = bench.shape.head_dim**-0.5
    for query, result in zip(queries, want, strict=True):
        got = bench.layer.attend(query[None], bench.cache, planned, scale)
        assert torch.equal(got, result)
    got = bench.whole.attend(sequence.query[None], bench.cache, away, table[0], tokens, scale)
    assert torch.equal(got, dense)
    bench.layer.settle()
    assert bench.activity.blocks_loaded > 0


def whole(bench: Bench, sequence: Sequence, tokens: int) -> torch.Tensor:
    """Dense attention on the device."""
    seq_lens = torch.tensor([tokens], dtype=torch.int32)
    starts = torch.tensor([0, 1], dtype=torch.int32)
    return attend(
        sequence.query[None],
        halves(bench.cache, whole=True),
        sequence.block_ids.to(torch.int32)[None],
        seq_lens,
        starts,
        schedule(bench.shape, seq_lens, starts, whole=True),
        bench.shape.head_dim**-0.5,
    )
