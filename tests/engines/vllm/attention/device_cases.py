"""A layer's sparse attention as on a GPU: the Triton kernels over caches of both of vLLM's layouts.

Run by test_kernels.py in a process of its own: Triton decides when it is first imported whether
kernels are interpreted. Reuses cases of other files with another bench.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from engines.vllm.attention import test_kernel, test_residency
from engines.vllm.attention.interpreted import InterpretedDevice
from engines.vllm.attention.sequences import BLOCK, Bench, Sequence, attended, shape_of
from engines.vllm.attention.test_kernel import (  # noqa: F401
    test_a_draft_has_the_blocks_of_a_decoded_token,
    test_blocks_loaded_behind_the_engines_back_are_digested_anew,
    test_digests_follow_what_is_written_into_blocks,
    test_equals_the_oracle_in_every_shape,
    test_equals_the_oracle_with_options,
    test_equals_the_oracle_without_init_and_with_one_local_token,
    test_scattered_blocks_and_blocks_in_a_row_are_scored_alike,
    test_sinks_take_part,
    test_the_sum_does_not_depend_on_where_the_blocks_lie,
)
from engines.vllm.attention.test_residency import (  # noqa: F401
    test_a_sequence_that_begins_off_the_device_decodes_to_the_same_bits,
)
from kvrecall.attention.kernels import device as kernels
from kvrecall.attention.selection import slots_of, split_of
from kvrecall.attention.settings import RetrievalSettings
from kvrecall.engines.vllm import device as devices
from kvrecall.engines.vllm.attention.activity import Activity
from kvrecall.engines.vllm.attention.base import (
    AttentionParameters,
    KernelShape,
    _blocks_of,
    checksums_of,
    sums_of,
)
from kvrecall.engines.vllm.attention.copies import KeptLayer, copied
from kvrecall.engines.vllm.attention.cuda import TritonKernel
from kvrecall.engines.vllm.attention.offloaded import OffloadedSequence, Records
from kvrecall.engines.vllm.attention.step import BatchRow, OffloadedRow
from kvrecall_lab.engines.counting import launches


class DeviceBench(Bench):
    """Keys and values as they are; ``tokens_first``: heads beside each other in memory.

    Triton's interpreter multiplies bfloat16 as if it were whole numbers: float16 takes its place.
    """

    def __init__(
        self,
        shape: KernelShape,
        settings: RetrievalSettings,
        blocks: int,
        tokens_first: bool = False,
        terms: AttentionParameters | None = None,
        note: Any = None,
    ) -> None:
        if shape.dtype is torch.bfloat16:
            shape = replace(shape, dtype=torch.float16)
        super().__init__(shape, settings, blocks, terms, note)
        if tokens_first:
            self.cache = self.cache.transpose(1, 2).contiguous().transpose(1, 2)

    def make_kernel(self, shape: KernelShape) -> TritonKernel:
        return TritonKernel(shape, torch.device("cpu"))

    def write(self, sequence: Sequence, first: int, end: int) -> None:
        at = torch.arange(first, end)
        blocks, places = sequence.block_ids[at // BLOCK], at % BLOCK
        both = [sequence.keys[first:end], sequence.values[first:end]]
        if self.shape.fp8 is not None:
            scales = self.terms.key_scale, self.terms.value_scale
            codes = ((one / by).to(self.shape.fp8) for one, by in zip(both, scales, strict=True))
            both = [one.view(torch.uint8) for one in codes]
        self.cache[blocks, :, places] = torch.cat(both, -1)
        self.freshness.wrote_blocks(blocks.tolist())


@pytest.fixture(autouse=True)
def _as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(7)
    monkeypatch.setattr(test_kernel, "Bench", DeviceBench)
    monkeypatch.setattr(test_kernel, "attended", partial(attended, narrows=False))
    monkeypatch.setattr(test_residency, "Bench", DeviceBench)
    monkeypatch.setitem(devices.FORMS, "cpu", InterpretedDevice)
    devices.device_of.cache_clear()


SETTINGS = replace(test_residency.SETTINGS, topk_share=0.3)


def wipe(
    bench: DeviceBench, sequence: Sequence, gone: int, memory: np.ndarray, at: int
) -> OffloadedSequence:
    """Offloads the first ``gone`` middle blocks into ``memory``."""
    split = split_of(len(sequence.keys), BLOCK, SETTINGS)
    ids = sequence.block_ids[split.init : split.init + gone]
    page = bench.cache[0].nbytes
    offsets = np.arange(gone, dtype=np.int64) * (page + 512)
    elements = bench.cache[0].numel()
    for offset, block in zip(offsets.tolist(), ids.tolist(), strict=True):
        run = bench.cache[block].as_strided((elements,), (1,))  # in the order of its memory
        memory[offset + at : offset + at + page] = run.view(torch.uint8).numpy()
    free = bench.take(slots_of(split, gone, SETTINGS)[1])
    records = Records(memory, {"layer": at})
    offloaded = OffloadedSequence("one", split.init, offsets, free.to(torch.int32), records)
    bench.layer.digest(bench.cache, bench.freshness.take_stale(ids))
    bench.layer.depart(offloaded, ids, bench.cache)
    bench.cache[ids] = float("nan") if bench.shape.fp8 is None else 0x7F
    return offloaded


@pytest.mark.parametrize("tokens_first", [False, True])
@pytest.mark.parametrize(
    ("tokens", "stay", "dtype", "locked"),
    [
        (1000, 0, torch.float32, 9),
        (2049, 1, torch.float16, 9),
        (2049, 0, torch.float16, 0),
        (1000, 1, torch.float32, 1),
    ],
)
def test_blocks_recalled_from_memory_give_the_same_bits(
    tokens: int,
    stay: int,
    dtype: torch.dtype,
    locked: int,
    tokens_first: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of memory that kernels can read, and of memory that they cannot: from the first query on, or
    after ``locked`` of them."""
    noted: list[list[list[int]]] = []
    bench = DeviceBench(
        shape_of(dtype=dtype),
        SETTINGS,
        60,
        tokens_first,
        note=lambda considered, selected, _: noted.append(selected.tolist()),
    )
    sequence = bench.sequence(tokens)
    queries = [torch.randn_like(sequence.query) for _ in range(3)]

    def decode(query: torch.Tensor) -> torch.Tensor:
        bench.activity.steps_sparse = 16  # the next one's blocks are recorded
        return bench.decode(replace(sequence, query=query))

    want = [decode(query) for query in queries]
    blocks = sequence.block_ids
    whole = bench.cache[blocks].clone()
    memory = np.zeros(60 * (bench.cache[0].nbytes + 512), dtype=np.uint8)
    gone = split_of(tokens, BLOCK, SETTINGS).middle - stay
    with monkeypatch.context() as patch:
        patch.setattr(InterpretedDevice, "can_read", lambda *_: locked > 0)
        offloaded = wipe(bench, sequence, gone, memory, 256)
    table = blocks.to(torch.int32)[None]
    for at, (query, result) in enumerate(zip(queries, want, strict=True)):
        if at == locked:
            offloaded.is_readable = False
        bench.activity.steps_sparse = 16
        with launches() as launched:
            step = bench.planner.plan([BatchRow(1, tokens, False)], table, {0: offloaded})
            assert step is not None
            got = bench.layer.attend(query[None], bench.cache, step, bench.terms)
        assert torch.equal(got, result)
        assert "fetch_blocks" in launched
        assert ("move_words" in launched) == (at >= locked)
    assert noted[:2] == noted[3:5], "the blocks that were chosen, recorded a step later"
    bench.group.counted(wait=True)
    split, activity = split_of(tokens, BLOCK, SETTINGS), bench.activity
    assert activity.blocks_loaded >= split.chosen - stay
    assert activity.bytes_loaded == activity.blocks_loaded * bench.cache[0, 0].nbytes
    assert activity.blocks_hit + activity.blocks_loaded <= 3 * 2 * split.chosen
    row = OffloadedRow(offloaded, slice(0, 1), table[0], tokens, False)
    found = copied("layer", Activity(), row, bench.cache)
    assert torch.equal(found, whole)
    assert found.stride()[1:] == bench.cache.stride()[1:]


