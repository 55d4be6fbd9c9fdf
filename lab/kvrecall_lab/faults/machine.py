"""A simulated machine: one clock, and threads that run one at a time, in an order that follows from
a seed.

Threads are greenlets. Others may run where a thread waits, takes a lock, or calls the system, and
nowhere else: between two such points a thread is alone, as no thread of CPython is. So a race
between two lines of Python without any of these is not found here.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import queue
import random
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import _base
from concurrent.futures import thread as workers
from typing import Any
from unittest.mock import patch

from greenlet import getcurrent, greenlet

_MOST_STEPS = 400_000
_LATE = 0.02  # how often the clock goes on though a thread could run
_LATE_S = 0.1  # by how much, at most


class Dead(BaseException):
    """The machine lost its power, or the process was killed: no further line of it runs."""


class Stuck(Exception):
    """No thread will ever run again, or one never ends."""


class Process:
    """Threads that stop and die together."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_dead = self.is_stopped = False
        self.stopped_s = 0.0  # in all
        self.held: list[Task] = []  # could run if it were not stopped
        self.at_end: list[Callable[[], object]] = []  # what the kernel does then


class Task:
    """A thread of a process of the machine."""

    def __init__(
        self, machine: Machine, run: Callable[[], object], name: str, process: Process
    ) -> None:
        self.name, self.process = name, process
        self.ident = next(machine.numbers)
        self.values: dict[int, dict[str, Any]] = {}  # of its ``local`` objects
        self.error: BaseException | None = None
        self.ended = False
        self.joiners: list[Task] = []
        self.parks = 0  # so that a late timer is told from the present one
        self.is_parked = self.was_woken = False
        self.run: Callable[[], object] | None = run
        self._machine = machine
        self.greenlet = greenlet(self._main, machine.hub)

    def joined(self, timeout_s: float | None = None) -> None:
        """Returns when it has ended, or the time is over."""
        me = self._machine.me()
        if not self.ended:
            self.joiners.append(me)
            self._machine.park(timeout_s)
            self.joiners.remove(me)

    def _main(self) -> None:
        assert self.run is not None
        try:
            self.run()
        except Dead:
            pass
        except BaseException as error:  # noqa: BLE001 - as a thread's, it is told and not raised
            self.error = error
        self.ended = True
        for joiner in self.joiners:
            self._machine.wake(joiner)


