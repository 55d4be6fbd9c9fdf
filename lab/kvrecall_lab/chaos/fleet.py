"""The engines of a run: kept busy, checked, and replaced after they are killed."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvrecall.block import BlockKey
from kvrecall.processes.service import ServiceProcess
from kvrecall_lab.chaos.oracle import Conversations, DurabilityOracle, Report, Turn
from kvrecall_lab.engines.engine import START_S, Answer, EngineProcess, OnLine, Question

HUNG_S = 120.0
"""Seconds after which a request in flight in an engine that was not killed counts as hung."""

_VLLM_NAMES = ("psm_", "vllm_dist_", "sem.")
"""Names of vLLM's and Python's shared memory; kvrecall's has no name."""

_SALTS = (None, "tenant-a", "tenant-b")
_WIDTH = 4  # requests in flight per engine


@dataclass(frozen=True, slots=True)
class InFlight:
    """A request in flight in an engine."""

    question: Question
    turn: Turn
    at: float


@dataclass(eq=False, slots=True)
class Replica:
    """A place for an engine. ``process`` is None while there is none."""

    number: int
    process: EngineProcess | None = None
    ready: bool = False
    doomed: bool = False  # killed by the run, or about to be
    started_at: float = 0.0
    was_joined: bool = False
    lost_at: float = 0.0  # when it last noticed the loss of its service
    lives: int = 0
    in_flight: dict[str, InFlight] = field(default_factory=dict)

    def vacate(self) -> None:
        """Removes its engine."""
        self.in_flight.clear()
        self.process, self.ready = None, False


