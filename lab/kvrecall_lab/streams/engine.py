"""An engine without a model, on a simulated device: vLLM's own scheduler, both sides of the
connector with a real pool, and a forward pass that checks the KV it reads, byte by byte.

The KV of a token is a digest of all tokens up to it, so KV of other tokens, or of none, is noticed
wherever it comes from. The next token follows from the tokens before it.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import pickle
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from vllm import SamplingParams
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from kvrecall.block import Namespace
from kvrecall.config import RecallSettings
from kvrecall.engines.vllm import device as devices
from kvrecall.engines.vllm.compat import scheduler as compat
from kvrecall.engines.vllm.compat.config import Sharing, kv_groups
from kvrecall.engines.vllm.connector import connector, copier
from kvrecall.engines.vllm.connector import worker as workers
from kvrecall.engines.vllm.connector.scheduler import RecallScheduler
from kvrecall.engines.vllm.connector.worker import RecallWorker
from kvrecall.engines.vllm.wire import ALL_BLOCKS, ORIGIN_BYTES, EngineFacts, GroupFacts
from kvrecall.pool import Pool
from kvrecall.pool.arena import Arena
from kvrecall.pool.base import ArenaHandle, Verdict

from .device import Cells, Machine, Mark
from .late import LateDevice

BLOCK = 16
LAYERS = 2
PAGE = 512
"""Bytes of a block in a layer."""

TOKEN = PAGE // BLOCK
LONGEST = 160
TOKEN_S = 1e-3
"""Of the device's clock, for a token of a forward pass."""

HOST_S = 5e-3
"""Of the host's clock, for a step."""

RECOVERS = hasattr(KVOutputAggregator, "ft_defer_kv_connector_outputs")
"""Whether vLLM goes on after a step that failed (0.33, with fault tolerance)."""


