"""The service's loop: one thread takes the requests of all connections and asks the pool.

The pool answers within microseconds a key, so a loop is faster than a thread a connection. What
takes time goes to worker threads (``Desk``); what they have to say comes back through ``_post``.
"""

from __future__ import annotations

import logging
import os
import resource
import secrets
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from kvrecall import __version__
from kvrecall.pool.base import PoolStats
from kvrecall.pool.pool import Pool
from kvrecall.pool.service import protocol as p
from kvrecall.pool.service.desk import Desk
from kvrecall.pool.service.peers import Peer, credentials, families_of, peer_of
from kvrecall.pool.service.sessions import Evidence, Ghosts, Session
from kvrecall.pool.service.views import ClientView, Overview

_LOG = logging.getLogger(__name__)
_READ = selectors.EVENT_READ
_WRITE = selectors.EVENT_WRITE
_CHUNK = 1 << 18
_MAX_OUTBOX = 32 << 20
_MAX_CONNECTIONS = 512
_OTHER_FILES = 64
_TICK_S = 1.0
_HAUNTED_TICK_S = 0.05
_FAMILIES_S = 30.0  # workers are there before anything is saved, so families hardly change
_LONGEST_SCOUT_PAUSE_S = 2.0
_DEAF_S = 0.5


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds a client may take: to greet, and to finish a message it began."""

    greeting_s: float = 5.0
    message_s: float = 10.0


@dataclass(frozen=True, slots=True)
class Terms:
    """How a service is run. ``write_policy`` is for people."""

    patience: Patience = Patience()
    write_policy: str = ""


class Connection:
    """One client's socket. Changed by the loop only; ``reply`` may be called by any thread."""

    session: Session

    def __init__(self, server: Server, sock: socket.socket, peer: Peer) -> None:
        self._server = server
        self.sock = sock
        self.peer = peer
        self.process = os.pidfd_open(peer.pid)  # readable when it has ended: a child of it may
        # have inherited the socket, which then does not end with it
        self.framer = p.Framer()
        self.outbox = bytearray()
        self.greeted = False
        self.waiting_since = time.monotonic()  # for a greeting, or the rest of a message
        self.slow = 0
        self.is_open = True
        self.is_stuck = False  # the loop waits until the socket takes more

    @property
    def is_behind(self) -> bool:
        return bool(self.outbox)

    def reply(self, message: p.Message) -> None:
        """Ends a slow request, or tells of its progress."""
        if isinstance(message, p.Progress):
            self._server.post(lambda: self._server.send(self, message))
        else:
            self._server.post(lambda: self._server.finish(self, message))


