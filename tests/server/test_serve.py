"""``kvrecall serve MODEL``, the real thing: one server, all routes, recall from every tier, and
a stop that lets running requests end. The tests run in the order they are written in."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.commands import ran

from kvrecall.errors import ExitStatus
from kvrecall.processes.ports import free_port
from server.live import KVRECALL, START_LIMIT_S, LiveServer, all_gone, serving, sse, until

pytestmark = pytest.mark.engine

Json = dict[str, Any]
TEXT = "The quick brown fox jumps over the lazy dog. " * 20  # 900 tokens, 7 blocks of 128 and 4
BLOCKS = 896


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from kvrecall_lab.models import write_model

    folder = tmp_path_factory.mktemp("serve")
    write_model(folder / "model", "qwen3", hidden=64, layers=2, max_position=16384)
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[LiveServer]:
    disk = ["--disk-path", str(folder / "disk"), "--disk-size", "64MiB", "--no-async-write"]
    with serving(folder, disk, warm=False) as live:
        yield live


def generate(server: LiveServer, text: str, **parameters: Any) -> Json:
    body = {"inputs": text, "parameters": {"details": True, "max_new_tokens": 8} | parameters}
    reply = server.client.post("/generate", json=body)
    assert reply.status_code == 200, reply.text
    answer: Json = reply.json()
    recall = answer["details"]["recall"]
    assert tokens_of(recall) == answer["details"]["prompt_tokens"]
    return answer


def tokens_of(recall: Json) -> int:
    """Prompt tokens of all sources."""
    return sum(tokens for source, tokens in recall.items() if source != "missed")


def test_the_start_is_told(server: LiveServer) -> None:
    assert "[kvrecall] model " in server.log
    assert "host_size=32MiB" in server.log
    assert "disk tier: 0 blocks in" in server.log
    assert "serving tiny on http://127.0.0.1:" in server.log


def test_recall_from_every_tier(server: LiveServer) -> None:
    first = generate(server, TEXT)
    assert first["details"]["recall"]["computed"] == 900
    again = generate(server, TEXT)
    assert again["details"]["recall"]["device"] == BLOCKS
    assert server.client.post("/reset_prefix_cache").status_code == 200
    pooled = generate(server, TEXT)
    assert pooled["details"]["recall"]["host"] == BLOCKS
    assert pooled["details"]["recall"]["computed"] == 4
    assert first["generated_text"] == again["generated_text"] == pooled["generated_text"]
    header = server.client.post("/generate", json={"inputs": TEXT}).headers["x-kvrecall"]
    assert header == "device=896;host=0;disk=0;remote=0;computed=4"


def test_metrics_endpoint(server: LiveServer) -> None:
    generate(server, TEXT)
    tokens = "kvrecall_prompt_tokens_total"
    assert server.metric(tokens, source="host") >= BLOCKS
    assert server.metric(tokens, source="computed") >= 900
    assert server.metric("kvrecall_tier_blocks", tier="host") >= BLOCKS // 128
    assert server.metric("kvrecall_tier_capacity_bytes", tier="host") == 32 << 20
    assert server.metric("kvrecall_loaded_bytes_total") > 0
    told = server.client.get("/metrics-json").json()["result"]
    hits = {
        each["metric"][0]["tier"]: float(each["value"])
        for each in told
        if each["metric"][0]["__name__"] == "prefix_cache_hit_tokens_total"
    }
    assert hits["host"] >= BLOCKS
    assert hits["device"] >= BLOCKS


def test_the_split_survives_a_stop_string(server: LiveServer) -> None:
    """vLLM finds stop strings outside the engine, which then only hears of an abort."""
    whole = generate(server, TEXT, max_new_tokens=20)
    texts = [token["text"] for token in whole["details"]["tokens"][4:]]
    stop = next(text for text in texts if text and text.isprintable())
    assert server.client.post("/reset_prefix_cache").status_code == 200
    cut = generate(server, TEXT, max_new_tokens=20, stop=[stop])
    assert cut["details"]["finish_reason"] == "stop_sequence"
    assert cut["details"]["recall"]["host"] == BLOCKS
    assert "unspecified" not in cut["details"]["recall"]


CHAT = {"messages": [{"role": "user", "content": TEXT}]}
OPENAI = [("/v1/completions", {"prompt": TEXT}), ("/v1/chat/completions", CHAT)]


@pytest.mark.parametrize(("path", "what"), OPENAI)
def test_openai_usage(server: LiveServer, path: str, what: Json) -> None:
    body = {"model": "tiny", "max_tokens": 4, "temperature": 0} | what
    server.client.post(path, json=body)
    reply = server.client.post(path, json=body).json()
    streamed = sse(
        server.client.post(
            path, json=body | {"stream": True, "stream_options": {"include_usage": True}}
        )
    )
    for usage in (reply["usage"], streamed[-1]["usage"]):
        details = usage["prompt_tokens_details"]
        assert tokens_of(details["recall"]) == usage["prompt_tokens"]
        assert details["recall"]["device"] == details["cached_tokens"] >= BLOCKS
        assert details["recall"]["computed"] == usage["prompt_tokens"] - details["cached_tokens"]
    assert streamed[-1]["choices"] == []
    (choice,) = reply["choices"]
    parts = [c for event in streamed for c in event["choices"]]
    if path == "/v1/completions":
        assert "".join(part["text"] for part in parts) == choice["text"]
    else:
        content = [part["delta"]["content"] for part in parts]
        assert "".join(content) == choice["message"]["content"]
    plain = sse(server.client.post(path, json=body | {"stream": True}))
    assert all("usage" not in event or event["usage"] is None for event in plain)


def changed(text: str, at: int, to: str) -> str:
    return text[:at] + to + text[at + 1 :]


def test_a_miss_says_why_and_where(server: LiveServer) -> None:
    """The model's tokens are bytes: the text's places are the tokens'."""
    generate(server, TEXT)
    body = {"inputs": changed(TEXT, 300, "#"), "parameters": {"details": True}}
    reply = server.client.post("/generate", json=body)
    missed = reply.json()["details"]["recall"]["missed"]
    assert missed == {
        "reason": "diverged",
        "from": 256,
        "tokens": 900 - 256,
        "token": 300,
        "text": changed(TEXT, 300, "#")[292:308],
    }
    header = "reason=diverged;from=256;tokens=644;token=300"
    assert reply.headers["x-kvrecall-missed"] == header
    again = server.client.post("/generate", json=body)
    assert "missed" not in again.json()["details"]["recall"]
    assert "x-kvrecall-missed" not in again.headers
    assert server.metric("kvrecall_missed_tokens_total", reason="diverged") >= 644
    request_id = reply.headers["x-kvrecall-request"]
    (told,) = server.client.get(f"/why/{request_id}").json()["requests"]
    assert told["missed"]["reason"] == "diverged"
    assert "text" not in told["missed"], "no prompt text is kept"
    called = ran(KVRECALL, "why", request_id, "--url", server.url, check=True)
    assert "644 tokens from token 256 on: the prompt leaves the nearest known one" in called.stdout
    assert "at token 300" in called.stdout
    unknown = ran(KVRECALL, "why", "nothing", "--url", server.url)
    assert unknown.returncode == ExitStatus.FAILED
    assert "no request 'nothing' here: it never reached this server, or" in unknown.stderr


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_openai_routes_say_why(server: LiveServer, path: str, stream: bool) -> None:
    text = changed(TEXT, 400, "+" if stream else "-")
    what: Json = {"prompt": text}
    if "chat" in path:
        server.client.post(path, json={"model": "tiny", "max_tokens": 1, **CHAT})
        what = {"messages": [{"role": "user", "content": text}]}
    body = {"model": "tiny", "max_tokens": 1, **what}
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    reply = server.client.post(path, json=body)
    told = sse(reply)[-1] if stream else reply.json()
    usage = told["usage"]
    missed = usage["prompt_tokens_details"]["recall"]["missed"]
    assert missed["reason"] == "diverged"
    assert missed["text"][8] == ("+" if stream else "-")
    view = server.client.get(f"/why/{told['id']}").json()["requests"][0]
    assert view["missed"] == {name: missed[name] for name in missed if name != "text"}
    logprobs = {"model": "tiny", "max_tokens": 1, "prompt_logprobs": 1, **what}
    usage = server.client.post(path, json=logprobs).json()["usage"]
    missed = usage["prompt_tokens_details"]["recall"]["missed"]
    assert (missed["reason"], missed["cause"]) == ("not_asked", "prompt_logprobs")


