"""A router process before instances of other makes: their encodings, their HTTP, their number."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import gzip
import importlib.util
import json
import re
import socket
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from server.live import until

from kvrecall.processes.ports import free_port
from kvrecall.router.connections import Connections
from router.cluster import Router
from router.test_router import in_front_of, is_whole, router, saying, server

EVENTS = b'data: {"choices": []}\n\ndata: {"choices": [], "usage": {"prompt_tokens": 1, %s}}\n\n'
RECALL = b'"prompt_tokens_details": {"recall": {"host": 1}}'
STREAM = EVENTS % RECALL + b"data: [DONE]\n\n"
REPLY = b'{"usage": {"prompt_tokens": 1, %s}}' % RECALL
ENCODED: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "x-gzip": lambda body: gzip.compress(body[:30]) + gzip.compress(body[30:]),
    "deflate": zlib.compress,
    "Deflate": lambda body: zlib.compress(body, wbits=-15),  # as some servers take it to mean
}


def raw(body: bytes, *headers: str, version: str = "1.1", stream: bool = False) -> bytes:
    """A reply that ends with its connection."""
    kind = "text/event-stream" if stream else "application/json"
    lines = (f"HTTP/{version} 200 OK", f"content-type: {kind}", *headers, "", "")
    return "\r\n".join(lines).encode() + body


@pytest.mark.parametrize("encoding", ENCODED)
def test_a_reply_that_is_compressed_though_none_was_asked_for(
    tmp_path: Path, encoding: str
) -> None:
    """A gateway does it. The client gets what it asked for, and the router reads the usage."""
    encode = ENCODED[encoding]
    says: list[bytes | None] = [raw(encode(REPLY), f"content-encoding: {encoding}")]
    with in_front_of(tmp_path, says) as before:
        whole = before.complete(prompt="x")
        assert json.loads(whole.content)["usage"]["prompt_tokens"] == 1
        assert "content-encoding" not in whole.headers
        assert before.count("prompt_tokens_total", source="host") == 1
        padded = encode(STREAM) + bytes(9)
        says[0] = raw(padded, f"content-encoding: {encoding}", stream=True)
        streamed = before.complete(prompt="x", stream=True)
        assert streamed.content.endswith(b"data: [DONE]\n\n")
        assert until(lambda: before.count("prompt_tokens_total", source="host") == 2)
        bomb = encode(b" " * (65 << 20))
        for bad in (encode(REPLY)[:-3], b"nonsense", bomb):
            assert until(lambda: all(before.up().values()))
            says[0] = raw(bad, f"content-encoding: {encoding}")
            assert before.complete(prompt="x").status_code == 502
        assert before.inflight() == 0


def test_an_encoding_that_the_router_cannot_read_passes_as_it_comes(tmp_path: Path) -> None:
    """Piece by piece, though its events have no end that is seen."""
    encoded = bytes(range(1, 200))
    says: list[bytes | None] = [raw(encoded, "content-encoding: br", stream=True)]
    with (
        in_front_of(tmp_path, says) as before,
        before.client.stream("POST", "/v1/completions", json={"stream": True}) as reply,
    ):
        assert reply.headers["content-encoding"] == "br"
        assert b"".join(reply.iter_raw()) == encoded


def test_a_request_that_is_compressed_is_refused(tmp_path: Path) -> None:
    heard: list[bytes] = []
    with in_front_of(tmp_path, [saying("200 OK", "{}")], heard=heard) as before:
        for encoding in ("gzip", "br"):
            reply = before.client.post(
                "/v1/completions", content=b"x", headers={"content-encoding": encoding}
            )
            assert reply.status_code == 415
            assert "send the body as plain JSON" in reply.json()["error"]["message"]
        identity = {"content-encoding": "identity"}
        assert before.client.post("/v1/completions", json={}, headers=identity).is_success
        assert before.client.post("/v1/none", json={}).json()["error"]["code"] == 404
    assert len(heard) == 1


@pytest.mark.parametrize("end", ["\r\n", "\n", "\r"])
def test_events_pass_one_by_one_however_their_lines_end(tmp_path: Path, end: str) -> None:
    """Each when it comes, and not when the next one does: here none ever does."""
    first = raw(b"", "content-length: 4000", stream=True) + f"data: {{}}{end}{end}".encode()
    says: list[bytes | None] = [first]
    with (
        in_front_of(tmp_path, says, "--timeout", "600", closes=False) as before,
        before.client.stream("POST", "/v1/completions", json={"stream": True}) as reply,
    ):
        assert next(reply.iter_raw()) == f"data: {{}}{end}{end}".encode()
    usage = STREAM.decode().replace("\n", end)
    with in_front_of(tmp_path, [raw(usage.encode(), stream=True)]) as before:
        assert before.complete(prompt="x", stream=True).text.count(f"{end}{end}") == 3
        assert until(lambda: before.count("prompt_tokens_total", source="host") == 1)
        # what fails before it begins is an error, and not a stream
    failed = f'event: error{end}data: {{"error": {{"code": 500}}}}{end}{end}'
    with in_front_of(tmp_path, [raw(failed.encode(), stream=True)]) as before:
        assert before.complete(prompt="x", stream=True).status_code == 502


def test_http_of_other_ages(tmp_path: Path) -> None:
    chunked = b"%x\r\n%s\r\n0\r\n\r\n" % (len(REPLY), REPLY)
    says: list[bytes | None] = [None]
    with in_front_of(tmp_path, says) as before:
        for said in (
            raw(REPLY, version="1.0"),
            raw(REPLY, f"content-length: {len(REPLY)}", "connection: keep-alive", version="1.0"),
            raw(chunked, "transfer-encoding: chunked"),
            raw(REPLY, "transfer-encoding: identity"),
            b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" + raw(REPLY),
        ):
            says[0] = said
            reply = before.complete(prompt="x")
            assert reply.json()["usage"]["prompt_tokens"] == 1, said
            assert "link" not in reply.headers
        says[0] = raw(STREAM, version="1.0", stream=True)
        assert before.complete(prompt="x", stream=True).text.endswith("data: [DONE]\n\n")
        other = ("connection: upgrade", "upgrade: x")
        endless = chunked[:-2] + b"x: " + b"y" * 300_000
        for bad, why in (
            (raw(b"", "x: " + "y" * (101 << 10)), "b'x' of more than 65536 bytes"),
            (raw(endless, "transfer-encoding: chunked"), "headers of more than 102400 bytes"),
            (raw(b"1;" + endless[-300_000:], "transfer-encoding: chunked"), "headers of more than"),
            (raw(REPLY[:-1], "content-length: 999"), "it closed the connection before"),
            (raw(REPLY).replace(b"200 OK", b"600 Odd"), "status 600"),
            (raw(b"", *other).replace(b"200 OK", b"101 Other"), "it switches protocols"),
        ):
            assert until(lambda: all(before.up().values()))
            says[0] = bad
            reply = before.complete(prompt="x")
            assert reply.status_code == 502
            assert why in reply.json()["error"]["message"]


def test_when_to_come_again_is_what_the_instance_said(tmp_path: Path) -> None:
    """Once, in its words; the router's own second only where it said nothing."""
    for told, expected in (("Retry-After: 120", "120"), ("x: y", "1")):
        busy = raw(b"{}", told).replace(b"200 OK", b"503 Service Unavailable")
        with in_front_of(tmp_path, [busy]) as before:
            reply = before.complete(prompt="x")
            assert reply.status_code == 503
            assert reply.headers.get_list("retry-after") == [expected]
            assert all(before.up().values())


