"""``kvrecall bench misses``: is each miss reported with the reason that caused it?

Live servers of a small model with random weights; every cause is brought about, and the reason that
the reply reports is compared with it: the reason itself and what belongs to it (the token at which
a prompt was changed, the tier and the cause of an eviction, the field of a namespace). Three
servers, one after the other: one of another dtype, which leaves its blocks in a folder; one with a
pool of its own on that folder; and two over a pool service in this process, whose disk is
stopped or slowed down, and whose host is leased by somebody else.

What the explanations cost is measured by the servers themselves (``kvrecall_explain_seconds``) and
set against the time to first token of the same requests.
"""

from __future__ import annotations

import json
import random
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from kvrecall.block import tenant_of
from kvrecall.config import DiskConfig, PoolConfig
from kvrecall.errors import EngineError
from kvrecall.lab.bench.report import Report, progress
from kvrecall.lab.bench.throttle import ThrottledIo
from kvrecall.lab.engines.server import ServerProcess
from kvrecall.lab.models import write_model
from kvrecall.pool.arena import Arena
from kvrecall.pool.disk import DiskTier
from kvrecall.pool.pool import Pool
from kvrecall.pool.service.admin import Drop, List, ServiceAdmin
from kvrecall.pool.service.endpoint import ServiceThread
from kvrecall.pool.service.inventory import Query

GOAL_OVERHEAD = 0.01

_BLOCK = 32
_BLOCKS = 3
_LENGTH = _BLOCKS * _BLOCK + 5
_BLOCK_BYTES = 2 * 2 * 2 * 64 * _BLOCK * 2  # layers, K and V, KV heads, head size, bfloat16
_PAD, _LAST = 3, 255  # tokens of prompts
_TTL_S = 3
_SETTLE_S = 60.0
_DEADLINE_S = 0.3
_MOST_PUSHES = 30
_AT_ONCE = 16  # prompts, which the host has room for

ON_DISK = "on disk"
"""Salt of prompts whose blocks have left the host."""

_Prompt = list[int]
_Expected = Mapping[str, object]


@dataclass(slots=True)
class _Outcome:
    """A request: what was brought about, and what the reply reported."""

    cause: str
    expected: _Expected
    told: Mapping[str, Any] | None

    @property
    def is_right(self) -> bool:
        told = self.told or {}
        return all(told.get(name) == value for name, value in self.expected.items())


