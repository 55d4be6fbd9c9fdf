"""Administration from outside: of a running service over its socket, or of a disk folder that no
process uses."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from pathlib import Path
from types import TracebackType
from typing import Self

from kvrecall.config import DiskConfig
from kvrecall.errors import TierError
from kvrecall.pool.disk import DiskTier
from kvrecall.pool.disk.folder import own_bytes
from kvrecall.pool.disk.index import INDEX_NAME
from kvrecall.pool.service import protocol as p
from kvrecall.pool.service.inventory import Inventory, OnProgress
from kvrecall.pool.service.link import Link, LinkLate, LinkLost
from kvrecall.pool.service.views import Listing, Overview

_PATIENCE_S = 30.0


class Admin(ABC):
    """Blocks of a pool, by namespace. A context manager. All methods may block and raise
    TierError."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @abstractmethod
    def listing(self) -> Listing: ...

    @abstractmethod
    def drop(self, digests: Collection[bytes], older_than_s: float | None = None) -> int:
        """Drops blocks of these namespaces (none given: of all), with ``older_than_s`` only what
        was not used for so long. Returns how many."""

    @abstractmethod
    def verify(self, digests: Collection[bytes], progress: OnProgress) -> tuple[int, int]:
        """Reads and checks the blocks on disk; drops the damaged. Returns how many were checked,
        and how many damaged."""

    @abstractmethod
    def close(self) -> None: ...


class ServiceAdmin(Admin):
    """Of the service at a socket."""

    def __init__(self, path: Path, timeout_s: float = 5.0) -> None:
        self._path = path
        try:
            self._link = Link.open(path, timeout_s)
        except LinkLost as error:
            raise TierError(str(error)) from error

    def look(self) -> Overview:
        reply = self._ask(p.Look)
        assert isinstance(reply, p.LookReply)
        return reply.overview

    def listing(self) -> Listing:
        reply = self._ask(p.List)
        assert isinstance(reply, p.ListReply)
        return reply.listing

    def drop(self, digests: Collection[bytes], older_than_s: float | None = None) -> int:
        reply = self._ask(lambda number: p.Drop(number, tuple(digests), older_than_s))
        assert isinstance(reply, p.Dropped)
        return reply.blocks

    def verify(self, digests: Collection[bytes], progress: OnProgress) -> tuple[int, int]:
        reply = self._ask(
            lambda number: p.Verify(number, tuple(digests)),
            lambda news: progress(news.checked, news.total, news.damaged),
        )
        assert isinstance(reply, p.Verified)
        return reply.checked, reply.damaged

    def close(self) -> None:
        self._link.close()

    def _ask(
        self,
        make: Callable[[int], p.Message],
        on_progress: Callable[[p.Progress], None] | None = None,
    ) -> p.Reply:
        try:
            return self._link.ask(make, _PATIENCE_S, True, on_progress)
        except LinkLate as error:
            raise TierError(f"the pool service at {self._path} does not answer") from error
        except LinkLost as error:
            raise TierError(f"the pool service at {self._path} is gone: {error}") from error


class FolderAdmin(Admin):
    """Of a disk tier's folder, which it holds meanwhile."""

    def __init__(self, path: Path) -> None:
        if not (path / INDEX_NAME).exists():
            raise TierError(f"disk_path: {path} holds no blocks (there is no {INDEX_NAME} in it)")
        self._tier = DiskTier(DiskConfig(path, _present_size(path)))
        self._inventory = Inventory(None, self._tier)

    def listing(self) -> Listing:
        return self._inventory.listing()

    def drop(self, digests: Collection[bytes], older_than_s: float | None = None) -> int:
        return self._inventory.drop(frozenset(digests) or None, older_than_s)

    def verify(self, digests: Collection[bytes], progress: OnProgress) -> tuple[int, int]:
        return self._inventory.verify(frozenset(digests) or None, progress)

    def close(self) -> None:
        self._tier.close()


def _present_size(path: Path) -> int:
    """A capacity at which opening the folder gives nothing up."""
    own = own_bytes(path)
    system = os.statvfs(path)
    return min(own + own // 10 + (64 << 20), own + system.f_bavail * system.f_frsize)
