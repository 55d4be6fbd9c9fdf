"""Answers requests: from the pool at once, or from a worker thread if that takes time."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

from kvrecall.block import Namespace
from kvrecall.errors import ConfigError
from kvrecall.pool.base import PoolStats, RecallState, Verdict
from kvrecall.pool.pool import Pool
from kvrecall.pool.service import protocol as p
from kvrecall.pool.service.inventory import Inventory
from kvrecall.pool.service.sessions import Session
from kvrecall.pool.service.views import Overview

_LOG = logging.getLogger(__name__)
_FLUSH_THREADS = 16
_RESIZE_LOOK_S = 0.2
_MAX_SLOW = 64  # requests of one connection that are being worked on


class Caller(Protocol):
    """The connection a request came by. ``reply`` may be called from any thread."""

    session: Session
    slow: int
    is_open: bool

    def reply(self, message: p.Message) -> None: ...

    @property
    def is_behind(self) -> bool:
        """Whether replies wait because the client does not read."""


class Cancelled(Exception):
    """Nobody waits for the result any more."""


class Desk:
    """Takes the requests of all connections. Used by the service's loop."""

    def __init__(
        self,
        pool: Pool,
        overview: Callable[[PoolStats], Overview],
        settle: Callable[[bytes], None],
    ) -> None:
        self._pool = pool
        self._inventory = Inventory(pool.steward)
        self._overview = overview
        self._settle = settle
        self._flushers = ThreadPoolExecutor(_FLUSH_THREADS, "kvrecall-flush-wait")
        self._clerks = ThreadPoolExecutor(2, "kvrecall-admin")
        self._resizers = ThreadPoolExecutor(1, "kvrecall-resize")
        self._closing = threading.Event()
        self._answers: dict[type, Callable[[Any, Any], p.Message | None]] = {
            p.Register: self._register,
            p.Find: self._find,
            p.Acquire: self._acquire,
            p.Poll: self._poll,
            p.Release: lambda caller, request: caller.session.release(request.ticket),
            p.Reserve: self._reserve,
            p.Commit: lambda caller, request: caller.session.commit(request.keys),
            p.Abandon: lambda caller, request: caller.session.abandon(request.keys),
            p.Cancel: lambda caller, request: caller.session.cancel(request.number),
            p.Touch: lambda caller, request: caller.session.touch(request.keys),
            p.Flush: self._flush,
            p.Clear: self._clear,
            p.Stats: lambda _, request: p.StatsReply(request.number, self._pool.stats()),
            p.Settle: lambda _, request: self._settle(request.token),
            p.Bye: self._bye,
            p.Look: self._look,
            p.List: self._list,
            p.Forest: self._forest,
            p.Drop: self._drop,
            p.Verify: self._verify,
            p.Pin: self._pin,
            p.Resize: self._resize,
        }

    def answer(self, caller: Caller, request: p.Request) -> p.Message | None:
        """The reply; None if there is none, or a worker thread will send it."""
        caller.session.requests += 1
        return self._answers[type(request)](caller, request)

    def stop(self) -> None:
        """Has the workers end soon. Does not wait."""
        self._closing.set()

    def close(self) -> None:
        """Waits for the workers. The pool is closed by now, so that none waits for it."""
        self.stop()
        self._flushers.shutdown(cancel_futures=True)
        self._clerks.shutdown(cancel_futures=True)
        self._resizers.shutdown(cancel_futures=True)

    # -- engines ---------------------------------------------------------------------------

    def _register(self, caller: Caller, request: p.Register) -> p.Message:
        namespace = Namespace(request.digest, request.parts)
        try:
            caller.session.register(namespace, request.block_bytes)
        except ConfigError as error:
            return p.Trouble(request.number, str(error))
        self._inventory.register(namespace, request.block_bytes)
        return p.Done(request.number)

    def _find(self, caller: Caller, request: p.Find) -> p.Message:
        found = caller.session.find(request.keys)
        return p.FoundReply(request.number, p.pack_tiers(found.tiers), found.pending)

    def _acquire(self, caller: Caller, request: p.Acquire) -> None:
        caller.session.acquire(
            request.ticket, request.keys, request.deadline_s, request.parent, request.tenant
        )

    def _poll(self, caller: Caller, request: p.Poll) -> p.Message:
        recall = caller.session.poll(request.ticket)
        ready = recall.state is RecallState.READY
        return p.RecallReply(request.number, ready, recall.offsets, p.pack_tiers(recall.tiers))

    def _reserve(self, caller: Caller, request: p.Reserve) -> p.Message:
        answers = caller.session.reserve(
            request.number, request.keys, request.parent, request.tenant
        )
        return p.ReserveReply(
            request.number,
            p.pack_verdicts([answer.verdict for answer in answers]),
            tuple(a.offset for a in answers if a.verdict is Verdict.RESERVED),
        )

    def _flush(self, caller: Caller, request: p.Flush) -> p.Message | None:
        if caller.slow >= _MAX_SLOW:
            return p.Flushed(request.number, False)
        until = time.monotonic() + request.deadline_s

        def flush() -> p.Message:
            left = max(0.0, until - time.monotonic())
            return p.Flushed(request.number, self._pool.flush(request.keys, left))

        return self._later(self._flushers, caller, flush)

    def _clear(self, caller: Caller, request: p.Clear) -> p.Message | None:
        digests = frozenset(caller.session.namespaces)

        def clear() -> p.Message:
            self._inventory.drop_namespaces(digests)
            return p.Done(request.number)

        return self._later(self._clerks, caller, clear)

    def _bye(self, caller: Caller, request: p.Bye) -> p.Message:
        caller.session.end()
        return p.Done(request.number)

    # -- administrators --------------------------------------------------------------------

    def _look(self, caller: Caller, request: p.Look) -> p.Message | None:
        def look() -> p.Message:
            tenants, count = self._inventory.tenants()
            overview = self._overview(self._pool.stats())
            seen = dataclasses.replace(overview, tenants=tenants, tenant_count=count)
            return p.LookReply(request.number, seen)

        return self._later(self._clerks, caller, look, request.number)

    def _list(self, caller: Caller, request: p.List) -> p.Message | None:
        def listing() -> p.Message:
            found = self._inventory.listing(request.query, request.by, request.sort, request.limit)
            return p.ListReply(request.number, found)

        return self._later(self._clerks, caller, listing, request.number)

    def _forest(self, caller: Caller, request: p.Forest) -> p.Message | None:
        def forest() -> p.Message:
            for namespace, nbytes in self._pool.namespaces():
                self._inventory.register(namespace, nbytes)
            return p.ForestReply(request.number, self._inventory.forest(request.limit))

        return self._later(self._clerks, caller, forest, request.number)

    def _drop(self, caller: Caller, request: p.Drop) -> p.Message | None:
        def drop() -> p.Message:
            return p.Dropped(request.number, *self._inventory.drop(request.query, request.pinned))

        return self._later(self._clerks, caller, drop, request.number)

    def _pin(self, caller: Caller, request: p.Pin) -> p.Message | None:
        def pin() -> p.Message:
            return p.Pinned(request.number, *self._inventory.pin(request.query, request.on))

        return self._later(self._clerks, caller, pin, request.number)

    def _resize(self, caller: Caller, request: p.Resize) -> p.Message | None:
        def resize() -> p.Message:
            self._inventory.resize(request.host_bytes, request.disk_bytes)
            most = 0
            time.sleep(_RESIZE_LOOK_S)
            while left := self._inventory.surplus():
                if self._closing.is_set() or not caller.is_open:
                    raise Cancelled  # what has to go still goes
                most = max(most, left)
                if not caller.is_behind:
                    caller.reply(p.Progress(request.number, most - left, most, 0))
                time.sleep(_RESIZE_LOOK_S)
            return p.Done(request.number)

        return self._later(self._resizers, caller, resize, request.number)

    def _verify(self, caller: Caller, request: p.Verify) -> p.Message | None:
        def progress(checked: int, total: int, damaged: int) -> None:
            if self._closing.is_set() or not caller.is_open:
                raise Cancelled
            if not caller.is_behind:
                caller.reply(p.Progress(request.number, checked, total, damaged))

        def verify() -> p.Message:
            checked, damaged = self._inventory.verify(request.query, progress)
            return p.Verified(request.number, checked, damaged)

        return self._later(self._clerks, caller, verify, request.number)

    def _later(
        self,
        workers: ThreadPoolExecutor,
        caller: Caller,
        work: Callable[[], p.Message],
        number: int = -1,
    ) -> p.Message | None:
        """Has a worker answer request ``number``."""
        if caller.slow >= _MAX_SLOW:
            return p.Refusal(f"more than {_MAX_SLOW} requests at once")
        caller.slow += 1

        def run() -> None:
            with contextlib.suppress(Cancelled):
                try:
                    reply = work()
                except ConfigError as error:
                    reply = p.Trouble(number, str(error))
                caller.reply(reply)

        workers.submit(run).add_done_callback(_report)
        return None


def _report(work: Future[Any]) -> None:
    if not work.cancelled() and (error := work.exception()) is not None:
        _LOG.error("pool service: a request failed", exc_info=error)
