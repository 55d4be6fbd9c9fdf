"""What goes wrong on purpose: three threads that hurt the service, the engines and the files."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from kvrecall.block import BlockKey
from kvrecall.errors import TierError
from kvrecall.lab.chaos.crew import Crew, Seat
from kvrecall.lab.chaos.damage import Vandal, stored
from kvrecall.lab.chaos.tally import Tally
from kvrecall.lab.chaos.witness import Witness
from kvrecall.lab.engines.service import ServiceProcess

_AIM_S = 4.0  # longest an engine is watched until it loads (or saves)


@dataclass(frozen=True, slots=True)
class Pace:
    """Mean seconds between troubles."""

    service_s: float = 9.0
    engine_s: float = 15.0
    damage_s: float = 4.0


class Troubles:
    """Starts the threads, and ends them. An exception in one is a fault of the run."""

    def __init__(
        self,
        service: ServiceProcess,
        crew: Crew,
        witness: Witness,
        tally: Tally,
        seed: int,
        pace: Pace,
    ) -> None:
        self._service = service
        self._crew = crew
        self._witness = witness
        self._tally = tally
        self._pace = pace
        self._dice = {
            name: random.Random(f"{name} {seed}") for name in ("service", "engine", "disk")
        }
        self._vandal = Vandal(service.disk, self._dice["disk"])
        self._stop = threading.Event()
        self._service_lock = threading.Lock()  # whoever starts, stops or damages the service
        acts = (self._hurt_service, self._hurt_engines, self._hurt_files)
        self._threads = [threading.Thread(target=self._guarded, args=(act,)) for act in acts]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Ends the threads; the service runs afterwards, unless it cannot be started."""
        self._stop.set()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    def _guarded(self, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:  # noqa: BLE001 - whatever it is, the run is not clean
            self._tally.fault("failed", f"{act.__name__}: {type(error).__name__}: {error}")

    # -- the service -----------------------------------------------------------------------

    def _hurt_service(self) -> None:
        dice = self._dice["service"]
        while not self._stop.wait(dice.uniform(0.5, 1.5) * self._pace.service_s):
            with self._service_lock:
                self._witness.look()
                what = dice.random()
                if what < 0.15:
                    self._tally.add("service_stalls")
                    self._service.stall(dice.uniform(0.05, 4.0), self._stop)
                elif what < 0.25:
                    self._tally.add("service_stops")
                    if not self._service.stop():
                        self._tally.fault("hung", "the service did not end on SIGTERM")
                    self._start_again(dice)
                else:
                    self._service.kill()
                    self._tally.add("service_kills")
                    self._start_again(dice)

    def _start_again(self, dice: random.Random) -> None:
        """Sometimes after damage to its files, or after a while; then asks for what was durable."""
        evictions = self._witness.evictions
        rows = {row.key for row in stored(self._service.disk, in_use=False)}
        if dice.random() < 0.4:
            self._strike(in_use=False)
        if dice.random() < 0.7:
            self._stop.wait(dice.uniform(0.1, 3.0))
        self._service.start()
        self._tally.add("service_starts")
        if not self._witness.wait_joined():
            self._tally.fault("hung", "the witness did not join the service again")
            return
        self._look_for_losses(rows, evictions)

    def _look_for_losses(self, rows: set[BlockKey], evictions: int) -> None:
        """Durable blocks must be there, unless they were evicted: in an earlier life of the
        service (there was no row any more when it died) or since, while engines go on saving."""
        missing = self._witness.missing()
        self._witness.look()
        gone = {key for key in missing if key not in rows} if self._witness.evictions else set()
        kept = [key for key in missing if key not in gone]
        self._witness.forgive(missing)
        if len(kept) > self._witness.evictions - evictions:
            had = sum(key in rows for key in kept)
            what = f"{len(kept)} durable blocks are gone, {had} of them had a row in the index"
            self._tally.fault("lost_committed", what, len(kept))

    # -- engines ---------------------------------------------------------------------------

    def _hurt_engines(self) -> None:
        dice = self._dice["engine"]
        while not self._stop.wait(dice.uniform(0.5, 1.5) * self._pace.engine_s):
            ready = [seat for seat in self._crew.seats if seat.ready and not seat.doomed]
            if not ready:
                continue
            seat = dice.choice(ready)
            aim = dice.choice(("loading", "saving", "any"))
            if aim != "any":
                self._await(seat, aim)
            self._crew.kill(seat, dice.choice(("engine", "engine", "group", "worker")))

    def _await(self, seat: Seat, aim: str) -> None:
        """Waits until the engine loads from the pool (or saves to it), as the service sees it."""
        process = seat.process
        until = time.monotonic() + _AIM_S
        while process is not None and time.monotonic() < until and not self._stop.is_set():
            try:
                clients = self._service.look(1.0).clients
            except TierError:
                time.sleep(0.05)
                continue
            for client in clients:
                busy = client.tickets if aim == "loading" else client.reserved
                if busy and client.pid == process.pid and not client.lost:
                    self._tally.add(f"killed_while_{aim}")
                    return
            time.sleep(0.002)

    # -- files -----------------------------------------------------------------------------

    def _hurt_files(self) -> None:
        dice = self._dice["disk"]
        while not self._stop.wait(dice.uniform(0.5, 1.5) * self._pace.damage_s):
            with self._service_lock:
                self._strike(in_use=True)

    def _strike(self, in_use: bool) -> None:
        blow = self._vandal.strike(in_use)
        if blow is not None:
            self._witness.excuse(blow.keys)
            self._tally.add("corruptions", blow.count)