def test_openai_several(server: LiveServer) -> None:
    body = {"model": "tiny", "max_tokens": 2, "prompt": [TEXT, TEXT + "x"], "n": 2}
    usage = server.client.post("/v1/completions", json=body).json()["usage"]
    recall = usage["prompt_tokens_details"]["recall"]
    assert tokens_of(recall) == usage["prompt_tokens"] == 1801
    beams = {"model": "tiny", "max_tokens": 2, "prompt": "x", "n": 2, "use_beam_search": True}
    assert server.client.post("/v1/completions", json=beams).status_code == 200


BAD: list[tuple[str, object, int, str]] = [
    ("/generate", {"inputs": "x" * 20_000}, 422, "Input Validation Error"),
    ("/generate", {"inputs": "x", "parameters": {"adapter_id": "a"}}, 404, "NotFoundError"),
    ("/generate_stream", {"inputs": "x" * 20_000}, 422, "Input Validation Error"),
]


@pytest.mark.parametrize(("path", "body", "status", "kind"), BAD, ids=lambda v: str(v)[:30])
def test_bad_requests(server: LiveServer, path: str, body: object, status: int, kind: str) -> None:
    reply = server.client.post(path, json=body)
    assert (reply.status_code, reply.json()["error_type"]) == (status, kind)


