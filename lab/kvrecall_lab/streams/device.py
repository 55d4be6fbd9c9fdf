"""A simulated accelerator: the third form of ``kvrecall.engines.vllm.device``.

Work is queued and done late, in an order that a ``Machine`` draws among all that the streams,
events and waits allow; the threads that send copies are late, too. Host memory stands in for the
device's, and real bytes are copied. Beside that, every access is checked by vector clocks when it
is queued: whatever order is drawn, a read of bytes whose write need not be complete by then, and a
write over bytes that may still be read or written, are faults.

To show that a wait is needed, a machine can ignore it: ``ignored`` names it by the functions of
kvrecall that lead to it, so a wait that is added to the code is tested without a word here.
"""

from __future__ import annotations

import functools
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch

from kvrecall.engines.vllm.device.base import Batch, Event, Stream

CELL = 512
"""Bytes of memory that are watched as one."""

HOST = 0
"""The host's place in a clock; streams follow."""

Clock = list[int]
Cells = set[int]


class DeadlockError(AssertionError):
    """Work that is waited for can never be done."""


@dataclass(slots=True)
class Access:
    """The last accesses of a cell: who wrote it, and when each last read it since."""

    writer: int = HOST
    written: int = 0
    reads: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Style:
    """How a machine draws. ``eager``: how likely some queued work is done at each call.
    ``patience``: how often at most an event is asked in vain. ``only_needed``: a wait does no work
    but what it waits for. ``speeds``: of the streams, and then the threads, in the order in which
    they were made. ``prompt``: how likely a thread does at once what is submitted to it."""

    eager: float
    patience: int
    only_needed: bool
    speeds: tuple[float, ...]
    prompt: float = 1.0

    @classmethod
    def draw(cls, chance: random.Random) -> Style:
        speeds = tuple(chance.choice((0.02, 0.3, 1.0)) for _ in range(4))
        eager = chance.choice((0.0, 0.0, 0.3, 0.7, 0.95))
        prompt = chance.choice((0.0, 0.5, 1.0))
        return cls(eager, chance.choice((0, 1, 3, 9)), chance.random() < 0.5, speeds, prompt)


