"""From a checked config.json to the plan of a server: its fields in vLLM's and the pool's terms,
and the three planes with their addresses and certificates."""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvrecall.addresses import is_loopback
from kvrecall.config import RecallSettings
from kvrecall.engines.base import DEFAULT_MAX_N, Limits, Listener, ServeSpec
from kvrecall.errors import ConfigError
from kvrecall.jsonfile import Document, JsonPath, read_object
from kvrecall.pool.remote.mooncake import MooncakeSettings
from kvrecall.server.mindie.reader import dotted, problem, read_config
from kvrecall.server.mindie.schema import Effect, MindieConfig, effect_of, fields_of
from kvrecall.server.plan import (
    ENGINE_DEFAULTS,
    Plan,
    Plane,
    shared_listeners,
    vllm_options,
)
from kvrecall.server.tls import TlsFiles

_GIB = 1 << 30
_SERVER = ("ServerConfig",)
_MODEL: JsonPath = ("BackendConfig", "ModelDeployConfig", "ModelConfig", 0)
_POOL = ("BackendConfig", "kvPoolConfig")

_TLS_PREFIXES = {
    Plane.BUSINESS: ("tls",),
    Plane.MANAGEMENT: ("managementTls", "tls"),
    Plane.METRICS: ("metricsTls", "managementTls", "tls"),
}
"""By plane: the prefixes of its certificate fields, its own first, then those of its defaults."""

_NGRAM_TOKENS = 4
_NGRAM_LOOKUP = 4


@dataclass(frozen=True, slots=True)
class Beside:
    """What the command line sets beside a config.json, and takes precedence over it. None and empty
    values leave the file's.

    ``options`` and ``words`` go to vLLM, as those of a ServeSpec. ``recall``: settings of the pool,
    None for no pool; with ``whole_pool`` in place of all the file's. ``allow_plaintext``: a remote
    store may be used in the clear.
    """

    model: str = ""
    host: str = ""
    port: int = 0
    max_n: int = 0
    options: Mapping[str, object] = field(default_factory=dict)
    words: tuple[str, ...] = ()
    recall: Mapping[str, object] | None = field(default_factory=dict)
    whole_pool: bool = False
    allow_plaintext: bool = False


def plan_config(path: Path, beside: Beside = Beside()) -> Plan:
    """The plan for ``kvrecall serve --config``. Raises ConfigError; changes nothing."""
    config, document = read_config(path)
    return _Planner(config, document, path.parent, beside).plan()


