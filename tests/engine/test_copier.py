"""Copies between device pages and the arena, on awkward rows and layouts."""

from __future__ import annotations

import random

import pytest
import torch

from kvrecall.engines.vllm.compat.config import LayerPlacement
from kvrecall.engines.vllm.connector import copier as copier_module
from kvrecall.engines.vllm.connector.copier import InlineCopier, Run, runs_of
from kvrecall.engines.vllm.connector.pages import pages_of
from kvrecall.engines.vllm.connector.wire import Copy
from kvrecall.errors import EngineError

BLOCKS, HEADS, TOKENS, WIDTH = 10, 2, 16, 8
PAGE = HEADS * TOKENS * WIDTH * 2


def caches(layers: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(layers)
    return {
        f"layer{i}": torch.randn(BLOCKS, HEADS, TOKENS, WIDTH, generator=generator).bfloat16()
        for i in range(layers)
    }


def placements(names: list[str], page: int = PAGE, stride: int = PAGE) -> dict[str, LayerPlacement]:
    return dict.fromkeys(names, LayerPlacement(page, stride))


def test_runs_merge_what_is_consecutive_on_both_sides() -> None:
    copy = Copy((3, 4, 5, 9, 8, 0, 7), (0, 64, 128, 192, 256, 320, 384))
    assert list(runs_of(copy)) == [
        Run(3, 0, 64, 3),
        Run(9, 192, 0, 1),
        Run(8, 256, 0, 1),
        Run(7, 384, 0, 1),
    ]
    assert list(runs_of(Copy((), ()))) == []
    assert list(runs_of(Copy((0,), (0,)))) == []


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("shard_offset", [0, 512])
@pytest.mark.parametrize("threads", [1, 2, 7])
def test_blocks_come_back_as_they_were(
    layers: int, shard_offset: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copier_module, "_WORTH_SHARING", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    device = caches(layers)
    before = {name: tensor.clone() for name, tensor in device.items()}
    pages = pages_of(device, placements(list(device)), BLOCKS)
    slot = 4096
    assert layers * PAGE + shard_offset <= slot
    arena = torch.full((20 * slot,), 7, dtype=torch.uint8)
    copier = InlineCopier(arena, pages, shard_offset)
    blocks = [1, 2, 3, 7, 6, 9]
    slots = [4, 5, 6, 0, 1, 13]
    copy = Copy(tuple(blocks), tuple(slot * s for s in slots))
    moved = copier.store(copy)
    assert moved.nbytes == len(blocks) * layers * PAGE
    untouched = arena.view(20, slot)[[s for s in range(20) if s not in slots]]
    assert bool((untouched == 7).all()), "a copy wrote outside its slots"
    assert bool((arena.view(20, slot)[slots, layers * PAGE + shard_offset :] == 7).all())

    random.Random(1).shuffle(blocks)
    for tensor in device.values():
        tensor.zero_()
    copier.load(Copy(tuple(blocks), copy.offsets))
    for name, tensor in device.items():
        for source, target in zip(copy.block_ids, blocks, strict=True):
            assert torch.equal(tensor[target], before[name][source])
        rest = [b for b in range(BLOCKS) if b not in blocks]
        assert bool((tensor[rest] == 0).all())


def test_blocks_split_by_the_kernel_are_one_page() -> None:
    device = {"layer0": torch.arange(BLOCKS * HEADS * TOKENS * WIDTH).bfloat16()}
    device["layer0"] = device["layer0"].view(BLOCKS * 2, HEADS, TOKENS // 2, WIDTH)
    (page,) = pages_of(device, placements(["layer0"]), BLOCKS)
    assert page.rows.shape == (BLOCKS, PAGE)


def test_layers_sharing_memory_are_copied_once() -> None:
    device = caches(1)
    device["layer1"] = device["layer0"]
    assert len(pages_of(device, placements(["layer0", "layer1"]), BLOCKS)) == 1


def test_block_outermost_layout() -> None:
    whole = torch.randn(BLOCKS, 2, HEADS, TOKENS, WIDTH).bfloat16()
    device = {"a": whole[:, 0], "b": whole[:, 1]}
    pages = pages_of(device, placements(["a", "b"], PAGE, 2 * PAGE), BLOCKS)
    assert bytes(pages[1].rows[3].numpy()) == whole[3, 1].view(torch.uint8).numpy().tobytes()


def test_scattered_layout_is_refused() -> None:
    heads_first = torch.zeros(HEADS, BLOCKS, TOKENS, WIDTH).bfloat16().transpose(0, 1)
    with pytest.raises(EngineError, match="does not keep a block's bytes together"):
        pages_of({"layer0": heads_first}, placements(["layer0"]), BLOCKS)
