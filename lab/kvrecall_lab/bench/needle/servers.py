"""The servers under test: a local one whose retrieval settings are switched, or other endpoints."""

from __future__ import annotations

import dataclasses
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from kvrecall.attention.settings import PREFIX, RETRIEVALKV, RetrievalSettings
from kvrecall.bench.report import progress
from kvrecall.errors import EngineError
from kvrecall.processes.child import server_environment
from kvrecall.processes.server import ServerProcess
from kvrecall_lab.bench.needle.dataset import Request
from kvrecall_lab.bench.needle.score import DENSE, Variant

NEVER = 2**40
"""A boundary no sequence reaches."""

EXTENSION = "kvrecall_lab.engines.switching.SwitchExtension"
CONCURRENT = 8
TIMEOUT_S = 3600.0
_COUNTER = re.compile(r"^kvrecall_retrieval_(\w+?)(?:_total)?(?:\{[^}]*\})? (\S+)$", re.MULTILINE)


class Endpoint:
    """A client of one server, by OpenAI's protocol. ``url``: with or without ``/v1``; ``model``:
    None for its first one.

    Safe to use from several threads. Raises EngineError with the server's message.
    """

    def __init__(self, url: str, model: str | None = None, key: str | None = None) -> None:
        self.root = url.rstrip("/").removesuffix("/v1")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._client = httpx.Client(timeout=httpx.Timeout(TIMEOUT_S, connect=20), headers=headers)
        if model is None:
            models = self._call("GET", "/v1/models").get("data")
            if not models:
                raise EngineError(f"{self.root}/v1/models names no model")
            model = str(models[0]["id"])
        self.model = model

    def __enter__(self) -> Endpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def ask(self, request: Request) -> str:
        """The text of the reply."""
        reply = self._call("POST", f"/v1{request.path}", {"model": self.model, **request.body})
        choice = reply["choices"][0]
        return str(choice["message"]["content"] if "message" in choice else choice["text"])

    def tokens_of(self, text: str) -> int:
        """Tokens of a text, counted by the server."""
        body = {"model": self.model, "prompt": text, "max_tokens": 1, "temperature": 0}
        return int(self._call("POST", "/v1/completions", body)["usage"]["prompt_tokens"])

    def activity(self) -> Mapping[str, int] | None:
        """Totals of its retrieval attention from its metrics, None without them."""
        reply = self._client.get(f"{self.root}/metrics")
        totals: dict[str, int] = {}
        for name, value in _COUNTER.findall(reply.text) if reply.status_code == 200 else []:
            if not name.endswith("_created"):
                totals[name] = totals.get(name, 0) + int(float(value))
        return totals or None

    def call_workers(self, method: str, **arguments: str) -> Mapping[str, int]:
        """Calls a method of the server's workers by vLLM's development route; the first's reply."""
        body = {"method": method, "kwargs": arguments}
        return dict(self._call("POST", "/collective_rpc", body)["results"][0])

    def _call(self, verb: str, path: str, body: Mapping[str, object] | None = None) -> Any:
        try:
            reply = self._client.request(verb, f"{self.root}{path}", json=body)
        except httpx.HTTPError as error:
            raise EngineError(f"no answer from {self.root}{path}: {error!r}") from error
        if reply.status_code != 200:
            raise EngineError(f"{self.root}{path}: HTTP {reply.status_code}: {reply.text[:500]}")
        return reply.json()


class Servers(ABC):
    """The servers under comparison, started and ready. ``dense``, if present, is the first
    variant."""

    variants: tuple[Variant, ...]

    @abstractmethod
    def turn_to(self, variant: Variant) -> Endpoint:
        """The endpoint of this variant. No request of another variant may be in flight."""

    @abstractmethod
    def blocks_selected(self, variant: Variant) -> int | None:
        """Middle blocks selected so far in the server of this variant; None if it does not report
        them."""


