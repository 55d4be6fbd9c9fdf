"""Patches through which kvrecall sees what an engine's workers load while it runs, and keeps its
pool while they sleep."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakKeyDictionary

from kvrecall.engines.vllm.compat.patches import install
from kvrecall.engines.vllm.compat.runner import worker_class
from kvrecall.engines.vllm.identity.changes import Look, RankWeights, together

_HARMLESS = frozenset(
    "check_health compute_weight_checksums execute_dummy_batch get_supported_tasks list_loras "
    "pin_lora profile remove_lora reset_encoder_cache reset_mm_cache retrieval_activity "
    "save_sharded_state save_tensorized_model synchronize_device".split()
)
"""Methods of workers that write no weights, vLLM's and ours. Any other call of a worker may."""

_WATCHES: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
"""The ``RunningWeights`` of an engine, by its KV cache manager."""
_KEEPING: set[int] = set()
"""KV cache managers, by ``id``, of engines that empty their caches because they pause or sleep."""


def watch_weights(kv_cache_manager: Any, watch: Any) -> None:
    """Shows an engine's calls to its workers to ``watch``, its ``RunningWeights``: those that may
    write weights, that load an adapter, that wake them up. What is in a step's queue was given to
    the workers before, what follows comes behind it."""
    _WATCHES[kv_cache_manager] = watch
    install("see-calls", _seeing_calls)
    install("see-adapters", _seeing_adapters)
    install("see-waking", _seeing_waking)
    install("keep-pool", _keeping)


def keeps_pool(kv_cache_manager: Any) -> bool:
    """Whether an engine empties its caches only because it pauses or sleeps."""
    return id(kv_cache_manager) in _KEEPING


def _watch_of(core: Any) -> Any:
    manager = getattr(getattr(core, "scheduler", None), "kv_cache_manager", None)
    return None if manager is None else _WATCHES.get(manager)


def look_at(call: Callable[[Callable[[Any], Look]], list[Look]]) -> Callable[[bool], Look]:
    """What the workers of an engine have loaded. ``call``: does some work on all of them."""
    return lambda weigh: together(call(functools.partial(_look, weigh=weigh)))


def _looking(core: Any) -> Callable[[bool], Look]:
    return look_at(core.model_executor.collective_rpc)


def _seeing_calls(plain: Any) -> Any:
    def collective_rpc(
        self: Any,
        method: Any,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        watch = _watch_of(self)
        if watch is None or (isinstance(method, str) and method in _HARMLESS):
            return plain(self, method, timeout, args, kwargs)
        with watch.call(_looking(self), method, args, kwargs or {}):
            return plain(self, method, timeout, args, kwargs)

    return collective_rpc


def _seeing_adapters(plain: Any) -> Any:
    def add_lora(self: Any, lora_request: Any) -> Any:
        watch = _watch_of(self)
        try:
            return plain(self, lora_request)
        finally:
            if watch is not None:
                watch.adapter_loaded(_looking(self))

    return add_lora


def _seeing_waking(plain: Any) -> Any:
    def wake_up(self: Any, tags: list[str] | None = None) -> Any:
        awake = plain(self, tags)
        watch = _watch_of(self)
        if watch is not None:
            watch.woke(_looking(self))
        return awake

    return wake_up


def _keeping(plain: Any) -> Any:
    def reset(self: Any, *args: Any, **kwargs: Any) -> Any:
        manager = id(self.scheduler.kv_cache_manager)
        _KEEPING.add(manager)
        try:
            return plain(self, *args, **kwargs)
        finally:
            _KEEPING.discard(manager)

    return reset


# ---- in a worker's process -------------------------------------------------------------------

_rank: RankWeights | None = None  # of this process's worker


def _look(worker: Any, weigh: bool) -> Look:
    return Look() if _rank is None else _rank.look(worker, weigh)


def note_loads(
    vllm_config: Any, rank: RankWeights, suspend: Callable[[], None], resume: Callable[[], None]
) -> None:
    """Has ``rank`` note what this process's worker loads from now on. ``suspend`` and ``resume``:
    called before the KV cache's memory is taken away, and when it is back."""
    global _rank
    _rank = rank
    worker = worker_class(vllm_config)

    def seeing_adapters(plain: Any) -> Any:
        def _load_adapter(self: Any, lora_request: Any) -> Any:
            from vllm.lora.utils import get_adapter_absolute_path

            place = get_adapter_absolute_path(lora_request.lora_path)
            return rank.load_adapter(lora_request, place, lambda: plain(self, lora_request))

        return _load_adapter

    def sleeping(plain: Any) -> Any:
        def sleep(self: Any, level: int = 1) -> Any:
            suspend()
            rank.slept(level)
            return plain(self, level)

        return sleep

    def discarding(plain: Any) -> Any:
        def discard(self: Any, tags: Iterable[str]) -> Any:
            if "kv_cache" in tags:
                suspend()
            return plain(self, tags)

        return discard

    def waking(plain: Any) -> Any:
        def wake_up(self: Any, tags: list[str] | None = None) -> Any:
            woken = plain(self, tags)
            if tags is None or "weights" in tags:
                rank.woke()
            if tags is None or "kv_cache" in tags:
                resume()
            return woken

        return wake_up

    install("note-adapters", seeing_adapters, renew=True)
    if hasattr(worker, "sleep"):
        install("note-sleep", sleeping, worker, renew=True)
        install("note-waking", waking, worker, renew=True)
    if hasattr(worker, "discard"):
        install("note-discard", discarding, worker, renew=True)


def note_model(model: Any, rank: RankWeights) -> None:
    """Has ``rank`` note when this model loads weights."""
    if hasattr(model, "load_weights"):
        install("note-weights", lambda plain: rank.loading(model, plain), model)
