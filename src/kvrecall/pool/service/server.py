"""The service: one asyncio loop receives the requests of all connections and calls the pool.

The pool answers within microseconds per key, so one thread is faster than a thread per connection.
Slow calls (flushes, administration) run in worker threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import secrets
import socket
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import msgspec

from kvrecall import __version__
from kvrecall.config import PoolConfig
from kvrecall.errors import ConfigError
from kvrecall.pool.arena import take_seat
from kvrecall.pool.pool import Pool
from kvrecall.pool.service import protocol as p
from kvrecall.pool.service.admin import Command, Drop, Overview, Query, Stat, command_of, tenants_of
from kvrecall.pool.service.link import Peer, credentials
from kvrecall.pool.service.sessions import Reaper, Registered, Session

T = TypeVar("T")

_LOG = logging.getLogger(__name__)
_MAX_UNSENT = 32 << 20
_MAX_CONNECTIONS = 512
_MAX_OF_PROCESS = 64  # connections
_MAX_SLOW = 64  # requests of one connection that are being worked on
_AT_ONCE = 64  # requests of one connection, before it is others' turn
_OTHER_FILES = 64
_PAUSE_S = 0.5
_TURN_S = 0.1
_PATH_S = 5.0  # between looks at whether the socket is still at its path
_FLUSH_THREADS = 16
_ADMIN_THREADS = 4
_FLUSH_TURN_S = 1.0  # after which a thread is another flush's


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds a client may take: to greet, and to finish a message it began."""

    greeting_s: float = 5.0
    message_s: float = 10.0


