"""Decode steps as full CUDA graphs, replayed by record: the launches of a capture are recorded, and
for a later step the metadata is built and they are launched again, with their old tensors and
scalars. What comes out must be what a world without graphs computes, to the bit, whose blocks all
stay on the device.

Run by test_kernels.py in a process of its own: Triton decides when it is first imported whether
kernels are interpreted.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import numpy as np
import pytest
import torch

from engines.vllm.attention.interpreted import InterpretedDevice
from kvrecall.attention.kernels.oracle import attention
from kvrecall.attention.selection import slots_of, split_of
from kvrecall.attention.settings import RetrievalSettings
from kvrecall.engines.vllm import device as devices
from kvrecall.engines.vllm.attention import cuda
from kvrecall.engines.vllm.attention.backend import RetrievalAttention
from kvrecall.engines.vllm.attention.base import AttentionParameters
from kvrecall.engines.vllm.attention.cuda import DeviceBuilder
from kvrecall.engines.vllm.attention.offloaded import Records
from kvrecall.engines.vllm.compat import runner
from kvrecall.engines.vllm.wire import Arrival, Departure, OffloadOrders
from kvrecall.errors import EngineError
from kvrecall_lab.engines.counting import recorded

SIZE, HEADS, KV_HEADS, DIM, LAYERS, DENSE = 32, 4, 2, 16, 3, 1
LONGEST, REQUESTS, BLOCKS = 320, 8, 100
SIZES = (1, 2, 4, 8)
"""Of graphs, in requests."""

SETTINGS = RetrievalSettings(
    init_tokens=32, local_tokens=24, topk_share=0.3, dense_boundary=128, offload_boundary=128,
    digest_tokens=16, dense_layers=DENSE, gate=False, least_blocks=1, cache_share=0.0,
)  # fmt: skip
CPU = torch.device("cpu")


class Attention(RetrievalAttention):
    """A layer, whose dense attention gives zeros."""

    sliding_window = None
    num_heads = HEADS

    def __init__(self) -> None:
        self._settings = SETTINGS

    def _parameters(self, layer: Any) -> AttentionParameters:
        return AttentionParameters(DIM**-0.5)

    def _dense(self, *args: Any) -> torch.Tensor:
        return args[6].zero_()  # type: ignore[no-any-return]


class DenseBuilder:
    """vLLM's."""

    def __init__(self, spec: Any, names: list[str], vllm_config: Any, device: Any) -> None:
        self.vllm_config, self.device = vllm_config, device

    def build(self, prefix: int, common: Any, fast_build: bool = False) -> Any:
        return SimpleNamespace(retrieval=None)

    def build_for_cudagraph_capture(self, common: Any) -> Any:
        return self.build(0, common)


class Builder(DeviceBuilder, DenseBuilder):  # type: ignore[misc]
    def part(self, common: Any, rows: Any, some: Any, table: Any = None) -> Any:
        starts = common.query_start_loc_cpu.tolist()
        return torch.cat([torch.arange(*starts[at : at + 2]) for at in some]), None


@dataclass
class Request:
    """``tokens``: how many are computed; ``prompt``: of its prompt. ``blocks``: by whether the
    world replays. There blocks from the second on have left, for records at ``offsets``; they are
    recalled into ``slots``."""

    seed: int
    prompt: int
    tokens: int
    blocks: dict[bool, list[int]]
    offsets: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    key: str = ""


