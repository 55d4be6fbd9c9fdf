"""Attacks on a server's addresses: by a stranger on the network, by a page in an operator's
browser, and by silence."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import resource
import shutil
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import uvicorn
import uvloop
from fastapi import FastAPI

from kvrecall.engines.base import EngineInfo, EngineLoad, ServeSpec
from kvrecall.processes.ports import free_port
from kvrecall.processes.server import ServerProcess
from kvrecall.server.application import attach_all
from kvrecall.server.connections import PromptProtocol
from kvrecall.server.plan import Plan
from kvrecall_lab.hostile.attack import GotIn, NotHere, Stalled, attack
from kvrecall_lab.hostile.listeners import said_by, while_running
from kvrecall_lab.models import write_model

_KEY = "a-key-that-nobody-guesses"
_QUIET_S = 15.0
_FLOOD = 1500
_SLOW_S = 3.0
"""What /health may take on a machine that does other things; alone it is a tenth."""


@contextmanager
def _serving(folder: Path, *words: str) -> Iterator[ServerProcess]:
    """A real server of a tiny model, whose log is ``server.log``."""
    write_model(folder / "model", "qwen3", hidden=64, layers=2, max_position=512)
    sizes = "--max-model-len 512 --host-size 32MiB --kv-cache-memory-bytes 64MiB"
    arguments = [str(folder / "model"), "--served-model-name", "tiny", *sizes.split(), *words]
    with ServerProcess(arguments, folder / "server.log", lambda _: None) as server:
        yield server


def _routes(log: str) -> list[tuple[str, str]]:
    """Method and path of every route that vLLM logs at the start, with values for parameters."""
    found = {
        (method, re.sub(r"\{[^}]*\}", "tiny", path))
        for path, methods in re.findall(r"Route: (\S+), Methods: ([\w, ]+)", log)
        for method in methods.split(", ")
    }
    if len(found) < 50:
        raise RuntimeError(f"only {len(found)} routes in the log")
    return sorted(found)


_OPEN = {"/health", "/v2/health/live", "/v2/health/ready", "/ping"}


@attack(engine=True, limit_s=240)
def every_route_without_a_key(folder: Path) -> str:
    """Calls every route of every plane without the API key, and with wrong ones."""
    keys = folder / "keys"
    keys.write_text(_KEY)
    keys.chmod(0o600)
    management, metrics = (f"127.0.0.1:{free_port()}" for _ in range(2))
    planes = ["--management", management, "--metrics", metrics, "--api-key-file", str(keys)]
    with _serving(folder, *planes) as server, httpx.Client(timeout=60) as client:
        log = server.log.read_text(errors="replace")
        own = [
            (method, path)
            for method in ("GET", "POST")
            for path in "/stopService /info /v1/config /v1/status /why/x /metrics-json "
            "/dashboard /dashboard/data.json /dashboard/tree.json /health/timed /metrics".split()
        ]
        tried = 0
        bases = (server.url, f"http://{management}", f"http://{metrics}")
        for base, (method, path) in itertools.product(bases, {*_routes(log), *own}):
            if method in ("GET", "HEAD") and (
                path in _OPEN or (base, path) == (bases[2], "/metrics")
            ):
                continue
            for headers in (
                {"content-type": "application/json"},
                {"content-type": "application/json", "authorization": "Bearer x"},
                {"content-type": "application/json", "authorization": f"Bearer {_KEY}x"},
                {"x-kvrecall": "1", "x-api-key": _KEY[:-1], "authorization": "Basic eDp4"},
            ):
                reply = client.request(method, base + path, headers=headers, content=b"{}")
                tried += 1
                if reply.status_code != 401:
                    raise GotIn(f"{method} {base}{path}: {reply.status_code} {reply.text[:80]}")
        for path in ("/v1/realtime", "/v1/responses"):
            if (status := _websocket(server.port, path)) not in (401, 403):
                raise GotIn(f"a WebSocket at {path}: {status}")
        right = {"authorization": f"Bearer {_KEY}"}
        asked = {"inputs": "x", "parameters": {"max_new_tokens": 1}}
        completed = {"model": "tiny", "prompt": "x", "max_tokens": 1}
        for path, body in (("/generate", asked), ("/v1/completions", completed)):
            client.post(bases[0] + path, json=body, headers=right).raise_for_status()
        client.get(f"{bases[1]}/v1/config", headers=right).raise_for_status()
        client.get(f"{bases[2]}/metrics").raise_for_status()
        if _KEY in log:
            raise GotIn("the key is in the log")
    return f"401 to {tried} requests on three planes; with the key they are served"


def _websocket(port: int, path: str) -> int:
    """The status of the answer to a WebSocket's handshake."""
    with _connection(port) as link:
        link.sendall(
            f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nUpgrade: websocket\r\n"
            "Connection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
            "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n".encode()
        )
        return int(link.recv(100).split()[1])


