"""A router process among strangers: no engines, engines that are none, and bad input."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from kvrecall import cli
from kvrecall.lab.ports import free_port
from kvrecall.router.addresses import Roster

from .cluster import Router, until


@contextmanager
def router(folder: Path, *words: str) -> Iterator[Router]:
    made = Router(folder, [*words])
    try:
        yield made
        assert "Traceback" not in made.log
    finally:
        made.close()


@contextmanager
def server(says: list[bytes | None], healthy: bool = True) -> Iterator[int]:
    """A server that answers its probes, and to all else sends the bytes that are the first of
    ``says`` then, and ends; None: it neither answers nor ends."""
    listener = socket.create_server(("127.0.0.1", 0))
    kept: list[socket.socket] = []

    def serve() -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            begun = client.recv(65536)
            if healthy and begun.startswith(b"GET /health"):
                client.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
                client.close()
            elif (answer := says[0]) is None:
                kept.append(client)
            else:
                client.sendall(answer)
                client.close()

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


def test_without_an_engine(tmp_path: Path) -> None:
    with router(tmp_path, "--engine", f"127.0.0.1:{free_port()}?events={free_port()}") as alone:
        for reply in (alone.complete(prompt="x"), alone.client.get("/v1/models")):
            assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")
            assert reply.json()["error"]["message"] == "no instance is up"
        assert alone.client.get("/health").status_code == 503
        huge = b'{"prompt": "' + b"x" * (41 << 20) + b'"}'
        for content in (huge, iter([huge])):  # with its length, and in chunks
            reply = alone.client.post("/v1/completions", content=content)
            assert reply.status_code == 413
            assert "larger than 41943040 bytes" in reply.json()["error"]["message"]
        for bad in (b"", b"[1]", b"{", b"\xff", b"[" * 100_000, b'{"prompt": "\\ud800"}'):
            reply = alone.client.post("/v1/completions", content=bad)
            assert reply.status_code in (400, 503), bad[:20]
            assert reply.json()["error"]["message"]
        for odd in ({"prompt": {"a": 1}}, {"messages": [1]}, {"messages": "x"}, {"prompt": [[]]}):
            for path in ("/v1/completions", "/v1/chat/completions"):
                assert alone.client.post(path, json=odd).status_code in (400, 503)
        assert alone.inflight() == 0


def test_an_engine_that_talks_nonsense(tmp_path: Path) -> None:
    """It counts as down until it answers a probe again; the client gets an error in JSON."""
    says: list[bytes | None] = [b""]
    with server(says) as port, router(tmp_path, "--engine", f"http://127.0.0.1:{port}") as before:
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
    with (
        server([None]) as port,
        router(tmp_path, "--engine", f"http://127.0.0.1:{port}", "--timeout", "2") as before,
    ):
        assert until(lambda: all(before.up().values()))
        reply = before.complete(prompt="x")
        assert reply.status_code == 502
        assert "did not answer in time" in reply.json()["error"]["message"]
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{before.url}/v1/completions", json={"prompt": "x"}, timeout=0.5)
        assert until(lambda: before.inflight() == 0)
        assert until(lambda: before.up() == {f"http://127.0.0.1:{port}": True})
    with (
        server([None], healthy=False) as port,
        router(tmp_path, "--engine", f"http://127.0.0.1:{port}") as before,
    ):
        assert before.complete(prompt="x").status_code == 503


def refused(*words: str) -> str:
    done = CliRunner().invoke(cli.app, ["router", *words])
    assert done.exit_code == 2, done.output
    return str(done.output)


def test_what_is_refused_at_start(tmp_path: Path) -> None:
    port = free_port()
    own = f"127.0.0.1:{port}"
    assert "the router's own address" in refused("--engine", own, "--port", str(port))
    with socket.create_server(("127.0.0.1", port)):
        told = refused("--engine", "127.0.0.1:1", "--port", str(port))
        assert len(told.splitlines()) == 1
        assert f"port {port} on 127.0.0.1 is in use" in told
    assert "is given twice" in refused("--engine", "http://H:1", "--engine", "http://h:1/")
    missing = tmp_path / "missing"
    assert f"--instances: {missing}: No such file" in refused("--instances", str(missing))
    file = tmp_path / "instances"
    for text, why in (
        ("engine\n", "line 1: 'engine' is not a role and a URL"),
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
    assert roster.has_changed()
    engines, prefill, decode = roster.read()
    assert not engines
    assert [one.url for one in decode] == ["http://a:1", "http://b:1"]
    assert [len(one.events) for one in prefill] == [1]
    assert not roster.has_changed()
    file.unlink()
    assert roster.has_changed()