def test_what_a_step_counted_that_ended_between_its_turns_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else a program of the next step would add up before the others have come."""
    bench = DeviceBench(shape_of(), SETTINGS, 60)
    sequence = bench.sequence(1300)
    want = bench.decode(sequence)
    memory = np.zeros(60 * (bench.cache[0].nbytes + 512), dtype=np.uint8)
    left = {0: wipe(bench, sequence, 6, memory, 256)}
    table, rows = sequence.block_ids.to(torch.int32)[None], [BatchRow(1, 1300, False)]
    step = bench.planner.plan(rows, table, left)
    assert step is not None
    other, given = torch.randn_like(sequence.query), (bench.cache, step, bench.terms)
    attend = kernels.attend_by_triton

    def fail(*args: Any, turn: int, **more: Any) -> None:
        if turn == 2:
            assert step.plan.arrived.any()
            raise RuntimeError("out of memory")
        attend(*args, turn=turn, **more)

    with monkeypatch.context() as patch:
        patch.setattr(kernels, "attend_by_triton", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            bench.layer.attend(other[None], *given)
    assert torch.equal(bench.layer.attend(sequence.query[None], *given), want)


@pytest.mark.parametrize("tokens_first", [False, True])
def test_dense_layers_keep_what_leaves(tokens_first: bool) -> None:
    """In parts: from the device, later from the arena. Their attention is that of a sequence on the
    device, to the bit, beside one there. One for which there are too few pages is not kept."""
    bench = DeviceBench(shape_of(), SETTINGS, 90, tokens_first)
    sequence, other = bench.sequence(1300), bench.sequence(700)
    one, two = sequence.block_ids.to(torch.int32), other.block_ids.to(torch.int32)
    tables = torch.zeros(2, len(one), dtype=torch.int32)
    tables[0], tables[1, : len(two)] = one, two
    rows = [BatchRow(1, 1300, False), BatchRow(1, 700, False)]
    query = torch.stack([sequence.query, other.query])
    activity, output = Activity(), torch.empty_like(query)
    kept = KeptLayer("layer", lambda blocks: 6, activity)

    def attend(left: dict[int, OffloadedSequence]) -> torch.Tensor:
        step = bench.planner.plan(rows, tables, left)
        return kept.attend(query, bench.cache, step, bench.terms, output).clone()

    expected = attend({})
    memory = np.zeros(60 * (bench.cache[0].nbytes + 512), dtype=np.uint8)
    whole, ids = bench.cache.clone(), sequence.block_ids
    offloaded = wipe(bench, sequence, 6, memory, 256)
    split = split_of(1300, BLOCK, SETTINGS)
    assert split.middle == 6
    numbers, offsets = offloaded.numbers, offloaded.offsets
    offloaded.numbers, offloaded.offsets = numbers[:2], offsets[:2]
    kept.leave(offloaded, 2, whole, ids[split.init : split.init + 2].numpy())
    offloaded.numbers, offloaded.offsets = numbers, offsets
    kept.leave(offloaded, 4, bench.cache, None)
    assert offloaded.is_kept
    assert activity.bytes_staged == 6 * bench.cache[0].nbytes
    assert torch.equal(attend({0: offloaded}), expected)
    offloaded.numbers = np.append(numbers, 6)
    kept.leave(offloaded, 1, bench.cache, None)
    assert not offloaded.is_kept
    assert activity.bytes_staged == 6 * bench.cache[0].nbytes


@pytest.mark.parametrize(("codes", "tokens_first"), [(False, False), (True, True)])
def test_keys_and_values_of_eight_bits(codes: bool, tokens_first: bool) -> None:
    """To the bit as of the same numbers in 16 bits, scales being powers of two: on the device, off
    it, and in dense layers. ``codes``: vLLM gives queries in eight bits, too."""
    fp8, tokens, scales = torch.float8_e4m3fn, 1300, (0.25, 2.0, 0.5)
    sizes = (tokens, 2, 64), (tokens, 2, 64), (4, 64)
    coded = [(torch.randn(size) / by).to(fp8) for size, by in zip(sizes, scales, strict=True)]
    numbers = [one.half() * by for one, by in zip(coded, scales, strict=True)]
    sequence = Sequence(*numbers, torch.randperm(59)[:11] + 1)
    shape = shape_of(dtype=torch.float16)
    plain = DeviceBench(shape, SETTINGS, 60, tokens_first, AttentionParameters(0.125))
    terms = AttentionParameters(0.125 * (scales[2] if codes else 1.0), 0.0, None, *scales[:2])
    shape = replace(shape, fp8=fp8, query=fp8 if codes else None)
    eight = DeviceBench(shape, SETTINGS, 60, tokens_first, terms)
    want = attended_everywhere(plain, sequence, sequence.query)
    got = attended_everywhere(eight, sequence, coded[2] if codes else sequence.query)
    for ours, theirs in zip(got, want, strict=True):
        assert torch.equal(ours, theirs)
    sparse, dense, off, kept = got
    assert torch.equal(sparse, off)
    assert torch.equal(dense, kept)
    assert (sparse - dense).abs().max() > 1e-2, "all blocks were chosen"


def attended_everywhere(
    bench: DeviceBench, sequence: Sequence, query: torch.Tensor
) -> list[torch.Tensor]:
    """A sparse and a dense layer's attention, with all blocks on the device and with six off it."""
    taken = {0, *sequence.block_ids.tolist()}
    bench.free = torch.tensor([block for block in range(60) if block not in taken])
    bench.write(sequence, 0, len(sequence.keys))
    table, rows = sequence.block_ids.to(torch.int32)[None], [BatchRow(1, len(sequence.keys), False)]
    kept = KeptLayer("layer", lambda _: 20, Activity())
    layers: list[Any] = [bench.layer, kept]
    found: list[torch.Tensor] = []
    left: dict[int, OffloadedSequence] = {}
    for is_off in (False, True):
        if is_off:
            memory = np.zeros(20 * (bench.cache[0].nbytes + 512), dtype=np.uint8)
            left[0] = wipe(bench, sequence, 6, memory, 256)
            kept.leave(left[0], 6, bench.cache, None)
        step = bench.planner.plan(rows, table, left)
        assert step is not None
        bench.layer.digest_step(bench.cache, step)
        for layer in layers:
            output = torch.empty(1, *sequence.query.shape, dtype=bench.shape.dtype)
            found.append(layer.attend(query[None], bench.cache, step, bench.terms, output=output))
    return found


def test_pages_are_read_in_the_order_of_the_caches_memory() -> None:
    bench = DeviceBench(shape_of(), SETTINGS, 4, tokens_first=True)
    bench.cache.copy_(torch.randn(bench.cache.shape))
    flat = bench.cache.as_strided((4, bench.cache[0].numel()), (bench.cache.stride(0), 1))
    assert torch.equal(_blocks_of(flat.contiguous().view(torch.uint8), bench.cache), bench.cache)


def test_sums_tell_every_changed_byte() -> None:
    rows = torch.randint(-128, 128, (9, 2, 36), dtype=torch.int8)
    sums = sums_of(rows)
    assert sums.shape == (9, 8)
    assert not (sums_of(rows) != sums).any()
    for at in range(72):
        changed = rows.clone()
        changed.view(9, -1)[:, at] ^= 1 << at % 8 if at % 8 < 7 else -128
        assert (sums_of(changed) != sums).any(-1).all()
    assert not len(checksums_of(rows[:0]))
