"""A pool service that belongs to one server: started by it for its replicas, ended with it."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping

from kvrecall.config import service_settings
from kvrecall.errors import KvrecallError, TierError
from kvrecall.pool.service.endpoint import serve

_FLUSH_S = 10.0
_END_S = _FLUSH_S + 10.0


class ChildService:
    """A service in a child process, which ends when this process ends, however that happens.

    The child reads its orders from a pipe and ends when the pipe closes: the kernel closes it with
    the last process that holds it, the server or an engine that outlives it for a moment.
    """

    def __init__(self, settings: Mapping[str, object]) -> None:
        """Starts it with ``settings``, those of ``kvrecall pool serve``, and waits until it
        listens. Raises TierError if it does not start."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kvrecall.pool.service.child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # a Ctrl-C at the terminal is for the server, which ends it
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(settings).encode() + b"\n")
        self._process.stdin.flush()
        said = json.loads(self._process.stdout.readline() or b'{"error": "it ended at once"}')
        if error := said["error"]:
            self.close()
            raise TierError(f"the pool service of this server's replicas did not start: {error}")

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        """Ends it, once it has stored what is queued. Idempotent."""
        self._process.terminate()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


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
        serve(pool, socket, lambda _: _answer(""), flush_s=_FLUSH_S)
    except KvrecallError as error:
        _answer(str(error))
        sys.exit(2)


if __name__ == "__main__":
    main()