class GatedIo(ThrottledIo):
    """A disk whose reads can be stopped altogether."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()

    def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self.gate.wait()
        return super().read(fd, buffers, offset)


@dataclass
class _Client:
    """Asks one server, and keeps the outcomes."""

    server: ServerProcess
    socket: Path
    """At which the pool can be administered."""
    outcomes: list[_Outcome]
    rng: random.Random
    http: httpx.Client = field(default_factory=lambda: httpx.Client(timeout=120))

    def prompt(self, length: int = _LENGTH) -> _Prompt:
        return [self.rng.randrange(_PAD, _LAST) for _ in range(length)]

    def prompts(self, count: int) -> list[_Prompt]:
        return [self.prompt() for _ in range(count)]

    def seed(self, prompts: Sequence[_Prompt], salt: str | None = None, whole: bool = True) -> None:
        """Has prompts computed and saved, and forgotten by the device. ``whole``: again until the
        pool has refused no block, as it does while the disk is behind."""
        for start in range(0, len(prompts), _AT_ONCE):
            part = list(prompts[start : start + _AT_ONCE])
            for _ in range(_MOST_PUSHES):
                refused = self.server.metric("kvrecall_blocks_refused_total")
                self._post(part, salt, {})
                self.server.settle()
                if self.server.metric("kvrecall_blocks_refused_total") == refused or not whole:
                    break
            else:
                raise EngineError("the pool refuses blocks, however often they are computed")
        self.server.forget_device()

    def on_disk(self, count: int) -> list[_Prompt]:
        """Prompts of the tenant ON_DISK that are on disk only."""
        prompts = self.prompts(count)
        self.seed(prompts, ON_DISK)
        query = Query(tenants=(tenant_of(ON_DISK),), tier="host")
        for _ in range(_MOST_PUSHES):
            with ServiceAdmin(self.socket) as admin:
                if not admin.do(List(query)).rows:
                    return prompts
            self.seed(self.prompts(32))
        raise EngineError("blocks stay in the host, however many others are saved")

    def ask(
        self,
        cause: str,
        prompt: _Prompt,
        expected: _Expected,
        salt: str | None = None,
        **more: object,
    ) -> None:
        """Asks a prompt whose miss has that cause."""
        usage = self._post(prompt, salt, more)["usage"]
        told = usage["prompt_tokens_details"]["recall"].get("missed")
        self.outcomes.append(_Outcome(cause, expected, told))

    def _post(self, prompt: object, salt: str | None, more: Mapping[str, object]) -> Any:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 1, "temperature": 0, **more}
        if salt is not None:
            body["cache_salt"] = salt
        reply = self.http.post(f"{self.server.url}/v1/completions", json=body)
        if reply.status_code != 200:
            raise EngineError(f"HTTP {reply.status_code}: {reply.text[:300]}")
        return reply.json()

    def costs(self) -> tuple[float, float, float]:
        """Seconds of explanations, seconds to first tokens, and requests so far."""
        self.server.ask("costs", 1)  # metrics follow the steps of the engine
        names = ("explain_seconds_total", "time_to_first_token_seconds_sum", "requests_total")
        prefixes = ("kvrecall_", "vllm:", "kvrecall_")
        found = [self.server.metric(a + b) for a, b in zip(prefixes, names, strict=True)]
        return found[0], found[1], found[2]


def measure_misses(
    requests: Annotated[
        int, typer.Option(min=40, help="Requests, at least; each of the causes gets its share.")
    ] = 1000,
    seed: Annotated[int, typer.Option(help="Of the prompts.")] = 0,
) -> Report:
    """Every cause of a miss brought about on live servers: is it the one that is reported?"""
    outcomes: list[_Outcome] = []
    costs: list[tuple[float, float, float]] = []
    rng = random.Random(seed)
    share = max(2, requests // 20 + 1)
    with tempfile.TemporaryDirectory(prefix="kvrecall-misses-") as name:
        folder = Path(name)
        model = write_model(folder / "model", "qwen3", hidden=64, layers=2, max_position=2048)
        with _own_pool(folder, model, "float32", outcomes, rng) as client:
            foreign = client.prompts(share)
            client.seed(foreign)
        with _own_pool(folder, model, "bfloat16", outcomes, rng) as client:
            _known_by_itself(client, share, foreign)
            _evicted(client, folder, share)
            costs.append(client.costs())
        for slow in (False, True):
            with _shared_pool(folder, model, outcomes, rng, slow) as (client, service, io):
                if slow:
                    _declined(client, service.pool, io, share)
                else:
                    _troubled(client, service, io, share)
                costs.append(client.costs())
    return _report(outcomes, costs)


# ---- servers -----------------------------------------------------------------------------------


def _words(model: Path, *more: str) -> list[str]:
    return [
        str(model),
        *("--served-model-name", "tiny", "--block-size", str(_BLOCK), "--max-model-len", "1024"),
        *("--kv-cache-memory-bytes", "32MiB", *more, "--", "--max-num-seqs", "16"),
    ]


@contextmanager
def _own_pool(
    folder: Path, model: Path, dtype: str, outcomes: list[_Outcome], rng: random.Random
) -> Iterator[_Client]:
    """A server with a small host and a disk, on which tenants have limits."""
    config = folder / "pool.json"
    limit = f"{40 * _BLOCK_BYTES}B"
    settings = {
        "host_size": "2MiB",
        "disk_path": str(folder / "disk"),
        "disk_size": "12MiB",
        "policy": "lru",
        "audit": "off",
        "load_or_compute": "load",
        "admin_socket": str(folder / "admin.sock"),
        "tenants": {
            tenant_of("limited"): {"host": limit, "disk": limit},
            tenant_of("short-lived"): {"ttl": f"{_TTL_S}s"},
        },
    }
    config.write_text(json.dumps(settings))
    words = _words(model, "--dtype", dtype, "--pool-config", str(config))
    progress(f"starting a server with a pool of its own ({dtype})")
    with ServerProcess(words, folder / f"{dtype}.log", progress) as server:
        yield _Client(server, folder / "admin.sock", outcomes, rng)


@contextmanager
def _shared_pool(
    folder: Path, model: Path, outcomes: list[_Outcome], rng: random.Random, slow: bool
) -> Iterator[tuple[_Client, ServiceThread, GatedIo]]:
    """A server over a pool service of this process."""
    name = "slow" if slow else "stopped"
    io = GatedIo()

    def open_pool(config: PoolConfig) -> Pool:
        disk = DiskConfig(folder / f"disk-{name}", 64 << 20)
        return Pool(Arena.create(config.host_bytes), DiskTier(disk, "lru", io=io), "lru")

    place = folder / name
    place.mkdir(mode=0o700)
    config = place / "pool.json"
    settings = {
        "backend": "service",
        "socket": str(place / "pool.sock"),
        "audit": "off" if slow else 1,
        "load_or_compute": "auto" if slow else "load",
        "load_deadline": 30.0 if slow else _DEADLINE_S,
    }
    config.write_text(json.dumps(settings))
    with ExitStack() as stack:
        pool = PoolConfig(2 << 20)
        service = ServiceThread(pool, place / "pool.sock", make=open_pool)
        stack.callback(service.close)
        stack.callback(io.gate.set)
        progress(f"starting a server over a pool service ({name} disk)")
        words = _words(model, "--dtype", "bfloat16", "--pool-config", str(config))
        server = stack.enter_context(ServerProcess(words, place / "server.log", progress))
        yield _Client(server, place / "pool.sock", outcomes, rng), service, io


# ---- causes ------------------------------------------------------------------------------------


def _known_by_itself(client: _Client, share: int, foreign: Sequence[_Prompt]) -> None:
    """Causes that need no trouble: new, short, changed, excluded, another namespace."""
    progress("prompts that are new, short, changed, or of another namespace")
    for prompt in client.prompts(share):
        client.ask("new", prompt, {"reason": "new", "from": 0, "tokens": _LENGTH})
    for _ in range(share):
        length = client.rng.randrange(1, _BLOCK + 1)
        client.ask("short", client.prompt(length), {"reason": "short", "tokens": length})
    for prompt in foreign:
        fields = {"reason": "namespace", "tier": "disk"}
        client.ask("namespace", prompt, fields)
        told = client.outcomes[-1].told or {}
        if "dtype" not in told.get("fields", ()):
            client.outcomes[-1].expected = {**fields, "fields": "with dtype"}
    known = client.prompts(3 * share)
    client.seed(known)
    for prompt in known:
        token = client.rng.randrange(8, len(prompt) - 6)
        changed = [*prompt]
        changed[token] = _PAD + (changed[token] - _PAD + 1) % (_LAST - _PAD)
        at = token // _BLOCK * _BLOCK
        client.ask("diverged", changed, {"reason": "diverged", "token": token, "from": at})
    for prompt in known[:share]:
        expected = {"reason": "not_asked", "cause": "prompt_logprobs"}
        client.ask("not asked", prompt, expected, prompt_logprobs=0)


def _evicted(client: _Client, folder: Path, share: int) -> None:
    """Causes for which a block left the tiers, and damage."""

    def drop(query: Query) -> None:
        with ServiceAdmin(client.socket) as admin:
            admin.do(Drop(query, True))

    def expect(name: str, prompts: Sequence[_Prompt], salt: str | None, **more: object) -> None:
        for prompt in prompts:
            client.ask(name, prompt, {"reason": "evicted", **more}, salt)
        client.server.forget_device()

    progress("blocks that are dropped, cleared, expired, over a limit, or pushed out")
    part = min(share, 60)
    for start in range(0, share, part):
        prompts = client.prompts(min(part, share - start))
        client.seed(prompts, "dropped")
        drop(Query(tenants=(tenant_of("dropped"),)))
        expect("dropped", prompts, "dropped", cause="dropped")
    for start in range(0, share, 12):
        prompts = client.prompts(min(12, share - start))
        client.seed(prompts, "short-lived")
        time.sleep(2 * _TTL_S)
        expect("expired", prompts, "short-lived", cause="expired")
    for start in range(0, share, 12):
        first = client.prompts(min(12, share - start))
        client.seed(first, "limited")
        client.seed(client.prompts(30), "limited")
        expect("quota", first, "limited", cause="quota")
    for start in range(0, share, part):
        prompts = client.prompts(min(part, share - start))
        client.seed(prompts)
        for _ in range(6):
            client.seed(client.prompts(64))
        expect("capacity", prompts, None, cause="capacity", tier="disk")
    for start in range(0, share, part):
        prompts = client.on_disk(min(part, share - start))
        for slab in (folder / "disk").glob("slab-*.kv"):
            with slab.open("r+b") as file:
                for at in range(8192, slab.stat().st_size, 4096):
                    file.seek(at + 99)
                    file.write(b"\xff\x00\xff\x00")
        for prompt in prompts:
            expected = {"reason": "damaged", "tier": "disk", "cause": "corrupt", "from": 0}
            client.ask("damaged", prompt, expected, ON_DISK)
        client.server.forget_device()


def _troubled(client: _Client, service: ServiceThread, io: GatedIo, share: int) -> None:
    """A disk that stops, a host without room, audits, and a service that ends."""
    pool = service.pool
    progress("hits that are audited; a disk that stops; a host without room")
    prompts = client.prompts(share)
    for start in range(0, share, 20):
        part = prompts[start : start + 20]
        client.seed(part)
        for prompt in part:
            expected = {"reason": "audit", "from": (_BLOCKS - 1) * _BLOCK}
            client.ask("audit", prompt, expected)
    for prompt in client.on_disk(share):
        io.gate.clear()
        client.ask("late", prompt, {"reason": "late", "tier": "disk", "from": 0}, ON_DISK)
        io.gate.set()
        _wait(lambda: pool.stats().queued_reads == 0)
    client.server.forget_device()
    on_disk = client.on_disk(share + 1)
    io.gate.clear()
    client.ask("late", on_disk[0], {"reason": "late", "tier": "disk", "from": 0}, ON_DISK)
    for prompt in on_disk[1:]:
        expected = {"reason": "away", "tier": "disk", "from": 0}
        client.ask("disk silent", prompt, expected, ON_DISK)
    io.gate.set()
    _wait(lambda: pool.stats().queued_reads == 0)
    client.server.forget_device()
    on_disk = client.on_disk(share)
    leased = pool.acquire([one.key for one in pool.host_blocks()], 60.0)
    for prompt in on_disk:
        expected = {"reason": "no_room", "tier": "disk", "from": 0}
        client.ask("no room", prompt, expected, ON_DISK)
    fresh = client.prompts(share)
    client.seed(fresh, whole=False)
    for prompt in fresh:
        client.ask("refused", prompt, {"reason": "refused", "cause": "room", "tier": "host"})
    pool.release(leased)
    progress("a service that ends")
    service.close()
    _wait(lambda: "pool service at" in client.server.log_tail(400))
    for prompt in client.prompts(share):
        client.ask("service away", prompt, {"reason": "away", "tier": "service", "from": 0})


def _declined(client: _Client, pool: Pool, io: GatedIo, share: int) -> None:
    """A disk so slow that computing is faster. Now and then the engine tries it again, and gives
    the load up: its own counters say which of the two happened."""
    progress("a disk that is slower than computing")
    on_disk = client.on_disk(2 * share)
    io.bytes_per_s = 100e3
    for prompt in on_disk:
        before = _choices(client)
        client.ask("slow disk", prompt, {}, ON_DISK)
        outcome, after = client.outcomes[-1], _choices(client)
        given_up, declined = after[0] > before[0], after[1] > before[1]
        if given_up:
            outcome.expected = {"reason": "late", "tier": "disk"}
        elif declined:
            outcome.expected = {"reason": "declined"}
            told = outcome.told or {}
            if not told.get("load_s", 0) > told.get("compute_s", 1) > 0:
                outcome.expected = {"reason": "declined", "load_s": "above compute_s"}
        else:
            outcome.expected = {"reason": "neither late nor declined"}
    io.bytes_per_s = 0.0


def _choices(client: _Client) -> tuple[float, float]:
    """Loads given up, and blocks declined, so far."""
    client.server.ask("choices", 1)
    names = ("kvrecall_loads_given_up_total", "kvrecall_blocks_declined_total")
    first, second = map(client.server.metric, names)
    return first, second


def _wait(true: Callable[[], bool]) -> None:
    """Raises EngineError after a while."""
    until = time.monotonic() + _SETTLE_S
    while not true():
        if time.monotonic() > until:
            raise EngineError(f"a state of the pool was not reached in {_SETTLE_S:.0f} s")
        time.sleep(0.01)


# ---- report ------------------------------------------------------------------------------------


def _report(outcomes: Sequence[_Outcome], costs: Sequence[tuple[float, float, float]]) -> Report:
    causes = Counter(one.cause for one in outcomes)
    right = Counter(one.cause for one in outcomes if one.is_right)
    reasons = Counter(str((one.told or {}).get("reason", "none")) for one in outcomes)
    explained, first, requests = (sum(each) for each in zip(*costs, strict=True))
    wrong = [one for one in outcomes if not one.is_right]
    notes = [
        f"wrong: {one.cause}: expected {dict(one.expected)}, reported {one.told}"
        for one in wrong[:20]
    ]
    overhead = explained / first if first else 0.0
    each_us = 1e6 * explained / requests if requests else 0.0
    notes.append(
        f"explanations: {each_us:.0f} µs a request, {overhead:.2%} of the time to first token "
        f"(goal < {GOAL_OVERHEAD:.0%})"
    )
    rows = tuple(
        (cause, str(count), str(right[cause]), f"{right[cause] / count:.1%}")
        for cause, count in causes.items()
    )
    figures = {
        "requests": len(outcomes),
        "reasons": dict(sorted(reasons.items())),
        "causes": dict(causes),
        "right": sum(right.values()) / len(outcomes),
        "wrong": len(wrong),
        "ttft_overhead": round(overhead, 5),
        "explain_us": round(each_us, 1),
    }
    columns = ("cause", "requests", "right", "share")
    return Report("misses", columns, rows, figures, tuple(notes))
