"""From a checked config.json to the plan of a server: its fields in vLLM's and the pool's terms,
and the three planes with their addresses and certificates."""

from __future__ import annotations

import ipaddress
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from kvrecall.config import RecallSettings, is_loopback
from kvrecall.engines.base import DEFAULT_MAX_N, Limits, Listener, Role, ServeSpec
from kvrecall.errors import ConfigError
from kvrecall.jsonfile import JsonPath, read_object
from kvrecall.pool.remote.mooncake.settings import MooncakeSettings
from kvrecall.server import servable
from kvrecall.server.access import TlsFiles
from kvrecall.server.checks import JOIN_HOSTS, joins_hosts
from kvrecall.server.mindie import schema
from kvrecall.server.mindie.reader import Problems, Read, dotted, problem, read_config
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

_POOLS = ("embedded", "service")
_KNOWN = (*_POOLS, "mooncake", "objects")
_NGRAM_TOKENS = _NGRAM_LOOKUP = 4
_MTP_LAYERS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "mtp_num_layers")


def plan_config(
    path: Path, over: ServeSpec = NOTHING, whole_pool: bool = False, plaintext: bool = False
) -> Plan:
    """The plan for ``kvrecall serve --config``. Raises ConfigError; changes nothing. ``over``: what
    the command line sets in place of the file; values as in ``NOTHING`` leave the file's.
    ``whole_pool``: its pool is in place of all the file's. ``plaintext``: as ``--allow-plaintext``.
    """
    planner = _Planner(read_config(path), path.parent, over)
    plan = planner.plan(whole_pool, plaintext)
    if planner.problems:
        raise Problems(planner.problems, plan.warnings)
    return plan


