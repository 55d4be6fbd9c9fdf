"""The pages in which dense layers keep copies of offloaded sequences, and room for more of these.
See also device_cases.py."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engines.vllm.attention.sequences import shape_of
from kvrecall.attention.selection import Split
from kvrecall.engines.vllm.attention.activity import Activity, HeatTotals
from kvrecall.engines.vllm.attention.base import SparseSequence
from kvrecall.engines.vllm.attention.cuda import TritonKernel
from kvrecall.engines.vllm.attention.group import KeptCopies, RetrievalGroup
from kvrecall.engines.vllm.attention.offloaded import OffloadedSequence, Records
from kvrecall.engines.vllm.attention.room import Most
from kvrecall.engines.vllm.wire import Departure, OffloadOrders


def test_sequences_have_pages_of_their_own_as_long_as_there_are_enough() -> None:
    copies = KeptCopies(8)
    one = copies.of("one", 3)
    assert one is not None
    first = one.pages.tolist()
    one.copied["layer"] = 3
    other = copies.of("other", 4)
    assert other is not None
    assert copies.of("one", 4) is one, "it has grown"
    assert one.pages[:3].tolist() == first
    assert sorted([*one.pages, *other.pages]) == list(range(8))
    assert copies.of("third", 1) is None
    assert copies.of("one", 5) is None, "it gave up its pages"
    third = copies.of("third", 4)
    assert third is not None
    assert sorted([*third.pages, *other.pages]) == list(range(8))
    copies.forget("other")
    copies.forget("unknown")
    again = copies.of("one", 4)
    assert again is not None
    assert not again.copied, "what it had is not there"
    assert sorted([*third.pages, *again.pages]) == list(range(8))


def test_nothing_is_kept_without_pages() -> None:
    assert KeptCopies(0).of("one", 1) is None


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
