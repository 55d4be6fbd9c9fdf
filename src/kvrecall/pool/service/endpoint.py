"""The endpoint of a pool: the lock and the socket of a service, its start and its end."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from kvrecall.config import PoolConfig
from kvrecall.errors import ConfigError, TierError
from kvrecall.pool.arena import available_memory
from kvrecall.pool.lockfile import LockHeld, leads_to, lock_path
from kvrecall.pool.pool import Pool
from kvrecall.pool.service.link import credentials, mappers_of
from kvrecall.pool.service.server import Patience, Server
from kvrecall.secret import ACCESS, exposure

_LOG = logging.getLogger(__name__)
FLUSH_S = 10.0
_BACKLOG = 128
_MAX_PATH = 107  # of a Unix socket, bytes
_LET_GO_S = 10.0
_STARTS_WITHIN_S = 60.0
_SWITCH_S = 0.0005
"""Longest time that a thread may keep the interpreter while the loop has a request. Python's own 5
ms would be fifty times the duration of a request."""


class SocketLock:
    """Held by the one service on a socket; the kernel releases it at any exit."""

    def __init__(self, path: Path) -> None:
        """Raises TierError if a service runs there, ConfigError if the path is not usable."""
        self._path = path.with_name(path.name + ".lock")
        try:
            check_socket(path)
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if why := exposure(path.parent, path.parent.stat(), ACCESS):
                raise ConfigError(f"socket: {why}, or give the socket a folder of its own")
            self._fd = lock_path(self._path)
        except LockHeld as error:
            raise _served(path, next(iter(str(error).split()), "")) from error
        except OSError as error:
            raise ConfigError(
                f"socket: {error.filename or path}: {error.strerror}; give another path"
            ) from error
        owner = os.fstat(self._fd).st_uid
        if owner != os.getuid():
            os.close(self._fd)
            raise ConfigError(f"socket: {self._path} belongs to user {owner}; remove it")
        os.fchmod(self._fd, 0o600)
        holder = listener_at(path)
        if holder is not None:  # its lock was removed while it runs
            os.close(self._fd)
            raise _served(path, holder)
        words = os.pread(self._fd, 64, 0).decode("ascii", "replace").split()
        self.old_arena = int(words[1]) if len(words) == 2 and words[1].isdigit() else None
        self.note_arena(self.old_arena or 0)  # until there is another

    def note_arena(self, inode: int) -> None:
        """Stores the arena's inode for the next service, as ``old_arena``."""
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()} {inode}\n".encode(), 0)

    def forget(self) -> None:
        """Removes its file, if the path is unlikely to be used again; before ``release``."""
        if leads_to(self._path, self._fd):
            self._path.unlink(missing_ok=True)

    def release(self) -> None:
        os.close(self._fd)


def _served(path: Path, process: str) -> TierError:
    return TierError(
        f"socket: {path} is already served by process {process or 'unknown'}; stop it, or use "
        "another socket (and disk_path)"
    )


def listener_at(path: Path) -> str | None:
    """The process that listens at a socket ("" if it is not known); None if none does."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
        caller.setblocking(False)
        try:
            caller.connect(str(path))
        except BlockingIOError:  # too many callers wait
            return ""
        except OSError:
            return None
        return str(credentials(caller)[0])


def check_socket(path: Path) -> None:
    """Raises ConfigError if no Unix socket can have that path."""
    if not path.is_absolute():
        raise ConfigError(
            f"socket: {path} is relative, but engines start in other folders; use an absolute path"
        )
    if len(os.fsencode(path)) > _MAX_PATH:
        raise ConfigError(f"socket: {path} is longer than {_MAX_PATH} bytes; use a shorter path")
    if path.exists() and not path.is_socket():
        raise ConfigError(f"socket: {path} exists and is not a socket; use another path")


@contextlib.contextmanager
def listening(path: Path) -> Iterator[socket.socket]:
    """A listening socket at ``path``, owner-only; replaces the socket of a dead service, and leaves
    that of another one at the end. The caller holds the lock of the path."""
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        before = os.umask(0o177)
        try:
            listener.bind(str(path))
        finally:
            os.umask(before)
        own = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            listener.listen(_BACKLOG)
            yield listener
        finally:
            if leads_to(path, own):
                path.unlink(missing_ok=True)
            os.close(own)


def clear_dead(own: Path) -> None:
    """Removes leftovers of killed servers beside ``own``: sockets of the same kind
    (``serve-PORT.sock``) whose lock no process holds. Young ones stay, because they may just be
    starting."""
    kind = own.name.partition("-")[0]
    for lock in own.parent.glob(f"{kind}-*.sock.lock"):
        if lock.stem == own.name:
            continue
        socket_path = lock.with_suffix("")
        with contextlib.suppress(LockHeld, OSError):  # or gone meanwhile, or another user's
            fd = lock_path(lock, os.O_RDWR)
            try:
                is_old = time.time() - os.fstat(fd).st_mtime > _STARTS_WITHIN_S
                if is_old and listener_at(socket_path) is None:
                    socket_path.unlink(missing_ok=True)
                    lock.unlink()
            finally:
                os.close(fd)


def serve(
    config: PoolConfig,
    path: Path,
    on_ready: Callable[[], None],
    publish: Callable[[Pool], Callable[[], None]] | None = None,
) -> None:
    """Serves until SIGTERM or SIGINT, then stores queued blocks for at most ``FLUSH_S`` seconds.
    ``publish``: starts a publisher of the pool's changes, and returns its ``close``. Raises
    ConfigError or TierError, with nothing left behind, if it cannot start."""
    lock = SocketLock(path)
    try:
        with listening(path) as listener, contextlib.ExitStack() as stack:
            wait_for_memory(config.host_bytes, lock.old_arena)
            pool = Pool.open(config)
            stack.callback(pool.close, FLUSH_S)
            lock.note_arena(pool.arena_handle().inode)
            if publish is not None:
                stack.callback(publish(pool))
            server = Server(pool, listener, config)
            _tune()
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda *_: server.stop())
            on_ready()
            server.run()
            listener.close()
            _LOG.info("pool service: stopping")
            pool.close(FLUSH_S)
            server.close()
    finally:
        lock.release()


def wait_for_memory(nbytes: int, old_arena: int | None) -> None:
    """Gives engines time to unmap the arena of a dead service, if its memory is needed. If there is
    not enough memory in the end, the pool reports it."""
    until = time.monotonic() + _LET_GO_S
    while (
        old_arena is not None
        and available_memory() * 0.94 < nbytes
        and time.monotonic() < until
        and mappers_of(old_arena)
    ):
        time.sleep(0.1)


def _tune() -> None:
    """Tunes this process for even latency."""
    sys.setswitchinterval(_SWITCH_S)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    gc.collect()
    gc.freeze()  # what was found on disk stays; collections need not walk over it
    gc.set_threshold(50_000, 20, 50)


class AdminEndpoint:
    """Serves a pool on a socket in its own thread, until ``close``; does not own the pool.
    ``kvrecall pool`` and the dashboard can thus query the pool of an engine like a service."""

    def __init__(
        self,
        pool: Pool,
        path: Path,
        config: PoolConfig | None = None,
        patience: Patience | None = None,
    ) -> None:
        """``config``: the pool's, for people. Raises ConfigError or TierError if the socket is not
        available."""
        clear_dead(path)
        with contextlib.ExitStack() as undo:
            lock = SocketLock(path)
            undo.callback(lock.release)
            undo.callback(lock.forget)
            listener = undo.enter_context(listening(path))
            self._server = Server(pool, listener, config, patience)
            self._held = undo.pop_all()
        self._thread = threading.Thread(
            target=self._server.run, name="kvrecall-endpoint", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Ends all connections. Idempotent."""
        self._server.stop()
        self._thread.join()

    def close(self) -> None:
        """Releases everything. The pool is closed by now, so that no worker waits for it."""
        self.stop()
        self._held.close()
        self._server.close()


class ServiceThread(AdminEndpoint):
    """A service inside this process, for tests and for programs with several engines."""

    def __init__(
        self,
        config: PoolConfig,
        path: Path,
        patience: Patience | None = None,
        make: Callable[[PoolConfig], Pool] = Pool.open,
    ) -> None:
        """``make`` opens the pool. Raises as ``serve``."""
        self.pool = make(config)
        try:
            super().__init__(self.pool, path, config, patience)
        except BaseException:
            self.pool.close()
            raise

    def close(self) -> None:
        """Stops serving and stores queued blocks. Idempotent."""
        self.stop()
        self.pool.close()
        super().close()