class Turns:
    """How many threads of each kind the requests of one process may occupy, so that some are left
    for others."""

    def __init__(self) -> None:
        self.flushes = asyncio.Semaphore(_FLUSH_THREADS // 4)
        self.commands = asyncio.Semaphore(_ADMIN_THREADS // 2)


class Cancelled(Exception):
    """The client that asked is gone, or the service ends."""


class Server:
    """Serves one pool on one listening socket until ``stop``. Owns neither."""

    def __init__(
        self,
        pool: Pool,
        listener: socket.socket,
        config: PoolConfig | None = None,
        patience: Patience | None = None,
    ) -> None:
        """``config``: of the pool, for people."""
        self.pool = pool
        self.patience = patience or Patience()
        self.loop = asyncio.SelectorEventLoop()
        self.rejected = 0
        self._refused = 0, 0  # the last process, and its user
        self._config = config
        self._listener = listener
        self._socket = str(listener.getsockname())
        self._place = _place_of(self._socket)
        self._began = time.monotonic()
        self._arena = replace(pool.arena_handle(), boot=secrets.token_hex(16))
        self._registered = Registered(pool)
        self._connections: set[Connection] = set()
        self.turns: WeakValueDictionary[int, Turns] = WeakValueDictionary()  # by process
        self._seats = 0
        self.reaper = Reaper(lambda seat: take_seat(self._arena.fd, seat, alone=True))
        self.flushers = ThreadPoolExecutor(_FLUSH_THREADS, "kvrecall-flush-wait")
        self.admins = ThreadPoolExecutor(_ADMIN_THREADS, "kvrecall-admin")
        self.stopping = threading.Event()
        self._stopped = asyncio.Event()

    def run(self) -> None:
        """The loop. Ends all connections before it returns."""
        try:
            self.loop.run_until_complete(self._serve())
        finally:
            self.stopping.set()
            self.loop.close()

    def stop(self) -> None:
        """Ends the loop soon. From any thread, or a signal handler."""
        self.stopping.set()
        with contextlib.suppress(RuntimeError):  # it has ended
            self.loop.call_soon_threadsafe(self._stopped.set)

    def close(self) -> None:
        """After ``run`` and after the pool was closed, so that no worker waits for it: ends the
        worker threads."""
        for workers in (self.flushers, self.admins):
            workers.shutdown(cancel_futures=True)
        self.reaper.close()

    async def _serve(self) -> None:
        self._listener.setblocking(False)
        self.loop.add_reader(self._listener, self._accept)
        works = (self._stopped.wait(), self.reaper.run(), self._mind_path())
        tasks = [self.loop.create_task(work) for work in works]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        self.loop.remove_reader(self._listener)
        connections = list(self._connections)
        await asyncio.gather(*(connection.task for connection in connections))
        for connection in connections:
            connection.end()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        for task in tasks:
            if not task.cancelled() and (error := task.exception()) is not None:
                raise error

    async def _mind_path(self) -> None:
        """Says so once if no engine can join any more. Ends when it is cancelled."""
        while self._place is not None and self._place == _place_of(self._socket):
            await asyncio.sleep(_PATH_S)
        _LOG.error(
            "pool service: socket: %s was removed or replaced by another program; engines that are "
            "connected are served, no other can join: restart this service, with a socket in a "
            "folder that nothing cleans",
            self._socket,
        )
        await asyncio.Event().wait()

    # -- connections -----------------------------------------------------------------------

    def _accept(self) -> None:
        if self.stopping.is_set():
            return  # after a pause: the end would miss this connection
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            self._pause_accepting(error)
            return
        try:
            self._admit(sock)
        except ProcessLookupError:  # the client has ended already
            sock.close()
        except OSError as error:
            sock.close()
            self._pause_accepting(error)

    def _admit(self, sock: socket.socket) -> None:
        """Takes a client, or says why not. Raises OSError if there are no means to take any."""
        sock.setblocking(False)
        pid, uid = credentials(sock)
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = min(_MAX_CONNECTIONS, max(1, (files - _OTHER_FILES) // 2))  # each takes two files
        reason = ""
        if uid != os.getuid():
            reason = f"user {uid} may not use the pool of user {os.getuid()}"
        elif not pid:
            reason = "the client is in another PID namespace and could not map the arena"
        elif (count := len(self._connections) + len(self.reaper.orphans)) >= most:
            reason = f"{count} connections are open (or lost and not settled), which is the limit"
        elif sum(one.peer.pid == pid for one in self._connections) >= _MAX_OF_PROCESS:
            reason = f"it has {_MAX_OF_PROCESS} connections open, which is the limit of one process"
        if reason:
            self.rejected += 1
            if self._refused != (pid, uid):  # a crowd is said once
                self._refused = pid, uid
                _LOG.warning("pool service: process %d refused: %s", pid, reason)
            with sock, contextlib.suppress(OSError):
                sock.send(p.frame_of(p.Rejection(reason)))
            return
        connection = Connection(self, Peer.of(sock))
        self._connections.add(connection)
        connection.task = self.loop.create_task(self._connect(connection, sock))

    async def _connect(self, connection: Connection, sock: socket.socket) -> None:
        try:
            await self.loop.connect_accepted_socket(lambda: connection, sock)
        except OSError as error:
            _LOG.warning("pool service: cannot serve a connection: %s", error.strerror)
            sock.close()
            connection.connection_lost(error)

    def _pause_accepting(self, error: OSError) -> None:
        """No connection can be taken now (too many open files, say), and the listening socket
        would wake the loop again and again."""
        _LOG.warning("pool service: cannot accept a connection: %s", error.strerror)
        self.loop.remove_reader(self._listener)
        self.loop.call_later(_PAUSE_S, self.loop.add_reader, self._listener, self._accept)

    def greet(self, connection: Connection, hello: p.Hello) -> Session | None:
        """A session for a client of this version; another one is rejected."""
        if hello.protocol != p.PROTOCOL:
            connection.reject(
                f"the service is kvrecall {__version__} (protocol {p.PROTOCOL}), the client "
                f"kvrecall {hello.version} (protocol {hello.protocol}); run the same version"
            )
            return None
        session = Session(
            self.pool, connection.peer, self._registered, self._seat_of(hello, connection.peer)
        )
        arena = replace(self._arena, seat=session.seat)
        connection.send(p.Welcome(p.PROTOCOL, __version__, session.token, arena))
        return session

    def _seat_of(self, hello: p.Hello, peer: Peer) -> int:
        """The seat that a client had in this service, so that its workers need not map the arena
        again, or a new one."""
        lost = [orphan.session for orphan in self.reaper.orphans]
        holders = [s.peer for s in (*self._sessions(), *lost) if s.seat == hello.seat]
        if (
            hello.boot == self._arena.boot
            and 0 < hello.seat <= self._seats
            and all(holder.pid == peer.pid and holder.is_alive for holder in holders)
        ):
            return hello.seat
        self._seats += 1
        return self._seats

    def forget(self, connection: Connection) -> None:
        """Its socket is closed."""
        self._connections.discard(connection)
        if connection.session is None or self.stopping.is_set():
            connection.peer.close()
        else:
            self.reaper.orphan(connection.session)

    def _sessions(self) -> list[Session]:
        """Of open connections. From any thread."""
        return [c.session for c in list(self._connections) if c.session is not None]

    def overview(self) -> Overview:
        """From any thread."""
        now = time.monotonic()
        views = [s.view(now - s.since) for s in self._sessions()]
        views += [one.session.view(now - one.lost_at, lost=True) for one in self.reaper.orphans]
        tenants, count = tenants_of(self.pool)
        disk = self._config.disk if self._config is not None else None
        return Overview(
            pid=os.getpid(),
            version=__version__,
            uptime_s=now - self._began,
            socket=self._socket,
            disk_path=str(disk.path) if disk is not None else "",
            clients=tuple(views),
            stats=self.pool.stats(),
            rejected=self.rejected,
            tenants=tenants,
            tenant_count=count,
            write_policy=self._config.terms.write_policy if self._config is not None else "",
        )


class Connection(asyncio.Protocol):
    """One client's socket. Used by the loop only."""

    task: asyncio.Task[None]  # makes the transport

    def __init__(self, server: Server, peer: Peer) -> None:
        self.peer = peer
        self.session: Session | None = None  # none before it has greeted
        self.is_open = True
        self._server = server
        self._framer = p.Framer()
        self._slow: set[asyncio.Task[p.Message]] = set()
        self._turns = server.turns.setdefault(peer.pid, Turns())
        self._timer: asyncio.TimerHandle | None = None
        self._transport: asyncio.Transport | None = None

    # -- bytes -----------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        # A child of it may have inherited the socket, which then does not end with it.
        self._server.loop.add_reader(self.peer.descriptor, self.end)
        self._limit(self._server.patience.greeting_s, "no greeting arrived")

    def data_received(self, data: bytes) -> None:
        self._framer.feed(data)
        self._work_off()

    def _work_off(self) -> None:
        """Takes requests that have come in. If there are many, the next ones come after others'."""
        done = 0
        try:
            for body in self._framer.take(_AT_ONCE):
                done += 1
                self._take(body)
                if not self.is_open:
                    return
        except p.ProtocolError as error:
            self.reject(str(error))
            return
        if self._transport is None:
            return
        if self.session is not None and (done or self._timer is None):
            self._limit(self._server.patience.message_s, "a message arrived only in part")
        if done == _AT_ONCE:
            self._transport.pause_reading()
            self._server.loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        if self.is_open and self._transport is not None:
            self._transport.resume_reading()
            self._work_off()

    def eof_received(self) -> None:
        self.end()

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        if self._timer is not None:
            self._timer.cancel()
        self._server.loop.remove_reader(self.peer.descriptor)
        self._server.forget(self)

    def send(self, message: p.Message) -> None:
        if not self.is_open or self._transport is None:
            return
        try:
            frame = p.frame_of(message)
        except p.ProtocolError as error:
            self.reject(str(error))
            return
        if self._transport.get_write_buffer_size() > _MAX_UNSENT:
            self.reject("the client does not read its replies")
        else:
            self._transport.write(frame)

    def reject(self, reason: str) -> None:
        """Ends the connection for what the client did."""
        self._server.rejected += 1
        _LOG.warning("pool service: process %d: %s", self.peer.pid, reason)
        if self._transport is not None and not self._transport.get_write_buffer_size():
            self._transport.write(p.frame_of(p.Rejection(reason)))
        self.end()

    def end(self) -> None:
        if self.is_open and self._transport is not None:
            self.is_open = False
            self._transport.abort()

    def _limit(self, seconds: float, reason: str) -> None:
        """Rejects the client if it takes longer for what it has begun, if anything."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.session is None or not self._framer.is_empty:
            self._timer = self._server.loop.call_later(seconds, self._overdue, reason)

    def _overdue(self, reason: str) -> None:
        """After a stop of the process timers come first: what has arrived is read before."""
        self._timer = self._server.loop.call_later(_TURN_S, self.reject, reason)

    # -- requests --------------------------------------------------------------------------

    def _take(self, body: bytes) -> None:
        if self.session is None:
            self.session = self._server.greet(self, p.read_hello(body))
            return
        self.session.requests += 1
        reply = self._answer(self.session, p.read_request(body))
        if reply is not None:
            self.send(reply)

    def _answer(self, session: Session, request: p.Request) -> p.Message | None:
        """The reply; None if there is none, or a worker thread will send it."""
        match request:
            case p.Flush():
                if len(self._slow) >= _MAX_SLOW:
                    return p.Flushed(request.number, False)
                return self._later(self._flush(request))
            case p.Clear(number):
                return self._later(self._clear(number, session))
            case p.Administer():
                return self._later(self._administer(request, command_of(request)))
            case p.Settle(token):
                self._server.reaper.settle(token)
                return None
        return session.answer(request)

    async def _flush(self, request: p.Flush) -> p.Message:
        until = time.monotonic() + request.deadline_s
        is_durable, goes_on = False, True
        while goes_on and self.is_open:
            async with self._turns.flushes:
                began = time.monotonic()
                turn_s = min(max(0.0, until - began), _FLUSH_TURN_S)
                is_durable = await self._server.loop.run_in_executor(
                    self._server.flushers, self._server.pool.flush, request.keys, turn_s
                )
            goes_on = not is_durable and began + turn_s <= time.monotonic() < until
        return p.Flushed(request.number, is_durable)

    async def _clear(self, number: int, session: Session) -> p.Message:
        spares = self._server.pool.is_read_only
        namespaces = tuple(each.hex() for each in session.namespaces if not spares(each))
        if namespaces:
            drop = Drop(Query(namespaces), True)
            await self._command(lambda: drop.run(self._server.pool, lambda *_: None))
        return p.Acknowledged(number)

    async def _administer(self, request: p.Administer, command: Command[Any]) -> p.Message:
        server = self._server

        def progress(done: int, total: int) -> None:
            if server.stopping.is_set() or not self.is_open:
                raise Cancelled  # what was begun and needs no client goes on
            assert self._transport is not None
            if not self._transport.get_write_buffer_size():  # the client reads
                news = p.Progress(request.number, done, total)
                server.loop.call_soon_threadsafe(self.send, news)

        def run() -> bytes:
            is_stat = isinstance(command, Stat)
            result = server.overview() if is_stat else command.run(server.pool, progress)
            return msgspec.msgpack.encode(result)

        try:
            return p.Administered(request.number, await self._command(run))
        except ConfigError as error:
            return p.Trouble(request.number, str(error))

    async def _command(self, work: Callable[[], T]) -> T:
        async with self._turns.commands:
            if not self.is_open:
                raise Cancelled
            return await self._server.loop.run_in_executor(self._server.admins, work)

    def _later(self, work: Coroutine[None, None, p.Message]) -> p.Message | None:
        """Answers when ``work`` is done."""
        if len(self._slow) >= _MAX_SLOW:
            work.close()
            return p.Rejection(f"more than {_MAX_SLOW} requests at once")
        task = self._server.loop.create_task(work)
        self._slow.add(task)
        task.add_done_callback(self._worked)
        return None

    def _worked(self, done: asyncio.Task[p.Message]) -> None:
        self._slow.discard(done)
        if done.cancelled():
            return
        error = done.exception()
        if error is None:
            self.send(done.result())
        elif not isinstance(error, Cancelled):
            _LOG.error("pool service: a request failed", exc_info=error)


def _place_of(path: str) -> tuple[int, int] | None:
    """Device and inode."""
    try:
        status = os.lstat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino
