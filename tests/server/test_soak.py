"""A server whose batch is full reports it; 200 concurrent clients that disconnect at random do not
harm it and leak nothing; stopped requests; and a server that is asked to stop.
A server of their own, in the order written, where a request may be longer than any machine of today
computes before it is cut."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Thread
from typing import Any

import httpx
import psutil
import pytest

from server.conftest import PLACES, tiny_server
from server.live import OWN, LiveServer, all_gone

pytestmark = [pytest.mark.engine, pytest.mark.long]

CLIENTS = 200
ROUNDS = 2
PATIENCE_S = 120
MAY_GROW = 64 << 20
LONG = 15_000
Json = dict[str, Any]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with tiny_server(tmp_path_factory.mktemp("soak"), LONG + 1000) as live:
        yield live


def request(chance: random.Random) -> tuple[str, Json]:
    """A request of any route, of 1 to 40 tokens; a third of them share their first block."""
    text = ("shared " * 20 if chance.random() < 0.3 else "") + str(chance.random())
    tokens = chance.randint(1, 40)
    messages = [{"role": "user", "content": text}]
    return chance.choice(
        [
            ("/generate", {"inputs": text, "parameters": {"max_new_tokens": tokens}}),
            ("/generate_stream", {"inputs": text, "parameters": {"max_new_tokens": tokens}}),
            ("/generate", {"prompt": text, "max_tokens": tokens, "n": 2, "best_of": 3}),
            ("/infer", {"inputs": text, "stream": True}),
            ("/v1/completions", {"model": "tiny", "prompt": text, "stream": True}),
            ("/v1/completions", {"model": "tiny", "prompt": text, "max_tokens": tokens, "n": 2}),
            ("/v1/chat/completions", {"model": "tiny", "messages": messages, "max_tokens": tokens}),
            ("/v2/models/tiny/generate", {"id": "soak", "text_input": text}),
            ("/v2/models/tiny/generate_stream", {"id": "soak", "text_input": text}),
        ]
    )


async def one_client(url: str, seed: int, statuses: list[int]) -> None:
    """A few requests one after the other; of two one is left before its end."""
    chance = random.Random(seed)
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client:
        for _ in range(2):
            path, body = request(chance)
            stays = chance.random() < 0.5
            limit = PATIENCE_S if stays else chance.random() * 3
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(limit):
                    reply = await client.post(path, json=body)
                    statuses.append(reply.status_code)
                    continue
            assert not stays, f"{path} was not answered in {PATIENCE_S} s"


async def all_clients(url: str, round_number: int) -> tuple[list[int], list[int]]:
    """The statuses of the answers, and those of readiness meanwhile."""
    statuses: list[int] = []
    ready: list[int] = []
    seeds = range(round_number * CLIENTS, (round_number + 1) * CLIENTS)
    working = asyncio.gather(*(one_client(url, seed, statuses) for seed in seeds))
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as watcher:
        while not working.done():
            ready.append((await watcher.get("/v2/health/ready")).status_code)
            await asyncio.sleep(0.05)
    await working
    return statuses, ready


def quiet(tiny: LiveServer) -> bool:
    """Whether nothing runs, waits or is held, and every request is accounted for."""
    held = ("vllm:num_requests_running", "vllm:num_requests_waiting")
    held += ("kvrecall_leases", "kvrecall_reserved", "vllm:kv_cache_usage_perc")
    ended = tiny.metric("request_success_total") + tiny.metric("request_failed_total")
    settled = tiny.metric("request_received_total") == ended
    return settled and not any(tiny.metric(name) for name in held)


def wait_quiet(tiny: LiveServer) -> None:
    end = time.monotonic() + PATIENCE_S
    while not quiet(tiny):
        assert time.monotonic() < end, tiny.client.get("/metrics").text[-3000:]
        # A step carries the last counts of a request to the metrics.
        tiny.client.post("/infer", json={"inputs": "x", "parameters": {"max_new_tokens": 1}})
        time.sleep(0.1)


def readiness(tiny: LiveServer) -> int:
    return tiny.client.get("/v2/health/ready").status_code


def held(processes: list[psutil.Process]) -> tuple[int, int]:
    """Open files and private memory of these processes."""
    return (
        sum(process.num_fds() for process in processes),
        sum(process.memory_full_info().uss for process in processes),
    )


def test_not_ready_while_the_batch_is_full(tiny: LiveServer) -> None:
    """Every request has its first token when the server is asked, and none can be at its end."""
    assert readiness(tiny) == 200
    with ThreadPoolExecutor(PLACES) as team, contextlib.ExitStack() as clients:
        list(team.map(lambda _: clients.enter_context(running(tiny, LONG)), range(PLACES)))
        assert readiness(tiny) == 503
    wait_quiet(tiny)
    assert readiness(tiny) == 200


def test_soak(tiny: LiveServer) -> None:
    before = family = tiny.family()
    measured = []
    for round_number in range(ROUNDS):
        statuses, ready = asyncio.run(all_clients(tiny.url, round_number))
        assert len(statuses) > CLIENTS // 2
        assert set(statuses) == {200}, statuses
        assert set(ready) <= {200, 503}
        wait_quiet(tiny)
        assert readiness(tiny) == 200
        measured.append(held(family))
    assert {p.pid for p in tiny.family()} == {p.pid for p in before}
    (files, memory), (later_files, later_memory) = measured
    assert later_files <= files + 4
    assert later_memory <= memory + MAY_GROW


def test_timeout_of_a_request(tiny: LiveServer) -> None:
    wide = {"max_new_tokens": LONG, "ignore_eos": True, "timeout": 1}
    for path, body in (
        ("/infer", {"inputs": "x", "parameters": wide}),
        ("/generate", {"prompt": "x", "max_tokens": LONG, "ignore_eos": True, "timeout": 1}),
    ):
        reply = tiny.client.post(path, json=body)
        assert reply.status_code == 500, reply.text[:200]
        assert reply.json()["error_type"] == "Incomplete Generation"
        assert "the request's timeout" in reply.json()["error"]


def test_stop_infer(tiny: LiveServer) -> None:
    """A stopped request returns its tokens so far, and the engine no longer works on it."""
    body: Json = {"id": "long", "text_input": "x", "parameters": {"details": True}}
    body["parameters"] |= {"max_new_tokens": LONG, "ignore_eos": True}
    with tiny.client.stream("POST", "/v2/models/tiny/generate_stream", json=body) as reply:
        lines = (line for line in reply.iter_lines() if line)
        next(lines)
        stopped = tiny.client.post("/v2/models/tiny/stopInfer", json={"id": "long"})
        assert stopped.status_code == 200
        last = [json.loads(line[6:]) for line in lines][-1]
    assert last["details"]["finish_reason"] == "stopped"
    assert 0 < last["details"]["generated_tokens"] < LONG
    assert tiny.client.post("/v2/models/tiny/stopInfer", json={"id": "long"}).status_code == 404
    wait_quiet(tiny)


def test_stop_service_drains_until_forced(tiny: LiveServer) -> None:
    """Asked to stop, the server refuses new requests and lets running ones finish; by force it
    aborts the rest, with an error. The stop request gets a reply, and the exit status is 0."""
    family = tiny.family()
    answers: list[int] = []

    def stop() -> None:
        with httpx.Client(base_url=tiny.url, timeout=120) as client:
            answers.append(client.post("/stopService", headers=OWN).status_code)

    with running(tiny, LONG) as left, running(tiny, 60) as ending:
        stopping = Thread(target=stop, daemon=True)
        stopping.start()
        while readiness(tiny) == 200:
            time.sleep(0.02)
        for path, asked in (
            ("/generate", {"inputs": "x"}),
            ("/generate", {"prompt": "x", "n": 2, "use_beam_search": True}),
            ("/v1/completions", {"model": "tiny", "prompt": "x"}),
        ):
            assert tiny.client.post(path, json=asked).status_code == 503
        assert tiny.client.get("/health").status_code == 200
        assert list(ending)[-1]["generated_text"] is not None
        assert answers == []
        assert tiny.client.post("/stopService?mode=Force").status_code == 200
        assert list(left)[-1] == {
            "error": "the server was stopped",
            "error_type": "Service Unavailable",
        }
    stopping.join(60)
    assert answers == [200]
    assert tiny.wait_end() == 0
    assert all_gone(family)


@contextlib.contextmanager
def running(tiny: LiveServer, tokens: int) -> Iterator[Iterator[Json]]:
    """The events of a stream of so many tokens, which has begun."""
    body = {"inputs": "x", "parameters": {"max_new_tokens": tokens, "ignore_eos": True}}
    with tiny.client.stream("POST", "/generate_stream", json=body) as reply:
        told = (json.loads(line[6:]) for line in reply.iter_lines() if line)
        next(told)
        yield told
