"""An engine that decodes by retrieval on a simulated device, and whose long sequences leave it: the
real planner and block manager, the real metadata builder, layers, digests, residency and copies.

vLLM's dense attention and kvrecall's Triton kernels are replaced by kernels that are queued, do
late what the real ones do with memory, and notice bytes, digests and blocks that are not those of
their sequence. Which blocks a sequence attends to is drawn.
"""

from __future__ import annotations

import functools
import operator
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import memmove
from dataclasses import dataclass, field
from itertools import accumulate
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from vllm.config import get_current_vllm_config, set_current_vllm_config
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.core.kv_cache_utils import KVCacheConfig
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry
from vllm.v1.outputs import ModelRunnerOutput

from kvrecall.attention.digest import encode
from kvrecall.attention.kernels import device as kernels
from kvrecall.attention.selection import Gate
from kvrecall.attention.settings import RetrievalSettings
from kvrecall.engines.vllm import device as devices
from kvrecall.engines.vllm.attention import backend, base, cuda, room
from kvrecall.engines.vllm.attention.backend import RetrievalAttention
from kvrecall.engines.vllm.attention.cuda import DeviceBuilder
from kvrecall.engines.vllm.attention.offloaded import Records
from kvrecall.engines.vllm.compat import runner
from kvrecall.engines.vllm.compat import scheduler as compat
from kvrecall.engines.vllm.compat.offloadable import OffloadableSpec, OffloadManager
from kvrecall.engines.vllm.connector import offload
from kvrecall.engines.vllm.connector.offload import OffloadPlanner
from kvrecall_lab.engines.counting import recorded

from .device import Cells, Machine
from .engine import BLOCK, LAYERS, LONGEST, PAGE, TOKEN, TOKEN_S, Engine, Rank, SimulatedCache
from .late import META, LateDevice, LateTensor, Queueing

HEADS = 2  # of keys and values
QUERIES = 4  # heads of queries
DIM = TOKEN // (HEADS * 2 * 2)
PART = PAGE // HEADS  # bytes of a head in a block
GRAPHS = (2, 5)  # of steps of so many requests
TOKEN_OF, INIT, MIDDLE, CHOSEN, BLOCKS, LENGTH, SLOTS, FILLS, ROW, LEFT, HELD = range(11)


