"""The namespace of each request's blocks: the engine's, and an adapter's addition."""

from __future__ import annotations

import json
import logging
import platform
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvrecall.block import Namespace
from kvrecall.engines.vllm.compat import config
from kvrecall.engines.vllm.compat.versions import engine_version
from kvrecall.engines.vllm.identity import fields
from kvrecall.engines.vllm.identity.changes import LoadedAdapter, adapters_of
from kvrecall.engines.vllm.identity.loaded import together
from kvrecall.engines.vllm.wire import Shard
from kvrecall.errors import ConfigError
from kvrecall.pool.base import PoolClient

logger = logging.getLogger("vllm.kvrecall")

_IRRELEVANT_CONFIG = ("_name_or_path", "transformers_version", "_commit_hash")


def namespace_of(
    vllm_config: Any, kv_cache_config: Any, shards: Sequence[Shard], weights: str
) -> Namespace:
    """Namespace of an engine's blocks: everything their bytes depend on besides what vLLM hashes.
    ``shards``: each rank's part of a block, ordered by pipeline then tensor rank. ``weights``:
    their fingerprint."""
    model = vllm_config.model_config
    cache = vllm_config.cache_config
    sharing = config.sharing_of(vllm_config, kv_cache_config)
    groups = config.kv_groups(kv_cache_config, sharing.contexts)
    parts = {
        "engine": f"vllm {engine_version()}",
        "weights": weights,
        "architecture": config_text(model.hf_config),
        "loaded": _loaded_text(vllm_config, shards),
        "configuration": _text(fields.ingredients(vllm_config)),
        "environment": _text(fields.environment()),
        "dtype": str(model.dtype),
        "kv_dtype": str(cache.cache_dtype),
        "block_size": "+".join(str(group.block_size) for group in groups),
        "kernel": "; ".join(sorted({shard.kernel for shard in shards})),
        **_record_parts(vllm_config.parallel_config, sharing, shards),
        "hash": f"{cache.prefix_caching_hash_algo} seed {config.root_seed()}",
        "python": hash_dialect(cache.prefix_caching_hash_algo),
        "byte_order": sys.byteorder,
    }
    if reason := fields.unrepeatable(vllm_config):
        logger.warning(
            "kvrecall: no other engine can use this engine's blocks; NOTHING WILL HIT "
            "AFTER A RESTART: %s",
            reason,
        )
        parts["private"] = secrets.token_hex(16)
    return Namespace.of(parts)


def _record_parts(
    parallel: Any, sharing: config.Sharing, shards: Sequence[Shard]
) -> dict[str, str]:
    """What the records of blocks look like. If every layer's KV heads lie one after the other, and
    the tokens of a head if ranks share them, a record is the same whatever the parallel sizes;
    otherwise, and for recurrent layers, engines of other sizes cut it differently. Sums over ranks
    round differently, so they do not share either where kernels promise the same bits."""
    tensor, stages = sharing.ranks, parallel.pipeline_parallel_size
    ranks = [[(one.name, one.layout, one.heads) for one in shard.layers] for shard in shards]
    alike = all(rank == ranks[number - number % tensor] for number, rank in enumerate(ranks))
    splits = all(heads for rank in ranks for *_, heads in rank)
    if sharing.contexts > 1:
        splits &= all(layer.by_token for shard in shards for layer in shard.layers)
    if alike and splits and len(shards) == tensor * stages and not config.is_deterministic():
        layers = [
            (layer.name, layer.layout, layer.page_bytes * shard.sharing.parts)
            for shard in shards[::tensor]
            for layer in shard.layers
        ]
        return {"layout": json.dumps(layers)}
    return {
        "tensor_parallel": str(parallel.tensor_parallel_size),
        "pipeline_parallel": str(stages),
        "kv_replicas": json.dumps([shard.sharing.same for shard in shards[::tensor]]),
        "context_parallel": f"{tensor} ranks, {sharing.contexts} by {sharing.run} tokens",
        "layout": json.dumps([[one[:2] for one in rank] for rank in ranks]),
    }


def _text(values: Mapping[str, str]) -> str:
    return json.dumps(values, sort_keys=True)


def _loaded_text(vllm_config: Any, shards: Sequence[Shard]) -> str:
    """The models that the ranks have loaded, and, if a rank cannot tell, the limits they were built
    from."""
    models = [shard.model for shard in shards if shard.model is not None]
    loaded = [together(models)] if models else []
    if len(models) < len(shards):
        limit = vllm_config.model_config.max_model_len
        logger.warning(
            "kvrecall: this platform's workers do not expose the model they have loaded, "
            "so blocks are shared only by engines of the same max_model_len (%d)",
            limit,
        )
        loaded.append(f"max_model_len {limit}")
    return "; ".join(loaded)


def hash_dialect(algo: str) -> str:
    """Pickle-based hashes may differ between Python versions; cbor ones do not."""
    return "any" if algo.endswith("cbor") else platform.python_version()


def config_text(hf_config: Any) -> str:
    """The model's configuration as canonical text, without parts that do not shape its KV."""
    kept = {k: v for k, v in hf_config.to_dict().items() if k not in _IRRELEVANT_CONFIG}
    try:
        return json.dumps(kept, sort_keys=True, default=str)
    except TypeError:  # of a mapping whose keys have no order, or are no text
        return json.dumps(_with_texts(kept), sort_keys=True, default=str)


