"""The worker side: copies bytes between this rank's device KV cache and the arena. Decides nothing.

A copy that cannot be made is reported as failed and the engine recomputes; nothing raises.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from kvrecall.engines.fingerprint import default_memory
from kvrecall.engines.vllm import wire
from kvrecall.engines.vllm.attention.activity import HeatTotals, totals_of
from kvrecall.engines.vllm.attention.backend import retrieval_groups
from kvrecall.engines.vllm.attention.group import RetrievalGroup
from kvrecall.engines.vllm.attention.offloaded import Records
from kvrecall.engines.vllm.compat import config
from kvrecall.engines.vllm.compat.config import settle_scales
from kvrecall.engines.vllm.compat.weights import note_model
from kvrecall.engines.vllm.connector.compare import deviation
from kvrecall.engines.vllm.connector.copier import ArenaMapping
from kvrecall.engines.vllm.connector.pages import GroupPages, LayerPages, pages_of
from kvrecall.engines.vllm.device import device_of
from kvrecall.engines.vllm.device.base import Event
from kvrecall.engines.vllm.identity.changes import RankWeights
from kvrecall.engines.vllm.identity.loaded import LoadedModel
from kvrecall.errors import EngineError
from kvrecall.nicety import nicety
from kvrecall.pool.base import ArenaHandle

_ROWS, _COLUMNS, _TIMES = 512, 2048, 4  # of products that tell what a token of a prefill costs
_LONG_S, _MOST_ROWS = 1e-3, 16_384  # rows are doubled until a product takes so long


class RecallWorker:
    """Worker side of the connector for one rank. Called from the worker's thread only."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any) -> None:
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._groups: tuple[GroupPages, ...] = ()  # layers and their digests, by KV group
        self._layers: tuple[int, ...] = ()  # how many of each group's pages are layers
        self._mapping: ArenaMapping | None = None  # once ``shard`` has settled where it writes
        self._loading: deque[str] = deque()  # requests, in the order of their loads
        self._storing: deque[int] = deque()  # store ids, likewise
        self._releases: list[tuple[int, str]] = []  # (stores that must be done, request)
        self._stores_begun = 0
        self._stores_done = 0
        self._failed_loads: set[str] = set()
        self._stuck: set[str] = set()  # requests whose loads are, as reported
        self._report = wire.StepReport()
        self._retrieval: dict[int, list[RetrievalGroup]] = {}
        """By KV group: layers whose heads or types of keys differ have one each."""
        self._attention: Mapping[str, int] = {}  # their totals when they were last reported
        self._model: torch.nn.Module | None = None  # until ``shard`` has read it
        self._offloading = False
        self._applied: wire.StepOrders | None = None
        self._open: wire.StepOrders | None = None  # of a step that has begun and not ended
        self._loads_begun = False  # that step's
        self._step_began: Event | None = None
        self._timed: deque[tuple[int, Event, Event]] = deque()  # steps under way: begin and end
        self._shard: wire.Shard | None = None
        self.weights = RankWeights(default_memory())
        self._is_traced = config.traces_endpoint(vllm_config) is not None

    def register(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Registers the device KV cache: one tensor per layer."""
        settle_scales(self._vllm_config, kv_caches)
        cfg, fp8 = self._kv_cache_config, config.fp8_type(self._vllm_config)
        sharing = config.sharing_of(self._vllm_config, cfg)
        groups = [
            list(pages_of(kv_caches, placements, cfg.num_blocks, fp8, sharing.contexts))
            for placements in config.layer_placements(cfg, self._vllm_config)
        ]
        pages = [page for group in groups for page in group]
        if not pages:
            raise EngineError("the engine registered no KV cache memory; nothing to pool")
        self._where = pages[0].rows.device
        self._device = device_of(self._where)
        self._layers = tuple(map(len, groups))
        number_of = {page.name: at for at, group in enumerate(groups) for page in group}
        for retrieval in retrieval_groups(self._vllm_config):
            number = number_of[retrieval.layer_names[0]]
            self._retrieval.setdefault(number, []).append(retrieval)
            groups[number] += (
                LayerPages(name, rows, f"{tuple(rows.shape[1:])} bytes")
                for name, rows in retrieval.register(kv_caches).items()
            )
        self._groups = tuple(GroupPages(tuple(group), sharing=sharing) for group in groups)

    def unregister(self) -> None:
        """vLLM takes the KV cache's memory away (sleep mode): loads and stores fail until
        ``restore``. Waits for copies in flight; raises EngineError if they do not end."""
        if self._mapping is not None:
            self._mapping.suspend()
            self._failed_loads.update(self._loading)  # what they have loaded goes, too

    def restore(self) -> None:
        """The memory is back, at the same addresses."""
        if self._mapping is not None:
            self._mapping.resume()

    def shard(self) -> wire.Shard:
        """This rank's part of a block. Must be called on all ranks at once: they communicate."""
        if self._shard is None:
            self._shard = self._settle_shard()
        self._model = None
        return self._shard

    def _settle_shard(self) -> wire.Shard:
        layers = tuple(
            wire.ShardLayer(
                page.name, page.page_bytes, page.layout, number, page.heads, page.tokens > 0
            )
            for number, group in enumerate(self._groups)
            for page in group.pages
        )
        counted = zip(self._groups, self._layers, strict=True)
        names = tuple(page.name for group, count in counted for page in group.pages[:count])
        retrieval = self._retrieval_groups
        overhead = max((group.overhead_bytes for group in retrieval), default=0)
        overhead = config.most_of_ranks(overhead)
        for group in retrieval:
            group.settle_gate(overhead)
        replicas = 1 if self._model is None else config.head_replicas(self._model, names)
        sharing = config.sharing_of(self._vllm_config, self._kv_cache_config, replicas)
        groups = [replace(pages, sharing=sharing) for pages in self._groups]
        for at, pages in enumerate(groups):  # on all ranks at once
            sizes = [page.page_bytes for page in pages.pages]
            pieces = [pages.piece_bytes(page) for page in pages.pages]
            starts = tuple(config.record_places(sizes, pieces, sharing))
            groups[at] = replace(pages, starts=starts)
        self._groups = tuple(groups)
        self._mapping = ArenaMapping(self._groups)
        flops, hidden = config.prompt_token_work(self._vllm_config)
        dtype = self._vllm_config.model_config.dtype
        return wire.Shard(
            layers,
            config.kernel_of(self._vllm_config, names),
            self._device.in_step,
            least_token_seconds(flops, hidden, dtype, self._where),
            None if self._model is None else LoadedModel.of(self._model),
            sharing,
            self._device.numa_node(),
            overhead,
        )

    def map_arena(self, handle: ArenaHandle) -> None:
        """Maps the arena before the engine serves, and returns when what is populated of it is
        page-locked, or a minute is over. Without effect if it cannot be mapped: copies say so."""
        self._arena.prepare(handle, self._device.numa_node())
        self._device.wait_locked(60.0)

    def see_model(self, model: torch.nn.Module) -> None:
        """Registers the model that this rank has loaded. Called before ``shard``."""
        self._model = model
        note_model(model, self.weights)

    @property
    def _arena(self) -> ArenaMapping:
        assert self._mapping is not None, "the engine has not requested this rank's shard yet"
        return self._mapping

    def start_loads(self, orders: wire.StepOrders) -> None:
        self._loads_begun = True
        for load in orders.loads:
            written = [
                (group, copy.block_ids)
                for copy in load.copies
                for group in self._retrieval.get(copy.group, ())
            ]
            for group, ids in written:
                group.note_overwritten(ids)
            if load.copies and self._arena.load(orders.arena, *load.copies):
                for group, ids in written:
                    group.note_restored(ids)
                self._loading.append(load.request_id)
            else:
                self._failed_loads.add(load.request_id)

    def start_stores(self, orders: wire.StepOrders) -> None:
        """Starts the step's stores; the forward pass has been submitted."""
        self._open = None
        if orders.timed is not None and self._step_began is not None:
            ended = self._device.current().record()
            self._timed.append((orders.timed, self._step_began, ended))
            self._step_began = None
        for store in orders.stores:
            if not self._groups[0].sharing.writes(config.stage_rank()):  # another rank has the same
                self._note_stored(store.store_id)
                continue
            has_room = self._has_room(orders, store)
            for group in self._retrieval.get(store.copy.group, ()) if has_room else ():
                group.before_store(store.copy.block_ids)
            if has_room and self._arena.store(orders.arena, store.copy):
                self._sign(orders, store)
                self._storing.append(store.store_id)
                self._stores_begun += 1
            else:
                self._note_stored(store.store_id, failed=True)
        self._releases.extend((self._stores_begun, request_id) for request_id in orders.releases)
        for comparison in orders.comparisons:
            self._compare(orders.arena, comparison)

    def step_failed(self, orders: wire.StepOrders) -> None:
        """The forward pass of these orders' step failed, and the engine may go on: nothing that it
        was to compute is copied or compared, and loads that have not begun fail."""
        self._open = self._step_began = None
        for store in orders.stores:
            self._note_stored(store.store_id, failed=True)
        if not self._loads_begun:
            self._failed_loads.update(load.request_id for load in orders.loads)
        self._releases.extend((self._stores_begun, request_id) for request_id in orders.releases)
        for one in orders.comparisons:
            self._note_compared(one, wire.Deviation())

    def _note_stored(self, store_id: int, failed: bool = False) -> None:
        self._report.stored[store_id] = 1
        if failed:
            self._report.failed.add(store_id)

    def _note_compared(self, comparison: wire.Comparison, found: wire.Deviation) -> None:
        ranks, known = self._report.compared.get(comparison.number, (0, wire.Deviation()))
        self._report.compared[comparison.number] = ranks + 1, known.plus(found)

    def _has_room(self, orders: wire.StepOrders, store: wire.StoreOrder) -> bool:
        """Whether records of this rank's size, with origins behind them, lie in the arena."""
        number, sizes = store.copy.group, orders.record_bytes
        if not 0 <= number < len(sizes) == len(self._groups):
            return False
        most = max(store.copy.offsets, default=0) + sizes[number] + wire.ORIGIN_BYTES
        fits = most <= orders.arena.nbytes and self._groups[number].end <= sizes[number]
        return fits and len(store.origin) == wire.ORIGIN_BYTES

    def _sign(self, orders: wire.StepOrders, store: wire.StoreOrder) -> None:
        """Writes the origin behind the records that are stored, once for all ranks."""
        number = store.copy.group
        is_first = 0 in self._groups[number].places
        memory = self._arena.memory(orders.arena) if is_first else None
        if memory is None:
            return
        origin = np.frombuffer(store.origin, dtype=np.uint8)
        for offset in store.copy.offsets:
            at = offset + orders.record_bytes[number]
            memory[at : at + len(origin)] = origin

    def _compare(self, arena: ArenaHandle, comparison: wire.Comparison) -> None:
        """Compares device blocks with the pool's, this rank's part of them."""
        memory = self._arena.memory(arena)
        found = wire.Deviation()
        copy = comparison.copy
        if memory is not None and copy.block_ids:
            group = self._groups[copy.group]
            found = deviation(
                replace(group, pages=group.pages[: self._layers[copy.group]]),
                torch.from_numpy(memory),
                copy.block_ids,
                copy.offsets,
                self._vllm_config.model_config.dtype,
                config.is_deterministic(),
            )
        self._note_compared(comparison, found)
        if comparison.starts_over and not (found.blocks and found.within):
            self._report.refuted.add(comparison.request_id)

    def before_overwrite(self, orders: wire.StepOrders) -> None:
        """Called before the step writes any device block or builds attention metadata.

        Does nothing the second time for the same orders: with Model Runner V2 both
        ``compat.runner.hand_orders_first`` and vLLM call it.
        """
        if orders is self._applied:
            return
        if self._open is not None:
            self.step_failed(self._open)
        self._applied, self._open, self._loads_begun = orders, orders, False
        self._step_began = self._device.current().record() if orders.timed is not None else None
        if orders.stores_first:
            self._arena.stores_first()
        if orders.offload is not None or self._offloading:
            self._offload(orders)

    def finished(self) -> tuple[set[str], set[str], set[str]]:
        """Requests whose device blocks may be freed, whose load ended, and whose load failed."""
        if self._mapping is None:
            return set(), set(), set()
        self._take_times()
        loads, stores = self._mapping.completed()
        over = {self._loading.popleft(): moved for moved in loads}
        loaded = set(over)
        if self._is_traced:
            self._report.copied |= {request_id: moved.seconds for request_id, moved in over.items()}
        self._failed_loads.update(request_id for request_id, moved in over.items() if moved.failed)
        loads_stuck, stores_stuck = self._mapping.is_stuck
        self._stuck.intersection_update(self._loading)
        if loads_stuck:
            self._report.stuck.update(set(self._loading) - self._stuck)
            self._stuck.update(self._loading)
        failed = self._failed_loads - set(self._loading)  # nothing is written there any more
        self._failed_loads -= failed
        for moved in stores:
            self._note_stored(self._storing.popleft(), moved.failed)
        self._stores_done += len(stores)
        # What a stuck store still reads is not committed, so it may be anything.
        done = self._stores_begun if stores_stuck else self._stores_done
        released = {request for begun, request in self._releases if begun <= done}
        self._releases = [one for one in self._releases if one[1] not in released]
        loads, stores = ([moved for moved in of if not moved.failed] for of in (loads, stores))
        self._report.loaded_bytes += sum(moved.nbytes for moved in loads)
        self._report.load_seconds += sum(moved.seconds for moved in loads)
        self._report.load_rank_seconds = self._report.load_seconds
        self._report.stored_bytes += sum(moved.nbytes for moved in stores)
        self._report.store_seconds += sum(moved.seconds for moved in stores)
        return released, loaded | failed, failed

    @nicety("the timing of steps")
    def _take_times(self) -> None:
        while self._timed and self._timed[0][2].is_reached():
            step, began, ended = self._timed.popleft()
            self._report.timed[step] = ended.seconds_since(began)

    def report(self) -> wire.StepReport | None:
        """Events since the last report; None without any."""
        news = self.weights.news()
        self._report.reloaded, self._report.adapters = news.is_reloaded, news.adapters
        self._report.swapped = set(news.swapped)
        report, self._report = self._report, wire.StepReport()
        return None if report == wire.StepReport() else report

    @property
    def _retrieval_groups(self) -> list[RetrievalGroup]:
        return [group for groups in self._retrieval.values() for group in groups]

    def attention_counts(self) -> dict[str, float]:
        """Counters of the attention layers since the last call: increments."""
        totals = totals_of(group.counted() for group in self._retrieval_groups)
        new = {name: count - self._attention.get(name, 0) for name, count in totals.items()}
        self._attention = totals
        return {f"retrieval_{name}": float(count) for name, count in new.items() if count}

    def attention_heat(self) -> dict[int, list[list[int]]]:
        """Where in their contexts the attention layers selected blocks, since the last call."""
        heat = HeatTotals()
        for group in self._retrieval_groups:
            heat.add(group.heat.take())
        return heat.take()

    def close(self) -> None:
        if self._mapping is not None:
            self._mapping.close()

    def _offload(self, orders: wire.StepOrders) -> None:
        """Reports partially offloaded sequences to the attention layers."""
        offload = orders.offload
        self._offloading = offload is not None
        records = memory = None
        if offload is not None and (offload.arrivals or offload.departures):
            memory = self._arena.memory(orders.arena)
        if memory is not None:  # else the arena cannot be mapped
            (only,) = self._groups
            places = zip((page.name for page in only.pages), only.places, strict=True)
            records = Records(memory, dict(places), orders.arena)
        groups = self._retrieval_groups
        lost = {one for group in groups for one in group.take(offload, records)}
        self._arena.keep(frozenset(one for group in groups for one in group.arenas))
        arriving = set() if offload is None else {one.request_id for one in offload.arrivals}
        self._failed_loads |= lost & arriving
        self._report.lost |= lost


@nicety("the measurement of this device's speed", 0.0)
def least_token_seconds(
    flops: float, hidden: int, dtype: torch.dtype, where: torch.device
) -> float:
    """Minimum seconds to compute a prompt token: its ``flops`` operations in products of width
    ``hidden`` at the rate this device reaches now. 0 if either is 0.

    The first request after a start may find its prefix on a slow disk, and must know how long it
    may wait. Takes some milliseconds: the best of a few tries by the device's own time, of products
    so large that it counts and not what a launch takes.
    """
    if not (flops and hidden):
        return 0.0
    stream = device_of(where).current()
    b = torch.ones((hidden, _COLUMNS), dtype=dtype, device=where)
    rows = _ROWS
    while True:
        a = torch.ones((rows, hidden), dtype=dtype, device=where)
        best = float("inf")
        for _ in range(_TIMES):  # the first includes other costs
            began = stream.record()
            torch.mm(a, b)
            ended = stream.record()
            ended.wait()
            best = min(best, ended.seconds_since(began))
        if best >= _LONG_S or rows >= _MOST_ROWS:
            return flops * best / (2.0 * rows * hidden * _COLUMNS)
        rows *= 2