TOLD = LateTensor.told  # as the host knows it when work is queued
LATE = operator.attrgetter("plain")  # as the work finds it


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
def retrieving(
    machine: Machine, settings: RetrievalSettings, patience: int, pages: int
) -> Iterator[None]:
    """Within ``engine.on``: layers of engines made in here decode by retrieval with these
    settings. ``patience``: as of ``connector.offload``; ``pages``: for a block of the cache, in
    which dense layers keep copies."""
    KVCacheSpecRegistry._ensure_registered()
    KVCacheSpecRegistry.register(OffloadableSpec, OffloadManager, OffloadableSpec.__mro__[1])
    pages_of = Records.pages

    def read(records: Records, offsets: Any, layer: str, nbytes: int) -> Any:
        begin = records.memory.ctypes.data + records.layers[layer]
        cells = {one for at in offsets.tolist() for one in machine.cells(begin + at, nbytes)}
        machine.host(cells, set(), "the host, of records,")
        return pages_of(records, offsets, layer, nbytes)

    with (
        patch.object(backend, "active_settings", lambda: settings),
        patch.object(cuda, "active_settings", lambda: settings),
        patch.object(runner, "follow_blocks", lambda _: None),
        patch.object(cuda.TritonKernel, "warm", lambda *_: None),  # over a cache of no layer
        patch.object(runner, "decides_graphs", lambda _: False),
        patch.object(offload, "PATIENCE", patience),
        patch.object(room, "_PAGES_A_BLOCK", pages),
        patch.object(base, "_SEEN_EVERY", EveryStep(16)),
        patch.object(Records, "pages", read),
        patch.dict(devices.FORMS, {META.type: lambda _: LateDevice(machine, meta=True)}),
        patch.object(kernels, "_launch", Kernels(machine).launch),
        Queueing(machine),
    ):
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

    def build_for_cudagraph_capture(self, common: Any) -> Any:
        return self.build(0, common)


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

    def forward(self, layer: Any, query: LateTensor, *args: Any) -> Any:
        """Queues a kernel that attends to all tokens of these requests."""
        _, _, kv_cache, metadata, output, *_ = args
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

    def launch(self, name: str, grid: tuple[int, ...], *args: Any, **sizes: Any) -> None:
        getattr(self, name)(*args, **sizes)

    def _at(self, cache: LateTensor) -> tuple[RetrievalRank, int]:
        """Whose layer's that cache is."""
        for rank in self._machine.ranks:
            for layer, one in enumerate(rank.caches):
                if one.data_ptr() == cache.data_ptr():
                    return rank, layer
        raise AssertionError("a kernel reads a cache of no layer")

    def _rows(self, coded: LateTensor, ids: Sequence[int]) -> Cells:
        """Cells of the digests of these blocks."""
        step, begin = coded.stride(1), coded.data_ptr()
        nbytes = coded.shape[0] * coded.stride(0)
        return {cell for one in ids for cell in self._machine.cells(begin + one * step, nbytes)}

    def _queue(self, work: Any, reads: Cells, writes: Cells, what: str) -> None:
        self._machine.launching.launch(work, reads, writes, what)

    def digest_blocks(self, *args: Any, **sizes: Any) -> None:
        ids, keys, coded, *_ = args
        rank, layer = self._at(keys)
        plain, named = (keys.plain, coded.plain), ids[:, FILLS] if ids.dim() == 2 else ids

        def work() -> None:
            if some := [one for one in named.plain.tolist() if one >= 0]:
                made = digested(rank, plain[0][some].transpose(1, 2)).transpose(0, 1)
                plain[1][:, some, :, : made.shape[-1]] = made

        known = [one for one in named.told().tolist() if one >= 0]
        self._queue(work, rank.cells(known, [layer]), self._rows(coded, known), "digests")

    def choose_blocks(self, *args: Any, RECALLS: bool, **sizes: Any) -> None:
        query, facts, blocks, names, coded, _, off, _, _, table, slots, *counted = args[:15]
        rank, layer = next(
            (one, at)
            for one in self._machine.ranks
            for at, rows in one.digests.items()
            if rows == coded.data_ptr()
        )

        def told(of: Callable[[LateTensor], torch.Tensor]) -> Iterator[Any]:
            """A sequence's facts, blocks and slots."""
            for row, ids in named_blocks(of, facts, blocks, names):
                yield row, ids, of(slots)[row[HELD], : row[SLOTS]].tolist() if RECALLS else []

        known, *both = map(list, zip(*told(TOLD), strict=True))
        tokens = rank.named(query, known)
        choice = Choice(rank, layer, known, *both, tokens)
        self._choices[table.data_ptr()] = self._choices[counted[0].data_ptr()] = choice
        reads: Cells = set()
        for row, ids in zip(known, choice.blocks, strict=False):
            middle = ids[row[INIT] : row[INIT] + row[MIDDLE]]
            reads |= self._rows(coded, [one for one in middle if one >= 0])
        for written in (table, *counted):
            self._machine.unknown(written)
        named_in, *counts = (one.plain.numpy() for one in (table, *counted))
        digests, digests_off = (one.plain.numpy().view(np.uint8) for one in (coded, off))

        def work() -> None:
            choice.facts, choice.blocks, choice.slots = map(list, zip(*told(LATE), strict=True))
            for at, (row, ids, name) in enumerate(
                zip(choice.facts, choice.blocks, tokens, strict=True)
            ):
                if not row[BLOCKS]:  # padding
                    continue
                init, middle, count = row[INIT], row[MIDDLE], row[CHOSEN]
                want = rank.digests_of(name, layer)
                for one in range(init, init + middle):
                    id = ids[one]
                    found = digests[:, id] if id >= 0 else digests_off[:, -1 - id]
                    if not np.array_equal(found[..., : want.shape[-1]], want[:, one]):
                        rank.wrong(f"a digest of {name} is not that of its block's keys")
                for head in range(HEADS):
                    chosen = sorted(rank.chance.sample(range(middle), count))
                    choice.chosen[at * HEADS + head] = chosen
                    named = [*ids[:init], *(ids[init + one] for one in chosen)]
                    named += ids[init + middle : row[BLOCKS]]
                    named_in[at * HEADS + head, : len(named)] = named
                    if RECALLS and row[SLOTS]:
                        wanted = [-1 - one for one in named[init : init + count] if one < 0]
                        ours = choice.slots[at][: row[SLOTS]]
                        if not admit(head, at * HEADS + head, wanted, ours, *counts):
                            rank.wrong(f"{name} has too few slots")
                        lost = counts[0][at * HEADS + head]
                        into = named_in[at * HEADS + head, init : init + count]
                        into[np.isin(-1 - into, lost[1 : 1 + lost[0]])] -= kernels.LATE

        self._queue(work, reads, set(), "choice of blocks")

    def fetch_blocks(self, *args: Any, **sizes: Any) -> None:
        _, missed, place, addresses, page_at, cache, *_ = args
        choice = self._choices[missed.data_ptr()]
        rank = choice.rank
        known, layer_at = addresses.told().tolist(), int(page_at.told())
        reads: Cells = set()
        writes: Cells = set()
        for row, ids, slots in zip(choice.facts, choice.blocks, choice.slots, strict=False):
            if row[SLOTS]:
                for one in ids[: row[BLOCKS]]:
                    if one < 0:
                        reads.update(self._machine.cells(known[-1 - one] + layer_at, PAGE))
                writes |= rank.cells(slots[: row[SLOTS]], [choice.layer])
        lost_of, slot_of, address_of = (one.plain.numpy() for one in (missed, place, addresses))

        def work() -> None:
            for at, row in enumerate(choice.facts):
                for head in range(HEADS) if row[SLOTS] else ():
                    lost = lost_of[at * HEADS + head].tolist()
                    for number in lost[1 : 1 + lost[0]]:
                        if not address_of[number]:
                            rank.wrong("a block is fetched from no record")
                            return
                        source = int(address_of[number]) + int(page_at.plain) + head * PART
                        slot = int(slot_of[head, number])
                        memmove(cache + slot * PAGE + head * PART, source, PART)

        self._queue(work, reads, writes, "fetches")

    def attend_rows(self, *args: Any, WHOLE: bool, TURN: int, **sizes: Any) -> None:
        query, facts, keys, _, table, *_ = args
        rank, layer = self._at(keys)
        if WHOLE:
            self._attend_to_all(rank, layer, query, (facts, table, args[10]), args[11])
            return
        choice = self._choices[table.data_ptr()]
        reads: Cells = set()
        for row, ids, slots in zip(choice.facts, choice.blocks, choice.slots, strict=False):
            there = [one for one in ids[: row[BLOCKS]] if one >= 0]
            reads |= rank.cells([*there, *slots[: row[SLOTS] if TURN > 1 else 0]], [layer])
        plain, slot_of = table.plain.numpy(), args[12].plain.numpy()

        def work() -> None:
            memory = rank.memory[layer].numpy().reshape(-1, HEADS, BLOCK, TOKEN // HEADS)
            for at, (row, name) in enumerate(zip(choice.facts, choice.names, strict=True)):
                if not row[BLOCKS]:
                    continue
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
                        if TURN and id < 0:
                            is_late = -1 - id >= kernels.LATE
                            if TURN < 3 and is_late != (TURN == 2):
                                continue
                            id = slot_of[head, -1 - (id | kernels.LATE)]
                        if id < 0 or not np.array_equal(memory[id, head, :count], want):
                            rank.wrong(f"sparse attention of {name} reads other KV than it chose")

        self._queue(work, reads, set(), "sparse attention")

    def _attend_to_all(
        self, rank: RetrievalRank, layer: int, query: LateTensor, tables: Any, pages: LateTensor
    ) -> None:
        known = list(named_blocks(TOLD, *tables))
        tokens = rank.named(query, [row for row, _ in known])
        there = [one for row, ids in known for one in ids[: row[BLOCKS]] if one >= 0]
        at, token, head, _ = pages.stride()
        size = len(pages), HEADS, BLOCK, 2 * DIM
        copies = pages.plain.as_strided(size, (at, head, token, 1)).view(torch.uint8).numpy()

        def work() -> None:
            memory = rank.memory[layer].numpy().reshape(-1, HEADS, BLOCK, TOKEN // HEADS)
            for (row, ids), name in zip(named_blocks(LATE, *tables), tokens, strict=True):
                length = row[LENGTH] + (row[MIDDLE] - row[CHOSEN]) * BLOCK
                for first, id in zip(range(0, length, BLOCK), ids[: row[BLOCKS]], strict=True):
                    want = rank.told(name, layer)[:, first : min(first + BLOCK, length)]
                    found = memory[id] if id >= 0 else copies[-1 - id]
                    if not np.array_equal(found[:, : want.shape[1]], want):
                        rank.wrong(f"a dense layer reads other KV of {name} than its tokens have")

        self._queue(work, rank.cells(there, [layer]), set(), "attention to all blocks")


def named_blocks(
    of: Callable[[LateTensor], torch.Tensor], facts: LateTensor, blocks: LateTensor, names: Any
) -> Iterator[tuple[list[int], list[int]]]:
    """The facts of a step's sequences, and their blocks: those off the device by their names."""
    for row in of(facts).tolist():
        ids = of(blocks)[row[ROW]].tolist()
        if row[LEFT]:
            left = of(names)[row[HELD], : row[LEFT]]
            ids[row[INIT] : row[INIT] + row[LEFT]] = (-1 - left).tolist()
        yield row, ids


def admit(
    head: int,
    row: int,
    wanted: list[int],
    slots: list[int],
    missed: np.ndarray,
    place: np.ndarray,
    state: np.ndarray,
    counts: np.ndarray,
) -> bool:
    """Slots for these numbers; the longest unused ones are taken. False if they are too few."""
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
    is_room = len(lost) <= len(slots)
    del lost[len(slots) :]
    missed[row, 0] = len(lost)
    missed[row, 1 : 1 + len(lost)] = lost
    oldest = sorted(slots, key=lambda slot: int(used[slot]))[: len(lost)]
    for number, slot in zip(lost, oldest, strict=True):
        holds[slot], place[head, number], used[slot] = number + 1, slot, now
    counts += [len(wanted) - len(lost), len(lost)]
    return is_room


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
        vllm_config.compilation_config = SimpleNamespace(
            static_forward_context=layers, cudagraph_capture_sizes=list(GRAPHS)
        )
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
        ids = torch.zeros(max(GRAPHS), LONGEST // BLOCK, dtype=torch.int32)
        self.table = devices.device_of(META).send(ids)
        self.graphs = {size: list(self._captured(size)) for size in GRAPHS}

    def _captured(self, size: int) -> Iterator[Any]:
        """What launches each layer's sparse attention again, of steps of so many requests."""
        table, none = self.table[:size], torch.zeros(size + 1, dtype=torch.int32)
        common = SimpleNamespace(
            num_reqs=size, block_table_tensor=table, seq_lens=table[:, 0], query_start_loc_cpu=none
        )
        metadata, query = self.builder.build_for_cudagraph_capture(common), queries(size)
        for module, cache in zip(self.layers, self.caches, strict=True):
            with recorded() as record:
                module.impl.forward(module, query, query, query, cache, metadata, query)
            yield record

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

    def named(self, query: LateTensor, facts: list[list[int]]) -> list[str]:
        """The requests of a step's rows; padding has none."""
        places = query.told()[:, 0, 0].tolist()
        return [self.tokens.get(int(places[row[TOKEN_OF]]), "") for row in facts]

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
        self.moved |= {"graphs off the device": 0, "with dense layers": 0}
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
        sizes: dict[str, Any] = {"block_size": BLOCK, "num_kv_heads": HEADS, "head_size": DIM}
        return SimulatedCache.of(blocks, [OffloadableSpec(dtype=torch.float16, **sizes)])

    def rows(self, name: str, number: int) -> np.ndarray:
        """What a rank computes for a request: uint8 ``[layers, tokens, TOKEN]``."""
        return self._stories[name][1] ^ np.uint8(number * LAYERS)

    def _forward(self, rank: Any, output: Any) -> ModelRunnerOutput:
        moves = output.kv_connector_metadata.offload
        if moves is not None:
            self.moved["departures"] += len(moves.departures)
            self.moved["arrivals"] += len(moves.arrivals)
        manager = self.scheduler.kv_cache_manager
        tokens: list[list[int]] = []
        rows: list[_Row] = []
        for name, count in output.num_scheduled_tokens.items():
            request = self.scheduler.requests[name]
            end = request.num_computed_tokens
            ids = manager.get_block_ids(name)[0][: -(-end // BLOCK)]
            rows.append(_Row(name, end - count, end, request.num_prompt_tokens, list(ids)))
            tokens.append([] if request.is_prefill_chunk else [self._stories[name][0][end]])
        if rows:
            self._compute_layers(rank, rows)
        names = list(output.num_scheduled_tokens)
        return ModelRunnerOutput(names, {name: at for at, name in enumerate(names)}, tokens)

    def _compute_layers(self, rank: RetrievalRank, rows: list[_Row]) -> None:
        """As vLLM's model runner: builds metadata, then runs each layer."""
        send = devices.device_of(META).send
        counts = [row.end - row.start for row in rows]
        total, count = sum(counts), len(rows)
        graph = max(counts) == 1 and count <= max(GRAPHS) and self._chance.random() < 0.9
        graph = runner._last_is_graph = graph and not rank.builder.hinders_graph(count)
        size = min(one for one in GRAPHS if one >= count) if graph else count
        counts += [0] * (size - count)
        rank.tokens = dict(enumerate(row.name for row in rows for _ in range(row.start, row.end)))
        # The workers are not told which blocks have left.
        blocks = self.scheduler.kv_cache_manager.block_pool.num_gpu_blocks
        ids = np.zeros((size, LONGEST // BLOCK), dtype=np.int32)
        for table, row in zip(ids, rows, strict=False):
            table[: len(row.ids)] = [one or self._chance.randrange(1, blocks) for one in row.ids]
        group = SimpleNamespace(layer_names=[f"layers.{one}" for one in range(LAYERS)])
        config = SimpleNamespace(kv_cache_config=SimpleNamespace(kv_cache_groups=[group]))
        prompts = np.array([row.prompt for row in rows], dtype=np.int32)
        numbers = np.arange(len(rows), dtype=np.int32)
        runner._show(config, [runner.BatchBlocks(ids, numbers, prompts)])
        first = torch.tensor([0, *accumulate(counts)], dtype=torch.int32)
        seq_lens = torch.tensor([row.end for row in rows] + [0] * (size - count), dtype=torch.int32)
        common = CommonAttentionMetadata(
            query_start_loc=send(first),
            query_start_loc_cpu=first,
            seq_lens=send(seq_lens),
            num_reqs=size,
            num_actual_tokens=total,
            max_query_len=max(counts),
            max_seq_len=max(row.end for row in rows),
            block_table_tensor=send(
                torch.from_numpy(ids.copy()), rank.table[:size] if graph else None
            ),
            slot_mapping=send(torch.zeros(total, dtype=torch.int64)),
            seq_lens_cpu_upper_bound=seq_lens,
            is_prefilling=torch.tensor([row.start < row.prompt for row in rows]),
        )
        metadata = rank.builder.build(0, common)
        if graph:
            left = any(0 in row.ids for row in rows)
            self.moved["graphs off the device"] += left
            self.moved["with dense layers"] += left and len(rank.digests) < LAYERS
            parts: list[Any] = []
            with patch.object(self.machine.computing, "launch", lambda *part: parts.append(part)):
                for layer, record in enumerate(rank.graphs[size]):
                    self._launch_write(rank, layer, rows)
                    for again in record:
                        again()
            for at, part in enumerate([*parts]):  # in a graph the streams of a layer fork
                if part[3] == "fetches" and self._chance.random() < 0.5:
                    parts[at : at + 2] = parts[at + 1], part
            reads, writes = (set().union(*(part[at] for part in parts)) for at in (1, 2))
            work = lambda: [part[0]() for part in parts]  # noqa: E731
            self.machine.computing.launch(work, reads - writes, writes, "graphs", TOKEN_S * total)
            return
        query = queries(total)
        output = send(torch.zeros_like(query.plain))
        for layer, (module, cache) in enumerate(zip(rank.layers, rank.caches, strict=True)):
            self._launch_write(rank, layer, rows)
            module.impl.forward(module, query, query, query, cache, metadata, output)

    def _launch_write(self, rank: RetrievalRank, layer: int, rows: list[_Row]) -> None:
        ids = [id for row in rows for id in row.ids[row.start // BLOCK :]]
        work = functools.partial(self._write, rank, layer, rows)
        seconds = TOKEN_S * sum(row.end - row.start for row in rows) / LAYERS
        writes = rank.cells(ids, [layer])
        self.machine.computing.launch(work, set(), writes, "the forward pass", seconds)

    def _write(self, rank: RetrievalRank, layer: int, rows: list[_Row]) -> None:
        """Kernel: writes the new tokens."""
        memory = rank.memory[layer].numpy().reshape(-1, HEADS, BLOCK, TOKEN // HEADS)
        for row in rows:
            at = np.arange(row.start, row.end)
            told = rank.told(row.name, layer)[:, at].transpose(1, 0, 2)
            memory[np.array(row.ids)[at // BLOCK], :, at % BLOCK] = told


def queries(tokens: int) -> Any:
    """Each says which token's of the step it is."""
    order = torch.arange(tokens, dtype=torch.float16)[:, None, None]
    return devices.device_of(META).send(order.expand(-1, QUERIES, DIM).contiguous())


class _Row(NamedTuple):
    """Tokens ``[start, end)`` of a request that a step computes. ``prompt``: its tokens. ``ids``:
    its device blocks; 0: it left."""

    name: str
    start: int
    end: int
    prompt: int
    ids: list[int]
