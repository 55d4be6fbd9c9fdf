"""Stores for tests: one in memory, which can fail, hang, lag, lose and damage what it holds."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence

from kvrecall.pool.remote.store import Object


class MemoryStore:
    """A ``Store`` in a dictionary, ``values``, which may be changed at any time.

    ``failing``: every call raises it. ``delay_s``: every call takes so much longer. While
    ``gate`` is cleared, calls hang. ``calls`` lists what was called, with how many names.
    """

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.failing: Exception | None = None
        self.delay_s = 0.0
        self.gate = threading.Event()
        self.gate.set()
        self.calls: list[tuple[str, int]] = []
        self.is_closed = False

    exposed = ""

    def exists(self, names: Sequence[str]) -> list[bool]:
        self._begin("exists", len(names))
        return [name in self.values for name in names]

    def put(self, objects: Sequence[Object]) -> list[bool]:
        self._begin("put", len(objects))
        for item in objects:
            self.values.setdefault(item.name, b"".join(item.parts))
        return [True] * len(objects)

    def get(self, objects: Sequence[Object]) -> list[bool]:
        self._begin("get", len(objects))
        return [self._fill(item) for item in objects]

    def get_up_to(self, objects: Sequence[Object]) -> list[int]:
        self._begin("get", len(objects))
        sizes = []
        for item in objects:
            value = self.values.get(item.name)
            fits = value is not None and len(value) <= item.nbytes
            if value is not None and fits:
                item.parts[0][: len(value)] = value
            sizes.append(len(value) if value is not None and fits else -1)
        return sizes

    def _fill(self, item: Object) -> bool:
        value = self.values.get(item.name)
        if value is None or len(value) != item.nbytes:
            return False
        at = 0
        for part in item.parts:
            part[:] = value[at : at + part.nbytes]
            at += part.nbytes
        return True

    def remove(self, names: Sequence[str]) -> None:
        self._begin("remove", len(names))
        for name in names:
            self.values.pop(name, None)

    def close(self) -> None:
        self.is_closed = True

    def _begin(self, what: str, count: int) -> None:
        self.calls.append((what, count))
        self.gate.wait()
        time.sleep(self.delay_s)
        if self.failing is not None:
            raise self.failing


SHARED: dict[str, MemoryStore] = {}
"""Stores by name, for several pools of one process: the "other hosts" of a test."""


def make_store(options: Mapping[str, object]) -> MemoryStore:
    """The store called ``options["name"]``: the kind ``support.stores:make_store``."""
    return SHARED.setdefault(str(options.get("name", "")), MemoryStore())
