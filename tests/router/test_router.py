"""A router process among strangers: no engines, engines that are none, and bad input."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from server.live import until
from typer.testing import CliRunner

from kvrecall import cli
from kvrecall.errors import ConfigError
from kvrecall.processes.ports import free_port
from kvrecall.router import application as application_of_the_router
from kvrecall.router import router as room
from kvrecall.router import upstream
from kvrecall.router.addresses import Roster
from kvrecall.router.application import application
from kvrecall.router.bodies import Body
from kvrecall.router.fleet import Address, Fleet
from kvrecall.router.router import RouterSettings
from kvrecall.server.access import Access
from router.cluster import Router


@contextmanager
def router(folder: Path, *words: str) -> Iterator[Router]:
    made = Router(folder, [*words])
    try:
        yield made
        assert "Traceback" not in made.log
    finally:
        made.close()


def is_whole(request: bytes) -> bool:
    head, _, body = request.lower().partition(b"\r\n\r\n")
    length = head.partition(b"content-length: ")[2].partition(b"\r\n")[0]
    return len(body) >= int(length or 0)


@contextmanager
def server(
    says: list[bytes | None],
    healthy: bool | Callable[[], bool] = True,
    heard: list[bytes] | None = None,
    closes: bool = True,
) -> Iterator[int]:
    """A server that answers its probes, while it is ``healthy``, and to all else sends the bytes
    that are the first of ``says`` then, and ends, if it ``closes``; None: it neither answers nor
    ends. ``heard``: the posts that it gets."""
    listener = socket.create_server(("127.0.0.1", 0))
    kept: list[socket.socket] = []

    def serve() -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            begun = client.recv(65536)
            while begun.startswith(b"POST") and not is_whole(begun):
                begun += client.recv(65536)
            if heard is not None and begun.startswith(b"POST"):
                heard.append(begun)
            well = healthy() if callable(healthy) else healthy
            if well and begun.startswith(b"GET /health"):
                client.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
                client.close()
            elif (answer := says[0]) is None:
                kept.append(client)
            else:
                client.sendall(answer)
                if closes:
                    client.close()
                else:
                    kept.append(client)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        for one in kept:
            one.close()
        thread.join(5)


@contextmanager
def in_front_of(
    folder: Path, says: list[bytes | None], *words: str, **more: Any
) -> Iterator[Router]:
    """A router whose one engine, which is up, is a ``server``."""
    with (
        server(says, **more) as port,
        router(folder, "--engine", f"http://127.0.0.1:{port}", *words) as made,
    ):
        assert until(lambda: all(made.up().values()))
        yield made


def test_without_an_engine(tmp_path: Path) -> None:
    with router(tmp_path, "--engine", f"127.0.0.1:{free_port()}?events={free_port()}") as alone:
        for reply in (alone.complete(prompt="x"), alone.client.get("/v1/models")):
            assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")
            assert reply.json()["error"]["message"] == "no instance is up"
        assert alone.client.get("/health").status_code == 503
        assert alone.client.post("/v1/completions/", json={}).status_code == 404, "no redirect"
        huge = b'{"prompt": "' + b"x" * (41 << 20) + b'"}'
        for content in (huge, iter([huge])):  # with its length, and in chunks
            reply = alone.client.post("/v1/completions", content=content)
            assert reply.status_code == 413
            assert "larger than 40 MB" in reply.json()["error"]["message"]
        for bad in (b"", b"[1]", b"{", b"\xff", b"[" * 100_000, b'{"prompt": "\\ud800"}'):
            reply = alone.client.post("/v1/completions", content=bad)
            assert reply.status_code in (400, 503), bad[:20]
            assert reply.json()["error"]["message"]
        for odd in ({"prompt": {"a": 1}}, {"messages": [1]}, {"messages": "x"}, {"prompt": [[]]}):
            for path in ("/v1/completions", "/v1/chat/completions"):
                assert alone.client.post(path, json=odd).status_code in (400, 503)
        assert alone.inflight() == 0


@pytest.mark.parametrize(
    ("keys", "client", "headers", "listed"),
    [
        (("one",), "127.0.0.1", {}, False),
        (("one",), "192.0.2.9", {"authorization": "Bearer one"}, True),
        ((), "127.0.0.1", {}, True),
        ((), "192.0.2.9", {}, False),
        ((), "127.0.0.1", {"origin": "https://evil.example"}, False),
    ],
)
def test_health_lists_instances_to_those_who_may_use_the_router(
    keys: tuple[str, ...], client: str, headers: dict[str, str], listed: bool
) -> None:
    roster = Roster({"--engine": ["127.0.0.1:9"], "--prefill": [], "--decode": []}, None)
    access = Access(keys, public=re.compile("/v1/.*"))
    app = application(RouterSettings(roster, 256, 4, 1, 1000, 600.0, access))

    async def ask() -> dict[str, Any]:
        transport = httpx.ASGITransport(app, client=(client, 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            found: dict[str, Any] = (await http.get("/health", headers=headers)).json()
            return found

    state = asyncio.run(ask())
    assert ("instances" in state) is listed
    assert ("127.0.0.1:9" in str(state)) is listed


def test_an_engine_that_talks_nonsense(tmp_path: Path) -> None:
    """It counts as down until it answers a probe again; the client gets an error in JSON."""
    says: list[bytes | None] = [b""]
    with in_front_of(tmp_path, says) as before:
        for nonsense in (b"", b"nonsense\r\n\r\n", b"HTTP/1.1 200 OK\r\ncontent-length: 9"):
            says[0] = nonsense
            for stream in (False, True):
                assert until(lambda: all(before.up().values()))
                reply = before.complete(prompt="x", stream=stream)
                assert reply.status_code == 502, reply.text
                assert "no instance could serve the request" in reply.json()["error"]["message"]
        assert before.inflight() == 0


def test_an_engine_that_hangs(tmp_path: Path) -> None:
    """Requests end with the router's timeout, or when the client has had enough; probes go on."""
    with in_front_of(tmp_path, [None], "--timeout", "2") as before:
        reply = before.complete(prompt="x")
        assert reply.status_code == 502
        assert "did not answer in time" in reply.json()["error"]["message"]
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{before.url}/v1/completions", json={"prompt": "x"}, timeout=0.5)
        assert until(lambda: before.inflight() == 0)
        assert until(lambda: list(before.up().values()) == [True])
    with (
        server([None], healthy=False) as port,
        router(tmp_path, "--engine", f"http://127.0.0.1:{port}") as before,
    ):
        assert before.complete(prompt="x").status_code == 503


