"""``bench router``: sessions of agents before two engines, by how the router chooses."""

from __future__ import annotations

import contextlib
import json
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import httpx
import numpy as np
import typer
import uvicorn

from kvrecall.bench.model import BenchModel, Texts
from kvrecall.bench.report import Report, names_in, progress
from kvrecall.bench.serving import BLOCK, Conversation, Workload, play
from kvrecall.errors import EngineError
from kvrecall.processes.ports import free_port
from kvrecall.processes.server import Answer, ServerProcess
from kvrecall.router.addresses import Roster
from kvrecall.router.application import application
from kvrecall.router.fleet import Fleet, Instance
from kvrecall.router.prefixes import Prompt
from kvrecall.router.router import RouterSettings, split_of
from kvrecall.server.access import OWN_HEADER

_ENGINES = 2
_SYSTEM_TOKENS = 512
_START_S = 30.0
_SOURCES = ("device", "host", "disk", "remote")


# -- ways to choose -------------------------------------------------------------------------


class TakingTurns(Fleet):
    """Round robin."""

    def ranked(
        self, prompt: Prompt | None, among: Sequence[Instance], turn: int, most: int
    ) -> list[Instance]:
        at = turn % max(1, len(among))
        return [one for one in (*among[at:], *among[:at]) if one.healthy]


class LeastBusy(Fleet):
    """The fewest requests in flight; among equals, round-robin."""

    def ranked(
        self, prompt: Prompt | None, among: Sequence[Instance], turn: int, most: int
    ) -> list[Instance]:
        turns = {one: (place - turn) % len(among) for place, one in enumerate(among)}
        healthy = [one for one in among if one.healthy]
        return sorted(healthy, key=lambda one: (one.inflight, turns[one]))


@dataclass(frozen=True, slots=True)
class Way:
    """``reads_events``: the router follows the engines' KV events."""

    story: str
    fleet: type[Fleet] = Fleet
    reads_events: bool = False


WAYS = {
    "turns": Way("round robin", TakingTurns),
    "least_busy": Way("the fewest requests in flight", LeastBusy),
    "guess": Way("prefix map: an engine holds what it was sent"),
    "events": Way("prefix map: an engine holds what its events say", reads_events=True),
}


# -- the sessions ---------------------------------------------------------------------------


def agents(sessions: int, turns: int, pause_s: float, seed: int) -> Workload:
    """Sessions over one of two system prompts of 512 tokens, one every two seconds; a task of 128
    to 512, results of tools of 64 to 384 tokens, after pauses of half a second and more (in the
    mean ``pause_s``, exponential, at most four times that)."""
    draw, texts = random.Random(seed), Texts(seed)
    systems = [texts.document(_SYSTEM_TOKENS) for _ in range(2)]

    def turn() -> tuple[float, str]:
        pause = min(4 * pause_s, 0.5 + draw.expovariate(1 / max(0.1, pause_s - 0.5)))
        return pause, texts.document(draw.randint(64, 384))

    return Workload(
        f"{sessions} sessions of {turns} turns",
        tuple(
            Conversation(
                draw.uniform(0, 2.0 * sessions),
                systems[number % 2] + texts.document(draw.randint(128, 512)),
                tuple(turn() for _ in range(turns)),
            )
            for number in range(sessions)
        ),
    )