class RecallConnector(connector.RecallConnector):
    """The connector on the scheduler side of an ``Engine``, which gives it its scheduler side."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        KVConnectorBase_V1.__init__(self, vllm_config, role, kv_cache_config)
        self._last_states = "", []


@functools.lru_cache(64)
def story(prompt: tuple[int, ...]) -> tuple[list[int], np.ndarray]:
    """All tokens that follow from a prompt, and their KV: uint8 ``[layers, tokens, TOKEN]``."""
    tokens, rows = list(prompt), []
    state = b""
    for at in range(LONGEST):
        state = hashlib.blake2b(state + tokens[at].to_bytes(4), digest_size=TOKEN).digest()
        rows.append(state)
        if at + 1 == len(tokens):
            tokens.append(state[0])
    first = np.frombuffer(b"".join(rows), np.uint8).reshape(LONGEST, TOKEN).copy()
    first[:, 1::2] &= 0x3F  # numbers of 16 bits, all of them finite
    return tokens, np.stack([first ^ layer for layer in range(LAYERS)])


@functools.cache
def config(model: Path, overlapping: bool, by_priority: bool) -> Any:
    """vLLM's configuration. ``overlapping``: asynchronous scheduling. ``by_priority``: of requests,
    so that one may be preempted in the step that scheduled it."""
    args = EngineArgs(
        model=str(model),
        skip_tokenizer_init=True,
        max_model_len=LONGEST,
        block_size=BLOCK,
        max_num_seqs=5,
        max_num_batched_tokens=64,
        num_gpu_blocks_override=1,
        dtype="float32",
        enable_prefix_caching=True,
        scheduling_policy="priority" if by_priority else "fcfs",
        kv_transfer_config=KVTransferConfig(
            kv_connector="RecallConnector",
            kv_connector_module_path=__name__,
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
        ),
    )
    made = args.create_engine_config()
    made.scheduler_config.async_scheduling = overlapping
    made.cache_config.num_gpu_blocks = 1
    return made


class SimulatedCache(KVCacheConfig):
    """As vLLM's. ``zeroes``: new blocks are zeroed at the start of a step, as for some hybrid
    models."""

    zeroes = False

    @classmethod
    def of(cls, blocks: int, specs: Sequence[KVCacheSpec]) -> SimulatedCache:
        """Of a KV group of ``LAYERS`` layers for each of ``specs``."""
        groups, tensors = [], []
        for number, spec in enumerate(specs):
            assert spec.page_size_bytes == PAGE
            names = [f"layers.{number * LAYERS + layer}" for layer in range(LAYERS)]
            groups.append(KVCacheGroupSpec(names, spec))
            tensors += [KVCacheTensor(blocks * PAGE, [name], PAGE, PAGE) for name in names]
        return cls(blocks, tensors, groups)

    @property
    def needs_kv_cache_zeroing(self) -> bool:
        return self.zeroes


@contextmanager
def on(machine: Machine) -> Iterator[None]:
    """Devices made in here are this machine's, and the clock by which copies are stuck; and vLLM's
    parallel groups need not be there."""
    attach = Arena.attach
    clock = SimpleNamespace(monotonic=lambda: machine.now, sleep=machine.sleep)

    def kept(handle: ArenaHandle) -> Arena:
        arena = attach(handle)
        machine.kept.append(arena.array())
        return arena

    parallel = {
        "kernel_of": lambda *_: "",
        "prompt_token_work": lambda *_: (0.0, 0),
        "sharing_of": lambda *_: Sharing(),
        "stage_rank": lambda *_: 0,
        "fp8_type": lambda *_: None,
        "most_of_ranks": lambda number: number,
    }
    devices.device_of.cache_clear()
    with (
        patch.multiple(workers.config, **parallel),
        patch.object(workers, "settle_scales", lambda *_: None),
        patch.object(copier, "time", clock),
        patch.object(Arena, "attach", kept),
        patch.dict(devices.FORMS, {"cpu": lambda _: LateDevice(machine)}),
    ):
        try:
            yield
        finally:
            devices.device_of.cache_clear()


def aligned(rows: int, nbytes: int) -> torch.Tensor:
    """uint8 ``[rows, nbytes]`` of zeros, at an address that begins a cell."""
    memory = torch.zeros(rows * nbytes + PAGE, dtype=torch.uint8)
    start = -memory.data_ptr() % PAGE
    return memory[start : start + rows * nbytes].view(rows, nbytes)


class Rank:
    """A worker, and the device's memory of its rank: uint8 ``[blocks, PAGE]`` by layer of a
    group."""

    def __init__(
        self, machine: Machine, vllm_config: Any, cache: KVCacheConfig, number: int
    ) -> None:
        self.machine = machine
        self.number = number
        self.memory = [aligned(cache.num_blocks, PAGE) for _ in range(LAYERS)]
        self.caches = self._caches(vllm_config, cache)
        self.worker = RecallWorker(vllm_config, cache)
        layers = range(LAYERS * len(cache.kv_cache_groups))
        self.worker.register({f"layers.{i}": self.caches[i % LAYERS] for i in layers})

        def placed(sizes: Sequence[int], *_: Any) -> list[int]:
            return list(accumulate(sizes, initial=number * sum(sizes)))[:-1]

        with patch.object(workers.config, "record_places", placed):
            self.shard = self.worker.shard()

    def _caches(self, vllm_config: Any, cache: KVCacheConfig) -> list[torch.Tensor]:
        """The memory as the model's layers have it, which are made here."""
        return self.memory

    @property
    def part(self) -> range:
        """Its bytes of a record."""
        nbytes = self.shard.nbytes()
        return range(self.number * nbytes, (self.number + 1) * nbytes)

    def cells(self, ids: Sequence[int], layers: Sequence[int] = range(LAYERS)) -> Cells:
        """Those of device blocks."""
        return {
            cell
            for layer in layers
            for block in ids
            for cell in self.machine.cells(self.memory[layer].data_ptr() + block * PAGE, PAGE)
        }


