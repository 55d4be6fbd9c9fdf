"""Patches of the engine core: parts of its executor, scheduler and block manager that the connector
interface does not reach.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

from kvrecall.engines.vllm.compat.patches import install, install_at_import
from kvrecall.engines.vllm.compat.versions import BESIDE, BESIDE_OTHERS, hits_inside_blocks
from kvrecall.errors import ConfigError


def before_loading(begin: Callable[[Any], None]) -> None:
    """Calls ``begin(vllm_config)`` in an engine's process before the executor loads the model, if
    the engine has kvrecall's connector, and has it match prefixes inside blocks. The engine ends
    there with a ConfigError if that connector is beside others than ``BESIDE``."""

    def make(plain: Any) -> Any:
        def init(self: Any, vllm_config: Any) -> None:
            if our_transfer(vllm_config) is not None:
                vllm_config.kv_transfer_config.kv_load_failure_policy = "recompute"
                _EXECUTORS[vllm_config.instance_id] = self
                begin(vllm_config)
                match_inside_blocks()
            plain(self, vllm_config)

        return init

    install_at_import("fingerprint-early", make)


_EXECUTORS: WeakValueDictionary[str, Any] = WeakValueDictionary()
"""Of engines with kvrecall's connector, by their id."""


def on_workers(vllm_config: Any, work: Callable[[Any], Any]) -> list[Any]:
    """Does ``work(worker)`` in each worker's process, and waits for it; what it returned there.
    Without effect where vLLM's plug-ins are switched off."""
    executor = _EXECUTORS.get(vllm_config.instance_id)
    return [] if executor is None else list(executor.collective_rpc(work))


def match_inside_blocks() -> None:
    """Lets prefix-cache hits end inside blocks, on the device and in the pool, in engines with
    kvrecall's connector whose user has not set ``prefix_match_unit``: every ``match_unit`` tokens
    where vLLM can, which takes recurrent layers in cache mode ``align`` beside full attention."""

    def make(plain: Any) -> Any:
        def resolve(kv_cache_config: Any, vllm_config: Any) -> Any:
            cache = vllm_config.cache_config
            if cache.prefix_match_unit is None and our_transfer(vllm_config) is not None:
                cache.prefix_match_unit = _match_unit(kv_cache_config, vllm_config)
            return plain(kv_cache_config, vllm_config)

        return resolve

    install("match-unit", make)


def _match_unit(kv_cache_config: Any, vllm_config: Any) -> int | None:
    """Tokens after which hits end inside blocks; None: not asked for, or not possible."""
    from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

    from kvrecall.config import DEFAULT_MATCH_UNIT, RecallSettings  # too much for every process

    raw = our_transfer(vllm_config).kv_connector_extra_config
    unit = RecallSettings.from_mapping(raw, "kv_connector_extra_config").match_unit
    groups = kv_cache_config.kv_cache_groups
    if unit == "off" or len(groups) < 2 or not vllm_config.cache_config.enable_prefix_caching:
        return None
    tokens = DEFAULT_MATCH_UNIT if unit == "auto" else unit
    managers = [
        KVCacheSpecRegistry.get_manager_class(group.kv_cache_spec, group.role) for group in groups
    ]
    fits = all(group.kv_cache_spec.block_size % tokens == 0 for group in groups)
    if not hits_inside_blocks(groups, tokens, managers):
        return None
    return tokens if fits or unit != "auto" else None  # a number that does not fit: vLLM's error


def our_transfer(vllm_config: Any) -> Any:
    """The engine's ``kv_transfer_config``, or the part of it that is of kvrecall's connector (or a
    subclass) where that is one of several; None if the engine does not have it. Raises ConfigError
    if it cannot be one of these."""
    whole = vllm_config.kv_transfer_config
    given = (getattr(whole, "kv_connector_extra_config", None) or {}).get("connectors") or ()
    plain: dict[str, Any] = {"kv_connector": "", "kv_connector_module_path": None}
    plain["kv_connector_extra_config"] = {}
    parts = [SimpleNamespace(**plain | part) for part in given]
    ours = [part for part in parts if _is_ours(part)]
    others = {part.kv_connector for part in parts if part not in ours}
    is_known = whole is not None and whole.kv_connector == "MultiConnector" and others <= {BESIDE}
    if ours and (len(ours) > 1 or not is_known):
        raise ConfigError(BESIDE_OTHERS)
    return ours[0] if ours else whole if _is_ours(whole) else None


