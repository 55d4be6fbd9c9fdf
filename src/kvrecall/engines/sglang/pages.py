"""Moves pages in and out of a pool by plain blocking calls, as a storage backend requires."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from kvrecall.block import BlockKey, Namespace
from kvrecall.config import RecallSettings
from kvrecall.errors import TierError
from kvrecall.pool.arena import Arena
from kvrecall.pool.base import ArenaHandle, PoolClient, Recall, RecallState, Verdict
from kvrecall.pool.open import open_pool

_LOG = logging.getLogger(__name__)
_POLL_S = 0.0005


@dataclass(frozen=True, slots=True)
class HiCachePage:
    """A page and the pieces of host memory that hold or receive it, in order."""

    key: BlockKey
    pieces: tuple[memoryview, ...]


class HiCachePages:
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

    def put(self, pages: Sequence[HiCachePage], parent: BlockKey | None = None) -> list[bool]:
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

    def get(self, pages: Sequence[HiCachePage], parent: BlockKey | None = None) -> list[bool]:
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

    def _get(self, pages: Sequence[HiCachePage], parent: BlockKey | None) -> int:
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


def _gather(page: HiCachePage, arena: Arena, offset: int) -> None:
    for piece in page.pieces:
        arena.view(offset, piece.nbytes)[:] = piece
        offset += piece.nbytes


def _scatter(page: HiCachePage, arena: Arena, offset: int) -> None:
    for piece in page.pieces:
        piece[:] = arena.view(offset, piece.nbytes)
        offset += piece.nbytes