class SwitchedServer(Servers):
    """A local model in one server whose settings are switched: every prompt is computed once."""

    def __init__(self, endpoint: Endpoint, settings: Sequence[RetrievalSettings]) -> None:
        self._endpoint = endpoint
        self._dense = dataclasses.replace(settings[0], dense_boundary=NEVER, offload_boundary=NEVER)
        ours = [one for one in settings if one.mode != RETRIEVALKV]
        several = len({(one.digest, one.digest_tokens) for one in ours}) > 1
        retrieval = []
        for one in settings:
            mode = RETRIEVALKV if one.mode == RETRIEVALKV else "retrieval"
            digest = f", {one.tokens_a_digest}" if several and mode != RETRIEVALKV else ""
            retrieval.append(Variant(f"{mode} {one.topk_share:g}{digest}", True, one))
        self.variants = (DENSE, *retrieval)

    def turn_to(self, variant: Variant) -> Endpoint:
        settings = json.dumps(dataclasses.asdict(variant.settings or self._dense))
        self._endpoint.call_workers("retrieval_use", settings=settings)
        return self._endpoint

    def blocks_selected(self, variant: Variant) -> int | None:
        return self._endpoint.call_workers("retrieval_activity")["blocks_selected"]


class OtherServers(Servers):
    """Running servers: one, or a dense one and one with retrieval."""

    def __init__(self, measured: Endpoint, dense: Endpoint | None) -> None:
        self._measured = measured
        self._dense = dense
        for _ in range(2):  # counters appear with the first steps
            measured.tokens_of("Hello")
        acts = dense is not None or measured.activity() is not None
        variant = Variant("retrieval", True) if acts else DENSE
        self.variants = (DENSE, variant) if dense else (variant,)

    def turn_to(self, variant: Variant) -> Endpoint:
        if self._dense is not None and not variant.retrieval:
            return self._dense
        return self._measured

    def blocks_selected(self, variant: Variant) -> int | None:
        totals = self.turn_to(variant).activity()
        return None if totals is None else totals.get("blocks_selected", 0)


def local_server(model: str, longest: int, settings: RetrievalSettings, log: Path) -> ServerProcess:
    """A server for sequences of up to ``longest`` tokens whose settings can be switched."""
    arguments = [model, "--no-pool", "--max-model-len", str(longest)]
    config = model_config(Path(model))
    heads = config.get("num_key_value_heads", config.get("num_attention_heads"))
    dim = config.get("head_dim")
    if dim is None and "hidden_size" in config and "num_attention_heads" in config:
        dim = config["hidden_size"] // config["num_attention_heads"]
    layers = config.get("num_hidden_layers")
    if heads and dim and layers:  # twice the KV of the longest prompt
        tokens = 2 * longest + CONCURRENT * 2048
        size = max(256 << 20, tokens * layers * heads * dim * 2 * 2)
        arguments += ["--kv-cache-memory-bytes", str(size)]
    arguments += ["--", "--worker-extension-cls", EXTENSION, "--max-num-seqs", str(CONCURRENT)]
    kept = {k: v for k, v in server_environment().items() if not k.startswith(PREFIX)}
    environment = {
        **kept,
        "VLLM_PLUGINS": "retrieval,waits",
        f"{PREFIX}DENSE_BOUNDARY": str(settings.dense_boundary),
        f"{PREFIX}OFFLOAD_BOUNDARY": str(NEVER),
        f"{PREFIX}DENSE_LAYERS": str(settings.dense_layers),
        f"{PREFIX}DIGEST": settings.digest,
        f"{PREFIX}DIGEST_TOKENS": str(settings.tokens_a_digest),
    }
    return ServerProcess(arguments, log, progress, environment)


def model_config(model: Path) -> Mapping[str, int]:
    """The model's config.json, empty if its folder has none."""
    path = model / "config.json"
    if not path.is_file():
        return {}
    config: dict[str, int] = json.loads(path.read_text())
    return config
