"""``RecallConnector``: the class that vLLM loads. It only forwards calls to one of its sides."""

from __future__ import annotations

import functools
import logging
import multiprocessing
import os
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)

from kvrecall.attention.selection import Gate
from kvrecall.block import Namespace
from kvrecall.config import RecallSettings
from kvrecall.engines.vllm import wire
from kvrecall.engines.vllm.attention.checks import offload_hindrance, reads_in_place
from kvrecall.engines.vllm.attention.plugin import active_settings, is_requested
from kvrecall.engines.vllm.compat import config, events, runner, scheduler, versions, waits, weights
from kvrecall.engines.vllm.compat.processes import end_with_parent, show_pool_lines
from kvrecall.engines.vllm.compat.versions import BESIDE_OTHERS, CONNECTOR_MODULE
from kvrecall.engines.vllm.connector.metrics import RecallPromMetrics, RecallStats
from kvrecall.engines.vllm.connector.offload import OffloadPlanner
from kvrecall.engines.vllm.connector.scheduler import MakePlanner, RecallScheduler
from kvrecall.engines.vllm.connector.traces import Traces
from kvrecall.engines.vllm.connector.worker import RecallWorker
from kvrecall.engines.vllm.identity import fields
from kvrecall.engines.vllm.identity.namespace import Adapters, namespace_of
from kvrecall.engines.vllm.identity.weights import FINGERPRINT_S, RunningWeights, weights_of
from kvrecall.errors import ConfigError, EngineError, KvrecallError
from kvrecall.nicety import nicety
from kvrecall.pool.base import ArenaHandle, PoolClient
from kvrecall.pool.pool import Pool
from kvrecall.pool.service.client import ServiceClient, open_pool
from kvrecall.pool.service.endpoint import AdminEndpoint
from kvrecall.pool.slots import slot_bytes_of

logger = logging.getLogger("vllm.kvrecall")