def _with_texts(value: Any) -> Any:
    """``value`` with all keys of its mappings as text."""
    if isinstance(value, dict):
        return {str(key): _with_texts(inner) for key, inner in value.items()}
    return [*map(_with_texts, value)] if isinstance(value, list | tuple) else value


class Adapters:
    """The LoRA adapters that the workers have loaded, by the numbers that vLLM gives them.

    vLLM's block hash carries an adapter's name and path, not its weights.
    """

    def __init__(self, settings: Mapping[str, str]) -> None:
        """``settings``: how the engine treats any adapter, such as its dtype."""
        self._settings = _text(settings)
        self._loaded: dict[int, LoadedAdapter] = {}

    def loaded(self, adapters: Mapping[int, LoadedAdapter]) -> None:
        """Ranks have loaded these."""
        self._loaded = adapters_of([self._loaded, dict(adapters)])

    def is_known(self, lora_request: Any) -> bool:
        """Whether the workers have loaded the adapter by now."""
        return lora_request.lora_int_id in self._loaded

    def identity(self, lora_request: Any) -> str | None:
        """Identifies a known adapter's blocks by what was loaded; None if that is not known."""
        _, digest = self._loaded[lora_request.lora_int_id]
        return f"{digest} {self._settings}" if digest else None


class NamespaceRegistry:
    """The engine's namespace and those of its adapters, each registered with the pool once.

    ``base`` is called at the first request and no earlier: the engine's hash seed is not settled
    before. It returns None until the fingerprint of the weights is known.
    """

    def __init__(
        self,
        pool: PoolClient,
        groups: Sequence[tuple[str, int]],
        base: Callable[[], Namespace | None],
        adapters: Adapters,
    ) -> None:
        """``groups``: what each KV group is, and bytes of its blocks."""
        self._pool = pool
        self._groups = groups
        self._make_base = base
        self.adapters = adapters
        self._base: Namespace | None = None
        self._is_private = False
        self._distrusted: set[bytes] = set()  # of adapters, before their epoch
        self._epoch = secrets.token_hex(16)
        self._registered: dict[bytes, tuple[Namespace, ...]] = {}  # their groups', by digest
        self._refused: set[bytes] = set()  # namespaces that the pool cannot hold
        self._warned = False
        self.live: dict[bytes, int] = {}  # groups of namespaces that are used now, by digest

    def is_settled(self, request: Any) -> bool:
        """Whether the namespace of a request is known by now. Does not wait."""
        if self._base is None and (base := self._make_base()) is not None:
            self._base = base.derive(epoch=self._epoch) if self._is_private else base
        if self._base is not None:
            return request.lora_request is None or self.adapters.is_known(request.lora_request)
        if not self._warned:
            self._warned = True
            logger.warning(
                "kvrecall: requests are computed without the pool until the fingerprint of the "
                "weights is known; only the first start with them takes that long"
            )
        return False

    def of(self, request: Any) -> Namespace | None:
        """Namespace of a request's blocks, with its adapter's content; None: not pooled. For a
        request that ``is_settled``."""
        assert self._base is not None
        namespace = self._base
        if request.lora_request is not None:
            identity = self.adapters.identity(request.lora_request)
            if identity is None:
                return None
            namespace = namespace.derive(adapter=identity)
            if namespace.digest in self._distrusted:
                namespace = namespace.derive(epoch=self._epoch)
        if namespace.digest not in self._registered:
            self._register(namespace)
        return None if namespace.digest in self._refused else namespace

    def groups_of(self, namespace: Namespace) -> tuple[Namespace, ...]:
        """The namespaces of a namespace's blocks, by KV group."""
        return self._registered[namespace.digest]

    def renew(self) -> None:
        """The weights have changed: the namespace is determined anew."""
        self._pool.retire([*self.live])
        self.live.clear()
        self._registered.clear()
        self._base = None

    def turn_private(self) -> None:
        """From now on blocks have a namespace that no other engine has had or will have."""
        self._is_private = True
        self.live.clear()
        self._epoch = secrets.token_hex(16)
        self._base = None

    def distrust(self, namespace: Namespace) -> set[bytes]:
        """Abandons that namespace: an adapter's blocks become private, or those of the engine and
        all adapters. Returns the digests of all abandoned namespaces."""
        if self._base is not None and namespace.digest != self._base.digest:
            self._distrusted.add(namespace.digest)
            abandoned = [namespace.digest]
        else:
            self.turn_private()
            abandoned = list(self._registered)
        groups = (group for digest in abandoned for group in self._registered[digest])
        digests = {*abandoned, *(group.digest for group in groups)}
        for digest in digests:
            self.live.pop(digest, None)
        return digests

    def _register(self, namespace: Namespace) -> None:
        groups: tuple[Namespace, ...] = (namespace,)
        if len(self._groups) > 1:
            names = (f"{number}: {kind}" for number, (kind, _) in enumerate(self._groups))
            groups = tuple(namespace.derive(group=name) for name in names)
        self._registered[namespace.digest] = groups
        try:
            for group, (_, block_bytes) in zip(groups, self._groups, strict=True):
                self._pool.register(group, block_bytes)
        except ConfigError as error:  # of a service that was not there when the engine began
            logger.error("kvrecall: NOTHING IS POOLED: the pool refuses blocks: %s", error)
            self._refused.add(namespace.digest)
            return
        self.live.update((group.digest, number) for number, group in enumerate(groups))