class World:
    """Layers with caches, their builder, and the tensors that vLLM keeps for a step. ``replays``:
    whether steps are graphs where they may be."""

    def __init__(self, replays: bool) -> None:
        spec = SimpleNamespace(
            block_size=SIZE, num_kv_heads=KV_HEADS, head_size=DIM, dtype=torch.float32,
            page_size_bytes=2 * SIZE * KV_HEADS * DIM * 4,
        )  # fmt: skip
        names = [f"layers.{at}" for at in range(LAYERS)]
        self.impls = [Attention() for _ in names]
        layers = {
            name: SimpleNamespace(impl=impl, get_kv_cache_spec=lambda _: spec)
            for name, impl in zip(names, self.impls, strict=True)
        }
        vllm_config = SimpleNamespace(
            compilation_config=SimpleNamespace(
                static_forward_context=layers, cudagraph_capture_sizes=list(SIZES)
            ),
            model_config=SimpleNamespace(
                max_model_len=LONGEST,
                hf_text_config=None,
                get_total_num_kv_heads=lambda: KV_HEADS,
                get_num_attention_heads=lambda _: HEADS,
            ),
            scheduler_config=SimpleNamespace(max_num_seqs=REQUESTS),
            kv_transfer_config=SimpleNamespace(
                kv_connector="RecallConnector", kv_connector_extra_config={"host_size": "1GiB"}
            ),
            parallel_config=SimpleNamespace(pipeline_parallel_size=1),
            speculative_config=None,
        )
        self.replays = replays
        self.builder: Any = Builder(spec, names, vllm_config, CPU)
        size = BLOCKS, KV_HEADS, SIZE, 2 * DIM
        self.caches = [torch.full(size, float("nan")) for _ in names]
        self.table = torch.zeros(REQUESTS, LONGEST // SIZE, dtype=torch.int32)
        self.query = torch.zeros(LAYERS, REQUESTS, HEADS, DIM)
        self.output = torch.zeros(LAYERS, REQUESTS, HEADS, DIM)
        self.graphs: dict[int, list[list[Any]]] = {}
        self.replayed = self.replayed_off = self.sparse = 0
        self.batches: set[int] = set()
        self.group = self.builder._group
        caches = dict(zip(names, self.caches, strict=True))
        self.pages = {name: one.view(BLOCKS, -1).view(torch.uint8) for name, one in caches.items()}
        self.pages |= self.group.register(caches)
        sizes = [one[0].numel() for one in self.pages.values()]
        places = dict(zip(self.pages, accumulate(sizes, initial=0), strict=False))
        self.record = sum(sizes)
        self.records = Records(np.zeros(100 * self.record, np.uint8), places)
        if replays:
            for count in reversed(SIZES):
                self.capture(count)

    def common(self, counts: list[int], requests: list[Request], padded: int) -> Any:
        told = [*counts, *[0] * (padded - len(counts))]
        starts = torch.tensor([0, *accumulate(told)], dtype=torch.int32)
        lengths = [one.tokens for one in requests] + [7] * (padded - len(counts))
        prefills = [one.tokens <= one.prompt for one in requests]
        return SimpleNamespace(
            query_start_loc_cpu=starts,
            seq_lens_cpu_upper_bound=torch.tensor(lengths),
            is_prefilling=torch.tensor(prefills, dtype=torch.bool),  # as V2 has it: not padded
            num_reqs=padded,
            num_actual_tokens=sum(counts),
            max_query_len=max(told),
            block_table_tensor=self.table[:padded],
        )

    def capture(self, count: int) -> None:
        """Runs each layer on padding, and records what it launches."""
        metadata = self.builder.build_for_cudagraph_capture(self.common([], [], count))
        self.graphs[count] = []
        for layer in range(LAYERS):
            with recorded() as record:
                self.forward(layer, metadata, count)
            self.graphs[count].append(record)

    def forward(self, layer: int, metadata: Any, tokens: int) -> None:
        query, output = self.query[layer, :tokens], self.output[layer, :tokens]
        self.impls[layer].forward(
            None, query, query, query, self.caches[layer], metadata, output
        )  # fmt: skip

    def store(self, ids: list[int], offsets: list[int]) -> None:
        """Writes blocks' records; nothing may read the blocks any more."""
        self.group.before_store(ids)
        for name, rows in self.pages.items():
            for id, offset in zip(ids, offsets, strict=True):
                page, begin = rows[id].flatten().numpy(), offset + self.records.layers[name]
                self.records.memory[begin : begin + len(page)] = page

    def step(
        self,
        requests: list[Request],
        counts: list[int],
        veto: bool,
        orders: OffloadOrders | None = None,
        fails: bool = False,
    ) -> bool:
        """Computes the last ``counts`` tokens of requests; whether a graph was replayed. ``fails``:
        the step ends when its metadata is built."""
        assert not self.group.take(orders, self.records)
        for order in orders.departures if orders else ():
            for impl, cache in zip(self.impls, self.caches, strict=True):
                cache[list(order.block_ids)] = float("nan")
                if impl.sparse_layer is not None:
                    rows = impl.sparse_layer.store.rows[..., : 2 * DIM + 4]  # without padding
                    rows[:, list(order.block_ids)] = 77
        self.table.zero_()
        ids = np.zeros((REQUESTS, self.table.shape[1]), dtype=np.int32)
        for row, one in zip(ids, requests, strict=False):
            row[: len(one.blocks[self.replays])] = one.blocks[self.replays]
        self.table[: len(requests)] = torch.from_numpy(ids[: len(requests)])
        padded = min((size for size in SIZES if size >= len(requests)), default=0)
        may = bool(self.graphs) and max(counts) == 1 and not veto
        graph = may and not runner.is_hindered(len(requests))
        rows = np.arange(len(requests))
        prompts = np.array([one.prompt for one in requests], dtype=np.int32)
        runner.step_blocks[self.builder._layer_names[0]] = runner.BatchBlocks(
            ids, rows, prompts, graph
        )
        common = self.common(counts, requests, padded if graph else len(requests))
        self.output.fill_(float("nan"))
        before = self.builder._activity.steps_sparse
        metadata = self.builder.build(0, common)
        if fails:
            return graph
        self.sparse += self.builder._activity.steps_sparse - before
        if not graph:
            held = self.query, self.output
            tokens = sum(counts)
            if tokens > REQUESTS:
                self.query = self.query[:, :1].expand(-1, tokens, -1, -1)
                self.output = torch.zeros(self.query.shape)
            for layer in range(LAYERS):
                self.write(layer, requests, counts)
                self.forward(layer, metadata, tokens)
            self.query, self.output = held
            self.has_work = metadata.retrieval is not None
            return False
        self.replayed += 1
        self.batches.add(len(requests))
        self.replayed_off += any(one.offsets for one in requests)
        for layer, record in enumerate(self.graphs[padded]):
            self.write(layer, requests, counts)
            for again in record:
                again()
        assert not self.output[:, len(requests) : padded].any(), "padding is zeros"
        return True

    def write(self, layer: int, requests: list[Request], counts: list[int]) -> None:
        for one, count in zip(requests, counts, strict=True):
            at = torch.arange(one.tokens - count, one.tokens)
            blocks = torch.tensor(one.blocks[self.replays])[at // SIZE]
            self.caches[layer][blocks, :, at % SIZE] = kv(one.seed, layer)[at]


def kv(seed: int, layer: int) -> torch.Tensor:
    """Of all tokens that the request may have: ``[tokens, kv_heads, 2 * dim]``."""
    made = torch.Generator().manual_seed(seed * LAYERS + layer)
    return torch.randn(LONGEST, KV_HEADS, 2 * DIM, generator=made)


@pytest.fixture(autouse=True)
def _as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(devices.FORMS, "cpu", InterpretedDevice)
    monkeypatch.setattr("kvrecall.engines.vllm.attention.backend.active_settings", lambda: SETTINGS)
    monkeypatch.setattr(cuda, "active_settings", lambda: SETTINGS)
    monkeypatch.setattr(runner, "follow_blocks", lambda _: None)
    monkeypatch.setattr(runner, "decides_graphs", lambda _: True)
    monkeypatch.setattr(runner, "install", lambda *_: None)
    monkeypatch.setattr(runner, "_graph_users", WeakSet())
    monkeypatch.setattr(cuda, "SEEN_EVERY_REPLAYS", 8)
    devices.device_of.cache_clear()
    yield
    devices.device_of.cache_clear()


class Both:
    """The same requests in a world that replays and in one that does not."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.free = {True: list(range(1, BLOCKS)), False: list(range(1, BLOCKS))}
        self.chance.shuffle(self.free[True])
        self.orders = OffloadOrders([], {}, [])
        self.requests: list[Request] = []
        self.ours, self.plain = World(True), World(False)
        self.made = 0

    def begin(self, prompt: int, remainder: int = 0, seed: int = 0) -> Request:
        """A request whose prompt is computed at once, but for a ``remainder``."""
        self.made += 1
        one = Request(seed or self.made, prompt, 0, {True: [], False: []}, key=f"{self.made}")
        self._prefill(one, prompt - remainder)
        return one

    def _prefill(self, one: Request, tokens: int) -> None:
        """Beside those that decode."""
        self.requests.append(one)
        self.step(tokens)

    def end(self, at: int) -> Request:
        """Its blocks are the next ones to be taken."""
        one = self.requests.pop(at)
        for world, free in self.free.items():
            free += [block for block in one.blocks[world] if block]
            one.blocks[world] = []
        if one.offsets:
            self.orders.ended.append(one.key)
            self.free[True] += one.slots
            one.offsets, one.slots = [], []
        return one

    def leave(self, at: int) -> None:
        """Middle blocks that are on the device leave it before the next step, with no more slots
        than it must have."""
        one = self.requests[at]
        split, gone = split_of(one.tokens, SIZE, SETTINGS), len(one.offsets)
        here = one.blocks[True][1 + gone : split.local]
        offsets = [(one.seed * 10 + gone + at) * self.ours.record for at in range(len(here))]
        self.ours.store(here, offsets)
        one.blocks[True][1 + gone : split.local] = [0] * len(here)
        one.offsets += offsets
        self._order(one, here, offsets)
        self.free[True] += here

    def _order(self, one: Request, here: list[int], offsets: list[int]) -> None:
        split = split_of(one.tokens, SIZE, SETTINGS)
        least = slots_of(split, len(one.offsets), SETTINGS)[0]
        new = [self.free[True].pop() for _ in range(least - len(one.slots))]
        if here or new:
            one.slots += new
            order = Departure(one.key, 1, tuple(here), tuple(offsets), tuple(new))
            self.orders.departures.append(order)

    def arrive(self, seed: int, prompt: int) -> None:
        """A request that begins with what one like it has left in the pool, but for a token."""
        one, split = self.begin(prompt, 1, seed), split_of(prompt, SIZE, SETTINGS)
        one.offsets = [(seed * 10 + at) * self.ours.record for at in range(split.middle)]
        self.free[True] += one.blocks[True][1 : split.local]
        one.blocks[True][1 : split.local] = [0] * split.middle
        one.slots = [self.free[True].pop() for _ in range(split.chosen)]
        self.orders.arrivals.append(Arrival(one.key, 1, tuple(one.offsets), tuple(one.slots)))
        self.step()

    def preempt(self, at: int) -> None:
        """It loses its blocks; later all of it but the last token is computed again, in others."""
        one = self.end(at)
        self.step()
        count, one.tokens = one.tokens, 0
        self._prefill(one, count)

    def step(self, last: int = 1, veto: bool = False, fails: bool = False) -> None:
        """``last``: tokens of the last request. ``fails``: it does, and is taken again."""
        counts = [1] * (len(self.requests) - 1) + [last]
        for one, count in zip(self.requests, counts, strict=True):
            one.tokens += count
            for world, free in self.free.items():
                while len(one.blocks[world]) * SIZE < one.tokens:
                    one.blocks[world].append(free.pop())
            if one.offsets:
                self._order(one, [], [])
        query = torch.randn(LAYERS, len(self.requests), HEADS, DIM)
        for world in (self.ours, self.plain):
            world.query[:, : len(self.requests)] = query
        for one in self.requests:
            if one.offsets:
                self.orders.rows[one.blocks[True][(one.tokens - 1) // SIZE]] = one.key
        orders, self.orders = self.orders, OffloadOrders([], {}, [])
        if fails:
            self.ours.step(self.requests, counts, veto, orders, fails=True)
            orders = OffloadOrders([], orders.rows, [])
        replayed = self.ours.step(self.requests, counts, veto, orders)
        self.plain.step(self.requests, counts, veto)
        if last > 1:
            return
        for at, one in enumerate(self.requests):
            for layer in range(LAYERS):
                found = self.ours.output[layer, at]
                told = kv(one.seed, layer)[: one.tokens].split(DIM, -1)
                plainly = attention(query[layer, at], *told)
                has_digests = layer >= DENSE and one.tokens >= SETTINGS.dense_boundary
                if self.plain.has_work and has_digests:
                    self._compare_digests(layer, one)
                is_dense = one.tokens < SETTINGS.dense_boundary or one.tokens <= one.prompt
                if self.plain.has_work and one.tokens > one.prompt:
                    expected = self.plain.output[layer, at]
                    assert torch.equal(found, expected), (at, one.tokens)
                if not replayed:
                    continue
                if is_dense or layer < DENSE:
                    torch.testing.assert_close(found, plainly, rtol=1e-4, atol=1e-5)
                else:
                    assert not torch.allclose(found, plainly, rtol=1e-3), "a selection"

    def _compare_digests(self, layer: int, one: Request) -> None:
        """Of full blocks, which are chosen from many steps later."""
        gone, end = len(one.offsets), (one.tokens - 1) // SIZE  # a later step needs the last one
        ours, plain = (world.impls[layer].sparse_layer for world in (self.ours, self.plain))
        found = ours.store.rows[:, one.blocks[True][1 + gone : end]]
        if gone:
            numbers = self.ours.group._sequences[one.key].numbers
            found = torch.cat([ours._left.rows[:, numbers], found], 1)
        expected = plain.store.rows[:, one.blocks[False][1:end]]
        assert torch.equal(found, expected), ("digests", one.tokens)


def test_no_graph_is_replayed_where_blocks_off_the_device_take_the_host() -> None:
    """Nor for many requests. And if vLLM does not heed it, the step fails, as the graph would read
    other blocks."""
    both = Both(0)
    both.begin(190)
    both.leave(0)
    world, builder = both.ours, both.ours.builder
    assert not builder.hinders_graph(REQUESTS)
    assert builder.hinders_graph(cuda.GRAPH_ROWS + 1)
    both.step()
    assert not world.replayed, "it might compute its prompt"
    both.step()
    assert world.replayed == 1
    (sequence,) = world.group._sequences.values()
    for name in ("is_readable", "decodes", "is_kept"):
        setattr(sequence, name, False)
        assert builder.hinders_graph(1)
        setattr(sequence, name, True)
    sequence.is_kept = False
    builder.hinders_graph = lambda _: False
    with pytest.raises(EngineError, match="off the device"):
        both.step()


@pytest.mark.timeout(3000)
def test_replayed_steps_are_those_without_graphs_to_the_bit() -> None:
    """Through growth, padding, batches of 1 to 8, requests that become sparse, blocks that fill,
    remainders of a prompt, departure, preemption, and steps for which no graph is replayed."""
    torch.manual_seed(0)
    both = Both(0)
    both.begin(190)
    for at in range(4):  # a block fills in the second
        both.step(veto=at == 2)
    both.begin(125)
    both.begin(160, remainder=1)
    for _ in range(4):  # the second becomes sparse, and fills a block
        both.step()
    both.end(0)
    both.begin(40)
    both.begin(223)
    both.step()
    both.step()
    both.preempt(0)
    both.step()
    both.begin(30)
    both.begin(140, remainder=1)
    both.step(veto=True)
    both.step()
    for _ in range(4):
        both.end(0)
        both.step()
    ours, plain = both.ours, both.plain
    assert ours.replayed > 10
    assert {1, 3, 4, 5, 6} <= ours.batches
    assert ours.sparse == plain.sparse > 10
    told, expected = (world.builder._activity.totals() for world in (ours, plain))
    for name in ("blocks_selected", "blocks_considered", "layers_sparse"):
        assert told[name] == expected[name], name
    assert 0 <= expected["blocks_digested"] - told["blocks_digested"] < 8, "of requests' last steps"
    layers = [impl.sparse_layer for impl in ours.impls[DENSE:]]
    assert len({layer.digested for layer in layers}) == 1
    assert layers[0].digested == told["blocks_digested"]


@pytest.mark.timeout(3000)
def test_replayed_steps_off_the_device_are_those_on_it_to_the_bit() -> None:
    """Also through further blocks that leave, newcomers with the places and numbers of others,
    arrivals, preemption, steps that fail or are not replayed, and slots that are all taken."""
    torch.manual_seed(1)
    both = Both(1)
    both.begin(190)
    both.step()
    both.leave(0)
    for at in range(5):
        both.step(veto=at == 3, fails=at == 2)
    both.begin(219)
    both.leave(1)
    both.begin(40)
    for _ in range(6):  # a block fills
        both.step()
    both.leave(1)
    both.step()  # replayed: further blocks of it have left
    sequences = both.ours.group._sequences
    (first, *_), names = sequences.values(), set(sequences)
    place, numbers = first.place, set(first.numbers.tolist())
    both.end(0)
    both.begin(200)
    both.leave(2)
    both.step()
    (newcomer,) = (one for key, one in sequences.items() if key not in names)
    assert newcomer.place == place
    assert numbers & set(newcomer.numbers.tolist())
    both.step()
    both.preempt(0)
    both.leave(2)
    both.step()
    both.step()
    both.arrive(1, 190)
    for at in range(3):
        both.step(fails=at == 1)
    for prompt in (150, 30, 140, 135):
        both.begin(prompt)
    both.leave(4)
    for _ in range(3):  # at first it might compute its prompt; then one is recorded
        both.step()
    assert len(both.requests) == REQUESTS
    for _ in range(4):
        both.end(0)
        both.step(veto=len(both.requests) == 6)
    ours = both.ours
    assert ours.replayed_off > 15
    assert {2, 7, 8} <= ours.batches
    ours.group.counted(wait=True)
    told = ours.builder._activity.totals()
    assert told["blocks_hit"] > 0
    assert told["blocks_loaded"] > 100