def test_the_list_of_models_is_of_an_instance_that_has_one(tmp_path: Path) -> None:
    bad, good = saying("500 Internal Server Error", "{}"), saying("200 OK", '{"data": []}')
    says: list[bytes | None] = [good]
    with server([bad]) as one, server(says) as two:
        words = [word for port in (one, two) for word in ("--engine", f"127.0.0.1:{port}")]
        with router(tmp_path, *words) as before:
            assert until(lambda: all(before.up().values()))
            for answer, status in ((good, 200), (bad, 500)):
                says[0] = answer
                assert before.client.get("/v1/models").status_code == status


@contextlib.contextmanager
def serving(answer: Callable[[socket.socket], None]) -> Iterator[int]:
    """A port where each connection is answered in a thread of its own."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    args = listener.accept()[:1]
                    threading.Thread(target=answer, args=args, daemon=True).start()

        threading.Thread(target=serve, daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)


def test_a_connection_that_an_instance_closed_costs_no_request(tmp_path: Path) -> None:
    """It closes it as the next request leaves: the router asks again, at the same one."""
    reply = raw(REPLY, f"content-length: {len(REPLY)}")

    def once(client: socket.socket) -> None:
        with client:
            begun = client.recv(65536)
            while not is_whole(begun):
                begun += client.recv(65536)
            client.sendall(reply)
            client.recv(1)  # of a second one

    with serving(once) as port, router(tmp_path, "--engine", f"127.0.0.1:{port}") as before:
        assert until(lambda: all(before.up().values()))
        for _ in range(5):
            assert before.complete(prompt="x").status_code == 200
        assert before.count("instance_failures_total") == 0


def test_no_connection_stays_to_an_instance_that_left(tmp_path: Path) -> None:
    """It may be gone without a word, and never close it."""
    ended = threading.Event()

    def answer(client: socket.socket) -> None:
        with client:
            while client.recv(65536):
                client.sendall(raw(b"", "content-length: 0"))
            ended.set()

    file = tmp_path / "instances"
    with serving(answer) as port:
        file.write_text(f"engine http://127.0.0.1:{port}")
        with router(tmp_path, "--instances", str(file)) as before:
            assert until(lambda: before.up() and all(before.up().values()))
            file.write_text("# none")
            assert until(lambda: not before.up())
            assert until(ended.is_set)


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 2000}}
TEXT = "what the router reads of a prompt " * 40
FORMS = {
    "image": ("/v1/chat/completions", {"messages": [{"role": "user", "content": [IMAGE]}]}),
    "tools": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": TEXT}], "tools": [{"a": 1}]},
    ),
    "documents": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": TEXT}], "documents": [{"text": "x"}]},
    ),
    "responses": ("/v1/responses", {"input": TEXT, "instructions": "Be brief."}),
    "items": ("/v1/responses", {"input": [{"role": "user", "content": TEXT}]}),
    "messages": (
        "/v1/messages",
        {"messages": [{"role": "user", "content": TEXT}], "system": "Be brief."},
    ),
}
UNREAD = (
    ("/v1/responses", {"input": TEXT, "previous_response_id": "resp_1"}),
    ("/v1/completions", {"prompt": [TEXT, TEXT]}),
)


def test_every_form_of_a_prompt_is_routed_by_prefix_or_counted(tmp_path: Path) -> None:
    answer = saying("200 OK", "{}")
    with ExitStack() as stack:
        ports = [stack.enter_context(server([answer])) for _ in range(4)]
        words = [word for port in ports for word in ("--engine", f"127.0.0.1:{port}")]
        before = stack.enter_context(router(tmp_path, *words))
        assert until(lambda: all(before.up().values()))
        for path, body in FORMS.values():
            replies = [before.client.post(path, json=body) for _ in range(4)]
            assert {reply.status_code for reply in replies} == {200}
            assert len({reply.headers["x-kvrecall"] for reply in replies}) == 1, path
        assert before.count("affinity_total", outcome="held") == 3 * len(FORMS)
        assert before.count("affinity_total", outcome="new") == len(FORMS)
        other = before.client.post("/v1/messages", json={**FORMS["messages"][1], "system": "x"})
        assert other.is_success
        assert before.count("affinity_total", outcome="new") == len(FORMS) + 1
        for path, body in UNREAD:
            assert before.client.post(path, json=body).status_code == 200
        assert before.count("affinity_total", outcome="unread") == len(UNREAD)


NEEDS_JSON = {"/v1/audio/transcriptions", "/v1/audio/translations"}  # their bodies are forms
KEPT = {"/v1/responses/{response_id}/cancel", "/v1/realtime"}  # by the one engine that has it
DISPATCHES = {"/invocations", "/ping"}  # SageMaker's, to the routes of which clients know
ADMINISTERS = set(
    "/abort_requests /inference/v1/abort_requests /collective_rpc /fault_tolerance/apply /sleep "
    "/wake_up /pause /resume /release_kv_cache_memory /reset_encoder_cache /reset_mm_cache "
    "/reset_prefix_cache /scale_elastic_ep /is_scaling_elastic_ep /start_profile /stop_profile "
    "/init_weight_transfer_engine /shutdown_weight_transfer_engine /start_weight_update "
    "/start_draft_weight_update /update_weights /finish_weight_update /update_weight_version "
    "/weight_checker /v1/load_lora_adapter /v1/unload_lora_adapter".split()
)
"""One engine: a router before several is no place for them."""


def posts_of_vllm() -> set[str]:
    """The routes in its source that a body or a connection is sent to."""
    spec, found = importlib.util.find_spec("vllm"), set[str]()
    assert spec is not None
    assert spec.submodule_search_locations
    for file in (Path(spec.submodule_search_locations[0]) / "entrypoints").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            match node:
                case ast.Call(
                    ast.Attribute(attr="post" | "put" | "add_api_route" | "websocket"),
                    [ast.Constant(str(path)), *_],
                ) if path.startswith("/"):
                    found.add(path)
    return found


def test_every_route_of_vllm_is_passed_on_and_counted_or_refused_in_words(tmp_path: Path) -> None:
    """One that a new vLLM has is in no list here: decide where it belongs."""
    by_prefix = {path for path, _ in FORMS.values()} | {"/v1/completions"}
    refused = NEEDS_JSON | KEPT | DISPATCHES | ADMINISTERS
    anywhere = sorted(posts_of_vllm() - by_prefix - refused)
    assert "/v1/messages/count_tokens" in anywhere
    body = {**FORMS["messages"][1], "model": "tiny", "stream": False}
    heard: list[bytes] = []
    with in_front_of(tmp_path, [saying("200 OK", '{"input_tokens": 7}')], heard=heard) as before:
        for path in anywhere:
            reply = before.client.post(path, json=body)
            assert (reply.status_code, reply.text) == (200, '{"input_tokens": 7}'), path
            assert heard.pop().startswith(b"POST %s HTTP/1.1" % path.encode())
        assert before.count("affinity_total", outcome="unread") == len(anywhere)
        for path in refused:
            reply = before.client.post(path, json=body)
            assert reply.status_code == 404, path
            assert "does not pass on POST /" in reply.json()["error"]["message"]
        assert not heard
        assert before.count("requests_total", outcome="refused") == len(refused)
        before.client.post("/v1/messages", json=FORMS["messages"][1])
        assert before.count("affinity_total", outcome="new") == 1  # nothing is held by a count


def test_two_routers_beside_each_other(tmp_path: Path) -> None:
    """A conversation whose turns reach one or the other goes on where it began."""
    answer = saying("200 OK", "{}")
    with ExitStack() as stack:
        ports = [stack.enter_context(server([answer])) for _ in range(4)]
        words = [word for port in ports for word in ("--engine", f"127.0.0.1:{port}")]
        both = [stack.enter_context(router(tmp_path, *words)) for _ in range(2)]
        for one in both:
            assert until(lambda one=one: all(one.up().values()))
        used = set()
        for number in range(24):
            talk = [{"role": "user", "content": f"{number} {TEXT}"}]
            where = []
            both[number % 2].complete(prompt="x")  # which takes its turn
            for turn in range(4):
                reply = both[(number + turn) % 2].complete(messages=talk)
                where.append(reply.headers["x-kvrecall"])
                talk = [*talk, {"role": "assistant", "content": TEXT}]
            assert len(set(where)) == 1, where
            used.add(where[0])
        assert len(used) == 4


def test_routers_that_lead_back_to_each_other(tmp_path: Path) -> None:
    """Each serves with its own engine, and none keeps another up when these are gone."""
    heard: list[bytes] = []
    says: list[bytes | None] = [saying("200 OK", "{}")]
    with ExitStack() as stack:
        ports = [free_port() for _ in range(3)]
        routers = []
        for at, port in enumerate(ports):
            own = stack.enter_context(server(says, healthy=False, heard=heard))
            words = ["--engine", f"127.0.0.1:{own}", "--engine", f"127.0.0.1:{ports[at - 1]}"]
            words += ["--engine", f"localhost:{port}"] if at == 0 else []
            routers.append(Router(tmp_path, [*words, "--retries", "3"], port))
            stack.callback(routers[-1].close)
        assert until(lambda: all(sum(one.up().values()) == 2 for one in routers))
        assert until(lambda: "leads back to this router" in routers[0].log), "it lists itself"
        for number in range(30):
            asked = routers[number % 3].client
            for reply in (asked.post("/v1/completions", json={}), asked.get("/v1/models")):
                assert (reply.status_code, reply.text) == (200, "{}")
        assert len(heard) == 30
        way = httpx.get(routers[0].url + "/health").headers["via"].removeprefix("1.1 ")
        for names in ([("cdn-loop", f"a, {way}")], [("cdn-loop", way), ("cdn-loop", "b")]):
            for method, path in (("POST", "/v1/completions"), ("GET", "/v1/models")):
                reply = routers[0].client.request(method, path, headers=names, content="{}")
                assert reply.status_code == 508
                assert "list engines, and no router that" in reply.json()["error"]["message"]
        says[0] = saying("503 Service Unavailable", "{}")
        for one in routers:
            assert until(lambda one=one: not any(one.up().values())), "no engine answers"
            assert one.complete(prompt="x").status_code == 503
            assert "Traceback" not in one.log


def test_whom_a_request_has_passed_is_told(tmp_path: Path) -> None:
    heard: list[bytes] = []
    with in_front_of(tmp_path, [saying("200 OK", "{}")], heard=heard) as before:
        given = [("cdn-loop", "a.example, b"), ("content-type", "application/json")]
        assert before.client.post("/v1/completions", headers=given, content="{}").is_success
        assert re.search(rb"\r\ncdn-loop: a\.example, b, kvrecall-\w{12}\r\n", heard[0])
        way = before.client.get("/health").headers["via"]
        assert re.fullmatch(r"1\.1 kvrecall-\w{12}", way)


def test_a_thousand_instances(tmp_path: Path) -> None:
    """All at one address each, most of them down; the router goes on answering."""
    with ExitStack() as stack:
        ports = [stack.enter_context(server([saying("200 OK", "{}")])) for _ in range(4)]
        lines = [f"engine http://127.0.0.1:{port}" for port in ports]
        lines += [f"engine http://127.0.{1 + at // 250}.{1 + at % 250}:9" for at in range(996)]
        file = tmp_path / "instances"
        file.write_text("\n".join(lines))
        before = stack.enter_context(router(tmp_path, "--instances", str(file)))
        assert until(lambda: sum(before.up().values()) == 4)
        began = time.monotonic()
        while time.monotonic() - began < 6:  # three rounds of probes
            assert before.complete(prompt=TEXT).status_code == 200


def test_what_follows_a_reply_is_no_reply() -> None:
    """It would be the next request's."""

    async def main() -> None:
        connections = 0

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal connections
            connections += 1
            while await reader.readline():
                await reader.readuntil(b"\r\n\r\n")
                writer.write(raw(b"one", "content-length: 3") + raw(b"two", "content-length: 3"))

        async with await asyncio.start_server(serve, "127.0.0.1", 0) as served:
            port = served.sockets[0].getsockname()[1]
            ours = Connections(1.0)
            for _ in range(3):
                reply = await ours.send(b"GET", f"http://127.0.0.1:{port}", "/", [], b"", 1.0)
                assert [chunk async for chunk in reply.chunks()] == [b"one"]
                known = weakref.ref(reply)
                del reply
                assert known() is None, "no collection of garbage is needed"
            assert connections == 3
            ours.close()

    asyncio.run(main())
