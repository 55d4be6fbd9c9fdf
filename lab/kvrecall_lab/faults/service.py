"""A schedule of the kind `service`: a pool service and its engines, each a process with a worker
that maps the arena. Processes stop, die and start again, connections break, and callers send what
is no request, or half of one, or greet as another version. The power fails, at any call of the
service's or between them; the store below it does what ``store`` tells.

What a worker was told to copy it copies, however slowly, also when its engine has died.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import shutil
import socket
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import thread as workers
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

from kvrecall.block import BlockKey
from kvrecall.config import DiskConfig, PoolTerms, RemoteConfig, Watermarks
from kvrecall.errors import TierError
from kvrecall.pool import Pool
from kvrecall.pool.arena import Arena
from kvrecall.pool.base import ArenaHandle, RecallState, Verdict
from kvrecall.pool.cascade import Cascade
from kvrecall.pool.clock import Clock
from kvrecall.pool.disk import DiskTier
from kvrecall.pool.disk.codec import BlockCodec
from kvrecall.pool.remote.tier import RemoteTier
from kvrecall.pool.service import protocol as p
from kvrecall.pool.service.client import ServiceClient
from kvrecall.pool.service.server import Server
from kvrecall.pool.slots import slot_bytes_of
from kvrecall.pool.tier import Tier
from kvrecall_lab.faults.machine import Dead, Lock, Machine, Process, Stuck, Task, simulated
from kvrecall_lab.faults.medium import System, Troubles
from kvrecall_lab.faults.schedule import Outcome, World, on_disk, told_of, told_to
from kvrecall_lab.faults.sockets import Wire
from kvrecall_lab.faults.sqlite import SimulatedVfs
from kvrecall_lab.faults.store import TROUBLES, SimulatedStore

T = TypeVar("T")
_CALL_S = 0.1
_LATE_S = 2.0  # a call beyond its deadline: other threads have their turns
_PROGRESS_S = 120.0
_END_S = 400.0  # until an engine has done what it does
_SETTLED_S = 60.0


class Service:
    """One process of the service, from its start to its end."""

    def __init__(self, play: Play) -> None:
        self._play = play
        self.process = Process("service")
        latency_s = play.chance.choice((0.0, 0.01, 0.1))
        cut_at = play.chance.choice((*[0] * 5, play.chance.randrange(1, 200)))
        self.system = System(play.machine, play.world.disk, Troubles(cut_at, latency_s=latency_s))
        self.store = SimulatedStore(play.machine, play.world.peer)
        self.server: Server
        self.is_up = False
        self._arena: Arena | None = None
        self._stack = contextlib.ExitStack()
        self.process.at_end.append(self._has_ended)
        self._stack.enter_context(on_disk(self.system))
        lock = Lock(play.machine)
        self._stack.enter_context(patch.object(workers, "_global_shutdown_lock", lock))
        play.vfs.system = self.system
        self.task = play.machine.spawn(self._main, "service", self.process)

    def _has_ended(self) -> None:
        self.system.has_ended, self.is_up = True, False

    def _main(self) -> None:
        play, world = self._play, self._play.world
        machine = play.machine
        largest = max(slot_bytes_of(nbytes) for nbytes in world.spaces.values())
        self._arena = Arena.create(play.chance.choice((10, 16)) * largest)
        clock = Clock(play.wall, lambda: machine.now - play.boot_at, f"boot {world.boot}")
        terms = PoolTerms(
            host_marks=play.chance.choice((Watermarks(1.0, 1.0), Watermarks(0.8, 0.6)))
        )
        config = DiskConfig(world.disk.folder, world.disk_bytes, direct_io=world.disk.direct != "")
        disk = DiskTier(config, "lru", None, clock, BlockCodec(), terms)
        below: Tier = disk
        if play.has_store:
            remote = RemoteTier(self.store, RemoteConfig("simulated"), lambda: machine.now)
            below = Cascade(disk, remote)
        pool = Pool(self._arena, below, "lru", clock, lambda: machine.now, terms)
        world.oracle.present.clear()
        pool.watch(world.oracle)
        for _ in pool.sweep(world.oracle):
            pass
        listener = play.wire.listener(play.path)
        self.server = Server(pool, listener)
        self.is_up = True
        self.server.run()
        self.is_up = False
        listener.close()
        pool.close(10.0)
        self.server.close()

    def stop(self) -> None:
        """As SIGTERM does."""
        self.server.stop()
        self.task.joined(60.0)
        if not self.task.ended:
            self._play.world.oracle.verdicts.stuck.append("the service does not end")

    def buried(self, was_killed: bool) -> None:
        """After its end."""
        play, verdicts = self._play, self._play.world.oracle.verdicts
        self.is_up, was_killed = False, was_killed or self.system.was_cut
        if not was_killed:
            if self.task.error is not None:
                verdicts.died.append(f"service: {told_of(self.task.error)}")
            left = [one.name for one in play.machine.tasks if _is_left(one, self.process)]
            if left:
                verdicts.leaks.append(f"threads of the service: {left}")
        self._stack.close()
        self._has_ended()
        self.task.error = None
        self.__dict__.pop("server", None)
        gc.collect()
        if self._arena is not None:
            self._arena.close()
        ends = play.wire.open_ends(self.process)
        files = play.vfs.open_files(self.system)
        left = self.system.end()
        if not was_killed and (ends or files or left):
            verdicts.leaks.append(f"{ends} processes are watched, {files} {left} open")
        play.vfs.system = None
        play.wire.ended(self.process)
        play.world.outcome.calls += self.system.calls
        play.world.outcome.faults += self.store.faults


def _is_left(task: Task, process: Process) -> bool:
    """But for those of a store that does not answer, which are abandoned."""
    return task.process is process and not (task.ended or "remote" in task.name)


class Engine:
    """A process with a client of the service, and its worker."""

    def __init__(self, play: Play, number: int) -> None:
        self.play, self.chance, self.machine = play, play.chance, play.machine
        self.process, self.worker = Process(f"engine {number}"), Process(f"worker {number}")
        self.process.at_end.append(self._died)
        self.worker.at_end.append(self._unmap)
        self.client: ServiceClient
        self._open: list[_Step] = []
        self._arenas: dict[ArenaHandle, Arena] = {}
        self._copies: list[ArenaHandle] = []  # under way

    def start(self, run: Callable[[], None] | None = None) -> Task:
        self.task = self.machine.spawn(run or self._run, self.process.name, self.process)
        return self.task

    def _run(self) -> None:
        self.join()
        for _ in range(self.chance.choice((10, 30, 60))):
            action, likely = self._step, self.chance.random()
            if likely < 0.15:
                action = self._flush
            elif likely < 0.25:
                action = self._pause
            action()
            while self._open and (len(self._open) > 3 or self.chance.random() < 0.5):
                self._finish(self._open.pop(0))
        while self._open:
            self._finish(self._open.pop(0))
        self.leave()

    def join(self) -> None:
        self.client = self._timed(2.0, lambda: ServiceClient(self.play.path, _CALL_S))
        for space, nbytes in self.play.world.spaces.items():
            self._timed(2.0, lambda: self.client.register(space, nbytes))  # noqa: B023

    def leave(self) -> None:
        """It owes nothing now."""
        for _ in range(200):
            if not self._holds():
                break
            self.machine.sleep(0.1)
        else:
            self.play.world.oracle.verdicts.leaks.append(f"{self.process.name} holds slots")
        self._timed(3.0, self.client.close)
        self._unmap()
        self.machine.exit()

    def _holds(self) -> bool:
        """Whether the service keeps anything for its connection."""
        life, service = self.client._life, self.play.__dict__.get("service")
        if life is None or service is None or not service.is_up:
            return False
        mine = [s for s in service.server._sessions() if s.token == life.welcome.token]
        return not all(session.is_settled for session in mine)

    def _timed(self, within_s: float, call: Callable[[], T]) -> T:
        """No call takes longer than it says, but for the time that its process was stopped."""
        began = self.machine.now - self.process.stopped_s
        result = call()
        took = self.machine.now - self.process.stopped_s - began
        if took > within_s + _LATE_S:
            told = f"{call.__code__.co_names} took {took:.1f} s"
            self.play.world.oracle.verdicts.stuck.append(told)
        return result

    # -- what an engine does ---------------------------------------------------------------

    def _step(self) -> None:
        """Some blocks are recalled and others saved, with one arena, as an engine's step does; the
        copies go on while the next steps begin."""
        client, pool_call = self.client, self._call
        wanted, more = self.play.keys(), self.play.keys()
        found, ticket = self.found(wanted), None
        offsets: Sequence[int] = ()
        if found and self.chance.random() < 0.8:
            wanted = wanted[:found]
            ticket = pool_call(lambda: client.acquire(wanted, 5.0))
            offsets = self.waited(ticket)
        if offsets and self.chance.random() < 0.3:
            self.machine.sleep(1.5)
        pool_call(lambda: client.locate(more))
        saved: list[tuple[BlockKey, int]] = []
        if self.chance.random() < 0.8:
            answers = pool_call(lambda: client.reserve(more))
            given = zip(more, answers, strict=True)
            saved = [(key, one.offset) for key, one in given if one.verdict is Verdict.RESERVED]
        handle = client.arena_handle()
        step = _Step(ticket, [key for key, _ in saved])
        step.task = self.copies(handle, list(zip(wanted, offsets, strict=False)), saved, step.done)
        self._open.append(step)

    def _finish(self, step: _Step) -> None:
        assert step.task is not None
        step.task.joined()
        client, names, ticket = self.client, step.saved, step.ticket
        if any(step.done) and self.chance.random() < 0.95:
            self._call(lambda: client.commit(names))
        else:
            self._call(lambda: client.abandon(names))
        if ticket is not None:
            self._call(lambda: client.release(ticket))

    def _call(self, call: Callable[[], T]) -> T:
        return self._timed(2 * _CALL_S, call)

    def found(self, keys: Sequence[BlockKey]) -> int:
        for _ in range(20):
            found = self._call(lambda: self.client.find(keys))
            if not found.pending:
                return found.blocks
            self.machine.sleep(0.01)
        return 0

    def waited(self, ticket: int) -> Sequence[int]:
        until = self.machine.now - self.process.stopped_s + 5.0 + 30.0
        while (recall := self._call(lambda: self.client.poll(ticket))).state is RecallState.PENDING:
            if self.machine.now - self.process.stopped_s > until:
                break
            self.machine.sleep(0.01)
        return recall.offsets

    def copies(
        self,
        handle: ArenaHandle,
        loads: Sequence[tuple[BlockKey, int]],
        stores: Sequence[tuple[BlockKey, int]],
        done: list[bool],
    ) -> Task:
        """The worker does it; ``done`` is False if it cannot map the arena."""
        self._copies.append(handle)

        def copy() -> None:
            try:
                done.append(self._copy(handle, loads, stores))
            finally:
                self._copies.remove(handle)
                if self.process.is_dead and not self.worker.is_dead:
                    self._unmap()

        return self.machine.spawn(copy, self.worker.name, self.worker)

    def copied(self, key: BlockKey, loads: Sequence[int], stores: Sequence[int]) -> bool:
        done: list[bool] = []
        handle, both = self.client.arena_handle(), (loads, stores)
        load, store = ([(key, offset) for offset in offsets] for offsets in both)
        self.copies(handle, load, store, done).joined()
        return any(done)

    def _copy(
        self,
        handle: ArenaHandle,
        loads: Sequence[tuple[BlockKey, int]],
        stores: Sequence[tuple[BlockKey, int]],
    ) -> bool:
        oracle, world = self.play.world.oracle, self.play.world
        if not (loads or stores):
            return True
        if handle not in self._arenas:
            self._unmap()
            try:
                self._arenas[handle] = Arena.attach(handle)
            except TierError:
                return False
        arena = self._arenas[handle]
        for key, offset in stores:
            size = world.size_of(key)
            data = oracle.filled(key, size)
            arena.view(offset, size // 2)[:] = data[: size // 2]
            self._take_time()
            arena.view(offset + size // 2, size - size // 2)[:] = data[size // 2 :]
        for key, offset in loads:
            size = world.size_of(key)
            first = bytes(arena.view(offset, size // 2))
            self._take_time()
            data = first + bytes(arena.view(offset + size // 2, size - size // 2))
            if not self.process.is_dead:
                oracle.recalled(key, data, "by a worker")
                world.outcome.recalled += 1
        return True

    def _take_time(self) -> None:
        self.machine.sleep(self.chance.choice((0.0, 0.0, 0.01, 0.2, 3.0)))

    def _flush(self) -> None:
        self.flushed(self.play.keys())

    def flushed(self, keys: Sequence[BlockKey]) -> bool:
        oracle = self.play.world.oracle
        before = [oracle.removals[key] for key in keys]
        if not self._timed(5.0, lambda: self.client.flush(keys, 5.0)):
            return False
        for key, count in zip(keys, before, strict=True):
            if oracle.removals[key] == count:
                oracle.acknowledged[key] = self.machine.steps
                self.play.world.outcome.acknowledged += 1
        return True

    def _pause(self) -> None:
        self.machine.sleep(self.chance.choice((0.1, 1.0)))

    # -- its end ---------------------------------------------------------------------------

    def _died(self) -> None:
        if not self._copies:
            self._unmap()

    def _unmap(self) -> None:
        """The arenas that no copy uses."""
        for handle in [one for one in self._arenas if one not in self._copies]:
            self._arenas.pop(handle).close()


@dataclass(eq=False, slots=True)
class _Step:
    """What an engine owes the service when the copies have ended."""

    ticket: int | None
    saved: list[BlockKey]
    done: list[bool] = field(default_factory=list)
    task: Task | None = None


class Play:
    """One schedule."""

    def __init__(self, world: World, vfs: SimulatedVfs, path: Path) -> None:
        self.world, self.vfs, self.path = world, vfs, path
        self.chance = world.chance
        self.machine = Machine(self.chance, self.chance.choice((0.0, 0.05, 0.3)))
        self.wire = Wire(self.machine)
        self.service: Service
        self.engines: list[Engine] = []
        self.logged: list[str] = []
        self.has_store = self.chance.random() < 0.4
        self.boot_at = 0.0
        world.oracle.now = self.wall

    def wall(self) -> float:
        return self.world.wall_at_boot + self.machine.now

    def keys(self) -> list[BlockKey]:
        chain = self.chance.choice(self.world.chains)
        return chain[: self.chance.randrange(1, len(chain) + 1)]

    def run(self) -> None:
        verdicts = self.world.oracle.verdicts
        try:
            with (
                simulated(self.machine, self.wall),
                self.wire.in_place(),
                told_to(self.logged),
                # Of tasks and workers that are killed.
                patch.object(logging.getLogger("asyncio"), "disabled", True),
                patch.object(logging.getLogger("concurrent.futures"), "disabled", True),
                patch.object(sys, "unraisablehook", lambda _: None),
            ):
                try:
                    self.machine.run(self._main)
                finally:
                    self._clean()
        except Stuck as error:
            verdicts.stuck.append(str(error))
        except Exception as error:  # noqa: BLE001 - a call of the pool raised it
            verdicts.died.append(f"main: {told_of(error)}")
        self.world.outcome.faults += self.wire.faults
        self.world.outcome.story += self.logged

    def _clean(self) -> None:
        for engine in self.engines:
            engine._unmap()
        if (service := self.__dict__.pop("service", None)) is not None:
            service.buried(True)

    def _main(self) -> None:
        self._start_service()
        self.wire.no_files = self.chance.choice((0.0, 0.0, 0.3))
        for _ in range(self.chance.choice((2, 3))):
            self._start_engine()
        events: list[tuple[Callable[[], object], float]] = [
            (self._kill_engine, 2),
            (self._stop_engine, 2),
            (self._stop_service, 1),
            (self._kill_service, 2),
            (self._restart_service, 1),
            (self._break, 5),
            (self._babble, 1),
            (self._call, 2),
            (self._cut, 0.7),
        ]
        if self.has_store:
            events.append((self._store_fails, 2))
        names, weights = zip(*events, strict=True)
        for _ in range(self.chance.choice((0, 8, 20))):
            self.machine.sleep(self.chance.choice((0.0, 0.05, 0.3, 1.0)))
            while self.service.system.was_cut:
                self._cut()
            self.chance.choices(names, weights)[0]()
            self.world.outcome.faults += 1
        self.wire.no_files, self.world.peer.trouble = 0.0, ""
        self._join()
        while self.service.system.was_cut:
            self._cut()
            self._join()
        self.service.system.troubles.cut_at = 0
        self._check_end()

    def _join(self) -> None:
        """Waits for the engines' ends."""
        for engine in self.engines:
            engine.task.joined(_END_S)
            if engine.task.error is not None:
                told = told_of(engine.task.error)
                self.world.oracle.verdicts.died.append(f"{engine.process.name}: {told}")
            elif not engine.task.ended:
                self.world.oracle.verdicts.stuck.append(f"{engine.process.name} does not end")

    # -- what happens ----------------------------------------------------------------------

    def _start_service(self) -> None:
        self.service = Service(self)
        for _ in range(600):
            if self.service.is_up or self.service.task.ended:
                break
            self.machine.sleep(0.1)
        if not (self.service.is_up or self.service.system.was_cut):
            error = self.service.task.error
            told = "" if error is None else told_of(error)
            self.world.oracle.verdicts.stuck.append(f"the service does not start: {told}")
            raise Dead

    def _start_engine(self) -> None:
        self.engines.append(Engine(self, len(self.engines)))
        self.engines[-1].start()

    def _one(self) -> Engine | None:
        """An engine that lives."""
        living = [one for one in self.engines if not one.task.ended]
        return self.chance.choice(living) if living else None

    def _kill_engine(self) -> None:
        if (engine := self._one()) is not None:
            self.world.outcome.kills += 1
            self.machine.kill_process(engine.process)
            if self.chance.random() < 0.3:
                self.machine.kill_process(engine.worker)
            self._start_engine()

    def _stop_engine(self) -> None:
        if (engine := self._one()) is not None:
            process = self.chance.choice((engine.process, engine.worker))
            self.machine.stop_process(process, self.chance.choice((0.5, 5.0, 15.0)))

    def _stop_service(self) -> None:
        self.machine.stop_process(self.service.process, self.chance.choice((0.05, 0.5, 5.0)))

    def _kill_service(self) -> None:
        self.world.outcome.kills += 1
        self.machine.kill_process(self.service.process)
        self.service.buried(True)
        self.machine.sleep(self.chance.choice((0.0, 0.3, 3.0)))
        self._start_service()

    def _restart_service(self) -> None:
        self.service.stop()
        self.service.buried(False)
        self._start_service()

    def _store_fails(self) -> None:
        peer = self.world.peer
        peer.trouble = self.chance.choice(("", *TROUBLES))
        peer.share = self.chance.choice((0.1, 0.5, 1.0))

    def _cut(self) -> None:
        """The power fails, and comes back."""
        world = self.world
        world.outcome.cuts += 1
        for engine in self.engines:
            for process in (engine.process, engine.worker):
                if not process.is_dead:
                    self.machine.kill_process(process)
        self.machine.kill_process(self.service.process)
        self.service.buried(True)
        world.disk.cut(self.chance)
        world.boot += 1
        world.wall_at_boot += self.chance.choice((1.0, 600.0))
        self.boot_at = self.machine.now
        self._start_service()
        self._start_engine()

    def _link(self) -> Any:
        """The socket of an engine."""
        engine = self._one()
        client: Any = None if engine is None else engine.__dict__.get("client")
        life = None if client is None else client._next or client._life
        return None if life is None or life.is_lost else life._sock

    def _break(self) -> None:
        if (sock := self._link()) is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(self.chance.choice((0, 1, 2)))

    def _babble(self) -> None:
        if (sock := self._link()) is not None:
            with contextlib.suppress(OSError):
                sock.send(self.chance.randbytes(self.chance.choice((3, 40, 400))))

    def _call(self) -> None:
        """One that is no client of this version."""
        caller = Process("caller")
        hello = p.frame_of(p.Hello(p.PROTOCOL, "0"))
        other = p.frame_of(p.Hello(p.PROTOCOL + self.chance.choice((-1, 1)), "0"))
        said = self.chance.choice((b"", hello[:5], hello + b"\xff" * 9, other))
        ending = self.chance.choice((0.0, 20.0))
        heard = bytearray()

        def call() -> None:
            sock = self.wire.call(self.path)
            with contextlib.suppress(OSError):
                sock.send(said)
            self.machine.sleep(1.0 + ending)
            with contextlib.suppress(OSError):
                heard.extend(socket.socket.recv(sock, 1 << 16))

        task = self.machine.spawn(call, "caller", caller)
        if self.chance.random() < 0.5:
            task.joined()
            if said == other and heard[5:6] == b"@":  # the tag of a Welcome
                self.world.oracle.verdicts.wrong.append("another version is welcome")
            self.machine.kill_process(caller)

    # -- what must be true -----------------------------------------------------------------

    def _check_end(self) -> None:
        oracle = self.world.oracle
        last = Engine(self, len(self.engines))
        self.engines.append(last)
        last.start(lambda: self._use(last)).joined(3 * _PROGRESS_S)
        if last.task.error is not None:
            oracle.verdicts.died.append(f"the last engine: {told_of(last.task.error)}")
        elif not last.task.ended:
            oracle.verdicts.stuck.append("the last engine does not end")
        until = self.machine.now + _SETTLED_S
        while (owed := self._owed()) and self.machine.now < until:
            self.machine.sleep(0.5)
        oracle.verdicts.leaks += owed
        self.service.stop()
        service = self.__dict__.pop("service")
        service.buried(False)

    def _owed(self) -> list[str]:
        server = self.service.server
        stats = server.pool.stats()
        told = {
            "connections": len(server._connections),
            "lost sessions": len(server.reaper.orphans),
            "leases": stats.leases,
            "slots reserved": stats.reserved,
            "reads": stats.queued_reads,
        }
        return [f"{count} {what}" for what, count in told.items() if count]

    def _use(self, engine: Engine) -> None:
        """A new engine finds what was acknowledged, and stores a new block."""
        oracle, machine = self.world.oracle, self.machine
        engine.join()
        until = machine.now + _PROGRESS_S
        while True:
            key = next(self.world.fresh)
            if machine.now > until:
                oracle.verdicts.stuck.append("stores no block any more")
                break
            (answer,) = engine.client.reserve([key])
            if answer.verdict is Verdict.RESERVED and engine.copied(key, (), [answer.offset]):
                engine.client.commit([key])
                if engine.flushed([key]):
                    break
            machine.sleep(1.0)
        for key in list(oracle.acknowledged):
            tries = 10
            while key in oracle.acknowledged and tries and not self._is_got(engine, key):
                tries -= 1
                machine.sleep(1.0)
            if not tries and key in oracle.acknowledged:
                oracle.verdicts.lost.append(f"{key.hex()[-6:]} of step {oracle.acknowledged[key]}")
        engine.leave()

    def _is_got(self, engine: Engine, key: BlockKey) -> bool:
        if not engine.found([key]):
            return False
        ticket = engine.client.acquire([key], 10.0)
        offsets = engine.waited(ticket)
        is_got = engine.copied(key, offsets, ()) and bool(offsets)
        engine.client.release(ticket)
        return is_got


def run(seed: int, root: Path, vfs: SimulatedVfs) -> Outcome:
    """As ``schedule.run``."""
    root.mkdir(parents=True, exist_ok=True)
    world = World(seed, root)
    try:
        play = Play(world, vfs, root.with_name("pool.sock"))
        play.run()
    finally:
        shutil.rmtree(root, ignore_errors=True)
    return world.outcome
