"""Copies between device pages and the arena, on awkward rows and layouts."""

from __future__ import annotations

import fcntl
import os
import random
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm import _custom_ops as ops
from vllm import triton_utils
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.canonical_mapping import (
    derive_canonical_mappings,
)
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheLayout,
    KVCacheTensor,
    MLAAttentionSpec,
    create_kv_cache_views,
)
from vllm.v1.kv_offload.cpu import swap_blocks_triton

from kvrecall.attention.kernels.device import Piece
from kvrecall.engines.vllm import device as devices
from kvrecall.engines.vllm.compat.config import (
    ALONE,
    LayerPlacement,
    Sharing,
    kv_groups,
    layer_placements,
    places_of,
    sharing_of,
)
from kvrecall.engines.vllm.connector import copier as copier_module
from kvrecall.engines.vllm.connector.copier import ArenaMapping, Copier
from kvrecall.engines.vllm.connector.pages import GroupPages, LayerPages, pages_of, runs_of
from kvrecall.engines.vllm.device import accelerator, driver, inline
from kvrecall.engines.vllm.device.accelerator import AcceleratorDevice, split
from kvrecall.engines.vllm.device.base import Batch, Copy
from kvrecall.errors import EngineError
from kvrecall.pool.arena import Arena
from kvrecall.testing import wait_until
from kvrecall_lab.engines.counting import Counts, counted

BLOCKS, HEADS, TOKENS, WIDTH = 10, 2, 16, 8
CPU = torch.device("cpu")
PAGE = HEADS * TOKENS * WIDTH * 2


@pytest.fixture(autouse=True)
def _no_device_of_another_test() -> Iterator[None]:
    devices.device_of.cache_clear()
    yield
    devices.device_of.cache_clear()


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
    monkeypatch.setattr(inline, "_WORTH_SHARING", 1)
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
    copy = Copy(tuple(blocks), tuple(slot * s for s in slots))
    assert copier.store(copy) == len(blocks) * layers * PAGE
    (moved,) = copier.stores.completed()
    assert moved.nbytes == len(blocks) * layers * PAGE
    assert copier.stores.completed() == []
    untouched = arena.view(20, slot)[[s for s in range(20) if s not in slots]]
    assert bool((untouched == 7).all()), "a copy wrote outside its slots"
    assert bool((arena.view(20, slot)[slots, layers * PAGE + shard_offset :] == 7).all())

    random.Random(1).shuffle(blocks)
    for tensor in device.values():
        tensor.zero_()
    null = Copy((*blocks, 0), (*copy.offsets, 0))  # it is left out
    assert copier.load(null) == len(blocks) * layers * PAGE
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
        LayerPages("layer", torch.randint(0, 256, (BLOCKS, PAGE), dtype=torch.uint8), ""),
        LayerPages("digests", digests.transpose(0, 1), ""),
    )
    arena = torch.zeros(4 * 8192, dtype=torch.uint8)
    copier = Copier(arena, [GroupPages(pages)])
    copier.store(Copy((4, 2), (8192, 0)))
    record = arena[8192 : 8192 + PAGE + 3 * 128]
    assert torch.equal(record[PAGE:].view(3, 2, 64), before[:, 4])
    digests.zero_()
    copier.load(Copy((7,), (8192,)))
    assert torch.equal(digests[:, 7], before[:, 4])


@pytest.mark.parametrize("layout", ["layers", "blocks"])
def test_an_order_is_one_call(layout: str) -> None:
    """However many blocks, groups and layers; where a block's layers lie together they are one
    item. No thread waits for it."""
    if layout == "layers":
        pages = pages_of(caches(3), placements([f"layer{i}" for i in range(3)]), BLOCKS)
    else:
        whole = torch.zeros(BLOCKS, 3, PAGE, dtype=torch.uint8)
        pages = tuple(LayerPages(f"layer{i}", whole[:, i], "") for i in range(3))
    other = LayerPages("window", torch.zeros(BLOCKS, PAGE, dtype=torch.uint8), "")
    with counted(CPU) as counts:
        groups = [GroupPages(pages), GroupPages((other,))]
        copier = Copier(torch.zeros(1 << 17, dtype=torch.uint8), groups)
    copier.load(Copy((1, 5, 2), (0, 3 * PAGE, 6 * PAGE)), Copy((3,), (9 * PAGE,), 1))
    items = 10 if layout == "layers" else 4
    assert counts == Counts(1, items, 10 * PAGE, 0)
    copier.store(Copy((1, 5), (0, 3 * PAGE)))
    assert (counts.calls, counts.nbytes, counts.host_waits) == (2, 16 * PAGE, 0)
    assert len(copier.loads.completed()) == len(copier.stores.completed()) == 1
    assert counts.host_waits == 0
    copier._device.current().record().wait()
    assert counts.host_waits == 1


