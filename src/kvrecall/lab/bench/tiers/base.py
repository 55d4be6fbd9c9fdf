"""What every library does in this benchmark: take blocks, give them back."""

from __future__ import annotations

import ctypes
import enum
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path


class Medium(enum.StrEnum):
    """Where a library keeps the blocks."""

    MEMORY = "memory"
    DISK = "disk"


class Store(ABC):
    """Blocks of one size under names, in one library. Called by one thread; closed once.

    ``put`` and ``get`` are timed, the rest is not. All raise whatever the library raises, and
    StoreError for what it refuses by a return value.
    """

    @abstractmethod
    def put(self, names: Sequence[bytes], blocks: Sequence[memoryview]) -> None:
        """Returns once the library calls the blocks stored. ``names`` are new, 32 bytes each."""

    @abstractmethod
    def get(self, names: Sequence[bytes], into: Sequence[memoryview]) -> None:
        """Brings the blocks; they are in ``into``, or in what ``landed`` says."""

    def prepare(self, names: Sequence[bytes], blocks: Sequence[memoryview]) -> None:
        """Comes before ``put``: a library that writes only from memory of its own copies here."""
        return

    def landed(self, into: Sequence[memoryview]) -> Sequence[memoryview]:
        """Where the blocks of the last ``get`` are; called before anything else is."""
        return into

    @abstractmethod
    def remove(self, names: Sequence[bytes]) -> None:
        """Forgets blocks and frees their room."""

    @abstractmethod
    def close(self) -> None: ...


class StoreError(Exception):
    """A library said no."""


def address_of(memory: memoryview) -> int:
    """Address of its first byte."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def files_below(folder: Path) -> list[Path]:
    """Regular files of a store."""
    return [path for path in folder.rglob("*") if path.is_file()]


def make_durable(folder: Path) -> None:
    """Waits until every file below ``folder`` is on the medium."""
    for path in files_below(folder):
        with path.open("rb") as file:
            os.fsync(file.fileno())


def drop_from_memory(folder: Path) -> None:
    """Takes every file below ``folder`` out of the page cache; they must be durable."""
    for path in files_below(folder):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