class Server:
    """Serves one pool on one listening socket until ``stop``. Owns neither."""

    def __init__(
        self,
        pool: Pool,
        listener: socket.socket,
        name: str = "",
        disk_path: str = "",
        terms: Terms | None = None,
    ) -> None:
        self._pool = pool
        self._listener = listener
        self._name = name
        self._disk_path = disk_path
        self._terms = terms or Terms()
        self._patience = self._terms.patience
        self._began = time.monotonic()
        self._boot = secrets.token_bytes(16)
        handle = pool.arena_handle()
        self._inode = os.stat(f"/proc/self/fd/{handle.fd}").st_ino
        self._known: set[bytes] = set()
        self._connections: set[Connection] = set()
        self._families: dict[bytes, frozenset[int]] = {}
        self._scout_at = 0.0
        self._scout_pause_s = 0.0
        self._haunted_at = 0.0
        self._rejected = 0
        self._hear_at: float | None = None  # when new connections are taken again
        self._ghosts = Ghosts(self._inode, os.getpid())
        self._desk = Desk(pool, self._overview, self._ghosts.settle)
        self._scout = ThreadPoolExecutor(1, "kvrecall-scout")
        self._scouting = False
        self._posts: deque[Callable[[], None]] = deque()
        self._wake_in, self._wake_out = socket.socketpair()
        self._stopping = threading.Event()
        self._selector = selectors.DefaultSelector()
        for sock in (listener, self._wake_in, self._wake_out):
            sock.setblocking(False)
        self._selector.register(listener, _READ, self._accept)
        self._selector.register(self._wake_in, _READ, self._woken)

    def run(self) -> None:
        """The loop. Ends all connections before it returns."""
        while not self._stopping.is_set():
            tick = _HAUNTED_TICK_S if len(self._ghosts) or self._hear_at else _TICK_S
            for key, events in self._selector.select(tick):
                if isinstance(key.data, Connection):
                    self._serve(key.data, events)
                else:
                    key.data()
            self._tend()
        self._desk.stop()
        for connection in list(self._connections):
            self._end(connection)
        self._selector.close()

    def stop(self) -> None:
        """Ends the loop soon. From any thread, or a signal handler."""
        self._stopping.set()
        self.post(lambda: None)

    def close(self) -> None:
        """After ``run`` and after the pool was closed: ends the worker threads."""
        self._desk.close()
        self._scout.shutdown()
        self._wake_in.close()
        self._wake_out.close()

    def post(self, act: Callable[[], None]) -> None:
        """Has the loop do something. From any thread."""
        self._posts.append(act)
        try:
            self._wake_out.send(b"!")
        except BlockingIOError:
            return  # the loop has enough reason to wake up
        except OSError:
            return  # the loop has ended

    # -- connections -----------------------------------------------------------------------

    def _woken(self) -> None:
        self._wake_in.recv(4096)
        for _ in range(len(self._posts)):
            self._posts.popleft()()

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            self._deafen(error)
            return
        try:
            self._admit(sock)
        except OSError as error:
            sock.close()
            self._deafen(error)

    def _admit(self, sock: socket.socket) -> None:
        """Takes a client, or tells it why not. OSError if there are no means to take any."""
        sock.setblocking(False)
        pid, uid = credentials(sock)
        peer = peer_of(pid) if pid else None
        reason = ""
        if uid != os.getuid():
            reason = f"user {uid} may not use the pool of user {os.getuid()}"
        elif not pid:
            reason = "the client is in another PID namespace and could not map the arena"
        elif peer is None or len(self._connections) >= _most_connections():
            reason = f"there are {len(self._connections)} connections already"
        if reason or peer is None:
            self._rejected += 1
            _LOG.warning("pool service: process %d refused: %s", pid, reason)
            with sock:
                _try_send(sock, p.frame_of(p.Refusal(reason)))
            return
        try:
            connection = Connection(self, sock, peer)
        except ProcessLookupError:  # ended already
            sock.close()
            return
        self._connections.add(connection)
        self._selector.register(sock, _READ, connection)
        self._selector.register(connection.process, _READ, partial(self._end, connection))

    def _deafen(self, error: OSError) -> None:
        """No connection can be taken now (too many open files, say). It waits for some time, as
        the listening socket would wake the loop again and again."""
        _LOG.warning("pool service: cannot accept a connection: %s", error.strerror)
        self._selector.unregister(self._listener)
        self._hear_at = time.monotonic() + _DEAF_S

    def _serve(self, connection: Connection, events: int) -> None:
        if events & _WRITE:
            self._write(connection)
        if events & _READ and connection.is_open:
            try:
                data = connection.sock.recv(_CHUNK)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if data:
                self._take_in(connection, data)
            else:
                self._end(connection)

    def _take_in(self, connection: Connection, data: bytes) -> None:
        framer = connection.framer
        was_empty = framer.is_empty
        framer.feed(data)
        try:
            for body in framer.take():
                was_empty = True
                self._take(connection, body)
                if not connection.is_open:
                    return
        except p.ProtocolError as error:
            self._reject(connection, str(error))
            return
        if was_empty:
            connection.waiting_since = time.monotonic()

    def _take(self, connection: Connection, body: bytes) -> None:
        if connection.greeted:
            reply = self._desk.answer(connection, p.read_request(body))
            if reply is not None:
                self.send(connection, reply)
            return
        hello = p.read_hello(body)
        if hello.protocol != p.PROTOCOL:
            self._reject(
                connection,
                f"the service is kvrecall {__version__} (protocol {p.PROTOCOL}), the client "
                f"kvrecall {hello.version} (protocol {hello.protocol}); run the same version",
            )
            return
        connection.session = Session(self._pool, connection.peer, self._known)
        connection.greeted = True
        self.send(connection, self._welcome(connection.session))

    def _welcome(self, session: Session) -> p.Welcome:
        handle = self._pool.arena_handle()
        return p.Welcome(
            p.PROTOCOL,
            __version__,
            self._boot,
            session.token,
            handle.pid,
            handle.fd,
            handle.nbytes,
            self._inode,
        )

    def finish(self, connection: Connection, message: p.Message) -> None:
        """Sends the reply of a slow request."""
        connection.slow -= 1
        self.send(connection, message)

    def send(self, connection: Connection, message: p.Message) -> None:
        if not connection.is_open:
            return
        try:
            frame = p.frame_of(message)
        except p.ProtocolError as error:
            self._reject(connection, str(error))
            return
        connection.outbox += frame
        if len(connection.outbox) == len(frame):
            self._write(connection)
        elif len(connection.outbox) > _MAX_OUTBOX:
            self._reject(connection, "the client does not read its replies")

    def _write(self, connection: Connection) -> None:
        sent = _try_send(connection.sock, connection.outbox)
        if sent < 0:
            self._end(connection)
            return
        del connection.outbox[:sent]
        if bool(connection.outbox) != connection.is_stuck:
            connection.is_stuck = not connection.is_stuck
            events = _READ | _WRITE if connection.is_stuck else _READ
            self._selector.modify(connection.sock, events, connection)

    def _reject(self, connection: Connection, reason: str) -> None:
        """Ends a connection for what it did."""
        self._rejected += 1
        _LOG.warning("pool service: process %d: %s", connection.peer.pid, reason)
        if not connection.outbox:
            _try_send(connection.sock, p.frame_of(p.Refusal(reason)))
        self._end(connection)

    def _end(self, connection: Connection) -> None:
        if not connection.is_open:
            return
        connection.is_open = False
        self._connections.discard(connection)
        self._selector.unregister(connection.sock)
        connection.sock.close()
        self._selector.unregister(connection.process)
        os.close(connection.process)
        if connection.greeted and not self._stopping.is_set():
            session = connection.session
            self._scout_pause_s = 0.0
            self._ghosts.add(session, self._families.pop(session.token, None))

    # -- duties ----------------------------------------------------------------------------

    def _tend(self) -> None:
        now = time.monotonic()
        if self._hear_at is not None and now > self._hear_at:
            self._hear_at = None
            self._selector.register(self._listener, _READ, self._accept)
        for connection in list(self._connections):
            waited = now - connection.waiting_since
            if not connection.greeted and waited > self._patience.greeting_s:
                self._reject(connection, "no greeting came")
            elif not connection.framer.is_empty and waited > self._patience.message_s:
                self._reject(connection, "half a message came, and then nothing")
        if len(self._ghosts) and now - self._haunted_at > _HAUNTED_TICK_S:
            self._haunted_at = now
            self._ghosts.end_dead_leases()
        self._look_around(now)

    def _sessions(self) -> list[Session]:
        return [c.session for c in list(self._connections) if c.greeted]

    def _look_around(self, now: float) -> None:
        """Has a thread look at processes if there is reason to; it takes milliseconds."""
        haunted = self._ghosts.need_evidence
        pause = self._scout_pause_s if haunted else _FAMILIES_S
        sessions = self._sessions()
        new = any(s.reserved and s.token not in self._families for s in sessions)
        if self._scouting or not (new or ((sessions or haunted) and now - self._scout_at > pause)):
            return
        ghosts = self._ghosts.all() if haunted else []
        pids = {session.token: session.peer.pid for session in sessions}
        self._scouting = True

        def look() -> None:
            families: dict[bytes, frozenset[int]] = {}
            evidence = None
            try:
                found = families_of(set(pids.values()))
                families = {token: frozenset(found[pid]) for token, pid in pids.items()}
                evidence = self._ghosts.gather(ghosts, tuple(pids.values())) if ghosts else None
            finally:
                self.post(lambda: self._looked(families, evidence))

        self._scout.submit(look)

    def _looked(self, families: dict[bytes, frozenset[int]], evidence: Evidence | None) -> None:
        self._scouting = False
        self._scout_at = time.monotonic()
        open_now = {session.token for session in self._sessions()}
        self._families = {token: f for token, f in families.items() if token in open_now}
        if evidence is not None:
            self._ghosts.sweep(evidence)
            self._scout_pause_s = min(_LONGEST_SCOUT_PAUSE_S, 0.05 + 2 * self._scout_pause_s)

    def _overview(self, stats: PoolStats) -> Overview:
        """The service but for its tenants. From any thread."""
        now = time.monotonic()
        live = [(session, now - session.since, False) for session in self._sessions()]
        lost = [(ghost.session, now - ghost.lost_at, True) for ghost in self._ghosts.all()]
        clients = tuple(
            ClientView(
                session.peer.pid,
                seconds,
                len(session.namespaces),
                session.tickets,
                session.reserved,
                session.requests,
                gone,
            )
            for session, seconds, gone in live + lost
        )
        return Overview(
            os.getpid(),
            __version__,
            now - self._began,
            self._name,
            self._disk_path,
            clients,
            stats,
            self._rejected,
            (),
            0,
            self._terms.write_policy,
        )


def _most_connections() -> int:
    """As many as leave enough open files for disk and /proc: each takes two."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return min(_MAX_CONNECTIONS, max(1, (soft - _OTHER_FILES) // 2))


def _try_send(sock: socket.socket, data: bytes | bytearray) -> int:
    """Bytes sent now; -1 if the connection is gone."""
    try:
        return sock.send(data)
    except BlockingIOError:
        return 0
    except OSError:
        return -1
