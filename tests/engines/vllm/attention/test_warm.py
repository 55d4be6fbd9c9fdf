"""No kernel is compiled in traffic: what a life launches has been launched at the engine's start,
as Triton tells compiled kernels apart."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kvrecall.attention.kernels import device as kernels
from kvrecall.attention.selection import slots_of, split_of
from kvrecall.attention.settings import RetrievalSettings
from kvrecall.engines.vllm import device as devices
from kvrecall.engines.vllm.attention.activity import Activity, HeatTotals
from kvrecall.engines.vllm.attention.base import AttentionParameters, KernelShape
from kvrecall.engines.vllm.attention.copies import KeptLayer, copied
from kvrecall.engines.vllm.attention.cuda import TritonKernel
from kvrecall.engines.vllm.attention.group import RetrievalGroup
from kvrecall.engines.vllm.attention.offloaded import Records, checksums_of_layer, digests_of_layer
from kvrecall.engines.vllm.attention.room import Most
from kvrecall.engines.vllm.attention.step import BatchRow, OffloadedRow, StepPlanner
from kvrecall.engines.vllm.device.base import Addresses
from kvrecall.engines.vllm.device.inline import InlineDevice
from kvrecall.engines.vllm.wire import Arrival, Departure, OffloadOrders

specialize = pytest.importorskip("triton._C.libtriton").native_specialize_impl
backend = pytest.importorskip("triton.backends.nvidia.compiler").CUDABackend

CPU = torch.device("cpu")
LAYERS = ("layers.2", "layers.3")
FP8 = torch.float8_e4m3fn
SHAPES = {
    "8B": KernelShape(8, 2, 128, 128, torch.bfloat16, ""),
    "eight bits": KernelShape(8, 2, 128, 128, torch.bfloat16, "", FP8, query=FP8),
    "one KV head, short blocks": KernelShape(7, 1, 80, 32, torch.float16, ""),
}
SINKS = AttentionParameters(1.0, 0.0, torch.zeros(8, dtype=torch.bfloat16))


class Moving(InlineDevice):
    """What it moves is moved by the kernel, which is not run."""

    def move(self, sources: Addresses, targets: Addresses, piece: kernels.Piece) -> None:
        kernels.move(torch.from_numpy(np.stack([sources, targets])), piece)


def compiled_for(name: str, args: Any, sizes: dict[str, Any]) -> tuple[Any, ...]:
    """Differs where Triton compiles anew."""
    from kvrecall.attention.kernels import triton_kernels

    function = getattr(triton_kernels, name)
    told = []
    for one, of in zip(args, function.params, strict=False):
        kinds = not of.do_not_specialize, not of.do_not_specialize_on_alignment
        told.append(specialize(backend, one, False, *kinds))
    return name, tuple(told), tuple(sorted(sizes.items()))


class Life:
    """Layers over a cache, whose sequences come, grow, leave the device and come back."""

    def __init__(
        self, kernel: TritonKernel, settings: RetrievalSettings, blocks: int, tokens_first: bool
    ) -> None:
        shape = self.shape = kernel.shape
        cache = torch.zeros(blocks, shape.kv_heads, shape.block_size, 2 * shape.head_dim)
        self.cache = cache = cache.to(shape.stored)
        if tokens_first:
            self.cache = cache = cache.transpose(1, 2).contiguous().transpose(1, 2)
        self.kernel, self.settings, activity = kernel, settings, Activity()
        self.group = RetrievalGroup(activity, HeatTotals(), kernel)
        self.layers = [kernel.layer(name, settings, activity) for name in LAYERS]
        for layer in self.layers:
            self.group.add(layer.name, layer)
        self.kept = KeptLayer(LAYERS[0], kernel.most.pages_of, activity)
        self.group.register(dict.fromkeys(LAYERS, cache))
        self.planner = StepPlanner(settings, kernel, self.group.freshness, activity)

    def step(
        self, lengths: list[int], terms: AttentionParameters, away: bool, graph: bool = False
    ) -> None:
        """The last sequence is off the device, if any is. ``graph``: it is captured."""
        heads = self.shape.heads
        table = torch.arange(1, 1 + len(self.cache) // 2, dtype=torch.int32)
        tables = table.repeat(len(lengths), 1)
        found = self.group.sequence(1) if away else None
        left = {} if found is None else {len(lengths) - 1: found}
        rows = [BatchRow(1, one, False) for one in lengths]
        step = self.planner.plan(rows, tables, left, is_graph=graph)
        assert step is not None
        output = torch.zeros(len(lengths), heads, self.shape.head_dim, dtype=self.shape.dtype)
        query = output.to(self.shape.query or self.shape.dtype)
        for layer in self.layers:
            layer.digest_step(self.cache, step)
            layer.attend(query, self.cache, step, terms, output)
        self.kept.attend(query, self.cache, step, terms, output)
        if found is not None:
            self.kept.leave(found, found.count, self.cache, None)
            row = OffloadedRow(found, slice(0, 1), tables[0], lengths[-1], False)
            copied(LAYERS[0], Activity(), row, self.cache)

    def leave(self, tokens: int, gone: int, arrives: bool) -> None:
        """Blocks leave the device, or begin off it, with digests that are damaged."""
        split = split_of(tokens, self.shape.block_size, self.settings)
        slots = tuple(range(100, 100 + slots_of(split, split.middle, self.settings)[1]))
        offsets, record = tuple(range(0, gone * 512, 512)), self.cache[0].nbytes
        memory = np.zeros(gone * 512 + 3 * record + 8, dtype=np.uint8)
        places = {LAYERS[0]: 0, LAYERS[1]: 8}
        for name in LAYERS:
            places |= {digests_of_layer(name): record, checksums_of_layer(name): 2 * record}
        order: Any = Departure("one", split.init, tuple(range(2, 2 + gone)), offsets, slots)
        if arrives:
            order = Arrival("one", split.init, offsets, slots)
        orders = OffloadOrders([] if arrives else [order], {1: "one"}, [], [order] * arrives)
        assert not self.group.take(orders, Records(memory, places))
        self.group.before_store([2, 3, 5])


@pytest.mark.parametrize("tokens_first", [False, True])
@pytest.mark.parametrize("digest", ["bounds", "mean"])
@pytest.mark.parametrize("shape", list(SHAPES))
def test_every_kernel_of_a_life_is_compiled_before_it(
    shape: str,
    digest: str,
    tokens_first: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Of both kinds of digests, caches of both layouts and of any number of blocks, batches and
    lengths, with sinks and without, on the device and off it. What takes long is told."""
    caplog.set_level("INFO", "vllm.kvrecall")
    settings = RetrievalSettings(
        digest=digest, gate=False, init_tokens=32, local_tokens=64, dense_boundary=0,
        offload_boundary=0, least_blocks=1,
    )  # fmt: skip
    seen: set[Any] = set()

    def launch(name: str, grid: Any, *args: Any, **sizes: Any) -> None:
        if name == "choose_blocks":  # garbage is no block
            args[9].zero_()
        seen.add(compiled_for(name, args, sizes))

    monkeypatch.setattr(kernels, "_launch", launch)
    monkeypatch.setitem(devices.FORMS, "cpu", Moving)
    devices.device_of.cache_clear()
    plain = AttentionParameters(1.0)
    terms = [plain, SINKS] if SHAPES[shape].heads == 8 else [plain]
    kernel = TritonKernel(SHAPES[shape], CPU, Most(rows=1, tokens=1))  # of any engine
    clock = iter(range(0, 1000, 7)).__next__
    kernel.warm(settings, True, terms, lambda: float(clock()))
    warm = set(seen)
    assert f"compiling kernels, 3 of {3 + len(terms)}" in caplog.text
    assert "kernels ready after" in caplog.text
    assert {name for name, *_ in warm} == {
        "digest_blocks", "choose_blocks", "fetch_blocks", "attend_rows", "move_words"
    }  # fmt: skip
    size = SHAPES[shape].block_size
    for blocks in (400, 417):
        life = Life(TritonKernel(SHAPES[shape], CPU), settings, blocks, tokens_first)
        for lengths in ([size * 5 + 3], [size * 30] * 3, [size * 150 + 1, 700, 900, 64 * size]):
            for one in terms:
                for graph in (False, True):
                    life.step(lengths, one, away=False, graph=graph)
        for arrives in (False, True):
            life.leave(60 * size, 40, arrives)
            life.step([700, 60 * size], terms[-1], away=True)
            life.step([60 * size + 1], plain, away=True)
            life.group.take(OffloadOrders([], {}, ["one"], []), None)
    assert seen - warm == set()
    devices.device_of.cache_clear()
