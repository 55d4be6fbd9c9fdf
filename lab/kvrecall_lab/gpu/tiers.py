"""First tokens from every tier beside other connectors, and the rates that bound them; gaps between
the tokens of running requests while a long prefix is restored or stored."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

import httpx
import torch

from kvrecall.bench.bandwidth import measure_bandwidth
from kvrecall.bench.model import BLOCK, TAIL, Texts
from kvrecall.bench.report import latencies, timed
from kvrecall.errors import EngineError
from kvrecall.gpu_check import CheckError, Finding
from kvrecall.gpu_check.first_token import CONNECTORS, OURS, FirstTokens
from kvrecall.pool.arena import Arena
from kvrecall.processes.server import ServerProcess

_WRITE_S = 25.0
"""A prefix that the disk needs longer to write is not read from it."""

_RAW_BYTES = 4 << 20
_STREAMS = 4
_STREAMED = 2048
"""The most tokens of an answer that is watched."""

NO_CONNECTOR = "none"


@dataclass
class EveryTier(FirstTokens):
    """Also from disk, after a restart."""

    disk_bytes: int = 40 << 30

    def measure(self, connectors: Sequence[str] = CONNECTORS) -> Finding:
        """Figures also: GB/s of one copy to the device (``bus``) and of the disk, past the page
        cache, one call at a time; of recall from host memory, by what a hit there takes longer than
        one on the device; and its share of the bus. Raises CheckError as the base does."""
        rates = self._rates()
        self.say("rates", **rates)
        super().measure(connectors)
        self._from_disk(rates["disk_write_gb_s"])
        note, figures = self.finding()
        recall: dict[str, dict[str, float]] = {}
        for name, of in self.seconds.items():
            recall[name] = {}
            for context, times in of.items():
                apart = median(times["host"]) - median(times["device"])
                rate = int(context) * self.shape.token_bytes / max(apart, 1e-6) / 1e9
                recall[name][context] = round(rate, 2)
        bus = rates["bus_gb_s"]
        shares = {
            name: {c: round(rate / bus, 3) for c, rate in of.items()} for name, of in recall.items()
        }
        return f"{note}; of the bus: {shares}", {**figures, **rates, "recall_gb_s": recall}

    def _rates(self) -> dict[str, float]:
        device = torch.accelerator.current_accelerator() or torch.device("cpu")
        nbytes = min(1 << 30, self.device_bytes // 4)
        layers, block = self.shape.layers, self.shape.token_bytes * BLOCK
        copies = measure_bandwidth(nbytes // block, layers, block, device)
        write, read = disk_rates(self.folder / "raw", nbytes)
        found = {"bus": copies["plain_copy_gb_s"], "disk_write": write, "disk_read": read}
        return {f"{name}_gb_s": round(rate, 3) for name, rate in found.items()}

    def _from_disk(self, write_gb_s: float) -> None:
        """The same documents after a restart; as many as there is room for."""
        texts = Texts(1)
        other = texts.document(4 * BLOCK + TAIL)
        documents: dict[int, list[str]] = {}
        for context in self.contexts:
            nbytes = context * self.shape.token_bytes
            if (needed := nbytes / write_gb_s / 1e9) > _WRITE_S:
                self.say(f"{context} tokens: not from disk, which needs {needed:.0f} s to write")
                continue
            room = self.disk_bytes // len(self.contexts) // nbytes
            count = max(1, min(self.repetitions, room))
            documents[context] = [texts.document(context + TAIL) for _ in range(count)]
        options = ["--disk-path", str(self.folder / "disk"), "--disk-size", str(self.disk_bytes)]
        self.say("with a disk: starting")
        with self.server(OURS, *options) as server:
            server.ask(other, 2)
            for document in (one for some in documents.values() for one in some):
                server.ask(document, 2)
                server.settle()
        with self.server(OURS, *options) as server:
            server.ask(other, 2)  # the first hit after a start is audited
            for context, some in documents.items():
                for document in some:
                    self.ask(server, OURS, context, "disk", document)
                self.say(f"{context} tokens from disk", **self.seconds[OURS][str(context)])


def disk_rates(path: Path, nbytes: int) -> tuple[float, float]:
    """GB/s of writing and of reading a file of ``nbytes``, a call after the other, past the page
    cache where the file system allows. Removes the file."""
    memory = Arena.create(nbytes).memory[:nbytes]
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    try:
        file = os.open(path, flags | os.O_DIRECT, 0o600)
    except OSError:
        file = os.open(path, flags, 0o600)
    steps = [(memory[at : at + _RAW_BYTES], at) for at in range(0, nbytes, _RAW_BYTES)]

    def each(call: Callable[[int, list[memoryview], int], int]) -> Callable[[], None]:
        def run() -> None:
            for view, at in steps:
                call(file, [view], at)
            os.fdatasync(file)

        return run

    try:
        write, read = (nbytes / timed(each(call)) / 1e9 for call in (os.pwritev, os.preadv))
    finally:
        os.close(file)
        path.unlink()
    return write, read


# -- between tokens ---------------------------------------------------------------------------


@dataclass
class Gaps(FirstTokens):
    """Seconds between the tokens of running answers: quiet, and while a prefix of the first of
    ``contexts`` tokens is computed, found on the device, or restored from host memory. The device's
    cache has room for one such prefix, so that two in turn evict each other. Without a pool the
    same computing stores nothing."""

    def measure(self, connectors: Sequence[str] = (OURS, NO_CONNECTOR)) -> Finding:
        """Raises CheckError if a prefix was not restored from host memory."""
        self.shape.write(self.folder / "model", self.contexts[0] + 1024, "llama", weights=False)
        found: dict[str, dict[str, dict[str, float]]] = {}
        for name in connectors:
            self.say(f"{name}: starting")
            with self.server(name) as server:
                found[name] = self._phases(server, name)
        if self.elsewhere:
            raise CheckError("; ".join(self.elsewhere))
        note = "; ".join(
            f"{name}: "
            + ", ".join(f"{phase} {one['p99'] * 1e3:.1f} ms" for phase, one in of.items())
            for name, of in found.items()
        )
        return f"99 of 100 tokens come within, {note}", {"gaps_s": found}

    def _phases(self, server: ServerProcess, name: str) -> dict[str, dict[str, float]]:
        texts, context = Texts(), self.contexts[0]
        documents = [texts.document(context + TAIL) for _ in range(2 + self.repetitions)]
        for document in documents[:2]:
            server.ask(document, 2)
            server.settle()
        phases: dict[str, Callable[[], object]] = {
            "quiet": lambda: time.sleep(1.0 + 2.0 * (context > 4096))
        }
        if name == OURS:
            phases["host"] = lambda: self._restore(server, documents[:2])
            phases["device"] = lambda: [server.ask(documents[1], 2) for _ in range(4)]
        phases["computed"] = lambda: [server.ask(one, 2) for one in documents[2:]]
        found = {}
        for phase, act in phases.items():
            with watched(server, texts) as gaps:
                act()
            found[phase] = {**latencies(gaps), "gaps": float(len(gaps))}
            self.say(f"{name}, {phase}", **found[phase])
        return found

    def _restore(self, server: ServerProcess, documents: Sequence[str]) -> None:
        for document in (*documents, *documents):
            answer = server.ask(document, 2)
            if answer.recalled.get("host", 0) < self.contexts[0] // 2:
                self.elsewhere.append(f"meant from host: {dict(answer.recalled)}")


@contextmanager
def watched(server: ServerProcess, texts: Texts) -> Iterator[list[float]]:
    """While the block runs, some answers do; at its end the list has the seconds between each of
    their tokens and the next. Raises EngineError if one ended, so that nothing was watched."""
    gaps: list[float] = []
    over, begun, early = threading.Event(), threading.Barrier(_STREAMS + 1), list[str]()

    def watch(prompt: str) -> None:
        parameters = {"max_new_tokens": _STREAMED, "ignore_eos": True}
        body = {"inputs": prompt, "parameters": parameters}
        times: list[float] = []
        with httpx.stream("POST", f"{server.url}/generate_stream", json=body, timeout=600) as reply:
            for line in reply.iter_lines():
                if not line.startswith("data:"):
                    continue
                if not times:
                    begun.wait(600)
                times.append(time.perf_counter())
                if over.is_set():
                    break
            else:
                early.append(prompt[:8])
        gaps.extend(after - before for before, after in pairwise(times))

    threads = [
        threading.Thread(target=watch, args=(texts.document(64),), name="watch")
        for _ in range(_STREAMS)
    ]
    for thread in threads:
        thread.start()
    begun.wait(600)
    try:
        yield gaps
    finally:
        over.set()
        for thread in threads:
            thread.join()
    if early or len(gaps) < 10:
        raise EngineError(f"{len(early)} of {_STREAMS} answers ended early; {len(gaps)} gaps seen")