class Machine:
    """Clock and scheduler. ``turn`` is how likely another thread runs at a point where one may."""

    def __init__(self, chance: random.Random, turn: float) -> None:
        self.chance = chance
        self.now = 1000.0  # since boot
        self.leapt = 0.0  # of it: seconds in which no thread could run
        self._is_dead = False
        self._first = Process("first")
        self._ending: list[Process] = []
        self.numbers = itertools.count(1)
        self.tasks: list[Task] = []
        self.left: list[str] = []  # the names of those that ran when the first had ended
        self.current: Task | None = None
        self.steps = 0
        self._turn = turn
        self._ready: list[Task] = []
        self._timers: list[tuple[float, int, Task, int]] = []
        self.hub: Any = None

    @property
    def is_dead(self) -> bool:
        """Whether it has no power, or the process that runs was killed."""
        return self._is_dead or (self.current is not None and self.current.process.is_dead)

    @is_dead.setter
    def is_dead(self, value: bool) -> None:
        self._is_dead = value

    # -- for the simulation ----------------------------------------------------------------

    def spawn(self, run: Callable[[], object], name: str, process: Process | None = None) -> Task:
        """``process``: by default that of the caller."""
        if process is None:
            process = self._first if self.current is None else self.current.process
        task = Task(self, run, name, process)
        self.tasks.append(task)
        self._ready.append(task)
        return task

    def run(self, main: Callable[[], object]) -> Task:
        """Runs ``main`` and all threads that it starts, until it ends or the machine is dead.
        Raises Stuck, or what ``main`` raised."""
        self.hub = getcurrent()
        first = self.spawn(main, "main")
        try:
            while not (first.ended or self._is_dead):
                while self._ending:
                    self._end(self._ending.pop())
                self._step()
        finally:
            self.current = None
            self.left = [task.name for task in self.tasks if not task.ended]
            self.kill()
        if first.error is not None:
            raise first.error
        return first

    def kill(self) -> None:
        """Ends every thread where it stands, and forgets what it ran: what is to close the files of
        a dead pool leads here, and would else keep it for ever."""
        self.is_dead = True
        for task in self.tasks:
            if not task.ended and task.greenlet:
                task.greenlet.throw(Dead)
            task.ended, task.run = True, None
            task.values.clear()

    def kill_process(self, process: Process) -> None:
        """Another one: has ended on return."""
        self._ending.append(process)
        self._ready.append(self.me())
        self._away()

    def exit(self) -> None:
        """Ends the process that calls, soon."""
        self._ending.append(self.me().process)

    def cut(self) -> None:
        """The process that calls ends here; with the whole machine, if it is the first."""
        process = self.me().process
        process.is_dead, self.is_dead = True, process is self._first
        self._ending.append(process)

    def _end(self, process: Process) -> None:
        process.is_dead = True
        for task in self.tasks:
            if task.process is process and not task.ended:
                self.current = task
                if task.greenlet:
                    task.greenlet.throw(Dead)
                task.ended, task.is_parked = True, False
                for joiner in task.joiners:
                    self.wake(joiner)
        self.current = None
        self._ready = [task for task in self._ready if not task.ended]
        for end in process.at_end:
            end()

    def stop_process(self, process: Process, seconds: float) -> None:
        """Another one does nothing for that long."""
        process.is_stopped = True
        self.sleep(seconds)
        process.is_stopped = False
        process.stopped_s += seconds
        self._ready += [task for task in process.held if not task.ended]
        process.held.clear()

    def _step(self) -> None:
        self.steps += 1
        if self.steps > _MOST_STEPS:
            raise Stuck(f"no end after {_MOST_STEPS} steps: {self._where()}")
        until = self.now + _LATE_S if self.chance.random() < _LATE else 0.0
        while self._timers and (not self._ready or self._timers[0][0] < until):
            at, _, task, parks = heapq.heappop(self._timers)
            if task.is_parked and task.parks == parks:
                self.now = max(self.now, at)
                task.is_parked = False
                self._ready.append(task)
                break
        if not self._ready:
            raise Stuck(f"nothing will ever happen: {self._where()}")
        place = self.chance.randrange(len(self._ready))
        task = self._ready[place]
        self._ready[place] = self._ready[-1]
        self._ready.pop()
        if task.process.is_stopped:
            task.process.held.append(task)
            return
        self.current = task
        task.greenlet.switch()

    def _where(self) -> str:
        """Where each thread waits."""
        told = []
        for task in self.tasks:
            frame = task.greenlet.gr_frame
            while frame is not None and "kvrecall/pool" not in frame.f_code.co_filename:
                frame = frame.f_back
            if not task.ended and frame is not None:
                told.append(f"{task.name} in {frame.f_code.co_qualname}:{frame.f_lineno}")
        return ", ".join(told)

    # -- for its threads -------------------------------------------------------------------

    def me(self) -> Task:
        current = self.current
        if self._is_dead or current is None or current.process.is_dead:
            raise Dead
        return current

    def turn(self) -> None:
        """Others may run here."""
        me = self.me()
        if self.chance.random() < self._turn:
            self._ready.append(me)
            self._away()

    def park(self, timeout_s: float | None = None) -> bool:
        """Waits until it is woken; False if the time is over before."""
        me = self.me()
        me.parks += 1
        me.is_parked, me.was_woken = True, False
        if timeout_s is not None:
            at = self.now + max(0.0, timeout_s)
            heapq.heappush(self._timers, (at, next(self.numbers), me, me.parks))
        self._away()
        return me.was_woken

    def _away(self) -> None:
        self.hub.switch()
        self.me()

    def wake(self, task: Task) -> None:
        if task.is_parked:
            task.is_parked, task.was_woken = False, True
            self._ready.append(task)

    def sleep(self, seconds: float) -> None:
        self.park(seconds)


class Lock:
    """A lock; ``again``: its holder may take it again."""

    def __init__(self, machine: Machine, again: bool = False) -> None:
        self._machine, self._again = machine, again
        self._owner: Task | None = None
        self._depth = 0
        self._waiting: list[Task] = []

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        machine = self._machine
        machine.turn()
        me = machine.me()
        if self._again and self._owner is me:
            self._depth += 1
            return True
        until = machine.now + timeout
        while self._owner is not None:
            left = until - machine.now
            if not blocking or (timeout >= 0 and left <= 0):
                return False
            self._waiting.append(me)
            machine.park(None if timeout < 0 else left)
            if me in self._waiting:
                self._waiting.remove(me)
        self._owner, self._depth = me, 1
        return True

    def release(self) -> None:
        if self._machine.is_dead:
            return
        if self._owner is None:
            raise RuntimeError("release unlocked lock")
        self._depth -= 1
        if not self._depth:
            self._owner = None
            if self._waiting:
                place = self._machine.chance.randrange(len(self._waiting))
                self._machine.wake(self._waiting.pop(place))

    def locked(self) -> bool:
        return self._owner is not None

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def let_go(self) -> int:
        depth, self._depth = self._depth, 1
        self.release()
        return depth

    def take_again(self, depth: int) -> None:
        self.acquire()
        self._depth = depth


class _Condition:
    def __init__(self, machine: Machine, lock: Lock | None = None) -> None:
        self._machine = machine
        self._lock = lock or Lock(machine, again=True)
        self.acquire, self.release = self._lock.acquire, self._lock.release
        self._waiting: deque[Task] = deque()

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        me = self._machine.me()
        self._waiting.append(me)
        depth = self._lock.let_go()
        self._machine.park(timeout)
        woken = me not in self._waiting  # perhaps between its time and its turn
        if not woken:
            self._waiting.remove(me)
        self._lock.take_again(depth)
        return woken

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        until = None if timeout is None else self._machine.now + timeout
        while not (result := predicate()):
            left = None if until is None else until - self._machine.now
            if left is not None and left <= 0:
                break
            self.wait(left)
        return result

    def notify(self, n: int = 1) -> None:
        while self._waiting and n:
            self._machine.wake(self._waiting.popleft())
            n -= 1

    def notify_all(self) -> None:
        self.notify(len(self._waiting))


