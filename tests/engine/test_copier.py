"""Copies between device pages and the arena, on awkward rows and layouts."""

from __future__ import annotations

import random

import pytest
import torch

from kvrecall.engines.vllm.compat.config import LayerPlacement, places_of
from kvrecall.engines.vllm.connector import copier as copying
from kvrecall.engines.vllm.connector.copier import Batch, Copier, StreamQueue
from kvrecall.engines.vllm.connector.pages import GroupPages, Pages, pages_of
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


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("shard_offset", [0, 512])
@pytest.mark.parametrize("threads", [1, 2, 7])
def test_blocks_come_back_as_they_were(
    layers: int, shard_offset: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copying, "_WORTH_SHARING", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    device = caches(layers)
    before = {name: tensor.clone() for name, tensor in device.items()}
    pages = pages_of(device, placements(list(device)), BLOCKS)
    slot = 4096
    assert layers * PAGE + shard_offset <= slot
    arena = torch.full((20 * slot,), 7, dtype=torch.uint8)
    copier = Copier(arena, [GroupPages(pages, shard_offset)])
    blocks = [1, 2, 3, 7, 6, 9]
    slots = [4, 5, 6, 0, 1, 13]
    copy = Copy((*blocks, 0), (*(slot * s for s in slots), 0))  # the null block is left out
    assert copier.store(copy) == len(blocks) * layers * PAGE
    (moved,) = copier.stores.completed()
    assert moved.nbytes == len(blocks) * layers * PAGE
    assert copier.stores.completed() == []
    copy = Copy(copy.block_ids[:-1], copy.offsets[:-1])
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


def test_rows_that_are_not_one_run_are_copied_in_their_order() -> None:
    """As digests lie: ``[kv_heads, blocks, bytes]`` on the device, a block's together in the pool,
    here behind a layer's page."""
    digests = torch.randint(0, 256, (3, BLOCKS, 2, 64), dtype=torch.uint8)
    before = digests.clone()
    pages = (
        Pages("layer", torch.randint(0, 256, (BLOCKS, PAGE), dtype=torch.uint8), ""),
        Pages("digests", digests.transpose(0, 1), ""),
    )
    arena = torch.zeros(4 * 8192, dtype=torch.uint8)
    copier = Copier(arena, [GroupPages(pages)])
    copier.store(Copy((4, 2), (8192, 0)))
    record = arena[8192 : 8192 + PAGE + 3 * 128]
    assert torch.equal(record[PAGE:].view(3, 2, 64), before[:, 4])
    digests.zero_()
    copier.load(Copy((7,), (8192,)))
    assert torch.equal(digests[:, 7], before[:, 4])


def test_what_lies_outside_is_never_copied() -> None:
    pages = pages_of(caches(1), placements(["layer0"]), BLOCKS)
    copier = Copier(torch.zeros(4 * PAGE, dtype=torch.uint8), [GroupPages(pages)])
    for copy in (
        Copy((1,), (3 * PAGE + 1,)),
        Copy((1,), (-1,)),
        Copy((BLOCKS,), (0,)),
        Copy((-1,), (0,)),
    ):
        with pytest.raises(IndexError, match="lies outside"):
            copier.load(copy)
    assert copier.load(Copy((), ())) == copier.load(Copy((0,), (PAGE,))) == 0


@pytest.mark.parametrize("layout", ["layers", "blocks"])
def test_an_order_is_one_batch(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many blocks and layers; where a block's layers lie together they are one item."""
    seen: list[Batch] = []
    monkeypatch.setattr(Batch, "copy_here", lambda batch, *_: seen.append(batch))
    if layout == "layers":
        pages = pages_of(caches(3), placements([f"layer{i}" for i in range(3)]), BLOCKS)
    else:
        whole = torch.zeros(BLOCKS, 3, PAGE, dtype=torch.uint8)
        pages = tuple(Pages(f"layer{i}", whole[:, i], "") for i in range(3))
    copier = Copier(torch.zeros(1 << 16, dtype=torch.uint8), [GroupPages(pages)])
    copier.load(Copy((1, 5, 2), (0, 3 * PAGE, 6 * PAGE)))
    (batch,) = seen
    assert batch.nbytes == 9 * PAGE
    assert len(batch.sizes) == (9 if layout == "layers" else 3)


class Event:
    """Of a stream that has done everything at once."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def record(self, _: object) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: object) -> float:
        return 250.0


class Stream:
    def __init__(self, *_: object) -> None:
        self.waited = 0

    def wait_stream(self, _: object) -> None:
        self.waited += 1

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


def test_on_a_stream_an_order_is_one_call_of_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own batched copy, given contiguous addresses in host memory."""
    calls: list[int] = []

    def swap(sources: torch.Tensor, targets: torch.Tensor, sizes: torch.Tensor) -> None:
        assert all(column.is_contiguous() for column in (sources, targets, sizes))
        assert sources.dtype == targets.dtype == sizes.dtype == torch.int64
        Batch(sources.numpy(), targets.numpy(), sizes.numpy()).copy_here()
        calls.append(len(sizes))

    ops = pytest.importorskip("vllm._custom_ops")
    monkeypatch.setattr(ops, "swap_blocks_batch", swap)
    monkeypatch.setattr(torch, "Stream", Stream)
    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda _: None)
    monkeypatch.setattr(copying, "make_queue", StreamQueue)
    device = caches(3)
    before = {name: tensor.clone() for name, tensor in device.items()}
    copier = Copier(
        torch.zeros(1 << 16, dtype=torch.uint8),
        [GroupPages(pages_of(device, placements(list(device)), BLOCKS))],
    )
    copier.store(Copy((1, 5), (0, 4 * PAGE)))
    copier.load(Copy((7, 8), (4 * PAGE, 0)))
    assert calls == [6, 6]
    assert copier.loads.completed() == [(6 * PAGE, 0.25)]
    for name, tensor in device.items():
        assert torch.equal(tensor[7], before[name][5])
        assert torch.equal(tensor[8], before[name][1])
    copier.load(Copy((), ()))
    assert calls == [6, 6], "the driver takes no empty batch"


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


def ranks_of(
    whole: dict[str, torch.Tensor], tensor: int, stages: int = 1, replicas: int = 1
) -> list[GroupPages]:
    """What the ranks of an engine of these sizes hold of a model's KV, one after the other: of each
    of a stage's layers its heads. As ``config.record_places`` places them, which asks vLLM for the
    sizes."""
    names = list(whole)
    writers, per_stage = tensor // replicas, len(names) // stages
    ranks, before = [], 0
    for stage in range(stages):
        layers = names[stage * per_stage : (stage + 1) * per_stage]
        for rank in range(tensor):
            own = {}
            for name in layers:
                heads = whole[name].shape[1] // writers
                first = rank // replicas * heads
                own[name] = whole[name][:, first : first + heads].contiguous()
            sizes = [part[0].nbytes for part in own.values()]
            at = {name: LayerPlacement(size, size) for name, size in zip(own, sizes, strict=True)}
            pages = pages_of(own, at, BLOCKS)
            assert all(page.heads for page in pages)
            places = places_of(sizes, before, rank // replicas, writers)
            ranks.append(GroupPages(pages, starts=tuple(places)))
        before += sum(sizes) * writers
    return ranks


@pytest.mark.parametrize(
    "sizes", [(2, 1, 1), (4, 1, 1), (8, 1, 1), (8, 1, 2), (1, 2, 1), (2, 2, 1), (4, 4, 2)]
)
def test_a_record_is_the_same_whatever_the_parallel_sizes(sizes: tuple[int, int, int]) -> None:
    """What one rank writes, the ranks of any other engine read, and back, to the byte."""
    tensor, stages, replicas = sizes
    heads = max(HEADS, tensor // replicas)
    whole = {f"layer{i}": torch.randn(BLOCKS, heads, TOKENS, WIDTH).bfloat16() for i in range(4)}
    slot = sum(one[0].nbytes for one in whole.values())
    one, many = torch.zeros(3 * slot, dtype=torch.uint8), torch.zeros(3 * slot, dtype=torch.uint8)
    copy, rows = Copy((1, 5, 3), (0, slot, 2 * slot)), [1, 5, 3]
    (single,) = ranks_of(whole, 1)
    Copier(one, [single]).store(copy)
    for number, rank in enumerate(ranks_of(whole, tensor, stages, replicas)):
        if number % tensor % replicas == 0:  # of identical ranks the first writes
            Copier(many, [rank]).store(copy)
    assert bool(one.any())
    assert torch.equal(one, many)
    empty = {name: torch.zeros_like(layer) for name, layer in whole.items()}
    (into,) = ranks_of(empty, 1)
    Copier(many, [into]).load(copy)
    for page, before in zip(into.pages, single.pages, strict=True):
        assert torch.equal(page.rows[rows], before.rows[rows])
    full = ranks_of(whole, tensor, stages, replicas)
    for rank, want in zip(ranks_of(empty, tensor, stages, replicas), full, strict=True):
        Copier(one, [rank]).load(copy)
        for page, before in zip(rank.pages, want.pages, strict=True):
            assert torch.equal(page.rows[rows], before.rows[rows])


def test_interleaved_heads_are_not_taken_for_separate_ones() -> None:
    tokens_first = torch.randn(BLOCKS, TOKENS, HEADS, WIDTH).bfloat16().transpose(1, 2)
    (page,) = pages_of({"layer0": tokens_first}, placements(["layer0"]), BLOCKS)
    assert page.heads == 0
