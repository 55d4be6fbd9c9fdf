"""The engines of a run: kept busy, judged, and replaced when they were killed."""

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
from kvrecall.lab.chaos.leftovers import clear_shared
from kvrecall.lab.chaos.library import Library, Turn
from kvrecall.lab.chaos.tally import Tally
from kvrecall.lab.engines.engine import START_S, Answer, EngineProcess, Question

HUNG_S = 120.0
"""A request under way for so long in an engine nobody killed counts as hung."""

_SALTS = (None, "tenant-a", "tenant-b")
_WIDTH = 4  # requests under way in an engine


@dataclass(frozen=True, slots=True)
class Asked:
    """A request under way."""

    question: Question
    turn: Turn
    at: float


@dataclass(eq=False, slots=True)
class Seat:
    """A place for an engine. ``process`` is None while none is there."""

    number: int
    process: EngineProcess | None = None
    ready: bool = False
    doomed: bool = False  # we killed it, or are about to
    started_at: float = 0.0
    was_joined: bool = False
    lost_at: float = 0.0  # when it last noticed that its service is gone
    lives: int = 0
    under_way: dict[str, Asked] = field(default_factory=dict)


MakeEngine = Callable[[int, int, Callable[[EngineProcess, Mapping[str, Any]], None]], EngineProcess]
"""Starts the engine of a seat (number, life, what to call for its lines)."""


