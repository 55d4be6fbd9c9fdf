"""The server under test, whose retrieval settings are switched."""

from __future__ import annotations

import dataclasses
import json
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


class Endpoint:
    """A client of one server, by OpenAI's protocol.

    Safe to use from several threads. Raises EngineError with the server's message.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._client = httpx.Client(timeout=httpx.Timeout(TIMEOUT_S, connect=20))
        self._model = str(self._call("GET", "/v1/models")["data"][0]["id"])

    def __enter__(self) -> Endpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def ask(self, request: Request) -> str:
        """The text of the reply."""
        reply = self._call("POST", f"/v1{request.path}", {"model": self._model, **request.body})
        choice = reply["choices"][0]
        return str(choice["message"]["content"] if "message" in choice else choice["text"])

    def tokens_of(self, text: str) -> int:
        """Tokens of a text, counted by the server."""
        body = {"model": self._model, "prompt": text, "max_tokens": 1, "temperature": 0}
        return int(self._call("POST", "/v1/completions", body)["usage"]["prompt_tokens"])

    def call_workers(self, method: str, **arguments: str) -> Mapping[str, int]:
        """Calls a method of the server's workers by vLLM's development route; the first's reply."""
        body = {"method": method, "kwargs": arguments}
        return dict(self._call("POST", "/collective_rpc", body)["results"][0])

    def _call(self, verb: str, path: str, body: Mapping[str, object] | None = None) -> Any:
        try:
            reply = self._client.request(verb, f"{self._url}{path}", json=body)
        except httpx.HTTPError as error:
            raise EngineError(f"no answer from {self._url}{path}: {error!r}") from error
        if reply.status_code != 200:
            raise EngineError(f"{self._url}{path}: HTTP {reply.status_code}: {reply.text[:500]}")
        return reply.json()


class SwitchedServer:
    """A local model in one server whose settings are switched: every prompt is computed once. The
    first variant is dense."""

    def __init__(self, endpoint: Endpoint, settings: Sequence[RetrievalSettings]) -> None:
        self._endpoint = endpoint
        self._dense = dataclasses.replace(settings[0], dense_boundary=NEVER, offload_boundary=NEVER)
        ours = [one for one in settings if one.mode != RETRIEVALKV]
        several = len({(one.digest, one.digest_tokens) for one in ours}) > 1
        retrieval = []
        for one in settings:
            mode = RETRIEVALKV if one.mode == RETRIEVALKV else "retrieval"
            digest = f", {one.tokens_a_digest}" if several and mode != RETRIEVALKV else ""
            retrieval.append(Variant(f"{mode} {one.topk_share:g}{digest}", one))
        self.variants = (DENSE, *retrieval)

    def turn_to(self, variant: Variant) -> Endpoint:
        """The endpoint of this variant. No request of another variant may be in flight."""
        settings = json.dumps(dataclasses.asdict(variant.settings or self._dense))
        self._endpoint.call_workers("retrieval_use", settings=settings)
        return self._endpoint

    def blocks_selected(self) -> int:
        """Middle blocks selected so far."""
        return self._endpoint.call_workers("retrieval_activity")["blocks_selected"]


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
