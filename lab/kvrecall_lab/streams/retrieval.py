"""An engine that decodes by retrieval on a simulated device, and whose long sequences leave it: the
real planner and block manager, the real metadata builder, layers, digests, residency and copies.

vLLM's dense attention and kvrecall's Triton kernels are replaced by kernels that are queued, do
late what the real ones do with memory, and notice bytes, digests and blocks that are not those of
their sequence. Which blocks a sequence attends to is drawn.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from ctypes import memmove
from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from vllm.config import get_current_vllm_config, set_current_vllm_config
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.core.kv_cache_utils import KVCacheConfig
from vllm.v1.kv_cache_interface import KVCacheGroupSpec, KVCacheTensor
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry
from vllm.v1.outputs import ModelRunnerOutput

from kvrecall.attention.digest import encode
from kvrecall.attention.kernels import device as kernels
from kvrecall.attention.selection import Gate
from kvrecall.attention.settings import RetrievalSettings
from kvrecall.engines.vllm import device as devices
from kvrecall.engines.vllm.attention import backend, base, cuda
from kvrecall.engines.vllm.attention.backend import RetrievalAttention
from kvrecall.engines.vllm.attention.cuda import DeviceBuilder
from kvrecall.engines.vllm.attention.offloaded import Records
from kvrecall.engines.vllm.compat import runner
from kvrecall.engines.vllm.compat import scheduler as compat
from kvrecall.engines.vllm.compat.offloadable import OffloadableSpec, OffloadManager
from kvrecall.engines.vllm.connector import offload
from kvrecall.engines.vllm.connector.offload import OffloadPlanner

from .device import Cells, LateDevice, Machine
from .engine import BLOCK, LAYERS, PAGE, TOKEN, TOKEN_S, Engine, Rank, SimulatedCache
from .engine import SimulatedConnector as RecallConnector
from .tensors import META, DeviceTensors, LateTensor, Queueing

__all__ = ["RecallConnector", "RetrievalEngine", "drawn_settings", "retrieving"]

HEADS = 2  # of keys and values
QUERIES = 4  # heads of queries
DIM = TOKEN // (HEADS * 2 * 2)
PART = PAGE // HEADS  # bytes of a head in a block
TOKEN_OF, INIT, MIDDLE, CHOSEN, BLOCKS, LENGTH, SLOTS = range(7)


def drawn_settings(chance: random.Random) -> RetrievalSettings:
    dense = chance.choice((32, 48))
    return RetrievalSettings(
        init_tokens=chance.choice((1, 16, 32)),
        local_tokens=chance.choice((1, 16, 24)),
        topk_share=chance.choice((0.1, 0.3, 0.6)),
        dense_boundary=dense,
        offload_boundary=dense + chance.choice((0, 16)),
        digest_tokens=16,
        dense_layers=chance.choice((0, 1)),
        gate=False,
        cache_share=chance.choice((0.0, 0.3, 1.0)),
        least_blocks=1,
    )


class EveryStep(int):
    """In place of ``base._SEEN_EVERY``: what was chosen is noted in every sparse step."""

    def __rmod__(self, _: int) -> int:
        return 1


@contextmanager
def retrieving(machine: Machine, settings: RetrievalSettings, patience: int) -> Iterator[None]:
    """Within ``engine.on``: layers of engines made in here decode by retrieval with these
    settings. ``patience``: as of ``connector.offload``."""
    KVCacheSpecRegistry._ensure_registered()
    KVCacheSpecRegistry.register(OffloadableSpec, OffloadManager, OffloadableSpec.__mro__[1])
    pages = Records.pages

    def read(records: Records, offsets: Any, layer: str, nbytes: int) -> Any:
        begin = records.memory.ctypes.data + records.layers[layer]
        cells = {one for at in offsets.tolist() for one in machine.cells(begin + at, nbytes)}
        machine.host(cells, set(), "the host, of records,")
        return pages(records, offsets, layer, nbytes)

    tensors = DeviceTensors(machine)
    with ExitStack() as stack:
        for module in (backend, cuda):
            stack.enter_context(patch.object(module, "active_settings", lambda _: settings))
        stack.enter_context(patch.object(runner, "follow_blocks", lambda _: None))
        stack.enter_context(patch.object(offload, "PATIENCE", patience))
        stack.enter_context(patch.object(base, "_SEEN_EVERY", EveryStep(16)))
        stack.enter_context(patch.object(Records, "pages", read))
        forms = {META.type: lambda _: LateDevice(machine, tensors)}
        stack.enter_context(patch.dict(devices.FORMS, forms))
        stack.enter_context(patch.object(kernels, "_launch", Kernels(machine).launch))
        stack.enter_context(Queueing(machine))
        yield


class DenseBuilder:
    """vLLM's builder of dense attention's metadata."""

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        self.vllm_config = vllm_config
        self.device = device

    def build(self, common_prefix_len: int, common: Any, fast_build: bool = False) -> Any:
        return SimpleNamespace(common=common)


class Builder(DeviceBuilder, DenseBuilder):  # type: ignore[misc]
    """The real one, over that."""


class DenseAttention:
    """vLLM's attention of a layer."""

    attn_type = "decoder"
    sinks = alibi_slopes = sliding_window = logits_soft_cap = None
    scale = 1.0

    def __init__(self, rank: RetrievalRank, layer: int) -> None:
        self.rank = rank
        self.layer = layer
        config = get_current_vllm_config()
        self.num_heads = config.model_config.get_num_attention_heads(config.parallel_config)

    def forward(
        self,
        layer: Any,
        query: LateTensor,
        key: Any,
        value: Any,
        kv_cache: LateTensor,
        metadata: Any,
        output: Any,
        *rest: Any,
    ) -> Any:
        """Queues a kernel that attends to all tokens of these requests."""
        common = metadata.common
        tables, lengths = common.block_table_tensor.told(), common.seq_lens.told().tolist()
        starts, places = common.query_start_loc_cpu.tolist(), query.told()[:, 0, 0].tolist()
        rows = []
        reads: Cells = set()
        for at in range(common.num_reqs):
            if starts[at] == starts[at + 1]:
                continue
            ids = tables[at, : -(-lengths[at] // BLOCK)].tolist()
            rows.append((self.rank.tokens[int(places[starts[at]])], ids, lengths[at]))
            if kv_cache.data_ptr() == self.rank.caches[self.layer].data_ptr():
                reads |= self.rank.cells(ids, [self.layer])
        bytes_of = kv_cache.plain.view(torch.uint8).numpy()

        def work() -> None:
            for name, ids, length in rows:
                told = self.rank.told(name, self.layer)
                found = bytes_of[ids].transpose(1, 0, 2, 3).reshape(HEADS, -1, TOKEN // HEADS)
                if not np.array_equal(found[:, :length], told[:, :length]):
                    self.rank.wrong(
                        f"dense attention of {name} reads other KV than its tokens have"
                    )

        self.rank.machine.computing.launch(work, reads, set(), "dense attention")
        return output


class Attention(RetrievalAttention, DenseAttention):
    """The real one, over that."""


@dataclass(slots=True)
class Choice:
    """Of a step's kernels in a layer. ``chosen``: by row, which middle blocks."""

    rank: RetrievalRank
    layer: int
    facts: list[list[int]]
    blocks: list[list[int]]
    slots: list[list[int]]
    names: list[str]
    chosen: dict[int, list[int]] = field(default_factory=dict)


class Kernels:
    """kvrecall's Triton kernels, as queued work."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._choices: dict[int, Choice] = {}
        self._ranks: list[RetrievalRank] = machine.ranks

    def launch(self, name: str, grid: tuple[int, ...], *args: Any, **sizes: Any) -> None:
        getattr(self, name)(*args, **sizes)

    def _at(self, cache: LateTensor) -> tuple[RetrievalRank, int]:
        """Whose layer's that cache is."""
        for rank in self._ranks:
            for layer, one in enumerate(rank.caches):
                if one.data_ptr() == cache.data_ptr():
                    return rank, layer
        raise AssertionError("a kernel reads a cache of no layer")

    def _queue(self, work: Any, reads: Cells, writes: Cells, what: str) -> None:
        def done() -> None:
            with torch._C._DisableTorchDispatch():
                work()

        self._machine.computing.launch(done, reads, writes, what)

    def _rows(self, coded: LateTensor, ids: Sequence[int]) -> Cells:
        """Cells of the digests of these blocks."""
        step, begin = coded.stride(1), coded.data_ptr()
        nbytes = coded.shape[0] * coded.stride(0)
        return {cell for one in ids for cell in self._machine.cells(begin + one * step, nbytes)}

    def digest_blocks(
        self, ids: LateTensor, keys: LateTensor, coded: LateTensor, *_: Any, **sizes: Any
    ) -> None:
        rank, layer = self._at(keys)
        some = [one for one in ids.told().tolist() if one >= 0]
        plain = keys.plain, coded.plain

        def work() -> None:
            plain[1][:, some] = digested(rank, plain[0][some].transpose(1, 2)).transpose(0, 1)

        if some:
            self._queue(work, rank.cells(some, [layer]), self._rows(coded, some), "digests")

    def choose_blocks(
        self,
        query: LateTensor,
        facts: LateTensor,
        blocks: LateTensor,
        coded: LateTensor,
        floats: Any,
        off: LateTensor,
        logits: Any,
        scores: Any,
        table: LateTensor,
        slots: LateTensor,
        missed: LateTensor,
        place: LateTensor,
        state: LateTensor,
        counts: LateTensor,
        *_: Any,
        RECALLS: bool,
        **sizes: Any,
    ) -> None:
        rank, layer = next(
            (one, at)
            for one in self._ranks
            for at, rows in one.digests.items()
            if rows == coded.data_ptr()
        )
        places = query.told()[:, 0, 0].tolist()
        known = [row for row in facts.told().tolist() if row[BLOCKS]]
        names = [rank.tokens[int(places[row[TOKEN_OF]])] for row in known]
        choice = Choice(rank, layer, known, blocks.told().tolist(), slots.told().tolist(), names)
        self._choices[table.data_ptr()] = choice
        reads: Cells = set()
        for row, ids in zip(known, choice.blocks, strict=False):
            middle = ids[row[INIT] : row[INIT] + row[MIDDLE]]
            reads |= self._rows(coded, [one for one in middle if one >= 0])
        for written in (table, missed, place, state, counts):
            self._machine.unknown(written)
        plain = [one.plain.numpy() for one in (table, missed, place, state, counts)]
        digests = [one.plain.numpy().view(np.uint8) for one in (coded, off)]

        def work() -> None:
            for at, (row, ids, name) in enumerate(zip(known, choice.blocks, names, strict=False)):
                init, middle, count = row[INIT], row[MIDDLE], row[CHOSEN]
                want = rank.digests_of(name, layer)
                for one in range(init, init + middle):
                    found = (
                        digests[0][:, ids[one]] if ids[one] >= 0 else digests[1][:, -1 - ids[one]]
                    )
                    if not np.array_equal(found, want[:, one]):
                        rank.wrong(f"a digest of {name} is not that of its block's keys")
                for head in range(HEADS):
                    chosen = sorted(rank.chance.sample(range(middle), count))
                    choice.chosen[at * HEADS + head] = chosen
                    named = [*ids[:init], *(ids[init + one] for one in chosen)]
                    named += ids[init + middle : row[BLOCKS]]
                    plain[0][at * HEADS + head, : len(named)] = named
                    if RECALLS and row[SLOTS]:
                        wanted = [-1 - one for one in named[init : init + count] if one < 0]
                        ours = choice.slots[at][: row[SLOTS]]
                        self._admit(rank, name, head, at * HEADS + head, wanted, ours, *plain[1:])

        self._queue(work, reads, set(), "choice of blocks")

    def _admit(
        self,
        rank: RetrievalRank,
        name: str,
        head: int,
        row: int,
        wanted: list[int],
        slots: list[int],
        missed: np.ndarray,
        place: np.ndarray,
        state: np.ndarray,
        counts: np.ndarray,
    ) -> None:
        """Slots for these numbers; the longest unused ones are taken."""
        holds, used, clock = state[:, head]
        clock[slots[0]] += 1
        now = int(clock[slots[0]])
        lost = []
        for number in wanted:
            slot = int(place[head, number])
            if slot > 0 and int(holds[slot]) == number + 1:
                used[slot] = now
            else:
                lost.append(number)
        if len(lost) > len(slots):
            rank.wrong(f"{name} has too few slots")
            lost = lost[: len(slots)]
        missed[row, 0] = len(lost)
        missed[row, 1 : 1 + len(lost)] = lost
        oldest = sorted(slots, key=lambda slot: int(used[slot]))[: len(lost)]
        for number, slot in zip(lost, oldest, strict=True):
            holds[slot], place[head, number], used[slot] = number + 1, slot, now
        counts += [len(wanted) - len(lost), len(lost)]

    def fetch_blocks(
        self,
        facts: Any,
        table: LateTensor,
        missed: LateTensor,
        place: LateTensor,
        addresses: LateTensor,
        cache: int,
        layer_at: int,
        *_: Any,
        **sizes: Any,
    ) -> None:
        choice = self._choices[table.data_ptr()]
        rank = choice.rank
        known = addresses.told().tolist()
        reads: Cells = set()
        writes: Cells = set()
        for row, ids, slots in zip(choice.facts, choice.blocks, choice.slots, strict=False):
            if row[SLOTS]:
                for one in ids[: row[BLOCKS]]:
                    if one < 0:
                        reads.update(self._machine.cells(known[-1 - one] + layer_at, PAGE))
                writes |= rank.cells(slots[: row[SLOTS]], [choice.layer])
        plain = [one.plain.numpy() for one in (table, missed, place, addresses)]

        def work() -> None:
            for at, row in enumerate(choice.facts):
                for head in range(HEADS) if row[SLOTS] else ():
                    number_of = at * HEADS + head
                    lost = plain[1][number_of].tolist()
                    for number in lost[1 : 1 + lost[0]]:
                        source = int(plain[3][number]) + layer_at + head * PART
                        slot = int(plain[2][head, number])
                        memmove(cache + slot * PAGE + head * PART, source, PART)
                    named = plain[0][number_of, row[INIT] : row[INIT] + row[CHOSEN]]
                    for one, block in enumerate(named.tolist()):
                        if block < 0:
                            named[one] = plain[2][head, -1 - block]

        if writes:
            self._queue(work, reads, writes, "fetches")

    def attend_rows(
        self,
        query: Any,
        facts: Any,
        keys: LateTensor,
        values: Any,
        table: LateTensor,
        *_: Any,
        **sizes: Any,
    ) -> None:
        rank, layer = self._at(keys)
        choice = self._choices[table.data_ptr()]
        reads: Cells = set()
        for row, ids, slots in zip(choice.facts, choice.blocks, choice.slots, strict=False):
            there = [one for one in ids[: row[BLOCKS]] if one >= 0]
            reads |= rank.cells([*there, *slots[: row[SLOTS]]], [layer])
        plain = table.plain.numpy()

        def work() -> None:
            memory = rank.memory[layer].numpy().reshape(-1, HEADS, BLOCK, TOKEN // HEADS)
            for at, (row, name) in enumerate(zip(choice.facts, choice.names, strict=True)):
                told = rank.told(name, layer)
                for head in range(HEADS):
                    one = at * HEADS + head
                    init, middle = row[INIT], row[MIDDLE]
                    blocks = [*range(init), *(init + n for n in choice.chosen[one])]
                    blocks += range(init + middle, row[BLOCKS])
                    left = row[LENGTH]
                    for block, id in zip(blocks, plain[one].tolist(), strict=False):
                        count = min(BLOCK, left)
                        left -= count
                        want = told[head, block * BLOCK : block * BLOCK + count]
                        if id < 0 or not np.array_equal(memory[id, head, :count], want):
                            rank.wrong(f"sparse attention of {name} reads other KV than it chose")

        self._queue(work, reads, set(), "sparse attention")


def digested(rank: RetrievalRank, keys: torch.Tensor) -> torch.Tensor:
    """Coded digests of keys ``[..., tokens, dim]``."""
    return encode(rank.layout.rows_of(keys))


class RetrievalRank(Rank):
    """Its layers decode by retrieval."""

    settings: RetrievalSettings
    chance: random.Random
    engine: RetrievalEngine

    def _caches(self, vllm_config: Any, cache: KVCacheConfig) -> list[torch.Tensor]:
        shape = (cache.num_blocks, HEADS, BLOCK, 2 * DIM)
        made = [
            LateTensor(self.machine, rows.view(torch.float16).view(shape)) for rows in self.memory
        ]
        names = [f"layers.{layer}" for layer in range(LAYERS)]
        with set_current_vllm_config(vllm_config):
            self.impls = [Attention(self, layer) for layer in range(LAYERS)]
        (group,) = cache.kv_cache_groups
        facts: dict[str, Any] = {"_k_scale_float": 1.0, "_v_scale_float": 1.0}
        facts["get_kv_cache_spec"] = lambda _: group.kv_cache_spec
        layers = {
            name: SimpleNamespace(impl=impl, **facts)
            for name, impl in zip(names, self.impls, strict=True)
        }
        self.layers = list(layers.values())
        vllm_config.compilation_config = SimpleNamespace(static_forward_context=layers)
        self.builder = Builder(group.kv_cache_spec, names, vllm_config, META)
        self.layout = self.builder._settings.layout(BLOCK, narrows=False)
        self.tokens: dict[int, str] = {}
        self._known: dict[tuple[str, int], np.ndarray] = {}
        self.machine.ranks.append(self)
        return made

    def ready(self) -> None:
        """Its caches are registered."""
        (group,) = self.worker._groups
        for page in group.pages:
            rows = page.rows
            self.machine.watch(rows.data_ptr(), len(rows) * rows.stride(0), rows.stride(0))
        self.digests = {
            at: impl.sparse_layer.digest_rows(cache).data_ptr()
            for at, (impl, cache) in enumerate(zip(self.impls, self.caches, strict=True))
            if impl.sparse_layer is not None
        }

    def told(self, name: str, layer: int) -> np.ndarray:
        """What it computes for a request: uint8 ``[HEADS, tokens, bytes]``."""
        rows = self.engine.rows(name, self.number)[layer]
        return rows.reshape(len(rows), HEADS, TOKEN // HEADS).transpose(1, 0, 2)

    def digests_of(self, name: str, layer: int) -> np.ndarray:
        """The digests of a request's blocks: uint8 ``[HEADS, blocks, rows, width]``."""
        found = self._known.get((name, layer))
        if found is None:
            rows = np.ascontiguousarray(self.told(name, layer))
            rows = rows[:, : rows.shape[1] // BLOCK * BLOCK].reshape(
                HEADS, -1, BLOCK, TOKEN // HEADS
            )
            keys = torch.from_numpy(rows).view(torch.float16)[..., :DIM]
            found = self._known[name, layer] = digested(self, keys).numpy().view(np.uint8)
        return found

    def wrong(self, text: str) -> None:
        self.engine.wrong.append(text)


class RetrievalEngine(Engine):
    """See the module. Within ``retrieving``."""

    rank = RetrievalRank

    def __init__(
        self,
        chance: random.Random,
        settings: RetrievalSettings,
        vllm_config: Any,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        self.exact_blocks = settings.exact_blocks(BLOCK)
        self._retrieval = settings
        self._chance = chance
        self.moved = {"departures": 0, "arrivals": 0}
        super().__init__(vllm_config, *args, **kwargs)
        for rank in self.ranks:
            rank.engine, rank.chance = self, random.Random(chance.random())
            rank.ready()
        self.planner = self.side.offload
        compat.block_manager(self.scheduler.kv_cache_manager).planner = self.planner

    def _make_planner(self) -> Any:
        spec = self.scheduler.kv_cache_manager.coordinator.single_type_managers[0].kv_cache_spec
        gate = Gate(self._retrieval, spec.page_size_bytes // BLOCK, narrows=False)
        return functools.partial(OffloadPlanner, self.pool, self._retrieval, BLOCK, gate, 5.0)

    def _cache(self, blocks: int) -> SimulatedCache:
        names = [f"layers.{layer}" for layer in range(LAYERS)]
        spec = OffloadableSpec(
            block_size=BLOCK, num_kv_heads=HEADS, head_size=DIM, dtype=torch.float16
        )
        assert spec.page_size_bytes == PAGE
        tensors = [KVCacheTensor(blocks * PAGE, [name], PAGE, PAGE) for name in names]
        return SimulatedCache(blocks, tensors, [KVCacheGroupSpec(names, spec)])

    def rows(self, name: str, number: int) -> np.ndarray:
        """What a rank computes for a request: uint8 ``[layers, tokens, TOKEN]``."""
        return self._stories[name][1] ^ np.uint8(number * LAYERS)

    def _forward(self, rank: Any, output: Any) -> ModelRunnerOutput:
        moves = output.kv_connector_metadata.offload
        if moves is not None:
            self.moved["departures"] += len(moves.departures)
            self.moved["arrivals"] += len(moves.arrivals)
        tokens: list[list[int]] = []
        starts, lengths, prompts, prefills, tables = [0], [], [], [], []
        written: list[tuple[str, int, int, list[int]]] = []
        places: list[int] = []
        rank.tokens = {}
        for name, count in output.num_scheduled_tokens.items():
            request = self.scheduler.requests[name]
            end = request.num_computed_tokens
            ids = self.scheduler.kv_cache_manager.get_block_ids(name)[0][: -(-end // BLOCK)]
            for place in range(starts[-1], starts[-1] + count):
                rank.tokens[place] = name
                places.append(place)
            starts.append(starts[-1] + count)
            lengths.append(end)
            prompts.append(request.num_prompt_tokens)
            prefills.append(end - count < request.num_prompt_tokens)
            # The workers are not told which blocks have left.
            blocks = self.scheduler.kv_cache_manager.block_pool.num_gpu_blocks
            tables.append([one or self._chance.randrange(1, blocks) for one in ids])
            written.append((name, end - count, end, list(ids)))
            tokens.append([] if request.is_prefill_chunk else [self._stories[name][0][end]])
        if places:
            self._compute_layers(rank, starts, lengths, prompts, prefills, tables, written)
        names = list(output.num_scheduled_tokens)
        return ModelRunnerOutput(names, {name: at for at, name in enumerate(names)}, tokens)

    def _compute_layers(
        self,
        rank: RetrievalRank,
        starts: list[int],
        lengths: list[int],
        prompts: list[int],
        prefills: list[bool],
        tables: list[list[int]],
        written: list[tuple[str, int, int, list[int]]],
    ) -> None:
        """As vLLM's model runner: builds metadata, then runs each layer."""
        send = devices.device_of(META).send
        wide = max(map(len, tables))
        ids = np.zeros((len(tables), wide), dtype=np.int32)
        for row, table in zip(ids, tables, strict=True):
            row[: len(table)] = table
        rows = np.arange(len(ids), dtype=np.int32)
        config = SimpleNamespace(
            kv_cache_config=SimpleNamespace(
                kv_cache_groups=[
                    SimpleNamespace(layer_names=[f"layers.{one}" for one in range(LAYERS)])
                ]
            )
        )
        told = runner.BatchBlocks(ids, rows, np.array(prompts, dtype=np.int32))
        runner._show(config, [told])
        first = torch.tensor(starts, dtype=torch.int32)
        seq_lens = torch.tensor(lengths, dtype=torch.int32)
        common = CommonAttentionMetadata(
            query_start_loc=send(first),
            query_start_loc_cpu=first,
            seq_lens=send(seq_lens),
            num_reqs=len(ids),
            num_actual_tokens=starts[-1],
            max_query_len=max(b - a for a, b in pairwise(starts)),
            max_seq_len=max(lengths),
            block_table_tensor=send(torch.from_numpy(ids.copy())),
            slot_mapping=send(torch.zeros(starts[-1], dtype=torch.int64)),
            seq_lens_cpu_upper_bound=seq_lens,
            is_prefilling=torch.tensor(prefills),
        )
        metadata = rank.builder.build(0, common)
        order = torch.arange(starts[-1], dtype=torch.float16)[:, None, None]
        query = send(order.expand(-1, QUERIES, DIM).contiguous())
        output = send(torch.zeros_like(query.plain))
        for layer, (module, cache) in enumerate(zip(rank.layers, rank.caches, strict=True)):
            writes: Cells = set()
            for _, start, end, blocks in written:
                writes |= rank.cells(blocks[start // BLOCK : -(-end // BLOCK)], [layer])
            work = functools.partial(self._write, rank, layer, written)
            seconds = TOKEN_S * starts[-1] / LAYERS
            self.machine.computing.launch(work, set(), writes, "the forward pass", seconds)
            module.impl.forward(module, query, query, query, cache, metadata, output)

    def _write(
        self, rank: RetrievalRank, layer: int, written: list[tuple[str, int, int, list[int]]]
    ) -> None:
        """Kernel: writes the new tokens."""
        memory = rank.memory[layer].numpy().reshape(-1, HEADS, BLOCK, TOKEN // HEADS)
        for name, start, end, ids in written:
            at = np.arange(start, end)
            told = rank.told(name, layer)[:, at].transpose(1, 0, 2)
            memory[np.array(ids)[at // BLOCK], :, at % BLOCK] = told
