"""Run by test_kernels.py in a process of its own: Triton decides when it is first imported whether
kernels are interpreted."""

from __future__ import annotations

import pytest
import torch

from engines.vllm.attention.alone import choose
from kvrecall.attention.digest import DIGESTS, Layout, encode
from kvrecall.attention.kernels import device
from kvrecall.attention.kernels.device import (
    DeviceStep,
    SequenceFacts,
    choose_by_triton,
    digest_by_triton,
)
from kvrecall.attention.kernels.oracle import logits_plainly, table_plainly

HEADS = 2


def facts(*sequences: tuple[int, int, int]) -> list[SequenceFacts]:
    """Of each its first, middle and chosen blocks; two last ones, and one token in the last."""
    made = []
    for at, (init, middle, chosen) in enumerate(sequences):
        attended = init + chosen + 2
        length = (attended - 1) * 16 + 1
        made.append(SequenceFacts(3 * at + 1, init, middle, chosen, init + middle + 2, length))
    return made


def step_of(told: list[SequenceFacts], group: int, larger: int = 1) -> tuple[DeviceStep, int]:
    """A step of these sequences, whose blocks have random places in a cache; and how many. In
    buffers ``larger`` times as large."""
    places = torch.randperm(sum(one.blocks for one in told), dtype=torch.int32)
    tables = places.split([one.blocks for one in told])
    table = torch.nn.utils.rnn.pad_sequence(tables, batch_first=True)
    return DeviceStep.of(told, table, HEADS, group, larger * table.shape[1]), len(places)


def coded_rows(blocks: int, rows: int, width: int, blocks_first: bool = True) -> torch.Tensor:
    """As the device's digests lie: a block's together."""
    coded = encode(torch.randn(HEADS, blocks, rows, width))
    return coded.transpose(0, 1).contiguous().transpose(0, 1) if blocks_first else coded


