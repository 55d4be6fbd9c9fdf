"""From a checked config.json to the plan of a server: its fields in vLLM's and the pool's terms,
and the three planes with their addresses and certificates."""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvrecall.config import RecallSettings, is_loopback
from kvrecall.engines.base import DEFAULT_MAX_N, Limits, Listener, ServeSpec
from kvrecall.errors import ConfigError
from kvrecall.jsonfile import Document, JsonPath, read_object
from kvrecall.pool.remote.mooncake.settings import MooncakeSettings
from kvrecall.server.access import TlsFiles
from kvrecall.server.mindie.reader import dotted, problem, read_config
from kvrecall.server.mindie.schema import Effect, MindieConfig, effect_of, fields_of
from kvrecall.server.plan import (
    ENGINE_DEFAULTS,
    Plan,
    Plane,
    allowing_plaintext,
    shared_listeners,
    vllm_options,
)

NOTHING = ServeSpec("", "", 0, {}, recall={}, limits=Limits(max_n=0))
"""A command line without options."""

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
_MTP_LAYERS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "mtp_num_layers")


def plan_config(
    path: Path, over: ServeSpec = NOTHING, whole_pool: bool = False, plaintext: bool = False
) -> Plan:
    """The plan for ``kvrecall serve --config``. Raises ConfigError; changes nothing.

    ``over``: what the command line sets, and takes precedence over the file; values as in
    ``NOTHING`` leave the file's. ``whole_pool``: its pool is in place of all the file's.
    ``plaintext``: a remote store may be used in the clear.
    """
    config, document = read_config(path)
    return _Planner(config, document, path.parent, over).plan(whole_pool, plaintext)


