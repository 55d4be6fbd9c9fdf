"""``bench proxies``: the router's own time and CPU on large bodies, beside other programs'."""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import random
import re
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Sequence
from typing import Annotated

import httpx
import numpy as np
import psutil
import typer
import uvloop

from kvrecall.bench.model import Texts
from kvrecall.bench.report import Report, progress
from kvrecall.processes.ports import free_port

_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s"
_POST = (
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\n\r\n%s"
)
_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
_TIMES = re.compile(rb'"times": *\[(\d+), *(\d+)\]')
_WAIT_S = 30.0


class _Messages(asyncio.Protocol):
    """HTTP messages of known length, one at a time."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: asyncio.Transport = transport  # type: ignore[assignment]
        self.buffer, self.began = bytearray(), 0

    def data_received(self, data: bytes) -> None:
        self.began = self.began or time.monotonic_ns()
        self.buffer += data
        if (head := self.buffer.find(b"\r\n\r\n")) >= 0:
            length = _LENGTH.search(self.buffer[:head])
            if len(self.buffer) >= head + 4 + (int(length[1]) if length else 0):
                message, self.buffer = bytes(self.buffer), bytearray()
                self.came(message)
                self.began = 0

    def came(self, message: bytes) -> None:
        raise NotImplementedError


class _Engine(_Messages):
    """Answers at once, and says when a request's first byte came and its reply left."""

    def came(self, message: bytes) -> None:
        body: dict[str, object] = {"data": [{"id": "m"}], "choices": []}
        if message.startswith(b"POST"):
            body |= {"usage": {"prompt_tokens": 9}, "times": [self.began, time.monotonic_ns()]}
        content = json.dumps(body).encode()
        self.transport.write(_HEAD % (len(content), content))


class _Client(_Messages):
    reply: asyncio.Future[tuple[int, bytes]]

    def came(self, message: bytes) -> None:
        if not self.reply.done():
            self.reply.set_result((time.monotonic_ns(), message))


def _engines(ports: Sequence[int]) -> None:
    async def serve() -> None:
        loop = asyncio.get_running_loop()
        for port in ports:
            await loop.create_server(_Engine, "127.0.0.1", port, backlog=1024)
        await asyncio.Event().wait()

    uvloop.run(serve())


async def _load(
    port: int, rate: float, seconds: float, bodies: Sequence[bytes], seed: int
) -> tuple[list[float], Counter[str]]:
    """Milliseconds that each request spent outside the engine, and what did not get a reply.
    Requests come at random times, whether or not earlier ones are answered."""
    loop, draw = asyncio.get_running_loop(), random.Random(seed)
    free: deque[_Client] = deque()
    own: list[float] = []
    failed: Counter[str] = Counter()

    async def one(body: bytes) -> None:
        try:
            async with asyncio.timeout(_WAIT_S):
                client = free.pop() if free else None
                if client is None:
                    _, client = await loop.create_connection(_Client, "127.0.0.1", port)
                client.reply, began = loop.create_future(), time.monotonic_ns()
                client.transport.write(_POST % (len(body), body))
                ended, reply = await client.reply
            times = _TIMES.search(reply)
            assert times is not None, reply[:300]
            own.append((ended - began - int(times[2]) + int(times[1])) / 1e6)
            free.append(client)
        except (OSError, AssertionError) as error:
            failed[f"{type(error).__name__} {error}"[:80]] += 1

    due = time.monotonic()
    end = due + seconds
    async with asyncio.TaskGroup() as group:
        while (due := due + draw.expovariate(rate)) < end:
            await asyncio.sleep(due - time.monotonic())
            group.create_task(one(bodies[draw.randrange(len(bodies))]))
    for client in free:
        client.transport.close()
    return own, failed


def measure_proxies(
    rate: Annotated[float, typer.Option(min=1, help="Requests a second.")] = 500.0,
    seconds: Annotated[float, typer.Option(min=0.5, help="Of each measurement.")] = 5.0,
    size: Annotated[int, typer.Option(min=1000, help="Bytes of a body.")] = 100_000,
    rounds: Annotated[int, typer.Option(min=1, help="Times each is measured, in turn.")] = 3,
    ports: Annotated[str, typer.Option(help="Of the engines; 0: any.")] = "0,0,0,0",
    beside: Annotated[
        str, typer.Option(help="Others before these engines: NAME=PORT/PID, comma-separated.")
    ] = "",
) -> Report:
    """What a request of a chat spends outside the engines, straight to one of them (the cost of
    the generator and the sockets), through kvrecall's router, and through others."""
    texts = Texts(0)
    system = texts.document(500)
    bodies = []
    for _ in range(64):
        text = texts.document(size)[: size - len(system) - 100]
        talk = [{"role": "system", "content": system}, {"role": "user", "content": text}]
        bodies.append(json.dumps({"model": "m", "messages": talk}).encode())
    engines = [int(port) or free_port() for port in ports.split(",")]
    own = free_port()
    with contextlib.ExitStack() as stack:
        serving = multiprocessing.get_context("spawn").Process(target=_engines, args=(engines,))
        serving.start()
        stack.callback(serving.join)
        stack.callback(serving.terminate)
        words = [word for port in engines for word in ("--engine", f"127.0.0.1:{port}")]
        command = [sys.executable, "-m", "kvrecall", "router", "--port", str(own), *words]
        router = stack.enter_context(subprocess.Popen(command, stderr=subprocess.DEVNULL))
        stack.callback(router.terminate)
        others = dict(one.split("=") for one in filter(None, beside.split(",")))
        told = {"straight": f"{engines[0]}/0", "kvrecall router": f"{own}/{router.pid}", **others}
        ways = {name: tuple(map(int, text.split("/"))) for name, text in told.items()}
        end = time.monotonic() + _WAIT_S
        for port, _ in ways.values():
            while time.monotonic() < end:
                with contextlib.suppress(httpx.HTTPError):
                    if httpx.get(f"http://127.0.0.1:{port}/v1/models").status_code == 200:
                        break
                time.sleep(0.2)
        times: dict[str, list[float]] = {name: [] for name in ways}
        cpu, failed = Counter[str](), {name: Counter[str]() for name in ways}
        for number in range(rounds):
            for name, (port, pid) in ways.items():
                process = psutil.Process(pid or None)
                uvloop.run(_load(port, rate, 0.5, bodies, number))
                before = process.cpu_times()
                found, lost = uvloop.run(_load(port, rate, seconds, bodies, number))
                after = process.cpu_times()
                times[name] += found
                failed[name] += lost
                cpu[name] += after.user + after.system - before.user - before.system  # type: ignore[assignment]
            progress(f"  round {number + 1} of {rounds}")
    ranks = (50, 90, 99, 99.9)
    figures = {
        name: {
            **{f"own_p{rank}_ms": round(float(np.percentile(some, rank)), 2) for rank in ranks},
            "cpu_ms": round(1000 * cpu[name] / max(1, len(some)), 3),
            "requests": len(some),
            "failed": dict(failed[name]),
        }
        for name, some in times.items()
        if some
    }
    rows = tuple(
        (name, *(str(one[f"own_p{rank}_ms"]) for rank in ranks), str(one["cpu_ms"]))
        for name, one in figures.items()
    )
    columns = ("through", *(f"own ms, p{rank}" for rank in ranks), "CPU ms a request")
    notes = (
        f"{rate:g} requests a second of {size:,} bytes; of 'straight' the CPU is the generator's",
    )
    return Report("proxies", columns, rows, {"rate": rate, "size": size, "ways": figures}, notes)