def ask(client: httpx.Client, url: str, prompt: str, tokens: int, timeout_s: float) -> Answer:
    """Of /v1/completions, which a router passes on; without tokens and log-probabilities. Raises
    EngineError."""
    body = {"model": "bench", "prompt": prompt, "max_tokens": tokens, "temperature": 0}
    body |= {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
    text, ttft_s, last_s, usage = "", 0.0, 0.0, dict[str, Any]()
    began = time.perf_counter()
    with client.stream("POST", f"{url}/v1/completions", json=body, timeout=timeout_s) as reply:
        if reply.status_code != 200:
            raise EngineError(f"HTTP {reply.status_code}: {reply.read().decode()[:500]}")
        for line in reply.iter_lines():
            if not line.startswith("data: {"):
                continue
            last_s = time.perf_counter() - began
            ttft_s = ttft_s or last_s
            event = json.loads(line[6:])
            if "error" in event:
                raise EngineError(f"a request failed: {event['error']}")
            text += "".join(choice["text"] for choice in event["choices"])
            usage = event.get("usage") or usage
    split = split_of(usage["prompt_tokens_details"]["recall"])
    return Answer(usage["prompt_tokens"], split, (), (), text, ttft_s, last_s)


# -- router and engines ---------------------------------------------------------------------


@contextlib.contextmanager
def routing(way: Way, addresses: Sequence[str]) -> Iterator[str]:
    """A router in a thread of this process; its URL. ``addresses``: of the engines, with the ports
    of their events."""
    if not way.reads_events:
        addresses = [one.partition("?")[0] for one in addresses]
    roster = Roster({"--engine": tuple(addresses), "--prefill": (), "--decode": ()}, None)
    port = free_port()
    app = application(RouterSettings(roster, 0, 4, 1, 1000, 600.0), way.fleet)
    config = uvicorn.Config(app, "127.0.0.1", port, log_level="error", access_log=False)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, name="router", daemon=True)
    thread.start()
    url, end = f"http://127.0.0.1:{port}", time.monotonic() + _START_S
    while not server.started or httpx.get(f"{url}/health").status_code != 200:
        if time.monotonic() > end:
            raise EngineError(f"the router is not ready after {_START_S:.0f} s")
        time.sleep(0.1)
    try:
        yield url
    finally:
        server.should_exit = True
        thread.join(_START_S)


@contextlib.contextmanager
def engines(
    folder: Path, arguments: Sequence[str], host_bytes: int
) -> Iterator[tuple[list[ServerProcess], list[str]]]:
    """Two servers with pools of their own, which publish their events."""
    with ExitStack() as stack:
        servers, addresses = [], []
        for number in range(_ENGINES):
            file = folder / f"pool{number}.json"
            file.write_text(json.dumps({"host_size": host_bytes, "load_or_compute": "load"}))
            events, replay = free_port(), free_port()
            published = {
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": f"tcp://*:{events}",
                "replay_endpoint": f"tcp://*:{replay}",
            }
            words = [*arguments, "--pool-config", str(file), "--served-model-name", "bench"]
            words += ["--", "--kv-events-config", json.dumps(published)]
            log = folder / f"server{number}.log"
            servers.append(stack.enter_context(ServerProcess(words, log, progress)))
            addresses.append(f"{servers[-1].url}?events={events}/{replay}")
        yield servers, addresses


def empty(servers: Sequence[ServerProcess]) -> None:
    """Empties device and host of all engines."""
    for server in servers:
        server.settle()
        reply = httpx.post(
            f"{server.url}/reset_prefix_cache",
            params={"reset_external": "true"},
            headers={OWN_HEADER: "1"},
            timeout=60,
        )
        reply.raise_for_status()
        server.ask("settle", 4)


# -- the command ----------------------------------------------------------------------------


