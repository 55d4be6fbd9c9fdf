"""Moves pages in and out of a pool by plain blocking calls, as a storage backend requires, and
identifies them by all that SGLang's page hash does not cover.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvrecall.block import BlockKey, Namespace
from kvrecall.config import RecallSettings
from kvrecall.engines.fingerprint import default_memory, fingerprint_of
from kvrecall.errors import ConfigError, TierError
from kvrecall.pool.arena import Arena
from kvrecall.pool.base import ArenaHandle, PoolClient, Recall, RecallState, Verdict
from kvrecall.pool.open import open_pool

_LOG = logging.getLogger(__name__)
_POLL_S = 0.0005
SECTION = "kvrecall"
"""Key of kvrecall's settings in SGLang's extra config."""


@dataclass(frozen=True, slots=True)
class Page:
    """A page and the pieces of host memory that hold or receive it, in order."""

    key: BlockKey
    pieces: tuple[memoryview, ...]


class Pages:
    """A pool, for a caller that waits. One call at a time; others wait their turn."""

    def __init__(self, settings: RecallSettings) -> None:
        """Opens the pool, or connects to the node's. Raises ConfigError or TierError if that
        fails."""
        self._pool: PoolClient = open_pool(settings)
        self._settings = settings.pool
        self._lock = threading.Lock()
        self._arena: Arena | None = None
        self._handle: ArenaHandle | None = None
        self._sizes: dict[bytes, int] = {}

    def register(self, namespace: Namespace, nbytes: int) -> None:
        """Pages of ``namespace`` have ``nbytes`` bytes. Idempotent."""
        with self._lock:
            if self._sizes.get(namespace.digest) != nbytes:
                self._pool.register(namespace, nbytes)
                self._sizes[namespace.digest] = nbytes

    def count(self, keys: Sequence[BlockKey]) -> int:
        """How many of ``keys``, from the first on, are in the pool. Waits for the remote tier's
        answer, not longer than ``lookup_deadline``."""
        until = time.monotonic() + self._settings.lookup_deadline_s
        with self._lock:
            while True:
                found = self._pool.find(keys)
                if not found.pending or time.monotonic() > until:
                    return found.blocks
                time.sleep(_POLL_S)

    def put(self, pages: Sequence[Page], parent: BlockKey | None = None) -> list[bool]:
        """Stores a chain of pages; returns which of them are in the pool now."""
        keys = [page.key for page in pages]
        with self._lock:
            arena = self._current()
            if arena is None:
                return [False] * len(pages)
            answers = self._pool.reserve(keys, parent)
            filled: list[BlockKey] = []
            try:
                for page, answer in zip(pages, answers, strict=True):
                    if answer.verdict is Verdict.RESERVED:
                        _gather(page, arena, answer.offset)
                        filled.append(page.key)
            finally:
                reserved = {
                    key
                    for key, answer in zip(keys, answers, strict=True)
                    if answer.verdict is Verdict.RESERVED
                }
                self._pool.commit(filled)
                self._pool.abandon([key for key in reserved if key not in filled])
            return [answer.verdict is not Verdict.REFUSED for answer in answers]

    def get(self, pages: Sequence[Page], parent: BlockKey | None = None) -> list[bool]:
        """Fills pages; returns which of them were found. Missing pages are skipped."""
        found = [False] * len(pages)
        begin = 0
        with self._lock:
            while begin < len(pages):
                got = self._get(pages[begin:], parent)
                found[begin : begin + got] = [True] * got
                begin += got + 1
                parent = pages[begin - 1].key if begin <= len(pages) else None
        return found

    def clear(self) -> None:
        with self._lock:
            self._pool.clear()

    def close(self) -> None:
        """Idempotent."""
        with self._lock:
            self._unmap()
            self._pool.close()

    # -- under the lock --------------------------------------------------------------------

    def _get(self, pages: Sequence[Page], parent: BlockKey | None) -> int:
        """Fills pages up to the first missing one; returns their number."""
        arena = self._current()
        if arena is None:
            return 0
        keys = [page.key for page in pages]
        self._pool.touch(keys)
        ticket = self._pool.acquire(keys, self._settings.load_deadline_s, parent)
        try:
            recall = self._await(ticket)
            for page, offset in zip(pages, recall.offsets, strict=False):
                _scatter(page, arena, offset)
            return len(recall.offsets)
        finally:
            self._pool.release(ticket)

    def _await(self, ticket: int) -> Recall:
        """The recall, once it is READY; the pool's deadline bounds that."""
        until = time.monotonic() + self._settings.load_deadline_s + 1.0
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


