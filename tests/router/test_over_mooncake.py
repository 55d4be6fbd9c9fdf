"""Prefill-decode disaggregation over a remote store: two engines with their own pools, which share
only Mooncake's master, and a router in front of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import pytest
from pool.remote.mooncake import needs_mooncake
from server.live import LiveServer, until

from kvrecall.processes.ports import free_port, two_ports
from kvrecall.processes.service import Master
from router.cluster import Json, Router, header, instance, tiny, tokens_of

pytestmark = [pytest.mark.engine, pytest.mark.long, needs_mooncake]

BLOCK = 128
TEXT = "The clocks were striking thirteen, and nobody had wound them up for a year. " * 26
PATIENCE = {  # busy machines
    "lookup_deadline": 60,
    "handover_deadline": 10,
    "load_deadline": 60,
    "load_or_compute": "load",
}


@dataclass(slots=True)
class Apart:
    master: Master
    prefill: LiveServer
    decode: LiveServer
    router: Router
    ports: list[int]  # of their events


def prove(decode: LiveServer, router: Router) -> None:
    """Prompts until the decode instance has audited what the prefill instance writes."""
    for number in range(10):
        assert router.complete(prompt=f"Warm-up {number}. {TEXT}").status_code == 200
        if decode.metric("kvrecall_audits_total"):
            return
    raise AssertionError("nothing was audited")


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Apart]:
    folder = tmp_path_factory.mktemp("apart")
    model = tiny(folder)
    with ExitStack() as stack:
        master = Master(folder / "master.log")
        stack.callback(master.kill)
        master.start()
        remote = {"kind": "mooncake", **master.options("64MB")}
        servers: list[LiveServer] = []
        ports: list[int] = []
        for role in ("prefill", "decode"):
            pool = {"host_size": "64MiB", "remote": remote, "audit": 0, **PATIENCE}
            ports.append(two_ports())
            home = folder / role
            servers.append(instance(home, model, role, free_port(), None, ports[-1], **pool))
            stack.callback(servers[-1].close)
        for server in servers:
            server.wait_ready()
        urls = [f"{one.url}?events={at}" for one, at in zip(servers, ports, strict=True)]
        router = Router(folder, ["--prefill", urls[0], "--decode", urls[1]])
        stack.callback(router.close)
        prove(servers[1], router)
        yield Apart(master, *servers, router, ports)


def alone(server: LiveServer, prompt: str) -> list[int]:
    """The tokens of one engine that computes everything: a salt keeps its blocks apart."""
    asked = {"model": "tiny", "prompt": prompt, "max_tokens": 24, "temperature": 0}
    asked |= {"return_token_ids": True, "cache_salt": f"alone {prompt[:40]}"}
    reply = server.client.post("/v1/completions", json=asked).json()
    assert reply["usage"]["prompt_tokens_details"]["recall"]["computed"] == len(prompt)
    return tokens_of(reply)


def audited(split: Json) -> int:
    """Tokens that were computed although they are in the pool: the proof of what a writer wrote
    ends with the second, and so all but the quickest hit on another host's blocks is audited."""
    return BLOCK if split.get("missed", {}).get("reason") == "audit" else 0


def stored_by(server: LiveServer) -> float:
    """Blocks that an instance has put into the store. Metrics move with the engine's steps."""
    server.client.post("/v1/completions", json={"model": "tiny", "prompt": "x", "max_tokens": 2})
    return server.metric("kvrecall_tier_writes_total", tier="remote")


def test_what_one_host_prefilled_another_decodes(apart: Apart) -> None:
    whole = len(TEXT) // BLOCK * BLOCK  # the model's tokens are bytes
    reply = apart.router.complete(prompt=TEXT, max_tokens=24, return_token_ids=True)
    assert reply.status_code == 200, reply.text
    assert f"http://{header(reply)['prefill']}" == apart.prefill.url
    assert f"http://{header(reply)['decode']}" == apart.decode.url
    details = reply.json()["usage"]["prompt_tokens_details"]
    assert details["prefill"]["computed"] == len(TEXT)
    assert details["recall"]["remote"] == whole - audited(details["recall"])
    assert details["recall"]["computed"] == len(TEXT) - details["recall"]["remote"]
    assert tokens_of(reply.json()) == alone(apart.prefill, TEXT)


