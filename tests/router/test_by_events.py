"""Two engines with pools of their own, and a router that knows from their events what they hold:
real processes all. The tests run in the order they are written in; the last one kills an engine."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from server.live import LiveServer, until

from kvrecall.processes.ports import free_port, two_ports
from router.cluster import Json, Router, header, instance, kill, tiny

pytestmark = [pytest.mark.engine, pytest.mark.long]

BLOCK = 128
BLOCK_BYTES = 2 * 2 * 2 * 64 * BLOCK * 4  # layers, K and V, KV heads, head size, float32
TEXT = "He was an old man who fished alone in a skiff in the Gulf Stream. " * 30
BLOCKS = len(TEXT) // BLOCK * BLOCK
CLIENTS = 500
REPLAYED = 64  # batches: few, so that most of what is held was stored before them
TIERS = ("device", "host", "disk")


@dataclass(slots=True)
class Two:
    folder: Path
    model: Path
    servers: list[LiveServer]
    ports: list[int]
    router: Router

    @property
    def words(self) -> list[str]:
        made = []
        for server, port in zip(self.servers, self.ports, strict=True):
            made += ["--engine", f"{server.url}?events={port}"]
        return made

    def start(self, number: int, port: int) -> LiveServer:
        home = self.folder / f"engine-{number}"
        pool = {"host_size": 40 * BLOCK_BYTES, "disk_path": str(home / "disk")}
        pool |= {"disk_size": "256MiB", "policy": "lru"}
        ports = self.ports[number]
        return instance(home, self.model, "both", port, None, ports, (), REPLAYED, **pool)

    def served(self, reply: httpx.Response) -> LiveServer:
        return next(s for s in self.servers if s.url.endswith(header(reply)["engine"]))

    def other(self, server: LiveServer) -> LiveServer:
        return next(s for s in self.servers if s is not server)

    def blocks(self, server: LiveServer, tier: str) -> float:
        publisher = f"127.0.0.1:{self.ports[self.servers.index(server)]}"
        return self.router.count("blocks", publisher=publisher, tier=tier)

    def step(self, server: LiveServer) -> None:
        """A step of an engine, with which it publishes."""
        asked = {"model": "tiny", "prompt": "A step.", "max_tokens": 4}
        assert server.client.post("/v1/completions", json=asked).status_code == 200


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Two]:
    folder = tmp_path_factory.mktemp("two")
    model = tiny(folder)
    with ExitStack() as stack:
        made = Two(folder, model, [], [two_ports(), two_ports()], None)  # type: ignore[arg-type]
        for number in range(2):
            made.servers.append(made.start(number, free_port()))
            stack.callback(lambda at=number: made.servers[at].close())
        for server in made.servers:
            server.wait_ready()
        made.router = Router(folder, made.words)
        stack.callback(lambda: made.router.close())
        yield made


def recalled(reply: httpx.Response) -> Json:
    assert reply.status_code == 200, reply.text
    split: Json = reply.json()["usage"]["prompt_tokens_details"]["recall"]
    return {source: count for source, count in split.items() if source != "missed"}


def grown(two: Two, before: dict[str, float]) -> dict[str, float]:
    return {name: value - before[name] for name, value in counters(two).items()}


def counters(two: Two) -> dict[str, float]:
    return {
        f"{name} {tier}": two.router.count(f"{name}_tokens_total", role="engine", source=tier)
        for name in ("prompt", "expected")
        for tier in TIERS
    }


def test_a_prompt_goes_where_it_is_held_and_is_expected_from_its_tier(two: Two) -> None:
    first = two.router.complete(prompt=TEXT)
    assert recalled(first)["computed"] == len(TEXT)
    holder = two.served(first)
    assert until(lambda: two.step(holder) or two.blocks(holder, "device") >= BLOCKS // BLOCK)
    before = counters(two)
    again = two.router.complete(prompt=TEXT)
    assert two.served(again) is holder
    assert recalled(again)["device"] == BLOCKS
    new = grown(two, before)
    assert new["expected device"] == new["prompt device"] == BLOCKS
    assert holder.client.post("/reset_prefix_cache").json()["success"]
    two.step(holder)
    assert until(lambda: not two.blocks(holder, "device"))
    before = counters(two)
    reply = two.router.complete(prompt=TEXT)
    assert two.served(reply) is holder
    assert recalled(reply)["host"] == BLOCKS
    new = grown(two, before)
    assert new["expected host"] == new["prompt host"] == BLOCKS


def test_blocks_on_disk_are_known_and_so_is_what_an_engine_was_asked_directly(two: Two) -> None:
    """No client of the router asked it: only events can tell."""
    server = two.servers[1]
    text = "Asked behind the router's back. " + TEXT
    body = {"model": "tiny", "prompt": text, "max_tokens": 8, "temperature": 0}
    assert server.client.post("/v1/completions", json=body).status_code == 200
    for number in range(4):  # more than the host holds
        asked = {**body, "prompt": f"{number}. {TEXT}"}
        assert server.client.post("/v1/completions", json=asked).status_code == 200
    assert server.client.post("/reset_prefix_cache").json()["success"]
    two.step(server)
    assert until(lambda: not two.blocks(server, "device"))
    before = counters(two)
    reply = two.router.complete(prompt=text)
    assert two.served(reply) is server
    split = recalled(reply)
    assert split["disk"] > 0
    assert split["disk"] + split["host"] == len(text) // BLOCK * BLOCK
    new = grown(two, before)
    assert new["expected disk"] == new["prompt disk"] == split["disk"]


def test_a_router_that_is_started_again_knows_everything(two: Two) -> None:
    texts = [f"Before the router's end {number}. " + TEXT for number in range(3)]
    holders = [two.served(two.router.complete(prompt=text)) for text in texts]
    for server in two.servers:
        two.step(server)
    known = {(s.url, tier): two.blocks(s, tier) for s in two.servers for tier in TIERS}
    two.router.close()
    two.router = Router(two.folder, two.words)

    def knows() -> bool:
        return all(
            two.blocks(server, tier) == known[server.url, tier]
            for server in two.servers
            for tier in TIERS
        )

    assert until(knows)
    for text, holder in zip(texts, holders, strict=True):
        reply = two.router.complete(prompt=text)
        assert two.served(reply) is holder
        assert recalled(reply)["computed"] < BLOCK


def patient(url: str, body: Json) -> httpx.Response:
    """As a client asks that tries again for a while, at a router that may be away."""
    end = time.monotonic() + 120
    while True:
        try:
            reply = httpx.post(f"{url}/v1/completions", json=body, timeout=120)
            if reply.status_code not in (502, 503):
                return reply
        except httpx.TransportError:
            pass
        assert time.monotonic() < end
        time.sleep(0.2)


def test_a_router_that_is_killed_under_agents_costs_time_and_nothing_else(two: Two) -> None:
    """Another router that lives on shows what the killed one would have known."""
    with ExitStack() as stack:
        observer = Router(two.folder, two.words)
        stack.callback(observer.close)
        killed = Router(two.folder, two.words)
        stack.callback(lambda: killed.close())
        clients = stack.enter_context(ThreadPoolExecutor(8))
        answered: list[int] = []

        def converse(number: int) -> int:
            prompt = f"Agent {number} begins. " + TEXT[:400]
            for turn in range(8):
                prompt += f" Tool result {turn}: " + TEXT[turn * 50 : turn * 50 + 300]
                asked = {"model": "tiny", "prompt": prompt, "max_tokens": 12, "temperature": 0}
                reply = patient(killed.url, asked)
                assert reply.status_code == 200, reply.text
                prompt += reply.json()["choices"][0]["text"]
                answered.append(number)
            return len(prompt)

        running = [clients.submit(converse, number) for number in range(8)]
        assert until(lambda: len(answered) >= 20, 180)
        killed.process.kill()
        killed.process.wait()
        assert not all(one.done() for one in running)
        killed = Router(two.folder, two.words, killed.port)
        assert until(lambda: any(killed.blocks().values()))
        assert all(one.result() for one in running)
        assert len(answered) == 64
        for server in two.servers:
            two.step(server)
        assert until(lambda: killed.blocks() == observer.blocks())
        assert sum(observer.blocks().values()) > 100
        os.kill(killed.process.pid, signal.SIGSTOP)  # it loses more than is replayed, perhaps
        for number in range(2 * REPLAYED):
            body = {"model": "tiny", "prompt": f"Unseen {number}. {TEXT[:200]}", "max_tokens": 1}
            two.servers[number % 2].client.post("/v1/completions", json=body)
        os.kill(killed.process.pid, signal.SIGCONT)
        for server in two.servers:
            two.step(server)
        assert until(lambda: killed.blocks() == observer.blocks())


TEXTS = [f"Client {number}. " + TEXT[: 4 * BLOCK] for number in range(20)]
ASKED: Json = {"model": "tiny", "max_tokens": 4, "temperature": 0}


@pytest.fixture(scope="module")
def alone(two: Two) -> list[str]:
    """Answers of the one engine that computes each of the prompts alone."""
    told = []
    for text in TEXTS:
        body = {**ASKED, "prompt": text, "cache_salt": f"alone {text[:12]}"}
        told.append(two.servers[0].client.post("/v1/completions", json=body).json())
    return [one["choices"][0]["text"] for one in told]


def all_clients(router: Router) -> list[httpx.Response]:
    """The replies to all clients, each of which asks one of the prompts."""

    async def ask(client: httpx.AsyncClient, at: int) -> httpx.Response:
        body = {**ASKED, "prompt": TEXTS[at % len(TEXTS)]}
        return await client.post(f"{router.url}/v1/completions", json=body)

    async def all_of_them() -> list[httpx.Response]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=300, limits=limits) as client:
            return await asyncio.gather(*(ask(client, at) for at in range(CLIENTS)))

    return asyncio.run(all_of_them())


def are_right(replies: list[httpx.Response], alone: list[str]) -> bool:
    for at, reply in enumerate(replies):
        assert reply.status_code == 200, reply.text
        assert reply.json()["choices"][0]["text"] == alone[at % len(TEXTS)]
    return True


def test_five_hundred_clients(two: Two, alone: list[str]) -> None:
    replies = all_clients(two.router)
    assert are_right(replies, alone)
    served = {header(reply)["engine"] for reply in replies}
    assert len(served) == 2
    assert until(lambda: two.router.inflight() == 0)
    assert two.router.count("requests_total", outcome="shed") == 0
    computed = sum(recalled(reply)["computed"] for reply in replies)
    assert computed < 0.5 * sum(sum(recalled(reply).values()) for reply in replies)


def leaving(router: Router) -> list[str]:
    state = router.client.get("/health").json()["instances"]
    return [one["url"] for one in state if one.get("leaving")]


def test_engines_come_and_go_while_the_router_runs(two: Two) -> None:
    """As a file lists them. One that leaves ends what it began."""
    roster = two.folder / "instances"
    first, second = (f"engine {word}\n" for word in two.words if word != "--engine")
    roster.write_text("# engines of this test\n" + first)
    router = Router(two.folder, ["--instances", str(roster)])
    try:
        assert list(router.up()) == [two.servers[0].url]
        assert two.served(router.complete(prompt="Only one. " + TEXT)) is two.servers[0]
        roster.write_text(first + second)
        assert until(lambda: list(router.up().values()) == [True, True])
        assert until(lambda: router.blocks() == two.router.blocks())
        body = {**ASKED, "prompt": "Long. ", "max_tokens": 4000, "ignore_eos": True, "stream": True}
        with router.client.stream("POST", "/v1/completions", json=body) as reply:
            lines = reply.iter_lines()
            next(lines)
            name = header(reply)["engine"]
            stays = next(s for s in two.servers if not s.url.endswith(name))
            roster.write_text(first if first.find(stays.url) >= 0 else second)
            assert until(lambda: leaving(router) == [f"http://{name}"])
            assert two.served(router.complete(prompt="Who?")) is stays
            told = list(lines)
        assert told[-2:] == ["data: [DONE]", ""]
        assert until(lambda: list(router.up()) == [stays.url])
        port = two.ports[two.servers.index(stays)]
        assert all(f'publisher="127.0.0.1:{port}"' in line for line in router.blocks())
        roster.write_text("engine nonsense://\n")
        assert until(lambda: "line 1: 'nonsense://' is not an address" in router.log)
        assert list(router.up()) == [stays.url]
        roster.write_text("# none\n")
        assert until(lambda: not router.up())
        reply = router.complete(prompt="Who?")
        assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")
        roster.write_text(first + second)
        assert until(lambda: list(router.up().values()) == [True, True])
        assert until(lambda: router.blocks() == two.router.blocks())
        assert "Traceback" not in router.log
    finally:
        router.close()


def test_an_engine_that_is_killed_and_comes_back_with_its_disk(two: Two) -> None:
    text = "Before the engine's end. " + TEXT
    first = two.router.complete(prompt=text)
    holder = two.served(first)
    assert until(lambda: two.step(holder) or not holder.metric("kvrecall_queued_writes"))
    assert until(lambda: two.step(holder) or two.blocks(holder, "disk") > 0)
    number, restarts = two.servers.index(holder), two.router.count("publisher_restarts")
    kill(holder)
    meanwhile = two.router.complete(prompt="Meanwhile. " + TEXT)
    assert two.served(meanwhile) is not holder
    assert meanwhile.status_code == 200
    back = two.start(number, int(holder.url.rsplit(":", 1)[1]))
    two.servers[number] = back
    back.wait_ready()
    assert until(lambda: all(two.router.up().values()))
    # from the first request on it knows its namespace, and publishes its disk
    assert until(lambda: two.step(back) or two.router.count("publisher_restarts") > restarts)
    assert until(
        lambda: (
            two.step(back)
            or two.blocks(back, "disk") == back.metric("kvrecall_tier_blocks", tier="disk") > 0
        )
    )
    assert not two.blocks(back, "host")
    assert two.router.count("publisher_restarts") >= 1
    port = two.ports[number]
    assert two.router.count("publisher_joined", publisher=f"127.0.0.1:{port}") == 1
    before = counters(two)
    reply = two.router.complete(prompt=text)
    assert two.served(reply) is back
    assert recalled(reply)["disk"] == len(text) // BLOCK * BLOCK
    new = grown(two, before)
    assert new["expected disk"] == new["prompt disk"]
    assert "Traceback" not in two.router.log


def test_five_hundred_clients_and_an_engine_that_dies(two: Two, alone: list[str]) -> None:
    """As soon as it has requests: the other may get none, or the clients see replies too late."""
    before = two.router.count("retries_total")
    killed: list[LiveServer] = []

    def kill_the_busiest() -> None:
        while not killed:
            state = two.router.client.get("/health").json()["instances"]
            busiest = max(state, key=lambda one: int(one["inflight"]))
            if busiest["inflight"] >= 4:
                killed.extend(one for one in two.servers if one.url == busiest["url"])
                kill(killed[0])

    with ThreadPoolExecutor(1) as aside:
        killing = aside.submit(kill_the_busiest)
        replies = all_clients(two.router)
        killing.result()
    assert are_right(replies, alone)
    assert two.router.count("retries_total") > before
    assert until(lambda: two.router.up()[killed[0].url] is False)
    assert until(lambda: two.router.inflight() == 0)
    assert "Traceback" not in two.router.log