_FOREIGN = (
    {"host": "rebound.example"},
    {"host": "rebound.example", "origin": "http://rebound.example"},
    {"origin": "https://evil.example"},
    {"origin": "null"},
    {"origin": "http://localhost:1"},
    {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"},
)
_UNASKED = ("text/plain", "application/x-www-form-urlencoded", "text/plain;application/json", "")


@attack(engine=True, limit_s=240)
def a_page_in_the_operators_browser(folder: Path) -> str:
    """Sends what a page of another origin can make a browser send to a server on loopback without a
    key: generations, state changes, stopService by an image, reads under a rebound name."""
    with _serving(folder, "--", "--allowed-origins", '["*"]') as server:
        with httpx.Client(base_url=server.url, timeout=60) as client:
            tried = _play_page(client, _routes(server.log.read_text(errors="replace")))
            body = {"inputs": "x", "parameters": {"max_new_tokens": 1}}
            client.post("/generate", json=body).raise_for_status()
            mine = {"origin": server.url, "sec-fetch-site": "same-origin"}
            client.post("/generate", json=body, headers=mine).raise_for_status()
        if not server.is_alive:
            raise GotIn("the server was stopped")
    return f"{tried} requests of foreign pages refused; its own page's are served"


def _play_page(client: httpx.Client, routes: Sequence[tuple[str, str]]) -> int:
    tried = 0
    bodies = {
        "/generate": {"inputs": "x"},
        "/": {"inputs": "x"},
        "/v1/completions": {"model": "tiny", "prompt": "x", "max_tokens": 1},
    }
    for method, path in routes:
        content = json.dumps(bodies.get(path, {})).encode() if method == "POST" else None
        for foreign in _FOREIGN:
            if path in _OPEN and method in ("GET", "HEAD"):
                continue
            kind = {"content-type": "application/json"} if content else {}
            reply = client.request(method, path, headers=kind | foreign, content=content)
            tried += 1
            if reply.status_code != 403:
                raise GotIn(f"{method} {path} with {foreign}: {reply.status_code}")
            if "access-control-allow-origin" in reply.headers:
                raise GotIn(f"{method} {path} is shared with {foreign}")
        for unasked in _UNASKED if method == "POST" else ():
            reply = client.post(path, headers={"content-type": unasked}, content=content)
            tried += 1
            if reply.status_code != 415:
                raise GotIn(f"POST {path} as {unasked!r}: {reply.status_code}")
    for path in ("/stopService", "/stopService?mode=Force"):
        if client.get(path).status_code != 405:
            raise GotIn(f"GET {path}")
    preflight = {"origin": "https://evil.example", "access-control-request-method": "POST"}
    if client.options("/generate", headers=preflight).status_code != 403:
        raise GotIn("a preflight was granted")
    return tried


@attack(engine=True, limit_s=300)
def forty_megabytes_of_messages(folder: Path) -> str:
    """Sends 40 MB of small values to each route that parses them, in many forms, and less that is
    slow to refuse, and asks for /health meanwhile."""
    with _serving(folder) as server:
        worst, where = 0.0, ""
        for path, body in _large_bodies():
            for _ in while_running(partial(_send, server.url, path, body)):
                began = time.monotonic()
                if httpx.get(f"{server.url}/health", timeout=120).status_code != 200:
                    raise Stalled("/health is not answered with 200")
                took = time.monotonic() - began
                if took > worst:
                    worst, where = took, f"{path} with {len(body) / 1e6:.1f} MB, {body[:60]!r}"
                if worst > _SLOW_S:
                    raise Stalled(f"/health took {worst:.1f} s during {where}")
    return f"/health took at most {worst * 1e3:.0f} ms, during {where}"


def _large_bodies() -> Iterator[tuple[str, bytes]]:
    """Path and body; those of 40 MB first."""
    message, size = b'{"role":"user","content":"a"},', 40 * 10**6
    for path, before, item in (
        ("/v1/chat/completions", b'{"model":"tiny","messages":[', message),
        ("/v1/messages", b'{"model":"tiny","max_tokens":1,"messages":[', message),
        ("/v1/responses", b'{"model":"tiny","input":[', message),
        ("/v1/completions", b'{"model":"tiny","prompt":[', b"[],"),
        ("/v1/completions", b'{"model":"tiny","prompt":[', b"7,"),
        ("/generate", b'{"inputs":"x","parameters":{"stop":[', b'"a",'),
        ("/infer", b'{"inputs":"x","input_id":[', b"7,"),
    ):
        many = (size - len(before)) // len(item)
        yield path, before + item * many + item[:-1] + b"]}"
    yield "/v1/completions", json.dumps({"model": "tiny", "prompt": "a, " * (size // 3)}).encode()
    for path, body in (
        ("/v1/responses", {"model": "tiny", "input": [{}] * 9000}),
        ("/v1/responses", {"model": "tiny", "input": [1] * 9000}),
        ("/v1/chat/completions", {"model": "tiny", "messages": [{}] * 4000}),
        ("/v1/chat/completions", {"model": "tiny", "messages": [1] * 9000}),
        ("/v1/completions", {"model": "tiny", "prompt": [7] * (1 << 20)}),
    ):
        yield path, json.dumps(body).encode()


def _send(url: str, path: str, body: bytes) -> None:
    headers = {"content-type": "application/json"}
    with contextlib.suppress(httpx.TransportError):  # refused before it was all sent
        httpx.post(url + path, content=body, headers=headers, timeout=120)


# -- without an engine ----------------------------------------------------------------------


@contextmanager
def _application(plan: Plan, *keys: str, loop: type | None = None, **more: Any) -> Iterator[int]:
    """kvrecall's routes and its listener around an engine that does nothing; the port."""
    port = free_port()
    app = FastAPI()
    attach_all(app, _engine(), keys, plan=plan)
    own: Any = {"port": port, "log_level": "critical", "http": PromptProtocol, **more}
    server = uvicorn.Server(uvicorn.Config(app, **own))
    run = server.run if loop is None else lambda: uvloop.run(server.serve(), loop_factory=loop)
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield port
    server.should_exit = True


def _engine() -> Any:
    info = EngineInfo(("tiny",), "m", "bfloat16", "cpu", 512, 8, 512, 128, 64, 1, "0")

    async def alive() -> bool:
        return True

    return SimpleNamespace(
        info=info,
        insight=SimpleNamespace(),
        load=lambda: EngineLoad(0, 0, 0, 8, 64, 0.0),
        alive=alive,
        draining=False,
    )


_HALF_A_HEAD = b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
_HALF_A_BODY = _HALF_A_HEAD + b'Content-Length: 1000\r\n\r\n{"inputs": '
_SILENT = {"nothing": b"", "half a head": _HALF_A_HEAD, "half a body": _HALF_A_BODY}


@attack(limit_s=90)
def silent_sockets(folder: Path) -> str:
    """Opens more connections than the server takes requests, sends nothing, half a head or half a
    body on each, or a byte a second, and asks for /health and a reply."""
    plan = Plan(ServeSpec("m", "127.0.0.1", 1, {}), max_links=5)
    with _application(plan) as port, ExitStack() as kept:
        links = []
        for sent in _SILENT.values():
            for _ in range(200):
                link = kept.enter_context(_connection(port))
                link.sendall(sent)
                links.append(link)
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=5) as client:
            end = time.monotonic() + _QUIET_S
            while time.monotonic() < end:
                if client.get("/health").status_code != 200:
                    raise Stalled("/health, by silent connections")
                if client.get("/info").status_code != 200:
                    raise Stalled("a request, by silent connections")
                for link in links[::10]:
                    with contextlib.suppress(OSError):
                        link.send(b" ")
                time.sleep(1)
        left = sum(not _is_closed(link) for link in links)
        if left:
            raise Stalled(f"{left} of {len(links)} silent connections are open after {_QUIET_S} s")
    return f"{len(links)} silent connections ended; /health and requests were answered meanwhile"


def _connection(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=30)


def _is_closed(link: socket.socket, seconds: float = 0.5) -> bool:
    link.settimeout(seconds)
    try:
        while link.recv(1 << 16):
            pass
    except (TimeoutError, BlockingIOError):
        return False
    except OSError:
        pass
    return True


@attack(limit_s=90)
def more_sockets_than_are_kept(_: Path) -> str:
    """Opens silent connections until the server would have no more files to open."""
    with _application(Plan(ServeSpec("m", "127.0.0.1", 1, {}))) as port:
        return _flooded(f"http://127.0.0.1:{port}")


@attack(limit_s=90)
def silent_handshakes(folder: Path) -> str:
    """The same to a listener with TLS, without a handshake."""
    from kvrecall.engines.vllm.serving.app import Loop  # imports vLLM

    plan = Plan(ServeSpec("m", "127.0.0.1", 1, {}))
    with _application(plan, loop=Loop, **_certificate(folder)) as port:
        return _flooded(f"https://127.0.0.1:{port}")


def _flooded(url: str) -> str:
    """Opens silent connections, and asks for /health meanwhile."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if most < 4 * _FLOOD:
        raise NotHere(f"{4 * _FLOOD} open files (ulimit -Hn is {most})")
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    links, waits = list[socket.socket](), list[float]()
    with ExitStack() as kept, httpx.Client(base_url=url, timeout=5, verify=False) as client:
        while len(links) < _FLOOD:
            links.append(kept.enter_context(_connection(client.base_url.port or 0)))
            if len(links) % 50 == 0:
                began = time.monotonic()
                client.get("/health").raise_for_status()
                waits.append(time.monotonic() - began)
        httpx.get(f"{url}/health", timeout=30, verify=False).raise_for_status()
        left = sum(not _is_closed(link, 0.0) for link in links)
    if left > _FLOOD - 200:
        raise Stalled(f"{left} of {_FLOOD} silent connections are kept")
    if (half := sorted(waits)[len(waits) // 2]) > 0.1:
        raise Stalled(f"half of the replies of /health took {half:.2f} s beside them")
    return f"{left} of {_FLOOD} are kept, the youngest; /health took {1e3 * half:.0f} ms"


def _certificate(folder: Path) -> dict[str, Path]:
    cert, key = folder / "cert.pem", folder / "key.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2"
    names = ["-subj", "/CN=localhost", "-out", str(cert), "-keyout", str(key)]
    if shutil.which("openssl") is None or said_by(*command.split(), *names).returncode:
        raise NotHere("openssl makes no certificate")
    return {"ssl_certfile": cert, "ssl_keyfile": key}


_LINE = b"X-A: " + b"a" * 60_000
_CHUNKED = _HALF_A_HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n"
_ENDLESS = {
    "header lines": (_HALF_A_HEAD, _LINE + b"\r\n"),
    "a header line": (_HALF_A_HEAD, _LINE[5:]),
    "small header lines": (_HALF_A_HEAD, b"a:\r\n" * 10_000),
    "trailers": (_CHUNKED + b"0\r\n", _LINE + b"\r\n"),
    "a trailer": (_CHUNKED + b"0\r\n", _LINE[5:]),
    "a chunk's extension": (_CHUNKED + b"1;", _LINE[5:]),
    "requests": (b"", b"GET /x HTTP/1.1\r\nHost: a\r\n\r\n" * 10_000),
}


@attack(limit_s=90)
def more_than_a_request(_: Path) -> str:
    """Sends without end, over eight connections, what is no body: lines of a head, trailers, a
    chunk's extension, and requests of a client that waits for no reply."""
    worst = 0
    for keys in ((), (_KEY,)):
        with _application(Plan(ServeSpec("m", "127.0.0.1", 1, {})), *keys) as port:
            for what, (first, then) in _ENDLESS.items():
                before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
                with ExitStack() as kept:
                    for link in [kept.enter_context(_connection(port)) for _ in range(8)]:
                        link.settimeout(0.5)
                        with contextlib.suppress(OSError):
                            link.sendall(first + then * ((8 << 20) // len(then)))
                    began = time.monotonic()
                    httpx.get(f"http://127.0.0.1:{port}/health", timeout=30).raise_for_status()
                    if (took := time.monotonic() - began) > _SLOW_S:
                        raise Stalled(f"/health took {took:.1f} s after {what} without end")
                grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10
                if grown > 32:
                    raise GotIn(f"the server keeps {grown} MiB of {what} without end")
                worst = max(worst, grown)
    return f"each connection was ended; {worst} MiB kept at most"
