"""The sections of MindIE's config.json, field by field.

Types, ranges, defaults and required fields follow MindIE 2.x's documentation. The text of a field
says what it does in kvrecall; ``kvrecall config check`` prints it.
"""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo

from kvrecall.engines.base import CONTEXT_PARALLEL, MAX_N_LIMIT
from kvrecall.jsonfile import JsonPath


class Effect(StrEnum):
    """What a field does in kvrecall."""

    ACTS = "acts"
    PARTLY = "partly"  # some values have an effect, others are refused or have none
    NONE = "without effect"
    RETIRED = "retired"


class Section(BaseModel):
    """A section of config.json. Types are strict, unknown keys are errors, values are frozen."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


def _declaring(effect: Effect) -> Any:
    """Declares a field with this effect: its text, its default (required without one, unless it has
    no effect) and its bounds."""
    missing = ... if effect in (Effect.ACTS, Effect.PARTLY) else None

    def declared(text: str, default: Any = missing, **bounds: Any) -> Any:
        extra: Any = {"effect": effect.value}
        return Field(default, description=text, json_schema_extra=extra, **bounds)

    return declared


acts, partly, idle, retired = map(_declaring, Effect)


def effect_of(field: FieldInfo) -> Effect:
    """The declared effect of ``field``; that of sections is ACTS."""
    extra = field.json_schema_extra
    return Effect(str(extra["effect"])) if isinstance(extra, dict) else Effect.ACTS


def _only(*served: object, why: str = "") -> AfterValidator:
    """Refuses values that MindIE accepts and kvrecall does not support; ``why``: the reason."""
    reason = f": {why}" if why else ""

    def checked(value: object) -> object:
        if value not in served:
            raise ValueError(f"not available in this version, allowed: {served[0]!r}{reason}")
        return value

    return AfterValidator(checked)


Names = Annotated[list[str], Field(max_length=64)]
Path = Annotated[str, Field(max_length=4096)]
Port = Annotated[int, Field(ge=1024, le=65535)]
_OneContext = Annotated[int | None, _only(1, -1, 0, None, why=CONTEXT_PARALLEL)]

_ONE_HOST = "MindIE's own inter-node protocol; vLLM brings its own"
_SCHEDULER = "vLLM's scheduler has no such setting"
_KEY_STORE = "keys are read as PEM files without MindIE's key store"


class LogSection(Section):
    logLevel: str | None = idle("log levels are vLLM's (VLLM_LOGGING_LEVEL)")
    dynamicLogLevel: str | None = idle("log levels are vLLM's (VLLM_LOGGING_LEVEL)")
    dynamicLogLevelValidHours: int | None = idle("log levels are vLLM's")
    dynamicLogLevelValidTime: str | None = idle("log levels are vLLM's")
    logFileSize: int | None = idle("the log goes to standard error", ge=0, le=500)
    logFileNum: int | None = idle("the log goes to standard error", ge=0, le=64)
    logPath: Path | None = idle("the log goes to standard error")


class ServerSection(Section):
    allowAllZeroIpListening: bool = acts("whether listening on 0.0.0.0 and :: is allowed")
    ipAddress: str = acts("address of the business plane")
    managementIpAddress: str | None = acts("of the other planes; null: ipAddress", "127.0.0.2")
    port: Port = acts("port of the business plane")
    managementPort: Port = acts("port of the management plane: health, readiness, stop", 1026)
    metricsPort: Port = acts("port of the metrics plane: /metrics", 1027)
    maxLinkNum: int = acts(
        "maximum number of requests in progress on an address; further ones get 503, except for "
        "health. Connections without a request end after seconds and do not count",
        ge=1,
        le=4096,
    )
    httpsEnabled: bool = acts("serve HTTPS with the tls* fields")
    fullTextEnabled: Annotated[bool, _only(False)] = partly(
        "false only: stream events contain new text, not all so far", False
    )
    tlsCaPath: Path = acts("folder of tlsCaFile", "")
    tlsCaFile: Names = acts("CA files for verifying client certificates", [])
    tlsCert: Path = acts("the server's certificate chain (PEM)", "")
    tlsPk: Path = acts("the server's private key (PEM, not encrypted)", "")
    tlsPkPwd: Path | None = idle(_KEY_STORE)
    tlsCrlPath: Path | None = acts("revocation lists for client certificates (PEM)", None)
    tlsCrlFiles: Names | None = acts("revocation lists for client certificates (PEM)", None)
    tlsCrl: Path | None = acts("revocation lists for client certificates (PEM)", None)
    managementTlsCaFile: Names | None = acts("management plane's tlsCaFile [business's]", None)
    managementTlsCert: Path | None = acts("management plane's tlsCert [business's]", None)
    managementTlsPk: Path | None = acts("management plane's tlsPk [business's]", None)
    managementTlsPkPwd: Path | None = idle(_KEY_STORE)
    managementTlsCrlPath: Path | None = acts("management plane's tlsCrlPath", None)
    managementTlsCrlFiles: Names | None = acts("management plane's tlsCrlFiles", None)
    managementTlsCrl: Path | None = acts("management plane's tlsCrl", None)
    metricsTlsCaFile: Names | None = acts("metrics plane's tlsCaFile [management's]", None)
    metricsTlsCert: Path | None = acts("metrics plane's tlsCert [management's]", None)
    metricsTlsPk: Path | None = acts("metrics plane's tlsPk [management's]", None)
    metricsTlsPkPwd: Path | None = idle(_KEY_STORE)
    metricsTlsCrlPath: Path | None = acts("metrics plane's tlsCrlPath", None)
    metricsTlsCrlFiles: Names | None = acts("metrics plane's tlsCrlFiles", None)
    kmcKsfMaster: Path | None = idle(_KEY_STORE)
    kmcKsfStandby: Path | None = idle(_KEY_STORE)
    inferMode: Annotated[Literal["standard", "dmi"], _only("standard")] = partly(
        "standard; dmi (prefill-decode disaggregation) is not available", "standard"
    )
    interCommTLSEnabled: bool | None = idle(_ONE_HOST)
    interCommPort: Port | None = idle(_ONE_HOST)
    interCommTlsCaPath: Path | None = idle(_ONE_HOST)
    interCommTlsCaFile: Path | None = idle(_ONE_HOST)
    interCommTlsCaFiles: Names | None = idle(_ONE_HOST)
    interCommTlsCert: Path | None = idle(_ONE_HOST)
    interCommPk: Path | None = idle(_ONE_HOST)
    interCommPkPwd: Path | None = idle(_ONE_HOST)
    interCommTlsCrl: Path | None = idle(_ONE_HOST)
    interCommTlsCrlPath: Path | None = idle(_ONE_HOST)
    interCommTlsCrlFiles: Names | None = idle(_ONE_HOST)
    openAiSupport: Literal["vllm", "openai"] = partly(
        "vllm: the OpenAI routes are vLLM's own, which also serve clients of openai", "vllm"
    )
    tokenTimeout: int = acts("maximum seconds until each token", 600, ge=1, le=3600)
    e2eTimeout: int = acts("maximum seconds for a request", 600, ge=1, le=65535)
    maxRequestLength: int = acts("MB of a body; larger ones get 413", 40, ge=1, le=100)
    distDPServerEnabled: bool | None = idle(_ONE_HOST)

    @field_validator("ipAddress", "managementIpAddress")
    @classmethod
    def _address(cls, value: str | None, info: ValidationInfo) -> str | None:
        try:
            unspecified = value is not None and ipaddress.ip_address(value).is_unspecified
        except ValueError:
            raise ValueError("it must be an IPv4 or IPv6 address") from None
        if unspecified and not info.data.get("allowAllZeroIpListening"):
            raise ValueError(
                "this listens on every network; allowed only with "
                "ServerConfig.allowAllZeroIpListening true"
            )
        return value


class KvPoolSection(Section):
    backend: str = acts(
        '"" = no pool; "embedded" = a pool in the engine; "service" = the pool of this node; '
        '"mooncake" = a pool in the engine above a Mooncake Store',
        "",
    )
    configPath: str = acts(
        "JSON file with the pool's settings; for mooncake, its client's mooncake.json",
        "",
        max_length=500,
    )
    asyncWrite: bool = acts("save blocks off the critical path", False)
    allowPlaintext: bool = acts(
        "allow Mooncake's plaintext traffic, on loopback too; kvrecall's own, as --allow-plaintext",
        False,
    )

    @model_validator(mode="before")
    @classmethod
    def _object(cls, value: object) -> object:
        if value == "":
            return {}
        if not isinstance(value, dict):
            raise ValueError('not a JSON object; write {"backend": "embedded", "configPath": ...}')
        return value

    @field_validator("backend")
    @classmethod
    def _known(cls, value: str) -> str:
        if value not in ("", "embedded", "service", "mooncake"):
            other = value in ("memcache", "yuanrong")
            missing = "not available in this version; " if other else ""
            raise ValueError(f"{missing}allowed: '' (no pool), 'embedded', 'service', 'mooncake'")
        return value


class LoraSection(Section):
    name: str = acts("name of the adapter in requests")
    path: Path = acts("its folder")
    baseModelName: str | None = idle("there is one base model")


PLUGIN_TYPES = ("prefix_cache", "splitfuse", "mtp", "la", "memory_decoding")


class Plugins(Section):
    """What ``plugin_params`` asks for."""

    plugin_type: str = ""
    num_speculative_tokens: Annotated[int, Field(ge=1, le=64)] | None = None
    # Of la and memory_decoding: n-gram speculation has only the length.
    level: int | None = None
    window: int | None = None
    guess_set_size: int | None = None
    decoding_length: Annotated[int, Field(ge=1, le=64)] | None = None
    dynamic_algo: bool | None = None

    def __str__(self) -> str:
        return json.dumps(self.model_dump(exclude_unset=True))

    @property
    def kinds(self) -> frozenset[str]:
        return frozenset(kind.strip() for kind in self.plugin_type.split(",") if kind.strip())

    def unused(self) -> list[str]:
        """Given parameters without effect with these plug-ins."""
        speculative = self.kinds & {"mtp", "la", "memory_decoding"}
        lengths = {"num_speculative_tokens", "decoding_length"} if speculative else set()
        return sorted(self.model_fields_set - {"plugin_type"} - lengths)

    @model_validator(mode="after")
    def _known(self) -> Plugins:
        for kind in sorted(self.kinds):
            if kind not in PLUGIN_TYPES:
                raise ValueError(
                    f"plugin_type {kind!r}; allowed: {', '.join(PLUGIN_TYPES)}, joined by commas"
                )
        speculative = self.kinds & {"mtp", "la", "memory_decoding"}
        if len(speculative) > 1:
            raise ValueError(f"{' and '.join(sorted(speculative))} are mutually exclusive")
        return self


class ModelSection(Section):
    modelInstanceType: Annotated[str | None, _only("Standard", None)] = partly(
        "Standard only", "Standard"
    )
    modelName: str = acts("name of the model in requests", min_length=1, max_length=256)
    modelWeightPath: Path = acts("model folder", min_length=1)
    worldSize: int = acts("devices of the model on this host, tp x pp x dp", ge=1, le=1024)
    cpuMemSize: float = partly("GB; the pool's host_size if configPath has none", ge=0, le=65536)
    npuMemSize: float = acts("GB of device KV cache; -1 = automatic", ge=-1, le=65536)
    backendType: Literal["atb", "torch", "ms"] | None = idle("vLLM runs the model", "atb")
    trustRemoteCode: bool = acts("allow code from the model folder", False)
    tp: int = acts("tensor parallel size; absent or -1: worldSize / (dp x pp)", -1, ge=-1)
    pp: int = acts("pipeline parallel size", 1, ge=-1)
    dp: int = acts("data parallel size", 1, ge=-1)
    sp: _OneContext = partly("only 1 and -1: no ranks that share a block", None, ge=-1)
    cp: _OneContext = partly("only 1 and -1: no ranks that share a prefill", None, ge=-1)
    moe_tp: int | None = idle("vLLM derives it from tp, dp and moe_ep", ge=-1)
    moe_ep: int | None = partly("> 1: experts spread over all tp x dp devices", None, ge=-1)
    kv_trans_timeout: int | None = idle("for prefill-decode disaggregation", ge=0)
    kv_link_timeout: int | None = idle("for prefill-decode disaggregation", ge=0)
    async_scheduler_wait_time: int | None = idle(_SCHEDULER, ge=0)
    ignore_eos: bool | None = idle("a setting of requests, not of the server")
    plugin_params: Plugins = acts(f"plugin_type: {', '.join(PLUGIN_TYPES)}", Plugins())
    models: dict[str, Any] | None = idle("options of Ascend's own model code")

    @field_validator("plugin_params", mode="before")
    @classmethod
    def _object(cls, value: object) -> object:
        if value is None or value == "":
            return {}
        if not isinstance(value, dict):
            raise ValueError(r'not a JSON object; write "{\"plugin_type\":\"prefix_cache\"}"')
        return value

    @field_validator("npuMemSize")
    @classmethod
    def _automatic_or_some(cls, value: float) -> float:
        if value != -1 and value <= 0:
            raise ValueError("allowed: -1 (automatic) or more than 0")
        return value


class DeploySection(Section):
    maxSeqLen: int = acts("longest sequence, prompt and answer", ge=2, le=1 << 24)
    maxInputTokenLen: int = acts("longest prompt; at most maxSeqLen - 1", ge=1, le=1 << 24)
    truncation: Literal[False, True, -1, 0, 1] = acts(
        "longer prompts: false or 0 = refused, true or -1 = truncated right, 1 = truncated left",
        False,
    )
    ModelConfig: list[ModelSection] = Field(min_length=1, max_length=10)
    LoraModules: list[LoraSection] | None = acts("LoRA adapters to load", None)
    maxLoraNum: int | None = acts("maximum number of adapters in use at once", None, ge=1)
    maxLoraRank: int | None = acts("maximum rank of an adapter", None, ge=1)

    @field_validator("ModelConfig")
    @classmethod
    def _one(cls, value: list[ModelSection]) -> list[ModelSection]:
        if len(value) > 1:
            raise ValueError("a server serves one model; remove the others")
        return value


class ScheduleSection(Section):
    templateType: Literal["Standard", "Mix"] = partly(
        "Mix = splitfuse: chunked prefill; Standard: vLLM's default, which is chunked too",
        "Standard",
    )
    templateName: str | None = idle("there is one template", "Standard_LLM")
    cacheBlockSize: int = acts("tokens in a KV block", 128, ge=1, le=128)
    maxPrefillBatchSize: int | None = idle(_SCHEDULER, 50, ge=1)
    maxPrefillTokens: int = acts("tokens of a step (max_num_batched_tokens)", 8192, ge=1)
    prefillTimeMsPerReq: int | None = idle(_SCHEDULER, ge=0)
    prefillPolicyType: int | None = idle(_SCHEDULER, ge=0, le=3)
    decodeTimeMsPerReq: int | None = idle(_SCHEDULER, ge=0)
    decodePolicyType: int | None = idle(_SCHEDULER, ge=0, le=3)
    policyType: int | None = idle(_SCHEDULER, ge=0)
    maxBatchSize: int = acts("sequences of a step (max_num_seqs)", 200, ge=1, le=5000)
    maxIterTimes: int = acts("maximum tokens of an answer", 512, ge=1)
    maxPreemptCount: int | None = idle("vLLM preempts by recomputation", ge=0)
    supportSelectBatch: bool | None = idle(_SCHEDULER)
    maxQueueDelayMicroseconds: int | None = idle(_SCHEDULER, ge=0)
    maxFirstTokenWaitTime: int | None = idle(_SCHEDULER, ge=0)
    maxN: int | None = acts(
        "maximum sequences of a request (n, best_of, beams); null = min(128, maxBatchSize)",
        None,
        ge=1,
        le=MAX_N_LIMIT,
    )
    enablePrefixCache: Any = retired("use plugin_params prefix_cache")
    enableSplit: bool | None = retired("use templateType Mix or plugin_params splitfuse")
    splitType: bool | None = idle(_SCHEDULER)
    splitStartType: bool | None = idle(_SCHEDULER)
    splitChunkTokens: int | None = idle("maxPrefillTokens bounds a chunk", ge=1)
    splitStartBatchSize: int | None = idle(_SCHEDULER, ge=0)

    @field_validator("cacheBlockSize")
    @classmethod
    def _multiple(cls, value: int) -> int:
        if value % 16:
            raise ValueError("allowed: multiples of 16")
        return value

    @field_validator("maxN")
    @classmethod
    def _within_a_batch(cls, value: int | None, info: ValidationInfo) -> int | None:
        batch = info.data.get("maxBatchSize")
        if value is not None and batch is not None and value > batch:
            raise ValueError(f"allowed: at most maxBatchSize, which is {batch}")
        return value


class BackendSection(Section):
    backendName: str | None = idle("vLLM is the engine", "mindieservice_llm_engine")
    modelInstanceNumber: Annotated[int, _only(1)] = partly("only 1", 1, ge=1, le=10)
    npuDeviceIds: list[list[int]] | None = idle(
        "devices are chosen by CUDA_VISIBLE_DEVICES, with vLLM-Ascend ASCEND_RT_VISIBLE_DEVICES"
    )
    tokenizerProcessNumber: int | None = idle("vLLM tokenizes in the server", 8, ge=1, le=32)
    multiNodesInferEnabled: bool | None = idle(_ONE_HOST)
    multiNodesInferPort: Port | None = idle(_ONE_HOST)
    interNodeTLSEnabled: bool | None = idle(_ONE_HOST)
    interNodeTlsCaPath: Path | None = idle(_ONE_HOST)
    interNodeTlsCaFile: Path | None = idle(_ONE_HOST)
    interNodeTlsCaFiles: Names | None = idle(_ONE_HOST)
    interNodeTlsCert: Path | None = idle(_ONE_HOST)
    interNodeTlsPk: Path | None = idle(_ONE_HOST)
    interNodeTlsPkPwd: Path | None = idle(_ONE_HOST)
    interNodeTlsCrl: Path | None = idle(_ONE_HOST)
    interNodeTlsCrlPath: Path | None = idle(_ONE_HOST)
    interNodeTlsCrlFiles: Names | None = idle(_ONE_HOST)
    interNodeKmcKsfMaster: Path | None = idle(_ONE_HOST)
    interNodeKmcKsfStandby: Path | None = idle(_ONE_HOST)
    kvPoolConfig: KvPoolSection = KvPoolSection()
    ModelDeployConfig: DeploySection
    ScheduleConfig: ScheduleSection = ScheduleSection()


class MindieConfig(Section):
    """The whole file."""

    Version: Literal["1.0.0"] | None = idle("there is one version")
    EnableDynamicAdjustTimeoutConfig: bool | None = idle("timeouts are as given")
    ServerConfig: ServerSection
    BackendConfig: BackendSection
    LogConfig: LogSection | None = None


JSON_STRINGS = frozenset(
    (
        ("BackendConfig", "kvPoolConfig"),
        ("BackendConfig", "ModelDeployConfig", "ModelConfig", 0, "plugin_params"),
    )
)
"""Paths of objects that MindIE writes as JSON in a string; plain objects are accepted, too. The
index 0 stands for every item of a list."""


def fields_of(
    section: BaseModel, path: JsonPath = ()
) -> Iterator[tuple[JsonPath, Any, bool, FieldInfo]]:
    """The fields of a section and of those below it, in the order of the schema: path, value,
    whether it was given, declaration."""
    for name, field in type(section).model_fields.items():
        value: Any = getattr(section, name)
        if isinstance(value, list) and value and isinstance(value[0], BaseModel):
            for index, item in enumerate(value):
                yield from fields_of(item, (*path, name, index))
        elif field.json_schema_extra is not None:
            yield (*path, name), value, name in section.model_fields_set, field
        elif isinstance(value, BaseModel):
            yield from fields_of(value, (*path, name))
