"""kvrecall's connector beside NIXL's, as vLLM's documents set up prefill and decode: NIXL moves a
prompt's blocks from the prefill instance's device to the decode instance's, and the prefill
instance has a pool. Real ``vllm serve`` and a real router; NIXL over UCX, on CPUs."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import random
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from server.live import LiveServer, until

from kvrecall.processes.ports import free_port
from router.cluster import Json, Router, header, kill, tiny, tokens_of

pytestmark = [
    pytest.mark.engine,
    pytest.mark.long,
    pytest.mark.skipif(
        importlib.util.find_spec("nixl") is None,
        reason="NIXL is not installed, and set-up does not bring it: pip install nixl==1.5.1",
    ),
]

VLLM: dict[str, tuple[str | Path, ...]] = {
    "V1": (Path(sys.executable).parent / "vllm", "serve"),
    "V2": (sys.executable, Path(__file__).with_name("as_v2.py"), "serve"),
}
"""By model runner."""
BLOCK = 128
CLIENTS, REQUESTS = 8, 240
TEXT = "Two instances, one answer, and nothing that is computed twice on the way. " * 20


@dataclass(slots=True)
class Pair:
    prefill: LiveServer
    decode: LiveServer
    router: Router


def serve(folder: Path, model: Path, runner: str) -> LiveServer:
    folder.mkdir()
    ours = {"host_size": "64MiB", "load_or_compute": "load", "load_deadline": 20}
    nixl = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
    recall: Json = {"kv_connector": "RecallConnector", "kv_role": "kv_both"}
    recall |= {"kv_connector_module_path": "kvrecall.engines.vllm"}
    recall["kv_connector_extra_config"] = ours
    several: Json = {"kv_connector": "MultiConnector", "kv_role": "kv_both"}
    several["kv_connector_extra_config"] = {"connectors": [nixl, recall]}
    port, side = free_port(), free_port()
    words = f"{model} --port {port} --served-model-name tiny --dtype float32 --enforce-eager"
    words += " --max-num-seqs 8 --block-size 128 --kv-cache-memory-bytes 31457280"
    surroundings = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(side), "UCX_TLS": "tcp,self,sm"}
    if runner == "V2":
        surroundings |= {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}
    return LiveServer(
        folder,
        [*words.split(), "--kv-transfer-config", json.dumps(several)],
        f"http://127.0.0.1:{port}",
        program=VLLM[runner],
        environment=surroundings,
    )


@pytest.fixture(scope="module", params=[*VLLM])
def pair(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("pair")
    model = tiny(folder)
    with ExitStack() as stack:
        servers = [serve(folder / name, model, request.param) for name in ("prefill", "decode")]
        for server in servers:
            stack.callback(server.close)
        for server in servers:
            server.wait_ready()
            assert ("Using V2 Model Runner" in server.log) == (request.param == "V2")
        words = ["--prefill", servers[0].url, "--decode", servers[1].url]
        router = Router(folder, words)
        stack.callback(router.close)
        yield Pair(*servers, router)


def alone(server: LiveServer, text: str) -> list[int]:
    """Of one engine that computes everything: a salt keeps its blocks apart."""
    asked = {"model": "tiny", "prompt": text, "max_tokens": 24, "temperature": 0}
    asked |= {"return_token_ids": True, "cache_salt": f"alone {text[:40]}"}
    return tokens_of(server.client.post("/v1/completions", json=asked).json())


def pulled(pair: Pair) -> float:
    """Prompts that NIXL has moved to the decode instance."""
    return pair.decode.metric("vllm:nixl_xfer_time_seconds_count")


def writes(server: LiveServer) -> float:
    """Blocks that an engine has put into its pool. Metrics move with steps."""
    server.client.post("/v1/completions", json={"model": "tiny", "prompt": "x", "max_tokens": 2})
    return server.metric("kvrecall_tier_writes_total", tier="host")


def ask(pair: Pair, text: str) -> Json:
    reply = pair.router.complete(prompt=text, max_tokens=24, return_token_ids=True)
    assert reply.status_code == 200, reply.text
    assert f"http://{header(reply)['prefill']}" == pair.prefill.url
    assert f"http://{header(reply)['decode']}" == pair.decode.url
    answer: Json = reply.json()
    return answer


def test_nixl_hands_over_and_the_pool_brings_back(pair: Pair) -> None:
    text = f"First. {TEXT}"
    assert tokens_of(ask(pair, text)) == alone(pair.prefill, text)
    assert pulled(pair) == 1
    assert until(lambda: writes(pair.prefill) >= len(text) // BLOCK)
    assert "another connector has loaded KV into this engine" in pair.decode.log
    assert "another connector has loaded KV into this engine" not in pair.prefill.log
    again = f"{text} And a second turn. {TEXT}"
    pair.prefill.forget_device()
    answer = ask(pair, again)
    split = answer["usage"]["prompt_tokens_details"]["prefill"]
    assert split["host"] == len(text) // BLOCK * BLOCK
    assert tokens_of(answer) == alone(pair.prefill, again)
    assert pulled(pair) == 2


def test_a_full_device_and_clients_that_leave(pair: Pair) -> None:
    """Eight at a time, whose prompts take 90 % of either device; every third leaves early."""
    texts = [f"Many {number}. {TEXT[: 1400 - number]}" for number in range(12)]
    right = {text: alone(pair.decode, text) for text in texts}
    fullest = [0.0]

    def client(number: int) -> int:
        draw = random.Random(number)
        for turn in range(REQUESTS // CLIENTS):
            text = draw.choice(texts)
            asked = {"model": "tiny", "prompt": text, "max_tokens": 24, "temperature": 0}
            asked |= {"return_token_ids": True, "cache_salt": f"{number} {draw.randrange(4)}"}
            url = f"{pair.router.url}/v1/completions"
            if turn % 3 == 2:
                with contextlib.suppress(httpx.TimeoutException):
                    httpx.post(url, json=asked, timeout=draw.uniform(0.02, 0.5))
                continue
            reply = httpx.post(url, json=asked, timeout=300)
            assert reply.status_code == 200, reply.text
            assert tokens_of(reply.json()) == right[text]
            fullest[0] = max(fullest[0], pair.decode.metric("vllm:kv_cache_usage_perc"))
        return number

    before = pulled(pair)
    with ThreadPoolExecutor(CLIENTS) as clients:
        assert list(clients.map(client, range(CLIENTS))) == list(range(CLIENTS))
    assert pulled(pair) > before
    assert fullest[0] > 0.5
    for server in (pair.prefill, pair.decode):  # NIXL holds for 30 s what was not asked for
        assert until(
            lambda server=server: (
                writes(server) >= 0 and server.metric("vllm:kv_cache_usage_perc") == 0
            ),
            120,
        ), server.log[-3000:]
    assert until(lambda: pair.router.inflight() == 0)


def test_what_nixl_brought_is_saved_by_nobody_that_did_not_compute_it(pair: Pair) -> None:
    """Neither from the request itself, nor from one that finds it on the device."""
    text = f"Saved. {TEXT}"
    ask(pair, text)
    before = writes(pair.decode)
    asked = {"model": "tiny", "prompt": f"{text} {TEXT}", "max_tokens": 2}
    assert pair.decode.client.post("/v1/completions", json=asked).status_code == 200
    assert writes(pair.decode) == before == 0


def prefilled(pair: Pair, text: str) -> Json:
    """Has the prefill instance compute a prompt. Returns what the decode instance is asked."""
    body = {"model": "tiny", "prompt": text, "temperature": 0, "return_token_ids": True}
    held = {"do_remote_decode": True, "do_remote_prefill": False}
    asked = {**body, "max_tokens": 1, "kv_transfer_params": held}
    told = pair.prefill.client.post("/v1/completions", json=asked).json()["kv_transfer_params"]
    assert told["do_remote_prefill"]
    return {**body, "max_tokens": 24, "kv_transfer_params": told}


def test_a_handover_that_fails_is_computed(pair: Pair) -> None:
    """Nothing is where the blocks should be."""
    text = f"Gone. {TEXT}"
    right = alone(pair.decode, text)
    asked = prefilled(pair, text)
    asked["kv_transfer_params"] |= {"remote_port": free_port(), "remote_engine_id": "of another"}
    reply = pair.decode.client.post("/v1/completions", json=asked)
    assert reply.status_code == 200, reply.text
    assert tokens_of(reply.json()) == right


def test_a_handover_that_stalls_is_computed_by_the_deadline(pair: Pair) -> None:
    """NIXL waits as long as it takes; its device blocks stay out of use until it is done."""
    text = f"Stalls. {TEXT}"
    right = alone(pair.decode, text)
    asked, before = prefilled(pair, text), pair.decode.metric("kvrecall_handovers_late_total")
    os.killpg(pair.prefill.process.pid, signal.SIGSTOP)
    try:
        reply = pair.decode.client.post("/v1/completions", json=asked)
    finally:
        os.killpg(pair.prefill.process.pid, signal.SIGCONT)
    assert reply.status_code == 200, reply.text
    assert tokens_of(reply.json()) == right
    assert until(
        lambda: (
            writes(pair.decode) >= 0
            and pair.decode.metric("kvrecall_handovers_late_total") == before + 1
            and pair.decode.metric("vllm:kv_cache_usage_perc") == 0
        )
    )


def test_a_handover_after_its_lease_is_computed(pair: Pair) -> None:
    """NIXL reads whatever is there by then, and takes it."""
    text, expired = f"Expired. {TEXT}", "vllm:nixl_num_kv_expired_reqs_total"
    right, before = alone(pair.decode, text), pair.prefill.metric(expired)
    asked = prefilled(pair, text)
    assert until(lambda: writes(pair.prefill) >= 0 and pair.prefill.metric(expired) > before, 300)
    for number in range(40):  # prompts of 12 blocks, on a device of some hundred
        alone(pair.prefill, f"Other {number}. {TEXT}")
    reply = pair.decode.client.post("/v1/completions", json=asked)
    assert reply.status_code == 200, reply.text
    assert tokens_of(reply.json()) == right


def test_without_the_prefill_instance_the_decode_instance_computes(pair: Pair) -> None:
    text = f"Killed. {TEXT}"
    right = alone(pair.decode, text)
    kill(pair.prefill)
    reply = pair.router.complete(prompt=text, max_tokens=24, return_token_ids=True)
    assert reply.status_code == 200, reply.text
    assert tokens_of(reply.json()) == right
