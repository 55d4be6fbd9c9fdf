"""What is compared: one server under one set of retrieval settings after another, or two servers.

An arm is a way of attending; ``dense`` is the first where there is one.
"""

from __future__ import annotations

import dataclasses
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvrecall.attention.settings import PREFIX, RetrievalSettings
from kvrecall.errors import ConfigError
from kvrecall.lab.bench.needle.endpoint import Endpoint
from kvrecall.lab.engines.child import server_environment
from kvrecall.lab.engines.server import Progress, ServerProcess

NEVER = 2**40
"""A boundary no sequence reaches."""

EXTENSION = "kvrecall.lab.engines.switching.SwitchExtension"
CONCURRENT = 8


@dataclass(frozen=True, slots=True)
class Arm:
    """``settings``: those of retrieval; None for dense attention, or if they are not known."""

    name: str
    retrieval: bool
    settings: RetrievalSettings | None = None

    @property
    def share(self) -> float | None:
        """Of the middle blocks chosen."""
        return self.settings.topk_share if self.settings else None

    @property
    def digest(self) -> str | None:
        """``bounds of 16``."""
        if self.settings is None:
            return None
        return f"{self.settings.digest} of {self.settings.tokens_a_digest}"


DENSE = Arm("dense", False)


class Arms(ABC):
    """The servers under comparison, started and ready."""

    arms: tuple[Arm, ...]

    @abstractmethod
    def turn_to(self, arm: Arm) -> Endpoint:
        """Where to ask for this arm. Requests of other arms must have been answered."""

    @abstractmethod
    def blocks_selected(self, arm: Arm) -> int | None:
        """Middle blocks chosen so far in the server behind this arm; None if it does not tell."""


class OneEngine(Arms):
    """A local model in one server whose settings are switched: every prompt is computed once."""

    def __init__(self, endpoint: Endpoint, variants: Sequence[RetrievalSettings]) -> None:
        self._endpoint = endpoint
        self._dense = dataclasses.replace(variants[0], dense_boundary=NEVER, offload_boundary=NEVER)
        self.arms = (DENSE, *_named(variants))

    def turn_to(self, arm: Arm) -> Endpoint:
        settings = arm.settings or self._dense
        self._endpoint.call("retrieval_use", settings=json.dumps(dataclasses.asdict(settings)))
        return self._endpoint

    def blocks_selected(self, arm: Arm) -> int | None:
        return self._endpoint.call("retrieval_activity")["blocks_selected"]


class Endpoints(Arms):
    """Servers of others: one, or a dense one and one with retrieval."""

    def __init__(self, measured: Endpoint, dense: Endpoint | None) -> None:
        self._measured = measured
        self._dense = dense
        for _ in range(2):  # counters appear with the first steps
            measured.tokens_of("Hello")
        acts = dense is not None or measured.activity() is not None
        arm = Arm("retrieval", True) if acts else DENSE
        self.arms = (DENSE, arm) if dense else (arm,)

    def turn_to(self, arm: Arm) -> Endpoint:
        if self._dense is not None and not arm.retrieval:
            return self._dense
        return self._measured

    def blocks_selected(self, arm: Arm) -> int | None:
        totals = self.turn_to(arm).activity()
        return None if totals is None else totals.get("blocks_selected", 0)


def _named(variants: Sequence[RetrievalSettings]) -> list[Arm]:
    """An arm each, named by its share, and by its digest where that differs too."""
    several = len({(one.digest, one.digest_tokens) for one in variants}) > 1
    arms = []
    for one in variants:
        name = f"retrieval {one.topk_share:g}"
        arms.append(Arm(f"{name}, {one.tokens_a_digest}" if several else name, True, one))
    return arms


def local_server(
    model: str, longest: int, settings: RetrievalSettings, log: Path, progress: Progress
) -> ServerProcess:
    """A server for sequences of up to ``longest`` tokens whose settings can be switched."""
    arguments = [model, "--no-pool", "--max-model-len", str(longest)]
    size = _cache_bytes(Path(model), longest)
    if size:
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


def longest_allowed(model: Path) -> int | None:
    """The model's ``max_position_embeddings``, None if its folder does not say."""
    return _config(model).get("max_position_embeddings")


def require_length(model: Path, longest: int) -> None:
    """Raises ConfigError if the model cannot read so much."""
    allowed = longest_allowed(model)
    if allowed is not None and longest > allowed:
        raise ConfigError(
            f"--lengths: {longest} tokens are more than {model} can read "
            f"(max_position_embeddings {allowed})"
        )


def _cache_bytes(model: Path, longest: int) -> int | None:
    """Bytes of KV for the longest prompt and as much again; None if the config does not say."""
    config = _config(model)
    heads = config.get("num_key_value_heads", config.get("num_attention_heads"))
    dim = config.get("head_dim")
    if dim is None and "hidden_size" in config and "num_attention_heads" in config:
        dim = config["hidden_size"] // config["num_attention_heads"]
    layers = config.get("num_hidden_layers")
    if not (heads and dim and layers):
        return None
    tokens = 2 * longest + CONCURRENT * 2048
    return max(256 << 20, tokens * layers * heads * dim * 2 * 2)


def _config(model: Path) -> Mapping[str, int]:
    path = model / "config.json"
    if not path.is_file():
        return {}
    config: dict[str, int] = json.loads(path.read_text())
    return config
