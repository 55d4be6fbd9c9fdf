"""What happens between two holds of a lock, while a request's use is recorded in parts."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from unittest import mock

from kvrecall.pool import residents
from kvrecall.pool.eviction import hazard, lfu, queues


@contextlib.contextmanager
def meanwhile(actions: Iterable[Callable[[], object]], part: int = 2) -> Iterator[list[int]]:
    """Uses are recorded in parts of ``part`` blocks, and between each two of them, where others may
    take the lock, one of the actions happens. Yields a list that grows by a number with each."""
    rest, happened = iter(actions), list[int]()

    def gap(_: float) -> None:
        for action in rest:
            happened.append(len(happened))
            action()
            return

    clock = SimpleNamespace(perf_counter=time.perf_counter, sleep=gap)
    with contextlib.ExitStack() as undo:
        for module in (residents, hazard, queues, lfu):
            undo.enter_context(mock.patch.object(module, "PART", part))
        undo.enter_context(mock.patch.object(residents, "_LOOKED_UP", part))
        undo.enter_context(mock.patch.object(residents, "HOLD_S", -1.0))
        undo.enter_context(mock.patch.object(residents, "time", clock))
        yield happened