class Crew:
    """All seats. Lines of engines are taken in by their readers' threads; ``tend`` is called
    every so often by the run's."""

    def __init__(
        self,
        seats: int,
        make: MakeEngine,
        library: Library,
        tally: Tally,
        dice: random.Random,
        saw: Callable[[list[BlockKey]], None],
        service_ready_at: Callable[[], float],
    ) -> None:
        self.seats = [Seat(number) for number in range(seats)]
        self._make = make
        self._library = library
        self._tally = tally
        self._dice = dice
        self._saw = saw
        self._service_ready_at = service_ready_at
        self._lock = threading.RLock()  # guards the seats and what follows
        self._backlog: deque[Asked] = deque()
        self._numbers = itertools.count()
        self._pausing = False
        self._ending = False
        self._shared: set[Path] = set()
        self._dead: list[EngineProcess] = []  # ended by themselves

    # -- the run's thread ------------------------------------------------------------------

    def tend(self) -> None:
        """Starts engines where none is, gives them work, looks for requests that hang."""
        with self._lock:
            dead, self._dead = self._dead, []
        for process in dead:
            process.bury()
        with self._lock:
            for seat in self.seats:
                if seat.process is None and not self._ending:
                    self._start(seat)
                elif seat.ready and not seat.doomed:
                    self._fill(seat)
                    self._watch(seat)
                elif seat.process is not None and time.monotonic() - seat.started_at > START_S:
                    self._give_up(
                        seat, f"engine {seat.number} did not start within {START_S:.0f} s"
                    )

    @property
    def is_ready(self) -> bool:
        return all(seat.ready for seat in self.seats)

    def drain(self) -> None:
        """No new questions; those under way and those to be asked again are finished."""
        self._pausing = True

    @property
    def is_idle(self) -> bool:
        with self._lock:
            return not (self._backlog or any(seat.under_way for seat in self.seats))

    def give_up_waiting(self) -> None:
        """What is not answered by now counts as hung."""
        with self._lock:
            for asked in [*self._backlog, *(a for s in self.seats for a in s.under_way.values())]:
                self._tally.fault("hung", f"request {asked.question.id} was never answered")
            self._backlog.clear()

    def end(self, by_force: bool) -> None:
        """Ends all engines, in order unless ``by_force``."""
        self._ending = self._pausing = True
        threads = [
            threading.Thread(target=self._end, args=(seat, by_force))
            for seat in self.seats
            if seat.process is not None
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for process in self._dead:
            process.bury()
        self._sweep()

    def _end(self, seat: Seat, by_force: bool) -> None:
        process = seat.process
        assert process is not None
        self._note_shared(process)
        seat.doomed = by_force or not seat.ready
        if seat.doomed:
            family = process.family()
            process.kill()
            process.bury(family)
        elif not process.end():
            self._tally.fault("hung", f"{process.name} did not end when told to; {process.log}")
        seat.process = None

    # -- kills -----------------------------------------------------------------------------

    def kill(self, seat: Seat, which: str) -> bool:
        """kill -9. Returns when the process and its workers are gone. False if there is none."""
        with self._lock:
            process = seat.process
            if process is None or not seat.ready or seat.doomed:
                return False
            seat.doomed = True
        self._note_shared(process)
        family = process.family()
        process.kill(which)
        self._tally.add("engine_kills")
        self._tally.add(f"killed_{which}")
        process.bury(family)
        self._vacate(seat)
        return True

    def _vacate(self, seat: Seat) -> None:
        """What was under way is asked again, of whoever has time first."""
        with self._lock:
            self._tally.add("retried", len(seat.under_way))
            self._backlog.extend(seat.under_way.values())
            seat.under_way.clear()
            seat.process, seat.ready = None, False
        self._sweep()

    def _note_shared(self, process: EngineProcess) -> None:
        files = process.shared_files()
        with self._lock:
            self._shared |= files

    def _sweep(self) -> None:
        """Removes what vLLM left in /dev/shm. Files of engines that live are not touched."""
        with self._lock:
            in_use = {
                file
                for s in self.seats
                if s.process is not None
                for file in s.process.shared_files()
            }
            removed, others = clear_shared(self._shared - in_use)
            self._shared = (self._shared & in_use) | set(others)
        self._tally.add("vllm_shm_bytes", removed)

    def left_in_shared_memory(self) -> list[Path]:
        """After ``end``: files in /dev/shm that are not vLLM's own."""
        return sorted(self._shared)

    # -- under the lock --------------------------------------------------------------------

    def _start(self, seat: Seat) -> None:
        seat.lives += 1
        seat.ready = seat.doomed = seat.was_joined = False
        seat.started_at = time.monotonic()
        seat.process = self._make(seat.number, seat.lives, self._heard)

    def _fill(self, seat: Seat) -> None:
        assert seat.process is not None
        while len(seat.under_way) < _WIDTH:
            if self._backlog:
                old = self._backlog.popleft()
                asked = Asked(old.question, old.turn, time.monotonic())
            elif self._pausing:
                return
            else:
                turn = self._library.draw(self._dice)
                salt = self._dice.choice(_SALTS)
                length = self._dice.randint(1, len(turn.answer))
                name = f"r{next(self._numbers)}"
                asked = Asked(Question(name, turn.prompt, length, salt), turn, time.monotonic())
            seat.under_way[asked.question.id] = asked
            seat.process.ask(asked.question)

    def _watch(self, seat: Seat) -> None:
        oldest = min((asked.at for asked in seat.under_way.values()), default=time.monotonic())
        if time.monotonic() - oldest > HUNG_S:
            names = ", ".join(seat.under_way)
            self._give_up(seat, f"requests {names} of engine {seat.number}, {HUNG_S:.0f} s")

    def _give_up(self, seat: Seat, what: str) -> None:
        process = seat.process
        assert process is not None
        seat.doomed = True
        process.where()
        self._tally.fault("hung", f"{what}; its stacks are in {process.log}", len(seat.under_way))
        time.sleep(1.0)  # it writes them
        process.kill()
        process.bury()
        seat.under_way.clear()
        seat.process, seat.ready = None, False

    # -- engines' threads ------------------------------------------------------------------

    def _heard(self, process: EngineProcess, line: Mapping[str, Any]) -> None:
        with self._lock:
            seat = next((s for s in self.seats if s.process is process), None)
            if seat is None:
                return
            if "id" in line:
                self._judge(seat, Answer.read(line))
            elif "ready" in line:
                seat.ready = True
                self._tally.add("engine_starts")
            elif "joined" in line:
                self._note_joined(seat, bool(line["joined"]))
            elif "ended" in line or "error" in line:
                self._ended(seat, line)

    def _judge(self, seat: Seat, answer: Answer) -> None:
        asked = seat.under_way.pop(answer.id, None)
        if asked is None:
            return
        expected = asked.turn.answer[: asked.question.max_tokens]
        self._tally.add("requests")
        if answer.finish not in ("length", "stop"):
            self._tally.fault("failed", f"request {answer.id} ended with {answer.finish!r}")
        elif answer.tokens != expected:
            self._tally.fault("wrong", _difference(seat, asked, answer, expected))
        for tier in ("device", "host", "disk", "computed"):
            self._tally.add(f"{tier}_tokens", answer.sources.get(tier, 0))
        self._saw([BlockKey(bytes.fromhex(key)) for key in answer.keys])
        if not seat.doomed:
            self._fill(seat)

    def _note_joined(self, seat: Seat, joined: bool) -> None:
        now = time.monotonic()
        if joined and seat.was_joined:
            self._tally.rejoined(now - max(self._service_ready_at(), seat.lost_at))
        elif not joined:
            seat.lost_at = now
        seat.was_joined |= joined

    def _ended(self, seat: Seat, line: Mapping[str, Any]) -> None:
        """The process says that it failed, or is gone."""
        if seat.doomed or self._ending:
            return
        if "error" in line:
            process = seat.process
            assert process is not None
            self._tally.fault("failed", f"{process.name}: {line['error']}; see {process.log}")
            return
        lost = max(1, len(seat.under_way))
        self._tally.fault("failed", f"engine {seat.number} ended by itself: {line['ended']}", lost)
        seat.under_way.clear()
        if seat.process is not None:
            self._dead.append(seat.process)
        seat.process, seat.ready = None, False


def _difference(seat: Seat, asked: Asked, answer: Answer, expected: tuple[int, ...]) -> str:
    return (
        f"request {answer.id} (prompt of {len(asked.question.prompt)}, salt "
        f"{asked.question.salt}, engine {seat.number} life {seat.lives}, from "
        f"{dict(answer.sources)}): {list(answer.tokens)} instead of {list(expected)}"
    )