def running(server: LiveServer) -> float:
    return server.metric("num_requests_running")


TOKENS = "generation_tokens_total"


def computes_nothing(server: LiveServer) -> bool:
    """Whether no token is computed while a request of one token is: each of its steps would also
    compute one of any other request that is left."""
    computed = server.metric(TOKENS)
    generate(server, "the only one", max_new_tokens=1)
    return server.metric(TOKENS) == computed + 1


BACK: Json = {"returns": True, "in_s": 45, "pin_s": 60}
CACHED: Json = {"type": "ephemeral", "ttl": "1h"}


def chat(**mark: Any) -> Json:
    return {
        "messages": [{"role": "user", "content": "x"}, {"role": "user", "content": TEXT, **mark}]
    }


def part(**mark: Any) -> Json:
    return {"messages": [{"role": "user", "content": [{"type": "text", "text": TEXT, **mark}]}]}


HINTS: list[tuple[str, Json]] = [
    ("/generate", {"inputs": TEXT, "hint": BACK}),
    ("/v1/completions", {"prompt": TEXT, "hint": BACK}),
    ("/v1/completions", {"prompt": TEXT, "n": 3, "hint": BACK}),
    ("/v1/completions", {"prompt": TEXT, "stream": True, "hint": {"pin_s": 5}}),
    ("/v1/completions", {"prompt": TEXT, "kv_transfer_params": {"kvrecall_hint": BACK}}),
    ("/v1/chat/completions", {**CHAT, "hint": BACK}),
    ("/v1/chat/completions", chat(cache_control=CACHED)),
    ("/v1/chat/completions", part(cache_control={"type": "ephemeral"})),
    ("/v1/chat/completions", {**part(cache_control=CACHED), "stream": True}),
]


def hints(server: LiveServer) -> tuple[float, float]:
    """Those given, and those ignored because of their form."""
    return server.metric("kvrecall_hints_total"), server.metric("kvrecall_hints_invalid_total")


@pytest.mark.parametrize(("path", "body"), HINTS, ids=lambda v: str(v)[:60])
def test_hints(server: LiveServer, path: str, body: Json) -> None:
    given, invalid = hints(server)
    reply = server.client.post(
        path, json={"model": "tiny", "max_tokens": 1} | body if "/v1" in path else body
    )
    assert reply.status_code == 200, reply.text
    assert until(lambda: hints(server) == (given + 1, invalid)), (given, invalid, hints(server))


