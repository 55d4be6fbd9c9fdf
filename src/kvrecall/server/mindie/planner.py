"""From a checked config.json to the plan of a server: its fields in vLLM's and the pool's terms,
and the three planes with their addresses and certificates."""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from kvrecall.config import RecallSettings
from kvrecall.engines.base import DEFAULT_MAX_N, Limits, Listener, ServeSpec
from kvrecall.errors import ConfigError
from kvrecall.jsonfile import Document, JsonPath, read_object
from kvrecall.pool.remote.mooncake import MooncakeSettings
from kvrecall.server.mindie.reader import dotted, problem, read_config
from kvrecall.server.mindie.schema import (
    Effect,
    MindieConfig,
    ModelSection,
    Plugins,
    effect_of,
    fields_of,
)
from kvrecall.server.plan import ENGINE_DEFAULTS, Plan, Plane
from kvrecall.server.tls import TlsFiles

_GIB = 1 << 30
_SERVER = ("ServerConfig",)
_BACKEND = ("BackendConfig",)
_DEPLOY = (*_BACKEND, "ModelDeployConfig")
_MODEL: JsonPath = (*_DEPLOY, "ModelConfig", 0)
_SCHEDULE = (*_BACKEND, "ScheduleConfig")
_POOL = (*_BACKEND, "kvPoolConfig")

_BACKENDS = ("embedded", "service", "mooncake")
_OTHER_BACKENDS = ("memcache", "yuanrong")
_ALLOWED_BACKENDS = "'' (no pool), 'embedded', 'service', 'mooncake'"
_TLS_PREFIXES = {
    Plane.BUSINESS: "tls",
    Plane.MANAGEMENT: "managementTls",
    Plane.METRICS: "metricsTls",
}
_TLS_LENDERS = {Plane.MANAGEMENT: Plane.BUSINESS, Plane.METRICS: Plane.MANAGEMENT}
"""Whose certificates a plane uses that has none of its own."""
_Planes = tuple[str, TlsFiles | None, tuple[Listener, ...], Mapping[Plane, str]]

_NGRAM_TOKENS = 4
_NGRAM_LOOKUP = 4


def plan_config(path: Path) -> Plan:
    """The plan for ``kvrecall serve --config``. Raises ConfigError; changes nothing."""
    config, document = read_config(path)
    return _Planner(config, document, path.parent).plan()