class RecallConnector(KVConnectorBase_V1, SupportsHMA):
    """Recalls KV blocks from the pool and saves new ones into it.

    Settings come from ``kv_connector_extra_config``; see ``RecallSettings.from_mapping``.
    """

    _scheduler: RecallScheduler | None = None
    _worker: RecallWorker | None = None
    _pool: PoolClient | None = None
    _endpoint: AdminEndpoint | None = None
    _events: events.EngineEvents | None = None
    _traces: Traces | None = None
    _handled: BaseException | None = None
    """What the caller of a step may be handling: the step has not raised it."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        show_pool_lines()
        self._last_states: tuple[str, list[tuple[int, int, int]]] = "", []
        config.require_supported(vllm_config, kv_cache_config)
        waits.install()
        if role is KVConnectorRole.WORKER:
            runner.mend_on_cpu()
            runner.hand_orders_first(vllm_config, wire.StepOrders)
            self._worker = RecallWorker(vllm_config, kv_cache_config)
            runner.show_model(vllm_config, self._worker.see_model)
            worker = self._worker
            weights.note_loads(vllm_config, worker.weights, worker.unregister, worker.restore)
        else:
            if multiprocessing.current_process().name.startswith("EngineCore"):
                end_with_parent()
            scheduler.reschedule_lost(wire.StepReport)
            if events.are_published(vllm_config):
                events.replay_everything()  # vLLM makes the publisher next
            self._settings = _settings_of(vllm_config)
            self._started = weights_of(vllm_config)
            _warn_if_hopeless(vllm_config)
            self._pool = open_pool(self._settings)
            self._endpoint = _endpoint(self._pool, self._settings)

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a cache guarantees no delivery; a lost save is a later miss."""
        return False

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        """False: a hit begins where every group has its blocks on the device. If it began behind
        all that full attention has there, a pool with as much of it could not bring back a state
        that the device has lost, and vLLM would compute the prompt."""
        return False

    # ---- worker side --------------------------------------------------------------------

    @property
    def _w(self) -> RecallWorker:
        assert self._worker is not None
        return self._worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._w.register(kv_caches)

    def unregister_kv_caches(self) -> None:
        self._w.unregister()

    def restore_kv_caches(self) -> None:
        self._w.restore()

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """None beside others, of which one may need it: vLLM takes that of the first alone."""
        is_beside = has_kv_transfer_group() and get_kv_transfer_group() is not self
        return None if is_beside else self._w.shard()

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        self._handled = sys.exc_info()[1]
        self._w.before_overwrite(kv_connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._w.start_loads(self._get_connector_metadata())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Does nothing: all loads are asynchronous, and a request runs when they are done."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Does nothing per layer: blocks are saved whole, after the step."""

    def wait_for_save(self) -> None:
        orders = self._get_connector_metadata()
        if self._is_failing():
            self._w.step_failed(orders)
        else:
            self._w.start_stores(orders)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        orders = self._get_connector_metadata()
        if self._is_failing():
            return KVConnectorTransferResults()
        if not orders.computes and not versions.saves_without_computing():
            self._w.start_stores(orders)
        released, loaded, failed = self._w.finished()
        return KVConnectorTransferResults(
            finished_sending=released, finished_recving=loaded, failed_recving=failed
        )

    def build_connector_worker_meta(self) -> wire.StepReport | None:
        return None if self._is_failing() else self._w.report()

    def _is_failing(self) -> bool:
        """Whether the step's forward pass has raised: Model Runner V1 ends the step all the same,
        and drops what it is told. What is not told now is told after the next step."""
        return sys.exc_info()[1] not in (None, self._handled)

    # ---- scheduler side -----------------------------------------------------------------

    @property
    def _s(self) -> RecallScheduler:
        assert self._scheduler is not None, "the workers have not reported their shards yet"
        return self._scheduler

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: Mapping[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Opens the scheduler side: the engine is up, and every rank has reported its shard of a
        block. 0.33 calls it again after sleep; what is known of requests, and of namespaces that
        are private since the weights may have changed, stays."""
        if self._scheduler is not None:
            return
        assert self._pool is not None
        told: Sequence[Any] = [metadata[rank] for rank in sorted(metadata)]
        if not any(isinstance(one, wire.Shard) for one in told):  # of a connector beside this one
            told = scheduler.on_workers(self._vllm_config, _shard_of)
            if not told:
                raise ConfigError(BESIDE_OTHERS)
        shards = [shard for shard in told if isinstance(shard, wire.Shard)]
        assert len(shards) == len(told)
        facts = self._facts(shards)
        arena_bytes = self._pool.arena_handle().nbytes
        if arena_bytes:  # none while a pool service is not there
            _check_room(arena_bytes, facts, self._vllm_config.model_config.max_model_len)
        self._started.wait(FINGERPRINT_S)
        self._weights = RunningWeights(
            self._started,
            lambda: self._s.weights_changed(),
            lambda loaded, swapped: self._s.adapters_loaded(loaded, swapped),
        )
        make_planner = self._offload(facts, shards)
        self._traces = self._begin_traces(facts)
        self._scheduler = RecallScheduler(
            self._pool,
            self._settings,
            facts,
            lambda: self._namespace(shards),
            Adapters(fields.adapter_ingredients(self._vllm_config)),
            scheduler.device_blocks(self._kv_cache_manager),
            scheduler.first_needed(self._kv_cache_manager),
            scheduler.reachable_blocks(self._kv_cache_manager),
            scheduler.room_for(self._kv_cache_manager),
            scheduler.tail_hash(self._vllm_config, facts.block_size),
            self._kv_cache_manager.evict_blocks,
            scheduler.part_ways(self._kv_cache_manager),
            lambda: self._weights.loaded(
                weights.look_at(functools.partial(scheduler.on_workers, self._vllm_config))
            ),
            make_planner,
            [] if self._traces is None else [self._traces],
        )
        weights.watch_weights(self._kv_cache_manager, self._weights)
        scheduler.give_up_late(self._kv_cache_manager, self._scheduler.late)
        if self._scheduler.misses is not None:
            scheduler.while_computing(self._kv_cache_manager, self._scheduler.misses.aside)
        if self._scheduler.offload is not None:
            scheduler.block_manager(self._kv_cache_manager).planner = self._scheduler.offload
        self._events = self._pool_events(self._scheduler)
        self._ready_arena(facts, {node for one in shards if (node := one.numa_node) is not None})
        self._tell_open(facts, arena_bytes)

    @nicety("a log line")
    def _tell_open(self, facts: wire.EngineFacts, arena_bytes: int) -> None:
        disk, remote = self._settings.pool.disk, self._settings.pool.remote
        below = f"disk {disk.capacity_bytes / 2**30:.2f} GiB in {disk.path}" if disk else "no disk"
        below += f", remote {remote.kind}" if remote else ""
        below = "by the node's pool service" if self._settings.backend == "service" else below
        logger.info(
            "kvrecall: pool open as %s: host %.2f GiB, %s, %s, hits in units of %d tokens",
            self._vllm_config.kv_transfer_config.kv_role,
            arena_bytes / 2**30,
            below,
            _groups_text(facts),
            facts.unit,
        )

    def _ready_arena(self, facts: wire.EngineFacts, near: Collection[int]) -> None:
        """Before the engine serves: has the arena near its devices, on the NUMA nodes ``near``, and
        mapped and page-locked by every worker."""
        assert self._pool is not None
        if isinstance(self._pool, Pool) and not facts.copies_in_step:
            if near and not self._pool.arena.prefer(near):
                logger.warning("kvrecall: the kernel refuses to place host memory near the devices")
            self._pool.arena.wait_ready()
        handle = self._pool.arena_handle()
        if handle.nbytes:  # none while a pool service is not there
            scheduler.on_workers(self._vllm_config, functools.partial(_map_arena, handle=handle))

    def _pool_events(self, side: RecallScheduler) -> events.EngineEvents | None:
        """What publishes the pool's tiers; None if none are, or the pool is not its own."""
        if not events.are_published(self._vllm_config):
            return None
        if isinstance(self._pool, ServiceClient):  # the service publishes: pool serve --events
            events.listen(self._pool.describe)
        if not isinstance(self._pool, Pool):
            return None
        return events.EngineEvents(self._pool, lambda: side.namespaces.live, self._kv_cache_manager)

    @nicety("the start of traces")
    def _begin_traces(self, facts: wire.EngineFacts) -> Traces | None:
        """None without vLLM's ``--otlp-traces-endpoint``."""
        endpoint = config.traces_endpoint(self._vllm_config)
        if endpoint is None:
            return None
        device, is_service = config.device_kind(), isinstance(self._pool, ServiceClient)
        dropped = lambda: self._s.counters.counted("traces_dropped")  # noqa: E731
        return Traces(endpoint, facts, device, is_service, dropped)

    def _offload(self, facts: wire.EngineFacts, shards: Sequence[wire.Shard]) -> MakePlanner | None:
        """With retrieval on, makes the planner of the partial offload of long sequences: of those
        that the workers attend to sparsely, as their gate decides by the same number."""
        if not is_requested(os.environ) or offload_hindrance(self._vllm_config) is not None:
            return None
        assert self._pool is not None
        settings, in_place = active_settings(), reads_in_place()
        token_bytes = config.layer_token_bytes(self._kv_cache_config)
        overhead_bytes = max(shard.overhead_bytes for shard in shards)
        gate = Gate(settings, token_bytes, overhead_bytes, config.is_on_cpu())
        wait_s = self._settings.pool.load_deadline_s
        return functools.partial(
            OffloadPlanner, self._pool, settings, facts.block_size, gate, wait_s, in_place=in_place
        )

    def _facts(self, shards: list[wire.Shard]) -> wire.EngineFacts:
        sharing = shards[0].sharing if shards else config.ALONE
        ranks = sharing.ranks * self._vllm_config.parallel_config.pipeline_parallel_size
        if len(shards) != ranks:
            raise EngineError(
                f"{len(shards)} of {ranks} ranks report their shard of a block; kvrecall "
                "supports tensor and pipeline parallel engines whose ranks all report"
            )
        groups = config.kv_groups(self._kv_cache_config, sharing.contexts)
        nbytes = [
            sum(shard.nbytes(group) * shard.sharing.parts for shard in shards) // sharing.ranks
            + wire.ORIGIN_BYTES
            for group in range(len(groups))
        ]
        exact_blocks = wire.ALL_BLOCKS
        if is_requested(os.environ):
            size = config.kv_groups(self._kv_cache_config)[0].block_size
            exact_blocks = active_settings().exact_blocks(size)
        unit = config.match_unit(self._kv_cache_config, self._settings.match_unit)
        if unit is not None and is_requested(os.environ):
            raise ConfigError(
                f"match_unit is {unit}, and retrieval attention is on, which selects whole blocks "
                "and keeps a digest of each: turn one of the two off"
            )
        # Only in consumers does vLLM protect blocks from loads that overtake a running step.
        only_writes = self._settings.access == "write"
        recalls = config.loads_are_ordered(self._vllm_config)
        if not (recalls or only_writes):
            logger.warning(
                "kvrecall: this kv_producer saves blocks and recalls none, because it overlaps "
                "steps, in which vLLM allows no loads. Set kv_role to kv_both to do both"
            )
        return wire.EngineFacts(
            groups=tuple(wire.GroupFacts(*each) for each in zip(groups, nbytes, strict=True)),
            hash_block_size=versions.hash_block_size(self._vllm_config, self._kv_cache_config),
            ranks=ranks,
            copies_in_step=all(shard.copies_in_step for shard in shards),
            recalls=recalls and not only_writes,
            only_writes=only_writes,
            least_token_seconds=max(shard.token_seconds for shard in shards),
            rank_share=max(sum(one.page_bytes for one in rank.layers) for rank in shards)
            / sum(nbytes),
            exact_blocks=exact_blocks,
            match_unit=unit,
            recovers=bool(self._vllm_config.parallel_config.enable_fault_tolerance),
            has_experts=bool(self._vllm_config.parallel_config.is_moe_model),
        )

    @nicety("the naming of this engine's blocks, so that none are pooled,")
    def _namespace(self, shards: list[Any]) -> Namespace | None:
        """None until the engine's weights are identified."""
        if not self._weights.is_known:
            return None
        namespace = namespace_of(
            self._vllm_config, self._kv_cache_config, shards, self._weights.text()
        )
        logger.info("kvrecall: namespace %s of %s", namespace.digest.hex(), dict(namespace.parts))
        return namespace

    def on_new_request(self, request: Any) -> None:
        self._s.admit(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self._s.match(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._s.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def get_external_cache_hit_sources(
        self, request: Any, num_external_tokens: int
    ) -> dict[Any, int]:
        return versions.hit_sources(self._s.sources(request))

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        assert self._pool is not None
        return self._s.orders(scheduler_output, self._pool.arena_handle())

    def update_connector_output(self, connector_output: Any) -> None:
        output = connector_output
        loaded, failed = output.finished_recving or set(), output.failed_recving or set()
        self._s.reported(output.kv_connector_worker_meta, loaded, failed)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        request_id, states = self._last_states
        self._last_states = "", []
        states = states if request_id == request.request_id else []
        return self._s.finished(request, block_ids, states)

    def register_finished_partial_tail(
        self,
        request: Any,
        block_ids: tuple[list[int], ...],
        partial_tail_offloads: list[tuple[int, int, int]],
    ) -> bool:
        self._last_states = request.request_id, partial_tail_offloads
        return False  # ``request_finished_all_groups`` follows and decides

    def reset_cache(self) -> bool | None:
        if weights.keeps_pool(self._kv_cache_manager):
            return True  # the weights are the same, or are known to be others
        return self._s.reset()

    def take_events(self) -> Iterable[Any]:
        if self._traces is not None:
            self._traces.step_ended()  # vLLM asks for events when it has a step's results
        return () if self._events is None else self._events.take()

    # ---- both ---------------------------------------------------------------------------

    @nicety("the statistics of this connector")
    def get_kv_connector_stats(self) -> RecallStats | None:
        if self._worker is not None:
            did, heat = self._worker.attention_counts(), self._worker.attention_heat()
            return RecallStats.of(did, heat) if did else None
        if self._scheduler is None or self._pool is None:
            return None
        counters = self._scheduler.counters
        if not counters.is_due(self._scheduler.is_busy):
            return None
        gauges = counters.watch(self._pool.stats())
        stats = counters.take()
        if not any(stats.data.values()):
            return None
        stats.data["gauges"] = gauges
        return stats

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> RecallStats | None:
        return RecallStats(data=data) if data else RecallStats.of({})

    @classmethod
    @nicety("the metrics of this connector")
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> RecallPromMetrics:
        return RecallPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()
        if self._traces is not None:
            self._traces.close()
        if self._endpoint is not None:
            self._endpoint.stop()
        if self._pool is not None:
            self._pool.close()
        if self._endpoint is not None:
            self._endpoint.close()


# A MultiConnector finds the class of its parts' statistics by name.
KVConnectorFactory.register_connector("RecallConnector", CONNECTOR_MODULE, "RecallConnector")


def _map_arena(_: object, handle: ArenaHandle) -> None:
    """In each worker."""
    for worker in _workers():
        worker.map_arena(handle)


def _shard_of(_: object) -> wire.Shard | None:
    """Likewise."""
    return next((worker.shard() for worker in _workers()), None)


def _workers() -> list[RecallWorker]:
    """The worker side in this process."""
    group = get_kv_transfer_group() if has_kv_transfer_group() else None
    parts = scheduler.parts_of(group, "_connectors")
    return [one._w for one in parts if isinstance(one, RecallConnector)]


@nicety("the endpoint for administration")
def _endpoint(pool: PoolClient, settings: RecallSettings) -> AdminEndpoint | None:
    """The endpoint at which an embedded pool answers administration; None without one. A failure is
    logged and does not prevent serving."""
    if settings.admin_socket is None or not isinstance(pool, Pool):
        return None
    try:
        return AdminEndpoint(pool, settings.admin_socket, settings.pool)
    except KvrecallError as error:
        logger.warning("kvrecall: the pool of this engine cannot be administered: %s", error)
        return None


def _settings_of(vllm_config: Any) -> RecallSettings:
    """Settings from the engine's configuration. Raises ConfigError if a further data-parallel
    replica on this host would open an embedded pool of its own."""
    raw = vllm_config.kv_transfer_config.kv_connector_extra_config
    settings = RecallSettings.from_mapping(raw, "kv_connector_extra_config")
    if settings.service is None and (vllm_config.parallel_config.data_parallel_rank_local or 0) > 0:
        raise ConfigError(
            "kv_connector_extra_config: backend is 'embedded', a pool in one engine's process, but "
            "data parallelism runs several engines on this host; let them share the node's pool: "
            "run `kvrecall pool serve` with the pool's settings and set "
            '{"backend": "service"} here, or use `kvrecall serve`, which does so itself'
        )
    role, access = vllm_config.kv_transfer_config.kv_role, settings.access
    fitting = {"kv_producer": ("both", "write"), "kv_consumer": ("both", "read")}
    if access not in fitting.get(role, (access,)):
        raise ConfigError(
            f"kv_connector_extra_config: access is {access!r}, with which a {role} cannot hand "
            "prompts over; leave access out, or set kv_role to kv_both"
        )
    return settings


def _check_room(host: int, facts: wire.EngineFacts, max_model_len: int) -> None:
    """Raises ConfigError if the host tier cannot hold a block; warns if it holds no sequence."""
    needed = sum(slot_bytes_of(group.block_bytes) for group in facts.groups)
    if host < needed:
        raise ConfigError(
            f"host_size (of the pool service, if there is one) is {host} bytes, and one block of "
            f"this model ({_groups_text(facts)}) takes {needed}; set host_size to at least a few "
            "hundred times that"
        )
    tokens = int(host / facts.block_bytes) * facts.block_size
    if tokens < max_model_len:
        logger.warning(
            "kvrecall: host_size holds %d tokens, less than one sequence of max_model_len=%d: "
            "longer prefixes are recalled in part",
            tokens,
            max_model_len,
        )


def _groups_text(facts: wire.EngineFacts) -> str:
    """Sizes of blocks, for the log."""
    if len(facts.groups) == 1:
        return f"{facts.groups[0].block_bytes} bytes a block of {facts.block_size} tokens"
    sizes = (
        f"{group.group}: {group.block_bytes} bytes a block of {group.block_size} tokens"
        for group in facts.groups
    )
    return f"{len(facts.groups)} KV groups ({'; '.join(sizes)})"


@nicety("a warning")
def _warn_if_hopeless(vllm_config: Any) -> None:
    algo = vllm_config.cache_config.prefix_caching_hash_algo
    if config.root_seed_is_random(algo):
        logger.warning(
            "kvrecall: NOTHING CAN HIT AFTER A RESTART: block hashes of %s start from a random "
            "seed in every process. Pass --prefix-caching-hash-algo sha256_cbor, or set "
            "PYTHONHASHSEED to a fixed number",
            algo,
        )
