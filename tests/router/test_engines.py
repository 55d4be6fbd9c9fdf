"""One prefill and two decode instances, a pool service between them, a router before them: real
processes all. The tests run in the order they are written in; the last ones kill instances."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from pool.service.service import MIB, Service
from server.live import LiveServer, sse, until

from kvrecall.processes.ports import free_port, two_ports
from router.cluster import Json, Router, header, instance, kill, tiny

pytestmark = pytest.mark.engine

BLOCK = 128
TEXT = "It was a bright cold day in April, and the clocks were striking thirteen. " * 27
TOKENS = len(TEXT)  # the model's tokens are bytes
BLOCKS = TOKENS // BLOCK * BLOCK
RUNNING = "vllm:num_requests_running"


@dataclass(slots=True)
class Cluster:
    prefill: LiveServer
    decode: list[LiveServer]
    router: Router
    publishers: dict[str, str]  # by the URL of the instance


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("pd")
    model = tiny(folder, 16384)
    with ExitStack() as stack:
        pool = two_ports()
        service = stack.enter_context(Service(folder / "pool", 128 * MIB, events=pool))
        servers, ports = [], []
        for place, role in enumerate(("prefill", "decode", "decode")):
            home = folder / f"{role}-{place}"
            ports.append(two_ports())
            servers.append(instance(home, model, role, free_port(), service.socket, ports[-1]))
            stack.callback(servers[-1].close)
        for server in servers:
            server.wait_ready()
        urls = [
            f"{server.url}?events={port}&pool={pool}"
            for server, port in zip(servers, ports, strict=True)
        ]
        words = ["--prefill", urls[0]]
        for url in urls[1:]:
            words += ["--decode", url]
        router = Router(folder, words)
        stack.callback(router.close)
        names = [f"127.0.0.1:{port}" for port in ports]
        publishers = {server.url: name for server, name in zip(servers, names, strict=True)}
        yield Cluster(servers[0], servers[1:], router, publishers)


def alone(server: LiveServer, **body: Any) -> str:
    """The text of one engine that computes everything itself: its blocks are shared with none."""
    asked = {"model": "tiny", "max_tokens": 8, "temperature": 0, "cache_salt": str(time.time())}
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    reply = server.client.post(path, json=asked | body).json()
    usage = reply["usage"]
    assert usage["prompt_tokens_details"]["recall"]["computed"] == usage["prompt_tokens"]
    return text_of(reply)


def text_of(reply: Json) -> str:
    (choice,) = reply["choices"]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


def test_the_roles_are_vllms(cluster: Cluster) -> None:
    assert "pool open as kv_producer" in cluster.prefill.log
    for server in cluster.decode:
        assert "pool open as kv_consumer" in server.log


def test_a_prompt_goes_to_one_and_its_continuation_to_another(cluster: Cluster) -> None:
    reply = cluster.router.complete(prompt=TEXT, max_tokens=24)
    assert reply.status_code == 200, reply.text
    told = header(reply)
    assert f"http://{told['prefill']}" == cluster.prefill.url
    assert told["prefill.computed"] == str(TOKENS)
    assert f"http://{told['decode']}" in [server.url for server in cluster.decode]
    details = reply.json()["usage"]["prompt_tokens_details"]
    assert details["recall"]["host"] == BLOCKS
    assert details["recall"]["computed"] == TOKENS - BLOCKS
    assert details["prefill"]["computed"] == TOKENS
    assert details["cached_tokens"] == 0, "somebody computed them for this request"
    assert text_of(reply.json()) == alone(cluster.decode[0], prompt=TEXT, max_tokens=24)


@pytest.mark.parametrize("form", ["prompt", "messages"])
def test_streams_say_the_same(cluster: Cluster, form: str) -> None:
    text = f"Streamed as {form}. " + TEXT
    what: Json = {"prompt": text}
    if form == "messages":
        what = {"messages": [{"role": "user", "content": text}]}
    options = {"stream": True, "stream_options": {"include_usage": True}}
    reply = cluster.router.complete(**what, **options, max_tokens=24)
    assert reply.headers["content-type"].startswith("text/event-stream")
    told = sse(reply)
    assert reply.text.endswith("data: [DONE]\n\n")
    details = told[-1]["usage"]["prompt_tokens_details"]
    assert details["recall"]["host"] >= BLOCKS
    assert details["prefill"]["computed"] == told[-1]["usage"]["prompt_tokens"]
    assert details["cached_tokens"] == 0
    parts = [choice for event in told for choice in event["choices"]]
    if form == "prompt":
        whole = "".join(part["text"] for part in parts)
    else:
        whole = "".join(part["delta"]["content"] or "" for part in parts)
    assert whole == alone(cluster.decode[1], **what, max_tokens=24)


def test_a_prompt_that_is_known_is_not_sent_twice(cluster: Cluster) -> None:
    """Its blocks are where it was decoded, and the router knows where that was."""
    text = "Asked three times. " + TEXT
    first = cluster.router.complete(prompt=text)
    before = cluster.router.count("prefills_total", outcome="short")
    for _ in range(2):
        again = cluster.router.complete(prompt=text)
        assert header(again)["decode"] == header(first)["decode"]
        assert "prefill" not in header(again)
        details = again.json()["usage"]["prompt_tokens_details"]
        assert details["recall"]["device"] == details["cached_tokens"] > 0
        assert text_of(again.json()) == text_of(first.json())
    assert cluster.router.count("prefills_total", outcome="short") == before + 2


@pytest.mark.parametrize("form", ["prompt", "messages", "tokens"])
def test_what_events_say_is_what_is_recalled(cluster: Cluster, form: str) -> None:
    """Of the device at the second time, of the pool service at the other instance."""
    text = f"What do events say of {form}? " + TEXT
    what: dict[str, Json] = {
        "prompt": {"prompt": text, "cache_salt": "a tenant"},
        "messages": {"messages": [{"role": "user", "content": text}]},
        "tokens": {"prompt": [ord(letter) for letter in text]},
    }
    router, body = cluster.router, what[form]
    first = header(router.complete(**body))

    def counted(name: str, source: str) -> float:
        return router.count(f"{name}_tokens_total", role="decode", source=source)

    before = {name: counted(name, "device") for name in ("prompt", "expected")}
    assert header(router.complete(**body))["decode"] == first["decode"]
    grown = {name: counted(name, "device") - before[name] for name in before}
    assert grown["prompt"] == grown["expected"] >= BLOCKS
    if form == "prompt":
        other = router.complete(**body | {"cache_salt": "another tenant"})
        assert other.json()["usage"]["prompt_tokens_details"]["recall"]["device"] == 0
        (holder,) = (s for s in cluster.decode if s.url.endswith(first["decode"]))
        assert holder.client.post("/reset_prefix_cache").json()["success"]
        short = {"model": "tiny", "prompt": "A step.", "max_tokens": 4}
        holder.client.post("/v1/completions", json=short)  # in which the reset is published
        publisher = cluster.publishers[holder.url]
        assert until(lambda: not router.count("blocks", publisher=publisher, tier="device"))
        before = {name: counted(name, "host") for name in before}
        router.complete(**body)
        grown = {name: counted(name, "host") - before[name] for name in before}
        assert grown["prompt"] == grown["expected"] >= BLOCKS


def test_the_next_turn_finds_what_was_decoded(cluster: Cluster) -> None:
    """Decode instances save what they compute; a prefill instance recalls it."""
    first = [ord(letter) for letter in "A conversation. " + TEXT]
    asked = {"prompt": first, "max_tokens": 300, "return_token_ids": True}
    (choice,) = cluster.router.complete(**asked).json()["choices"]
    turn = first + choice["token_ids"] + first[::-1]
    cluster.prefill.client.post("/reset_prefix_cache")
    reply = cluster.router.complete(prompt=turn)
    split = reply.json()["usage"]["prompt_tokens_details"]["prefill"]
    known = len(first) + 299  # the last token was never computed
    assert split["host"] == known // BLOCK * BLOCK
    assert text_of(reply.json()) == alone(cluster.decode[0], prompt=turn)


def test_short_prompts_and_batches_need_no_prefill_instance(cluster: Cluster) -> None:
    reply = cluster.router.complete(prompt="Short.")
    assert reply.status_code == 200
    assert "prefill" not in header(reply)
    reply = cluster.router.complete(prompt=[TEXT + "1", TEXT + "2"])
    assert len(reply.json()["choices"]) == 2
    assert "prefill" not in header(reply)


BAD: list[tuple[Any, int]] = [
    ({"prompt": TEXT + "!", "model": "other"}, 404),
    ({"prompt": TEXT * 9}, 400),
    ({"prompt": TEXT + "?", "temperature": -1}, 400),
    ({}, 400),
    ([1], 400),
]


@pytest.mark.parametrize(("body", "status"), BAD)
def test_bad_requests_are_told_by_the_engine(cluster: Cluster, body: Any, status: int) -> None:
    asked = {"model": "tiny", **body} if isinstance(body, dict) else body
    reply = cluster.router.client.post("/v1/completions", json=asked)
    assert reply.status_code == status, reply.text
    assert reply.json()["error"]["message"]
    assert cluster.router.inflight() == 0


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_stops_the_computing(cluster: Cluster, stream: bool) -> None:
    body = {"model": "tiny", "prompt": f"Long {stream}. " + TEXT, "max_tokens": 15_000}
    body |= {"stream": stream, "temperature": 2.0, "ignore_eos": True}
    with httpx.Client(base_url=cluster.router.url, timeout=120) as client:
        try:
            timeout = httpx.Timeout(120, read=120 if stream else 3)
            with client.stream("POST", "/v1/completions", json=body, timeout=timeout) as reply:
                chunks = reply.iter_raw()  # kept: its end would end the stream
                next(chunks)
                assert until(
                    lambda: any(
                        server.metric("vllm:num_requests_running") for server in cluster.decode
                    )
                )
        except httpx.ReadTimeout:
            assert not stream
    assert until(lambda: cluster.router.inflight() == 0)
    assert until(
        lambda: (
            not any(
                s.metric("vllm:num_requests_running") for s in [cluster.prefill, *cluster.decode]
            )
        )
    )


def test_a_dead_prefill_instance_costs_time_and_nothing_else(cluster: Cluster) -> None:
    kill(cluster.prefill)
    text = "Without prefill. " + TEXT
    reply = cluster.router.complete(prompt=text)
    assert reply.status_code == 200, reply.text
    assert "prefill" not in header(reply)
    split = reply.json()["usage"]["prompt_tokens_details"]["recall"]
    assert split["computed"] == reply.json()["usage"]["prompt_tokens"]
    assert text_of(reply.json()) == alone(cluster.decode[0], prompt=text)
    counted = cluster.router.count("prefills_total", outcome="failed")
    assert counted + cluster.router.count("prefills_total", outcome="none_up") >= 1
    assert cluster.router.up()[cluster.prefill.url] is False


def test_a_dead_decode_instance_is_passed_over(cluster: Cluster) -> None:
    text = "Who answers? " + TEXT
    first = cluster.router.complete(prompt=text)
    dead = next(s for s in cluster.decode if s.url.endswith(header(first)["decode"]))
    kill(dead)
    second = cluster.router.complete(prompt=text)  # its prefix is with the dead one
    assert second.status_code == 200, second.text
    assert not dead.url.endswith(header(second)["decode"])
    assert second.json()["usage"]["prompt_tokens_details"]["recall"]["host"] >= BLOCKS
    assert text_of(second.json()) == text_of(first.json())
    assert cluster.router.up()[dead.url] is False


def test_a_stream_that_breaks_says_so(cluster: Cluster) -> None:
    (last,) = [s for s in cluster.decode if s.process.poll() is None]
    body = {"model": "tiny", "prompt": "Endless. ", "max_tokens": 15_000, "stream": True}
    body |= {"ignore_eos": True, "temperature": 2.0}
    with cluster.router.client.stream("POST", "/v1/completions", json=body) as reply:
        lines = reply.iter_lines()
        assert "choices" in json.loads(next(lines)[6:])
        kill(last)
        told = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert told[-1]["error"]["code"] in (500, 502)
    assert until(lambda: cluster.router.inflight() == 0)


def test_with_nobody_left(cluster: Cluster) -> None:
    assert until(lambda: not any(cluster.router.up().values()))
    reply = cluster.router.complete(prompt=TEXT)
    assert reply.status_code == 503
    assert reply.json()["error"]["message"] == "no instance is up"
    assert cluster.router.client.get("/health").status_code == 503
    assert "Traceback" not in cluster.router.log