class _Planner:
    """Works through one configuration; notes and warnings gather on the way."""

    def __init__(self, config: MindieConfig, document: Document, folder: Path) -> None:
        self._document = document
        self._folder = folder
        self._server = config.ServerConfig
        self._backend = config.BackendConfig
        self._deploy = config.BackendConfig.ModelDeployConfig
        self._model: ModelSection = self._deploy.ModelConfig[0]
        self._schedule = config.BackendConfig.ScheduleConfig
        self._plugins = Plugins.of(self._model.plugin_params)
        self._config = config
        self._notes: list[str] = []
        self._warnings: list[str] = []

    def plan(self) -> Plan:
        self._refuse_unavailable()
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
        server = self._server
        host, tls, listeners, homes = self._planes()
        spec = ServeSpec(
            model=str(self._resolved(self._model.modelWeightPath)),
            host=host,
            port=server.port,
            options=options,
            recall=recall,
            limits=self._limits(),
            tls=tls,
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

    # What is refused, what is only reported

    def _refuse_unavailable(self) -> None:
        checks: tuple[tuple[JsonPath, object, tuple[object, ...]], ...] = (
            ((*_SERVER, "inferMode"), self._server.inferMode, ("standard",)),
            ((*_SERVER, "fullTextEnabled"), self._server.fullTextEnabled, (False,)),
            ((*_BACKEND, "modelInstanceNumber"), self._backend.modelInstanceNumber, (1,)),
            ((*_MODEL, "modelInstanceType"), self._model.modelInstanceType, ("Standard", None)),
            ((*_MODEL, "sp"), self._model.sp, (1, -1, 0, None)),
            ((*_MODEL, "cp"), self._model.cp, (1, -1, 0, None)),
        )
        for path, value, allowed in checks:
            if value not in allowed:
                raise self._wrong(
                    path,
                    f"is {value!r}; not available in this version, allowed: {allowed[0]!r}",
                )
        if len(self._deploy.ModelConfig) > 1:
            raise self._wrong(
                (*_DEPLOY, "ModelConfig", 1),
                "is a second model; one server serves one model",
            )

    def _report(self) -> None:
        by_reason: dict[str, list[str]] = {}
        for path, _, given, field in fields_of(self._config):
            text = field.description or ""
            if not given:
                continue
            if effect_of(field) is Effect.NONE:
                by_reason.setdefault(text, []).append(dotted(path))
            elif effect_of(field) is Effect.RETIRED:
                self._warnings.append(f"{dotted(path)} is retired and ignored: {text}")
        if by_reason:
            parts = [f"{', '.join(names)} ({why})" for why, names in by_reason.items()]
            self._notes.append("accepted without effect: " + "; ".join(parts))
        if self._backend.multiNodesInferEnabled:
            self._warnings.append(
                "BackendConfig.multiNodesInferEnabled: this server uses the devices of this host; "
                "several hosts are joined with vLLM's own options"
            )

    # Server

    def _limits(self) -> Limits:
        most = min(self._deploy.maxInputTokenLen, self._deploy.maxSeqLen - 1)
        if most < self._deploy.maxInputTokenLen:
            self._notes.append(
                f"maxInputTokenLen {self._deploy.maxInputTokenLen} is lowered to {most}, "
                "maxSeqLen - 1"
            )
        if most < 1:
            raise self._wrong((*_DEPLOY, "maxSeqLen"), "is 1; allowed: 2 or more")
        return Limits(
            token_timeout_s=self._server.tokenTimeout,
            total_timeout_s=self._server.e2eTimeout,
            max_input_tokens=most,
            truncation=_truncation(self._deploy.truncation),
            max_new_tokens=self._schedule.maxIterTimes,
            max_n=self._most_sequences(),
        )

    def _most_sequences(self) -> int:
        most, batch = self._schedule.maxN, self._schedule.maxBatchSize
        if most is not None and most > batch:
            raise self._wrong(
                (*_SCHEDULE, "maxN"),
                f"is {most}; allowed: at most maxBatchSize, which is {batch}",
            )
        return min(DEFAULT_MAX_N, batch) if most is None else most

    # Engine

    def _model_options(self) -> dict[str, object]:
        model = self._model
        folder = self._resolved(model.modelWeightPath)
        if not folder.is_dir():
            path = (*_MODEL, "modelWeightPath")
            raise self._wrong(path, f"is {str(folder)!r}; there is no such folder")
        if model.npuMemSize != -1 and model.npuMemSize <= 0:
            raise self._wrong(
                (*_MODEL, "npuMemSize"),
                f"is {model.npuMemSize}; allowed: -1 (automatic) or more than 0",
            )
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
        if tp * pp * dp != model.worldSize and not self._backend.multiNodesInferEnabled:
            raise self._wrong(
                (*_MODEL, "worldSize"),
                f"is {model.worldSize}, but tp x pp x dp is {tp} x {pp} x {dp} = {tp * pp * dp}",
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
        mixed = schedule.templateType == "Mix" or "splitfuse" in self._plugins.kinds
        return {
            "block-size": schedule.cacheBlockSize,
            "max-num-seqs": schedule.maxBatchSize,
            "max-num-batched-tokens": batch,
            "enable-chunked-prefill": True if mixed else None,
            "override-generation-config": {"max_new_tokens": schedule.maxIterTimes},
        }

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
        """A model without prediction layers cannot speculate with them."""
        path = self._resolved(self._model.modelWeightPath) / "config.json"
        if not path.is_file():
            return  # the check of the model folder says so
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
        modules = self._deploy.LoraModules
        if not modules:
            return {}
        return {
            "enable-lora": True,
            "lora-modules": [
                json.dumps({"name": module.name, "path": str(self._resolved(module.path))})
                for module in modules
            ],
            "max-loras": self._deploy.maxLoraNum,
            "max-lora-rank": self._deploy.maxLoraRank,
        }

    # Pool

    def _recall(self) -> Mapping[str, object] | None:
        pool = self._backend.kvPoolConfig
        if not pool.backend:
            if pool.configPath:
                self._notes.append("kvPoolConfig.backend is empty: pooling is off")
            return None
        path = (*_POOL, "backend")
        if pool.backend in _OTHER_BACKENDS:
            raise self._wrong(
                path,
                f"is {pool.backend!r}, which is not available in this version; allowed: "
                + _ALLOWED_BACKENDS,
            )
        if pool.backend not in _BACKENDS:
            allowed = f"is {pool.backend!r}; allowed: {_ALLOWED_BACKENDS}"
            raise self._wrong(path, allowed)
        if not pool.configPath:
            self._warnings.append(
                "kvPoolConfig.backend is set but configPath is empty: pooling is off, as in MindIE"
            )
            return None
        if "prefix_cache" not in self._plugins.kinds:
            raise self._wrong(
                (*_MODEL, "plugin_params") if self._model.plugin_params else _MODEL,
                "has no prefix_cache, on which the KV pool builds; set "
                r'"plugin_params": "{\"plugin_type\":\"prefix_cache\"}"',
            )
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
        if (told := settings.get("backend", "embedded")) != pool.backend:
            path = (*_POOL, "backend")
            where = document.where(("backend",))
            raise self._wrong(path, f"is {pool.backend!r}, but {where} says {told!r}")
        if embedded:
            self._default_host_size(settings)
        RecallSettings.from_mapping(settings, document.where_key)
        return settings

    def _default_host_size(self, settings: dict[str, object]) -> None:
        if self._model.cpuMemSize > 0 and "host_size" not in settings:
            settings["host_size"] = int(self._model.cpuMemSize * _GIB)
            self._notes.append(f"the pool's host_size is cpuMemSize, {self._model.cpuMemSize} GiB")

    def _mooncake_settings(self, file: Path) -> Mapping[str, object]:
        """A pool in the engine, with the store that Mooncake's own file describes below it."""
        pool = self._backend.kvPoolConfig
        options = {"config": str(file), "allow_plaintext": pool.allowPlaintext}
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

    def _planes(self) -> _Planes:
        """The business plane's address and TLS, the further listeners, and which plane is served
        where. Planes with the same address and port share a listener."""
        server = self._server
        host = self._address("ipAddress")
        own = server.managementIpAddress is not None
        other = self._address("managementIpAddress") if own else host
        wanted = {
            Plane.MANAGEMENT: (other, server.managementPort),
            Plane.METRICS: (other, server.metricsPort),
        }
        sharing: dict[tuple[str, int], list[Plane]] = {}
        for plane, address in wanted.items():
            if address == (host, server.port):
                continue
            sharing.setdefault(address, []).append(plane)
        self._warn_in_the_clear({host, *(address for address, _ in sharing)})
        tls = self._tls_of(Plane.BUSINESS)
        listeners = tuple(
            Listener("+".join(planes), *address, self._tls_of(planes[0]))
            for address, planes in sharing.items()
        )
        self._check_apart((host, server.port), listeners)
        homes = {plane: "+".join(planes) for planes in sharing.values() for plane in planes}
        for plane in sorted(wanted.keys() - homes):
            self._notes.append(f"the {plane} plane shares the business plane's")
        return host, tls, listeners, homes

    def _address(self, name: str) -> str:
        text: str = getattr(self._server, name)
        path = (*_SERVER, name)
        try:
            address = ipaddress.ip_address(text)
        except ValueError:
            said = f"is {text!r}; it must be an IPv4 or IPv6 address"
            raise self._wrong(path, said) from None
        if address.is_unspecified and not self._server.allowAllZeroIpListening:
            raise self._wrong(
                path,
                f"is {text}, which listens on every network; allowed only with "
                "ServerConfig.allowAllZeroIpListening true",
            )
        return text

    def _check_apart(self, business: tuple[str, int], listeners: tuple[Listener, ...]) -> None:
        """Planes on one port need one address: 0.0.0.0 takes the port of all others too."""
        taken = [business]
        for listener in listeners:
            for host, port in taken:
                whole = any(ipaddress.ip_address(h).is_unspecified for h in (host, listener.host))
                if port == listener.port and whole:
                    name = "managementPort" if listener.name.startswith("man") else "metricsPort"
                    raise self._wrong(
                        (*_SERVER, name),
                        f"is {port} on {listener.host}, which {host}:{port} already takes; "
                        "choose another port, or the same address for both",
                    )
            taken.append((listener.host, listener.port))

    def _warn_in_the_clear(self, hosts: set[str]) -> None:
        if self._server.httpsEnabled:
            return
        if not all(ipaddress.ip_address(host).is_loopback for host in hosts):
            self._warnings.append("httpsEnabled is false: requests travel in the clear")

    def _tls_of(self, plane: Plane) -> TlsFiles | None:
        """The certificates of a plane; None if nothing is encrypted."""
        if not self._server.httpsEnabled:
            return None
        prefix = self._tls_prefix(plane)
        for name in ("Cert", "Pk", "CaFile"):
            if not self._tls_field(prefix, name):
                said = "is required when httpsEnabled is true"
                if prefix != "tls":
                    said = f"is required beside {prefix}Cert"
                raise self._wrong((*_SERVER, f"{prefix}{name}"), said)
        files = self._tls_files(prefix)
        try:
            self._warnings += [w for w in files.check() if w not in self._warnings]
        except ConfigError as error:
            at = "httpsEnabled" if prefix == "tls" else f"{prefix}Cert"
            said = "is true" if prefix == "tls" else f"is {self._tls_field(prefix, 'Cert')!r}"
            raise self._wrong((*_SERVER, at), f"{said}; {error}") from error
        return files

    def _tls_prefix(self, plane: Plane) -> str:
        """The prefix of the fields that hold the certificates for ``plane``."""
        prefix = _TLS_PREFIXES[plane]
        own = any(self._tls_field(prefix, name) for name in ("Cert", "Pk"))
        return prefix if own or plane not in _TLS_LENDERS else self._tls_prefix(_TLS_LENDERS[plane])

    def _tls_field(self, prefix: str, name: str) -> object:
        return getattr(self._server, f"{prefix}{name}", None)

    def _tls_files(self, prefix: str) -> TlsFiles:
        server = self._server
        crl = self._tls_field(prefix, "Crl")
        revoked = [*_names(self._tls_field(prefix, "CrlFiles")), *([str(crl)] if crl else [])]
        folder = str(self._tls_field(prefix, "CrlPath") or "")
        return TlsFiles(
            certificate=self._resolved(str(self._tls_field(prefix, "Cert"))),
            key=self._resolved(str(self._tls_field(prefix, "Pk"))),
            authorities=tuple(
                self._resolved(server.tlsCaPath, name)
                for name in _names(self._tls_field(prefix, "CaFile"))
            ),
            revoked=tuple(self._resolved(folder, name) for name in revoked),
        )

    def _wrong(self, path: JsonPath, message: str) -> ConfigError:
        return problem(self._document, path, message)

    def _resolved(self, *parts: str) -> Path:
        """A path of the file; relative ones lie beside the file."""
        return self._folder.joinpath(*parts).absolute()


def _truncation(value: bool | int) -> Literal["error", "left", "right"]:
    if value is True or value == -1:
        return "right"
    return "left" if value == 1 else "error"


def _names(value: object) -> list[str]:
    return [str(name) for name in value] if isinstance(value, list) else []