def measure_router(
    sessions: Annotated[int, typer.Option(min=2, help="Sessions, all at once.")] = 8,
    turns: Annotated[int, typer.Option(min=1, help="Turns of each.")] = 6,
    pause: Annotated[
        float, typer.Option(min=0.5, help="Seconds between an answer and the next turn, mean.")
    ] = 3.0,
    rounds: Annotated[int, typer.Option(min=1, help="Times that each way is measured.")] = 3,
    ways: Annotated[str, typer.Option(help="Ways to choose, by name.")] = ",".join(WAYS),
    seed: Annotated[int, typer.Option()] = 0,
) -> Report:
    """Agents' sessions before two engines, whose devices hold an eighth of it each and their hosts
    two fifths: round robin, least busy, prefix map by guess, prefix map by the engines' KV events;
    the same sessions with each, interleaved."""
    names = names_in(ways)
    for name in names:
        if name not in WAYS:
            raise EngineError(f"there is no way {name!r}; known: {', '.join(WAYS)}")
    model = BenchModel(hidden=384, layers=6, heads=6, kv_heads=2)
    all_sessions = [agents(sessions, turns, pause, seed + number) for number in range(rounds)]
    longest = max(one.longest_prompt for one in all_sessions) + 128
    unique = 2 * _SYSTEM_TOKENS + sessions * (longest - _SYSTEM_TOKENS)
    device = max(unique // 8, longest + 4 * BLOCK) * model.token_bytes
    host = 2 * unique // 5 * model.token_bytes
    played: dict[str, list[list[Answer]]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory(prefix="kvrecall-bench-") as place:
        folder = Path(place)
        arguments = model.serve(folder, longest, device, BLOCK)
        with engines(folder, arguments, host) as (servers, addresses):
            for server in servers:
                server.ask("warm up " * 40, 4)
            for number, one in enumerate(all_sessions):
                order = names[number % len(names) :] + names[: number % len(names)]
                for name in order:
                    empty(servers)
                    with routing(WAYS[name], addresses) as url:
                        answers, _ = play(one, [url], lambda _: None, ask)
                    played[name].append(answers)
                    computed = _tokens(answers, "computed")
                    progress(f"  round {number + 1}, {name}: {computed} computed")
    figures = {name: _figures(played[name]) for name in names}
    return _report(figures, sessions, turns, rounds, host, device)


def _tokens(answers: Sequence[Answer], source: str) -> int:
    return sum(one.recalled.get(source, 0) for one in answers)


def _figures(rounds: Sequence[Sequence[Answer]]) -> dict[str, Any]:
    answers = [one for some in rounds for one in some]
    tokens = {source: _tokens(answers, source) for source in (*_SOURCES, "computed")}
    prompt = sum(tokens.values())
    times = [one.ttft_s for one in answers]
    ranks = {f"ttft_p{rank}_s": float(np.percentile(times, rank)) for rank in (50, 90, 99)}
    return {
        "requests": len(answers),
        "prompt_tokens": prompt,
        "computed_tokens": tokens["computed"],
        "computed_share": round(tokens["computed"] / prompt, 4),
        "by_tier": {source: round(tokens[source] / prompt, 4) for source in _SOURCES},
        **{name: round(value, 4) for name, value in ranks.items()},
        "ttft_mean_s": round(statistics.fmean(times), 4),
        "computed_by_round": [_tokens(some, "computed") for some in rounds],
    }


def _report(
    figures: dict[str, Any], sessions: int, turns: int, rounds: int, host: int, device: int
) -> Report:
    base = next(iter(figures.values()))
    rows = tuple(
        (
            WAYS[name].story,
            f"{one['computed_tokens']:,}",
            f"{one['computed_tokens'] / base['computed_tokens']:.2f}",
            *(f"{one[f'ttft_{rank}_s']:.3f}" for rank in ("p50", "p90", "p99", "mean")),
            f"{one['ttft_mean_s'] / base['ttft_mean_s']:.2f}",
        )
        for name, one in figures.items()
    )
    columns = ("choice", "computed", "ratio", "first token, p50", "p90", "p99", "mean", "ratio")
    notes = (
        f"{sessions} sessions of {turns} turns, {rounds} times; {base['prompt_tokens']:,} prompt "
        f"tokens; two engines, each with {device / 2**20:.0f} MiB on the device and "
        f"{host / 2**20:.0f} MiB of host memory",
    )
    shown = {"sessions": sessions, "turns": turns, "rounds": rounds, "ways": figures}
    return Report("router", columns, rows, shown, notes)
