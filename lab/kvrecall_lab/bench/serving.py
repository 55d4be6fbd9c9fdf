"""Deployments of ``bench chat`` that need other projects, and ``replay``: a recorded trace."""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from kvrecall.bench import serving
from kvrecall.bench.model import Texts
from kvrecall.bench.report import Report, Times, names_in
from kvrecall.bench.serving import (
    BLOCK,
    Budget,
    Deployment,
    Sizes,
    Variants,
    measure_serving,
    servers,
)
from kvrecall.bench.workload import Conversation, Turn, Workload, conversations
from kvrecall.errors import EngineError
from kvrecall.processes.child import ChildProcess, server_environment
from kvrecall.processes.command import as_child
from kvrecall.processes.master import Master
from kvrecall.processes.ports import free_port
from kvrecall.simulate.trace import read_trace
from kvrecall_lab.bench.peers import PEERS
from kvrecall_lab.variants import thinned


@contextlib.contextmanager
def _on_mooncake(sizes: Sizes) -> Iterator[Sequence[str]]:
    """One server with host memory, and a Mooncake Store with as many bytes of memory as the
    disk."""
    master = Master(sizes.folder / "master.log")
    try:
        master.start()
    except OSError as error:
        raise EngineError(f"Mooncake's master cannot be started: {error}") from error
    remote = {"kind": "mooncake", **master.options(sizes.disk_bytes)}
    try:
        with servers(pool={"host_size": 0, "remote": remote})(sizes) as urls:
            yield urls
    finally:
        master.kill()


@contextlib.contextmanager
def _on_lmcache(sizes: Sizes) -> Iterator[Sequence[str]]:
    """One server with LMCache's multi-process connector instead of kvrecall's, on LMCache's server,
    which has the host's memory and no disk. Raises EngineError without LMCache."""
    environment = server_environment()
    folders = [Path(p) for p in (*sys.path, str(PEERS)) if (Path(p) / "lmcache").is_dir()]
    if not folders:
        raise EngineError("LMCache is not installed")
    paths = [*filter(None, [environment.get("PYTHONPATH")]), str(folders[0])]
    environment |= {
        "PYTHONPATH": os.pathsep.join(paths),
        "LMCACHE_TRACK_USAGE": "false",
        "LMCACHE_LOG_LEVEL": "WARNING",
    }
    port, http_port = free_port(), free_port()
    command = [sys.executable, "-m", "lmcache.cli.main", "server", "--host", "127.0.0.1"]
    command += ["--port", str(port), "--http-host", "127.0.0.1", "--http-port", str(http_port)]
    command += ["--l1-size-gb", f"{sizes.host_bytes / 2**30:.3f}", "--eviction-policy", "LRU"]
    command += ["--chunk-size", str(BLOCK), "--disable-metrics"]
    command += ["--supported-transfer-mode", "engine_driven"]
    connector = {
        "kv_connector": "LMCacheMPConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "lmcache.mp.host": "tcp://127.0.0.1",
            "lmcache.mp.port": port,
        },
    }
    arguments = ["--no-pool", "--", "--kv-transfer-config", json.dumps(connector)]
    server = ChildProcess(sizes.folder / "lmcache.log")
    try:
        server.launch(as_child(*command), environment)
        _await_port(server, port)
        with servers(arguments=arguments, environment=environment)(sizes) as urls:
            yield urls
    finally:
        server.stop(30.0)


def _await_port(server: ChildProcess, port: int) -> None:
    """Waits until LMCache's server listens. Raises EngineError if it ends or times out."""
    end = time.monotonic() + 60.0
    while time.monotonic() < end and server.is_alive:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise EngineError(f"LMCache's server is not ready:\n{server.log_tail()}")


DEPLOYMENTS: Mapping[str, Deployment] = {
    **serving.DEPLOYMENTS,
    "mooncake": Deployment("host memory and a Mooncake Store on this host", _on_mooncake),
    "lmcache": Deployment("LMCache's multi-process connector, with the host's memory", _on_lmcache),
}


def measure_chat(
    sessions: Times = 32,
    turns: Times = 3,
    variants: Variants = "",
    budget: Budget = math.inf,
) -> Report:
    """The product's ``bench chat``, with these deployments, too."""
    workload = conversations(sessions, turns)
    names = names_in(variants) or tuple(DEPLOYMENTS)
    return measure_serving(workload, names, budget, DEPLOYMENTS)


def measure_replay(
    trace: Annotated[Path, typer.Argument(help="A trace in Mooncake's format.")],
    requests: Annotated[int, typer.Option(min=2, help="How many, from its beginning.")] = 100,
    block_tokens: Annotated[int, typer.Option(min=1, help="Tokens for a block of 512.")] = 32,
    seconds: Annotated[float, typer.Option(min=0, help="From first to last arrival.")] = 60.0,
    every: Annotated[int, typer.Option(min=1, help="Play one of this many sessions.")] = 12,
    variants: Variants = "device,host,disk",
    budget: Budget = math.inf,
) -> Report:
    """A slice of a recorded trace, scaled down, against live servers."""
    workload = slice_of(trace, requests, block_tokens, seconds, every)
    return measure_serving(workload, names_in(variants), budget, DEPLOYMENTS)


def slice_of(
    trace: Path, requests: int, block_tokens: int, seconds: float, every: int = 1
) -> Workload:
    """The first ``requests`` requests of one session in ``every`` of a trace, scaled down for the
    machine.

    Sampling sessions keeps their turns, which are thousands of requests apart in the whole trace.
    A block of the trace (512 tokens) becomes ``block_tokens`` tokens, and the requests span
    ``seconds``. Shared prefixes are preserved. Raises TraceError.
    """
    whole = read_trace(trace)
    slice_ = (thinned(whole, every) if every > 1 else whole).requests[:requests]
    first, last = slice_[0].now, slice_[-1].now
    scale = seconds / (last - first) if last > first else 0.0
    bodies: dict[bytes, str] = {}
    made = []
    for request in slice_:
        for key in request.chain:
            if key not in bodies:
                bodies[key] = Texts(int.from_bytes(key, "little")).document(block_tokens)
        prompt = "".join(bodies[key] for key in request.chain)
        made.append(Conversation((request.now - first) * scale, prompt, (Turn(0.0, "\nAnswer:"),)))
    sessions = "all sessions" if every == 1 else f"one session in {every}"
    story = (
        f"the first {len(made)} requests of {sessions} of {trace.name}, blocks of 512 "
        f"tokens made {block_tokens}, {last - first:.0f} s made {seconds:.0f} s"
    )
    return Workload("replay", story, tuple(made))
