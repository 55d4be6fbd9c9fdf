"""The plan of a server: everything decided before the first side effect."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from kvrecall.config import RecallSettings, parse_size
from kvrecall.engines.base import EngineInfo, Listener, ServeSpec, Tls
from kvrecall.errors import ConfigError
from kvrecall.nicety import nicety
from kvrecall.secret import words_shown
from kvrecall.server.access import check_reach

BLOCK_SIZE = 128
SHUTDOWN_TIMEOUT_S = 30
_GIB = 1 << 30

ENGINE_DEFAULTS: Mapping[str, object] = {
    "block-size": BLOCK_SIZE,
    "enable-prefix-caching": True,
    "prefix-caching-hash-algo": "sha256_cbor",  # reproducible: blocks outlive the process
    "enable-prompt-tokens-details": True,
    "scheduling-policy": "priority",  # requests without a priority are served in order of arrival
    "shutdown-timeout": SHUTDOWN_TIMEOUT_S,
}
"""Engine options that kvrecall sets unless others are given (names as in ServeSpec.options)."""


class Plane(StrEnum):
    """A group of routes that may have its own address."""

    BUSINESS = "business"  # the address of ServeSpec itself
    MANAGEMENT = "management"
    METRICS = "metrics"


@dataclass(frozen=True, slots=True)
class Plan:
    """A checked plan of a server. ``notes`` and ``warnings`` are logged once at the start.

    ``homes`` names the listener of the spec on which a plane is served; planes without one are
    on the business plane's address. ``allowed_hosts``: further names of this server in URLs.
    ``allow_unauthenticated``: other hosts may use it without a key. ``stop_by_get``: MindIE's GET
    /stopService stops it.
    """

    spec: ServeSpec
    homes: Mapping[Plane, str] = field(default_factory=dict)
    max_body_bytes: int = 40 << 20
    max_links: int = 1000
    allowed_hosts: tuple[str, ...] = ()
    allow_unauthenticated: bool = False
    stop_by_get: bool = False
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    def home(self, plane: Plane) -> str:
        """The name of the listener that serves ``plane``; "" is the business plane's."""
        return self.homes.get(plane, "")

    def address(self, plane: Plane) -> str:
        """``host:port`` of ``plane``."""
        places = {each.name: f"{each.host}:{each.port}" for each in self.spec.listeners}
        return places.get(self.home(plane), f"{self.spec.host}:{self.spec.port}")

    def listener(self, name: str) -> tuple[str, Tls | None]:
        """The address of a listener, and its certificates; "" is the business plane's."""
        for each in self.spec.listeners:
            if each.name == name:
                return each.host, each.tls
        return self.spec.host, self.spec.tls

    def check_reach(self, has_keys: bool) -> None:
        """Raises ConfigError for a listener that other hosts reach, without a key or certificates.
        One for metrics alone needs none."""
        for name in ("", *(each.name for each in self.spec.listeners)):
            host, tls = self.listener(name)
            protected = has_keys or tls is not None or name == Plane.METRICS
            planes = " and ".join(name.split("+")) or "business"
            setting = f"the address of the {planes} plane"
            check_reach(setting, host, protected, self.allow_unauthenticated)

    def longest_answer(self, info: EngineInfo) -> int:
        """In tokens."""
        return self.spec.limits.max_new_tokens or info.max_model_len

    def longest_prompt(self, info: EngineInfo) -> int:
        """In tokens."""
        return self.spec.limits.max_input_tokens or info.max_model_len - 1

    @property
    def device_gb(self) -> int:
        """npuMemSize: whole GB of device cache, -1 if the engine determines the size."""
        size = self.spec.options.get("kv-cache-memory-bytes")
        return -1 if size is None else parse_size(str(size), "kv-cache-memory-bytes") // _GIB

    @property
    def host_gb(self) -> int:
        """cpuMemSize: whole GB of the pool's host tier, 0 without a pool of the engine's own."""
        recall = self.spec.recall
        if recall is None or recall.get("backend", "embedded") != "embedded":
            return 0
        return RecallSettings.from_mapping(recall).pool.host_bytes // _GIB

    @nicety("a log line", "")
    def summary(self) -> str:
        """The effective configuration in one line."""
        options = {k: v for k, v in self.spec.options.items() if v is not None}
        engine = ", ".join(words_shown(f"{name}={value}" for name, value in options.items()))
        pool = ", ".join(f"{name}={value}" for name, value in (self.spec.recall or {}).items())
        off = "off" if self.spec.recall is None else pool or "defaults"
        extra = " ".join(["", *words_shown(self.spec.extra_args)])
        bounds = ", ".join(f"{name} {value}" for name, value in self.bounds().items())
        return f"model {self.spec.model}; pool: {off}; bounds: {bounds}; engine: {engine}{extra}"

    def bounds(self) -> dict[str, str]:
        """The limits of requests and connections, in words; unlimited ones are omitted."""
        limits = self.spec.limits
        bounds = {
            "body": f"{self.max_body_bytes / 2**20:g} MB",
            "requests": f"{self.max_links} at once on each address",
            "prompt": _tokens(limits.max_input_tokens),
            "longer prompts": f"cut ({limits.truncation})" if limits.truncation != "error" else "",
            "answer": _tokens(limits.max_new_tokens),
            "sequences": f"{limits.max_n} a request",
            "next token": f"within {limits.token_timeout_s:g} s" if limits.token_timeout_s else "",
            "request": f"within {limits.total_timeout_s:g} s" if limits.total_timeout_s else "",
        }
        return {name: text for name, text in bounds.items() if text}


def shared_listeners(
    wanted: Mapping[Plane, tuple[str, int]], tls_of: Callable[[Plane], Tls | None]
) -> tuple[tuple[Listener, ...], Mapping[Plane, str]]:
    """A listener for each address, and the name of each plane's. Planes with the same address share
    one."""
    sharing: dict[tuple[str, int], list[Plane]] = {}
    for plane, address in wanted.items():
        sharing.setdefault(address, []).append(plane)
    listeners = tuple(
        Listener("+".join(planes), *address, tls_of(planes[0]))
        for address, planes in sharing.items()
    )
    return listeners, {plane: "+".join(all_) for all_ in sharing.values() for plane in all_}


def allowing_plaintext(recall: Mapping[str, object] | None) -> Mapping[str, object]:
    """The settings with plaintext traffic to the remote store allowed. Raises ConfigError if there
    is none."""
    remote = None if recall is None else recall.get("remote")
    if recall is None or not isinstance(remote, Mapping):
        of_service = "set allow_plaintext true in the remote settings of a pool service"
        why = "--allow-plaintext: this server's pool has no remote store; leave the option out"
        raise ConfigError(f"{why}, or {of_service}")
    return {**recall, "remote": {**remote, "allow_plaintext": True}}


def _tokens(most: int) -> str:
    return f"at most {most} tokens" if most else ""


_SHORT = {
    "tp": "tensor-parallel-size",
    "pp": "pipeline-parallel-size",
    "dp": "data-parallel-size",
    "dcp": "decode-context-parallel-size",
    "pcp": "prefill-context-parallel-size",
}


def vllm_options(words: Sequence[str]) -> list[tuple[str, str]]:
    """vLLM's options among command-line words, by their long names without dashes, with their
    values."""
    named: list[tuple[str, str]] = []
    for word in words:
        text = word.lstrip("-")
        if word != text and not text[:1].isdigit():
            name, _, value = text.partition("=")
            name = name.replace("_", "-")
            named.append((_SHORT.get(name, name), value))
        elif named:
            name, value = named.pop()
            named.append((name, f"{value} {word}".strip()))
    return named