class _Planner:
    """Plans one configuration; collects notes and warnings."""

    def __init__(
        self, config: MindieConfig, document: Document, folder: Path, beside: Beside
    ) -> None:
        self._document = document
        self._folder = folder
        self._beside = beside
        self._server = config.ServerConfig
        self._backend = config.BackendConfig
        self._deploy = config.BackendConfig.ModelDeployConfig
        self._model = self._deploy.ModelConfig[0]
        self._schedule = config.BackendConfig.ScheduleConfig
        self._plugins = self._model.plugin_params
        self._config = config
        self._weights = beside.model or str(self._resolved(self._model.modelWeightPath))
        self._host = beside.host or self._server.ipAddress
        self._port = beside.port or self._server.port
        self._told = [*beside.options.items(), *vllm_options(beside.words)]  # to vLLM
        self._notes: list[str] = []
        self._warnings: list[str] = []
        self._wins: list[str] = []

    def plan(self) -> Plan:
        self._report()
        options = {
            **ENGINE_DEFAULTS,
            **self._model_options(),
            **self._parallel_options(),
            **self._schedule_options(),
            **self._plugin_options(),
            **self._lora_options(),
        }
        recall = self._recall()
        self._tell_wins(options)
        server = self._server
        listeners, homes = self._planes()
        spec = ServeSpec(
            model=self._weights,
            host=self._host,
            port=self._port,
            options={**options, **self._beside.options},
            extra_args=self._beside.words,
            recall=recall,
            limits=self._limits(),
            tls=self._tls_of(Plane.BUSINESS),
            listeners=listeners,
        )
        return Plan(
            spec,
            homes=homes,
            max_body_bytes=server.maxRequestLength << 20,
            max_links=server.maxLinkNum,
            notes=tuple(self._notes),
            warnings=tuple(self._warnings),
        )

    def _report(self) -> None:
        """Adds notes and warnings about given fields without effect."""
        by_reason: dict[str, list[str]] = {}
        in_clear = None if self._server.httpsEnabled else _SERVER
        for path, _, given, declared in fields_of(self._config):
            text, effect = declared.description or "", effect_of(declared)
            if given and effect is Effect.NONE:
                by_reason.setdefault(text, []).append(dotted(path))
            elif given and effect is Effect.RETIRED:
                self._warnings.append(f"{dotted(path)} is retired and ignored: {text}")
            elif given and path[:1] == in_clear and "tls" in str(path[-1]).lower():
                by_reason.setdefault("httpsEnabled is false", []).append(dotted(path))
        if by_reason:
            parts = [f"{', '.join(names)} ({why})" for why, names in by_reason.items()]
            self._notes.append("accepted without effect: " + "; ".join(parts))
        if self._backend.multiNodesInferEnabled and not self._joins_hosts():
            self._warnings.append(
                "BackendConfig.multiNodesInferEnabled: this server uses the devices of this host "
                "only; to join several, pass vLLM's own options on each, for example -- "
                "--data-parallel-rank 0 --data-parallel-address HOST --data-parallel-rpc-port 13345"
            )
        if "templateType" in self._schedule.model_fields_set and not self._is_mixed:
            self._notes.append(
                "templateType Standard: vLLM prefills long prompts in chunks in this mode, too; -- "
                "--no-enable-chunked-prefill disables that"
            )

    def _joins_hosts(self) -> bool:
        """Whether vLLM's options name other hosts."""
        return any(x == "nnodes" or x.startswith("data-parallel-") for x, _ in self._told)

    def _tell_wins(self, options: Mapping[str, object]) -> None:
        """Notes where the command line overrides the file, and its ``options``."""
        beside, server, size = self._beside, self._server, self._model.npuMemSize
        fields = (
            ("MODEL", beside.model, self._model.modelWeightPath),
            ("--host", beside.host, server.ipAddress),
            ("--port", beside.port, server.port),
            ("--max-n", beside.max_n, self._schedule.maxN),
        )
        wins = [f"{name} {new} ({_was(old)})" for name, new, old in fields if new]
        for name, value in self._told:
            old = options.get(name.removeprefix("no-"))
            wins.append(f"--{name}{f' {value}' if value else ''} ({_was(old)})")
            if name == "gpu-memory-utilization" and size != -1:
                self._warnings.append(
                    f"--{name} is without effect: npuMemSize {size:g} is the size of the device "
                    "cache; set it to -1"
                )
        if wins := [*wins, *self._wins]:
            self._notes.append(f"the command line overrides the file: {', '.join(wins)}")

    def _limits(self) -> Limits:
        deploy, schedule = self._deploy, self._schedule
        most = min(deploy.maxInputTokenLen, deploy.maxSeqLen - 1)
        if "max-model-len" in dict(self._told):
            most = deploy.maxInputTokenLen  # vLLM refuses prompts longer than its own bound
        if most < deploy.maxInputTokenLen:
            self._notes.append(
                f"maxInputTokenLen {deploy.maxInputTokenLen} is lowered to {most}, maxSeqLen - 1"
            )
        cut_on_the_right = deploy.truncation is True or deploy.truncation == -1
        return Limits(
            token_timeout_s=self._server.tokenTimeout,
            total_timeout_s=self._server.e2eTimeout,
            max_input_tokens=most,
            truncation="right" if cut_on_the_right else "left" if deploy.truncation else "error",
            max_new_tokens=schedule.maxIterTimes,
            max_n=self._beside.max_n or schedule.maxN or min(DEFAULT_MAX_N, schedule.maxBatchSize),
        )

    # Engine

    def _model_options(self) -> dict[str, object]:
        model = self._model
        if not (self._beside.model or Path(self._weights).is_dir()):
            path = (*_MODEL, "modelWeightPath")
            raise self._wrong(path, f"is {self._weights!r}; there is no such folder")
        automatic = model.npuMemSize == -1
        return {
            "served-model-name": model.modelName,
            "max-model-len": self._deploy.maxSeqLen,
            "trust-remote-code": True if model.trustRemoteCode else None,
            "kv-cache-memory-bytes": None if automatic else int(model.npuMemSize * _GIB),
        }

    def _parallel_options(self) -> dict[str, object]:
        model = self._model
        pp, dp = max(model.pp, 1), max(model.dp, 1)
        tp = model.tp if model.tp > 0 else max(model.worldSize // (pp * dp), 1)
        devices = tp * pp * dp
        if devices != model.worldSize:
            product = f"tp x pp x dp is {tp} x {pp} x {dp} = {devices}"
            if not self._backend.multiNodesInferEnabled:
                raise self._wrong((*_MODEL, "worldSize"), f"is {model.worldSize}, but {product}")
            self._notes.append(f"worldSize is {model.worldSize} on this host; in all {product}")
        if (model.moe_ep or 0) > 1:
            self._notes.append(
                f"moe_ep {model.moe_ep}: expert parallelism is on; vLLM spreads the experts over "
                f"all tp x dp = {tp * dp} devices and has no other size"
            )
        return {
            "tensor-parallel-size": tp if tp > 1 else None,
            "pipeline-parallel-size": pp if pp > 1 else None,
            "data-parallel-size": dp if dp > 1 else None,
            "enable-expert-parallel": True if (model.moe_ep or 0) > 1 else None,
        }

    def _schedule_options(self) -> dict[str, object]:
        schedule = self._schedule
        batch = max(schedule.maxPrefillTokens, schedule.maxBatchSize)
        if batch > schedule.maxPrefillTokens:
            self._notes.append(
                f"maxPrefillTokens {schedule.maxPrefillTokens} is raised to maxBatchSize {batch}: "
                "a step must have room for a token of each sequence"
            )
        return {
            "block-size": schedule.cacheBlockSize,
            "max-num-seqs": schedule.maxBatchSize,
            "max-num-batched-tokens": batch,
            "enable-chunked-prefill": True if self._is_mixed else None,
            "override-generation-config": {"max_new_tokens": schedule.maxIterTimes},
        }

    @property
    def _is_mixed(self) -> bool:
        return self._schedule.templateType == "Mix" or "splitfuse" in self._plugins.kinds

    def _plugin_options(self) -> dict[str, object]:
        kinds = self._plugins.kinds
        if unused := self._plugins.unused():
            self._notes.append(f"plugin_params: without effect: {', '.join(unused)}")
        options: dict[str, object] = {"enable-prefix-caching": "prefix_cache" in kinds}
        wanted = self._plugins.num_speculative_tokens or self._plugins.decoding_length
        if "mtp" in kinds:
            self._check_mtp()
            options["speculative-config"] = {
                "method": "mtp",
                "num_speculative_tokens": wanted or 1,
            }
        elif kinds & {"la", "memory_decoding"}:
            options["speculative-config"] = {
                "method": "ngram",
                "num_speculative_tokens": wanted or _NGRAM_TOKENS,
                "prompt_lookup_max": _NGRAM_LOOKUP,
                "prompt_lookup_min": 1,
            }
            name = min(kinds & {"la", "memory_decoding"})
            self._notes.append(f"plugin_type {name} is served by vLLM's n-gram speculation")
        return options

    def _check_mtp(self) -> None:
        """Raises ConfigError for mtp with a model that has no prediction layers."""
        path = Path(self._weights) / "config.json"
        if not path.is_file():
            return  # the check of the model folder reports it
        try:
            described = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, OSError):
            return
        keys = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "mtp_num_layers")
        if not any(described.get(key) for key in keys):
            raise self._wrong(
                (*_MODEL, "plugin_params"),
                "asks for mtp, but the model has no prediction layers (its config.json has no "
                f"{keys[0]}); remove mtp",
            )

    def _lora_options(self) -> dict[str, object]:
        modules = [
            json.dumps({"name": module.name, "path": str(self._resolved(module.path))})
            for module in self._deploy.LoraModules or ()
        ]
        if not modules:
            bounds = {"maxLoraNum", "maxLoraRank"} & self._deploy.model_fields_set
            if bounds:
                names = ", ".join(sorted(bounds))
                self._notes.append(f"without effect, as there are no LoraModules: {names}")
            return {}
        return {
            "enable-lora": True,
            "lora-modules": modules,
            "max-loras": self._deploy.maxLoraNum,
            "max-lora-rank": self._deploy.maxLoraRank,
        }

    # Pool

    def _recall(self) -> Mapping[str, object] | None:
        """The pool's settings, the command line's before the file's; None for no pool."""
        over = self._beside.recall
        settings: Mapping[str, object] | None = None
        if over is None:
            self._wins.append("--no-pool")
        else:
            whole = self._beside.whole_pool or "backend" in over
            settings = None if whole else self._recall_of_file()
            if over and (settings is not None or over.keys() - {"async_write"}):
                settings = self._under(settings, over)
        self._tell_unused(settings)
        return settings

    def _under(
        self, settings: Mapping[str, object] | None, over: Mapping[str, object]
    ) -> Mapping[str, object]:
        """The settings of the file's pool, if it has one, overridden by the command line's."""
        self._require_prefix_cache()
        under = settings or {}
        self._wins += [f"pool {key} {x} ({_was(under.get(key))})" for key, x in over.items()]
        merged = {"async_write": self._backend.kvPoolConfig.asyncWrite, **under, **over}
        if merged.get("backend", "embedded") == "embedded":
            self._default_host_size(merged)
        RecallSettings.from_mapping(merged, "the command line's pool settings over the file's")
        return merged

    def _tell_unused(self, settings: Mapping[str, object] | None) -> None:
        """Adds notes on fields about the pool that have no effect."""
        pool, model = self._backend.kvPoolConfig, self._model
        if model.cpuMemSize > 0:
            message = f"cpuMemSize {model.cpuMemSize:g} is without effect: "
            size = int(model.cpuMemSize * _GIB)
            if settings is None:
                self._notes.append(f"{message}there is no pool (kvPoolConfig)")
            elif settings.get("backend", "embedded") != "embedded":
                self._notes.append(f"{message}the pool's memory is its service's (host_size there)")
            elif settings.get("host_size") != size:
                self._notes.append(f"{message}host_size is {settings.get('host_size')}")
        given = pool.model_fields_set
        if settings is None and ("asyncWrite" in given or self._beside.recall):
            self._notes.append("asynchronous writes are without effect: there is no pool")
        if "allowPlaintext" in given and pool.backend != "mooncake":
            self._notes.append("kvPoolConfig.allowPlaintext is without effect: it is mooncake's")

    def _require_prefix_cache(self) -> None:
        if "prefix_cache" not in self._plugins.kinds:
            raise self._wrong(
                (*_MODEL, "plugin_params"),
                "has no prefix_cache, on which the KV pool builds; set "
                r'"plugin_params": "{\"plugin_type\":\"prefix_cache\"}"',
            )

    def _recall_of_file(self) -> Mapping[str, object] | None:
        pool = self._backend.kvPoolConfig
        if not pool.backend:
            if pool.configPath:
                self._notes.append("kvPoolConfig.backend is empty: pooling is off")
            return None
        if not pool.configPath:
            self._warnings.append(
                "kvPoolConfig.backend is set but configPath is empty: pooling is off, as in MindIE"
            )
            return None
        self._require_prefix_cache()
        return self._pool_settings()

    def _pool_settings(self) -> Mapping[str, object]:
        pool = self._backend.kvPoolConfig
        file = self._resolved(pool.configPath)
        if not file.exists():
            path = (*_POOL, "configPath")
            raise self._wrong(path, f"is {str(file)!r}; there is no such file")
        if pool.backend == "mooncake":
            return self._mooncake_settings(file)
        settings, document = read_object(file, "pool settings")
        if "asyncWrite" in pool.model_fields_set:
            given = settings.setdefault("async_write", pool.asyncWrite)
            if given is not pool.asyncWrite:
                raise self._wrong(
                    (*_POOL, "asyncWrite"),
                    f"is {pool.asyncWrite}, but {document.where(('async_write',))} says {given!r}",
                )
        settings.setdefault("async_write", False)
        embedded = pool.backend == "embedded"
        if not embedded:
            settings.setdefault("backend", pool.backend)
        if (backend := settings.get("backend", "embedded")) != pool.backend:
            path = (*_POOL, "backend")
            where = document.where(("backend",))
            raise self._wrong(path, f"is {pool.backend!r}, but {where} says {backend!r}")
        if embedded:
            self._default_host_size(settings)
        RecallSettings.from_mapping(settings, lambda key: document.where((key,)))
        return settings

    def _default_host_size(self, settings: dict[str, object]) -> None:
        if self._model.cpuMemSize > 0 and "host_size" not in settings:
            settings["host_size"] = int(self._model.cpuMemSize * _GIB)
            self._notes.append(
                f"the pool's host_size is cpuMemSize, {self._model.cpuMemSize:g} GiB"
            )

    def _mooncake_settings(self, file: Path) -> Mapping[str, object]:
        """Settings of a pool in the engine, above the store that Mooncake's own file describes."""
        pool = self._backend.kvPoolConfig
        allowed = pool.allowPlaintext or self._beside.allow_plaintext
        options = {"config": str(file), "allow_plaintext": allowed}
        try:
            MooncakeSettings.of(options)
        except ConfigError as error:
            path = (*_POOL, "configPath")
            raise self._wrong(path, f"is {str(file)!r}; {error}") from error
        settings: dict[str, object] = {
            "remote": {"kind": "mooncake", **options},
            "async_write": pool.asyncWrite,
        }
        self._default_host_size(settings)
        return settings

    # The planes

    def _planes(self) -> tuple[tuple[Listener, ...], Mapping[Plane, str]]:
        """The listeners besides the business plane's, and the listener of each plane. Planes with
        the same address and port share one."""
        server = self._server
        business, port = self._host, self._port
        if _is_unspecified(business) and not server.allowAllZeroIpListening:
            raise self._wrong(
                (*_SERVER, "allowAllZeroIpListening"),
                f"is false, and --host is {business}, which listens on every network; set it to "
                "true, or give another --host",
            )
        other = server.managementIpAddress or business
        wanted = {
            Plane.MANAGEMENT: (other, server.managementPort),
            Plane.METRICS: (other, server.metricsPort),
        }
        for plane in [plane for plane, address in wanted.items() if address == (business, port)]:
            self._notes.append(f"the {plane} plane shares the business plane's")
            del wanted[plane]
        listeners, homes = shared_listeners(wanted, self._tls_of)
        self._check_apart((business, port), listeners)
        hosts = {business, *(listener.host for listener in listeners)}
        if not (server.httpsEnabled or all(map(is_loopback, hosts))):
            self._warnings.append(
                "httpsEnabled is false: requests travel in the clear, and serve wants an API key "
                "(--api-key-file)"
            )
        return listeners, homes

    def _check_apart(self, business: tuple[str, int], listeners: tuple[Listener, ...]) -> None:
        """Raises ConfigError for planes with one port and different addresses, one of them
        0.0.0.0."""
        taken = [business]
        for listener in listeners:
            for host, port in taken:
                whole = _is_unspecified(host) or _is_unspecified(listener.host)
                if port == listener.port and whole:
                    name = "managementPort" if listener.name.startswith("man") else "metricsPort"
                    raise self._wrong(
                        (*_SERVER, name),
                        f"is {port} on {listener.host}, which {host}:{port} already takes; "
                        "choose another port, or the same address for both",
                    )
            taken.append((listener.host, listener.port))

    def _tls_of(self, plane: Plane) -> TlsFiles | None:
        """The certificates of a plane; None without HTTPS."""
        if not self._server.httpsEnabled:
            return None
        prefixes = _TLS_PREFIXES[plane]
        own = (x for x in prefixes if self._tls_field(x, "Cert") or self._tls_field(x, "Pk"))
        prefix = next(own, "tls")
        for name in ("Cert", "Pk", "CaFile"):
            if not self._tls_field(prefix, name):
                when = "when httpsEnabled is true" if prefix == "tls" else f"beside {prefix}Cert"
                raise self._wrong((*_SERVER, f"{prefix}{name}"), f"is required {when}")
        files = self._tls_files(prefix)
        try:
            self._warnings += [w for w in files.check() if w not in self._warnings]
        except ConfigError as error:
            at = "httpsEnabled" if prefix == "tls" else f"{prefix}Cert"
            value = "is true" if prefix == "tls" else f"is {self._tls_field(prefix, 'Cert')!r}"
            raise self._wrong((*_SERVER, at), f"{value}; {error}") from error
        return files

    def _tls_files(self, prefix: str) -> TlsFiles:
        folder = self._tls_field(prefix, "CrlPath") or ""
        lists = [*(self._tls_field(prefix, "CrlFiles") or ()), self._tls_field(prefix, "Crl")]
        return TlsFiles(
            certificate=self._resolved(self._tls_field(prefix, "Cert")),
            key=self._resolved(self._tls_field(prefix, "Pk")),
            authorities=tuple(
                self._resolved(self._server.tlsCaPath, name)
                for name in self._tls_field(prefix, "CaFile")
            ),
            revoked=tuple(self._resolved(folder, name) for name in lists if name),
        )

    def _tls_field(self, prefix: str, name: str) -> Any:
        return getattr(self._server, f"{prefix}{name}", None)  # MindIE has no metricsTlsCrl

    def _wrong(self, path: JsonPath, message: str) -> ConfigError:
        return problem(self._document, path, message)

    def _resolved(self, *parts: str) -> Path:
        """A path of the file. A relative one is relative to the file's folder or, for MindIE's
        ``conf/config.json``, to the parent of ``conf``."""
        folder = self._folder.absolute()
        beside, around = folder.joinpath(*parts), folder.parent.joinpath(*parts)
        return around if folder.name == "conf" and not beside.exists() else beside


def _is_unspecified(host: str) -> bool:
    """Whether ``host``, an address or a name, is 0.0.0.0 or ::."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def _was(value: object) -> str:
    return "file: nothing" if value is None else f"file: {value}"