def test_what_one_host_put_into_the_store_the_other_is_known_to_recall(apart: Apart) -> None:
    """By the events of both, which name the store."""
    text = "Known to both. " + TEXT
    whole = len(text) // BLOCK * BLOCK

    def counted(name: str) -> float:
        return apart.router.count(f"{name}_tokens_total", role="decode", source="remote")

    def known(port: int) -> float:
        publisher = f'publisher="127.0.0.1:{port}",tier="remote"'
        return sum(count for name, count in apart.router.blocks().items() if publisher in name)

    asked = {"model": "tiny", "max_tokens": 2, "temperature": 0}
    for server, port, prompt in zip(
        (apart.decode, apart.prefill), reversed(apart.ports), ("Of one. " + TEXT, text), strict=True
    ):
        before = stored_by(server)
        reply = server.client.post("/v1/completions", json={**asked, "prompt": prompt})
        assert reply.status_code == 200
        least = before + whole // BLOCK
        assert until(
            lambda server=server, port=port, least=least: (
                (stored := stored_by(server)) >= least and known(port) == stored
            )
        ), (known(port), stored_by(server), least)
    counts = {name: counted(name) for name in ("expected", "prompt")}
    reply = apart.router.complete(prompt=text)
    assert "prefill" not in header(reply), "the decode instance is known to recall it"
    split = reply.json()["usage"]["prompt_tokens_details"]["recall"]
    assert split["remote"] == whole - audited(split)
    new = {name: counted(name) - counts[name] for name in counts}
    assert new == {"expected": whole, "prompt": split["remote"]}


def next_turn(apart: Apart, first: str) -> tuple[Json, int, int]:
    """Has a conversation and its next turn. Returns what the prefill instance had of that, and how
    many tokens that it could have: those of its own, and all."""
    before = stored_by(apart.decode)
    asked = {"max_tokens": 300, "return_token_ids": True}
    reply = apart.router.complete(prompt=[ord(letter) for letter in first], **asked)
    turn = [ord(letter) for letter in first] + tokens_of(reply.json()) + list(range(65, 91)) * 20
    kept = len(first) // BLOCK * BLOCK  # the prefill instance has computed those itself
    known = (len(first) + 299) // BLOCK * BLOCK  # the last token was never computed
    new = (known - kept) // BLOCK
    assert until(lambda: stored_by(apart.decode) >= before + new)
    apart.prefill.client.post("/reset_prefix_cache")
    usage = apart.router.complete(prompt=turn, max_tokens=1).json()["usage"]
    return usage["prompt_tokens_details"]["prefill"], kept, known


def test_the_next_turn_is_prefilled_from_what_was_decoded(apart: Apart) -> None:
    """The answer's blocks lie in the decode instance's pool, and in the store; the prefill instance
    audits the last."""
    split, kept, known = next_turn(apart, f"Conversation. {TEXT}")
    assert split["host"] == kept
    assert split["remote"] == known - kept - BLOCK > 0


def test_without_the_master_the_decode_instance_computes(apart: Apart) -> None:
    apart.master.kill()
    text = "Nobody knows where anything is. " + TEXT
    asked = {"max_tokens": 24, "return_token_ids": True, "prompt": text}
    reply = apart.router.complete(**asked)
    assert reply.status_code == 200, reply.text
    split = reply.json()["usage"]["prompt_tokens_details"]["recall"]
    assert split["computed"] == len(text)
    assert tokens_of(reply.json()) == alone(apart.decode, text)
