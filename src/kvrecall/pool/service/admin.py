"""Administration from outside: of a running service over its socket, or of a disk folder that no
process uses."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Self

from kvrecall.config import DiskConfig
from kvrecall.errors import ConfigError, TierError
from kvrecall.pool.cipher import read_cipher
from kvrecall.pool.disk import DiskTier
from kvrecall.pool.disk.folder import FolderHeld, own_bytes
from kvrecall.pool.disk.index import INDEX_NAME, is_sealed
from kvrecall.pool.disk.seal import Checksum, Seal, Shut, make_seal
from kvrecall.pool.service import protocol as p
from kvrecall.pool.service.forest import Tree
from kvrecall.pool.service.inventory import Inventory, OnProgress
from kvrecall.pool.service.link import Link, LinkLate, LinkLost
from kvrecall.pool.service.views import By, Listing, Overview, Query

_PATIENCE_S = 30.0


class Admin(ABC):
    """Blocks of a pool. A context manager. All methods may block and raise TierError; ConfigError
    if what is asked for cannot be."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def listing(
        self, query: Query, by: By = By.NAMESPACE, sort: str = "size", limit: int = 10_000
    ) -> Listing:
        """What is there of the blocks that fit, in rows."""

    @abstractmethod
    def drop(self, query: Query, pinned: bool = False) -> tuple[int, int]:
        """Drops the blocks that fit, pinned ones only if ``pinned`` says so. Returns how many
        were dropped, and how many pinned ones were not."""

    @abstractmethod
    def pin(self, query: Query, on: bool) -> tuple[int, int]:
        """Pins, or unpins, the blocks that fit: all or none. Returns how many, and their bytes."""

    @abstractmethod
    def verify(self, query: Query, progress: OnProgress) -> tuple[int, int]:
        """Reads and checks the blocks on disk that fit; drops the damaged. Returns how many were
        checked, and how many damaged."""

    @abstractmethod
    def resize(self, host_bytes: int | None, disk_bytes: int | None, progress: OnProgress) -> None:
        """Sets the sizes given; returns when what has to go is gone. ``progress``: bytes gone,
        bytes that have to go."""

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

    def listing(
        self, query: Query, by: By = By.NAMESPACE, sort: str = "size", limit: int = 10_000
    ) -> Listing:
        reply = self._ask(lambda number: p.List(number, query, by, sort, limit))
        assert isinstance(reply, p.ListReply)
        return reply.listing

    def forest(self, limit: int = 300) -> tuple[Tree, ...]:
        """What is cached, as trees by model and tenant, largest first."""
        reply = self._ask(lambda number: p.Forest(number, limit))
        assert isinstance(reply, p.ForestReply)
        return reply.trees

    def drop(self, query: Query, pinned: bool = False) -> tuple[int, int]:
        reply = self._ask(lambda number: p.Drop(number, query, pinned))
        assert isinstance(reply, p.Dropped)
        return reply.blocks, reply.kept

    def pin(self, query: Query, on: bool) -> tuple[int, int]:
        reply = self._ask(lambda number: p.Pin(number, query, on))
        assert isinstance(reply, p.Pinned)
        return reply.blocks, reply.nbytes

    def verify(self, query: Query, progress: OnProgress) -> tuple[int, int]:
        reply = self._ask(
            lambda number: p.Verify(number, query),
            lambda news: progress(news.checked, news.total, news.damaged),
        )
        assert isinstance(reply, p.Verified)
        return reply.checked, reply.damaged

    def resize(self, host_bytes: int | None, disk_bytes: int | None, progress: OnProgress) -> None:
        self._ask(
            lambda number: p.Resize(number, host_bytes, disk_bytes),
            lambda news: progress(news.checked, news.total, news.damaged),
        )

    def close(self) -> None:
        self._link.close()

    def _ask(
        self,
        make: Callable[[int], p.Message],
        on_progress: Callable[[p.Progress], None] | None = None,
    ) -> p.Reply:
        try:
            reply = self._link.ask(make, _PATIENCE_S, True, on_progress)
        except LinkLate as error:
            raise TierError(f"the pool service at {self._path} does not answer") from error
        except LinkLost as error:
            raise TierError(f"the pool service at {self._path} is gone: {error}") from error
        if isinstance(reply, p.Trouble):
            raise ConfigError(reply.text)
        return reply


class FolderAdmin(Admin):
    """Of a disk tier's folder, which it holds meanwhile. If its blocks are sealed, it takes the
    key to verify them; all else needs none."""

    def __init__(self, path: Path, key_file: Path | None = None) -> None:
        if not (path / INDEX_NAME).exists():
            raise TierError(f"disk_path: {path} holds no blocks (there is no {INDEX_NAME} in it)")
        config = DiskConfig(path, _present_size(path))
        try:
            self._tier = DiskTier(config, seal=_seal_for(path, key_file))
        except FolderHeld as error:
            raise TierError(
                f"{error}. A pool in an engine's own process cannot be administered while it "
                "runs; a service's can: --socket"
            ) from error
        self._inventory = Inventory(None, self._tier)

    def listing(
        self, query: Query, by: By = By.NAMESPACE, sort: str = "size", limit: int = 10_000
    ) -> Listing:
        return self._inventory.listing(query, by, sort, limit)

    def drop(self, query: Query, pinned: bool = False) -> tuple[int, int]:
        return self._inventory.drop(query, pinned)

    def pin(self, query: Query, on: bool) -> tuple[int, int]:
        return self._inventory.pin(query, on)

    def verify(self, query: Query, progress: OnProgress) -> tuple[int, int]:
        return self._inventory.verify(query, progress)

    def resize(self, host_bytes: int | None, disk_bytes: int | None, progress: OnProgress) -> None:
        self._inventory.resize(host_bytes, disk_bytes)

    def close(self) -> None:
        self._tier.close()


def _seal_for(path: Path, key_file: Path | None) -> Seal:
    """One that changes nothing in the folder."""
    if not is_sealed(path):
        return Checksum()
    return Shut() if key_file is None else make_seal(read_cipher(key_file))


def _present_size(path: Path) -> int:
    """A capacity at which opening the folder gives nothing up."""
    own = own_bytes(path)
    system = os.statvfs(path)
    return min(own + own // 10 + (64 << 20), own + system.f_bavail * system.f_frsize)
