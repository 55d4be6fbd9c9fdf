"""A server that speaks OpenAI's protocol, and what it tells of its retrieval."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import httpx

from kvrecall.errors import EngineError
from kvrecall.lab.bench.needle.prompts import Request

TIMEOUT_S = 3600.0
_COUNTER = re.compile(r"^kvrecall_retrieval_(\w+?)(?:_total)?(?:\{[^}]*\})? (\S+)$", re.MULTILINE)


class Endpoint:
    """Asks one server. ``url`` with or without its ``/v1``; ``model`` None for its first one.

    Safe to use from several threads. Raises EngineError with the server's words.
    """

    def __init__(self, url: str, model: str | None = None, key: str | None = None) -> None:
        self.root = url.rstrip("/").removesuffix("/v1")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._client = httpx.Client(timeout=httpx.Timeout(TIMEOUT_S, connect=20), headers=headers)
        self.model = model or self._first_model()

    def __enter__(self) -> Endpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def ask(self, request: Request) -> str:
        """The text of the reply."""
        reply = self._post(f"/v1{request.path}", {"model": self.model, **request.body})
        choice = reply["choices"][0]
        return str(choice["message"]["content"] if "message" in choice else choice["text"])

    def tokens_of(self, text: str) -> int:
        """Tokens of a text, by having it read."""
        body = {"model": self.model, "prompt": text, "max_tokens": 1, "temperature": 0}
        reply = self._post("/v1/completions", body)
        return int(reply["usage"]["prompt_tokens"])

    def activity(self) -> Mapping[str, int] | None:
        """Totals of its retrieval attention from its metrics, None if they do not tell."""
        reply = self._client.get(f"{self.root}/metrics")
        found = _COUNTER.findall(reply.text) if reply.status_code == 200 else []
        totals: dict[str, int] = {}
        for name, value in found:
            if not name.endswith("_created"):
                totals[name] = totals.get(name, 0) + int(float(value))
        return totals or None

    def call(self, method: str, **arguments: str) -> Mapping[str, int]:
        """Calls a method of the server's workers by vLLM's development route; the first's reply."""
        body = {"method": method, "kwargs": arguments}
        reply = self._client.post(f"{self.root}/collective_rpc", json=body)
        if reply.status_code != 200:
            raise EngineError(f"{method}: HTTP {reply.status_code}: {reply.text[:500]}")
        return dict(reply.json()["results"][0])

    def _first_model(self) -> str:
        try:
            reply = self._client.get(f"{self.root}/v1/models")
        except httpx.HTTPError as error:
            raise EngineError(f"no answer from {self.root}/v1/models: {error}") from error
        models = reply.json().get("data") if reply.status_code == 200 else None
        if not models:
            raise EngineError(f"{self.root}/v1/models names no model: HTTP {reply.status_code}")
        return str(models[0]["id"])

    def _post(self, path: str, body: Mapping[str, object]) -> Any:
        try:
            reply = self._client.post(f"{self.root}{path}", json=body)
        except httpx.HTTPError as error:
            raise EngineError(f"no answer from {self.root}{path}: {error!r}") from error
        if reply.status_code != 200:
            raise EngineError(f"{self.root}{path}: HTTP {reply.status_code}: {reply.text[:500]}")
        return reply.json()
