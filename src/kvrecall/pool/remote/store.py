"""The interface of a store beyond this host: all that your own store must implement.

A store keeps byte strings under names. It may be slow, lose values, vanish and come back empty:
the tier that uses it (``RemoteTier``) verifies every answer, and adds threads, bounded queues,
deadlines, checksums and a pause after failures. A store is therefore plain blocking code: batches
in, batches out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Object:
    """A value to put, or room for one to get: ``name`` and the pieces its bytes lie in, in order.

    ``name``: up to 200 characters of ``[A-Za-z0-9._-]``, the first a letter or digit; safe in a
    URL and as a file name. Case matters.
    ``parts``: contiguous views of bytes (uint8), writable for a get. They lie in the memory that
    was announced with ``attach``, but for parts of at most 64 bytes, and stay put during a call.
    """

    name: str
    parts: tuple[memoryview, ...]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


class Store(Protocol):
    """Values under names, somewhere else. Blocking; called by several threads at once.

    Every method may raise any ``Exception``: the whole batch counts as failed then (blocks to be
    put are shed, blocks to be got are misses), and the tier leaves the store alone for a while.
    """

    def attach(self, memory: memoryview) -> None:
        """``memory`` (bytes) will hold the parts of objects. Called once, first; for stores that
        register memory with a device or a transport. It outlives ``close``. It maps a memory file
        (memfd) whose descriptor this process holds, so that another process can map it, too."""

    def exists(self, names: Sequence[str]) -> list[bool]:
        """Which of ``names`` can be got, in one round trip where the store has one. A hint."""

    def put(self, objects: Sequence[Object]) -> list[bool]:
        """Stores values; which of them are there now. A name that is there already is True:
        names are digests of content, the bytes are the same. Never visible in part."""

    def get(self, objects: Sequence[Object]) -> list[bool]:
        """Fills the parts of each of ``objects``; False for a name that is not there or a value of
        another size than ``item.nbytes``, whose parts may hold anything then."""

    def remove(self, names: Sequence[str]) -> None:
        """Forgets values, as far as the store can; names not there are ignored."""

    def close(self) -> None:
        """Gives back what was acquired. What is stored stays. Idempotent."""
