"""The interface of a store beyond this host: all that your own store must implement.

A store keeps byte strings under names. It may be slow, lose values, vanish and come back empty:
the tier that uses it (``RemoteTier``) verifies every answer, and adds threads, bounded queues,
deadlines, checksums and a pause after failures. A store is therefore plain blocking code: batches
in, batches out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable


@dataclass(frozen=True, slots=True)
class Object:
    """A value to put, or memory to get one into: ``name`` and the pieces of memory, in order.

    ``name``: up to 200 characters of ``[A-Za-z0-9._-]``, the first a letter or digit; safe in a
    URL and as a file name. Case matters.
    ``parts``: contiguous views of bytes (uint8), writable for a get. They do not move during a
    call.
    """

    name: str
    parts: tuple[memoryview, ...]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


@runtime_checkable
class Store(Protocol):
    """Values under names, somewhere else. Blocking; called by several threads at once.

    Every method may raise any ``Exception``: the whole batch counts as failed then (puts are
    shed, gets are misses), and the tier pauses its calls to the store. Once a method has returned
    or raised, nothing reads or writes the parts of its objects any more.
    """

    @property
    def exposed(self) -> str:
        """How others can read or change values in the store or on their way, naming the setting and
        its value; "" if they cannot without credentials. If they can, a pool uses the store only
        with an encryption key or ``allow_plaintext``."""

    def exists(self, names: Sequence[str]) -> list[bool]:
        """Which of ``names`` can be got, in one round trip if the store supports that. A hint."""

    def put(self, objects: Sequence[Object]) -> list[bool]:
        """Stores values; returns which of them are stored now. True for a name that exists already:
        names are digests of content, so the bytes are the same. Never visible in part."""

    def get(self, objects: Sequence[Object]) -> list[bool]:
        """Fills the parts of each of ``objects``; False for a name that does not exist or a value
        of another size than ``item.nbytes``; the content of its parts is then undefined."""

    def remove(self, names: Sequence[str]) -> None:
        """Forgets values, as far as the store can; unknown names are ignored."""

    def close(self) -> None:
        """Releases the store's resources. Stored values stay. Idempotent."""


@runtime_checkable
class RegisteringStore(Store, Protocol):
    """A store that registers memory with a device or a transport, to which others may then write
    at any time. It is never given the arena: values are copied to memory of its own and verified
    when they are back."""

    def attach(self, memory: memoryview, fd: int) -> None:
        """``memory`` (bytes) maps the memory file ``fd`` and outlives ``close``. Called once,
        first. Every object has one part, in it."""


@runtime_checkable
class SizingStore(Store, Protocol):
    """A store that can also hold compressed values: it gets values of unknown size."""

    def get_up_to(self, objects: Sequence[Object]) -> list[int]:
        """Fills the one part of each of ``objects`` with a value of at most its size; returns the
        sizes of the values, -1 for a name that does not exist or a larger value. The other bytes of
        the part are then undefined."""
