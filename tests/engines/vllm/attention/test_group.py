"""The pages in which dense layers keep copies of what left the device, and room for more of it. See
also device_cases.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from engines.vllm.attention.sequences import shape_of
from kvrecall.attention.kernels.device import BlockNumbers
from kvrecall.attention.selection import Split
from kvrecall.engines.vllm.attention.activity import Activity, HeatTotals
from kvrecall.engines.vllm.attention.base import SparseSequence
from kvrecall.engines.vllm.attention.copies import KeptLayer
from kvrecall.engines.vllm.attention.cuda import TritonKernel
from kvrecall.engines.vllm.attention.group import RetrievalGroup
from kvrecall.engines.vllm.attention.offloaded import OffloadedSequence, Records
from kvrecall.engines.vllm.attention.room import Most
from kvrecall.engines.vllm.wire import Departure, OffloadOrders


def test_numbers_that_were_given_back_are_taken_first() -> None:
    """Dense layers have pages for the first ones."""
    numbers = BlockNumbers(torch.device("cpu"), 8)
    one, other = numbers.take(3), numbers.take(4)
    numbers.give(one)
    assert numbers.take(2).tolist() == [0, 1]
    numbers.give(other)
    assert numbers.take(3).tolist() == [2, 3, 4]
    assert numbers.room == 3


@pytest.mark.parametrize("pages", [3, 2])
def test_steps_take_the_host_where_dense_layers_lack_copies(
    pages: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "vllm.kvrecall")
    kernel = TritonKernel(shape_of(), torch.device("cpu"))
    kernel.hold(9)
    group = RetrievalGroup(Activity(), HeatTotals(), kernel)
    kept = KeptLayer("layer", lambda blocks: pages, Activity())
    group.add("layer", None, kept)
    cache = torch.arange(9.0).view(9, 1, 1, 1).expand(-1, 1, 1, 2).contiguous()
    group.register({"layer": cache})
    records = Records(np.zeros(99, dtype=np.uint8), {"layer": 0})
    order = Departure("one", 1, (4, 6, 2), (0, 8, 16), (9,))
    kernel.number(one := OffloadedSequence("", 1, np.arange(3), torch.empty(0).int(), records))
    kernel.give_up(one)
    patched = RetrievalGroup._keep

    def keep(sequence: OffloadedSequence, *args: Any) -> None:
        kernel.number(sequence)  # as sparse layers do
        patched(group, sequence, *args)

    group._keep = keep  # type: ignore[method-assign]
    assert not group.take(OffloadOrders([order], {7: "one"}, [], []), records)
    (sequence,) = group._sequences.values()
    sequence.decodes = True
    assert group.needs_host == (pages == 2)
    assert ("--max-num-seqs" in caplog.text) == (pages == 2)
    if pages == 3:
        assert kept.open(cache)[:, 0, 0, 0].tolist() == [4, 6, 2]
    sequence.decodes = False
    assert group.needs_host


@pytest.mark.parametrize("most", [Most(share=0.5, left=5), Most(rows=1)], ids=["blocks", "places"])
def test_a_sequence_for_which_the_device_has_no_room_is_lost_and_no_other(most: Most) -> None:
    """Its blocks are computed again; the engine goes on."""
    kernel = TritonKernel(shape_of(), torch.device("cpu"), most)
    kernel.hold(100)
    group = RetrievalGroup(Activity(), HeatTotals(), kernel)
    group.register({"layer": torch.zeros(100, 1)})
    orders = [Departure(name, 1, (1, 2, 3), (0, 1, 2), (9,)) for name in ("one", "other")]
    records = Records(np.zeros(9, dtype=np.uint8), {})

    def go(order: Departure) -> set[str]:
        lost = group.take(OffloadOrders([order], {7: order.request_id}, [], []), records)
        if (sequence := group.sequence(7)) is not None:
            kernel.number(sequence)  # as its layers do
        return lost

    assert [go(order) for order in orders] == [set(), {"other"}]
    assert group.sequence(7) is None


def test_slots_that_come_without_blocks_are_told_to_the_kernels() -> None:
    """They would recall into what stood in the table before: another sequence's blocks."""
    kernel = TritonKernel(shape_of(), torch.device("cpu"))
    kernel.hold(100)
    records = Records(np.zeros(9, dtype=np.uint8), {})
    one = OffloadedSequence("one", 1, np.arange(3), torch.tensor([9, 8]).int(), records)
    kernel.number(one)
    one.slots = torch.tensor([9, 8, 7]).int()
    kernel.number(one)
    sequence = SparseSequence(0, 0, Split(6, 1, 5, 1, 32, 32), torch.arange(6).int(), one)
    table = sequence.table[None]
    plan = kernel.schedule(torch.empty(0).long(), [sequence], None, table).plan
    assert plan.slots[one.place, :3].tolist() == [9, 8, 7]
    assert plan.names[one.place, :3].tolist() == one.numbers.tolist()
