"""Everything that listens, and every route, is in SECURITY.md's tables."""

from __future__ import annotations

import fnmatch
import json
import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import gettempdir

import psutil
import pytest
from fastapi import FastAPI
from pool.remote.mooncake import needs_mooncake
from router.cluster import Router

from kvrecall.engines.base import ServeSpec
from kvrecall.processes.ports import free_port, two_ports
from kvrecall.processes.service import Master
from kvrecall.server.application import _PUBLIC, attach_all
from kvrecall.server.plan import Plan
from kvrecall.testing import wait_until
from kvrecall_lab.models import write_model
from server.fake import FakeEngine
from server.live import KVRECALL, LiveServer

SECURITY = (Path(__file__).parents[2] / "SECURITY.md").read_text()


def table(begins: str) -> list[list[str]]:
    """The rows of the table whose head begins with that, in cells."""
    lines = SECURITY[SECURITY.index(f"| {begins} |") :].split("\n\n", 1)[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


LISTENERS = {row[0] for row in table("listener")}
ROUTES = {
    kind: re.findall(r"`(/[^`]*)`", row[0])
    for kind, row in zip(
        "health metrics clients shows steers".split(), table("routes"), strict=True
    )
}


def kind_of(path: str, method: str = "GET") -> str:
    """The row that names a route; a pattern of more characters is the more special one."""
    if path == "/ping" and method == "POST":
        return "steers"
    plain = re.sub(r"\{[^}]*\}", "x", path)
    found = [
        (len(pattern), kind)
        for kind, patterns in ROUTES.items()
        for pattern in patterns
        if fnmatch.fnmatchcase(plain, pattern)
    ]
    assert found, f"{method} {path} is in no row of SECURITY.md's table of routes"
    return max(found)[1]


def check_routes(routes: list[tuple[str, str]]) -> None:
    for method, path in routes:
        kind = kind_of(path, method)
        public = bool(_PUBLIC.fullmatch(re.sub(r"\{[^}]*\}", "x", path)))
        assert public == (kind in ("clients", "metrics")) or kind == "health", (method, path, kind)


def test_every_route_of_ours_has_a_row() -> None:
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    attach_all(app, FakeEngine(), plan=Plan(ServeSpec("m", "127.0.0.1", 1, {}), stop_by_get=True))
    check_routes(
        [(method, route.path) for route in app.routes for method in route.methods]  # type: ignore[attr-defined]
    )


def test_an_unknown_route_has_none() -> None:
    with pytest.raises(AssertionError, match="in no row"):
        kind_of("/secrets")


def listening() -> dict[str, str]:
    """What listens on this machine, by the number of its socket: ``tcp ADDRESS:PORT`` in the
    kernel's notation, ``unix PATH``."""
    found = {}
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        parts = line.split()
        if int(parts[3], 16) & 0x10000:  # accepts connections
            found[parts[6]] = f"unix {parts[7] if len(parts) > 7 else ''}"
    for name, state in (("tcp", "0A"), ("tcp6", "0A"), ("udp", "07"), ("udp6", "07")):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            parts = line.split()
            address, _, port = parts[1].partition(":")
            if parts[3] == state:
                found[parts[9]] = f"{name} {address}:{int(port, 16)}"
    return found


def sockets_of(pid: int) -> Iterator[tuple[psutil.Process, str]]:
    """The listening sockets of a process and its descendants."""
    open_ones, main = listening(), psutil.Process(pid)
    for process in (main, *main.children(recursive=True)):
        folder = Path(f"/proc/{process.pid}/fd")
        for fd in folder.iterdir() if folder.exists() else ():
            try:
                target = os.readlink(fd)
            except OSError:
                continue
            if (number := target.removeprefix("socket:[").removesuffix("]")) in open_ones:
                yield process, open_ones[number]


LOOPBACK, ANYWHERE = "tcp 0100007F", ("tcp 00000000", f"tcp6 {'0' * 32}")
UUID = re.compile("[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


@needs_mooncake
@pytest.mark.engine
@pytest.mark.longest
def test_everything_that_listens_has_a_row(tmp_path: Path) -> None:
    """On loopback, except for Mooncake's client and what the command line says."""
    api, management, metrics = (free_port() for _ in range(3))
    events, published = two_ports(), two_ports()
    keys, socket = tmp_path / "keys", tmp_path / "run" / "pool.sock"
    keys.write_text("one")
    keys.chmod(0o600)
    write_model(tmp_path / "model", "qwen3", hidden=64, layers=2, max_position=512)
    with ExitStack() as stack:
        master = Master(tmp_path / "master.log")
        stack.callback(master.kill)
        master.start()
        remote = {"kind": "mooncake", **master.options("64MB")}
        (tmp_path / "pool.json").write_text(json.dumps({"host_size": "32MiB", "remote": remote}))
        words = ["pool", "serve", "--socket", str(socket), "--host-size", "32MiB"]
        with (tmp_path / "service.log").open("wb") as log:
            service = subprocess.Popen(
                [KVRECALL, *words, "--events", str(published)], stdout=log, stderr=log
            )
        stack.callback(service.wait)
        stack.callback(service.kill)
        publishes = {"enable_kv_cache_events": True, "publisher": "zmq"}
        publishes |= {"endpoint": f"tcp://127.0.0.1:{events}"}
        publishes |= {"replay_endpoint": f"tcp://127.0.0.1:{events + 1}"}
        words = [str(tmp_path / "model"), "--port", str(api), "--served-model-name", "tiny"]
        words += ["--pool-config", str(tmp_path / "pool.json"), "--api-key-file", str(keys)]
        words += ["--management", f"127.0.0.1:{management}", "--metrics", f"127.0.0.1:{metrics}"]
        words += ["--kv-cache-memory-bytes", "64MiB", "--", "--max-num-seqs", "4"]
        words += ["--kv-events-config", json.dumps(publishes)]
        server = LiveServer(tmp_path, words, f"http://127.0.0.1:{api}", warm=True)
        stack.callback(server.close)
        server.wait_ready()
        router = Router(tmp_path, ["--engine", server.url], warm=False)
        stack.callback(router.close)
        wait_until(socket.exists)

        by_port = {
            api: "API",
            management: "management",
            metrics: "metrics",
            router.port: "router",
            master.port: "Mooncake's master",
            master.metrics_port: "Mooncake's master",
            **dict.fromkeys((events, events + 1), "KV events of an engine"),
            **dict.fromkeys((published, published + 1), "KV events of a pool service"),
        }

        def row_of(process: psutil.Process, where: str) -> str | None:
            address, _, port = where.partition(":")
            if where.startswith("unix "):
                path = Path(where.removeprefix("unix "))
                if UUID.fullmatch(path.name) and path.parent == Path(gettempdir()):
                    assert not path.stat().st_mode & 0o022, where
                    return "vLLM's processes among each other"
                if path.parent.name.startswith("kvrecall-events-"):  # behind the gate
                    assert not path.parent.exists(), f"{where} has a name, and outlives a kill"
                    kind = "a pool service" if process.pid == service.pid else "an engine"
                    return f"KV events of {kind}"
                assert path.parent.stat().st_mode & 0o777 == 0o700, where
                assert path.stat().st_mode & 0o777 == 0o600, where
                ours = path == socket or path.name == f"serve-{api}.sock"
                return "pool service, an engine's pool" if ours else None
            if any(word.startswith("kvrecall.pool.remote.mooncake") for word in process.cmdline()):
                return "Mooncake's client"
            assert address == LOOPBACK, (process.cmdline(), where)
            if int(port) in by_port:
                return by_port[int(port)]
            vllms = process.name().startswith("VLLM::")
            return "vLLM's processes among each other" if vllms else None

        seen = set()
        for pid in (server.process.pid, router.process.pid, master.pid, service.pid):
            for process, where in sockets_of(pid):
                row = row_of(process, where)
                assert row is not None, f"unknown: {where} of {process.cmdline()}"
                seen.add(row)
        assert seen == LISTENERS
        check_routes(
            [
                (method, path)
                for path, methods in re.findall(r"Route: (\S+), Methods: ([\w, ]+)", server.log)
                for method in methods.split(", ")
            ]
        )
        assert kind_of("/collective_rpc") == "steers"
        assert "/collective_rpc" in server.log, "the routes of vLLM's development mode are there"
