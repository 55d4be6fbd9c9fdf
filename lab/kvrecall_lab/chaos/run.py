"""One run: a pool service, engines on it, questions, faults, and the leak check at the end.

Only resources held by the run's own processes count as leaks, because the machine may be shared.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kvrecall.errors import KvrecallError, TierError
from kvrecall.pool.base import ArenaHandle
from kvrecall.pool.disk.folder import LOCK_NAME, own_bytes
from kvrecall.pool.disk.index import INDEX_NAME
from kvrecall.pool.service.admin import FolderAdmin, Verify
from kvrecall.processes.service import ServiceProcess
from kvrecall_lab.chaos.faults import INTERVALS, FaultInjector, stored_blocks
from kvrecall_lab.chaos.fleet import Fleet
from kvrecall_lab.chaos.oracle import (
    AMBIGUOUS,
    FAULTS,
    FIGURES,
    Conversations,
    DurabilityOracle,
    Report,
)
from kvrecall_lab.engines.engine import EngineProcess, Engines, OnLine
from kvrecall_lab.shapes.shapes import SHAPES, Shape, environment

_DRAIN_S = 240.0
_SAY_S = 5.0
_LENGTH = 2048  # tokens, longest sequence
_ARENA = "/memfd:kvrecall-arena"
_IDLE_S = 30.0

_DENSE = Shape(
    "dense",
    "Qwen3, Llama: full attention",
    "qwen3",
    {"hidden": 128, "layers": 3, "heads": 4, "kv_heads": 1, "max_position": _LENGTH, "seed": 7},
    {"block_size": 128},
    chunk=512,
    cache_bytes=44 * 196_608,
)

_STATE_BLOCK = 320  # tokens
_SEQUENCES = 4


def _served(shape: Shape) -> Shape:
    """A shape with room for longer sequences. Recurrent states are rounded where a step ends: there
    a prompt is computed in whole blocks, whatever else a step computes."""
    shape = replace(shape, cache_bytes=2 * shape.cache_bytes)
    if not _has_states(shape):
        return shape
    options = {**shape.options, "block_size": _STATE_BLOCK}
    return replace(shape, options=options, chunk=_STATE_BLOCK + _SEQUENCES)


def _has_states(shape: Shape) -> bool:
    return shape.boundary > 32


MODELS = {shape.name: shape for shape in (_DENSE, *map(_served, SHAPES))}
"""By name: the models of the engines; their device caches hold a few requests at a time."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of a run. The host tier and the device cache are small, so that blocks move
    constantly; the disk holds everything by default. Faults end after ``seconds``, or when
    ``enough`` is true of the report. ``model``: one of ``MODELS``;
    ``cache_bytes``: of its device cache; 0: as there."""

    seconds: float = 120.0
    seed: int = 0
    engines: int = 2
    conversations: int = 30
    turns: int = 4
    host_bytes: int = 24 << 20
    disk_bytes: int = 1 << 30
    model: str = "dense"
    cache_bytes: int = 0
    intervals: Mapping[str, float] = field(default_factory=lambda: INTERVALS)
    enough: Callable[[Report], bool] = lambda report: False


class ChaosRun:
    """Runs once. ``folder``: empty, with a short path (for sockets), removed by the caller."""

    def __init__(self, settings: Settings, folder: Path, progress: Callable[[str], None]) -> None:
        self._settings = settings
        shape = MODELS[settings.model]
        self._shape = replace(shape, cache_bytes=settings.cache_bytes or shape.cache_bytes)
        self._folder = folder
        self._progress = progress
        self.report = Report()
        self._tmp = folder / "tmp"
        self._engines = Engines(folder)
        self._reported = 0  # faults

    def run(self) -> Report:
        """Runs everything and leaves no process. Raises KvrecallError if it cannot start."""
        settings = self._settings
        self._tmp.mkdir(mode=0o700)
        self._shape.write(self._folder)
        service = ServiceProcess(self._folder / "s", settings.host_bytes, settings.disk_bytes)
        with ExitStack() as ending:
            ending.callback(self._engines.stop)
            ending.callback(service.kill)
            service.start()
            oracle = DurabilityOracle(service.socket)
            ending.callback(oracle.close)
            oracle.wait_joined()
            fleet = self._fleet(service, oracle, self._conversations())
            ending.callback(fleet.end, True)
            faults = FaultInjector(
                service, fleet, oracle, self.report, settings.seed, settings.intervals
            )
            ending.callback(faults.stop)
            self._answer(fleet, faults, service)
            self._check(fleet, oracle, service)
        return self.report

    def _conversations(self) -> Conversations:
        self._progress("reference: an engine without a pool answers all questions")
        settings = self._settings
        reference = self._engine(
            "reference", kv_cache_memory_bytes=16 * self._shape.cache_bytes,
            enable_prefix_caching=_has_states(self._shape),  # or vLLM cuts prompts elsewhere
            max_num_seqs=_SEQUENCES if _has_states(self._shape) else 32,
        )  # fmt: skip
        try:
            reference.wait_ready()
            dice = random.Random(f"library {settings.seed}")
            return Conversations.played(
                dice, settings.conversations, settings.turns, reference.answers, self._progress,
                AMBIGUOUS[self._shape.dtype],
            )  # fmt: skip
        finally:
            self._engines.end(reference)

    def _fleet(
        self, service: ServiceProcess, oracle: DurabilityOracle, conversations: Conversations
    ) -> Fleet:
        settings = self._settings
        dice = random.Random(f"settings {settings.seed}")

        def start(number: int, life: int, heard: OnLine) -> EngineProcess:
            pool = {
                "backend": "service",
                "socket": str(service.socket),
                "load_or_compute": dice.choice(("auto", "load", "load")),
                "async_write": dice.random() < 0.85,
            }
            return self._engine(f"engine-{number}-{life}", heard, pool=pool)

        load = random.Random(f"load {settings.seed}")
        return Fleet(settings.engines, start, conversations, self.report, load, oracle, service)

    def _engine(self, name: str, heard: OnLine | None = None, **options: Any) -> EngineProcess:
        arguments = self._shape.arguments(self._folder / self._shape.name, self._folder / "cache")
        setup: Mapping[str, Any] = {
            **arguments,
            "max_model_len": _LENGTH,
            "env": {**arguments["env"], "TMPDIR": str(self._tmp)},
            **options,
        }
        return self._engines.start(name, setup, on_line=heard, environment=environment())

    def _answer(self, fleet: Fleet, faults: FaultInjector, service: ServiceProcess) -> None:
        self._progress(f"{self._settings.engines} engines start")
        while not fleet.is_ready:
            fleet.tend()
            time.sleep(0.1)
            if self.report["failed"]:
                raise KvrecallError(f"an engine does not start: {self.report.faults[0]}")
        self._progress(f"{self._settings.seconds:.0f} seconds of faults begin")
        faults.start()
        self._tend(fleet, self._settings.seconds, lambda: self._settings.enough(self.report))
        faults.stop()
        self._progress("no more faults; finishing requests in flight")
        fleet.drain()
        if not service.is_alive:
            service.start()
        self._tend(fleet, _DRAIN_S, lambda: fleet.is_idle)
        if not fleet.is_idle:
            fleet.give_up_waiting()

    def _tend(self, fleet: Fleet, seconds: float, done: Callable[[], bool]) -> None:
        until = time.monotonic() + seconds
        said = time.monotonic()
        while time.monotonic() < until and not done():
            fleet.tend()
            self._report_faults()
            time.sleep(0.05)
            if time.monotonic() - said > _SAY_S:
                said = time.monotonic()
                counts = [f"{name} {self.report[name]}" for name in FIGURES]
                counts += [f"{n.upper()} {self.report[n]}" for n in FAULTS if self.report[n]]
                self._progress(f"{max(0.0, until - said):4.0f} s left: {', '.join(counts)}")

    def _report_faults(self) -> None:
        for fault in self.report.faults[self._reported :]:
            self._progress(f"FAULT {fault}")
            self._reported += 1

    def _check(self, fleet: Fleet, oracle: DurabilityOracle, service: ServiceProcess) -> None:
        """Ends everything, counts leaks, and re-reads every block on disk: only blocks that the run
        damaged may be damaged."""
        self._progress("ending everything; counting leaks")
        report = self.report
        fleet.end(by_force=False)
        oracle.close()
        report.add("durable_blocks", oracle.durable)
        report.add("disk_evictions", oracle.evictions)
        try:
            held, words = slots_held(service)
            if held:
                report.fault("leaked_bytes", f"the idle service counts {words}", held * 4096)
        except TierError as error:
            report.fault("failed", f"the idle service does not answer: {error}")
        if not service.stop():
            report.fault("hung", "the service did not end on SIGTERM")
        self._engines.stop()
        for arena, pid in arenas_held(oracle.arenas):
            report.fault("leaked_bytes", f"process {pid} holds an arena", arena.nbytes)
        for file in (*fleet.left_in_shared_memory(), *self._tmp.glob("kvrecall*")):
            report.fault("leaked_bytes", f"{file} is left", size_of(file))
        if (service.disk / INDEX_NAME).exists():
            before = {row.key for row in stored_blocks(service.disk)}
            with FolderAdmin(service.disk) as admin:
                verified = admin.do(Verify())
            report.add("blocks_verified", verified["checked"])
            report.add("blocks_found_damaged", verified["damaged"])
            after = {row.key for row in stored_blocks(service.disk)}
            if strange := oracle.undamaged(before - after):
                what = f"{len(strange)} blocks on disk are damaged, but not by the run"
                report.fault("lost_committed", what, len(strange))
            for file, nbytes in stray_files(service):
                report.fault("leaked_bytes", f"{file} belongs to nothing", nbytes)
            over = own_bytes(service.disk) - self._settings.disk_bytes
            if over > 0:
                report.fault("leaked_bytes", "the disk tier is larger than disk_size", over)
        self._report_faults()


def slots_held(service: ServiceProcess, seconds: float = _IDLE_S) -> tuple[int, str]:
    """Leases and reserved slots that an idle service still counts ``seconds`` after its last engine
    ended, as a number and in words. Raises TierError."""
    until = time.monotonic() + seconds
    while True:
        stats = service.look().stats
        held = stats.leases + stats.reserved
        if not held:
            return 0, ""
        if time.monotonic() > until:
            return held, f"{stats.leases} leases, {stats.reserved} slots being filled"
        time.sleep(0.2)


def arenas_held(arenas: Iterable[ArenaHandle]) -> list[tuple[ArenaHandle, int]]:
    """Arenas still in memory, each with a process that has it open or mapped."""
    wanted = {arena.inode: arena for arena in arenas}
    held = []
    for process in Path("/proc").glob("[0-9]*"):
        for inode in _arena_inodes(process):
            if inode in wanted:
                held.append((wanted.pop(inode), int(process.name)))
    return held


def _arena_inodes(process: Path) -> set[int]:
    """Of arenas open or mapped in a process, as far as it can be inspected."""
    found = set()
    with suppress(OSError):
        for name in os.listdir(process / "fd"):
            if os.readlink(process / "fd" / name).startswith(_ARENA):
                found.add(os.stat(process / "fd" / name).st_ino)
    with suppress(OSError):
        lines = (process / "maps").read_text(errors="replace").splitlines()
        found |= {int(line.split(None, 5)[4]) for line in lines if _ARENA in line}
    return found


def stray_files(service: ServiceProcess) -> list[tuple[Path, int]]:
    """Files of a stopped service, with their sizes, that are neither the run's own nor part of its
    disk tier: in its folder, and slabs without a row in the index."""
    own = {"pool.json", "service.log", "pool.sock.lock", service.disk.name}
    slabs = {block.slab for block in stored_blocks(service.disk)}
    strays = [file for file in service.folder.iterdir() if file.name not in own]
    strays += [
        file
        for file in service.disk.iterdir()
        if not file.name.startswith(INDEX_NAME) and file.name not in {LOCK_NAME, *slabs}
    ]
    return [(file, size_of(file)) for file in strays]


def size_of(file: Path) -> int:
    """Bytes of a leaked file; at least one, so that an empty one counts."""
    try:
        return max(1, file.stat().st_size)
    except FileNotFoundError:
        return 1