class Fleet:
    """All replicas. Reader threads process the engines' lines; the run's thread calls ``tend``
    regularly. ``start``: starts the engine of a replica, given its number, its life and a callback
    for its lines."""

    def __init__(
        self,
        size: int,
        start: Callable[[int, int, OnLine], EngineProcess],
        conversations: Conversations,
        report: Report,
        dice: random.Random,
        oracle: DurabilityOracle,
        service: ServiceProcess,
    ) -> None:
        self.replicas = [Replica(number) for number in range(size)]
        self._start = start
        self._conversations = conversations
        self._report = report
        self._dice = dice
        self._oracle = oracle
        self._service = service
        self._lock = threading.RLock()  # guards the replicas and the fields below
        self._backlog: deque[InFlight] = deque()
        self._numbers = itertools.count()
        self._draining = False
        self._ending = False
        self._shared: set[Path] = set()
        self._dead: list[EngineProcess] = []  # ended unexpectedly

    # -- the run's thread ------------------------------------------------------------------

    def tend(self) -> None:
        """Starts missing engines, sends requests, detects hung ones."""
        with self._lock:
            dead, self._dead = self._dead, []
        for process in dead:
            process.bury()
        now = time.monotonic()
        with self._lock:
            for one in self.replicas:
                if one.process is None and not self._ending:
                    one.lives += 1
                    one.ready = one.doomed = one.was_joined = False
                    one.started_at = now
                    one.process = self._start(one.number, one.lives, self._heard)
                elif one.ready and not one.doomed:
                    self._fill(one)
                    oldest = min((request.at for request in one.in_flight.values()), default=now)
                    if now - oldest > HUNG_S:
                        names = ", ".join(one.in_flight)
                        self._give_up(one, f"requests {names} of engine {one.number}")
                elif one.process is not None and now - one.started_at > START_S:
                    self._give_up(one, f"engine {one.number} is not ready after {START_S:.0f} s")

    def _give_up(self, replica: Replica, what: str) -> None:
        process = replica.process
        assert process is not None
        replica.doomed = True
        process.where()
        count = len(replica.in_flight)
        self._report.fault("hung", f"{what}; its stacks are in {process.log}", count)
        time.sleep(1.0)  # while the process writes them
        process.kill()
        process.bury()
        replica.vacate()

    @property
    def is_ready(self) -> bool:
        return all(one.ready for one in self.replicas)

    def drain(self) -> None:
        """Finishes the requests in flight and those to be repeated; sends no new ones."""
        self._draining = True

    @property
    def is_idle(self) -> bool:
        with self._lock:
            return not (self._backlog or any(one.in_flight for one in self.replicas))

    def give_up_waiting(self) -> None:
        """Counts unanswered requests as hung."""
        with self._lock:
            flying = (request for one in self.replicas for request in one.in_flight.values())
            for request in [*self._backlog, *flying]:
                name = request.question.id
                self._report.fault("hung", f"request {name} was never answered")
            self._backlog.clear()

    def end(self, by_force: bool) -> None:
        """Ends all engines, orderly unless ``by_force``."""
        self._ending = self._draining = True
        threads = [
            threading.Thread(target=self._end, args=(one, one.process, by_force))
            for one in self.replicas
            if one.process is not None
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for process in self._dead:
            process.bury()
        self._sweep()

    def _end(self, replica: Replica, process: EngineProcess, by_force: bool) -> None:
        self._note_shared(process)
        replica.doomed = by_force or not replica.ready
        if replica.doomed:
            family = process.family()
            process.kill()
            process.bury(family)
        elif not process.end():
            self._report.fault("hung", f"{process.name} did not end orderly; {process.log}")
        replica.process = None

    # -- kills -----------------------------------------------------------------------------

    def kill(self, replica: Replica, which: str) -> None:
        """kill -9. Returns when the process and its workers have ended; requests in flight are
        repeated on the first free replica."""
        with self._lock:
            process = replica.process
            if process is None or not replica.ready or replica.doomed:
                return
            replica.doomed = True
        self._note_shared(process)
        family = process.family()
        process.kill(which)
        self._report.add("engine_kills")
        self._report.add(f"killed_{which}")
        process.bury(family)
        with self._lock:
            self._report.add("retried", len(replica.in_flight))
            self._backlog.extend(replica.in_flight.values())
            replica.vacate()
        self._sweep()

    def cancel(self, replica: Replica, dice: random.Random) -> None:
        """Aborts some of its requests, and sends others in their place."""
        with self._lock:
            process = replica.process
            if process is None or not replica.ready or replica.doomed:
                return
            for name in [name for name in replica.in_flight if dice.random() < 0.5]:
                del replica.in_flight[name]
                process.cancel(name)
                self._report.add("cancelled")
            self._fill(replica)

    def forget(self, replica: Replica) -> None:
        """Makes an engine preempt all that runs, and empty its device cache."""
        with self._lock:
            process = replica.process
            if process is not None and replica.ready and not replica.doomed:
                process.forget_device(running=True)
                self._report.add("device_resets")

    def _note_shared(self, process: EngineProcess) -> None:
        files = process.shared_files()
        with self._lock:
            self._shared |= files

    def _sweep(self) -> None:
        """Removes vLLM's leftovers in /dev/shm, except files of running engines."""
        with self._lock:
            living = [one.process for one in self.replicas if one.process is not None]
            in_use = {file for process in living for file in process.shared_files()}
            for file in [file for file in self._shared - in_use if file.exists()]:
                if file.name.startswith(_VLLM_NAMES):
                    self._report.add("vllm_shm_bytes", file.stat().st_size)
                    file.unlink(missing_ok=True)
            self._shared = {file for file in self._shared if file in in_use or file.exists()}

    def left_in_shared_memory(self) -> list[Path]:
        """After ``end``: files in /dev/shm that are not vLLM's own."""
        return sorted(self._shared)

    # -- under the lock --------------------------------------------------------------------

    def _fill(self, replica: Replica) -> None:
        assert replica.process is not None
        while len(replica.in_flight) < _WIDTH:
            if self._backlog:
                old = self._backlog.popleft()
                request = InFlight(old.question, old.turn, time.monotonic())
            elif self._draining:
                return
            else:
                turn = self._conversations.draw(self._dice)
                salt = self._dice.choice(_SALTS)
                length = self._dice.randint(1, len(turn.answer))
                question = Question(f"r{next(self._numbers)}", turn.prompt, length, salt)
                request = InFlight(question, turn, time.monotonic())
            replica.in_flight[request.question.id] = request
            replica.process.ask(request.question)

    # -- engines' threads ------------------------------------------------------------------

    def _heard(self, process: EngineProcess, line: Mapping[str, Any]) -> None:
        with self._lock:
            replica = next((one for one in self.replicas if one.process is process), None)
            if replica is None:
                return
            if "id" in line:
                self._judge(replica, Answer.read(line))
            elif "ready" in line:
                replica.ready = True
                self._report.add("engine_starts")
            elif "joined" in line:
                now = time.monotonic()
                if line["joined"] and replica.was_joined:
                    since = max(self._service.ready_at, replica.lost_at)
                    self._report.rejoined(now - since)
                elif not line["joined"]:
                    replica.lost_at = now
                replica.was_joined |= bool(line["joined"])
            elif replica.doomed or self._ending:
                return
            elif "error" in line:  # the process ends next
                self._report.fault("failed", f"{process.name}: {line['error']}; see {process.log}")
            elif "ended" in line:
                lost = max(1, len(replica.in_flight))
                what = f"engine {replica.number} ended unexpectedly: {line['ended']}"
                self._report.fault("failed", what, lost)
                self._dead.append(process)
                replica.vacate()

    def _judge(self, replica: Replica, answer: Answer) -> None:
        request = replica.in_flight.pop(answer.id, None)
        if request is None:
            return
        question = request.question
        self._report.add("requests")
        if fault := request.turn.fault(question, answer):
            where = (
                f"request {question.id} (prompt of {len(question.prompt)}, salt {question.salt}, "
                f"engine {replica.number} life {replica.lives}, from {dict(answer.sources)})"
            )
            self._report.fault(fault[0], f"{where}: {fault[1]}")
        for tier in ("device", "host", "disk", "computed"):
            self._report.add(f"{tier}_tokens", answer.sources.get(tier, 0))
        self._oracle.saved([BlockKey(bytes.fromhex(key)) for key in answer.keys])
        if not replica.doomed:
            self._fill(replica)
