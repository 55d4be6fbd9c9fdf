"""A layer's forward pass over a batch with a partially offloaded sequence, without an engine."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engines.vllm.attention.sequences import BLOCK, Bench, shape_of
from engines.vllm.attention.test_residency import SETTINGS, offload, whole
from kvrecall.attention.selection import split_of
from kvrecall.engines.vllm.attention.cpu import RetrievalImpl
from kvrecall.engines.vllm.attention.step import BatchRow, OffloadedRow, StepWork

TOKENS = 1000


class Impl(RetrievalImpl):
    """vLLM's own attention doubles the query of dense requests."""

    def __init__(self, bench: Bench, sparse: bool) -> None:
        self.group = bench.group
        self.sparse_layer = bench.layer if sparse else None
        self.dense_offload = bench.whole
        self.scale, self.logits_soft_cap, self.sinks = bench.shape.head_dim**-0.5, 0.0, None

    def _dense(self, *args: Any) -> torch.Tensor:
        _, query, _, _, _, metadata, output = args
        assert metadata == "of the others"
        return output.copy_(2 * query)  # type: ignore[no-any-return]


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("prefills", [False, True])
def test_every_request_is_attended_to_once(sparse: bool, prefills: bool) -> None:
    torch.manual_seed(0)
    bench = Bench(shape_of(), replace(SETTINGS, topk_share=0.3), 100)
    sequence = bench.sequence(TOKENS)
    want = bench.decode(sequence) if sparse and not prefills else whole(bench, sequence, TOKENS)
    gone = split_of(TOKENS, BLOCK, SETTINGS).middle
    offloaded = offload(bench, sequence, TOKENS, gone, SETTINGS)
    table = sequence.block_ids.to(torch.int32)[None]
    rows = [BatchRow(1, 1, False), BatchRow(1, TOKENS, prefills)]
    step = bench.planner.plan(rows, table.expand(2, -1), {1: offloaded})
    others = torch.tensor([0]), "of the others"
    row = OffloadedRow(offloaded, slice(1, 2), table[0], TOKENS, prefills)
    work = StepWork(step, others, (row,), others)
    query = torch.stack([torch.randn_like(sequence.query), sequence.query])
    output = torch.full_like(query, float("nan"))
    metadata = SimpleNamespace(retrieval=work)
    got = Impl(bench, sparse).forward(
        SimpleNamespace(_k_scale_float=1.0, _v_scale_float=1.0),
        query,
        query,
        query,
        bench.cache,
        metadata,
        output,
    )
    assert torch.equal(got[0], 2 * query[0])
    assert torch.equal(got[1], want[0])


def test_digests_of_a_step_that_failed_are_computed_again() -> None:
    """The forward pass raises in the second of two layers, and the engine goes on."""
    bench = Bench(shape_of(), replace(SETTINGS, topk_share=0.3), 100)
    second = bench.kernel.layer("second", bench.planner._settings, bench.activity)
    bench.group.add("second", second)
    sequence = bench.sequence(TOKENS)
    table = sequence.block_ids.to(torch.int32)[None]
    impl = Impl(bench, True)

    def forward(layers: int) -> list[int]:
        """A step which fails after so many; the blocks that it digests."""
        step = bench.planner.plan([BatchRow(1, TOKENS, False)], table)
        if step is None:
            return []
        for layer in (bench.layer, second)[:layers]:
            impl.sparse_layer = layer
            impl._digest(bench.cache, StepWork(step))
        return step.stale.tolist()

    first = forward(1)
    assert first
    assert forward(2) == first, "the second layer lacked them"
    assert forward(2) == []
    bench.freshness.wrote_blocks(first[:1])
    assert forward(0) == first[:1]
    departing = sequence.block_ids[1:3]
    assert bench.freshness.take_stale(departing).tolist() == departing.tolist()