def test_hints_that_come_true_are_believed(server: LiveServer) -> None:
    """As long as too many have not, they are given and have no effect."""
    short = {"max_new_tokens": 1}
    body = {"inputs": TEXT[5:], "parameters": short, "hint": {"returns": True}}
    given, believed = hints(server)[0], server.metric("kvrecall_hints_believed_total")
    true = server.metric("kvrecall_hints_true_total")
    for _ in range(30):
        assert server.client.post("/generate", json=body).status_code == 200
    assert until(lambda: server.metric("kvrecall_hints_total") == given + 30)
    assert server.metric("kvrecall_hints_true_total") == true + 29
    assert 0 < server.metric("kvrecall_hints_believed_total") - believed <= 30
    # Now they are lies, and soon not believed.
    for number in range(30):
        body = {"inputs": TEXT[7:], "parameters": short, "hint": {"returns": False}}
        assert server.client.post("/generate", json=body).status_code == 200
        if number == 20:
            assert until(lambda: server.metric("kvrecall_hints_total") == given + 51)
            believed = server.metric("kvrecall_hints_believed_total")
    assert until(lambda: server.metric("kvrecall_hints_total") == given + 60)
    assert server.metric("kvrecall_hints_believed_total") == believed
    assert server.metric("kvrecall_hints_false_total") >= 29


NO_HINTS: list[tuple[str, Json, str]] = [
    ("/generate", {"inputs": TEXT}, "hint: it is 3; it must be an object with returns"),
    ("/v1/completions", {"prompt": TEXT}, "hint: it is 3; it must be an object with"),
    ("/v1/chat/completions", CHAT, "hint: it is 3; it must be an object with"),
]


@pytest.mark.parametrize(("path", "body", "said"), NO_HINTS, ids=lambda v: str(v)[:60])
def test_what_is_no_hint_is_refused(server: LiveServer, path: str, body: Json, said: str) -> None:
    """And is not counted."""
    before = hints(server)
    is_openai = "/v1" in path
    reply = server.client.post(
        path, json={**body, "hint": 3} | ({"model": "tiny"} if is_openai else {})
    )
    assert reply.status_code == (400 if is_openai else 422)
    error = reply.json()["error"]
    assert (error["message"] if is_openai else error).startswith(said), error
    assert hints(server) == before


LONGEST = 15_000
LONG: Json = {"max_new_tokens": LONGEST, "ignore_eos": True}
MESSAGES = [{"role": "user", "content": "x"}]
LEFT: list[tuple[str, Json]] = [
    ("/generate", {"inputs": "x", "parameters": LONG}),
    ("/generate_stream", {"inputs": "x", "parameters": LONG}),
    ("/generate", {"prompt": "x", "max_tokens": LONGEST, "ignore_eos": True, "n": 2, "best_of": 3}),
    (
        "/generate",
        {"prompt": "x", "max_tokens": LONGEST, "ignore_eos": True, "n": 2, "use_beam_search": True},
    ),
    ("/infer", {"inputs": "x", "stream": True, "parameters": LONG}),
    ("/v2/models/tiny/generate", {"text_input": "x", "parameters": LONG}),
    ("/v1/completions", {"prompt": "x", "max_tokens": LONGEST, "ignore_eos": True}),
    ("/v1/chat/completions",
     {"messages": MESSAGES, "max_tokens": LONGEST, "ignore_eos": True, "stream": True}),
]  # fmt: skip


def test_the_engine_waits_asleep(server: LiveServer) -> None:
    """While the worker computes its engine process leaves the processor to others: it gives it up
    of its own accord in each step (one that spins is interrupted instead)."""
    core = server.engine_core()
    before = core.num_ctx_switches().voluntary
    generate(server, "x", max_new_tokens=300, ignore_eos=True)
    assert core.num_ctx_switches().voluntary - before > 30  # of 300 steps


