"""``bench misses``: is each miss reported with the reason that caused it?

Live servers of a small model with random weights; causes are brought about, and the reason that the
reply reports is compared with each: the reason itself and what belongs to it (the token at which a
prompt was changed, and the text around it; the tier and the cause of an eviction; the parts of a
namespace that differ). Engines of another dtype, other weights and another configuration, one after
the other, leave their blocks in a folder; one with a pool of its own on that folder is asked for
them, and for what its pool evicted and lost. Tiers and services in trouble, which cause the other
reasons, are in ``tests/engines/vllm/connector/test_miss.py``.

What the explanations cost is measured by the server (``kvrecall_explain_seconds``: what a request
waits for) and set against the time to first token of the same requests, each of which was alone in
the engine, waited for nothing and ended with its first token. Beside it stands what was done while
the workers computed (``kvrecall_explain_aside_seconds``).
"""

from __future__ import annotations

import json
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import httpx
import torch
import typer

from kvrecall.bench.report import Report, progress
from kvrecall.block import BlockKey, tenant_of
from kvrecall.errors import EngineError
from kvrecall.pool.service.admin import By, Drop, List, Query, ServiceAdmin
from kvrecall.processes.server import ServerProcess
from kvrecall.server.access import OWN_HEADER
from kvrecall_lab.engines.decode import isa_of
from kvrecall_lab.models import write_model

GOAL_OVERHEAD = 0.01

_BLOCK = 32
_BLOCKS = 3
_LENGTH = _BLOCKS * _BLOCK + 5
_HEAD = 64
_BLOCK_BYTES = 2 * 2 * 2 * _HEAD * _BLOCK * 2  # layers, K and V, KV heads, head size, bfloat16
_CAUSES = 15  # with what is changed at several places counted as often
_PAD, _LAST = 3, 255  # tokens of prompts
_LIMIT_BYTES = 13 * _BLOCKS * _BLOCK_BYTES  # of a tenant
_TTL_S = 2
_SETTLE_S = 60.0
_MOST_PUSHES = 30
_HOST_BLOCKS = 256
_DISK_BLOCKS = 1024
_AT_ONCE = 64  # prompts, which the host has room for
_CHUNK = 128  # tokens of a long prompt that a step computes

ON_DISK = "on disk"
"""Salt of prompts whose blocks have left the host."""

_FOREIGN: Mapping[str, tuple[Sequence[str], Sequence[str], Sequence[str]]] = {
    "dtype": (("--dtype", "float32"), (), ("configuration", "dtype", "layout", "loaded")),
    "weights": ((), (), ("weights",)),
    "settings": (
        (),
        ("--hf-overrides", '{"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}'),
        ("architecture", "loaded"),
    ),
}
"""Engines of other namespaces: kvrecall's options, vLLM's, and the parts of a namespace that differ
then on any processor. "weights": of another seed."""


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

    def __str__(self) -> str:
        return f"wrong: {self.cause}: expected {dict(self.expected)}, reported {self.told}"


