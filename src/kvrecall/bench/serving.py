"""``kvrecall bench chat``: conversations with several kinds of servers, one after the other: no
pool, each kind of pool."""

from __future__ import annotations

import contextlib
import json
import math
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from kvrecall.bench.model import BenchModel, Texts
from kvrecall.bench.report import Report, Times, latencies, names_in, progress
from kvrecall.errors import EngineError, KvrecallError
from kvrecall.processes.server import Answer, ServerProcess, generate
from kvrecall.processes.service import ServiceProcess

ANSWER_TOKENS = 24
REQUEST_TIMEOUT_S = 900.0
_SYSTEM_TOKENS = 256
BLOCK = 64
SHARES = {"device": 0.25, "host": 0.75, "disk": 4.0}
"""Sizes of the tiers as shares of the KV cache of all prompts."""

# -- conversations --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation: its prompt begins with ``opening``; each turn repeats all before it.
    ``turns``: seconds after the last answer (or the session's start), and the user's text."""

    start_s: float
    opening: str
    turns: tuple[tuple[float, str], ...]


@dataclass(frozen=True, slots=True)
class Workload:
    """Concurrent sessions, with a description."""

    story: str
    sessions: tuple[Conversation, ...]

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts, a byte each, answers not counted."""
        total = 0
        for session in self.sessions:
            length = len(session.opening)
            for _, question in session.turns:
                length += len(question)
                total += length
        return total

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt, with room for the answers before it."""
        return max(
            len(session.opening) + sum(len(text) + ANSWER_TOKENS for _, text in session.turns)
            for session in self.sessions
        )

    def unique_tokens(self, block: int) -> int:
        """Tokens that a pool needs to keep everything: common prefixes count once."""
        prefixes: set[int] = set()
        answers = 0
        for session in self.sessions:
            text = session.opening + "".join(question for _, question in session.turns)
            prefixes.update(hash(text[:end]) for end in range(block, len(text) + 1, block))
            answers += ANSWER_TOKENS * len(session.turns)
        return block * len(prefixes) + answers


def conversations(sessions: int, turns: int) -> Workload:
    """Chats and document questions, one in four over a long text, under one system prompt.

    Lengths and think times are drawn, always the same: openings of 128 to 512 tokens, long texts of
    1,536 to 3,072, questions of 32 to 128, pauses of 1 to 6 seconds (exponential).
    """
    draw, texts = random.Random(0), Texts()
    system = texts.document(_SYSTEM_TOKENS)
    made = []
    for number in range(sessions):
        low, high = (1536, 3072) if number % 4 == 0 else (128, 512)
        opening = system + texts.document(draw.randint(low, high))
        start_s = draw.uniform(0, 10)
        said = tuple(
            (min(6.0, 1 + draw.expovariate(0.5)), texts.document(draw.randint(32, 128)))
            for _ in range(turns)
        )
        made.append(Conversation(start_s, opening, said))
    story = f"{sessions} sessions of {turns} turns, one in four over a long text"
    return Workload(story, tuple(made))


# -- clients --------------------------------------------------------------------------------


def play(
    workload: Workload,
    urls: Sequence[str],
    note: Callable[[int], None],
    ask: Callable[..., Answer] = generate,
) -> tuple[list[Answer], float]:
    """Runs all sessions at once. Each turn goes to a random one of ``urls``. Returns all answers,
    and the seconds from the first request to the last token.

    Calls ``note`` after each request with the number done. ``ask``: as ``generate``. Raises
    EngineError if a request fails.
    """
    answers: list[Answer] = []
    failed = threading.Event()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)

    def converse(number: int, session: Conversation) -> None:
        draw = random.Random(number)
        prompt = session.opening
        failed.wait(session.start_s)
        for think_s, question in session.turns:
            if failed.wait(think_s):
                return
            prompt += question
            url = draw.choice(urls)
            try:
                answer = ask(client, url, prompt, ANSWER_TOKENS, REQUEST_TIMEOUT_S)
            except (EngineError, httpx.HTTPError, OSError) as error:
                failed.set()
                raise EngineError(f"a request failed: {type(error).__name__}: {error}") from error
            prompt += answer.text
            answers.append(answer)
            note(len(answers))

    begin = time.perf_counter()
    with (
        httpx.Client(limits=limits) as client,
        ThreadPoolExecutor(len(workload.sessions)) as clients,
    ):
        for end in [clients.submit(converse, *one) for one in enumerate(workload.sessions)]:
            end.result()
    return answers, time.perf_counter() - begin


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
        "no cache at all", servers(arguments=("--no-pool", "--", "--no-enable-prefix-caching"))
    ),
    "device": Deployment("vLLM's prefix cache (device)", servers(arguments=("--no-pool",))),
    "host": Deployment("kvrecall: host", servers(pool=HOST)),
    "disk": Deployment("kvrecall: host and disk", servers(pool=DISK)),
    "finer": Deployment("kvrecall: host, hits in units of 16 tokens", servers(pool=FINER)),
    "two": Deployment("kvrecall: two engines, a pool each", servers(2, pool=HOST)),
    "service": Deployment("kvrecall: two engines, one pool service", _on_a_service),
}
"""By name, in the order they are played. The last two have two engines on the same cores."""


SOURCES = ("device", "host", "disk", "remote", "unspecified")
"""Where prompt tokens came from; ``unspecified``: what another project's connector brought."""

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
    """Conversations and questions over long texts against servers with each kind of pool.

    A deployment whose servers do not start or fail a request, or that would presumably exceed the
    budget, is in the report with the reason.
    """
    names = names_in(variants) or tuple(deployments)
    for name in names:
        if name not in deployments:
            raise EngineError(f"there is no variant {name!r}; known: {', '.join(deployments)}")
    workload = conversations(sessions, turns)
    # smaller than other benchmarks': every kind of server has 120,000 tokens to compute
    model = BenchModel(hidden=512, layers=6, heads=8)
    longest = workload.longest_prompt + 2 * ANSWER_TOKENS * len(workload.sessions[0].turns) + 256
    least = 2 * longest * model.token_bytes
    unique = max(workload.unique_tokens(BLOCK) * model.token_bytes, least)
    figures: dict[str, Mapping[str, Any]] = {}
    absent: dict[str, str] = {}
    end, longest_s = time.monotonic() + budget, 0.0
    with tempfile.TemporaryDirectory(prefix="kvrecall-bench-") as folder:
        device_bytes = max(int(unique * SHARES["device"]), least)
        arguments = model.serve(Path(folder), longest, device_bytes, BLOCK)
        for name in names:
            begin = time.monotonic()
            if figures and begin + longest_s > end:
                absent[name] = f"no time: {budget:.0f} seconds for all"
                continue
            progress(f"{name}: {deployments[name].story}")
            own = Path(folder) / name
            own.mkdir()
            disk_bytes = int(unique * SHARES["disk"]) + (64 << 20)
            sizes = Sizes(arguments, own, int(unique * SHARES["host"]), disk_bytes)
            try:
                figures[name] = _figures(*_play(workload, deployments[name], sizes))
                longest_s = max(longest_s, time.monotonic() - begin)
            except (KvrecallError, OSError, httpx.HTTPError) as error:
                absent[name] = f"{type(error).__name__}: {error}"[-2000:]
                progress(f"without {name}: {error}")
    if not figures:
        raise EngineError(f"no variant could be measured: {absent}")
    return _report(workload, figures, absent, unique, deployments)


def _play(workload: Workload, deployment: Deployment, sizes: Sizes) -> tuple[list[Answer], float]:
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


def _figures(samples: Sequence[Answer], seconds: float) -> dict[str, object]:
    """A deployment's figures: seconds, tokens/s, hit rates as shares of prompt tokens."""
    prompt = sum(sum(sample.recalled.values()) for sample in samples)
    hits = {s: sum(sample.recalled.get(s, 0) for sample in samples) for s in SOURCES}
    return {
        "requests": len(samples),
        "seconds": round(seconds, 2),
        "prompt_tokens": prompt,
        "computed_tokens": prompt - sum(hits.values()),
        "tokens_per_s": round(prompt / seconds, 1),
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
    deployments: Mapping[str, Deployment],
) -> Report:
    computed = (f"{one['computed_tokens']:,} ({name})" for name, one in figures.items())
    notes = (
        f"{workload.story}; {workload.prompt_tokens} prompt tokens without earlier answers, "
        f"{unique / 2**20:.0f} MiB of KV cache in blocks of {BLOCK} tokens; the device holds a "
        "quarter of it",
        f"prompt tokens computed: {', '.join(computed)}",
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
    rows = tuple(
        (
            deployments[variant].story,
            f"{one['seconds']:.0f}",
            f"{one['tokens_per_s']:,.0f}",
            f"{one['hit_rate']:.0%}",
            *(f"{one['ttft_s'][rank]:.2f}" for rank in ("p50", "p95", "p99")),
            f"{one['tpot_s']['p50'] * 1e3:.0f}",
        )
        for variant, one in figures.items()
    )
    columns = ("served with", "s", "prompt tokens/s", "hits", "TTFT p50, s", "p95", "p99")
    return Report("conversations", (*columns, "ms a token"), rows, shown, notes)