@pytest.mark.parametrize(("path", "body"), LEFT, ids=lambda v: str(v)[:60])
def test_a_client_that_leaves(server: LiveServer, path: str, body: Json) -> None:
    """Its request ends in the engine: nothing runs and no token is computed any more."""
    before = server.metric(TOKENS)

    async def ask_and_leave() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
            asking = asyncio.create_task(client.post(path, json=body))
            while await asyncio.to_thread(server.metric, TOKENS) == before:
                assert not asking.done()  # beams pause after each token: none may be seen running
                await asyncio.sleep(0.02)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

    asyncio.run(ask_and_leave())
    assert until(lambda: running(server) == 0)
    assert until(lambda: computes_nothing(server))
    assert server.metric(TOKENS) - before < LONGEST
    assert generate(server, "still there")["generated_text"]


class Race:
    """A batch that is full until its clients leave, four requests that wait, and then one of high
    priority."""

    def __init__(self, server: LiveServer) -> None:
        self._server = server
        self._began: dict[str, int] = {}  # in which order
        self._left: set[str] = set()
        self._threads: list[threading.Thread] = []

    def run(self) -> None:
        for i in range(8):
            self._start(f"full {i}", 7000, 5)
        assert until(lambda: running(self._server) == 8, 60)
        for i in range(4):
            self._start(f"low {i}", 4, 5)
        assert until(lambda: self._waiting() == 4, 60)
        assert self._server.client.get("/v2/health/ready").status_code == 503
        self._start("high", 200, 1)  # for so long the next has to wait
        assert until(lambda: self._waiting() == 5, 60)
        self._left.add("full 0")
        assert until(lambda: "high" in self._began, 60)
        self._left.update(f"full {i}" for i in range(8))
        for thread in self._threads:
            thread.join()

    @property
    def is_first(self) -> bool:
        return all(self._began["high"] < self._began[f"low {i}"] for i in range(4))

    def _waiting(self) -> float:
        return self._server.metric("num_requests_waiting")

    def _start(self, name: str, tokens: int, priority: int) -> None:
        thread = threading.Thread(target=self._ask, args=(name, tokens, priority))
        thread.start()
        self._threads.append(thread)

    def _ask(self, name: str, tokens: int, priority: int) -> None:
        parameters = {"max_new_tokens": tokens, "ignore_eos": True, "priority": priority}
        body = {"inputs": name, "parameters": parameters}
        with self._server.client.stream("POST", "/generate_stream", json=body) as reply:
            for line in reply.iter_lines():
                if name in self._left:
                    return
                if line:
                    self._began.setdefault(name, len(self._began))


def test_priorities(server: LiveServer) -> None:
    """When the batch is full, the last request runs next if it has the highest priority."""
    race = Race(server)
    race.run()
    assert race.is_first
    assert until(lambda: server.client.get("/v2/health/ready").status_code == 200, 60)


def test_second_servers_are_refused_in_one_line(server: LiveServer, folder: Path) -> None:
    disk = ["--disk-path", str(folder / "disk"), "--disk-size", "64MiB"]
    port = server.url.rsplit(":", 1)[1]
    cases = [
        ([*disk, "--port", str(free_port())], f"in use by process {server.engine_core().pid}"),
        (["--port", port], f"port {port} on 127.0.0.1 is in use"),
    ]
    for words, said in cases:
        command = (KVRECALL, "serve", folder / "model", "--host-size", "32MiB", *words)
        done = ran(*command, timeout=60)
        assert done.returncode != 0
        assert said in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1
    assert generate(server, "still there")["generated_text"]


def test_the_pace_of_an_answer(server: LiveServer) -> None:
    """How many sequences each of its steps served, how long it waited, and tokens a second."""
    wanted = {"details": True, "max_new_tokens": 5, "ignore_eos": True}
    body = {"text_input": "x", "parameters": wanted}
    told = server.client.post("/v2/models/tiny/generate", json=body).json()["details"]
    assert told["batch_size"] == [1] * 5
    (wait,) = told["queue_wait_time"]
    assert wait >= 0
    stream = server.client.post("/v2/models/tiny/generate_stream", json=body)
    assert {event["details"]["batch_size"] for event in sse(stream)} == {1}

    def is_told() -> bool:
        server.client.post("/v2/models/tiny/generate", json=body)
        names = ("avg_prompt_throughput_toks_per_s", "avg_generation_throughput_toks_per_s")
        return all(server.metric(name) > 0 for name in names)

    assert until(is_told, 60)