class _Planner:
    """Plans one configuration; collects notes, warnings and ``problems``."""

    def __init__(self, read: Read, folder: Path, over: ServeSpec) -> None:
        self._config, self._document, warnings = read
        self._folder = folder
        self._over = over
        self._server = self._config.ServerConfig
        self._backend = self._config.BackendConfig
        self._deploy = self._backend.ModelDeployConfig
        self._model = self._deploy.ModelConfig[0]
        self._schedule = self._backend.ScheduleConfig
        self._plugins = self._model.plugin_params
        self._weights = over.model or str(self._resolved(self._model.modelWeightPath))
        given = "--host" if over.host else schema.CONTAINER_IP
        self._address = given, over.host or os.environ.get(schema.CONTAINER_IP)
        self._host = self._address[1] or self._server.ipAddress
        self._port = over.port or self._server.port
        self._told = [*over.options.items(), *vllm_options(over.extra_args)]  # to vLLM
        self.problems: list[str] = []
        self._warnings: list[str] = list(warnings)
        self._notes: list[str] = []
        self._wins: list[str] = []
        self._idle: dict[str, list[str]] = {}  # given fields without effect, by the reason

    def plan(self, whole_pool: bool, plaintext: bool) -> Plan:
        options = dict(ENGINE_DEFAULTS)
        parts = self._model_options, self._plugin_options, self._parser_options
        for part in (*parts, self._lora_options, self._environment_options):
            found = self._tried(part) or {}
            options |= {name: value for name, value in found.items() if value is not None}
        self._tried(self._check_folder)
        recall = self._tried(partial(self._recall, whole_pool, plaintext))
        if plaintext and not self.problems:
            recall = self._tried(partial(allowing_plaintext, recall))
        self._report()
        self._tell_wins(options)
        tls = self._tried(partial(self._tls_of, Plane.BUSINESS))
        listeners, homes = self._tried(self._planes) or ((), {})
        spec = replace(
            self._over,
            model=self._weights,
            host=self._host,
            port=self._port,
            options={**options, **self._over.options},
            recall=recall,
            limits=self._limits(),
            tls=tls,
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

    def _tried(self, attempt: Callable[[], Any]) -> Any:
        """What ``attempt`` returns; None, and a problem, if it raises ConfigError."""
        try:
            return attempt()
        except ConfigError as error:
            self.problems.append(str(error))
            return None

    def _report(self) -> None:
        """Adds notes and warnings about given fields without effect."""
        in_clear = None if self._server.httpsEnabled else _SERVER
        for path, _, given, effect, text in schema.fields_of(self._config):
            if given and effect is schema.Effect.NONE:
                self._pass(text, path)
            elif given and path[:1] == in_clear and "tls" in str(path[-1]).lower():
                self._pass("httpsEnabled is false", path)
        if self._idle:
            parts = [f"{', '.join(names)} ({why})" for why, names in self._idle.items()]
            self._notes.append("accepted without effect: " + "; ".join(parts))
        if self._backend.multiNodesInferEnabled and not joins_hosts(self._told):
            self._warnings.append(
                f"multiNodesInferEnabled: this server uses this host's devices only; {JOIN_HOSTS}"
            )
        if self._server.inferMode == "dmi" and self._over.role is Role.BOTH:
            cure = "--role prefill and one with --role decode over one pool, behind kvrecall router"
            why = "inferMode is 'dmi', but this server will prefill and decode"
            self._warnings.append(f"{why}; start one with {cure}")
        if "templateType" in self._schedule.model_fields_set and not self._is_mixed:
            why = "vLLM prefills in chunks, too, unless -- --no-enable-chunked-prefill"
            self._notes.append(f"templateType Standard: {why}")

    def _pass(self, why: str, path: JsonPath) -> None:
        self._idle.setdefault(why, []).append(dotted(path))

    def _tell_wins(self, options: Mapping[str, object]) -> None:
        """Notes where the command line overrides the file, and its ``options``."""
        over, server, size = self._over, self._server, self._model.npuMemSize
        fields = (
            ("MODEL", over.model, self._model.modelWeightPath),
            (*self._address, server.ipAddress),
            ("--port", over.port, server.port),
            ("--max-n", over.limits.max_n, self._schedule.maxN),
        )
        wins = [f"{name} {new} ({_was(old)})" for name, new, old in fields if new]
        for name, value in self._told:
            old = options.get(name.removeprefix("no-"))
            wins.append(f"--{name}{f' {value}' if value else ''} ({_was(old)})")
            if name == "gpu-memory-utilization" and size != -1:
                why = f"npuMemSize {size:g} is the size of the device cache; set it to -1"
                self._warnings.append(f"--{name} is without effect: {why}")
        if wins := [*wins, *self._wins]:
            self._notes.append(f"the file is overridden by {', '.join(wins)}")

    def _limits(self) -> Limits:
        deploy, schedule = self._deploy, self._schedule
        most = min(deploy.maxInputTokenLen, deploy.maxSeqLen - 1)
        if "max-model-len" in dict(self._told):
            most = deploy.maxInputTokenLen  # vLLM refuses prompts longer than its own bound
        if most < deploy.maxInputTokenLen:
            given = f"maxInputTokenLen {deploy.maxInputTokenLen}"
            self._notes.append(f"{given} is lowered to {most}, maxSeqLen - 1")
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

    def _check_folder(self) -> None:
        if not (self._over.model or Path(self._weights).is_dir()):
            message = f"is {self._weights!r}; there is no such folder"
            raise self._wrong((*_MODEL, "modelWeightPath"), message)

    def _model_options(self) -> dict[str, object]:
        """Of the model, its parallelism and its scheduler."""
        model, schedule = self._model, self._schedule
        pp, dp = max(model.pp, 1), max(model.dp, 1)
        tp = model.tp if model.tp > 0 else max(model.worldSize // (pp * dp), 1)
        devices = tp * pp * dp
        if devices != model.worldSize:
            product = f"tp x pp x dp is {tp} x {pp} x {dp} = {devices}"
            if not self._backend.multiNodesInferEnabled:
                raise self._wrong((*_MODEL, "worldSize"), f"is {model.worldSize}, but {product}")
            self._notes.append(f"worldSize is {model.worldSize} on this host; in all {product}")
        if devices > servable.most_ranks() and not joins_hosts(self._told):
            tp = pp = dp = 1
            why = "no accelerators, so the model is not spread over"
            self._warnings.append(f"worldSize {model.worldSize}: {why} {devices}")
        config = Path(self._over.model or self._weights, "config.json")
        is_dense = config.is_file() and not re.search(rb"expert|moe", config.read_bytes())
        spreads = (model.moe_ep or 0) > 1 and not is_dense
        if (model.moe_ep or 0) > 1 and is_dense:
            self._pass("the model has no experts", (*_MODEL, "moe_ep"))  # vLLM would not start
        elif spreads:
            all_of = f"vLLM spreads the experts over all tp x dp = {tp * dp} devices"
            self._notes.append(f"moe_ep {model.moe_ep}: expert parallelism is on; {all_of}")
        batch = max(schedule.maxPrefillTokens, schedule.maxBatchSize)
        if batch > schedule.maxPrefillTokens:
            raised = f"{schedule.maxPrefillTokens} is raised to maxBatchSize {batch}"
            self._notes.append(f"maxPrefillTokens {raised}: a step has a token of each sequence")
        chunk = schedule.prefillChunkSize or schedule.longPrefillTokenThreshold or 0
        if chunk and not self._is_mixed:
            chunk = 0
            self._notes.append("prefillChunkSize, longPrefillTokenThreshold: splitfuse is off")
        return {
            "served-model-name": model.modelName,
            "max-model-len": self._deploy.maxSeqLen,
            "trust-remote-code": model.trustRemoteCode or None,
            "kv-cache-memory-bytes": max(0, int(model.npuMemSize * _GIB)) or None,
            "tensor-parallel-size": tp if tp > 1 else None,
            "pipeline-parallel-size": pp if pp > 1 else None,
            "data-parallel-size": dp if dp > 1 else None,
            "enable-expert-parallel": spreads or None,
            "block-size": schedule.cacheBlockSize,
            "max-num-seqs": schedule.maxBatchSize,
            "max-num-batched-tokens": batch,
            "enable-chunked-prefill": self._is_mixed or None,
            "long-prefill-token-threshold": min(chunk, self._deploy.maxSeqLen) or None,
            "override-generation-config": {"max_new_tokens": schedule.maxIterTimes},
        }

    @property
    def _is_mixed(self) -> bool:
        return self._schedule.templateType == "Mix" or "splitfuse" in self._plugins.kinds

    def _plugin_options(self) -> dict[str, object]:
        kinds = self._plugins.kinds
        lengths = {"num_speculative_tokens", "decoding_length"} & self._plugins.model_fields_set
        for name in () if self._plugins.speculative else sorted(lengths):
            self._pass("nothing speculates", (*_MODEL, "plugin_params", name))
        options: dict[str, object] = {"enable-prefix-caching": "prefix_cache" in kinds}
        wanted = self._plugins.num_speculative_tokens or self._plugins.decoding_length
        if "mtp" in kinds:
            if self._lacks_mtp():
                why = f"has no prediction layers (its config.json has no {_MTP_LAYERS[0]})"
                message = f"asks for mtp, but the model {why}; remove mtp"
                raise self._wrong((*_MODEL, "plugin_params"), message)
            options["speculative-config"] = {"method": "mtp", "num_speculative_tokens": wanted or 1}
        elif self._plugins.speculative:
            options["speculative-config"] = {
                "method": "ngram",
                "num_speculative_tokens": wanted or _NGRAM_TOKENS,
                "prompt_lookup_max": _NGRAM_LOOKUP,
                "prompt_lookup_min": 1,
            }
            asked = self._plugins.speculative[0]
            self._notes.append(f"plugin_type {asked} is served by vLLM's n-gram speculation")
        return options

    def _lacks_mtp(self) -> bool:
        """Whether the model has no prediction layers; False if that is not known."""
        model = servable.fields_of(self._weights)
        return model is not None and not model.number(*_MTP_LAYERS, default=0)

    def _parser_options(self) -> dict[str, object]:
        """Of ``models``: the parsers of tool calls and of reasoning, and the chat template."""
        options: dict[str, object] = {}
        for path, value in _leaves(self._model.models or {}, (*_MODEL, "models")):
            if path[-1] == "tool_call_parser" and value:
                options["tool-call-parser"] = parser = self._parser("tool-call", value, path)
                options["enable-auto-tool-choice"] = True if parser else None
            elif path[-1] == "enable_reasoning" and value is True:
                options["reasoning-parser"] = self._parser("reasoning", path[-2], path)
            elif path[-1] == "chat_template" and value:
                options["chat-template"] = str(self._file(str(value), path))
            else:
                self._pass("an option of Ascend's own model code", path)
        return options

    def _parser(self, what: str, asked: object, path: JsonPath) -> str | None:
        """vLLM's name of a parser of MindIE's; None, with a warning, if it has none."""
        plain = str(asked).lower().replace("_", "")
        for begin, name in schema.PARSERS[what].items():
            if plain.startswith(begin):
                return name
        message = f"asks for {asked!r}, unknown to vLLM; name its own: -- --{what}-parser NAME"
        self._warnings.append(str(self._wrong(path, message)))
        return None

    def _environment_options(self) -> dict[str, object]:
        """Of MindIE's variables; the file and the command line come before them."""
        share = os.environ.get(schema.MEMORY_FRACTION) if self._model.npuMemSize == -1 else None
        if share and not re.fullmatch(r"0?\.\d*[1-9]\d*|1(\.0*)?", share):
            raise ConfigError(f"{schema.MEMORY_FRACTION} is {share!r}; allowed: above 0, up to 1")
        waits = os.environ.get(schema.ASYNC_SCHEDULING, "1") != "1"
        return {
            "gpu-memory-utilization": float(share) if share else None,
            "async-scheduling": False if waits else None,
        }

    def _lora_options(self) -> dict[str, object]:
        deploy = self._deploy
        if not deploy.LoraModules:
            for name in {"maxLoras", "maxLoraNum", "maxLoraRank"} & deploy.model_fields_set:
                self._pass("there are no LoraModules", (*_MODEL[:2], name))
            return {}
        return {
            "enable-lora": True,
            "lora-modules": [
                json.dumps({"name": module.name, "path": str(self._resolved(module.path))})
                for module in deploy.LoraModules
            ],
            "max-loras": deploy.maxLoras or deploy.maxLoraNum,
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
        """Passes over the fields about the pool that have no effect."""
        pool, size, given = self._backend.kvPoolConfig, self._model.cpuMemSize, settings or {}
        why = f"host_size is {given.get('host_size')}"
        if given.get("backend", "embedded") != "embedded":
            why = "the pool's memory is its service's (host_size there)"
        if size > 0 and (settings is None or given.get("host_size") != int(size * _GIB)):
            self._pass(why if given else "there is no pool", (*_MODEL, "cpuMemSize"))
        if settings is None and ("asyncWrite" in pool.model_fields_set or self._over.recall):
            self._pass("there is no pool", (*_POOL, "asyncWrite"))
        if "allowPlaintext" in pool.model_fields_set and pool.backend in ("", *_POOLS):
            self._pass("it is a store's", (*_POOL, "allowPlaintext"))

    def _require_prefix_cache(self) -> None:
        if "prefix_cache" not in self._plugins.kinds:
            cure = r'set "plugin_params": "{\"plugin_type\":\"prefix_cache\"}"'
            message = f"has no prefix_cache, on which the KV pool builds; {cure}"
            raise self._wrong((*_MODEL, "plugin_params"), message)

    def _recall_of_file(self, plaintext: bool) -> dict[str, object] | None:
        """Of ``kvPoolConfig``: a pool's, or those of a pool in the engine above a store."""
        pool = self._backend.kvPoolConfig
        self._tried(self._check_backend)
        if not pool.backend:
            if pool.configPath:
                self._notes.append("kvPoolConfig.backend is empty: pooling is off")
            return None
        if not pool.configPath and pool.backend not in _POOLS:
            why = "kvPoolConfig.backend is set but configPath is empty"
            self._warnings.append(f"{why}: pooling is off, as in MindIE")
            return None
        self._tried(self._require_prefix_cache)
        path = (*_POOL, "configPath")
        file = self._file(pool.configPath, path) if pool.configPath else None
        if file is None or pool.backend in _POOLS:
            return self._pool_settings(file)
        options: dict[str, object] = {"config": str(file)}
        try:
            if pool.backend == "mooncake":
                MooncakeSettings.of(options)
            else:
                options, _ = read_object(file, "the store's settings")
        except ConfigError as error:
            raise self._wrong(path, f"is {str(file)!r}; {error}") from error
        options["allow_plaintext"] = pool.allowPlaintext or plaintext
        settings: dict[str, object] = {
            "remote": {"kind": pool.backend, **options},
            "async_write": pool.asyncWrite,
        }
        self._default_host_size(settings)
        return settings

    def _check_backend(self) -> None:
        backend = self._backend.kvPoolConfig.backend
        if backend not in ("", *_KNOWN) and ":" not in backend:
            names = ", ".join(map(repr, _KNOWN))
            message = f"is {backend!r}; allowed: '' (no pool), {names}, package.module:Factory"
            if backend in ("memcache", "unifiedcache", "yuanrong"):
                message += f". kvrecall has no client for {backend}; use one of these"
            raise self._wrong((*_POOL, "backend"), message)

    def _pool_settings(self, file: Path | None) -> dict[str, object]:
        """Of a pool.json, which must not contradict ``kvPoolConfig``; without one, the defaults."""
        pool = self._backend.kvPoolConfig
        settings, document = read_object(file, "pool settings") if file else ({}, self._document)
        for key, field in (("backend", "backend"), ("async_write", "asyncWrite")):
            wanted = getattr(pool, field)
            given = settings.get(key, wanted)
            if given != wanted and field in pool.model_fields_set:
                message = f"is {wanted!r}, but {document.where((key,))} says {given!r}"
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
            self._notes.append(f"host_size is cpuMemSize, {self._model.cpuMemSize:g} GiB")

    # The planes

    def _planes(self) -> tuple[tuple[Listener, ...], Mapping[Plane, str]]:
        """The listeners besides the business plane's, and the listener of each plane. Planes with
        the same address and port share one."""
        server = self._server
        business = self._host, self._port
        if _is_unspecified(self._host) and not server.allowAllZeroIpListening:
            why = f"{self._address[0]} is {self._host}, which listens on every network"
            message = f"is false, and {why}; set it to true, or give another address"
            raise self._wrong((*_SERVER, "allowAllZeroIpListening"), message)
        other = os.environ.get(schema.MANAGEMENT_IP) or server.managementIpAddress or self._host
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
                    why = f"is {port} on {host}, which {above}:{used} already takes"
                    message = f"{why}; choose another port, or the same address for both"
                    raise self._wrong((*_SERVER, f"{plane}Port"), message)
            taken.append((host, port))
        listeners, homes = shared_listeners(
            wanted, lambda plane: self._tried(partial(self._tls_of, plane))
        )
        if not (server.httpsEnabled or all(is_loopback(host) for host, _ in taken)):
            why = "requests travel in the clear, and serve requires an API key (--api-key-file)"
            self._warnings.append(f"httpsEnabled is false: {why}")
        return listeners, homes

    def _tls_of(self, plane: Plane) -> TlsFiles | None:
        """The certificates of a plane; None without HTTPS."""
        if not self._server.httpsEnabled:
            return None
        prefixes = _TLS_PREFIXES[plane]
        own = (x for x in prefixes if self._tls_field(x, "Cert") or self._tls_field(x, "Pk"))
        prefix = next(own, "tls")
        names = [f"{prefix}{name}" for name in ("Cert", "Pk", "CaFile")]
        if missing := [name for name in names if not getattr(self._server, name)]:
            plain = "when httpsEnabled is true; without certificates, set that to false"
            when = plain if prefix == "tls" else f"beside {prefix}Cert"
            raise self._wrong((*_SERVER, missing[0]), f"is required {when} ({', '.join(missing)})")
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
            password=self._resolved(word) if (word := self._tls_field(prefix, "PkPwd")) else None,
        )
        try:
            self._warnings += [w for w in files.check() if w not in self._warnings]
        except ConfigError as error:
            at, value = f"{prefix}Cert", repr(self._tls_field(prefix, "Cert"))
            if prefix == "tls":
                at, value = "httpsEnabled", "true"
            raise self._wrong((*_SERVER, at), f"is {value}; {error}") from error
        return files

    def _tls_field(self, prefix: str, name: str) -> Any:
        return getattr(self._server, f"{prefix}{name}", None)  # MindIE has no metricsTlsCrl

    def _file(self, name: str, path: JsonPath) -> Path:
        """The file that the field at ``path`` names."""
        file = self._resolved(name)
        if not file.exists():
            raise self._wrong(path, f"is {str(file)!r}; there is no such file")
        return file

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


def _leaves(value: object, path: JsonPath) -> Iterator[tuple[JsonPath, object]]:
    """The values in nested objects that are no objects themselves, with their places."""
    for key, inner in value.items() if isinstance(value, dict) else ():
        if isinstance(inner, dict):
            yield from _leaves(inner, (*path, key))
        else:
            yield (*path, key), inner


def _was(value: object) -> str:
    return "file: nothing" if value is None else f"file: {value}"