def _gather(page: Page, arena: Arena, offset: int) -> None:
    for piece in page.pieces:
        arena.view(offset, piece.nbytes)[:] = piece
        offset += piece.nbytes


def _scatter(page: Page, arena: Arena, offset: int) -> None:
    for piece in page.pieces:
        piece[:] = arena.view(offset, piece.nbytes)
        offset += piece.nbytes


@dataclass(frozen=True, slots=True)
class Identity:
    """``shared``: pages that are the same on all tensor-parallel ranks (MLA)."""

    base: Namespace
    rank: Mapping[str, str]
    shared: bool

    def namespace(self, pool: str, nbytes: int, form: str = "") -> Namespace:
        """Of pages of one kind (SGLang's pool name), size and form."""
        rank = {} if self.shared and pool == "kv" else dict(self.rank)
        return self.base.derive(pool=pool, page_bytes=str(nbytes), form=form, **rank)


def key_of(namespace: Namespace, page_hash: str) -> BlockKey:
    """Key of the page with this SGLang hash, or any other text."""
    return namespace.key(hashlib.sha256(page_hash.encode()).digest())


def read_settings(extra: Mapping[str, Any] | None) -> tuple[RecallSettings, str]:
    """kvrecall's settings from SGLang's extra config, and the digest of the model's weights. Raises
    ConfigError if one is wrong."""
    source = f"hicache-storage-backend-extra-config: {SECTION}"
    raw = (extra or {}).get(SECTION)
    if not isinstance(raw, Mapping):
        raise ConfigError(
            f'{source} must be an object, for example {{"model_path": "/models/m", '
            '"host_size": "8GiB"}'
        )
    left = dict(raw)
    path, revision = left.pop("model_path", None), left.pop("revision", None)
    if isinstance(revision, str) and revision:
        weights = f"revision {revision}"
    elif isinstance(path, str) and path:
        weights = _digest(Path(path), source)
    else:
        raise ConfigError(
            f"{source}: identify the model's weights: set model_path (their folder) or revision "
            "(any text that changes with them)"
        )
    return RecallSettings.from_mapping(left, source), weights


def _digest(folder: Path, source: str) -> str:
    try:
        return fingerprint_of(folder, memory=default_memory())
    except OSError as error:
        raise ConfigError(f"{source}: model_path: {error}") from error


def check_ranks(settings: RecallSettings, ranks: int) -> None:
    """ConfigError if several ranks would each open the same folder."""
    if ranks > 1 and settings.pool.disk is not None:
        raise ConfigError(
            f"{SECTION}: disk_path serves one process, but this engine has {ranks} ranks; run "
            '`kvrecall pool serve` on the node and set "backend": "service"'
        )


def identity_of(config: Any, weights: str, version: str, page: Mapping[str, str]) -> Identity:
    """``config``: SGLang's ``HiCacheStorageConfig``. ``page``: how a page is laid out."""
    base = Namespace.of(
        {
            "engine": "sglang",
            "version": ".".join(version.split(".")[:2]),
            "model": str(config.model_name),
            "weights": weights,
            "pp": f"{config.pp_rank}/{config.pp_size}",
            "attn_cp": f"{config.attn_cp_rank}/{config.attn_cp_size}",
            "dcp": f"{getattr(config, 'dcp_rank', 0)}/{getattr(config, 'dcp_size', 1)}",
            "mla": str(config.is_mla_model),
            **page,
        }
    )
    rank = {"tp": f"{config.tp_rank}/{config.tp_size}"}
    return Identity(base, rank, bool(config.is_mla_model))