def test_sigterm_lets_running_requests_end(server: LiveServer) -> None:
    """A stream, and a beam search, whose steps are requests of their own to the engine."""
    family = server.family()
    replies: list[httpx.Response] = []

    def search() -> None:
        beams = {"prompt": "x", "max_tokens": 30, "n": 2, "use_beam_search": True}
        with httpx.Client(base_url=server.url, timeout=120) as client:
            replies.append(client.post("/generate", json=beams | {"ignore_eos": True}))

    body = {"inputs": "x", "parameters": {"max_new_tokens": 150, "do_sample": True, "seed": 1}}
    told: list[Json] = []
    before = server.metric("request_received_total")
    searching = threading.Thread(target=search, daemon=True)
    searching.start()
    assert until(lambda: server.metric("request_received_total") > before + 2, 60)
    with server.client.stream("POST", "/generate_stream", json=body) as reply:
        lines = reply.iter_lines()
        told.append(json.loads(next(lines)[6:]))
        os.kill(server.process.pid, signal.SIGTERM)
        told += [json.loads(line[6:]) for line in lines if line]
    assert told[-1]["generated_text"] is not None
    searching.join(60)
    assert [reply.status_code for reply in replies] == [200]
    assert len(replies[0].json()["text"]) == 2
    assert server.wait_end() == 0
    assert all_gone(family)
    assert "Traceback" not in server.log


@pytest.mark.long
def test_sigterm_while_starting(folder: Path) -> None:
    words = [str(folder / "model"), "--no-pool", "--port", str(free_port())]
    starting = LiveServer(folder, words, "http://127.0.0.1", warm=True)
    try:
        assert until(lambda: bool(starting.named("VLLM::EngineCor")), START_LIMIT_S)
        starting.engine_core().suspend()  # so that it does not end first
        family = starting.family()
        starting.process.send_signal(signal.SIGTERM)
        assert starting.wait_end() == ExitStatus.TERMINATED
        assert "startup complete" not in starting.log
        assert all_gone(family)
    finally:
        starting.close()


@pytest.mark.long
def test_what_vllm_asserts_of_its_settings_is_one_line(folder: Path) -> None:
    """A rank of several hosts, all of whose replicas are said to be here."""
    here = "--data-parallel-size 2 --data-parallel-size-local 2 --data-parallel-start-rank 1"
    words = [str(folder / "model"), "--no-pool", "--port", str(free_port()), "--", *here.split()]
    starting = LiveServer(folder, words, "http://127.0.0.1", warm=True)
    try:
        assert starting.wait_end(START_LIMIT_S) == ExitStatus.WRONG_SETTINGS
        assert "kvrecall: vLLM does not accept these settings: Attempting to" in starting.log
        assert "; --data-parallel-start-rank is for one of several hosts" in starting.log
        assert "Traceback" not in starting.log
    finally:
        starting.close()


@pytest.mark.long
@pytest.mark.parametrize("plugins", [None, "ascend_enhanced_model,ascend,retrieval"])
def test_a_seed_without_a_pool(folder: Path, plugins: str | None) -> None:
    """A seeded request whose prefill takes several steps ends no engine, without a pool either, and
    whatever plug-ins are named, here those of openGauss's RetrievalKV."""
    port = free_port()
    words = [str(folder / "model"), "--no-pool", "--port", str(port)]
    words += ["--kv-cache-memory-bytes", "64MiB", "--", "--max-num-batched-tokens", "256"]
    named = {} if plugins is None else {"VLLM_PLUGINS": plugins}
    named |= {"VLLM_RETRIEVAL_DENSE_LAYERS": "1"}  # of the model's two
    url = f"http://127.0.0.1:{port}"
    plain = LiveServer(folder, words, url, warm=plugins is None, environment=named)
    try:
        plain.wait_ready()
        sampled = {"do_sample": True, "seed": 3, "max_new_tokens": 8, "details": True}
        asked = {"inputs": TEXT, "parameters": sampled}
        first, second = (plain.client.post("/generate", json=asked).json() for _ in range(2))
        assert first["details"]["generated_tokens"] == 8
        assert second["generated_text"] == first["generated_text"]
    finally:
        plain.close()
