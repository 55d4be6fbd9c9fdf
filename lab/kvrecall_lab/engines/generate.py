"""In an engine process: long sequences that decode together, step by step, and what a step takes.

The prompts' KV is made up, from a normal distribution, in the pool or in the device cache, to
skip their prefill, which takes minutes each: the cost of attention and copies does not depend on
the values.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from random import Random
from typing import Any

import torch
from prometheus_client import REGISTRY

from kvrecall.attention.settings import RetrievalSettings
from kvrecall.block import BlockKey
from kvrecall.engines.vllm.attention.plugin import active_settings, is_requested
from kvrecall.errors import EngineError
from kvrecall.pool.base import Verdict
from kvrecall.pool.pool import Pool

POOL, DEVICE = "pool", "device"
"""Where the KV of prompts is made up, but for a prompt's last block."""

_SETTLED = 8
"""Steps without prefill after which no further sequence is expected to begin."""

_AT_ONCE = 64
"""Blocks made up at a time."""


@dataclass(frozen=True, slots=True)
class Step:
    """A step that computed no prompt: its wall time and this process's processor time, the wall
    time of its attention (None on a device), and the ``tokens`` that it decoded."""

    seconds: float
    cpu_seconds: float
    attention_seconds: float | None
    tokens: int


class Generation:
    """Random prompts that an engine decodes together; ``begin`` and ``end`` alternate."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._engine = llm.llm_engine
        self._scheduler = self._engine.engine_core.engine_core.scheduler
        self._clock = _AttentionClock(self._engine.vllm_config)
        self._drawn = False

    def begin(self, sequences: int, context: int, decoded: int, source: str) -> None:
        """Adds ``sequences`` prompts of ``context`` tokens, each of which decodes ``decoded``, and
        steps until all of them decode, or as many as there is room for. Raises EngineError if there
        is no room for their KV."""
        from vllm import SamplingParams

        self._seen: dict[str, int] = {}
        self._at_once = self._decode_tokens = 0
        self._blocks_read = self._most_used = self._most_held = 0
        self._before, self._counted_before = self._totals(), self._counted()
        greedy = SamplingParams(temperature=0.0, max_tokens=decoded, ignore_eos=True)
        self._names = [str(number) for number in range(sequences)]
        for name in self._names:
            draw = Random(name)
            prompt = [draw.randrange(1, 250) for _ in range(context)]
            self._engine.add_request(name, {"prompt_token_ids": prompt}, greedy)
        if source == POOL:
            _fill_pool(self._llm)
        else:
            if not self._drawn:
                self._llm.collective_rpc(_draw_device)
                self._drawn = True
            self._enter()
        alone = 0
        while self._at_once < sequences and alone < _SETTLED:
            alone = 0 if self._step() is None else alone + 1

    def steps(self, count: int) -> list[dict[str, Any]]:
        """The next ``count`` steps without a prefill. Raises EngineError if a sequence ends."""
        found: list[dict[str, Any]] = []
        while len(found) < count:
            step = self._step()
            if len(self._scheduler.requests) < len(self._names):
                raise EngineError("a sequence ended while it was measured")
            if step is not None:
                found.append(asdict(step))
        return found

    def end(self) -> dict[str, Any]:
        """Aborts what still decodes; returns the totals since ``begin``.

        ``at_once``: most sequences that decoded in one step. ``loaded_bytes``: of whole blocks
        copied from the pool to the device. ``cache_bytes``: of the device cache;
        ``device_bytes``: the most of it in use, and the digests of the sequences that decoded.
        ``read_share``: blocks that a layer and KV head read for a token, to those of its sequence.
        """
        activity = {name: count - self._before[name] for name, count in self._totals().items()}
        counted = {name: n - self._counted_before[name] for name, n in self._counted().items()}
        cache = self._scheduler.kv_cache_config
        cache_bytes = sum(tensor.size for tensor in cache.kv_cache_tensors)
        (digest_bytes,) = self._llm.collective_rpc(_digest_bytes)
        self._engine.abort_request(self._names)
        return {
            "at_once": self._at_once,
            **counted,
            "cache_bytes": cache_bytes,
            "device_bytes": self._most_used * cache_bytes // cache.num_blocks
            + self._most_held * digest_bytes,
            "read_share": self._read_share(activity),
            "activity": activity,
        }

    def _enter(self) -> None:
        """Gives the prompts blocks of the device cache as if the engine had computed them: as many
        whole prompts as there is room for."""
        pool, size = self._scheduler.kv_cache_manager.block_pool, self._scheduler.block_size
        taken: list[Any] = []
        for request in self._scheduler.requests.values():
            count = (request.num_prompt_tokens - 1) // size
            if count > pool.get_num_free_blocks():
                break
            blocks = pool.get_new_blocks(count)
            pool.cache_full_blocks(request, blocks, 0, count, size, 0)
            taken += blocks
        pool.free_blocks(taken)

    def _step(self) -> Step | None:
        """The next step; None if it computed a prompt or decoded nothing."""
        self._clock.seconds = 0.0
        began, cpu_began = time.perf_counter(), time.process_time()
        outputs = self._engine.step()
        spent, cpu_spent = time.perf_counter() - began, time.process_time() - cpu_began
        new = {output.request_id: len(output.outputs[0].token_ids) for output in outputs}
        decoding = [key for key, count in new.items() if count > self._seen.get(key, 0) > 0]
        more = {key: count - self._seen.get(key, 0) for key, count in new.items()}
        self._seen |= new
        running = self._scheduler.running
        pool = self._scheduler.kv_cache_manager.block_pool
        held = sum(-(-one.num_tokens // self._scheduler.block_size) for one in running)
        self._at_once = max(self._at_once, len(decoding))
        self._decode_tokens += len(decoding)
        self._blocks_read += held * len(decoding) // max(1, len(running))
        self._most_used = max(self._most_used, pool.num_gpu_blocks - pool.get_num_free_blocks())
        self._most_held = max(self._most_held, held)
        if not decoding or any(r.num_computed_tokens < r.num_prompt_tokens for r in running):
            return None
        tokens = sum(more[key] for key in decoding)
        return Step(spent, cpu_spent, self._clock.seconds, tokens)

    def _totals(self) -> dict[str, int]:
        (totals,) = self._llm.collective_rpc("retrieval_activity")
        return dict(totals)

    def _counted(self) -> dict[str, int]:
        """By vLLM and the connector."""
        names = {
            "preemptions": "vllm:num_preemptions_total",
            "loaded_bytes": "kvrecall_loaded_bytes_total",
        }
        samples = [one for family in REGISTRY.collect() for one in family.samples]
        return {
            name: int(sum(one.value for one in samples if one.name == of))
            for name, of in names.items()
        }

    def _read_share(self, activity: dict[str, int]) -> float:
        """Where a layer is dense it reads all blocks."""
        config = self._engine.vllm_config
        layers = config.model_config.get_total_num_hidden_layers()
        heads = config.model_config.get_num_kv_heads(config.parallel_config)
        blocks = self._blocks_read / max(1, self._decode_tokens)
        all_layers = layers * self._decode_tokens
        dense = (all_layers - activity["layers_sparse"]) * blocks
        return (dense + activity["blocks_attended"] / heads) / max(1.0, all_layers * blocks)


class _AttentionClock:
    """Adds up the time that attention takes in this process; ``seconds`` is None on a device,
    which does not wait for it."""

    def __init__(self, vllm_config: Any) -> None:
        from vllm.platforms import current_platform

        self._seconds: float | None = None
        if not current_platform.is_cpu():
            return
        self._seconds = 0.0
        for layer in vllm_config.compilation_config.static_forward_context.values():
            if hasattr(layer, "impl"):
                layer.impl.forward = self._timed(layer.impl.forward)

    @property
    def seconds(self) -> float | None:
        return self._seconds

    @seconds.setter
    def seconds(self, value: float) -> None:
        if self._seconds is not None:
            self._seconds = value

    def _timed(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return forward(*args, **options)
            finally:
                assert self._seconds is not None
                self._seconds += time.perf_counter() - began

        return call


def _digest_bytes(worker: Any) -> int:
    """In a worker: bytes of a block's digests, in all layers."""
    layers = worker.vllm_config.compilation_config.static_forward_context.values()
    pairs = (
        (layer, getattr(getattr(layer, "impl", None), "sparse_layer", None)) for layer in layers
    )
    return sum(
        sparse.digest_rows(layer.kv_cache)[0].numel()
        for layer, sparse in pairs
        if sparse is not None
    )