def test_a_large_order_is_sent_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first while the addresses of the others are computed; the bytes are those of one call."""
    monkeypatch.setattr(copier_module, "_ITEMS", 8)
    device = caches(5)
    before = {name: tensor.clone() for name, tensor in device.items()}
    pages = pages_of(device, placements(list(device)), BLOCKS)
    with counted(CPU) as counts:
        copier = Copier(torch.zeros(1 << 17, dtype=torch.uint8), [GroupPages(pages)])
    order = Copy((1, 5, 2), (0, 5 * PAGE, 10 * PAGE))
    assert copier.store(order) == 15 * PAGE
    assert (counts.calls, counts.items) == (3, 15), "two layers at a time"
    for tensor in device.values():
        tensor.zero_()
    assert copier.load(order) == 15 * PAGE
    assert [len(moved) for moved in copier.drain()] == [1, 1], "one order each"
    for name, tensor in device.items():
        for block in (1, 5, 2):
            assert torch.equal(tensor[block], before[name][block])


class Event:
    """Of a stream that has done everything at once."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def record(self, _: object) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, _: object) -> float:
        return 250.0


class Stream:
    device = CPU

    def __init__(self, *_: object) -> None:
        self.waited = 0

    def wait_event(self, _: object) -> None:
        self.waited += 1

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