def saying(status: str, body: str, media_type: str = "application/json") -> bytes:
    head = f"HTTP/1.1 {status}\r\ncontent-type: {media_type}\r\ncontent-length: {len(body)}"
    return f"{head}\r\nconnection: close\r\n\r\n{body}".encode()


NO_JSON = (
    '{"prompt": "x", "temperature": NaN}',
    '{"prompt": "x", "stream": true, "top_p": -Infinity}',
    '{"prompt": "\\ud800"}',
    '{"prompt": "x", "\\ud800": 1}',
)
ODD = (
    b'{"prompt": "x", "temperature" : 1e999, "temperature": 1}',
    b'{"prompt": "\xff", "n": 111111111111111111111111111111}',
    '{"messages": [{"content": "漢"}], "\\u6f22": [ ]}'.encode(),
)


def test_no_json_is_refused_and_the_engine_judges_the_rest(tmp_path: Path) -> None:
    says: list[bytes | None] = [saying("400 Bad Request", '{"error": {"message": "by me"}}')]
    heard: list[bytes] = []
    with in_front_of(tmp_path, says, heard=heard) as before:
        for no_json in NO_JSON:
            reply = before.client.post("/v1/completions", content=no_json)
            assert reply.status_code == 400
            assert "the body is not JSON" in reply.json()["error"]["message"]
        assert not heard
        for body in ODD:  # passed on as it is
            reply = before.client.post("/v1/chat/completions", content=body)
            assert (reply.status_code, reply.text) == (400, '{"error": {"message": "by me"}}')
            assert heard.pop().endswith(body)
        for depth in range(930, 1030):  # some are too deep for the router
            nested = '{"messages": [%s]}' % ("[" * depth + "]" * depth)
            reply = before.client.post("/v1/chat/completions", content=nested)
            assert reply.status_code == 400, depth
        heard.clear()
        sent = {b"X-Request-Id": b"\xe9", b"User-Agent": "漢".encode(), b"X-Session-ID": b"one"}
        assert before.client.post("/v1/completions", content="{}", headers=sent).status_code == 400
        for name, value in sent.items():
            assert name.lower() + b": " + value + b"\r\n" in heard[-1]
        assert before.inflight() == 0


