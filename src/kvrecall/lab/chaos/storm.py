"""One run: a service, engines on it, questions, troubles, and the reckoning."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvrecall.errors import KvrecallError, TierError
from kvrecall.lab.chaos import leftovers
from kvrecall.lab.chaos.crew import Crew
from kvrecall.lab.chaos.damage import stored
from kvrecall.lab.chaos.library import Library
from kvrecall.lab.chaos.tally import FAULTS, FIGURES, Tally
from kvrecall.lab.chaos.troubles import Pace, Troubles
from kvrecall.lab.chaos.witness import Witness
from kvrecall.lab.engines.engine import EngineProcess
from kvrecall.lab.engines.service import ServiceProcess
from kvrecall.lab.models import write_model
from kvrecall.pool.disk.index import INDEX_NAME
from kvrecall.pool.service.admin import FolderAdmin, Verify

Progress = Callable[[str], None]

_DRAIN_S = 240.0
_SAY_S = 5.0
_MODEL = {"hidden": 128, "layers": 3, "heads": 4, "kv_heads": 1, "dtype": "float32"}
_LENGTH = 2048  # tokens, longest sequence
_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # engines share the cores; so small a model needs one
    "OMP_NUM_THREADS": "1",
}


@dataclass(frozen=True, slots=True)
class Scenery:
    """What a run is made of. The host tier and the device cache are small, so that blocks move
    all the time; the disk holds everything unless it is made small, too."""

    seconds: float = 120.0
    seed: int = 0
    engines: int = 2
    conversations: int = 30
    turns: int = 4
    host_bytes: int = 24 << 20
    disk_bytes: int = 1 << 30
    device_blocks: int = 44
    pace: Pace = field(default_factory=Pace)


class Storm:
    """Runs once. ``folder`` is empty, short (it holds sockets) and removed by the caller."""

    def __init__(self, scenery: Scenery, folder: Path, progress: Progress) -> None:
        self._scenery = scenery
        self._folder = folder
        self._progress = progress
        self.tally = Tally()
        self._model = folder / "model"
        self._tmp = folder / "tmp"
        self._dice = random.Random(f"load {scenery.seed}")
        self._started: list[EngineProcess] = []
        self._told = 0  # faults

    def run(self) -> Tally:
        """Everything; whatever happens, no process is left. Raises KvrecallError if it cannot
        start."""
        scenery = self._scenery
        self._tmp.mkdir(mode=0o700)
        write_model(self._model, "qwen3", max_position=_LENGTH, seed=7, **_MODEL)  # type: ignore[arg-type]
        service = ServiceProcess(self._folder / "s", scenery.host_bytes, scenery.disk_bytes)
        with ExitStack() as ending:
            ending.callback(self._no_process_left)
            ending.callback(service.kill)
            service.start()
            witness = Witness(service.socket)
            ending.callback(witness.settle)
            witness.wait_joined()
            crew = self._crew(service, witness, self._library())
            ending.callback(crew.end, True)
            troubles = Troubles(service, crew, witness, self.tally, scenery.seed, scenery.pace)
            ending.callback(troubles.stop)
            self._play(crew, troubles, service)
            self._reckon(crew, witness, service)
        return self.tally

    # -- the play --------------------------------------------------------------------------

    def _library(self) -> Library:
        scenery = self._scenery
        self._progress("reference: an engine without a pool answers everything")
        setup = self._setup({"enable_prefix_caching": False, "max_num_seqs": 32})
        reference = self._engine("reference", setup, None)
        try:
            reference.wait_ready()
            dice = random.Random(f"library {scenery.seed}")
            return Library.written(
                dice, scenery.conversations, scenery.turns, reference.answers, self._progress
            )
        finally:
            reference.end()

    def _crew(self, service: ServiceProcess, witness: Witness, library: Library) -> Crew:
        dice = random.Random(f"settings {self._scenery.seed}")

        def make(
            seat: int, life: int, heard: Callable[[EngineProcess, Mapping[str, Any]], None]
        ) -> EngineProcess:
            pool = {
                "backend": "service",
                "socket": str(service.socket),
                "load_or_compute": dice.choice(("auto", "load", "load")),
                "async_write": dice.random() < 0.85,
            }
            setup = {
                "pool": pool,
                "max_num_seqs": 4,
                "num_gpu_blocks_override": self._scenery.device_blocks,
            }
            return self._engine(f"engine-{seat}-{life}", self._setup(setup), heard)

        return Crew(
            self._scenery.engines,
            make,
            library,
            self.tally,
            self._dice,
            witness.saw,
            lambda: service.ready_at,
        )

    def _setup(self, more: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "model": str(self._model),
            "max_model_len": _LENGTH,
            "dtype": "float32",  # vLLM would make it bfloat16, which drifts with the batch
            "max_num_batched_tokens": 512,
            "env": {"TMPDIR": str(self._tmp), **_ENVIRONMENT},
            **more,
        }

    def _engine(
        self,
        name: str,
        setup: Mapping[str, Any],
        heard: Callable[[EngineProcess, Mapping[str, Any]], None] | None,
    ) -> EngineProcess:
        process = EngineProcess(name, setup, self._folder / f"{name}.log", heard)
        self._started.append(process)
        return process

    def _play(self, crew: Crew, troubles: Troubles, service: ServiceProcess) -> None:
        self._progress(f"{self._scenery.engines} engines start")
        while not crew.is_ready:
            crew.tend()
            time.sleep(0.1)
            if self.tally["failed"]:
                raise KvrecallError(f"an engine does not start: {self.tally.faults[0]}")
        self._progress(f"{self._scenery.seconds:.0f} seconds of trouble begin")
        troubles.start()
        self._turn_over(crew, self._scenery.seconds, lambda: False)
        troubles.stop()
        self._progress("no more trouble; what is under way is finished")
        crew.drain()
        if not service.is_alive:
            service.start()
        self._turn_over(crew, _DRAIN_S, lambda: crew.is_idle)
        if not crew.is_idle:
            crew.give_up_waiting()

    def _turn_over(self, crew: Crew, seconds: float, done: Callable[[], bool]) -> None:
        until = time.monotonic() + seconds
        said = time.monotonic()
        while time.monotonic() < until and not done():
            crew.tend()
            self._tell_faults()
            time.sleep(0.05)
            if time.monotonic() - said > _SAY_S:
                said = time.monotonic()
                counts = [f"{name} {self.tally[name]}" for name in FIGURES]
                counts += [
                    f"{name.upper()} {self.tally[name]}" for name in FAULTS if self.tally[name]
                ]
                self._progress(f"{max(0.0, until - said):4.0f} s left: {', '.join(counts)}")

    def _tell_faults(self) -> None:
        """Says what must not have happened, when it is known."""
        for fault in self.tally.faults[self._told :]:
            self._progress(f"FAULT {fault}")
            self._told += 1

    # -- the reckoning ---------------------------------------------------------------------

    def _reckon(self, crew: Crew, witness: Witness, service: ServiceProcess) -> None:
        self._progress("everything ends; what is left is counted")
        crew.end(by_force=False)
        witness.settle()
        tally = self.tally
        tally.add("durable_blocks", witness.durable)
        tally.add("disk_evictions", witness.evictions)
        self._count_slots(service)
        if not service.stop():
            tally.fault("hung", "the service did not end on SIGTERM")
        self._no_process_left()
        for arena, pid in leftovers.arenas_held(witness.arenas):
            tally.fault("leaked_bytes", f"process {pid} holds an arena", arena.nbytes)
        for file in crew.left_in_shared_memory():
            tally.fault("leaked_bytes", f"{file} is left", max(1, file.stat().st_size))
        for file in self._tmp.glob("kvrecall*"):
            tally.fault("leaked_bytes", f"{file} is left", max(1, file.stat().st_size))
        self._check_disk(service, witness)
        self._tell_faults()

    def _count_slots(self, service: ServiceProcess) -> None:
        try:
            held, who = leftovers.slots_held(service)
        except TierError as error:
            self.tally.fault("failed", f"the idle service does not answer: {error}")
            return
        if held:
            self.tally.fault("leaked_bytes", f"the idle service counts {who}", held * 4096)

    def _check_disk(self, service: ServiceProcess, witness: Witness) -> None:
        """Re-reads every block on disk: the damaged must be those we damaged."""
        if not (service.disk / INDEX_NAME).exists():
            return
        before = {row.key for row in stored(service.disk, in_use=False)}
        with FolderAdmin(service.disk) as admin:
            verified = admin.do(Verify())
        self.tally.add("blocks_verified", verified.checked)
        self.tally.add("blocks_found_damaged", verified.damaged)
        after = {row.key for row in stored(service.disk, in_use=False)}
        strange = witness.unexcused(before - after)
        if strange:
            what = f"{len(strange)} blocks on disk are damaged, and not by us"
            self.tally.fault("lost_committed", what, len(strange))
        for file, nbytes in leftovers.strays(service):
            self.tally.fault("leaked_bytes", f"{file} belongs to nothing", nbytes)
        over = leftovers.over_the_limit(service, self._scenery.disk_bytes)
        if over:
            self.tally.fault("leaked_bytes", "the disk tier is larger than disk_size", over)

    def _no_process_left(self) -> None:
        """Forces the end of engines that are still there, however the run ended."""
        for process in self._started:
            if process.is_alive:
                process.kill()
                process.bury()