class Machine:
    """The device's streams, and what is known of their order."""

    def __init__(
        self, chance: random.Random, style: Style, ignored: frozenset[str] = frozenset()
    ) -> None:
        """``ignored``: waits that are not waited for, by site."""
        self.faults: list[str] = []
        self.sites: set[str] = set()
        self.calls: dict[str, int] = {}
        self.kept: list[object] = []  # unmapped, but a mutant that copies there ends no process
        self.now = 0.0  # seconds of the host's clock
        self.byte_s = 1e-9  # that a copy takes for a byte
        self.chance = chance
        self.style = style
        self.ranks: list[Any] = []  # of retrieval
        self.known: Clock = [0]  # what the running thread knows to be complete
        self._ignored = ignored
        self.streams: list[LateStream] = []
        self._threads: list[LateThread] = []
        self._is_over = False
        self._cells: dict[int, Access] = {}
        self._fine: list[tuple[int, int, int]] = []  # begin, end, bytes of a cell
        self._shared: list[tuple[int, int]] = []
        self._unknown: dict[int, torch.Tensor] = {}
        self.computing = self.launching = self.stream("compute")

    def stream(self, name: str) -> LateStream:
        stream = LateStream(self, name, len(self.streams) + 1)
        self.streams.append(stream)
        self.known = [*self.known, 0]
        return stream

    def thread(self, name: str) -> LateThread:
        self._threads.append(LateThread(self, name, len(self._threads)))
        return self._threads[-1]

    def sleep(self, seconds: float) -> None:
        """The host sleeps."""
        self.now += seconds

    # ---- memory --------------------------------------------------------------------------

    def watch(self, begin: int, nbytes: int, cell: int) -> None:
        """Device memory that not only the engine's stream accesses. ``cell``: bytes that are told
        apart."""
        self._shared.append((begin, begin + nbytes))
        if cell < CELL:
            self._fine.append((begin, begin + nbytes, cell))

    def is_shared(self, address: int) -> bool:
        """Whether not only the engine's stream accesses it."""
        return any(begin <= address < end for begin, end in self._shared)

    def value_of(self, tensor: Any) -> torch.Tensor | None:
        """As of ``LateTensor``."""
        known: torch.Tensor | None = tensor.known
        if known is None or known.untyped_storage().data_ptr() in self._unknown:
            return None
        return known

    def unknown(self, tensor: Any) -> None:
        """A device tensor will hold what only the device knows."""
        if tensor.known is not None:
            self._unknown[tensor.known.untyped_storage().data_ptr()] = tensor.known

    def cells(self, address: int, nbytes: int) -> range:
        """The cells in which these bytes lie."""
        last = address + nbytes - 1
        for number, (begin, end, cell) in enumerate(self._fine):
            if begin <= address < end:
                first = -(number + 1) << 40
                return range(first + (address - begin) // cell, first + (last - begin) // cell + 1)
        return range(address // CELL, last // CELL + 1)

    # ---- order ---------------------------------------------------------------------------

    def ignores(self, kind: str, stream: str) -> bool:
        """Whether the wait that the caller is about to make is left out. Names it."""
        functions = []
        frame = sys._getframe(2)
        while frame is not None:
            name = frame.f_globals.get("__name__", "")
            if name.startswith("kvrecall.") and ".device." not in name:
                functions.append(frame.f_code.co_qualname)
            elif functions:
                break
            frame = frame.f_back
        if not functions:  # the engine's own
            return False
        site = f"{kind} {stream}: {' < '.join(functions)}"
        self.sites.add(site)
        return site in self._ignored

    def queued(self, stream: LateStream, reads: Cells, writes: Cells, what: str) -> None:
        """A stream gets work that begins after all that its clock and the host's contain."""
        clock = stream.clock = _latest(stream.clock, self.known)
        clock[stream.place] += 1
        self._check(stream.place, clock, reads, writes, what)

    def host(self, reads: Cells, writes: Cells, what: str) -> None:
        """This thread reads and writes memory, now."""
        self.known[HOST] += 1
        self._check(HOST, self.known, reads, writes, what)

    def free(self, address: int, nbytes: int) -> None:
        """The host unmaps memory."""
        all_of_it = self.cells(address, nbytes)
        self.host(set(), {cell for cell in self._cells if cell in all_of_it}, "unmapping")

    def joined(self, clock: Clock) -> None:
        """The host knows that all of this is complete."""
        self.known = _latest(self.known, clock)

    @contextmanager
    def running(self, thread: LateThread) -> Iterator[None]:
        """In here that thread runs, and knows what it knows."""
        ours, self.known = self.known, _latest(thread.clock, [0] * len(self.known))
        try:
            yield
        finally:
            thread.clock, self.known = self.known, ours

    def _check(self, who: int, clock: Clock, reads: Cells, writes: Cells, what: str) -> None:
        for cell in reads | writes:
            access = self._cells.get(cell)
            if access is None:
                if cell in reads:
                    self.fault(f"{what} reads what was never written")
                access = self._cells[cell] = Access()
            if access.written > clock[access.writer]:
                word = "reads what" if cell in reads else "overwrites what"
                self.fault(f"{what} {word} {self._name(access.writer)} is still to write")
            if cell in writes:
                late = [one for one, at in access.reads.items() if at > clock[one] and one != who]
                if late:
                    self.fault(f"{what} overwrites what {self._name(late[0])} still reads")
                access.writer, access.written, access.reads = who, clock[who], {}
            else:
                access.reads[who] = clock[who]

    def fault(self, text: str) -> None:
        if len(self.faults) < 20:
            self.faults.append(text)

    def _name(self, place: int) -> str:
        return "the host" if place == HOST else self.streams[place - 1].name

    # ---- work ----------------------------------------------------------------------------

    def some_work(self) -> None:
        """What the device and other threads may have done meanwhile."""
        while not self._is_over and self.chance.random() < self.style.eager and self._one():
            pass

    def torch_waits(self) -> None:
        """PyTorch makes the host wait for the engine's stream."""
        self.calls["torch's waits"] = self.calls.get("torch's waits", 0) + 1
        end = self.computing.record()
        self.until(self.computing, end.number)
        self.joined(end.clock)

    def synchronize(self) -> None:
        """Does all work of the streams. What a thread has not sent is none of it."""
        while self._one(self.streams):
            pass
        for stream in self.streams:
            self.joined(stream.clock)

    def end(self) -> None:
        """Sends what threads have not, to see what it would read and write; copies nothing."""
        self._is_over = True
        for thread in self._threads:
            while thread.is_ready:
                thread.step()

    def until_sent(self, future: LateFuture) -> None:
        """Does work until a thread has done that."""
        thread = future.thread
        self._until(lambda: future.is_over, thread.step, f"thread {thread.name} has nothing to do")

    def until(self, stream: LateStream, number: int) -> None:
        """Does work until so much of that stream is done."""
        self._until(
            lambda: stream.done >= number,
            lambda: self._needed(stream),
            f"stream {stream.name} never gets to {number}",
        )

    def _until(
        self, is_over: Callable[[], bool], needed: Callable[[], None], deadlock: str
    ) -> None:
        while not is_over():
            if self.style.only_needed:
                needed()
            elif not self._one():
                raise DeadlockError(deadlock)

    def _needed(self, stream: LateStream) -> None:
        """The next work of that stream, and first what it waits for."""
        if stream.is_stuck or not stream.queue:
            raise DeadlockError(f"stream {stream.name} has nothing to do")
        head = stream.queue[0]
        if isinstance(head, Mark) and not head.is_done:
            self.until(head.stream, head.number)
        stream.step()

    def _one(self, of: Sequence[LateStream | LateThread] = ()) -> bool:
        """A piece of work of some stream or thread (``of`` these) that need not wait. False if
        there is none."""
        ready = [one for one in of or [*self.streams, *self._threads] if one.is_ready]
        if not ready:
            return False
        (late,) = self.chance.choices(ready, [one.speed for one in ready])
        late.step()
        return True


def _latest(clock: Clock, other: Clock) -> Clock:
    """What either contains; streams that were made after one was taken are not in it."""
    return [max(pair) for pair in zip_longest(clock, other, fillvalue=0)]


class Mark(Event):
    """An event: the stream's work up to ``number``."""

    def __init__(self, stream: LateStream, number: int, clock: Clock) -> None:
        self.stream = stream
        self.number = number
        self.clock = clock
        self._asked = 0
        self._recorded = stream.machine.now

    def __call__(self) -> float:
        """When it is reached, by the device's clock."""
        return max(self.stream.when(self.number), self._recorded)

    @property
    def is_done(self) -> bool:
        return self.stream.done >= self.number

    def is_reached(self) -> bool:
        machine = self.stream.machine
        if machine.ignores("query", self.stream.name):
            return True
        machine.some_work()
        self._asked += not self.stream.is_stuck
        if not self.is_done and self._asked > machine.style.patience:
            machine.until(self.stream, self.number)
        if self.is_done:
            machine.joined(self.clock)
        return self.is_done

    def wait(self) -> None:
        machine = self.stream.machine
        if machine.ignores("wait", self.stream.name):
            return
        machine.until(self.stream, self.number)
        machine.now = max(machine.now, self())
        machine.joined(self.clock)

    def seconds_since(self, earlier: Event) -> float:
        assert isinstance(earlier, Mark)
        if not self.is_done:
            self.stream.machine.fault(f"the time of {self.stream.name} is asked too early")
        return self() - earlier()


class LateStream(Stream):
    """See the module. ``place``: in a clock. ``speed``: how likely its work is drawn, beside that
    of others."""

    def __init__(self, machine: Machine, name: str, place: int) -> None:
        self.machine = machine
        self.name = name
        self.place = place
        self.speed = machine.style.speeds[(place - 1) % len(machine.style.speeds)]
        self.clock: Clock = [0] * (place + 1)
        self.queue: deque[Callable[[], float] | Mark] = deque()
        self.done = 0
        self._ended = [0.0]  # when each work was done, by the device's clock
        self.is_stuck = False  # it does nothing until a test says that it does

    @property
    def is_ready(self) -> bool:
        """Whether it has work that need not wait."""
        if self.is_stuck:
            return False
        head = self.queue[0] if self.queue else None
        return head is not None and (not isinstance(head, Mark) or head.is_done)

    def step(self) -> None:
        """Does the next work, which need not wait."""
        work = self.queue.popleft()
        self.done += 1
        with torch._C._DisableTorchDispatch():
            self._ended.append(max(self._ended[-1], work()))

    def when(self, number: int) -> float:
        """When so much of its work was done, by the device's clock."""
        return self._ended[min(number, self.done)]

    def launch(
        self, work: Callable[[], Any], reads: Cells, writes: Cells, what: str, seconds: float = 0.0
    ) -> None:
        """Queues a kernel that reads and writes these cells, all before it writes any, and takes
        the device so long."""
        self.machine.calls[what] = self.machine.calls.get(what, 0) + 1
        self.machine.queued(self, reads, writes, what)
        launched = self.machine.now

        def done() -> float:
            work()
            return max(self._ended[-1], launched) + seconds

        self.queue.append(done)
        self.machine.some_work()

    def record(self) -> Mark:
        self.clock = _latest(self.clock, self.machine.known)
        return Mark(self, self.clock[self.place], self.clock)

    def wait(self, event: Event) -> None:
        if self.machine.ignores("follow", self.name) or isinstance(event, Unsent):
            return
        assert isinstance(event, Mark)
        self.clock = _latest(self.clock, event.clock)
        self.clock[self.place] += 1
        self.queue.append(event)

    def run(self, work: Callable[[], None]) -> None:
        before, self.machine.launching = self.machine.launching, self
        work()
        self.machine.launching = before

    def copy(self, batch: Batch) -> None:
        columns = batch.sources.tolist(), batch.targets.tolist(), batch.sizes.tolist()
        reads: Cells = set()
        writes: Cells = set()
        for source, target, nbytes in zip(*columns, strict=True):
            reads.update(self.machine.cells(source, nbytes))
            writes.update(self.machine.cells(target, nbytes))
        seconds = batch.nbytes * self.machine.byte_s
        self.launch(batch.copy_here, reads, writes, self.name, seconds)


class Unsent(Event):
    """As CUDA has it: an event that was never recorded is reached."""

    def is_reached(self) -> bool:
        return True

    def wait(self) -> None:
        return

    def seconds_since(self, earlier: Event) -> float:
        return 0.001


class LateFuture(Future[Any]):
    """What a thread is to do. Whoever does not wait for it gets events that are not recorded."""

    def __init__(self, thread: LateThread, work: Callable[[], Any]) -> None:
        super().__init__()
        self.thread = thread
        self.work = work
        self._asked = 0
        self._is_skipped = False

    @property
    def is_over(self) -> bool:
        return super().done()

    def done(self) -> bool:
        machine = self.thread.machine
        machine.some_work()
        if not self.is_over and machine.ignores("sent", self.thread.name):
            self._is_skipped = True
        self._asked += 1
        if not self.is_over and self._asked > machine.style.patience:
            machine.until_sent(self)
        return self.is_over or self._is_skipped

    def result(self, timeout: float | None = None) -> Any:
        machine = self.thread.machine
        if not self.is_over:
            if self._is_skipped or machine.ignores("join", self.thread.name):
                return Unsent(), Unsent(), True
            machine.until_sent(self)
        return super().result()


class LateThread(Executor):
    """A thread that does what is submitted to it in order, some time. ``speed``: as of a stream.
    ``clock``: what it knows."""

    def __init__(self, machine: Machine, name: str, number: int) -> None:
        self.machine = machine
        self.name = name
        self.speed = machine.style.speeds[number % len(machine.style.speeds)]
        self.clock: Clock = []
        self._queue: deque[tuple[LateFuture, Clock]] = deque()
        self._is_running = False

    @property
    def is_ready(self) -> bool:
        return bool(self._queue) and not self._is_running

    def submit(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future = LateFuture(self, functools.partial(work, *args, **kwargs))
        self._queue.append((future, self.machine.known))
        if self.machine.chance.random() < self.machine.style.prompt:
            self.machine.until_sent(future)
        self.machine.some_work()
        return future

    def step(self) -> None:
        """Does the next."""
        future, known = self._queue.popleft()
        self.clock = _latest(self.clock, known)
        self._is_running = True
        with self.machine.running(self):
            future.set_result(future.work())
        self._is_running = False

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        assert not wait, "CopyQueue.close has drained it"
