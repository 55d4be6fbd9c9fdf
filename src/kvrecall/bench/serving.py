"""``kvrecall bench chat``: one workload against several kinds of servers, one after
the other: no pool, each kind of pool."""

from __future__ import annotations

import contextlib
import json
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from kvrecall.bench.model import BenchModel
from kvrecall.bench.report import Columns, Report, Rows, Times, latencies, names_in, progress
from kvrecall.bench.workload import (
    ANSWER_TOKENS,
    Run,
    Workload,
    conversations,
    play,
)
from kvrecall.errors import EngineError, KvrecallError
from kvrecall.processes.server import ServerProcess
from kvrecall.processes.service import ServiceProcess

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
    "two": Deployment("two engines, a pool with half the memory each", servers(2, pool=HOST)),
    "service": Deployment("two engines on one pool service", _on_a_service),
}
"""By name, in the order they are played. The last two have two engines on the same cores."""


SOURCES = ("device", "host", "disk", "remote", "unspecified")
"""Where prompt tokens came from; ``unspecified``: what another project's connector brought."""

SERVED = {
    "none": "no cache at all",
    "device": "vLLM's prefix cache (device)",
    "host": "kvrecall: host",
    "finer": "kvrecall: host, hits in units of 16 tokens",
    "disk": "kvrecall: host and disk",
    "mooncake": "kvrecall: host and Mooncake Store",
    "lmcache": "LMCache's connector and server: host",
    "two": "kvrecall: two engines, a pool each",
    "service": "kvrecall: two engines, one pool service",
}
"""Deployments of the serving benchmarks in words."""

# -- commands -------------------------------------------------------------------------------

Variants = Annotated[str, typer.Option(help="Which servers, by name; default: all.")]
Budget = Annotated[
    float, typer.Option(min=0, help="Total seconds; servers for which no time is left are skipped.")
]


def measure_chat(
    sessions: Times = 32,
    turns: Times = 3,
    variants: Variants = "",
    budget: Budget = math.inf,
    deployments: Mapping[str, Deployment] = DEPLOYMENTS,
) -> Report:
    """Conversations and questions over long texts against servers with each kind of pool."""
    workload = conversations(sessions, turns)
    names = names_in(variants) or tuple(deployments)
    return measure_serving(workload, names, budget, deployments)


def measure_serving(
    workload: Workload,
    variants: Sequence[str],
    budget_s: float,
    deployments: Mapping[str, Deployment] = DEPLOYMENTS,
) -> Report:
    """Plays ``workload`` against every deployment and reports them side by side.

    A deployment whose servers do not start or fail a request, or that would presumably exceed
    ``budget_s`` seconds in total, is in the report with the reason. Raises EngineError if none
    could be measured or a name is unknown.
    """
    for name in variants:
        if name not in deployments:
            raise EngineError(f"there is no variant {name!r}; known: {', '.join(deployments)}")
    # smaller than other benchmarks': every kind of server has 120,000 tokens to compute
    model = BenchModel(hidden=512, layers=6, heads=8)
    longest = workload.longest_prompt + 2 * ANSWER_TOKENS * len(workload.sessions[0].turns) + 256
    least = 2 * longest * model.token_bytes
    unique = max(workload.unique_tokens(BLOCK) * model.token_bytes, least)
    figures: dict[str, Mapping[str, Any]] = {}
    absent: dict[str, str] = {}
    end, longest_s = time.monotonic() + budget_s, 0.0
    with tempfile.TemporaryDirectory(prefix="kvrecall-bench-") as folder:
        device_bytes = max(int(unique * SHARES["device"]), least)
        arguments = model.serve(Path(folder), longest, device_bytes, BLOCK)
        for name in variants:
            begin = time.monotonic()
            if figures and begin + longest_s > end:
                absent[name] = f"no time: {budget_s:.0f} seconds for all"
                continue
            progress(f"{name}: {deployments[name].story}")
            own = Path(folder) / name
            own.mkdir()
            disk_bytes = int(unique * SHARES["disk"]) + (64 << 20)
            sizes = Sizes(arguments, own, int(unique * SHARES["host"]), disk_bytes)
            try:
                figures[name] = _figures(_play(workload, deployments[name], sizes))
                longest_s = max(longest_s, time.monotonic() - begin)
            except (KvrecallError, OSError, httpx.HTTPError) as error:
                absent[name] = f"{type(error).__name__}: {error}"[-2000:]
                progress(f"without {name}: {error}")
    if not figures:
        raise EngineError(f"no variant could be measured: {absent}")
    return _report(workload, figures, absent, unique, deployments)


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
    deployments: Mapping[str, Deployment] = DEPLOYMENTS,
) -> Report:
    computed = (f"{one['computed_tokens']:,} ({name})" for name, one in figures.items())
    notes = (
        f"{workload.story}; {workload.prompt_tokens} prompt tokens in all, "
        f"{unique / 2**20:.0f} MiB of KV cache in blocks of {BLOCK} tokens; the device holds a "
        "quarter of it",
        f"prompt tokens computed: {', '.join(computed)}",
        *(f"{name}: {deployments[name].story}" for name in (*figures, *absent)),
        *(f"left out: {name}: {reason.splitlines()[0]}" for name, reason in absent.items()),
    )
    shown: dict[str, Any] = {
        "story": workload.story,
        "prompt_tokens": workload.prompt_tokens,
        "unique_bytes": unique,
        "block_tokens": BLOCK,
        "variants": figures,
        "absent": dict(absent),
    }
    return Report(workload.name, *serving_table(shown), shown, notes)


def serving_table(found: Mapping[str, Any]) -> tuple[Columns, Rows]:
    """Conversations, or a slice of a trace: a line per deployment."""
    rows = tuple(
        (
            SERVED.get(variant, variant),
            f"{one['seconds']:.0f}",
            f"{one['tokens_per_s']:,.0f}",
            f"{one['hit_rate']:.0%}",
            *(f"{one['ttft_s'][rank]:.2f}" for rank in ("p50", "p95", "p99")),
            f"{one['tpot_s']['p50'] * 1e3:.0f}",
        )
        for variant, one in found["variants"].items()
    )
    columns = ("served with", "s", "prompt tokens/s", "hits", "TTFT p50, s", "p95", "p99")
    return (*columns, "ms a token"), rows
