"""``kvrecall bench chat`` and ``replay``: one workload against several kinds of servers, one after
the other: no pool, each kind of pool, LMCache."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from kvrecall.errors import EngineError, KvrecallError
from kvrecall.lab.bench.model import BenchModel
from kvrecall.lab.bench.peers import PEERS
from kvrecall.lab.bench.report import Report, Times, latencies, names_in, progress
from kvrecall.lab.bench.tables import SOURCES, serving_table
from kvrecall.lab.bench.workload import (
    ANSWER_TOKENS,
    Run,
    Workload,
    conversations,
    play,
    slice_of,
)
from kvrecall.lab.engines.child import ChildProcess, server_environment
from kvrecall.lab.engines.server import ServerProcess
from kvrecall.lab.engines.service import ServiceProcess
from kvrecall.lab.masters import Master
from kvrecall.lab.ports import free_port
from kvrecall.lab.processes import as_child

BLOCK = 64
SHARES = {"device": 0.25, "host": 0.75, "disk": 4.0}
"""Sizes of the tiers as shares of the KV cache of all prompts."""

# -- deployments ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sizes:
    """Arguments of ``kvrecall serve`` without those of the pool, and the bytes each tier gets: the
    same for all deployments."""

    arguments: Sequence[str]
    folder: Path
    host_bytes: int
    disk_bytes: int


Servers = Callable[[Sizes], AbstractContextManager[Sequence[str]]]
"""Starts servers; gives their addresses."""


@dataclass(frozen=True, slots=True)
class Deployment:
    """A way to serve: its description, and how its servers are started."""

    story: str
    servers: Servers


def servers(
    count: int = 1,
    arguments: Sequence[str] = (),
    pool: Mapping[str, object] | None = None,
    environment: Mapping[str, str] | None = None,
) -> Servers:
    """``count`` servers, each with a pool of its own with settings ``pool``, where ``host_size``,
    ``disk_path`` and ``disk_size`` stand for its share of the sizes."""

    @contextlib.contextmanager
    def start(sizes: Sizes) -> Iterator[Sequence[str]]:
        with ExitStack() as stack:
            urls = []
            for number in range(count):
                words = [*sizes.arguments]
                if pool is not None:
                    share = {
                        "host_size": sizes.host_bytes // count,
                        "disk_path": str(sizes.folder / f"disk{number}"),
                        "disk_size": sizes.disk_bytes // count,
                    }
                    file = sizes.folder / f"pool{number}.json"
                    file.write_text(json.dumps({k: share.get(k, v) for k, v in pool.items()}))
                    words += ["--pool-config", str(file)]
                log = sizes.folder / f"server{number}.log"
                server = ServerProcess([*words, *arguments], log, progress, environment)
                urls.append(stack.enter_context(server).url)
            yield urls

    return start


@contextlib.contextmanager
def _on_a_service(sizes: Sizes) -> Iterator[Sequence[str]]:
    """Two servers on one pool service that has the memory of both."""
    with ServiceProcess(sizes.folder / "service", sizes.host_bytes) as service:
        pool = {"backend": "service", "socket": str(service.socket)}
        with servers(2, pool=pool)(sizes) as urls:
            yield urls


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
        server.wait_for_port(port, "LMCache's server")
        with servers(arguments=arguments, environment=environment)(sizes) as urls:
            yield urls
    finally:
        server.stop(30.0)


HOST: dict[str, object] = {"host_size": 0}
FINER: dict[str, object] = {**HOST, "match_unit": 16}
DISK: dict[str, object] = {"host_size": 0, "disk_path": "", "disk_size": 0}

DEPLOYMENTS = {
    "none": Deployment(
        "no pool, vLLM's prefix cache off",
        servers(arguments=("--no-pool", "--", "--no-enable-prefix-caching")),
    ),
    "device": Deployment(
        "no pool, vLLM's prefix cache on the device", servers(arguments=("--no-pool",))
    ),
    "host": Deployment("host memory below the device", servers(pool=HOST)),
    "disk": Deployment("host memory and disk below the device", servers(pool=DISK)),
    "finer": Deployment(
        "host memory below the device, and hits in units of 16 tokens", servers(pool=FINER)
    ),
    "mooncake": Deployment("host memory and a Mooncake Store on this host", _on_mooncake),
    "lmcache": Deployment("LMCache's multi-process connector, with the host's memory", _on_lmcache),
    "two": Deployment("two engines, a pool with half the memory each", servers(2, pool=HOST)),
    "service": Deployment("two engines on one pool service", _on_a_service),
}
"""By name, in the order they are played. The last two have two engines on the same cores."""


# -- commands -------------------------------------------------------------------------------

_ALL = ",".join(DEPLOYMENTS)
Variants = Annotated[str, typer.Option(help="Which servers, by name.")]
Budget = Annotated[
    float, typer.Option(min=0, help="Total seconds; servers for which no time is left are skipped.")
]


def measure_chat(
    sessions: Times = 32,
    turns: Times = 3,
    variants: Variants = _ALL,
    seed: Annotated[int, typer.Option()] = 0,
    block_size: Annotated[int, typer.Option(min=32, help="Tokens of a block.")] = BLOCK,
    budget: Budget = math.inf,
) -> Report:
    """Conversations and questions over long texts against servers with each kind of pool."""
    workload = conversations(sessions, turns, seed)
    return measure_serving(workload, names_in(variants), budget, block_size)


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
    return measure_serving(workload, names_in(variants), budget)


def measure_serving(
    workload: Workload, variants: Sequence[str], budget_s: float, block: int = BLOCK
) -> Report:
    """Plays ``workload`` against every deployment and reports them side by side.

    A deployment whose servers do not start or fail a request, or that would presumably exceed
    ``budget_s`` seconds in total, is in the report with the reason. Raises EngineError if none
    could be measured or a name is unknown.
    """
    for name in variants:
        if name not in DEPLOYMENTS:
            raise EngineError(f"there is no variant {name!r}; known: {', '.join(DEPLOYMENTS)}")
    # smaller than other benchmarks': every kind of server has 120,000 tokens to compute
    model = BenchModel(hidden=512, layers=6, heads=8)
    longest = workload.longest_prompt + 2 * ANSWER_TOKENS * len(workload.sessions[0].turns) + 256
    least = 2 * longest * model.token_bytes
    unique = max(workload.unique_tokens(block) * model.token_bytes, least)
    figures: dict[str, Mapping[str, Any]] = {}
    absent: dict[str, str] = {}
    end, longest_s = time.monotonic() + budget_s, 0.0
    with tempfile.TemporaryDirectory(prefix="kvrecall-bench-") as folder:
        device_bytes = max(int(unique * SHARES["device"]), least)
        arguments = model.serve(Path(folder), longest, device_bytes, block)
        for name in variants:
            begin = time.monotonic()
            if figures and begin + longest_s > end:
                absent[name] = f"no time: {budget_s:.0f} seconds for all"
                continue
            progress(f"{name}: {DEPLOYMENTS[name].story}")
            own = Path(folder) / name
            own.mkdir()
            disk_bytes = int(unique * SHARES["disk"]) + (64 << 20)
            sizes = Sizes(arguments, own, int(unique * SHARES["host"]), disk_bytes)
            try:
                figures[name] = _figures(_play(workload, DEPLOYMENTS[name], sizes))
                longest_s = max(longest_s, time.monotonic() - begin)
            except (KvrecallError, OSError, httpx.HTTPError) as error:
                absent[name] = f"{type(error).__name__}: {error}"[-2000:]
                progress(f"without {name}: {error}")
    if not figures:
        raise EngineError(f"no variant could be measured: {absent}")
    return _report(workload, figures, absent, unique, block)


def _play(workload: Workload, deployment: Deployment, sizes: Sizes) -> Run:
    """One deployment's run, after an uncounted request to each server."""
    total = sum(len(session.turns) for session in workload.sessions)

    def note(done: int) -> None:
        if done % max(1, total // 8) == 0:
            progress(f"  {done} of {total} requests")

    with deployment.servers(sizes) as urls:
        for url in urls:
            body = {"inputs": "warm up " * 40, "parameters": {"max_new_tokens": 4}}
            httpx.post(f"{url}/generate", json=body, timeout=300).raise_for_status()
        return play(workload, urls, note)


def _figures(run: Run) -> dict[str, object]:
    """A deployment's figures: seconds, tokens/s, hit rates as shares of prompt tokens."""
    samples = run.answers
    prompt = sum(sum(sample.recalled.values()) for sample in samples)
    hits = {s: sum(sample.recalled.get(s, 0) for sample in samples) for s in SOURCES}
    return {
        "requests": len(samples),
        "seconds": round(run.seconds, 2),
        "prompt_tokens": prompt,
        "computed_tokens": prompt - sum(hits.values()),
        "tokens_per_s": round(prompt / run.seconds, 1),
        "ttft_s": latencies([sample.ttft_s for sample in samples]),
        "tpot_s": latencies([sample.tpot_s for sample in samples]),
        "hit_rate": round(sum(hits.values()) / prompt, 4),
        "hit_rate_by_tier": {s: round(n / prompt, 4) for s, n in hits.items()},
    }


def _report(
    workload: Workload,
    figures: Mapping[str, Mapping[str, Any]],
    absent: Mapping[str, str],
    unique: int,
    block: int = BLOCK,
) -> Report:
    computed = (f"{one['computed_tokens']:,} ({name})" for name, one in figures.items())
    notes = (
        f"{workload.story}; {workload.prompt_tokens} prompt tokens in all, "
        f"{unique / 2**20:.0f} MiB of KV cache in blocks of {block} tokens; the device holds a "
        "quarter of it",
        f"prompt tokens computed: {', '.join(computed)}",
        *(f"{name}: {DEPLOYMENTS[name].story}" for name in (*figures, *absent)),
        *(f"left out: {name}: {reason.splitlines()[0]}" for name, reason in absent.items()),
    )
    shown: dict[str, Any] = {
        "story": workload.story,
        "prompt_tokens": workload.prompt_tokens,
        "unique_bytes": unique,
        "block_tokens": block,
        "variants": figures,
        "absent": dict(absent),
    }
    return Report(workload.name, *serving_table(shown), shown, notes)
