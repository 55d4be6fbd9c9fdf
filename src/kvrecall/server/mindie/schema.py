"""The sections of MindIE's config.json, made from ``fields.toml``, which has every field.

A field without effect is passed over, whatever its value is. So is one that is not in the table, as
MindIE does it; a warning names it.
"""

from __future__ import annotations

import ipaddress
import json
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    create_model,
    model_validator,
)
from pydantic.fields import FieldInfo

from kvrecall.engines.base import CONTEXT_PARALLEL
from kvrecall.environment import Variable
from kvrecall.jsonfile import JsonPath


class Effect(StrEnum):
    """What a field does in kvrecall."""

    ACTS = "acts"
    PARTLY = "partly"  # some values have an effect, others are refused or have none
    NONE = "without effect"
    UNKNOWN = "unknown"  # and without effect


class Section(BaseModel):
    """A section of config.json. Types are strict, values are frozen. ``idle``: why a field has no
    effect, by its name."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)
    idle: ClassVar[Mapping[str, str]] = {}

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


class Plugins(Section):
    """What ``plugin_params`` asks for."""

    TYPES: ClassVar = ("prefix_cache", "splitfuse", "mtp", "la", "memory_decoding")
    plugin_type: str = ""
    num_speculative_tokens: Annotated[int, Field(ge=1, le=64)] | None = None
    decoding_length: Annotated[int, Field(ge=1, le=64)] | None = None
    idle = dict.fromkeys("level window guess_set_size dynamic_algo".split(), "n-gram speculation")

    def __str__(self) -> str:
        return json.dumps(self.model_dump(exclude_unset=True))

    @property
    def kinds(self) -> frozenset[str]:
        return frozenset(kind.strip() for kind in self.plugin_type.split(",") if kind.strip())

    @property
    def speculative(self) -> list[str]:
        return sorted(self.kinds & {"mtp", "la", "memory_decoding"})

    @model_validator(mode="after")
    def _known(self) -> Plugins:
        for kind in sorted(self.kinds.difference(self.TYPES)):
            allowed = ", ".join(self.TYPES)
            raise ValueError(f"plugin_type {kind!r}; allowed: {allowed}, joined by commas")
        if len(self.speculative) > 1:
            raise ValueError(f"{' and '.join(self.speculative)} are mutually exclusive")
        return self


def _rule(holds: Callable[[Any, Mapping[str, Any]], bool], otherwise: str) -> AfterValidator:
    """A rule for a value, beside the fields before it; ``otherwise``: the error, with their names
    for their values."""

    def checked(value: Any, info: ValidationInfo) -> Any:
        if not holds(value, info.data):
            raise ValueError(otherwise.format_map(info.data))
        return value

    return AfterValidator(checked)


def _only(served: list[object], why: str) -> AfterValidator:
    """Refuses what MindIE accepts and kvrecall lacks; ``why``: or the way that works here."""
    words = f"not available in this version, allowed: {served[0]!r}{f': {why}' if why else ''}"
    return _rule(lambda value, _: value in (*served, None), words)


def _address(value: str, info: ValidationInfo) -> str:
    try:
        is_every = ipaddress.ip_address(value).is_unspecified
    except ValueError:
        raise ValueError("it must be an IPv4 or IPv6 address") from None
    if is_every and not info.data.get("allowAllZeroIpListening"):
        word = "ServerConfig.allowAllZeroIpListening true"
        raise ValueError(f"this listens on every network; allowed only with {word}")
    return value


def _object(example: str) -> BeforeValidator:
    """Objects that MindIE writes as JSON in a string, which may be empty."""

    def checked(value: object) -> object:
        if value not in (None, "") and not isinstance(value, dict):
            raise ValueError(f"not a JSON object; write {example}")
        return value or {}

    return BeforeValidator(checked)


_AUTOMATIC = _rule(lambda size, _: size == -1 or size > 0, "allowed: -1 (automatic), or above 0")
_BATCH = _rule(
    lambda most, before: most <= before.get("maxBatchSize", most),
    "allowed: at most maxBatchSize, which is {maxBatchSize}",
)
_ONE = _rule(lambda models, _: len(models) == 1, "a server serves one model; remove the others")
_POOL = _object('{"backend": "embedded", "configPath": ...}')
_KINDS: Mapping[str, Any] = {
    "flag": bool,
    "whole": int,
    "number": float,
    "text": str,
    "names": list[str],
    "object": dict[str, Any],
    "address": Annotated[str, AfterValidator(_address)],
    "memory": Annotated[float, _AUTOMATIC],
    "block": Annotated[int, _rule(lambda size, _: size % 16 == 0, "allowed: multiples of 16")],
    "sequences": Annotated[int, _BATCH],
    "context": Annotated[int, _only([1, -1, 0], CONTEXT_PARALLEL)],
    "plugins": Annotated[Plugins, _object(r'"{\"plugin_type\":\"prefix_cache\"}"')],
}
_KIND = re.compile(r"([a-z]+)(\??)(?: (-?\d+)\.\.(\d*))?")


def _field(told: Mapping[str, Any]) -> tuple[Any, Any]:
    """A field of the table, as pydantic takes it."""
    effect = next(effect for effect in Effect if effect in told)
    kind, default = told["kind"], told.get("default", ...)
    bounds: dict[str, Any] = {}
    if isinstance(kind, list):
        type_: Any = Literal[tuple(kind)]
    else:
        name, nullable, least, most = _KIND.fullmatch(kind).groups()  # type: ignore[union-attr]
        type_ = _KINDS[name] | None if nullable else _KINDS[name]
        default = told.get("default") if nullable else Plugins() if name == "plugins" else default
        limits = ("min_length", "max_length") if name == "text" else ("ge", "le")
        pairs = zip(limits, (least, most), strict=True)
        bounds = {limit: int(bound) for limit, bound in pairs if bound}
    if only := told.get("only"):
        type_ = Annotated[type_, _only(only, told.get("why", ""))]
    extra: Any = {"effect": effect}
    return type_, Field(default, description=told[effect], json_schema_extra=extra, **bounds)


def _section(name: str, table: Mapping[str, Any]) -> type[Section]:
    """A section from its table. One whose fields all have defaults may be left out of a file."""
    fields: dict[str, Any] = {}
    for key, told in table.items():
        if "kind" in told:
            fields[key] = _field(told)
        elif key != "idle":
            fields[key] = _below(key, _section(key, told))
    made: type[Section] = create_model(name, __base__=Section, **fields)
    made.idle = {each: why for why, names in table.get("idle", {}).items() for each in names}
    return made


def _below(key: str, section: Any) -> tuple[Any, Any]:
    if key == "ModelConfig":
        return Annotated[list[section], _ONE], Field(min_length=1, max_length=10)
    if key == "LoraModules":
        return list[section] | None, None
    try:
        default = section()
    except ValidationError:
        default = ...
    return Annotated[section, _POOL] if key == "kvPoolConfig" else section, default


_TABLE = tomllib.loads(Path(__file__).with_name("fields.toml").read_text("utf-8"))
MindieConfig = _section("MindieConfig", _TABLE["file"])
"""The whole file."""

PARSERS: Mapping[str, Mapping[str, str]] = _TABLE["parsers"]
VARIABLES = tuple(Variable(name, *texts) for name, texts in _TABLE["environment"].items())
"""MindIE's variables that hold beside the file."""
CONFIG_PATH, CONTAINER_IP, MANAGEMENT_IP, MEMORY_FRACTION, ASYNC_SCHEDULING = VARIABLES

