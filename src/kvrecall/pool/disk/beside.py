"""A second thread for work that two threads share."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeVar

Result = TypeVar("Result")


class SecondThread:
    """A daemon thread that does the same work as the thread that owns it, at the same time.

    It starts with the first work. It is a daemon because its work may be stuck in the medium when
    the process ends.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None
        self._work: SimpleQueue[Callable[[], Any] | None] = SimpleQueue()
        self._done: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()

    def both(self, work: Callable[[], Result]) -> tuple[Result, Result]:
        """Runs ``work`` here and in the second thread; returns both results, the caller's first,
        when both are done. Raises what either raised. Called by one thread."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._work.put(work)
        try:
            own = work()
        finally:
            other, error = self._done.get()
        if error is not None:
            raise error
        return own, other

    def end(self) -> None:
        """Lets the thread end. Only without work under way."""
        self._work.put(None)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                self._done.put((work(), None))
            except BaseException as error:  # noqa: BLE001 - ``both`` raises it
                self._done.put((None, error))
