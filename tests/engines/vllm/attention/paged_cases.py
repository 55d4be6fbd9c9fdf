"""Run by test_kernels.py in a process of its own: Triton decides when it is first imported whether
kernels are interpreted."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from kvrecall.attention.kernels.device import (
    LATE,
    DeviceStep,
    LeftTables,
    SequenceFacts,
    attend_by_triton,
)
from kvrecall.attention.kernels.oracle import attend_plainly

KV_HEADS = 2


@dataclass
class Cache:
    """Sequences of random keys in blocks of random places, every KV head in its own. ``mine``: 1
    in the output of tokens that the step attends to."""

    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    facts: list[SequenceFacts]
    tables: torch.Tensor
    step: DeviceStep

    @property
    def mine(self) -> torch.Tensor:
        here = torch.zeros(len(self.query), 1, 1)
        here[[one.token for one in self.facts]] = 1
        return here

    def only(self, at: int) -> Cache:
        """With one sequence alone in its step."""
        one = slice(at, at + 1)
        blocks = self.facts[at].blocks
        step = step_of(self.facts[one], self.tables[one, :, :blocks], self.step.group)
        return Cache(self.query, self.keys, self.values, self.facts[one], self.tables[one], step)


def step_of(facts: list[SequenceFacts], tables: torch.Tensor, group: int) -> DeviceStep:
    """All of whose blocks are attended to: int32 ``tables [sequences, kv_heads, width]``."""
    step = DeviceStep.of(facts, tables[:, 0], KV_HEADS, group)
    step.table.fill_(1 << 30)
    step.table.view(len(facts), KV_HEADS, -1)[..., : tables.shape[2]] = tables
    return step


def cache(lengths: list[int], group: int, dim: int, size: int, dtype: torch.dtype) -> Cache:
    torch.manual_seed(sum(lengths))
    width = max(-(-length // size) for length in lengths)
    count = len(lengths) * KV_HEADS * width
    tables = torch.randperm(count).view(len(lengths), KV_HEADS, width).to(torch.int32)
    places = (torch.randperm(len(lengths)) * 2).tolist()
    facts = [
        SequenceFacts(place, -(-length // size), 0, 0, -(-length // size), length)
        for place, length in zip(places, lengths, strict=True)
    ]
    keys, values = (torch.randn(count, size, KV_HEADS, dim).to(dtype) for _ in range(2))
    query = torch.randn(2 * len(lengths), KV_HEADS * group, dim).to(dtype)
    return Cache(query, keys, values, facts, tables, step_of(facts, tables, group))


def got(made: Cache, scale: float, softcap: float = 0.0, share: int = 0) -> torch.Tensor:
    """Attention by the kernels; what is of no sequence keeps its zeros."""
    output = torch.zeros_like(made.query)
    parts = made.query, made.keys, made.values, made.step, output
    attend_by_triton(*parts, scale, softcap, share=share)
    return output


def want(made: Cache, scale: float, softcap: float = 0.0) -> torch.Tensor:
    return attend_plainly(made.query, made.keys, made.values, made.step, scale, softcap)


@pytest.mark.parametrize("length", [1, 127, 128, 129, 1000, 4097])
@pytest.mark.parametrize(("group", "dim"), [(1, 64), (4, 128), (7, 16)])
@pytest.mark.parametrize("share", [0, 3])
def test_the_kernel_agrees_with_the_oracle(length: int, group: int, dim: int, share: int) -> None:
    made = cache([length, 300], group, dim, 128, torch.float32)
    found = got(made, dim**-0.5, share=share)
    torch.testing.assert_close(found, want(made, dim**-0.5), rtol=1e-4, atol=1e-5)


def test_half_precision_and_other_layouts() -> None:
    made = cache([1000, 129], 4, 64, 32, torch.float16)
    expected = want(made, 0.125)
    made.keys, made.values = (
        t.transpose(1, 2).contiguous().transpose(1, 2) for t in (made.keys, made.values)
    )
    found = got(made, 0.125, share=16)
    torch.testing.assert_close(found.float(), expected, rtol=5e-3, atol=5e-3)


@pytest.mark.parametrize(("dim", "softcap"), [(80, 0.0), (96, 5.0), (64, 1.0)])
def test_other_dimensions_and_capped_logits(dim: int, softcap: float) -> None:
    made = cache([700, 130], 3, dim, 64, torch.float32)
    found = got(made, 0.5, softcap)
    torch.testing.assert_close(found, want(made, 0.5, softcap), rtol=1e-4, atol=1e-5)


def test_a_sequence_by_itself_gives_the_bits_of_a_batch() -> None:
    """In smaller buffers, and with more splits of a row than are added up at once."""
    lengths = [900, 5000, 130]
    whole = cache(lengths, 2, 64, 16, torch.float32)
    together = got(whole, 0.2, share=8)
    for at in range(3):
        alone = whole.only(at)
        assert alone.step.table.shape != whole.step.table.shape
        assert torch.equal(got(alone, 0.2, share=8), together * alone.mine)


def test_the_attention_of_padding_is_zeros() -> None:
    made = cache([300, 700, 40], 2, 32, 16, torch.float32)
    whole = got(made, 0.2)
    made.step.facts[1, 1:] = 0
    output = torch.full_like(made.query, 3.0)
    attend_by_triton(made.query, made.keys, made.values, made.step, output, 0.2)
    for at, one in enumerate(made.facts):
        assert torch.equal(output[one.token], whole[one.token] * (at != 1))
    assert bool((output[made.mine[:, 0, 0] == 0] == 3).all()), "tokens of no sequence"


@pytest.mark.parametrize(("size", "share"), [(16, 0), (16, 1), (32, 3)])
def test_all_blocks_of_a_row_wherever_they_are(size: int, share: int) -> None:
    """To the bit as on the device. What a step selects and where others' copies are plays no
    part; a row may have nothing off the device, and padding none at all."""
    torch.manual_seed(size + share)
    lengths, dim, group = [900, 130, 500, 40], 32, 2
    width = -(-max(lengths) // size)
    both = torch.randn(4 * width, size, KV_HEADS, 2 * dim)
    pages = torch.full((100, size, KV_HEADS, 2 * dim), float("nan"))
    keys, values = both.split(dim, -1)
    query = torch.randn(len(lengths), KV_HEADS * group, dim)
    tables = torch.randperm(4 * width).view(4, width).to(torch.int32)
    told = [SequenceFacts(at, 0, 0, 0, -(-n // size), n) for at, n in enumerate(lengths)]
    step = step_of(told, tables[:, None].expand(-1, KV_HEADS, -1), group)
    expected, output = torch.zeros_like(query), torch.full_like(query, 3.0)
    attend_by_triton(query, keys, values, step, expected, 0.2, share=share)
    left, facts = LeftTables(torch.device("cpu"), 4, width), []
    free = torch.randperm(100)
    for one, init, gone, held in zip(told, (2, 0, 1, 1), (10, 2, 0, 1), (3, 0, 0, 1), strict=True):
        middle, chosen = max(gone, 1), 1
        numbers, free = free[:gone], free[gone:]
        ids = tables[one.token, init : init + gone].long()
        pages[numbers] = both[ids]
        both[ids] = float("nan")
        left.write(held, 0, numbers.to(torch.int32), torch.empty(0, dtype=torch.int32))
        length = one.length - (middle - chosen) * size
        facts.append(
            one._replace(
                init=init, middle=middle, chosen=chosen, length=length, left=gone, held=held
            )
        )
    facts[3] = SequenceFacts(3, 0, 0, 0, 0, 0)
    on = DeviceStep.of(facts, tables, KV_HEADS, group, left=left)
    attend_by_triton(query, keys, values, on, output, 0.2, share=share, pages=pages[..., :dim])
    assert torch.equal(output[:3], expected[:3])
    assert not output[3].any()


def test_what_is_late_comes_in_a_second_turn() -> None:
    """To the bit: of blocks in slots, splits all of whose blocks are there come in the first turn,
    while the late ones' slots are still written. Padding is zeros once."""
    made = cache([900, 130, 40, 300], 2, 32, 16, torch.float32)
    made.step.facts[2, 1:] = 0
    expected, found, after = (torch.full_like(made.query, 3.0) for _ in range(3))
    there = made.query, made.keys, made.values, made.step
    attend_by_triton(*there, expected, 0.2, share=2)
    table = made.step.table.view(4, KV_HEADS, -1)
    made.step.place = torch.zeros(KV_HEADS, 50, dtype=torch.int32)
    late = torch.zeros(len(made.keys), KV_HEADS, dtype=torch.bool)
    for at, head, number in ((at, head, n) for at in (0, 3) for head in range(2) for n in range(9)):
        place, name = 2 * number + head, number + 20 * (at > 0)
        slot = table[at, head, place]
        made.step.place[head, name], is_late = slot, number % 3 == 0
        late[slot, head] = is_late
        table[at, head, place] = -1 - name - LATE * is_late
    keys = made.keys.clone()
    made.keys.masked_fill_(late[:, None, :, None], float("nan"))
    attend_by_triton(*there, found, 0.2, share=2, turn=1)
    assert made.step.arrived.any(), "not all splits have come"
    made.keys.copy_(keys)
    attend_by_triton(*there, found, 0.2, share=2, turn=2)
    assert torch.equal(found, expected)
    attend_by_triton(*there, after, 0.2, share=2, turn=3)
    assert torch.equal(after, expected)


@pytest.mark.parametrize("group", [4, 40])
def test_any_program_of_a_row_may_be_the_last(group: int) -> None:
    """Its sum has the same bits, and it leaves what programs count in as it was."""
    made = cache([700, 16, 300], group, 32, 16, torch.float32)
    first = got(made, 0.2, share=1)
    torch.testing.assert_close(first, want(made, 0.2), rtol=1e-4, atol=1e-5)
    for _ in range(3):
        assert not made.step.arrived.any()
        assert torch.equal(got(made, 0.2, share=1), first)