class _Planner:
    """Plans one configuration; collects notes and warnings."""

    def __init__(
        self, config: MindieConfig, document: Document, folder: Path, over: ServeSpec
    ) -> None:
        self._document = document
        self._folder = folder
        self._over = over
        self._server = config.ServerConfig
        self._backend = config.BackendConfig
        self._deploy = config.BackendConfig.ModelDeployConfig
        self._model = self._deploy.ModelConfig[0]
        self._schedule = config.BackendConfig.ScheduleConfig
        self._plugins = self._model.plugin_params
        self._config = config
        self._weights = over.model or str(self._resolved(self._model.modelWeightPath))
        self._host = over.host or self._server.ipAddress
        self._port = over.port or self._server.port
        self._told = [*over.options.items(), *vllm_options(over.extra_args)]  # to vLLM
        self._notes: list[str] = []
        self._warnings: list[str] = []
        self._wins: list[str] = []

    def plan(self, whole_pool: bool, plaintext: bool) -> Plan:
        self._report()
        options = {
            **ENGINE_DEFAULTS,
            **self._model_options(),
            **self._plugin_options(),
            **self._lora_options(),
        }
        recall = self._recall(whole_pool, plaintext)
        self._tell_wins(options)
        listeners, homes = self._planes()
        spec = replace(
            self._over,
            model=self._weights,
            host=self._host,
            port=self._port,
            options={**options, **self._over.options},
            recall=allowing_plaintext(recall) if plaintext else recall,
            limits=self._limits(),
            tls=self._tls_of(Plane.BUSINESS),
            listeners=listeners,
        )
        return Plan(
            spec,
            homes=homes,
            max_body_bytes=self._server.maxRequestLength << 20,
            max_links=self._server.maxLinkNum,
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
        joins = any(x == "nnodes" or x.startswith("data-parallel-") for x, _ in self._told)
        if self._backend.multiNodesInferEnabled and not joins:
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

    def _tell_wins(self, options: Mapping[str, object]) -> None:
        """Notes where the command line overrides the file, and its ``options``."""
        over, server, size = self._over, self._server, self._model.npuMemSize
        fields = (
            ("MODEL", over.model, self._model.modelWeightPath),
            ("--host", over.host, server.ipAddress),
            ("--port", over.port, server.port),
            ("--max-n", over.limits.max_n, self._schedule.maxN),
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
        sequences = schedule.maxN or min(DEFAULT_MAX_N, schedule.maxBatchSize)
        return Limits(
            token_timeout_s=self._server.tokenTimeout,
            total_timeout_s=self._server.e2eTimeout,
            max_input_tokens=most,
            truncation="right" if cut_on_the_right else "left" if deploy.truncation else "error",
            max_new_tokens=schedule.maxIterTimes,
            max_n=self._over.limits.max_n or sequences,
        )

    # Engine

    def _model_options(self) -> dict[str, object]:
        """Of the model, its parallelism and its scheduler."""
        model, schedule = self._model, self._schedule
        if not (self._over.model or Path(self._weights).is_dir()):
            path = (*_MODEL, "modelWeightPath")
            raise self._wrong(path, f"is {self._weights!r}; there is no such folder")
        pp, dp = max(model.pp, 1), max(model.dp, 1)
        tp = model.tp if model.tp > 0 else max(model.worldSize // (pp * dp), 1)
        devices = tp * pp * dp
        if devices != model.worldSize:
            product = f"tp x pp x dp is {tp} x {pp} x {dp} = {devices}"
            if not self._backend.multiNodesInferEnabled:
                raise self._wrong((*_MODEL, "worldSize"), f"is {model.worldSize}, but {product}")
            self._notes.append(f"worldSize is {model.worldSize} on this host; in all {product}")
        if spreads := (model.moe_ep or 0) > 1:
            self._notes.append(
                f"moe_ep {model.moe_ep}: expert parallelism is on; vLLM spreads the experts over "
                f"all tp x dp = {tp * dp} devices and has no other size"
            )
        batch = max(schedule.maxPrefillTokens, schedule.maxBatchSize)
        if batch > schedule.maxPrefillTokens:
            self._notes.append(
                f"maxPrefillTokens {schedule.maxPrefillTokens} is raised to maxBatchSize {batch}: "
                "a step must have room for a token of each sequence"
            )
        automatic = model.npuMemSize == -1
        return {
            "served-model-name": model.modelName,
            "max-model-len": self._deploy.maxSeqLen,
            "trust-remote-code": model.trustRemoteCode or None,
            "kv-cache-memory-bytes": None if automatic else int(model.npuMemSize * _GIB),
            "tensor-parallel-size": tp if tp > 1 else None,
            "pipeline-parallel-size": pp if pp > 1 else None,
            "data-parallel-size": dp if dp > 1 else None,
            "enable-expert-parallel": spreads or None,
            "block-size": schedule.cacheBlockSize,
            "max-num-seqs": schedule.maxBatchSize,
            "max-num-batched-tokens": batch,
            "enable-chunked-prefill": self._is_mixed or None,
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
            if self._lacks_mtp():
                raise self._wrong(
                    (*_MODEL, "plugin_params"),
                    "asks for mtp, but the model has no prediction layers (its config.json has no "
                    f"{_MTP_LAYERS[0]}); remove mtp",
                )
            options["speculative-config"] = {"method": "mtp", "num_speculative_tokens": wanted or 1}
        elif ngram := sorted(kinds & {"la", "memory_decoding"}):
            options["speculative-config"] = {
                "method": "ngram",
                "num_speculative_tokens": wanted or _NGRAM_TOKENS,
                "prompt_lookup_max": _NGRAM_LOOKUP,
                "prompt_lookup_min": 1,
            }
            self._notes.append(f"plugin_type {ngram[0]} is served by vLLM's n-gram speculation")
        return options

    def _lacks_mtp(self) -> bool:
        """Whether the model has no prediction layers; False if its config.json cannot be read,
        which the check of the model folder reports."""
        try:
            text = (Path(self._weights) / "config.json").read_text(encoding="utf-8")
            described = json.loads(text)
        except (ValueError, OSError):
            return False
        return not any(described.get(key) for key in _MTP_LAYERS)

    def _lora_options(self) -> dict[str, object]:
        deploy = self._deploy
        if not deploy.LoraModules:
            if bounds := {"maxLoraNum", "maxLoraRank"} & deploy.model_fields_set:
                names = ", ".join(sorted(bounds))
                self._notes.append(f"without effect, as there are no LoraModules: {names}")
            return {}
        return {
            "enable-lora": True,
            "lora-modules": [
                json.dumps({"name": module.name, "path": str(self._resolved(module.path))})
                for module in deploy.LoraModules
            ],
            "max-loras": deploy.maxLoraNum,
            "max-lora-rank": deploy.maxLoraRank,
        }

    # Pool

    def _recall(self, whole_pool: bool, plaintext: bool) -> Mapping[str, object] | None:
        """The pool's settings, the command line's before the file's; None for no pool."""
        over = self._over.recall
        settings: dict[str, object] | None = None
        if over is None:
            self._wins.append("--no-pool")
        else:
            if not (whole_pool or "backend" in over):
                settings = self._recall_of_file(plaintext)
            if over and (settings is not None or over.keys() - {"async_write"}):
                self._require_prefix_cache()
                under = settings or {}
                self._wins += [f"pool {k} {x} ({_was(under.get(k))})" for k, x in over.items()]
                settings = {"async_write": self._backend.kvPoolConfig.asyncWrite, **under, **over}
                if settings.get("backend", "embedded") == "embedded":
                    self._default_host_size(settings)
                where = "the command line's pool settings over the file's"
                RecallSettings.from_mapping(settings, where)
        self._tell_unused(settings)
        return settings

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
        if settings is None and ("asyncWrite" in given or self._over.recall):
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

    def _recall_of_file(self, plaintext: bool) -> dict[str, object] | None:
        """Of ``kvPoolConfig``, and for Mooncake of a pool in the engine above the store that its
        own file describes."""
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
        file = self._resolved(pool.configPath)
        path = (*_POOL, "configPath")
        if not file.exists():
            raise self._wrong(path, f"is {str(file)!r}; there is no such file")
        if pool.backend != "mooncake":
            return self._pool_settings(file)
        options = {"config": str(file), "allow_plaintext": pool.allowPlaintext or plaintext}
        try:
            MooncakeSettings.of(options)
        except ConfigError as error:
            raise self._wrong(path, f"is {str(file)!r}; {error}") from error
        settings: dict[str, object] = {
            "remote": {"kind": "mooncake", **options},
            "async_write": pool.asyncWrite,
        }
        self._default_host_size(settings)
        return settings

    def _pool_settings(self, file: Path) -> dict[str, object]:
        """Of a pool.json, which must not contradict ``kvPoolConfig``."""
        pool = self._backend.kvPoolConfig
        settings, document = read_object(file, "pool settings")
        same: list[tuple[str, str, object]] = [("backend", "backend", pool.backend)]
        if "asyncWrite" in pool.model_fields_set:
            same.append(("async_write", "asyncWrite", pool.asyncWrite))
        for key, field, wanted in same:
            if (given := settings.get(key, wanted)) != wanted:
                shown = repr(wanted) if isinstance(wanted, str) else wanted
                message = f"is {shown}, but {document.where((key,))} says {given!r}"
                raise self._wrong((*_POOL, field), message)
        settings.setdefault("async_write", pool.asyncWrite)
        if pool.backend == "embedded":
            self._default_host_size(settings)
        else:
            settings["backend"] = pool.backend
        RecallSettings.from_mapping(settings, lambda key: document.where((key,)))
        return settings

    def _default_host_size(self, settings: dict[str, object]) -> None:
        if self._model.cpuMemSize > 0 and "host_size" not in settings:
            settings["host_size"] = int(self._model.cpuMemSize * _GIB)
            self._notes.append(
                f"the pool's host_size is cpuMemSize, {self._model.cpuMemSize:g} GiB"
            )

    # The planes

    def _planes(self) -> tuple[tuple[Listener, ...], Mapping[Plane, str]]:
        """The listeners besides the business plane's, and the listener of each plane. Planes with
        the same address and port share one."""
        server = self._server
        business = self._host, self._port
        if _is_unspecified(self._host) and not server.allowAllZeroIpListening:
            raise self._wrong(
                (*_SERVER, "allowAllZeroIpListening"),
                f"is false, and --host is {self._host}, which listens on every network; set it to "
                "true, or give another --host",
            )
        other = server.managementIpAddress or self._host
        wanted = {
            Plane.MANAGEMENT: (other, server.managementPort),
            Plane.METRICS: (other, server.metricsPort),
        }
        taken = [business]
        for plane, (host, port) in list(wanted.items()):
            if (host, port) == business:
                self._notes.append(f"the {plane} plane shares the business plane's")
                del wanted[plane]
                continue
            for above, used in taken:
                whole = _is_unspecified(above) or _is_unspecified(host)
                if port == used and whole and above != host:
                    raise self._wrong(
                        (*_SERVER, f"{plane}Port"),
                        f"is {port} on {host}, which {above}:{used} already takes; choose another "
                        "port, or the same address for both",
                    )
            taken.append((host, port))
        listeners, homes = shared_listeners(wanted, self._tls_of)
        if not (server.httpsEnabled or all(is_loopback(host) for host, _ in taken)):
            self._warnings.append(
                "httpsEnabled is false: requests travel in the clear, and serve wants an API key "
                "(--api-key-file)"
            )
        return listeners, homes

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
        folder = self._tls_field(prefix, "CrlPath") or ""
        lists = [*(self._tls_field(prefix, "CrlFiles") or ()), self._tls_field(prefix, "Crl")]
        files = TlsFiles(
            certificate=self._resolved(self._tls_field(prefix, "Cert")),
            key=self._resolved(self._tls_field(prefix, "Pk")),
            authorities=tuple(
                self._resolved(self._server.tlsCaPath, name)
                for name in self._tls_field(prefix, "CaFile")
            ),
            revoked=tuple(self._resolved(folder, name) for name in lists if name),
        )
        try:
            self._warnings += [w for w in files.check() if w not in self._warnings]
        except ConfigError as error:
            at = "httpsEnabled" if prefix == "tls" else f"{prefix}Cert"
            value = "is true" if prefix == "tls" else f"is {self._tls_field(prefix, 'Cert')!r}"
            raise self._wrong((*_SERVER, at), f"{value}; {error}") from error
        return files

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