@dataclass
class _Client:
    """Asks one server, and keeps the outcomes."""

    server: ServerProcess
    socket: Path
    """At which the pool can be administered."""
    outcomes: list[_Outcome]
    rng: random.Random
    http: httpx.Client = field(default_factory=lambda: httpx.Client(timeout=120))
    seconds: list[float] = field(default_factory=lambda: [0.0] * 4)
    """As of ``costs``, of what was asked within ``measured``."""

    def prompt(self, length: int = _LENGTH) -> _Prompt:
        return [self.rng.randrange(_PAD, _LAST) for _ in range(length)]

    def prompts(self, count: int) -> list[_Prompt]:
        return [self.prompt() for _ in range(count)]

    def seed(self, prompts: Sequence[_Prompt], salt: str | None = None) -> None:
        """Has prompts computed and saved, and forgotten by the device: again until the pool has
        refused no block, as it does while the disk is behind."""
        for start in range(0, len(prompts), _AT_ONCE):
            part = list(prompts[start : start + _AT_ONCE])
            for _ in range(_MOST_PUSHES):
                refused = self.server.metric("kvrecall_blocks_refused_total")
                self._post(part, salt, {})
                self.server.settle()
                if self.server.metric("kvrecall_blocks_refused_total") == refused:
                    break
            else:
                raise EngineError("the pool refuses blocks, however often they are computed")
        self.server.forget_device()

    def on_disk(self, count: int) -> list[_Prompt]:
        """Prompts of the tenant ON_DISK that are on disk only."""
        prompts = self.prompts(count)
        self.seed(prompts, ON_DISK)
        self.push_out(ON_DISK, "host")
        return prompts

    def push_out(self, salt: str, tier: str = "") -> None:
        """Saves others until that tenant has no block any more: in the tier, or anywhere."""
        query = Query(tenants=(tenant_of(salt),), tier=tier)
        for _ in range(_MOST_PUSHES):
            if not self.listed(query):
                return
            self.seed(self.prompts(_AT_ONCE))
        raise EngineError("blocks stay, however many others are saved")

    def listed(self, query: Query) -> list[BlockKey]:
        """Keys of the pool's blocks."""
        with ServiceAdmin(self.socket) as admin:
            return [
                BlockKey(bytes.fromhex(row.name)) for row in admin.do(List(query, By.BLOCK)).rows
            ]

    def ask(
        self, cause: str, prompt: _Prompt, expected: _Expected, salt: str | None = None, **more: Any
    ) -> None:
        """Asks a prompt whose miss has that cause."""
        outcome = _Outcome(cause, expected, self.missed(prompt, salt, **more))
        self.outcomes.append(outcome)
        if not outcome.is_right:
            progress(f"  {outcome}")

    def missed(self, prompt: _Prompt, salt: str | None = None, **more: object) -> Any:
        """The miss that the reply to a prompt reports."""
        usage = self._post(prompt, salt, more)["usage"]
        return usage["prompt_tokens_details"]["recall"].get("missed")

    def text(self, tokens: Sequence[int]) -> str:
        """Of tokens, as the server has it."""
        body = {"model": "tiny", "tokens": list(tokens)}
        reply = self.http.post(f"{self.server.url}/detokenize", json=body).raise_for_status()
        return str(reply.json()["prompt"])

    def live(self) -> int:
        """Requests that the server has."""
        reply = self.http.get(f"{self.server.url}/dashboard/data.json").raise_for_status()
        return int(reply.json()["live_total"])

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The engine begins no step. It admits what the server got within before it goes on."""
        own = {OWN_HEADER: "1"}
        url = f"{self.server.url}/pause"
        self.http.post(url, params={"mode": "keep"}, headers=own).raise_for_status()
        try:
            yield
        finally:
            self.http.post(f"{self.server.url}/resume", headers=own).raise_for_status()

    @contextmanager
    def measured(self) -> Iterator[None]:
        """What is asked within is part of the measured cost."""
        before = self.costs()
        yield
        self.seconds = [
            sum(each) - one for *each, one in zip(self.seconds, self.costs(), before, strict=True)
        ]

    def _post(self, prompt: object, salt: str | None, more: Mapping[str, object]) -> Any:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 1, "temperature": 0, **more}
        if salt is not None:
            body["cache_salt"] = salt
        reply = self.http.post(f"{self.server.url}/v1/completions", json=body)
        if reply.status_code != 200:
            raise EngineError(f"HTTP {reply.status_code}: {reply.text[:300]}")
        return reply.json()

    def costs(self) -> list[float]:
        """Seconds of explanations that requests waited for, and of those beside their computing,
        seconds to first tokens, and requests so far."""
        self.server.ask("costs", 1)  # metrics follow the steps of the engine
        names = (
            "kvrecall_explain_seconds_total",
            "kvrecall_explain_aside_seconds_total",
            "vllm:time_to_first_token_seconds_sum",
            "kvrecall_requests_total",
        )
        return [self.server.metric(name) for name in names]


def measure_misses(
    requests: Annotated[
        int, typer.Option(min=40, help="Requests, at least; each of the causes gets its share.")
    ] = 1000,
    seed: Annotated[int, typer.Option(help="Of the prompts.")] = 0,
) -> Report:
    """Causes of misses brought about on live servers: is it the one that is reported?"""
    outcomes: list[_Outcome] = []
    rng = random.Random(seed)
    share = max(2, requests // _CAUSES + 1)
    with tempfile.TemporaryDirectory(prefix="kvrecall-misses-") as name:
        folder = Path(name)
        model = _model(folder, "model")
        foreign = {
            part: _of_another_namespace(folder, part, model, outcomes, rng, share)
            for part in _FOREIGN
        }
        with _own_pool(folder, "own", model, (), (), outcomes, rng) as client:
            _known_by_itself(client, share, foreign)
            _evicted(client, folder, share)
            seconds = client.seconds
    return _report(outcomes, seconds)


def differing(part: str) -> list[str]:
    """Those parts on this processor: with AMX, vLLM has a kernel of its own for bfloat16."""
    isas = {isa_of(dtype, _HEAD, _BLOCK) for dtype in (torch.bfloat16, torch.float32)}
    return sorted([*_FOREIGN[part][2], *["kernel"] * (part == "dtype" and len(isas) > 1)])


# ---- servers -----------------------------------------------------------------------------------


def _model(folder: Path, name: str, seed: int = 0) -> Path:
    return write_model(folder / name, "qwen3", hidden=64, layers=2, max_position=2048, seed=seed)


def _of_another_namespace(
    folder: Path, part: str, model: Path, outcomes: list[_Outcome], rng: random.Random, share: int
) -> list[_Prompt]:
    """Prompts whose blocks an engine that differs in this part leaves on disk."""
    options, of_vllm, _ = _FOREIGN[part]
    if part == "weights":
        model = _model(folder, part, seed=1)
    with _own_pool(folder, part, model, options, of_vllm, outcomes, rng) as client:
        prompts = client.prompts(share)
        for start in range(0, share, 32):  # their blocks may be larger
            client.seed(prompts[start : start + 32])
    return prompts


@contextmanager
def _own_pool(
    folder: Path,
    name: str,
    model: Path,
    options: Sequence[str],
    of_vllm: Sequence[str],
    outcomes: list[_Outcome],
    rng: random.Random,
) -> Iterator[_Client]:
    """A server with a small host and a disk, on which tenants have limits."""
    config = folder / "pool.json"
    limit = f"{_LIMIT_BYTES}B"
    settings = {
        "host_size": f"{_HOST_BLOCKS * _BLOCK_BYTES}B",
        "disk_path": str(folder / "disk"),
        "disk_size": f"{_DISK_BLOCKS * (_BLOCK_BYTES + 4096)}B",
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
    dtype = () if "--dtype" in options else ("--dtype", "bfloat16")
    words = [str(model), "--served-model-name", "tiny", "--block-size", str(_BLOCK), *dtype]
    words += ["--max-model-len", "1024", "--kv-cache-memory-bytes", "32MiB", *options]
    words += ["--pool-config", str(config), "--", "--max-num-seqs", "16"]
    words += ["--long-prefill-token-threshold", str(_CHUNK), *of_vllm]
    progress(f"starting a server with a pool of its own ({name})")
    with ServerProcess(words, folder / f"{name}.log", progress) as server:
        yield _Client(server, folder / "admin.sock", outcomes, rng)


# ---- causes ------------------------------------------------------------------------------------


def _known_by_itself(client: _Client, share: int, foreign: Mapping[str, Sequence[_Prompt]]) -> None:
    """Causes that need no trouble: new, short, changed, excluded, another namespace, a race."""
    progress("prompts that are new, short, changed, or of another namespace")
    with client.measured():
        for prompt in client.prompts(share):
            client.ask("new", prompt, {"reason": "new", "from": 0, "tokens": _LENGTH})
        for _ in range(share):
            length = client.rng.randrange(1, _BLOCK + 1)
            client.ask("short", client.prompt(length), {"reason": "short", "tokens": length})
        for part, prompts in foreign.items():
            for prompt in prompts:
                expected: _Expected = {"reason": "namespace", "tier": "disk", "from": 0}
                differs = {"fields": differing(part)}
                client.ask(f"other {part}", prompt, {**expected, **differs})
    known = client.prompts(3 * share)
    client.seed(known)
    changed = [_changed(client, prompt) for prompt in known]
    with client.measured():
        for prompt, token in changed:
            at = token // _BLOCK * _BLOCK
            expected = {"reason": "diverged", "token": token, "from": at}
            client.ask("diverged", prompt, expected)
    asked = client.outcomes[-len(changed) :]
    for (prompt, token), outcome in zip(changed, asked, strict=True):
        text = client.text(prompt[token - 8 : token + 8])
        outcome.expected = {**outcome.expected, "text": text}
    for prompt in known[:share]:
        expected = {"reason": "not_asked", "cause": "prompt_logprobs"}
        client.ask("not asked", prompt, expected, prompt_logprobs=0)
    client.server.forget_device()
    for _ in range(share // 2):
        _race(client)


def _changed(client: _Client, prompt: _Prompt) -> tuple[_Prompt, int]:
    """A prompt with another token, and where."""
    token = client.rng.randrange(8, len(prompt) - 6)
    changed = [*prompt]
    changed[token] = _PAD + (changed[token] - _PAD + 1) % (_LAST - _PAD)
    return changed, token


def _race(client: _Client) -> None:
    """Two equal prompts of two chunks come while the engine is paused, so that they begin in one
    step: the first is new; the other hits the chunk that the first computes in that step, and what
    is behind it is being computed."""
    prompt = client.prompt(2 * _CHUNK)
    with ThreadPoolExecutor(2) as threads:
        with client.paused():
            asked = [threads.submit(client.missed, prompt) for _ in range(2)]
            _wait(lambda: client.live() == 2)
        told = [one.result() or {} for one in asked]
    first, second = sorted(told, key=lambda one: one.get("from", len(prompt)))
    client.outcomes.append(_Outcome("new", {"reason": "new", "from": 0}, first))
    expected = {"reason": "race", "from": _CHUNK, "cause": "being computed"}
    client.outcomes.append(_Outcome("race", expected, second))


def _evicted(client: _Client, folder: Path, share: int) -> None:
    """Causes for which a block left the tiers, and damage."""

    def drop(query: Query) -> None:
        with ServiceAdmin(client.socket) as admin:
            admin.do(Drop(query, True))

    def expect(name: str, prompts: Sequence[_Prompt], salt: str | None, **more: object) -> None:
        with client.measured():
            for prompt in prompts:
                client.ask(name, prompt, {"reason": "evicted", "from": 0, **more}, salt)
        client.server.forget_device()

    progress("blocks that are dropped, expired, over a limit, or pushed out")
    prompts = client.prompts(share)
    client.seed(prompts, "dropped")
    drop(Query(tenants=(tenant_of("dropped"),)))
    expect("dropped", prompts, "dropped", cause="dropped")
    prompts = client.prompts(share)
    client.seed(prompts, "short-lived")
    query = Query(tenants=(tenant_of("short-lived"),))
    _wait(lambda: not client.listed(query))
    expect("expired", prompts, "short-lived", cause="expired")
    prompts = client.prompts(share)
    for start in range(0, share, 12):  # the limit holds no more, and refuses what is unwritten
        client.seed(prompts[start : start + 12], "limited")
    for _ in range(2):
        client.seed(client.prompts(12), "limited")
    expect("quota", prompts, "limited", cause="quota")
    prompts = client.prompts(share)
    client.seed(prompts, "pushed out")
    client.push_out("pushed out")
    expect("capacity of the disk", prompts, "pushed out", cause="capacity", tier="disk")
    prompts = client.on_disk(share)
    for slab in (folder / "disk").glob("slab-*.kv"):
        with slab.open("r+b") as file:
            for at in range(8192, slab.stat().st_size, 4096):
                file.seek(at + 99)
                file.write(b"\xff\x00\xff\x00")
    for prompt in prompts:
        expected = {"reason": "damaged", "tier": "disk", "cause": "corrupt", "from": 0}
        client.ask("damaged", prompt, expected, ON_DISK)


def _wait(true: Callable[[], bool]) -> None:
    """Raises EngineError after a while."""
    until = time.monotonic() + _SETTLE_S
    while not true():
        if time.monotonic() > until:
            raise EngineError(f"a state of the pool was not reached in {_SETTLE_S:.0f} s")
        time.sleep(0.01)


# ---- report ------------------------------------------------------------------------------------


def _report(outcomes: Sequence[_Outcome], seconds: Sequence[float]) -> Report:
    """``seconds``: as of ``_Client.costs``."""
    causes = Counter(one.cause for one in outcomes)
    right = Counter(one.cause for one in outcomes if one.is_right)
    reasons = Counter(str((one.told or {}).get("reason", "none")) for one in outcomes)
    explained, aside, first, requests = seconds
    wrong = [one for one in outcomes if not one.is_right]
    notes = [str(one) for one in wrong[:20]]
    overhead = explained / first if first else 0.0
    each_us, aside_us = (1e6 * one / max(1.0, requests) for one in (explained, aside))
    notes.append(
        f"explanations: {each_us:.0f} µs a request, {overhead:.2%} of the time to first token "
        f"(goal < {GOAL_OVERHEAD:.0%}); {aside_us:.0f} µs more while the workers computed"
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
        "aside_us": round(aside_us, 1),
    }
    columns = ("cause", "requests", "right", "share")
    return Report("misses", columns, rows, figures, tuple(notes))