class Engine:
    """See the module. Within ``on(machine)``."""

    rank: type[Rank] = Rank
    exact_blocks = ALL_BLOCKS
    """As of ``EngineFacts``."""

    def __init__(
        self,
        vllm_config: Any,
        machine: Machine,
        pool: Pool,
        ranks: int,
        blocks: int,
        loads_first: bool,
        zeroes: bool,
        reaches: Sequence[int] = (0,),
    ) -> None:
        """``ranks``: of tensor parallelism. ``blocks``: on each rank's device. ``loads_first``:
        loads are started before the forward pass, as by Model Runner V1. ``zeroes``: as of
        ``SimulatedCache``. ``reaches``: as of ``_cache``."""
        self.machine = machine
        self.pool = pool
        self.wrong: list[str] = []
        self.overlapping = bool(vllm_config.scheduler_config.async_scheduling)
        self._loads_first = loads_first
        self.preempted = 0
        self._garbles = False
        self._queue: deque[tuple[Any, ModelRunnerOutput, Mark]] = deque()
        vllm_config = copy.copy(vllm_config)
        vllm_config.compilation_config = SimpleNamespace(static_forward_context={})
        self.reaches = reaches
        cache = self._cache(blocks)
        cache.zeroes = self._zeroes = zeroes
        kind = AsyncScheduler if self.overlapping else Scheduler
        grammar = SimpleNamespace(accept_tokens=lambda *_: True)
        self.scheduler = kind(vllm_config, cache, grammar, BLOCK)
        self.ranks = [self.rank(machine, vllm_config, cache, number) for number in range(ranks)]
        self._aggregator = KVOutputAggregator(ranks)
        assert not any(rank.shard.copies_in_step for rank in self.ranks)
        of_rank = self.ranks[0].shard.nbytes()  # the same of each group
        nbytes = ranks * of_rank + ORIGIN_BYTES
        facts = EngineFacts(
            tuple(GroupFacts(group, nbytes) for group in kv_groups(cache)),
            hash_block_size=BLOCK,
            ranks=ranks,
            copies_in_step=False,
            rank_share=of_rank / nbytes,
            recovers=RECOVERS,
            exact_blocks=self.exact_blocks,
        )
        manager = self.scheduler.kv_cache_manager
        self.scheduler.connector._pool = pool
        self._watch_commits()
        settings = {"host_size": "1MiB", "audit": "off", "load_or_compute": "load"}
        self.side = self.scheduler.connector._scheduler = RecallScheduler(
            pool,
            RecallSettings.from_mapping(settings),
            facts,
            lambda: Namespace.of({"test": "1"}),
            SimpleNamespace(is_known=lambda _: True, identity=lambda _: None),
            manager.get_block_ids,
            compat.first_needed(manager),
            compat.reachable_blocks(manager),
            compat.room_for(manager),
            uncache=manager.evict_blocks,
            make_planner=self._make_planner(),
            clock=lambda: machine.now,
        )
        self._hasher = get_request_block_hasher(BLOCK, sha256_cbor)
        self._stories: dict[str, tuple[list[int], np.ndarray]] = {}

    # ---- as the engine's front asks ------------------------------------------------------

    def add(self, name: str, prompt: Sequence[int], most: int, priority: int) -> None:
        params = SamplingParams(max_tokens=most, ignore_eos=True)
        request = Request(
            name, list(prompt), params, None, block_hasher=self._hasher, priority=priority
        )
        self._stories[name] = story(tuple(prompt))
        self.scheduler.add_request(request)

    def abort(self, name: str) -> None:
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    @property
    def names(self) -> list[str]:
        """Requests that have not ended."""
        requests = self.scheduler.requests.items()
        return [name for name, request in requests if not request.is_finished()]

    @property
    def is_busy(self) -> bool:
        return bool(self._queue) or self.scheduler.has_requests()

    def preempt_all(self) -> bool:
        """As for new weights: False if requests wait for their loads, as vLLM then refuses."""
        waiting = self.scheduler.requests.values()
        if any(one.status is RequestStatus.WAITING_FOR_REMOTE_KVS for one in waiting):
            return False
        try:
            self.scheduler.reset_prefix_cache(reset_running_requests=True)
        except RuntimeError:  # blocks are held until their stores are made
            return False
        return True

    def sleep(self) -> None:
        """vLLM's sleep mode, of a level that discards the KV cache, and waking up."""
        for name in self.names:
            self.abort(name)
        while self.is_busy:
            self.step()
        self.machine.synchronize()  # as vLLM's worker does
        assert self.scheduler.reset_prefix_cache(True, reset_connector=True)
        for rank in self.ranks:
            rank.worker.unregister()
            for rows in rank.memory:
                self.machine.free(rows.data_ptr(), rows.numel())
                rows.fill_(255)
            rank.worker.restore()
        shards = {(0, rank.number): rank.worker.shard() for rank in self.ranks}
        self.scheduler.connector.set_xfer_handshake_metadata_pp_aware(shards)
        assert self.scheduler.connector._scheduler is self.side

    def fail(self) -> None:
        """A step whose result cannot be fetched, and whose KV is wrong, as vLLM 0.33 takes it with
        fault tolerance: the workers' reports come with the next step's, and all requests are
        aborted."""
        while self._queue:
            self._take()
        self._garbles = True
        output = self.scheduler.schedule()
        results = [self._execute_on(rank, output) for rank in self.ranks]
        self._garbles = False
        self._aggregator.ft_defer_kv_connector_outputs(
            [result.kv_connector_output for result in results]
        )
        # vLLM 0.33.0 does not count this step as done: where steps overlap, blocks that are freed
        # later stay taken until as many more steps are made, at last all of them.
        self.scheduler.processed_step_seq = self.scheduler.sched_step_seq
        self.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)

    def step(self) -> None:
        """One turn of vLLM's loop."""
        if self.scheduler.has_requests():
            output = self.scheduler.schedule()
            self._queue.append((output, *self._execute(output)))
            computes = output.total_num_scheduled_tokens > 0
            if (
                self.overlapping
                and len(self._queue) < 2
                and (computes or self.scheduler.has_requests())
            ):
                return
        if self._queue:
            self._take()

    def close(self) -> None:
        for rank in self.ranks:
            rank.worker.close()

    # ---- what an engine that offloads has of its own -------------------------------------

    def _make_planner(self) -> Any:
        """Of the offload of long sequences; None without."""
        return None

    def _cache(self, blocks: int) -> SimulatedCache:
        """A KV group of ``LAYERS`` layers for each of ``reaches``: the tokens of its window; 0:
        full attention. As in vLLM all groups lie in the same memory, and take blocks of it."""
        sizes: dict[str, Any] = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 4}
        specs: list[KVCacheSpec] = [
            SlidingWindowSpec(dtype=torch.float32, sliding_window=reach, **sizes)
            if reach
            else FullAttentionSpec(dtype=torch.float32, **sizes)
            for reach in self.reaches
        ]
        return SimulatedCache.of(blocks, specs)

    # ---- within --------------------------------------------------------------------------

    def _take(self) -> None:
        """The next result of a step that was begun."""
        output, result, end = self._queue.popleft()
        end.wait()
        self.scheduler.update_from_output(output, result)

    def _execute(self, output: Any) -> tuple[ModelRunnerOutput, Mark]:
        """A step of all workers: queues work, and returns."""
        self.preempted += len(output.preempted_req_ids or ())
        self.machine.now += HOST_S
        results = [self._execute_on(rank, output) for rank in self.ranks]
        result = self._aggregator.aggregate(results)
        assert result is not None
        return result, self.machine.computing.record()

    def _execute_on(self, rank: Rank, output: Any) -> ModelRunnerOutput:
        """As vLLM does it for workers in processes of their own."""
        orders, worker = pickle.loads(pickle.dumps(output.kv_connector_metadata)), rank.worker
        worker.before_overwrite(orders)
        if self._zeroes:
            # Also blocks that were to be computed into when an earlier step was sent, and are
            # loaded into now (see transfer_async in vLLM's kv_offload/cpu/gpu_worker.py).
            loaded = [id for load in orders.loads for copy in load.copies for id in copy.block_ids]
            self._zero(rank, [*(output.new_block_ids_to_zero or ()), *loaded])
        if self._loads_first:
            worker.start_loads(orders)
        result = self._forward(rank, output)
        if not self._loads_first:
            worker.start_loads(orders)
        worker.start_stores(orders)
        released, loaded, failed = worker.finished()
        worker.attention_counts()  # as the connector does for vLLM's metrics
        result.kv_connector_output = KVConnectorOutput(
            finished_sending=released or None,
            finished_recving=loaded or None,
            failed_recving=failed,
            kv_connector_worker_meta=pickle.loads(pickle.dumps(worker.report())),
        )
        return result

    def _watch_commits(self) -> None:
        """Records are read by this thread as soon as they are committed, as the writer of a lower
        tier does."""
        offsets: dict[bytes, int] = {}
        reserve, commit = self.pool.reserve, self.pool.commit

        def reserving(keys: Any, *args: Any, **kwargs: Any) -> Any:
            answers = reserve(keys, *args, **kwargs)
            for key, answer in zip(keys, answers, strict=True):
                if answer.verdict is Verdict.RESERVED:
                    offsets[key] = answer.offset
            return answers

        def committing(keys: Any) -> None:
            base = self.pool.arena.array().ctypes.data
            for key in keys:
                cells = self.slot_cells(base + offsets[key])
                self.machine.host(cells, set(), "the tier's writer")
            commit(keys)

        self.pool.reserve, self.pool.commit = reserving, committing  # type: ignore[method-assign]

    def slot_cells(self, address: int) -> Cells:
        """Of a slot in the pool's mapping of the arena: those in each worker's."""
        offset = address - self.pool.arena.array().ctypes.data
        found: Cells = set()
        for rank in self.ranks:
            memory = rank.worker._arena.memory(self.pool.arena_handle())
            assert memory is not None
            part = rank.part
            begin = memory.ctypes.data + offset + part.start
            found.update(self.machine.cells(begin, len(part)))
        return found

    def _zero(self, rank: Rank, ids: list[int]) -> None:
        def work() -> None:
            for rows in rank.memory:
                rows[ids] = 0

        if not ids:
            return
        self.machine.computing.launch(work, set(), rank.cells(ids), "zeroing")

    def _forward(self, rank: Rank, output: Any) -> ModelRunnerOutput:
        reads: Cells = set()
        writes: Cells = set()
        parts = []
        tokens: list[list[int]] = []
        for name, count in output.num_scheduled_tokens.items():
            request = self.scheduler.requests[name]
            end = request.num_computed_tokens
            start = end - count
            tables = self.scheduler.kv_cache_manager.get_block_ids(name)
            for group, (ids, reach) in enumerate(zip(tables, self.reaches, strict=True)):
                first = max(0, start + 1 - reach) if reach else 0
                last = -(-end // BLOCK)
                assert all(ids[first // BLOCK : last]), "a block that is attended to is gone"
                reads |= rank.cells(ids[first // BLOCK : -(-start // BLOCK)])
                writes |= rank.cells(ids[start // BLOCK : last])
                parts.append(Part(name, group, first, start, end, ids[:last]))
            tokens.append([] if request.is_prefill_chunk else [self._stories[name][0][end]])
        if parts:
            work = functools.partial(self._compute, rank, parts, self._garbles)
            seconds = TOKEN_S * output.total_num_scheduled_tokens
            self.machine.computing.launch(work, reads - writes, writes, "the forward pass", seconds)
        names = list(output.num_scheduled_tokens)
        return ModelRunnerOutput(names, {name: at for at, name in enumerate(names)}, tokens)

    def _compute(self, rank: Rank, parts: list[Part], garbles: bool) -> None:
        """Kernel: writes the new tokens of these requests, and then attends to all of them."""
        garbled = np.uint8(85 if garbles else 0)
        for layer, rows in enumerate(rank.memory):
            memory = rows.numpy().reshape(len(rows), BLOCK, TOKEN)
            for part in parts:
                at = np.arange(part.start, part.end)
                told = self._told(rank, part)[layer, at]
                memory[np.array(part.ids)[at // BLOCK], at % BLOCK] = told ^ garbled
            for part in parts if not garbles else ():
                at = np.arange(part.first, part.end)
                found = memory[np.array(part.ids)[at // BLOCK], at % BLOCK]
                if not np.array_equal(found, self._told(rank, part)[layer, at]):
                    self.wrong.append(f"{part.name} reads other KV than its tokens have")

    def _told(self, rank: Rank, part: Part) -> np.ndarray:
        """What a group of a rank computes for a request: uint8 ``[layers, tokens, TOKEN]``."""
        mark = (rank.number * len(self.reaches) + part.group) * LAYERS
        return self._stories[part.name][1] ^ np.uint8(mark)


@dataclass(frozen=True, slots=True)
class Part:
    """Tokens ``[start, end)`` of a request in one KV group, which attend to ``[first, end)``.
    ``ids``: the request's device blocks."""

    name: str
    group: int
    first: int
    start: int
    end: int
    ids: list[int]


init_none_hash(sha256_cbor)
