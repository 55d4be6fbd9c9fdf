"""HiCache's storage interface over a pool, by plain blocking calls. Written against SGLang 0.5.23;
0.5.20 is the first whose page hashes tell adapters and salts apart."""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sglang
import torch

try:
    from sglang.srt.mem_cache.utils import storage_namespace_seed  # noqa: F401 - see above
    from sglang.srt.runtime_context import get_context
except ImportError as _error:
    raise ImportError(
        f"kvrecall: SGLang {sglang.__version__} hashes a page's tokens only, so that requests with "
        "another adapter, cache_salt or extra_key would get its KV; use SGLang 0.5.20 or later, "
        "or remove --hicache-storage-backend"
    ) from _error
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)
from sglang.srt.utils import get_device_name

from kvrecall.block import BlockKey, Namespace
from kvrecall.engines.sglang.identity import (
    base_of,
    key_of,
    namespace_of,
    page_of,
    read_settings,
    settings_of,
)
from kvrecall.errors import TierError
from kvrecall.pool.arena import Arena
from kvrecall.pool.base import ArenaHandle, PoolClient, Recall, RecallState, Verdict
from kvrecall.pool.service.client import open_pool

_LOG = logging.getLogger(__name__)
_POLL_S = 0.0005
_FLAT = "flat"  # one tensor, as the host pool flattens a page
_PIECES = "pieces"  # the pieces of the host pool's buffers, in its order


@dataclass(frozen=True, slots=True)
class HiCachePage:
    """A page and the pieces of host memory that hold or receive it, in order."""

    key: BlockKey
    pieces: tuple[memoryview, ...]


def _places(
    page: HiCachePage, arena: Arena, offset: int
) -> Iterator[tuple[memoryview, memoryview]]:
    """Each piece's place in the arena, and the piece."""
    for piece in page.pieces:
        yield arena.view(offset, piece.nbytes), piece
        offset += piece.nbytes


