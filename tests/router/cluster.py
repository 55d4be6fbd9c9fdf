"""Real instances, a real pool service and a real router, each a process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
from server.live import KVRECALL, START_LIMIT_S, LiveServer
from support.warm import WarmServer

from kvrecall.processes.ports import free_port
from kvrecall_lab.models import write_model

Json = dict[str, Any]


def instance(
    folder: Path,
    model: Path,
    role: str,
    port: int,
    socket: Path | None = None,
    events: int = 0,
    options: Sequence[str] = (),
    replayed: int = 10_000,
    **pool: object,
) -> LiveServer:
    """An engine that is starting; ``wait_ready`` before use. Its pool is the service's at
    ``socket``, or one of its own with the settings ``pool``. ``events``: the port at which it
    publishes KV events, if any; replay of ``replayed`` batches is at the next one. ``options``:
    further ones of serve."""
    folder.mkdir(exist_ok=True)
    words = [str(model), "--port", str(port), "--served-model-name", "tiny", "--role", role]
    words += ["--dtype", "float32", "--kv-cache-memory-bytes", "64MiB"]
    file = folder / "pool.json"
    # What is found is loaded, whatever it is worth; and machines may be busy.
    # Nor does each instance compute the first hit on blocks of every other one.
    patient: dict[str, object] = {"load_or_compute": "load", "audit": "off"}
    patient |= {"handover_deadline": 30, "load_deadline": 60}
    patient |= {"call_timeout": 10} if socket is not None else {}
    file.write_text(json.dumps({**patient, **pool}))
    words += ["--pool-config", str(file)]
    words += ["--pool-socket", str(socket)] if socket is not None else []
    words += [*options, "--", "--max-num-seqs", "8"]
    if events:
        published = {"enable_kv_cache_events": True, "publisher": "zmq"}
        published |= {"endpoint": f"tcp://*:{events}", "replay_endpoint": f"tcp://*:{events + 1}"}
        published |= {"buffer_steps": replayed}
        words += ["--kv-events-config", json.dumps(published)]
    return LiveServer(folder, words, f"http://127.0.0.1:{port}", warm=True)


class Router:
    """``kvrecall router`` on a free port, or the one given; ``warm`` as of a ``LiveServer``."""

    def __init__(self, folder: Path, words: list[str], port: int = 0, warm: bool = True) -> None:
        self.port = port = port or free_port()
        self.url = f"http://127.0.0.1:{port}"
        as_json = {"content-type": "application/json"}
        self.client = httpx.Client(base_url=self.url, timeout=120, headers=as_json)
        self._log = folder / f"router-{port}.log"
        command = [KVRECALL, "router", "--port", str(port), *words]
        self.process: subprocess.Popen[bytes] | WarmServer
        self._log.write_bytes(b"")
        if warm:
            self.process = WarmServer(command, self._log, os.environ)
        else:
            with self._log.open("wb") as log:
                self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        end = time.monotonic() + START_LIMIT_S
        while time.monotonic() < end and self.process.poll() is None:
            try:
                self.client.get("/metrics")
                return
            except httpx.TransportError:
                time.sleep(0.1)
        raise AssertionError(f"the router did not start:\n{self.log}")

    def blocks(self) -> dict[str, float]:
        """What it knows: the lines of its page on blocks, by publisher and tier."""
        lines = self.client.get("/metrics").text.splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if "_router_blocks{" in line)
        return {name: float(value) for name, value in pairs}

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def complete(self, **body: Any) -> httpx.Response:
        asked = {"model": "tiny", "max_tokens": 8, "temperature": 0, **body}
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        return self.client.post(path, json=asked)

    def up(self) -> dict[str, bool]:
        """Which instances are up, by URL."""
        state = self.client.get("/health").json()
        return {each["url"]: each["up"] for each in state["instances"]}

    def inflight(self) -> int:
        state = self.client.get("/health").json()
        return sum(each["inflight"] for each in state["instances"]) + int(state["open_requests"])

    def count(self, name: str, **labels: str) -> float:
        """A counter's value, summed over the labels that are not given."""
        total = 0.0
        for line in self.client.get("/metrics").text.splitlines():
            wanted = all(f'{key}="{value}"' in line for key, value in labels.items())
            if line.startswith(f"kvrecall_router_{name}") and wanted:
                total += float(line.rsplit(" ", 1)[1])
        return total

    def close(self) -> None:
        self.client.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


def tiny(folder: Path, longest: int = 8192) -> Path:
    """The folder of a model of random weights."""
    shape = {"hidden": 64, "layers": 2, "max_position": longest, "dtype": "float32"}
    return write_model(folder / "model", "qwen3", **shape)


def tokens_of(reply: Json) -> list[int]:
    (choice,) = reply["choices"]
    return list(choice["token_ids"])


def kill(server: LiveServer) -> None:
    """kill -9 of a server and all its processes."""
    os.killpg(server.process.pid, signal.SIGKILL)
    server.process.wait()


def header(reply: httpx.Response) -> dict[str, str]:
    """``x-kvrecall`` taken apart."""
    pairs = (word.partition("=") for word in reply.headers["x-kvrecall"].split(";"))
    return {name: value for name, _, value in pairs}