_MODELS = ("BackendConfig", "ModelDeployConfig", "ModelConfig")
JSON_STRINGS = (("BackendConfig", "kvPoolConfig"), (*_MODELS, 0, "plugin_params"))
"""Paths of objects that MindIE writes as JSON in a string; plain objects are accepted, too. The
index 0 stands for every item of a list."""


def effect_of(field: FieldInfo) -> Effect:
    """The declared effect of ``field``; that of sections is ACTS."""
    extra = field.json_schema_extra
    return Effect(str(extra["effect"])) if isinstance(extra, dict) else Effect.ACTS


class Told(NamedTuple):
    """A field: its place, its value, whether a file gives it, and what it does."""

    path: JsonPath
    value: Any
    given: bool
    effect: Effect
    text: str


def fields_of(section: Section, path: JsonPath = ()) -> Iterator[Told]:
    """The fields of a section, those that do something first, and then those below it."""
    below: list[tuple[JsonPath, Section]] = []
    for name, field in type(section).model_fields.items():
        value: Any = getattr(section, name)
        if field.description:
            given = name in section.model_fields_set
            yield Told((*path, name), value, given, effect_of(field), field.description)
        if isinstance(value, Section):
            below.append(((*path, name), value))
        elif isinstance(value, list) and value and isinstance(value[0], Section):
            below += [((*path, name, index), item) for index, item in enumerate(value)]
    others = dict(section.model_extra or {})
    for name, why in section.idle.items():
        given = name in others
        yield Told((*path, name), others.pop(name, None), given, Effect.NONE, why)
    for name, value in others.items():
        yield Told((*path, name), value, True, Effect.UNKNOWN, "")
    for place, inner in below:
        yield from fields_of(inner, place)