def test_an_engine_that_does_not_stream_what_it_was_asked_to(tmp_path: Path) -> None:
    """vLLM takes the string "false" for false."""
    said = '{"choices": [], "usage": {"prompt_tokens": 1}}'
    with in_front_of(tmp_path, [saying("200 OK", said)]) as before:
        reply = before.complete(prompt="x", stream="false")
        assert reply.headers["content-type"] == "application/json"
        assert reply.json() == json.loads(said)


def test_a_client_that_goes_before_its_body_ends(tmp_path: Path) -> None:
    with router(tmp_path, "--engine", f"127.0.0.1:{free_port()}") as alone:
        for _ in range(3):
            with socket.create_connection(("127.0.0.1", alone.port)) as client:
                client.sendall(
                    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{"
                )
                assert alone.inflight() == 0  # a body that has not arrived takes no place
        assert alone.complete(prompt="x").status_code == 503


def asking(version: str, body: bytes) -> bytes:
    head = f"POST /v1/completions HTTP/{version}\r\nhost: 127.0.0.1\r\nexpect: 100-continue\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


def test_a_client_of_http_1_0_gets_no_chunks(tmp_path: Path) -> None:
    """Nor a 100, which it would take for the reply."""
    said = saying("200 OK", "data: {}\n\n", "text/event-stream")
    with (
        in_front_of(tmp_path, [said]) as before,
        socket.create_connection(("127.0.0.1", before.port)) as client,
    ):
        client.sendall(asking("1.0", b'{"stream": true}'))
        head, _, body = b"".join(iter(lambda: client.recv(4096), b"")).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"transfer-encoding" not in head
    assert body == b"data: {}\n\n"


def test_what_a_client_asks_for_at_once_ends_with_it(tmp_path: Path) -> None:
    """Each of its requests, and not the last one alone. Too many of them leave no traceback."""
    says: list[bytes | None] = [None]
    heard: list[bytes] = []
    with in_front_of(tmp_path, says, heard=heard) as before:
        with socket.create_connection(("127.0.0.1", before.port)) as client:
            client.sendall(asking("1.1", b"{}") * 3)
            assert until(lambda: heard)
        assert until(lambda: before.inflight() == 0)
        says[0] = saying("200 OK", "{}")
        with socket.create_connection(("127.0.0.1", before.port)) as client:
            client.sendall(asking("1.1", b"{}") * 50)
            with contextlib.suppress(ConnectionResetError):
                assert client.recv(1) == b""
        assert until(lambda: before.inflight() == 0)


def test_a_file_that_becomes_garbage_leaves_the_instances(tmp_path: Path) -> None:
    """Each time the router reads it, says so, goes on, and reads the next one."""
    file = tmp_path / "instances"
    with server([saying("200 OK", "{}")]) as port:
        good = f"engine http://127.0.0.1:{port}\n"
        file.write_text(good)
        with router(tmp_path, "--instances", str(file)) as before:
            assert until(lambda: all(before.up().values()))
            roster = Roster({"--engine": (), "--prefill": (), "--decode": ()}, file)
            roster.read()

            def becomes(write: Callable[[Path], object], why: str, seen: bool = False) -> None:
                new = tmp_path / "new"
                write(new)
                if file.is_dir():
                    file.rmdir()
                if new.is_dir():
                    file.unlink()
                new.rename(file)
                if not seen:  # a router looks every 2 s
                    assert [roster.has_changed() for _ in range(3)] == [False, True, True]
                    with pytest.raises(ConfigError, match=re.escape(why)):
                        roster.read()
                assert not seen or until(lambda: why in before.log), why

            becomes(lambda new: new.write_bytes(bytes(range(256)) * 9), "it is not text", True)
            becomes(lambda new: new.write_text("engine http://☃.x:80"), "'http://☃.x:80' is not an")
            becomes(lambda new: new.write_text("engine http://a\0b:80"), "b:80' is not an address")
            becomes(lambda new: new.mkdir(), "Is a directory")
            becomes(os.mkfifo, "it is not a file", True)  # which nobody writes into
            becomes(lambda new: new.write_text(good + "#" * (1 << 20)), "larger than 1 MiB")
            becomes(lambda new: new.write_text(""), "is empty; if no instance is left, write")
            assert all(before.up().values())
            other = f"engine http://127.0.0.1:{free_port()}\n"
            becomes(lambda new: new.write_text(good + other), "", True)
            assert until(lambda: len(before.up()) == 2)
            assert before.complete(prompt="x").status_code == 200
            becomes(lambda new: new.write_text("# none"), "", True)
            assert until(lambda: before.up() == {})


@contextmanager
def in_thread(*engines: str) -> Iterator[str]:
    """A router in a thread of this process; its address."""
    roster = Roster({"--engine": list(engines), "--prefill": None, "--decode": None}, None)
    settings = RouterSettings(roster, 256, 4, 1, 100, 600.0)
    port = free_port()
    config = uvicorn.Config(application(settings), port=port, log_level="warning")
    served = uvicorn.Server(config)
    thread = threading.Thread(target=served.run, daemon=True)
    thread.start()
    try:
        assert until(lambda: served.started)
        yield f"http://127.0.0.1:{port}"
    finally:
        served.should_exit = True
        thread.join(30)


def test_what_waits_at_an_engine_that_hangs_goes_to_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that is stopped, and keeps its connections. One that answers its probes is waited for."""
    monkeypatch.setattr(room, "_PROBE_EVERY_S", 0.05)
    monkeypatch.setattr(upstream, "_PROBE_S", 0.2)
    is_well, heard, probes = threading.Event(), [], []
    is_well.set()

    def probed() -> bool:
        probes.append(is_well.is_set())
        return is_well.is_set()

    well = saying("200 OK", '{"id": "of the other"}')
    with (
        server([None], healthy=probed, heard=heard) as first,
        server([well]) as second,
        in_thread(f"http://127.0.0.1:{first}", f"http://127.0.0.1:{second}") as url,
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        assert until(lambda: all(one["up"] for one in client.get("/health").json()["instances"]))
        answers: list[str] = []

        def ask() -> None:
            answers.append(client.post("/v1/completions", json={"prompt": "x"}).text)

        threads = [threading.Thread(target=ask, daemon=True) for _ in range(4)]
        for one in threads:
            one.start()
        assert until(lambda: len(heard) + len(answers) == 4 and heard)
        waiting = len(heard)
        before = len(probes)
        assert until(lambda: len(probes) >= before + 5)  # which it answers
        assert len(answers) == 4 - waiting
        is_well.clear()
        assert until(lambda: len(answers) == 4)
        assert all("of the other" in answer for answer in answers)
        for one in threads:
            one.join(10)


def test_one_that_hangs_delays_no_probe_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "_PROBE_EVERY_S", 0.05)
    monkeypatch.setattr(upstream, "_PROBE_S", 600)
    probes: list[int] = []
    with (
        server([None], healthy=False) as first,
        server([saying("200 OK", "{}")], healthy=lambda: probes.append(1) is None) as second,
        in_thread(f"http://127.0.0.1:{first}", f"http://127.0.0.1:{second}") as url,
    ):
        assert httpx.get(f"{url}/health").is_success, "it starts with those that answer"
        before = len(probes)
        assert until(lambda: len(probes) > before + 20)


def test_health_is_answered_while_a_body_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, may_end = threading.Event(), threading.Event()
    read = Body.read

    def waits(content: bytes) -> Body:
        begun.set()
        assert may_end.wait(60)
        return read(content)

    monkeypatch.setattr(Body, "read", waits)
    answers: list[httpx.Response] = []
    with server([saying("200 OK", "{}")]) as port, in_thread(f"127.0.0.1:{port}") as url:
        ask = threading.Thread(
            target=lambda: answers.append(
                httpx.post(f"{url}/v1/completions", json={"prompt": "x" * 300_000})
            )
        )
        ask.start()
        assert begun.wait(30)
        assert httpx.get(f"{url}/health").json()["open_requests"] == 1
        assert not answers
        may_end.set()
        ask.join(30)
    assert answers[0].status_code == 200


def test_bodies_that_wait_are_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(application_of_the_router, "_MOST_HELD", 100)
    with server([saying("200 OK", "{}")]) as port, in_thread(f"127.0.0.1:{port}") as url:
        large = httpx.post(f"{url}/v1/completions", json={"prompt": "x" * 100})
        assert (large.status_code, large.headers["retry-after"]) == (503, "1")
        for _ in range(3):
            small = httpx.post(f"{url}/v1/completions", json={"prompt": "x" * 50})
            assert small.status_code == 200


@pytest.mark.parametrize(("status", "stream"), [(429, False), (429, True), (200, True)])
def test_headers_pass_from_end_to_end(tmp_path: Path, status: int, stream: bool) -> None:
    lines = (
        f"HTTP/1.1 {status} Any",
        "retry-after: 7",
        "x-one: a",
        "x-one: b",
        "content-type: text/event-stream; charset=utf-8",
        "connection: x-hop, close",
        "x-hop: 1",
        "keep-alive: timeout=5",
        "x-kvrecall: forged",
        "server: the instance's",
        "content-length: 10",
        "",
        "data: {}\n\n",
    )
    heard: list[bytes] = []
    with in_front_of(tmp_path, ["\r\n".join(lines).encode()], heard=heard) as before:
        reply = before.complete(prompt="x", stream=stream)
        assert (reply.status_code, reply.text) == (status, "data: {}\n\n")
        assert reply.headers["retry-after"] == "7"
        assert reply.headers.get_list("x-one") == ["a", "b"]
        assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
        (url,) = before.up()
        assert reply.headers["x-kvrecall"] == f"engine={url.removeprefix('http://')}"
        assert reply.headers["server"] == "uvicorn"
        assert not {"x-hop", "keep-alive"} & set(reply.headers)
    assert b"\r\naccept-encoding: identity\r\n" in heard[0].lower()


def test_what_the_router_reads_of_a_body_is_small(tmp_path: Path) -> None:
    large = "x" * (65 << 10)
    with in_front_of(tmp_path, [saying("200 OK", "{}")]) as before:
        for name in ("model", "cache_salt", "stream"):
            reply = before.complete(prompt="x", **{name: large})
            assert reply.status_code == 400
            assert f"{name} is larger than 65536 bytes" in reply.json()["error"]["message"]
        reply = before.client.post("/v1/completions", json={}, headers={"traceparent": "x" * 8193})
        assert reply.status_code == 431
        assert before.complete(prompt=large, kv_transfer_params={"a": large}).status_code == 200
        assert before.inflight() == 0


def test_an_instance_that_answers_others_is_not_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though it is too busy for its probes."""
    monkeypatch.setattr(upstream, "_PROBE_S", 0.2)

    async def story() -> None:
        asked = asyncio.Event()

        async def silent(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
            await reader.readline()
            asked.set()

        listener = await asyncio.start_server(silent, "127.0.0.1", 0)
        port = listener.sockets[0].getsockname()[1]
        (one,) = Fleet((), [Address(f"http://127.0.0.1:{port}")], 4).all
        async with listener, contextlib.aclosing(upstream.Upstream(60)) as client:
            assert not await client.probe(one)
            asked.clear()
            probe = asyncio.create_task(client.probe(one))
            await asked.wait()
            one.heard += 1
            assert await probe

    asyncio.run(story())


def refused(*words: str) -> str:
    done = CliRunner().invoke(cli.app, ["router", *words])
    assert done.exit_code == 2, done.output
    return str(done.output)


def test_what_is_refused_at_start(tmp_path: Path) -> None:
    port = free_port()
    own = f"127.0.0.1:{port}"
    assert "the router's own address" in refused("--engine", own, "--port", str(port))
    six = ("--engine", f"[2001:db8::1]:{port}", "--host", "2001:db8::1", "--port", str(port))
    assert f"[2001:db8::1]:{port} is the router's own address" in refused(*six)
    with socket.create_server(("127.0.0.1", port)):
        told = refused("--engine", "127.0.0.1:1", "--port", str(port))
        assert len(told.splitlines()) == 1
        assert f"port {port} on 127.0.0.1 is in use" in told
    told = refused("--engine", "127.0.0.1:1", "--port", str(port), "--host", "0.0.0.0")
    assert "--host is 0.0.0.0, which other hosts reach, and no API key is set" in told
    for first, second in (("http://H:1", "http://h:1/"), ("http://h", "h:80")):
        assert "is given twice" in refused("--engine", first, "--engine", second)
    for name in ("☃.x", "a\0b", "xn--a", "x:port", "x/v1", "a..b:80", "a" * 64):
        assert "is not an address of an instance" in refused("--engine", f"http://{name}")
    told = refused("--engine", "http://me:secret@127.0.0.1:80")
    assert "has a user or a password" in told
    assert "secret" not in told + refused("--engine", "http://me:secret@☃:80")
    both = refused("--engine", "a:1", "--decode", "b:1")
    assert "engines without roles do not go with" in both
    assert "for --prefill and for --decode" in refused("--prefill", "a:1", "--decode", "a:1")
    assert "no instance is given" in refused("--prefill", "a:1")
    missing = tmp_path / "missing"
    assert f"--instances: {missing}: No such file" in refused("--instances", str(missing))
    file = tmp_path / "instances"
    for text, why in (
        ("engine\n", "line 1: 'engine' is not a role and a URL"),
        ("e http://me:secret@a:1\n", "line 1: 'e http://a:1' is not a role and a URL"),
        (f"{'e' * 9999}\n", f"line 1: '{'e' * 80}' is not a role and a URL"),
        ("# fine\n\nserver http://a:1\n", "line 3: 'server http://a:1' is not a role and a URL"),
        ("engine http://a:1/v1\n", "line 1: 'http://a:1/v1' is not an address"),
        ("engine http://a:1\nengine http://a:1\n", "http://a:1 is given twice"),
        ("engine http://a:1\nprefill http://b:1\n", "engines without roles do not go with"),
        ("prefill http://b:1\n", "no instance is given"),
        ("engine http://a:1?events=0\n", "events: '0' is not a port"),
    ):
        file.write_text(text)
        told = refused("--instances", str(file))
        assert why in told, told
        assert len(told.splitlines()) == 1


def test_a_file_beside_options(tmp_path: Path) -> None:
    file = tmp_path / "instances"
    file.write_text("decode http://b:1  # the second\nprefill http://c:1?events=5557\n")
    roster = Roster({"--engine": None, "--prefill": None, "--decode": ["http://a:1"]}, file)
    engines, prefill, decode = roster.read()
    assert not engines
    assert [one.url for one in decode] == ["http://a:1", "http://b:1"]
    assert [len(one.events) for one in prefill] == [1]
    assert not roster.has_changed()
    file.write_text("\ufeffdecode http://例え.jp:80\n", "utf-8")  # of an editor that marks it
    assert [roster.has_changed() for _ in range(2)] == [False, True]
    assert roster.read()[2][1].url == "http://xn--r8jz45g.jp", "which headers can name"


def test_a_file_that_is_being_written(tmp_path: Path) -> None:
    """What is there for a moment does not count, and nothing is no list of none."""
    file = tmp_path / "instances"
    file.write_text("")
    roster = Roster({"--engine": None, "--prefill": None, "--decode": None}, file)
    assert roster.read() == [(), (), ()]

    def counts(text: str) -> bool:
        file.write_text(text)
        return roster.has_changed()

    whole = "engine http://a:8001\nengine http://b:8002\n"
    for text in (whole[:10], whole[:-1], "", whole):
        assert not counts(text)
    assert counts(whole)
    assert len(roster.read()[0]) == 2
    for text in ("", whole[:18], whole, whole, "", whole):
        assert not counts(text)
    for bad, why in (("\n", "is empty"), ("engine", "line 1"), ("", "is empty")):
        assert [counts(bad) for _ in range(2)] == [False, True]
        with pytest.raises(ConfigError, match=why):
            roster.read()
        assert not roster.has_changed(), "it is told once"
    assert [counts("# none") for _ in range(2)] == [False, True]
    assert roster.read() == [(), (), ()]
    file.unlink()
    assert [roster.has_changed() for _ in range(2)] == [False, True]
    with pytest.raises(ConfigError, match="No such file"):
        roster.read()