def _draw_device(worker: Any) -> None:
    """In a worker: gives the device cache random KV."""
    torch.manual_seed(0)
    for layer in worker.vllm_config.compilation_config.static_forward_context.values():
        if hasattr(layer, "impl"):
            layer.kv_cache.normal_()


def _fill_pool(llm: Any) -> None:
    """Puts every whole block of the waiting requests' prompts into the pool, with random KV, but
    for those it has. On vLLM's CPU platform only. Raises EngineError if the pool is full."""
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    from kvrecall.engines.vllm.attention.base import KernelShape

    config = llm.llm_engine.vllm_config
    model, block = config.model_config, config.cache_config.block_size
    dim = model.get_head_size()
    shape = KernelShape(
        model.get_num_attention_heads(config.parallel_config),
        model.get_num_kv_heads(config.parallel_config),
        dim,
        block,
        model.dtype,
        _get_attn_isa(model.dtype, block, dim, "auto"),
    )
    sparse = active_settings(config) if is_requested(os.environ) else None
    records = _Records(shape, model.get_total_num_hidden_layers(), sparse)
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    torch.manual_seed(0)
    for name in scheduler.requests:  # the engine's own names
        state = scheduler.connector._s.state_of(name)
        keys = state.keys((state.request.num_prompt_tokens - 1) // block)
        for first in range(0, len(keys), _AT_ONCE):
            _put(scheduler.connector._pool, keys[first : first + _AT_ONCE], records)


def _put(pool: Pool, keys: Sequence[BlockKey], records: _Records) -> None:
    arena = torch.from_numpy(pool.arena.array())
    drawn = records.draw(len(keys))
    for reservation, record in zip(pool.reserve(keys), drawn, strict=True):
        if reservation.verdict is Verdict.REFUSED:
            raise EngineError("the pool has no room for the prompts")
        if reservation.verdict is Verdict.RESERVED:
            arena[reservation.offset : reservation.offset + len(record)] = record
    pool.commit(keys)


class _Records:
    """Made-up blocks as the pool holds them, with digests by ``sparse`` if given."""

    def __init__(self, shape: Any, layers: int, sparse: RetrievalSettings | None) -> None:
        from kvrecall.engines.vllm.attention.activity import Activity
        from kvrecall.engines.vllm.attention.cpu import CpuKernel
        from kvrecall.engines.vllm.attention.layer import RetrievalLayer

        size = (_AT_ONCE, shape.kv_heads, shape.block_size, 2 * shape.head_dim)
        self._caches = [torch.empty(size, dtype=shape.dtype) for _ in range(layers)]
        self._layers: dict[int, RetrievalLayer] = {}
        if sparse is not None:
            kernel = CpuKernel(shape)
            for at in range(sparse.dense_layers, layers):
                self._layers[at] = RetrievalLayer("", sparse, kernel, Activity())

    def draw(self, blocks: int) -> torch.Tensor:
        """uint8 ``[blocks, bytes]``."""
        for cache in self._caches:
            cache.normal_()
        pages = [cache.view(_AT_ONCE, -1).view(torch.uint8) for cache in self._caches]
        ids = torch.arange(_AT_ONCE)
        for at, layer in self._layers.items():
            layer.digest(self._caches[at], ids)
            layer.sign(ids)
            pages.append(layer.digest_rows(self._caches[at]).reshape(_AT_ONCE, -1))
            pages.append(layer.checksum_rows(self._caches[at]))
        return torch.cat([page[:blocks] for page in pages], 1)