@pytest.mark.parametrize("kind", list(DIGESTS))
@pytest.mark.parametrize(
    ("size", "tokens", "dim", "dtype"),
    [
        (128, 16, 128, torch.float16),
        (128, 8, 64, torch.float32),
        (32, 32, 80, torch.float16),
        (16, 4, 16, torch.float32),
    ],
)
def test_digests_are_those_of_torch(
    kind: str, size: int, tokens: int, dim: int, dtype: torch.dtype
) -> None:
    """To the bit; of means, which add up in another order, a code may be the next one."""
    torch.manual_seed(dim)
    layout = Layout(DIGESTS[kind], 0, size // tokens)
    keys = torch.randn(6, size, HEADS, dim).to(dtype)
    keys[..., :3] *= 10
    keys[4] = 0
    width = DIGESTS[kind].parts * dim
    coded = torch.full((6, HEADS, layout.rows, width + 4), 99, dtype=torch.int8).transpose(0, 1)
    digest_by_triton(keys, coded, torch.tensor([5, 0, -1, 4, -1]), kind == "bounds")
    want = encode(layout.rows_of(keys.permute(2, 0, 1, 3)))
    assert bool((coded[:, [1, 2, 3]] == 99).all()), "blocks that were not named"
    filled = [SequenceFacts(at, 0, 0, 0, 1, 1, fills=id) for at, id in enumerate((0, -1, 4, 5))]
    again = torch.full_like(coded, 99)
    step = DeviceStep.of(filled, torch.zeros(4, 1, dtype=torch.int32), HEADS, 1)
    digest_by_triton(keys, again, step.facts, kind == "bounds")
    assert torch.equal(again, coded), "as a step's facts name them"
    for block in (0, 4, 5):
        got, expected = coded[:, block], want[:, block]
        if kind == "bounds":
            assert torch.equal(got, expected)
            continue
        codes, others = (each[..., :width].int() for each in (got, expected))
        assert int((codes - others).abs().max()) <= 1
        assert float((codes != others).float().mean()) < 0.01
        scales = [each[..., width:].contiguous().view(torch.float32) for each in (got, expected)]
        torch.testing.assert_close(*scales, rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", list(DIGESTS))
@pytest.mark.parametrize(("group", "rows", "dim"), [(1, 8, 128), (4, 16, 64), (7, 2, 80)])
def test_logits_are_those_of_torch_to_the_bit(kind: str, group: int, rows: int, dim: int) -> None:
    """Of sequences of several lengths, whose queries are somewhere in the batch."""
    torch.manual_seed(group)
    told = facts((1, 1, 1), (0, 37, 4), (3, 66, 9))
    step, blocks = step_of(told, group)
    coded = coded_rows(blocks, rows, DIGESTS[kind].parts * dim)
    query = torch.randn(9, HEADS * group, dim).half()
    query[4] = 0
    choose_by_triton(query, coded, step, dim**-0.5, kind == "bounds")
    want = logits_plainly(query, coded, DIGESTS[kind], step, dim**-0.5)
    got = step.logits.view(-1, HEADS, group, step.logits.shape[2])
    for at, one in enumerate(told):
        assert torch.equal(got[at, ..., : one.middle], want[at])


def chosen_of(step: DeviceStep, logits: list[torch.Tensor]) -> list[torch.Tensor]:
    """Each sequence's table by the kernel, by these logits."""
    told = step.facts.tolist()
    for into, one in zip(step.logits.view(-1, HEADS, *step.logits.shape[1:]), logits, strict=False):
        into.fill_(float("nan"))  # beyond a sequence's blocks is what was left there
        into[..., : one.shape[2]] = one
    step.table.fill_(-7)
    choose(step)
    tables = step.table.view(-1, HEADS, step.table.shape[1])
    attended = [one[4] - one[2] + one[3] for one in told[: len(logits)]]
    for table, count in zip(tables, attended, strict=False):
        assert bool((table[:, count:] == -7).all()), "writes beyond its blocks"
    return [table[:, :count] for table, count in zip(tables, attended, strict=False)]


@pytest.mark.parametrize("group", [1, 4, 5])
def test_the_best_blocks_are_chosen_in_the_sequences_order(group: int) -> None:
    torch.manual_seed(group)
    told = facts((0, 1, 1), (2, 200, 40), (1, 90, 90), (8, 33, 1))
    step, _ = step_of(told, group)
    logits = [3 * torch.randn(HEADS, group, one.middle) for one in told]
    for got, want in zip(chosen_of(step, logits), table_plainly(logits, step), strict=True):
        assert torch.equal(got, want)


def test_more_blocks_than_are_taken_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_BLOCKS_AT_ONCE", 64)
    monkeypatch.setattr(device, "SEARCHED", 2)
    torch.manual_seed(3)
    told = facts((70, 500, 130), (1, 64, 63), (0, 65, 2))
    step, _ = step_of(told, 4)
    logits = [5 * torch.randn(HEADS, 4, one.middle) for one in told]
    for got, want in zip(chosen_of(step, logits), table_plainly(logits, step), strict=True):
        assert torch.equal(got, want)


def test_of_equal_blocks_the_first_are_chosen() -> None:
    """Also where no score is any number, and where most are too small for one."""
    (told,) = facts((1, 40, 10))
    step, _ = step_of([told], 2)
    alike = torch.zeros(HEADS, 2, 40)
    alike[0, :, [3, 30]] = 5.0
    alike[1] = float("nan")
    (table,) = chosen_of(step, [alike])
    ids = step.blocks[0]
    places = [1, 2, 3, 4, 5, 6, 7, 8, 9, 31]
    assert table[0].tolist() == ids[[0, *places, 41, 42]].tolist()
    assert table[1].tolist() == ids[[0, *range(1, 11), 41, 42]].tolist()
    alike.fill_(-1e9)
    alike[..., [7, 39]] = 0.0
    (table,) = chosen_of(step, [alike])
    assert table[0].tolist() == ids[[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 40, 41, 42]].tolist()


def test_larger_buffers_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """And so do fewer programs, with more blocks each."""
    torch.manual_seed(5)
    told = facts((1, 50, 10), (0, 20, 6))
    steps = []
    for larger, programs in ((1, 1), (4, 64)):
        monkeypatch.setattr(device, "_PROGRAMS", programs)
        monkeypatch.setattr(device, "_FEWEST_PARTS", 1)
        torch.manual_seed(6)
        step, blocks = step_of(told, 3, larger)
        coded, query = coded_rows(blocks, 4, 64), torch.randn(5, HEADS * 3, 32)
        choose_by_triton(query, coded, step, 0.2, bounds=True)
        steps.append(step)
    small, large = steps
    for at, one in enumerate(told):
        rows = slice(at * HEADS, at * HEADS + HEADS)
        assert torch.equal(small.scores[rows, : one.middle], large.scores[rows, : one.middle])
        assert torch.equal(small.table[rows, : one.attended], large.table[rows, : one.attended])


def test_any_program_of_a_row_may_be_the_last() -> None:
    """It chooses the same, and leaves what programs count in as it was: for the next layer."""
    torch.manual_seed(7)
    told = facts((1, 90, 20), (0, 41, 7), (2, 0, 0))
    step, blocks = step_of(told, 3)
    coded, query = coded_rows(blocks, 8, 64), torch.randn(8, HEADS * 3, 32)
    seen = []
    for _ in range(8):
        step.table.fill_(-1)
        choose_by_triton(query, coded, step, 0.2, bounds=True)
        assert not step.arrived.any()
        seen.append((step.scores[: 2 * HEADS, :41].clone(), step.table.clone()))
    want = logits_plainly(query, coded, DIGESTS["bounds"], step, 0.2)
    for at, table in enumerate(table_plainly(want, step)):
        rows = slice(at * HEADS, (at + 1) * HEADS)
        assert torch.equal(seen[0][1][rows, : table.shape[1]], table)
    for scores, table in seen[1:]:
        assert torch.equal(scores, seen[0][0])
        assert torch.equal(table, seen[0][1])