_OURS = "kvrecall.engines.vllm.connector.connector.RecallConnector"


def _is_ours(transfer: Any) -> bool:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if not getattr(transfer, "kv_connector_module_path", None):
        return False
    bases = KVConnectorFactory.get_connector_class(transfer).__mro__
    return any(f"{base.__module__}.{base.__qualname__}" == _OURS for base in bases)


def parts_of(several: Any, name: str) -> Any:
    """What a MultiConnector has for each of its connectors, in the field ``name``; of another one
    the thing itself."""
    return getattr(several, name, (several,))


doomed: set[str] = set()  # requests whose loads, when they end, were in vain


def fail_loads(request_ids: Iterable[str]) -> None:
    """Loads of these requests that are under way will count as failed."""
    doomed.update(request_ids)


def reschedule_lost(report_type: Any) -> None:
    """Makes vLLM's scheduler preempt requests that the workers report as lost, before it uses the
    step's output for them, which is dropped. They are recomputed. If the workers report that loaded
    blocks are wrong, or that they have loaded other weights, all running requests start over, with
    an empty device cache, and loads in flight count as failed. A request whose load is stuck is
    recomputed in other device blocks: its own stay out of use until the load ends.
    ``report_type``: the class of their reports."""

    from vllm.v1.outputs import KVConnectorOutput

    def make(plain: Any) -> Any:
        def update_from_output(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
            transfers = model_runner_output.kv_connector_output
            late = _LATE.get(self.kv_cache_manager)
            stuck: Collection[str] = () if late is None else late()
            if transfers is None and stuck:
                transfers = KVConnectorOutput()
                model_runner_output = replace(model_runner_output, kv_connector_output=transfers)
            if transfers is None:
                return plain(self, scheduler_output, model_runner_output)
            for report in parts_of(transfers.kv_connector_worker_meta, "metadata"):
                if not isinstance(report, report_type):
                    continue
                stuck = {*stuck, *report.stuck}
                for request_id in report.lost:
                    _preempt(self, self.requests.get(request_id))
                if report.starts_over:
                    fail_loads(_preempt_all(self))
            _keep_written(self, transfers, stuck)
            if doomed and transfers.finished_recving:
                ended = doomed & transfers.finished_recving
                transfers.failed_recving = (transfers.failed_recving or set()) | ended
                doomed.difference_update(ended)
            return plain(self, scheduler_output, model_runner_output)

        return update_from_output

    install("reschedule", make)


_LATE: WeakKeyDictionary[Any, Callable[[], Collection[str]]] = WeakKeyDictionary()


def give_up_late(kv_cache_manager: Any, late: Callable[[], Collection[str]]) -> None:
    """Requests that ``late`` tells, once each, count as stuck: a connector beside kvrecall's, which
    may have no deadline, loads them."""
    _LATE[kv_cache_manager] = late


_WRITTEN: WeakKeyDictionary[Any, dict[str, list[Any]]] = WeakKeyDictionary()
"""By scheduler and request, the device blocks that a stuck load may still write."""


def _keep_written(scheduler: Any, transfers: Any, stuck: Collection[str]) -> None:
    """Tells vLLM that the loads of ``stuck`` requests failed, and keeps their device blocks out of
    use until the workers report that the loads have ended, of which vLLM is not told."""
    if not stuck and scheduler not in _WRITTEN:
        return
    held, manager = _WRITTEN.setdefault(scheduler, {}), scheduler.kv_cache_manager
    reported = transfers.finished_recving or set()
    ended = held.keys() & reported
    for request_id in ended:
        manager.block_pool.free_blocks(held.pop(request_id)[::-1])
    failed = set()
    for request_id in set(stuck) - held.keys() - reported:
        request = scheduler.requests.get(request_id)
        if request is None or request.status.name != "WAITING_FOR_REMOTE_KVS":
            continue  # it has ended: vLLM itself keeps its blocks
        tables = (
            one.req_to_blocks.get(request_id, ())
            for one in manager.coordinator.single_type_managers
        )
        held[request_id] = [block for table in tables for block in table if not block.is_null]
        manager.block_pool.touch(held[request_id])
        failed.add(request_id)
    transfers.finished_recving = (reported - ended) | failed
    transfers.failed_recving = ((transfers.failed_recving or set()) - ended) | failed


_ASIDE: WeakKeyDictionary[Any, Callable[[], None]] = WeakKeyDictionary()
"""What an engine does while its workers compute, by its KV cache manager."""


def while_computing(kv_cache_manager: Any, work: Callable[[], None]) -> None:
    """Does ``work`` in each step that computes anything, after the workers got it and before the
    engine waits for them. vLLM asks for the grammars' bitmask there."""

    def make(plain: Any) -> Any:
        def get_grammar_bitmask(self: Any, *args: Any) -> Any:
            aside = _ASIDE.get(self.kv_cache_manager)
            if aside is not None:
                aside()
            return plain(self, *args)

        return get_grammar_bitmask

    install("aside", make)
    _ASIDE[kv_cache_manager] = work


def _preempt(scheduler: Any, request: Any) -> None:
    """As vLLM's ``reset_prefix_cache`` does it with running requests."""
    if request is None or request not in scheduler.running:
        return
    scheduler.running.remove(request)
    scheduler._preempt_request(request, time.monotonic(), drop_stale_output=True)
    scheduler.prev_step_scheduled_req_ids.discard(request.request_id)


def _preempt_all(scheduler: Any) -> set[str]:
    """Preempts all running requests and empties the device's prefix cache, including blocks in use.
    Returns the requests that are being loaded."""
    now = time.monotonic()
    while scheduler.running:
        request = scheduler.running.pop()
        scheduler._preempt_request(request, now, drop_stale_output=True)
        if (stats := getattr(request, "prefill_stats", None)) is not None:
            stats.set(request.num_prompt_tokens, 0, 0)  # the whole prompt is computed
    scheduler.prev_step_scheduled_req_ids.clear()
    manager = scheduler.kv_cache_manager
    manager.evict_blocks(set(range(manager.block_pool.num_gpu_blocks)))
    return {
        request_id
        for request_id, request in scheduler.requests.items()
        if request.status.name == "WAITING_FOR_REMOTE_KVS"
    }


def part_ways(kv_cache_manager: Any) -> Callable[[Iterable[Any]], None]:
    """``(requests)``: the weights have changed: empties the device's prefix cache, and no other
    request finds a block there of these, which have computed part of their KV before."""

    def part(requests: Iterable[Any]) -> None:
        for request in requests:
            request.cache_salt = secrets.token_hex(16)  # in the hash of its first block
            request.block_hashes[:] = [secrets.token_bytes(32) for _ in request.block_hashes]
        pool = kv_cache_manager.block_pool
        kv_cache_manager.evict_blocks(set(range(pool.num_gpu_blocks)))

    return part


def block_manager(kv_cache_manager: Any) -> Any:
    """The manager of the engine's one KV group."""
    (manager,) = kv_cache_manager.coordinator.single_type_managers
    return manager


class DeviceBlocks(Sequence[int]):
    """Numbers of the device blocks of a request in a KV group, read when they are asked for: it may
    have thousands, of which a step needs one."""

    __slots__ = ("_blocks",)

    def __init__(self, blocks: Sequence[Any]) -> None:
        self._blocks = blocks

    def __len__(self) -> int:
        return len(self._blocks)

    def __getitem__(self, index: Any) -> Any:
        found = self._blocks[index]
        return [one.block_id for one in found] if isinstance(index, slice) else found.block_id


def device_blocks(kv_cache_manager: Any) -> Callable[[str], list[DeviceBlocks]]:
    """The device blocks of a request, by KV group, in order; 0 for one that is no longer there."""
    managers = kv_cache_manager.coordinator.single_type_managers

    def of(request_id: str) -> list[DeviceBlocks]:
        return [DeviceBlocks(each.req_to_blocks.get(request_id) or ()) for each in managers]

    return of


def first_needed(kv_cache_manager: Any) -> Callable[[int, int], int]:
    """``(group, tokens)``: index of the first block of a KV group that a prefix of so many tokens
    needs on the device, by vLLM's own rule."""
    managers = kv_cache_manager.coordinator.single_type_managers

    def first(group: int, tokens: int) -> int:
        skipped = max(0, int(managers[group].get_num_skipped_tokens(tokens)))
        return skipped // int(managers[group].block_size)

    return first


def reachable_blocks(
    kv_cache_manager: Any,
) -> Callable[[Any, int, int, int], Sequence[bool] | None]:
    """``(request, group, start, stop)``: which of these blocks vLLM itself would keep for later
    hits; None: all of them."""
    coordinator = kv_cache_manager.coordinator
    interval = getattr(coordinator, "retention_interval", None)

    def reachable(request: Any, group: int, start: int, stop: int) -> Sequence[bool] | None:
        manager = coordinator.single_type_managers[group]
        boundaries = [request.num_prompt_tokens - 1]
        if getattr(request, "shared_prefix_boundary", 0):
            boundaries.append(request.shared_prefix_boundary)
        mask: Sequence[bool] | None = manager.reachable_block_mask(
            start_block=start,
            end_block=stop,
            alignment_tokens=manager.cache_hit_alignment_tokens,
            kv_cache_spec=manager.kv_cache_spec,
            use_eagle=manager.use_eagle,
            retention_interval=interval,
            reachable_boundaries=boundaries,
        )
        return mask

    return reachable


def boundary_states(scheduler_output: Any) -> dict[str, list[tuple[int, int, int]]]:
    """The states of recurrent layers that this step completes, by request: KV group, device block,
    tokens up to the state."""
    block_state = getattr(scheduler_output, "kv_connector_block_state", None)
    return getattr(block_state, "boundary_state_offloads", None) or {}


def keep_boundary(request: Any, tokens: int) -> None:
    """Makes vLLM keep, and the pool save, what windows and recurrent layers need to continue at
    ``tokens``: other requests share the prefix so far, but it was not kept there. vLLM does so
    itself for prefixes that it finds on the device."""
    if tokens > getattr(request, "shared_prefix_boundary", 0):
        request.shared_prefix_boundary = tokens


def room_for(kv_cache_manager: Any) -> Callable[[Any, int, Iterable[Any]], bool]:
    """``(request, tokens, others)``: whether a request whose first ``tokens`` tokens are loaded
    fits the device to its end beside what ``others`` need to theirs: requests that hold device
    blocks and have not run yet. vLLM preempts only requests that run, so such requests could wait
    for each other forever. It reserves blocks for them itself, but of windows and chunks too few:
    it counts the freed blocks in front as if they were there. A state inside a block is copied
    before it is overwritten, which takes another block."""
    from vllm.v1.core.single_type_kv_cache_manager import MambaManager

    coordinator = kv_cache_manager.coordinator
    managers = coordinator.single_type_managers
    pool = kv_cache_manager.block_pool
    are_copied = bool(coordinator.enable_partial_hash_hits)

    def fits(request: Any, tokens: int, others: Iterable[Any]) -> bool:
        needed = 0
        for manager in managers:
            size = int(manager.block_size)
            skipped = max(0, int(manager.get_num_skipped_tokens(tokens))) // size
            copied = int(are_copied and isinstance(manager, MambaManager))
            needed += -(-(request.num_tokens + 1) // size) - skipped + copied
            for other in others:
                needed += copied
                held = len(manager.req_to_blocks.get(other.request_id, ()))
                needed += max(0, -(-(other.num_tokens + 1) // size) - held)
        return needed <= int(pool.get_num_free_blocks())

    return fits


def tail_hash(vllm_config: Any, block_size: int) -> Callable[[Any, int], bytes]:
    """``(request, tokens)``: hash of the first ``tokens`` tokens of a request, which end inside a
    block of ``block_size``: vLLM's own of a block, of those behind the last whole block. It covers
    what that one does: all tokens before, media, adapter, ``cache_salt``."""
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, hash_block_tokens

    function = get_hash_fn_by_name(vllm_config.cache_config.prefix_caching_hash_algo)

    def of(request: Any, tokens: int) -> bytes:
        start = tokens // block_size * block_size
        before = request.block_hashes[start // block_size - 1] if start else None
        extra, _ = generate_block_hash_extra_keys(request, start, tokens, 0)
        ids = request.all_token_ids[start:tokens]
        return bytes(hash_block_tokens(function, before, ids, extra))

    return of
