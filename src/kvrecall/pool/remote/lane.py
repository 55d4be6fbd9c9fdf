"""A lane: a queue of work for a store, and the threads that carry it out in batches."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")


class Lane(Generic[T]):
    """Hands what is added, in order and several at a time, to ``carry`` in threads of its own.

    ``carry`` may block for as long as it likes and must not raise.
    """

    def __init__(
        self,
        name: str,
        threads: int,
        carry: Callable[[list[T]], None],
        most: Callable[[], int],
        size_of: Callable[[T], int],
    ) -> None:
        """A batch has items of up to ``most()`` by ``size_of``, at least one."""
        self._carry = carry
        self._most = most
        self._size_of = size_of
        self._changed = threading.Condition()
        self._queue: deque[T] = deque()
        self._began: dict[int, float] = {}  # thread -> when its batch began
        self._closing = False
        self._threads = [
            threading.Thread(target=self._run, name=f"kvrecall-{name}-{n}", daemon=True)
            for n in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def add(self, items: Sequence[T]) -> None:
        with self._changed:
            self._queue.extend(items)
            self._changed.notify_all()

    def clear(self) -> list[T]:
        """Takes out what no thread has begun with."""
        with self._changed:
            left = list(self._queue)
            self._queue.clear()
            return left

    def is_stuck(self, for_s: float) -> bool:
        """Whether some batch has been under way for that long."""
        if not self._began:
            return False
        since = time.monotonic() - for_s
        return any(began < since for began in list(self._began.values()))

    def close(self, deadline_s: float) -> bool:
        """Ends the threads when the queue is empty; False if that is not so in time."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        until = time.monotonic() + deadline_s
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        me = threading.get_ident()
        while batch := self._next_batch(me):
            self._carry(batch)
            self._began.pop(me, None)

    def _next_batch(self, me: int) -> list[T]:
        """Empty: the lane is closed."""
        batch: list[T] = []
        size = 0
        with self._changed:
            while not self._queue and not self._closing:
                self._changed.wait()
            most = self._most()
            while self._queue:
                size += self._size_of(self._queue[0])
                if batch and size > most:
                    break
                batch.append(self._queue.popleft())
            if batch:
                self._began[me] = time.monotonic()
        return batch