class RecallStorage(HiCacheStorage):  # type: ignore[misc]
    """SGLang's third level in a kvrecall pool. A dynamic backend: see the package.

    Thread-safe, and blocking as SGLang's storage threads expect. A page that is not there, late or
    damaged is None or False; SGLang computes it. Flat pages (``batch_get``) and pages by pieces
    (``batch_get_v1``, with ``interface_v1``) are different bytes and never meet.
    """

    def __init__(
        self, storage_config: HiCacheStorageConfig, kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """Opens the pool. ConfigError or TierError, naming the setting, if that cannot be."""
        server = get_context().resolved_server_args_dict()
        ranks = storage_config.tp_size * storage_config.pp_size
        settings, weights = read_settings(storage_config.extra_config, server, ranks)
        engine = {"version": str(sglang.__version__), "device": str(get_device_name())}
        self._config = storage_config
        self._base = base_of(storage_config, weights, engine | settings_of(server))
        by_pieces = bool((storage_config.extra_config or {}).get("interface_v1", 0))
        self._form = _PIECES if by_pieces else _FLAT
        self._namespaces: dict[tuple[str, int, str], Namespace] = {}
        self._sizes: dict[str, int] = {}  # of the pages of a pool by its name, once known
        self.registered_pools: dict[str, Any] = {}
        self._terms = settings.pool
        self._lock = threading.Lock()  # of what follows
        self._pool: PoolClient = open_pool(settings)
        self._arena: Arena | None = None
        self._handle: ArenaHandle | None = None

    # -- the engine's memory ---------------------------------------------------------------

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)
        self._namespaces.clear()
        self._sizes["kv"] = _nbytes(mem_pool_host.get_dummy_flat_data_page())

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: str) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        if host_pool_name != PoolName.KV:
            self._sizes[str(host_pool_name)] = _nbytes(host_pool.get_dummy_flat_data_page())

    # -- flat pages ------------------------------------------------------------------------

    def get(
        self,
        key: str,
        target_location: torch.Tensor | None = None,
        target_sizes: Any | None = None,
    ) -> torch.Tensor | None:
        if target_location is None:
            return None
        return self.batch_get([key], [target_location])[0]

    def batch_get(
        self,
        keys: list[str],
        target_locations: Sequence[torch.Tensor] | None = None,
        target_sizes: Any | None = None,
    ) -> list[torch.Tensor | None]:
        if not keys or target_locations is None:
            return [None] * len(keys)
        found = self._get_flat("kv", keys, target_locations)
        return [
            target if is_there else None
            for target, is_there in zip(target_locations, found, strict=True)
        ]

    def set(
        self,
        key: str,
        value: torch.Tensor | None = None,
        target_location: Any | None = None,
        target_sizes: Any | None = None,
    ) -> bool:
        return value is not None and self.batch_set([key], [value])

    def batch_set(
        self,
        keys: list[str],
        values: Sequence[torch.Tensor] | None = None,
        target_locations: Any | None = None,
        target_sizes: Any | None = None,
    ) -> bool:
        if values is None or len(values) != len(keys):
            return False
        return all(self._put_flat("kv", keys, values))

    # -- pages by pieces -------------------------------------------------------------------

    def batch_get_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        return self._by_pieces(self._get, keys, host_indices, extra_info)

    def batch_set_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        return self._by_pieces(self._put, keys, host_indices, extra_info)

    def _by_pieces(
        self,
        move: Callable[[Sequence[HiCachePage], BlockKey | None], list[bool]],
        keys: Sequence[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None,
    ) -> list[bool]:
        if not keys or getattr(self.mem_pool_host, "kv_buffer", 0) is None:
            return [True] * len(keys)  # without memory, side pools carry the data, through v2
        pointers, sizes = self.mem_pool_host.get_page_buffer_meta(host_indices)
        each, rest = divmod(len(pointers), len(keys))
        if rest or not each:
            raise ValueError(f"{len(pointers)} pieces of memory for {len(keys)} pages")
        pieces = [_memory(at, size) for at, size in zip(pointers, sizes, strict=True)]
        nbytes = self._sizes["kv"] = sum(sizes[:each])
        namespace = self._namespace("kv", nbytes, _PIECES)
        pages = [
            HiCachePage(key_of(namespace, key), tuple(pieces[n * each : (n + 1) * each]))
            for n, key in enumerate(keys)
        ]
        prefix = extra_info.prefix_keys if extra_info is not None else None
        return move(pages, key_of(namespace, prefix[-1]) if prefix else None)

    # -- what is there ---------------------------------------------------------------------

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def batch_exists(
        self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> int:
        return self._count("kv", keys)

    def _count(self, pool: str, keys: Sequence[str]) -> int:
        nbytes = self._sizes.get(pool)
        if nbytes is None or not keys:
            return 0
        namespace = self._namespace(pool, nbytes, self._form if pool == "kv" else _FLAT)
        until = time.monotonic() + self._terms.lookup_deadline_s  # for the remote tier's answer
        with self._lock:
            while True:
                found = self._pool.find([key_of(namespace, key) for key in keys])
                if not found.pending or time.monotonic() > until:
                    return found.blocks
                time.sleep(_POLL_S)

    # -- several pools ---------------------------------------------------------------------

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """As SGLang's file backend answers: prefixes that every pool can restore."""
        kv_pages = self._count("kv", keys)
        hits: dict[str, int] = {PoolName.KV: kv_pages} if kv_pages else {}
        restorable = list(range(1, kv_pages + 1))
        for transfer in pool_transfers or []:
            if not restorable:
                break
            lengths = self._restorable(transfer, keys[:kv_pages])
            if lengths:
                hits[transfer.name] = max(lengths)
            restorable = [length for length in restorable if length in lengths]
        return PoolTransferResult(restorable[-1] if restorable else 0, hits, restorable)

    def _restorable(self, transfer: PoolTransfer, keys: Sequence[str]) -> frozenset[int]:
        """Lengths of prefixes of ``keys`` for which this pool has what its policy asks."""
        name = str(transfer.name)
        if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
            return frozenset(range(1, self._count(name, keys) + 1))
        if transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
            there = [self._count(name, [key]) == 1 for key in keys]
            last = max(1, len(transfer.keys or ()))
            ends = range(1, len(keys) + 1)
            return frozenset(e for e in ends if all(there[max(0, e - last) : e]))
        raise ValueError(f"Unsupported pool hit policy: {transfer.hit_policy}")

    def batch_get_v2(
        self,
        transfers: list[PoolTransfer],
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> dict[str, list[bool]]:
        return {one.name: self._get_transfer(one) for one in transfers}

    def _get_transfer(self, transfer: PoolTransfer) -> list[bool]:
        pool, keys, places = self._places_of(transfer)
        if len(places) != len(keys):
            return [False] * len(keys)
        into = [pool.get_dummy_flat_data_page() for _ in keys]
        found = self._get_flat(str(transfer.name), keys, into)
        for place, data, is_there in zip(places, into, found, strict=True):
            if is_there:
                pool.set_from_flat_data_page(place, data)
        return found

    def batch_set_v2(
        self,
        transfers: list[PoolTransfer],
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> dict[str, list[bool]]:
        return {one.name: self._set_transfer(one) for one in transfers}

    def _set_transfer(self, transfer: PoolTransfer) -> list[bool]:
        pool, keys, places = self._places_of(transfer)
        if len(places) != len(keys):
            return [False] * len(keys)
        values = [pool.get_data_page(place, flat=True) for place in places]
        return self._put_flat(str(transfer.name), keys, values)

    def _places_of(self, transfer: PoolTransfer) -> tuple[Any, list[str], list[int]]:
        """The host pool of a transfer, its keys, and the first index of each page."""
        pool = self.registered_pools[transfer.name]
        keys = list(transfer.keys or ())
        size = getattr(pool, "page_size", 1) or 1
        indices = transfer.host_indices
        fits = indices is not None and indices.numel() == len(keys) * size
        return pool, keys, indices[::size].tolist() if fits else []

    # -- to and from the pool ----------------------------------------------------------------

    def _put(self, pages: Sequence[HiCachePage], parent: BlockKey | None = None) -> list[bool]:
        """Stores a chain of pages; returns which of them are in the pool now."""
        keys = [page.key for page in pages]
        with self._lock:
            arena = self._current()
            if arena is None:
                return [False] * len(pages)
            answers = self._pool.reserve(keys, parent)
            pairs = zip(pages, answers, strict=True)
            reserved = [(page, of.offset) for page, of in pairs if of.verdict is Verdict.RESERVED]
            filled: list[BlockKey] = []
            try:
                for page, offset in reserved:
                    for place, piece in _places(page, arena, offset):
                        place[:] = piece
                    filled.append(page.key)
            finally:
                self._pool.commit(filled)
                self._pool.abandon([page.key for page, _ in reserved[len(filled) :]])
            return [answer.verdict is not Verdict.REFUSED for answer in answers]

    def _get(self, pages: Sequence[HiCachePage], parent: BlockKey | None = None) -> list[bool]:
        """Fills pages; returns which of them were found. Missing pages are skipped."""
        found = [False] * len(pages)
        begin = 0
        with self._lock:
            while begin < len(pages):
                got = self._get_leading(pages[begin:], parent)
                found[begin : begin + got] = [True] * got
                begin += got + 1
                parent = pages[begin - 1].key if begin <= len(pages) else None
        return found

    def _get_leading(self, pages: Sequence[HiCachePage], parent: BlockKey | None) -> int:
        """Fills pages up to the first missing one; returns their number. Under the lock."""
        arena = self._current()
        if arena is None:
            return 0
        keys = [page.key for page in pages]
        self._pool.touch(keys)
        ticket = self._pool.acquire(keys, self._terms.load_deadline_s, parent)
        try:
            recall = self._await(ticket)
            for page, offset in zip(pages, recall.offsets, strict=False):
                for place, piece in _places(page, arena, offset):
                    piece[:] = place
            return len(recall.offsets)
        finally:
            self._pool.release(ticket)

    def _await(self, ticket: int) -> Recall:
        """The recall, once it is READY; the pool's deadline bounds that."""
        until = time.monotonic() + self._terms.load_deadline_s + 1.0
        while True:
            recall = self._pool.poll(ticket)
            if recall.state is RecallState.READY:
                return recall
            if time.monotonic() > until:
                return Recall(RecallState.READY)
            time.sleep(_POLL_S)

    def _current(self) -> Arena | None:
        """The arena of offsets from now on. None if it cannot be mapped (no service): no page is
        moved then."""
        handle = self._pool.arena_handle()
        if handle != self._handle:
            self._unmap()
            self._handle = handle
            try:
                self._arena = Arena.attach(handle)
            except TierError as error:
                _LOG.warning("kvrecall: %s; pages are computed", error)
        return self._arena

    def _unmap(self) -> None:
        if self._arena is not None:
            self._arena.close()
        self._arena = self._handle = None

    # -- the rest --------------------------------------------------------------------------

    def clear(self) -> None:
        with self._lock:
            self._pool.clear()

    def close(self) -> None:
        """Idempotent."""
        with self._lock:
            self._unmap()
            self._pool.close()

    def _get_flat(self, pool: str, keys: Sequence[str], into: Sequence[torch.Tensor]) -> list[bool]:
        if not keys:
            return []
        whole = [target.contiguous() for target in into]
        found = self._get(self._flat(pool, keys, whole))
        for target, filled, is_there in zip(into, whole, found, strict=True):
            if is_there and filled is not target:
                target.copy_(filled)
        return found

    def _put_flat(
        self, pool: str, keys: Sequence[str], values: Sequence[torch.Tensor]
    ) -> list[bool]:
        if not keys:
            return []
        whole = [value.contiguous() for value in values]
        return self._put(self._flat(pool, keys, whole))

    def _flat(
        self, pool: str, keys: Sequence[str], whole: Sequence[torch.Tensor]
    ) -> list[HiCachePage]:
        namespace = self._namespace(pool, _nbytes(whole[0]), _FLAT)
        pairs = zip(keys, whole, strict=True)
        return [HiCachePage(key_of(namespace, key), (_bytes(data),)) for key, data in pairs]

    def _namespace(self, pool: str, nbytes: int, form: str) -> Namespace:
        kind = pool, nbytes, form
        if kind not in self._namespaces:
            of_kv = getattr(self, "mem_pool_host", None)
            host_pool = of_kv if pool == "kv" else self.registered_pools.get(pool)
            namespace = namespace_of(self._base, self._config, *kind, page_of(host_pool))
            with self._lock:
                self._pool.register(namespace, nbytes)
            self._namespaces[kind] = namespace
        return self._namespaces[kind]


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor in host memory."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy().data


def _memory(address: int, nbytes: int) -> memoryview:
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")
