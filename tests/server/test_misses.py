"""What a live server tells of misses: to two tenants, to whoever asks for odd ids, of several
sequences, of many requests at once and of one that is given up."""

from __future__ import annotations

import itertools
import random
import string
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.commands import ran

from kvrecall.block import tenant_of
from kvrecall.engines.parting import ADVICE
from kvrecall.errors import ExitStatus
from kvrecall.pool.service.admin import Drop, Query, ServiceAdmin
from server.live import KVRECALL, LiveServer, serving, until

pytestmark = [pytest.mark.engine, pytest.mark.long]

Json = dict[str, Any]
THEIRS, OURS = "salt-of-theirs", "salt-of-ours"
LENGTH = 300  # tokens of a prompt, which are bytes: two blocks of 128, and 44
RNG = random.Random(5)
NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server whose pool can be asked to drop blocks."""
    folder = tmp_path_factory.mktemp("misses")
    pool = folder / "pool.json"
    pool.write_text('{"admin_socket": "%s"}' % (folder / "admin.sock"))
    with serving(folder, ["--pool-config", str(pool)], longest=1024, sequences=32) as live:
        yield live


def fresh(length: int = LENGTH) -> str:
    """A prompt that no other one begins like."""
    return "".join(RNG.choices(string.ascii_letters, k=length))


def post(server: LiveServer, salt: str | None, **body: Any) -> httpx.Response:
    salted = {} if salt is None else {"cache_salt": salt}
    whole = {"model": "tiny", "max_tokens": 1, "temperature": 0, **salted, **body}
    reply = server.client.post("/v1/completions", json=whole)
    assert reply.status_code == 200, reply.text
    return reply


def recall(reply: httpx.Response) -> Json:
    usage = reply.json()["usage"]
    told: Json = usage["prompt_tokens_details"]["recall"]
    assert sum(n for name, n in told.items() if name != "missed") == usage["prompt_tokens"]
    return told


def why(server: LiveServer, request_id: str) -> list[Json]:
    reply = server.client.get(f"/why/{request_id}")
    assert reply.status_code == 200, reply.text
    found: list[Json] = reply.json()["requests"]
    return found


def drop(server: LiveServer, salt: str) -> None:
    server.forget_device()
    with ServiceAdmin(server.folder / "admin.sock", 60.0) as admin:
        admin.do(Drop(Query(tenants=(tenant_of(salt),)), True))


def history(server: LiveServer, reason: str | None) -> tuple[str, Json]:
    """What the other tenant does, and the request that it gets this reason for."""
    prompt, more = fresh(8 if reason == "short" else LENGTH), {}
    match reason:
        case "diverged":
            post(server, THEIRS, prompt=prompt[:200] + fresh(100))
        case "evicted":
            post(server, THEIRS, prompt=prompt)
            drop(server, THEIRS)
        case "not_asked":
            post(server, THEIRS, prompt=prompt)
            more = {"prompt_logprobs": 0}
        case None:
            post(server, THEIRS, prompt=prompt)
    return prompt, more


@pytest.mark.parametrize("reason", ["new", "short", "diverged", "evicted", "not_asked", None])
@pytest.mark.parametrize("salt", [OURS, None])
def test_a_tenant_learns_nothing_of_another(
    live: LiveServer, reason: str | None, salt: str | None
) -> None:
    """What it is told of their prompt, before and after they repeat it, is what it is told of a
    prompt that nobody had."""
    prompt, more = history(live, reason)
    told = recall(post(live, salt, prompt=prompt, **more))
    assert told == recall(post(live, salt, prompt=fresh(len(prompt)), **more))
    kind = reason if reason in ("short", "not_asked") else "new"
    assert told["missed"]["reason"] == kind
    theirs = recall(post(live, THEIRS, prompt=prompt, **more))
    assert theirs.get("missed", {}).get("reason") == reason


def test_reasons_are_found_while_the_workers_compute(live: LiveServer) -> None:
    """vLLM makes the call in which they are."""
    for _ in range(2):
        post(live, None, prompt=fresh())
    for name in ("explain", "explain_aside"):
        assert live.metric(f"kvrecall_{name}_seconds_total") > 0, name


def test_headers_tell_nothing_of_another_tenant(live: LiveServer) -> None:
    prompt = fresh()
    post(live, THEIRS, prompt=prompt)
    replies = [
        live.client.post("/generate", json={"inputs": one, "parameters": {"max_new_tokens": 1}})
        for one in (prompt, fresh())
    ]
    own = ("x-kvrecall", "x-kvrecall-missed")
    first, second = ([reply.headers[name] for name in own] for reply in replies)
    assert first == second
    assert first[1] == f"reason=new;from=0;tokens={LENGTH}"
    assert replies[0].headers.keys() == replies[1].headers.keys()


def test_a_clock_at_the_head_is_named(live: LiveServer) -> None:
    """To the client with its text, to operators without; and what it costs."""
    behind = fresh()
    for minute in range(10, 13):
        asked = f"This is the prompt of 09:{minute} o'clock. {behind}"
        missed = recall(answer := post(live, OURS, prompt=asked)).get("missed", {})
    assert (missed["reason"], missed["cause"], missed["token"]) == ("diverged", "clock", 26)
    assert "09:12" in missed["text"]
    (told,) = why(live, answer.json()["id"])
    assert told["why"].endswith(ADVICE["clock"])
    assert "09:12" not in told["why"]
    partings = live.management.get("/dashboard/data.json").json()["partings"]
    (clock,) = [one for one in partings if one["cause"] == "clock"]
    assert (clock["requests"], clock["tokens"]) == (2, 2 * len(asked))
    assert clock["example"] == told["id"]


def test_the_management_plane_has_no_text_and_no_salt(live: LiveServer) -> None:
    """Neither of prompts nor of answers, of requests that run and that have ended."""
    prompt = fresh()
    name = f"open-{next(NUMBERS)}"
    post(live, THEIRS, prompt=prompt[:200] + fresh(100))
    answer = post(live, THEIRS, prompt=prompt, max_tokens=32).json()
    assert answer["usage"]["prompt_tokens_details"]["recall"]["missed"]["text"] == prompt[192:208]
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 600, "ignore_eos": True}
    body |= {"stream": True, "cache_salt": THEIRS}
    headers = {"X-Request-Id": name}
    with live.client.stream("POST", "/v1/completions", json=body, headers=headers) as reply:
        lines = reply.iter_lines()  # its end would close the connection
        next(lines)
        pages = [
            live.management.get(path).text
            for path in (
                f"/why/cmpl-{name}", f"/why/{answer['id']}", "/metrics", "/metrics-json",
                "/dashboard/data.json", "/dashboard/tree.json", "/v1/status", "/info",
            )
        ]  # fmt: skip
    for page in pages:
        assert len(page) > 2
        for secret in (THEIRS, prompt[:16], prompt[192:208]):
            assert secret not in page, page[max(0, page.find(secret) - 80) :][:200]


def test_requests_of_one_name_are_told_apart(live: LiveServer) -> None:
    """Two tenants may name theirs alike: each reply has its own report, ``/why`` has both, of
    several prompts in one request too."""
    name, prompts = f"same-{next(NUMBERS)}", [fresh(), fresh(200)]
    headers = {"X-Request-Id": name}
    for salt in (THEIRS, OURS):
        body = {"model": "tiny", "prompt": prompts, "max_tokens": 1, "cache_salt": salt}
        reply = live.client.post("/v1/completions", json=body, headers=headers)
        assert recall(reply)["missed"] == {"reason": "new", "from": 0, "tokens": LENGTH}
    views = why(live, f"cmpl-{name}")
    assert sorted(view["missed"]["tokens"] for view in views) == [200, 200, LENGTH, LENGTH]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("sampling", [{"n": 3}, {"n": 2, "best_of": 4}, {"n": 2, "stop": ["\n"]}])
def test_several_sequences_have_one_reason(live: LiveServer, sampling: Json, stream: bool) -> None:
    """That of the first: the others hit what it computes."""
    if stream and "best_of" in sampling:
        pytest.skip("best_of cannot be streamed")
    prompt, name = fresh(), f"several-{next(NUMBERS)}"
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 4, "temperature": 1.0, **sampling}
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    headers = {"X-Request-Id": name}
    missed = {"reason": "new", "from": 0, "tokens": LENGTH}
    for expected in (missed, None):
        reply = live.client.post("/v1/completions", json=body, headers=headers)
        assert reply.status_code == 200, reply.text
        if stream:
            usage = [line for line in reply.iter_lines() if '"usage":{' in line][-1]
            reply = httpx.Response(200, text=usage.removeprefix("data: "))
        assert recall(reply).get("missed") == expected
    assert [view["missed"] for view in why(live, f"cmpl-{name}")] == [missed, None]


def test_several_streamed_prompts_have_each_its_reason(live: LiveServer) -> None:
    """vLLM takes their outputs in tasks of their own."""
    name, prompts = f"streamed-{next(NUMBERS)}", [fresh(), fresh(200)]
    body = {"model": "tiny", "prompt": prompts, "max_tokens": 8, "ignore_eos": True}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    headers = {"X-Request-Id": name}
    reply = live.client.post("/v1/completions", json=body, headers=headers)
    assert reply.status_code == 200, reply.text
    usage = next(line for line in reversed([*reply.iter_lines()]) if '"usage":{' in line)
    told = recall(httpx.Response(200, text=usage.removeprefix("data: ")))
    assert told["missed"] == {"reason": "new", "from": 0, "tokens": LENGTH}
    views = why(live, f"cmpl-{name}")
    assert [view["phase"] for view in views] == ["done", "done"]
    assert sorted(view["missed"]["tokens"] for view in views) == [200, LENGTH]


def test_two_hundred_at_once(live: LiveServer) -> None:
    """Each has its own reason, in its reply and by its id."""
    prompts = [fresh(130 + number) for number in range(200)]

    def ask(prompt: str) -> httpx.Response:
        return post(live, OURS, prompt=prompt)

    with ThreadPoolExecutor(200) as threads:
        replies = [*threads.map(ask, prompts)]
    for prompt, reply in zip(prompts, replies, strict=True):
        missed = {"reason": "new", "from": 0, "tokens": len(prompt)}
        assert recall(reply)["missed"] == missed
        assert [view["missed"] for view in why(live, reply.json()["id"])] == [missed]
    assert live.management.get("/dashboard/data.json").json()["live_total"] == 0


def test_a_request_that_is_given_up_has_its_reason(live: LiveServer) -> None:
    prompt, name = fresh(), f"given-up-{next(NUMBERS)}"
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 700, "ignore_eos": True}
    headers = {"X-Request-Id": name}
    with live.client.stream(
        "POST", "/v1/completions", json=body | {"stream": True}, headers=headers
    ) as reply:
        lines = reply.iter_lines()  # its end would close the connection
        next(lines)
        (view,) = why(live, f"cmpl-{name}")
        assert (view["phase"], view["missed"]["reason"]) == ("decode", "new")
    assert until(lambda: why(live, f"cmpl-{name}")[-1]["ended"])
    view = why(live, f"cmpl-{name}")[-1]
    assert (view["phase"], view["missed"]["reason"]) == ("cancelled", "new")
    assert view["why"].startswith(f"{LENGTH} tokens from token 0 on: first time seen")


ODD = [
    "", "/", ".", "..", "../metrics", "../../etc/passwd", "a/b", "%00", "%0a", "%ff", "%25",
    "%E6%BC%A2%E5%AD%97", "cmpl-", ".*", "x" * 30_000,
]  # fmt: skip
"""Ids, as they stand in a URL."""


@pytest.mark.parametrize("name", ODD, ids=lambda name: name[:12] or "empty")
def test_odd_ids_are_not_known(live: LiveServer, name: str) -> None:
    reply = live.management.get(f"/why/{name}")
    if name in (".", "..", "../metrics", "../../etc/passwd"):  # the client resolves them itself
        assert reply.status_code in (200, 307, 404, 405)
        return
    assert reply.status_code == 404, reply.text[:300]
    assert reply.json()["error"].startswith("no request ")


@pytest.mark.parametrize(
    "name", ["", "..", "../metrics", "a b?c#d", "漢字", b"\xff\xfe", "x" * 30_000, "x" * 120_000]
)
def test_the_command_takes_odd_ids(live: LiveServer, name: str | bytes) -> None:
    done = ran(KVRECALL, "why", "--url", live.url, "--", name)
    assert done.returncode == ExitStatus.FAILED, done.stderr[-600:]
    assert "Traceback" not in done.stderr
    assert "no request " in done.stderr, done.stderr[-600:]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_an_id_that_is_too_long_to_remember_is_refused(live: LiveServer, path: str) -> None:
    """vLLM takes ids of any length, and thousands of them are remembered."""
    body: Json = {"model": "tiny", "max_tokens": 1, "temperature": 0}
    prompt = fresh()
    body |= (
        {"messages": [{"role": "user", "content": prompt}]}
        if "chat" in path
        else {"prompt": prompt}
    )
    before = len(live.log)
    reply = live.client.post(path, json=body, headers={"X-Request-Id": "i" * 50_000})
    assert reply.status_code == 431
    assert reply.json()["error_type"] == "Request Header Fields Too Large"
    assert reply.json()["error"] == "X-Request-Id: 50000 characters; allowed: 1024"
    reply = live.client.post(path, json=body | {"request_id": "i" * 100_000})
    assert reply.status_code == 400
    message = reply.json()["error"]["message"]
    assert message.startswith("request_id: 100000 characters; allowed: 1024")
    assert len(live.log) - before < 10_000
    reply = live.client.post(path, json=body, headers={"X-Request-Id": "i" * 1024})
    assert reply.status_code == 200
    (view,) = why(live, reply.json()["id"])
    assert "i" * 1024 in view["id"]


def test_the_command_does_not_take_other_servers_for_ours(tmp_path: Path) -> None:
    import http.server
    import threading

    class Other(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'["hello"]')

        def log_message(self, *_: object) -> None:
            """Is silent."""

    with http.server.HTTPServer(("127.0.0.1", 0), Other) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{other.server_port}"
        done = ran(KVRECALL, "why", "one", "--url", url)
        other.shutdown()
    assert done.returncode == ExitStatus.FAILED, done.stdout
    assert f"no kvrecall server answers at {url}" in done.stderr
    assert "Traceback" not in done.stderr
