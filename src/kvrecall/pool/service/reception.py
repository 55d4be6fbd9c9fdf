"""Lets a pool that lives in an engine be asked from outside, as a service is: ``kvrecall pool``
and the dashboard connect to its socket."""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import time
from pathlib import Path

from kvrecall.pool.pool import Pool
from kvrecall.pool.service.server import Server
from kvrecall.pool.service.serving import SocketLock, listening

_STARTS_WITHIN_S = 60.0


def clear_dead(own: Path) -> None:
    """Removes what servers that were killed have left beside ``own``: sockets of the same kind
    (``serve-PORT.sock``) whose lock nobody holds. Young ones are left, they may just be starting.
    """
    kind = own.name.partition("-")[0]
    for lock in own.parent.glob(f"{kind}-*.sock.lock"):
        if lock.stem == own.name:
            continue
        with contextlib.suppress(OSError):  # held, gone meanwhile, or another user's
            fd = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if time.time() - os.fstat(fd).st_mtime > _STARTS_WITHIN_S:
                    lock.with_suffix("").unlink(missing_ok=True)
                    lock.unlink()
            finally:
                os.close(fd)


class Reception:
    """Serves ``pool`` on a socket, by a thread of its own, until ``close``. Does not own it."""

    def __init__(self, pool: Pool, path: Path, disk_path: str = "") -> None:
        """Raises ConfigError or TierError if the socket cannot be had."""
        clear_dead(path)
        with contextlib.ExitStack() as undo:
            lock = SocketLock(path)
            undo.callback(lock.release)
            undo.callback(lock.forget)
            listener = undo.enter_context(listening(path))
            self._server = Server(pool, listener, str(path), disk_path)
            self._held = undo.pop_all()
        self._thread = threading.Thread(
            target=self._server.run, name="kvrecall-reception", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Ends all connections. Idempotent."""
        self._server.stop()
        self._thread.join()

    def close(self) -> None:
        """Gives everything back. The pool is closed by now, so that nobody waits for it."""
        self.stop()
        self._held.close()
        self._server.close()
