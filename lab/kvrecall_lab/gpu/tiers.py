"""First tokens from every tier beside other connectors, and the rates that bound them; gaps between
the tokens of running answers while a long prefix is restored or stored."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from statistics import median

import httpx
import torch

from kvrecall.bench.bandwidth import measure_bandwidth
from kvrecall.bench.model import BLOCK, TAIL, Texts
from kvrecall.bench.pool import RawFile
from kvrecall.bench.report import latencies, timed
from kvrecall.errors import EngineError
from kvrecall.gpu_check import CheckError, Finding
from kvrecall.gpu_check.first_token import OURS, FirstTokens
from kvrecall.pool.arena import Arena
from kvrecall.processes.server import ServerProcess

_WRITE_S = 25.0
"""A prefix that the disk needs longer to write is not read from it."""

_STREAMS, _STREAMED = 4, 2048
"""Answers that are watched, and the most tokens of each."""


def every_tier(tokens: FirstTokens, connectors: Sequence[str], disk_bytes: int) -> Finding:
    """Also from disk. Figures also: GB/s of one copy to the device (``bus``), and of the disk, past
    the page cache, one call at a time; of recall from host memory, by what a hit there takes longer
    than one on the device, as a share of the bus. Raises CheckError as ``measure`` does."""
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    nbytes = min(1 << 30, tokens.device_bytes // 4)
    layers, block = tokens.shape.layers, tokens.shape.token_bytes * BLOCK
    bus = measure_bandwidth(nbytes // block, layers, block, device)["plain_copy_gb_s"]
    file = RawFile(tokens.folder / "raw", Arena.create(nbytes))
    write, read = (nbytes / timed(work) / 1e9 for work in (file.write, file.read))
    file.close()
    (tokens.folder / "raw").unlink()
    rates = {"bus_gb_s": bus, "disk_write_gb_s": round(write, 3), "disk_read_gb_s": round(read, 3)}
    tokens.say(f"{rates}", **rates)
    with suppress(CheckError):  # finding() raises it again, after all
        tokens.measure(connectors)
    _from_disk(tokens, disk_bytes, write)
    note, figures = tokens.finding()
    shares = {
        name: {
            context: round(_rate(tokens, context, times) / bus, 3) for context, times in of.items()
        }
        for name, of in tokens.seconds.items()
    }
    return f"{note}; of the bus: {shares}", {**figures, **rates, "share_of_bus": shares}


def _rate(tokens: FirstTokens, context: int, times: dict[str, list[float]]) -> float:
    """GB/s of recall from host memory."""
    apart = median(times["host"]) - median(times["device"])
    return context * tokens.shape.token_bytes / max(apart, 1e-6) / 1e9


def _from_disk(tokens: FirstTokens, disk_bytes: int, write_gb_s: float) -> None:
    """The same documents after a restart; as many as there is room for."""
    texts = Texts(1)
    other = texts.document(4 * BLOCK + TAIL)
    documents: dict[int, list[str]] = {}
    for context in tokens.contexts:
        nbytes = context * tokens.shape.token_bytes
        if (needed := nbytes / write_gb_s / 1e9) > _WRITE_S:
            tokens.say(f"{context} tokens: not from disk, which needs {needed:.0f} s to write them")
            continue
        room = disk_bytes // len(tokens.contexts) // nbytes
        count = max(1, min(tokens.repetitions, room))
        documents[context] = [texts.document(context + TAIL) for _ in range(count)]
    options = ["--disk-path", str(tokens.folder / "disk"), "--disk-size", str(disk_bytes)]
    with tokens.server(OURS, *options) as server:
        for document in (*(one for some in documents.values() for one in some), other):
            server.ask(document, 2)
            server.settle()
    with tokens.server(OURS, *options) as server:
        server.ask(other, 2)  # its audit is for all that was written before it
        for context, some in documents.items():
            for document in some:
                tokens.ask(server, OURS, context, "disk", document)
            tokens.say(f"{context} tokens: {tokens.seconds[OURS][context]}")


def measure_gaps(tokens: FirstTokens) -> Finding:
    """Seconds between the tokens of running answers: quiet, and while a prefix of the first of
    ``contexts`` tokens is restored from host memory, found on the device, or computed; the last
    also without a pool, which stores nothing. The device's cache has room for one such prefix, so
    that two in turn evict each other. Raises CheckError if one was not restored."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for name in (OURS, ""):
        with tokens.server(name) as server:
            found[name or "no pool"] = _phases(tokens, server, name)
    worst = {
        name: {phase: one["p99"] for phase, one in phases.items()} for name, phases in found.items()
    }
    return f"99 of 100 tokens come within s: {worst}", {"gaps_s": found}


def _phases(tokens: FirstTokens, server: ServerProcess, name: str) -> dict[str, dict[str, float]]:
    texts, context = Texts(), tokens.contexts[0]
    first, second, *others = (texts.document(context + TAIL) for _ in range(2 + tokens.repetitions))

    restored: list[int] = []

    def restore() -> None:
        for document in (first, second) * 2:
            recalled = server.ask(document, 2).recalled
            if recalled.get("host", 0) < context // 4:  # some may still be on the device
                raise CheckError(f"{context} tokens meant from host: {dict(recalled)}")
            restored.append(recalled["host"])

    for document in (first, second):
        server.ask(document, 2)
        server.settle()
    phases: dict[str, Callable[[], object]] = {"quiet": lambda: time.sleep(2.0)}
    if name == OURS:
        phases["host"] = restore
        phases["device"] = lambda: [server.ask(second, 2) for _ in range(4)]
    phases["computed"] = lambda: [server.ask(document, 2) for document in others]
    found = {}
    for phase, act in phases.items():
        with watched(server, texts) as gaps:
            act()
        found[phase] = {**latencies(gaps), "gaps": float(len(gaps))}
        found[phase] |= {"restored_tokens": float(sum(restored))} if phase == "host" else {}
        tokens.say(f"{name or 'no pool'}, {phase}: {found[phase]}", **found[phase])
    return found


@contextmanager
def watched(server: ServerProcess, texts: Texts) -> Iterator[list[float]]:
    """While the block runs, some answers do; at its end the list has the seconds between each of
    their tokens and the next. Raises EngineError if an answer ended before."""
    gaps: list[float] = []
    over, begun, early = threading.Event(), threading.Barrier(_STREAMS + 1), list[str]()

    def watch(prompt: str) -> None:
        parameters = {"max_new_tokens": _STREAMED, "ignore_eos": True}
        body = {"inputs": prompt, "parameters": parameters}
        times: list[float] = []
        url = f"{server.url}/generate_stream"
        with httpx.stream("POST", url, json=body, timeout=600) as reply:
            for _ in filter(lambda line: line.startswith("data:"), reply.iter_lines()):
                if not times:
                    begun.wait(600)
                times.append(time.perf_counter())
                if over.is_set():
                    break
            else:
                early.append(prompt)
        gaps.extend(after - before for before, after in pairwise(times))

    threads = [threading.Thread(target=watch, args=(texts.document(64),)) for _ in range(_STREAMS)]
    for thread in threads:
        thread.start()
    begun.wait(600)
    try:
        yield gaps
    finally:
        over.set()
        for thread in threads:
            thread.join()
    if early or not gaps:
        raise EngineError(f"{len(early)} of {_STREAMS} watched answers ended early")