@pytest.fixture
def accelerated(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The form for accelerators, over host memory. What is locked and unlocked, in order."""
    locked: list[str] = []
    monkeypatch.setattr(torch, "Stream", Stream)
    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda _: Stream())
    monkeypatch.setattr(torch.accelerator, "device_index", lambda _: nullcontext())
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda _: None)
    monkeypatch.setattr(driver, "host_register", lambda at, n: bool(locked.append(f"+{n}")) or True)
    monkeypatch.setattr(driver, "host_unregister", lambda at: locked.append("-"))
    monkeypatch.setattr(driver, "pinned", lambda n: torch.zeros(n, dtype=torch.uint8))
    monkeypatch.setitem(devices.FORMS, "cpu", AcceleratorDevice)
    return locked


def test_values_go_through_memory_that_is_made_once(
    accelerated: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Locking some in a step stalls launches. A part of the ring is written when the device has
    read it, and what is fetched stays as long as it is held."""
    device = AcceleratorDevice(CPU)
    monkeypatch.setattr(driver, "pinned", None)
    late: list[tuple[torch.Tensor, torch.Tensor]] = []
    waits: list[int] = []

    def copy(there: torch.Tensor, here: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        if non_blocking:
            late.append((there, here))
            return there
        return plain(there, here)

    def made() -> None:
        waits.append(sum(here.nbytes for _, here in late))
        for there, here in late:
            plain(there, here)
        late.clear()

    plain = torch.Tensor.copy_
    monkeypatch.setattr(torch.Tensor, "copy_", copy)
    monkeypatch.setattr(Event, "synchronize", lambda _: made())
    values = [torch.randint(0, 1 << 30, (n,)) for n in (1, 40_000, 0, 700_000, 3, 260_000, 9)]
    sent = [device.send(one) for one in values]
    made()
    assert len(waits) > 1, "the ring went round"
    assert waits[0] > 4 << 20, "the host is ahead of the device"
    assert all(torch.equal(*pair) for pair in zip(sent, values, strict=True))
    fetched = [device.fetch(torch.tensor([at, at])) for at in range(40)]
    made()
    assert [here.tolist() for here, _ in fetched] == [[at, at] for at in range(40)]
    room = device.can_fetch
    while room(16):
        fetched.append(device.fetch(values[0]))
    assert not room(16)
    del fetched[:]
    assert room(16)
    assert not room(1 << 20)


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_on_a_stream_an_order_is_one_call_of_the_driver(
    kind: str, accelerated: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's own batched copy, given contiguous addresses in host memory."""
    calls: list[tuple[int, bool]] = []

    def swap(
        sources: torch.Tensor, targets: torch.Tensor, sizes: torch.Tensor, reads_ahead: bool
    ) -> None:
        assert all(column.is_contiguous() for column in (sources, targets, sizes))
        numbers = torch.uint64 if kind == "xpu" else torch.int64
        assert sources.dtype == targets.dtype == sizes.dtype == numbers
        Batch(sources.numpy(), targets.numpy(), sizes.numpy()).copy_here()
        calls.append((len(sizes), reads_ahead))

    monkeypatch.setattr(ops, "swap_blocks_batch", swap)
    monkeypatch.setattr(Stream, "device", torch.device(kind))
    device = caches(3)
    before = {name: tensor.clone() for name, tensor in device.items()}
    copier = Copier(
        torch.zeros(1 << 16, dtype=torch.uint8),
        [GroupPages(pages_of(device, placements(list(device)), BLOCKS))],
    )
    devices.device_of(CPU).wait_locked()
    copier.store(Copy((1, 5), (0, 4 * PAGE)))
    assert copier.stores.drain() == [(6 * PAGE, 0.25, False)]
    copier.load(Copy((7, 8), (4 * PAGE, 0)))
    assert copier.loads.drain() == [(6 * PAGE, 0.25, False)]
    assert calls == [(6, False), (6, True)], "only the host's memory is read ahead"
    for name, tensor in device.items():
        assert torch.equal(tensor[7], before[name][5])
        assert torch.equal(tensor[8], before[name][1])
    copier.load(Copy((), ()))
    copier.close()
    assert len(calls) == 2, "the driver takes no empty batch"
    assert accelerated == [f"+{1 << 16}", "-"]


@pytest.mark.parametrize(
    ("nbytes", "kind", "is_load", "by"),
    [
        (16 << 10, "cuda", True, ["kernel"]),
        (16 << 10, "cuda", False, ["driver"] * 3),
        (16 << 10, "xpu", True, ["driver"] * 3),
        ((16 << 10) + 4, "cuda", True, ["driver"] * 3),
        (28 << 10, "cuda", True, ["driver"] * 3),
    ],
)
def test_small_items_are_loaded_by_a_kernel_and_others_by_calls_of_bounded_length(
    nbytes: int,
    kind: str,
    is_load: bool,
    by: list[str],
    accelerated: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As vLLM has found it on H100s."""
    took: list[str] = []

    def kernel(*_: torch.Tensor, bytes_per_chunk: int) -> None:
        assert bytes_per_chunk == 8192
        took.append("kernel")

    monkeypatch.setattr(triton_utils, "HAS_TRITON", True)
    monkeypatch.setattr(ops, "swap_blocks_batch", lambda *_: took.append("driver"))
    monkeypatch.setattr(swap_blocks_triton, "swap_blocks_batch", kernel)
    monkeypatch.setattr(accelerator, "ITEMS_A_CALL", 8)
    monkeypatch.setattr(Stream, "device", torch.device(kind))
    memory = torch.zeros(1 << 20, dtype=torch.uint8)
    device = devices.device_of(CPU)
    device.lock(memory, memory.numel)
    device.wait_locked()
    inside = memory.data_ptr() + np.arange(20) * nbytes
    outside = np.arange(20) * nbytes
    ways = (inside, outside) if is_load else (outside, inside)
    device.current().copy(Batch(*ways, np.full(20, nbytes)))
    assert took == by
    device.unlock(memory)


@pytest.mark.parametrize("is_load", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_a_layers_blocks_at_even_distances_are_one_call(
    seed: int, is_load: bool, accelerated: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of as many as lie in one locked range; the others are items."""
    page, layers, blocks, chunk = 16 << 10, 3, 24, 15 * (16 << 10)
    rows: list[tuple[int, int]] = []
    items: list[int] = []

    def copy_rows(
        count: int, nbytes: int, source: driver.Place, target: driver.Place, load: bool
    ) -> None:
        assert load == is_load
        host = source if is_load else target
        at = host.address - memory.data_ptr()
        assert at // chunk == (at + (count - 1) * host.step + nbytes - 1) // chunk
        steps = np.arange(count)
        of, to = (place.address + steps * place.step for place in (source, target))
        Batch(of, to, np.full(count, nbytes)).copy_here()
        rows.append((count, nbytes))

    def swap(of: torch.Tensor, to: torch.Tensor, sizes: torch.Tensor, _: bool) -> None:
        Batch(of.numpy(), to.numpy(), sizes.numpy()).copy_here()
        items.append(len(sizes))

    monkeypatch.setattr(ops, "swap_blocks_batch", swap)
    monkeypatch.setattr(driver, "copies_rows", lambda: True)
    monkeypatch.setattr(driver, "copy_rows", copy_rows)
    monkeypatch.setattr(Stream, "device", torch.device("cuda"))
    monkeypatch.setattr(accelerator, "copy_kernel", lambda *_: None)
    monkeypatch.setattr(accelerator, "CHUNK_BYTES", chunk)
    if seed == 3:
        monkeypatch.setattr(accelerator, "MOST_ROW_BYTES", page)
    chance = np.random.default_rng(seed)
    memory = torch.zeros(layers * page * blocks, dtype=torch.uint8)
    pages = tuple(
        LayerPages(f"layer{n}", torch.zeros(blocks + 1, page, dtype=torch.uint8), "")
        for n in range(layers)
    )
    for tensor in (memory, *(one.rows for one in pages)):
        tensor.copy_(torch.from_numpy(chance.integers(0, 256, tensor.shape, dtype=np.uint8)))
    copier = Copier(memory, [GroupPages(pages)])
    devices.device_of(CPU).wait_locked()
    ids, offsets = np.arange(1, blocks + 1), np.arange(blocks) * layers * page
    if seed:  # a piece of them is out of order
        some = slice(4, 12)
        ids[some] = chance.permutation(ids[some])
    want = memory.view(blocks, layers, page).clone()
    if not is_load:
        want = torch.stack([one.rows[ids].clone() for one in pages], 1)
    order = Copy(tuple(ids.tolist()), tuple(offsets.tolist()))
    assert (copier.load if is_load else copier.store)(order) == memory.numel()
    copier.drain()
    for n, one in enumerate(pages):
        assert torch.equal(one.rows[ids], want[:, n])
    assert torch.equal(memory.view(blocks, layers, page), want)
    if seed == 3:
        assert not rows, "vLLM's call is faster for so large ones"
    else:
        assert sum(count for count, _ in rows) >= (12 if seed else layers * blocks - layers)
    assert all(count >= accelerator.FEWEST_ROWS and nbytes == page for count, nbytes in rows)
    assert sum(count for count, _ in rows) + sum(items) >= layers * blocks
    copier.close()


def test_a_driver_that_takes_its_time_holds_no_step(
    accelerated: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call of it may wait for room in its stream, behind the forward pass."""
    has_room = threading.Event()
    monkeypatch.setattr(ops, "swap_blocks_batch", lambda *_: has_room.wait(60))
    pages = pages_of(caches(1), placements(["layer0"]), BLOCKS)
    copier = Copier(torch.zeros(1 << 16, dtype=torch.uint8), [GroupPages(pages)])
    copier.store(Copy((1,), (0,)))
    copier.load(Copy((2,), (PAGE,)))
    assert copier.stores.completed() == copier.loads.completed() == []
    has_room.set()
    assert [one.nbytes for queue in copier.close() for one in queue] == [PAGE, PAGE]


@pytest.mark.parametrize("seed", range(20))
def test_a_batch_copies_the_same_in_any_runs(seed: int) -> None:
    """Items at even distances are one call; others, and what is between, one each."""
    rng = np.random.default_rng(seed)
    places = []  # blocks, layers, distances between them
    for blocks, layers, nbytes in rng.integers(1, 9, (3, 3)).tolist():
        grid = np.arange(blocks)[:, None] * (layers * 16) + np.arange(layers) * 16
        other = rng.permutation(blocks)[:, None] * 16 + np.arange(layers) * (16 * blocks)
        places.append((grid.ravel(), other.ravel(), np.full(grid.size, nbytes)))
    ends = np.cumsum([0] + [16 * len(sizes) for *_, sizes in places])
    sources, targets, sizes = (
        np.concatenate([one[way] + (end if way < 2 else 0)
                        for one, end in zip(places, ends, strict=False)])
        for way in range(3)
    )  # fmt: skip
    before = rng.integers(0, 256, (2, ends[-1]), dtype=np.uint8)
    expected = before.copy()
    for source, target, nbytes in zip(sources, targets, sizes, strict=True):
        expected[1, target : target + nbytes] = before[0, source : source + nbytes]
    memory = before.copy()
    begin = memory.ctypes.data
    batch = Batch(begin + sources, begin + ends[-1] + targets, sizes)
    for one in (batch, batch.in_order()):
        for most in (1, 2, 3, len(sizes)):
            runs = one.runs(most)
            items = [item for run in runs for item in range(run.begin, run.end)]
            assert items == [*range(len(sizes))]
            assert all(run.end - run.begin <= most for run in runs)
            memory[:] = before
            for run in runs:
                one.copy_run(run)
            assert np.array_equal(memory, expected)


def test_layers_of_blocks_in_order_are_a_call_each() -> None:
    blocks, layers, nbytes = 32, 4, 64
    arena = (np.arange(blocks)[:, None] * layers + np.arange(layers)).ravel() * nbytes
    device = (np.arange(blocks)[:, None] + np.array([900, 700, 300, 0])).ravel() * nbytes
    sizes = np.full(arena.size, nbytes)
    for batch in (Batch(arena, device, sizes), Batch(device, arena, sizes)):
        assert len(batch.in_order().runs(1000)) == layers


def test_no_item_crosses_the_end_of_a_locked_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator, "CHUNK_BYTES", 100)
    for begin, sources, targets in (
        (1000, [1095, 1190, 7], [5, 305, 1299]),
        (0, [1, 2], [500, 900]),
    ):
        sizes = np.array([10, 210, 3][: len(sources)], dtype=np.int64)
        whole = Batch(np.array(sources), np.array(targets), sizes)
        cut = split(whole, begin, begin + 400)
        assert cut.nbytes == whole.nbytes
        items = zip(cut.sources.tolist(), cut.targets.tolist(), cut.sizes.tolist(), strict=True)
        moved = set()
        for source, target, size in items:
            for one in (source, target):
                assert not begin <= one < begin + 400 or (one - begin) % 100 + size <= 100
            moved |= {(source + i, target + i) for i in range(size)}
        want = zip(sources, targets, sizes.tolist(), strict=True)
        assert moved == {(s + i, t + i) for s, t, size in want for i in range(size)}


def test_small_items_are_read_by_a_kernel_only_from_locked_memory(
    accelerated: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As far as the system locks it; the driver copies the rest."""
    by: list[str] = []
    monkeypatch.setattr(ops, "swap_blocks_batch", lambda *_: by.append("driver"))
    monkeypatch.setattr(accelerator.kernels, "move", lambda *_: by.append("kernel"))
    monkeypatch.setattr(AcceleratorDevice, "send", lambda self, values: values)  # none to lock
    monkeypatch.setattr(accelerator, "CHUNK_BYTES", 4096)
    room = iter([True, True, False])
    monkeypatch.setattr(driver, "host_register", lambda *_: next(room))
    memory = torch.zeros(5 * 4096, dtype=torch.uint8)
    device = devices.device_of(CPU)
    device.lock(memory, memory.numel)
    device.wait_locked()
    target = np.zeros(1, dtype=np.int64)
    for at in (0, 2 * 4096 - 64, 2 * 4096 - 63, 3 * 4096):
        device.move(np.array([memory.data_ptr() + at]), target, Piece(2, 16, 48))
    assert by == ["kernel", "kernel", "driver", "driver"]
    device.unlock(memory)
    assert accelerated == ["-", "-"], "each chunk that was locked"


def test_only_what_is_populated_is_locked(
    accelerated: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accelerator, "CHUNK_BYTES", 4096)
    monkeypatch.setattr(accelerator, "_IDLE_S", 0.001)
    populated = [4096 + 5]
    memory = torch.zeros(3 * 4096 + 100, dtype=torch.uint8)
    device = devices.device_of(CPU)
    device.lock(memory, lambda: populated[0])
    device.wait_locked()
    assert accelerated == ["+4096"]
    populated[0] = memory.numel()
    wait_until(lambda: len(accelerated) == 4)
    assert accelerated == ["+4096"] * 3 + ["+100"]
    device.unlock(memory)
    assert accelerated[4:] == ["-"] * 4


def test_locking_neither_holds_a_start_nor_stalls_the_neighbours(
    accelerated: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    """A start waits for so long and no longer. Once the engine serves, the rest and what the owner
    adds is locked in pieces with pauses, one process of the node at a time; how long it took is
    told."""
    caplog.set_level("INFO", "vllm.kvrecall")
    monkeypatch.setattr(accelerator, "CHUNK_BYTES", 4096)
    monkeypatch.setattr(accelerator, "DRIVER", tmp_path)
    monkeypatch.setattr(accelerator, "_TURN_S", 1e9)
    serves, now = threading.Event(), [0.0]
    acts: list[str] = []
    neighbour = os.open(tmp_path, os.O_RDONLY)

    def register(at: int, nbytes: int) -> bool:
        with pytest.raises(BlockingIOError):
            fcntl.flock(neighbour, fcntl.LOCK_EX | fcntl.LOCK_NB)
        acts.append("lock")
        now[0] += 2.0
        if len(acts) == 2:
            serves.wait()
        return True

    def pause(lock: accelerator.PageLock, seconds: float) -> None:
        if seconds == 1.0:  # nothing more is populated
            fcntl.flock(neighbour, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.flock(neighbour, fcntl.LOCK_UN)
            populated[0] = memory.numel()
            return
        with pytest.raises(BlockingIOError):
            fcntl.flock(neighbour, fcntl.LOCK_EX | fcntl.LOCK_NB)
        acts.append(f"pause {seconds}")

    monkeypatch.setattr(driver, "host_register", register)
    monkeypatch.setattr(accelerator.PageLock, "_pause", pause)
    monkeypatch.setattr(accelerator, "monotonic", lambda: now[0])
    memory, populated = torch.zeros(5 * 4096, dtype=torch.uint8), [3 * 4096]
    device = devices.device_of(CPU)
    device.lock(memory, lambda: populated[0])
    wait_until(lambda: len(acts) == 2)
    device.wait_locked(0.01)
    assert "page-locked. The engine serves while the rest is locked" in caplog.text
    serves.set()
    wait_until(lambda: "page-locked, in 10.0 s" in caplog.text)
    assert acts == ["lock", *["lock", "pause 18.0"] * 4]
    device.unlock(memory)
    os.close(neighbour)


def test_the_numa_node_of_a_device_is_what_the_kernel_says(
    tmp_path: Path, accelerated: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It writes -1 for none."""
    for name, text in (("0000:3b:00.0", "1\n"), ("0000:3c:00.0", "-1\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "numa_node").write_text(text)
    found = [accelerator.numa_node_at(f"0000:{bus}:00.0", tmp_path) for bus in ("3b", "3c", "3d")]
    assert found == [1, None, None]
    assert devices.device_of(CPU).numa_node() is None, "no CUDA device"
    monkeypatch.setattr(accelerator.driver, "pci_address", lambda index: f"0000:3{index}:00.0")
    monkeypatch.setattr(accelerator, "numa_node_at", lambda address: {"0000:30:00.0": 1}[address])
    assert AcceleratorDevice(torch.device("cuda", 0)).numa_node() == 1


def test_a_driver_that_fails_leaves_slower_copies(
    accelerated: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The start of an engine waits for its locks, and must not wait for one that never comes."""

    def fail(*_: int) -> bool:
        raise OSError("no such function")

    monkeypatch.setattr(driver, "host_register", fail)
    memory = torch.zeros(1 << 16, dtype=torch.uint8)
    device = devices.device_of(CPU)
    device.lock(memory, memory.numel)
    device.wait_locked()
    assert "host memory is not page-locked: no such function; copies are slower" in caplog.text
    device.unlock(memory)
    assert accelerated == []


def test_an_arena_is_locked_before_it_is_needed(
    accelerated: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And the log says whether it is near the device."""
    arena = Arena.create(1 << 20)
    arena.wait_ready()
    pages = LayerPages("layer", torch.zeros(BLOCKS, PAGE, dtype=torch.uint8), "")
    mapping = ArenaMapping([GroupPages((pages,))])
    caplog.set_level("INFO", "vllm.kvrecall")
    handle = replace(arena.handle(), boot="a service")
    mapping.prepare(handle, 7)
    devices.device_of(CPU).wait_locked()
    assert accelerated == [f"+{1 << 20}"]
    if arena.node() is not None:
        assert "device at NUMA node 7" in caplog.text
        assert "numactl --preferred=7" in caplog.text
    mapping.close()
    assert accelerated[1:] == ["-"], "unlocked before it is unmapped"
    arena.close()


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
    whole: dict[str, torch.Tensor], sharing: Sharing, stages: int = 1, by_token: bool = True
) -> list[GroupPages]:
    """What the ranks of an engine of these sizes hold of a model's KV ``[blocks, heads, tokens,
    width]``, one after the other: of each of a stage's layers its heads, and of these the tokens of
    its turns. As ``config.record_places`` places them, which asks vLLM for the sizes."""
    names = list(whole)
    per_stage = len(names) // stages
    ranks, before = [], 0
    for stage in range(stages):
        for rank in range(sharing.ranks):
            own = {}
            for name in names[stage * per_stage : (stage + 1) * per_stage]:
                _, heads, tokens, _ = whole[name].shape
                each = heads * sharing.same // sharing.ranks
                first = rank // sharing.same * each
                turns = torch.arange(tokens) // sharing.run % sharing.contexts
                mine = turns == rank % sharing.contexts
                own[name] = whole[name][:, first : first + each, mine].contiguous()
            sizes = [part[0].nbytes for part in own.values()]
            at = {
                name: LayerPlacement(size, size, tokens=own[name].shape[2] if by_token else 0)
                for name, size in zip(own, sizes, strict=True)
            }
            group = GroupPages(
                pages_of(own, at, BLOCKS, contexts=sharing.contexts), sharing=sharing
            )
            assert all(page.heads for page in group.pages)
            pieces = [group.piece_bytes(page) for page in group.pages]
            places = places_of(sizes, pieces, before, rank, sharing)
            ranks.append(replace(group, starts=tuple(places)))
        before += sum(sizes) * sharing.parts
    return ranks


def model_kv(layers: int, heads: int, tokens: int = TOKENS, width: int = WIDTH) -> Any:
    shape = BLOCKS, heads, tokens, width
    return {f"layer{i}": torch.randn(shape).bfloat16() for i in range(layers)}


def crossed(whole: dict[str, torch.Tensor], sharing: Sharing, stages: int = 1) -> None:
    """What one rank writes, the ranks of an engine of these sizes read, and back, to the byte."""
    slot = sum(one[0].nbytes for one in whole.values())
    one, many = torch.zeros(3 * slot, dtype=torch.uint8), torch.zeros(3 * slot, dtype=torch.uint8)
    copy, rows = Copy((1, 5, 3), (0, slot, 2 * slot)), [1, 5, 3]
    (single,) = ranks_of(whole, Sharing())
    Copier(one, [single]).store(copy)
    full = ranks_of(whole, sharing, stages)
    written = 0
    for number, rank in enumerate(full):
        if sharing.writes(number % sharing.ranks):
            written += Copier(many, [rank]).store(copy)
    assert written == 3 * slot, "each byte once"
    assert bool(one.any())
    assert torch.equal(one, many)
    empty = {name: torch.zeros_like(layer) for name, layer in whole.items()}
    (into,) = ranks_of(empty, Sharing())
    Copier(many, [into]).load(copy)
    for page, before in zip(into.pages, single.pages, strict=True):
        assert torch.equal(page.rows[rows], before.rows[rows])
    for rank, want in zip(ranks_of(empty, sharing, stages), full, strict=True):
        Copier(one, [rank]).load(copy)
        for number, (page, before) in enumerate(zip(rank.pages, want.pages, strict=True)):
            assert torch.equal(page.rows[rows], before.rows[rows])
            in_record = rank.read(number, one[slot : 2 * slot].numpy())
            assert np.array_equal(in_record, before.rows[5].numpy()), "as an audit reads it"


@given(
    heads=st.sampled_from([1, 2, 3, 8]), each=st.integers(1, 2), copies=st.integers(1, 3),
    contexts=st.sampled_from([1, 2, 3, 4, 8]), run=st.sampled_from([1, 2, 3, 5, 16]),
    turns=st.integers(2, 4), width=st.integers(2, 9), layers=st.integers(1, 3),
    stages=st.sampled_from([1, 2, 4]),
)  # fmt: skip
@settings(max_examples=50, deadline=None)
def test_a_record_is_the_same_whoever_holds_its_heads_and_tokens(
    heads: int, each: int, copies: int, contexts: int, run: int, turns: int, width: int,
    layers: int, stages: int,
) -> None:  # fmt: skip
    """Whatever the parallel sizes. ``contexts``: ranks that take turns in a block's tokens;
    ``copies``: ranks with the same."""
    sharing = Sharing(heads * contexts * copies, contexts * copies, contexts, run)
    whole = model_kv(layers * stages, heads * each, contexts * run * turns, width)
    crossed(whole, sharing, stages)
    (single,) = ranks_of(whole, Sharing())
    layouts = {page.layout for rank in ranks_of(whole, sharing) for page in rank.pages}
    assert layouts == {page.layout for page in single.pages}, "one namespace"


def test_tokens_that_a_kernel_packs_are_not_taken_apart() -> None:
    """Then each rank's page is whole in the record, whose layout says so."""
    whole = model_kv(2, 1, 128)
    (single,) = ranks_of(whole, Sharing(), by_token=False)
    sharing = Sharing(2, 2, 2, 1)
    first, second = ranks_of(whole, sharing, by_token=False)
    nbytes = first.pages[0].page_bytes
    assert (first.places, second.places) == ((0, 2 * nbytes), (nbytes, 3 * nbytes))
    assert first.pages[0].layout != single.pages[0].layout
    record = torch.zeros(4 * nbytes, dtype=torch.uint8)
    for rank in (first, second):
        Copier(record, [rank]).store(Copy((4,), (0,)))
        for number, page in enumerate(rank.pages):
            assert np.array_equal(rank.read(number, record.numpy()), page.rows[4].numpy())


@pytest.mark.parametrize(
    ("tensor", "prefill", "contexts"),
    [(4, 1, 1), (4, 1, 2), (4, 1, 4), (2, 2, 1), (2, 2, 2), (2, 2, 4), (1, 2, 2), (4, 2, 2)],
)
def test_each_part_has_one_writer(tensor: int, prefill: int, contexts: int) -> None:
    """Of latent attention. vLLM's groups that share tokens (``parallel_state``): ranks by prefill
    context, then tensor parallelism, transposed, in groups of ``contexts``."""
    parallel = SimpleNamespace(
        tensor_parallel_size=tensor, prefill_context_parallel_size=prefill,
        decode_context_parallel_size=contexts, cp_kv_cache_interleave_size=4,
    )  # fmt: skip
    spec = MLAAttentionSpec(
        block_size=16, num_kv_heads=1, head_size=8, dtype=torch.bfloat16, max_tp_shards=1
    )
    groups = [KVCacheGroupSpec(["layer"], spec)]
    counted = tensor if contexts == 1 else 1
    cfg = SimpleNamespace(kv_cache_groups=groups, kv_tp_replicas=counted)
    sharing = sharing_of(SimpleNamespace(parallel_config=parallel), cfg)
    assert sharing.parts == contexts
    writers = [rank for rank in range(sharing.ranks) if sharing.writes(rank)]
    assert [sharing.part_of(rank) for rank in writers] == list(range(contexts))
    ranks = torch.arange(tensor * prefill).view(prefill, tensor)
    for group in ranks.T.reshape(-1, contexts).tolist():
        stage = [rank % tensor * prefill + rank // tensor for rank in group]
        assert [sharing.part_of(rank) for rank in stage] == list(range(contexts))


@pytest.mark.parametrize("run", [1, 4, 16])
@pytest.mark.parametrize(
    ("latent", "tensor", "contexts"),
    [(True, 2, 2), (True, 4, 2), (True, 4, 4), (False, 4, 2), (False, 8, 4)],
)
def test_records_are_ordered_as_vllms_own_offloading_orders_them(
    latent: bool, tensor: int, contexts: int, run: int
) -> None:
    """Of vLLM's specs and views, byte by byte; its map of bytes is made independently."""
    plain = {"block_size": 16, "head_size": 8, "dtype": torch.bfloat16}
    if latent:
        spec: Any = MLAAttentionSpec(num_kv_heads=1, max_tp_shards=1, **plain)
    else:
        spec = FullAttentionSpec(num_kv_heads=1, **plain)
    page = spec.page_size_bytes
    place = KVCacheTensor(BLOCKS * page, ["layer"], BLOCKS * page, page)
    raw = torch.zeros(BLOCKS * page, dtype=torch.int8)
    (cache,) = create_kv_cache_views(raw, spec, BLOCKS, KVCacheLayout.LBHNC, place)
    groups = [KVCacheGroupSpec(["layer"], spec)]
    cfg = KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[place], kv_cache_groups=groups)
    named = SimpleNamespace(attn_backend=SimpleNamespace(get_name=lambda: "FLASH_ATTN"))
    parallel = SimpleNamespace(
        tensor_parallel_size=tensor, prefill_context_parallel_size=1, world_size=tensor,
        decode_context_parallel_size=contexts, cp_kv_cache_interleave_size=run,
    )  # fmt: skip
    engine: Any = SimpleNamespace(
        parallel_config=parallel,
        model_config=SimpleNamespace(get_total_num_kv_heads=lambda: 1 if latent else 2),
        compilation_config=SimpleNamespace(static_forward_context={"layer": named}),
    )
    sharing = sharing_of(engine, cfg)
    (placed,) = layer_placements(cfg, engine)
    pages = pages_of({"layer": cache}, placed, BLOCKS, contexts=contexts)
    assert kv_groups(cfg, contexts)[0].block_size == 16 * contexts
    group = GroupPages(pages, sharing=sharing)
    for rank in range(tensor):
        pieces = [group.piece_bytes(page) for page in pages]
        (start,) = places_of([page], pieces, 0, rank, sharing)
        runs = runs_of(replace(group, starts=(start,)))
        ours = {
            run.address - raw.data_ptr() + i: run.at + i for run in runs for i in range(run.nbytes)
        }
        parallel.rank = rank
        theirs = derive_canonical_mappings(engine, cfg, {"layer": cache})["layer"]
        assert ours == {
            one.local_offset + f * one.local_stride + i:
            one.canonical_offset + f * one.canonical_stride + i
            for one in theirs.runs for f in range(one.num_fragments)
            for i in range(one.fragment_size)
        }  # fmt: skip
        if latent:  # of two heads vLLM's connectors are not told which ranks have the same
            assert sharing.parts * page == theirs.canonical_page_size_bytes
            assert sharing.writes(rank) == (theirs.writer_index == 0)


def test_interleaved_heads_are_not_taken_for_separate_ones() -> None:
    tokens_first = torch.randn(BLOCKS, TOKENS, HEADS, WIDTH).bfloat16().transpose(1, 2)
    (page,) = pages_of({"layer0": tokens_first}, placements(["layer0"]), BLOCKS)
    assert page.heads == 0


def test_runs_are_one_only_if_they_follow_each_other_in_every_block() -> None:
    memory = torch.zeros(1024, dtype=torch.uint8)

    def runs(*rows: torch.Tensor, sharing: Sharing = ALONE) -> list[tuple[int, int, int]]:
        pages = tuple(LayerPages(f"{number}", row, "") for number, row in enumerate(rows))
        return [(x.stride, x.at, x.nbytes) for x in runs_of(GroupPages(pages, sharing=sharing))]

    first = memory.as_strided((4, 16), (32, 1))
    assert runs(first, memory.as_strided((4, 16), (32, 1), 16)) == [(32, 0, 32)]
    assert runs(first, memory.as_strided((4, 16), (48, 1), 16)) == [(32, 0, 16), (48, 16, 16)]
    gap = memory.as_strided((4, 2, 8), (32, 16, 1))  # also where ranks take turns in other pages
    assert runs(gap, sharing=Sharing(contexts=2)) == [(32, 0, 8), (32, 8, 8)]
