"""Engine processes of many trials: their logs, and their end."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvrecall.errors import EngineError
from kvrecall_lab.engines.engine import EngineProcess


class Engines:
    """Starts engine processes, in any thread, and ends them. Logs are in ``folder/logs``."""

    def __init__(self, folder: Path) -> None:
        self._logs = folder / "logs"
        self._lock = threading.Lock()
        self._count = 0
        self._running: set[EngineProcess] = set()
        self.is_stopped = False

    def start(self, name: str, arguments: Mapping[str, Any], **options: Any) -> EngineProcess:
        """Starts one, to be ended by ``end`` or ``stop``. ``options``: of ``EngineProcess``. Raises
        EngineError once all are stopped."""
        with self._lock:
            if self.is_stopped:
                raise EngineError(f"{name}: stopped")
            self._count += 1
            self._logs.mkdir(parents=True, exist_ok=True)
            log = self._logs / f"{self._count:03}-{name}.log"
            engine = EngineProcess(name, arguments, log, **options)
            self._running.add(engine)
        return engine

    def end(self, engine: EngineProcess) -> None:
        if engine.is_alive:
            engine.end()
        engine.bury()
        with self._lock:
            self._running.discard(engine)

    @contextmanager
    def running(
        self, name: str, arguments: Mapping[str, Any], **options: Any
    ) -> Iterator[EngineProcess]:
        """One that is ready, until the end of the block. Raises EngineError."""
        engine = self.start(name, arguments, **options)
        try:
            engine.wait_ready()
            yield engine
        finally:
            self.end(engine)

    def stop(self) -> None:
        """Kills all engines; waiting callers get EngineError, and no engine starts any more."""
        with self._lock:
            self.is_stopped = True
            running = list(self._running)
        for engine in running:
            engine.kill()
            engine.bury()