class _Event:
    def __init__(self, machine: Machine) -> None:
        self._condition = _Condition(machine)
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        self._condition.notify_all()

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        with self._condition:
            return self._condition.wait_for(self.is_set, timeout)


class _Semaphore:
    def __init__(self, machine: Machine, value: int = 1) -> None:
        self._condition = _Condition(machine)
        self._value = value

    def acquire(self, blocking: bool = True, timeout: float | None = None) -> bool:
        with self._condition:
            is_mine = self._condition.wait_for(lambda: self._value > 0, timeout if blocking else 0)
            self._value -= is_mine
            return is_mine

    def release(self) -> None:
        self._value += 1
        self._condition.notify()


class _SimpleQueue:
    def __init__(self, machine: Machine) -> None:
        self._condition = _Condition(machine)
        self._items: deque[Any] = deque()

    def put(self, item: Any) -> None:
        self._items.append(item)
        self._condition.notify()

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        with self._condition:
            if not self._condition.wait_for(lambda: bool(self._items), timeout if block else 0.0):
                raise queue.Empty
            return self._items.popleft()

    def get_nowait(self) -> Any:
        return self.get(block=False)


class _Thread:
    """As ``threading.Thread``, of which the pool's are daemons."""

    def __init__(
        self, machine: Machine, target: Callable[..., object], name: str = "", daemon: bool = True,
        args: tuple[Any, ...] = (),
    ) -> None:  # fmt: skip
        self.name, self.daemon = name, daemon
        self._machine, self._run = machine, lambda: target(*args)
        self._task: Task | None = None

    @property
    def ident(self) -> int | None:
        return None if self._task is None else self._task.ident

    def start(self) -> None:
        self._machine.turn()
        self._task = self._machine.spawn(self._run, self.name)

    def is_alive(self) -> bool:
        return self._task is not None and not self._task.ended

    def join(self, timeout: float | None = None) -> None:
        if self._machine.is_dead or self._task is None or self._task.ended:
            return
        self._task.joined(timeout)


class _Local:
    """As ``threading.local``."""

    def __init__(self, machine: Machine) -> None:
        object.__setattr__(self, "_machine", machine)

    def _values(self) -> dict[str, Any]:
        machine: Machine = object.__getattribute__(self, "_machine")
        return machine.me().values.setdefault(id(self), {})

    def __getattr__(self, name: str) -> Any:
        try:
            return self._values()[name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self._values()[name] = value


class Names:
    """A module, but for the names that are given."""

    def __init__(self, module: Any, **names: Any) -> None:
        self.__dict__.update(names)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


@contextlib.contextmanager
def simulated(machine: Machine, wall: Callable[[], float], **others: Any) -> Iterator[None]:
    """Inside, the modules of the pool, and of the library those that make locks for it, get the
    threads and the clock of ``machine`` under the names ``threading`` and ``time``. ``others``:
    names of further modules, and what the pool finds under them."""

    def of(kind: Callable[..., Any], **given: Any) -> Callable[..., Any]:
        return lambda *args, **more: kind(machine, *args, **given, **more)

    threads = Names(
        threading,
        Lock=of(Lock),
        RLock=of(Lock, again=True),
        Condition=of(_Condition),
        Event=of(_Event),
        Semaphore=of(_Semaphore),
        Thread=of(_Thread),
        local=of(_Local),
        get_ident=lambda: machine.me().ident,
    )
    clock = Names(
        time,
        monotonic=lambda: machine.now,
        perf_counter=lambda: machine.now,
        time=wall,
        sleep=machine.sleep,
    )
    simple = of(_SimpleQueue)
    names = {"threading": threads, "time": clock, "SimpleQueue": simple, **others}
    real = {"threading": threading, "time": time, "SimpleQueue": queue.SimpleQueue}
    with contextlib.ExitStack() as stack:
        for module in pool_modules():
            for name, value in names.items():
                if vars(module).get(name) is real.get(name, sys.modules.get(name)):
                    stack.enter_context(patch.object(module, name, value))
        stack.enter_context(patch.object(queue, "threading", threads))
        stack.enter_context(patch.object(queue, "time", lambda: machine.now))
        stack.enter_context(patch.object(queue, "SimpleQueue", simple))
        stack.enter_context(patch.object(_base, "threading", threads))
        stack.enter_context(patch.object(workers, "threading", threads))
        yield


def pool_modules() -> list[Any]:
    found = [(name, one) for name, one in sys.modules.items() if name.startswith("kvrecall.pool")]
    return [module for _, module in sorted(found)]
