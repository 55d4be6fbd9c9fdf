"""A pool service that belongs to one server: the server starts it for its replicas and ends it."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping

from kvrecall.config import service_settings
from kvrecall.errors import KvrecallError, TierError
from kvrecall.pool.service.endpoint import FLUSH_S, serve

_LOG = logging.getLogger(__name__)
_END_S = FLUSH_S + 10.0
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0
"""Pauses before a restart; a service that ran for longer begins with the first pause again."""


class ChildService:
    """A service in a child process, which ends when this process ends, however that happens, and is
    restarted if it dies earlier: on the same socket and disk, so that its clients rejoin it and
    find the durable blocks.

    The child reads its orders from a pipe and ends when the pipe closes: the kernel closes it with
    the last process that holds it, the server or an engine that outlives it for a moment.
    """

    def __init__(self, settings: Mapping[str, object]) -> None:
        """Starts it with ``settings``, those of ``kvrecall pool serve``, and waits until it
        listens. Raises TierError if it does not start."""
        self._orders = json.dumps(settings).encode() + b"\n"
        self._lock = threading.Lock()  # no process begins after ``close``
        self._closing = threading.Event()
        self._start()
        self._keeper = threading.Thread(target=self._keep, name="kvrecall-child", daemon=True)
        self._keeper.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        """Ends the service after it has stored queued blocks. Idempotent."""
        with self._lock:
            self._closing.set()
        self._process.terminate()
        self._keeper.join(_END_S)
        self._process.kill()
        self._keeper.join()

    def _start(self) -> None:
        """Returns when it listens. Raises TierError if it does not."""
        with self._lock:
            if self._closing.is_set():
                raise TierError("the server ends")
            process = self._process = subprocess.Popen(
                [sys.executable, "-m", "kvrecall.pool.service.child"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,  # a Ctrl-C at the terminal is for the server, which ends it
            )
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(self._orders)
        said = json.loads(process.stdout.readline() or b'{"error": "it ended at once"}')
        if error := said["error"]:
            process.kill()
            _wait(process)
            raise TierError(f"the pool service of this server's replicas did not start: {error}")

    def _keep(self) -> None:
        """Thread: restarts the service when it has died."""
        pause_s = _FIRST_PAUSE_S
        while True:
            began = time.monotonic()
            status = _wait(self._process)
            if time.monotonic() - began > _LONGEST_PAUSE_S:
                pause_s = _FIRST_PAUSE_S
            if not self._closing.is_set():
                _LOG.error(
                    "kvrecall: the pool service of this server's replicas (process %d) "
                    "ended with status %d; it restarts in %.1f s, and until then every "
                    "block is computed",
                    self.pid,
                    status,
                    pause_s,
                )
            if self._closing.wait(pause_s):
                return
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            try:
                self._start()
                _LOG.warning("kvrecall: the pool service was restarted as process %d", self.pid)
            except TierError as error:
                if not self._closing.is_set():
                    _LOG.error("kvrecall: %s", error)


def _wait(process: subprocess.Popen[bytes]) -> int:
    """The exit status of a process, whose pipes are closed."""
    with process:
        return process.wait()


def _end_with_orders() -> None:
    sys.stdin.buffer.read()
    os.kill(os.getpid(), signal.SIGTERM)


def _answer(error: str) -> None:
    print(json.dumps({"error": error}), flush=True)


def main() -> None:
    """The child's side of ``ChildService``."""
    orders = json.loads(sys.stdin.buffer.readline())
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    threading.Thread(target=_end_with_orders, name="kvrecall-orders", daemon=True).start()
    try:
        pool, socket = service_settings(orders, "kvrecall")
        serve(pool, socket, lambda: _answer(""))
    except KvrecallError as error:
        _answer(str(error))
        sys.exit(2)


if __name__ == "__main__":
    main()
