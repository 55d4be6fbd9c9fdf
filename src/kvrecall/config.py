"""The settings of the pool, each declared once: type, default, text and allowed values.

``Settings`` is that declaration. Reading, errors, ``--help`` (``help_of``) and the reference
(``docs/reference/settings.md``) are derived from it; other code gets the small frozen values above
it. Settings are read once, at the edge: no other code reads files or environment.
"""

from __future__ import annotations

import difflib
import importlib
import ipaddress
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, ValidationInfo
from pydantic.fields import FieldInfo

from kvrecall.block import Tenant, is_tenant, tenant_of
from kvrecall.errors import ConfigError
from kvrecall.secret import MOONCAKE, TO_A_FILE, refuse_open

DEFAULT_POLICY = "hazard"  # of eviction
DEFAULT_AUDIT_EVERY = 4096  # hits
DEFAULT_MATCH_UNIT = 16  # tokens, where hits on the device may end inside blocks
MatchUnit = int | Literal["auto", "off"]
Access = Literal["both", "read", "write", "private"]
ExplainMisses = Literal["tokens", "blocks", "off"]
Compression = Literal["none", "lz4", "zstd", "auto"]
_LEAST_BARE = 1 << 20  # minimum of a size without a unit
_LEAST_NUMBER = 64 << 10  # the same for a number in JSON, which a program may have computed
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)(b?)\s*", re.IGNORECASE)


def parse_size(value: str | int | float, name: str, least_bare: int = _LEAST_BARE) -> int:
    """Bytes of ``8GiB``, ``"4GB"``, ``1.5g`` or a plain number of bytes.

    ``KiB, MiB, GiB, TiB`` are powers of 1024; ``KB, MB, GB, TB`` and the bare letters are powers
    of 1000. Raises ConfigError naming the setting ``name``: also for a number without a unit that
    is not 0 and below ``least_bare``, as its unit was probably forgotten.
    """
    match = _SIZE.fullmatch(str(value))
    if match is None:
        raise ConfigError(f"{name}: {value!r} is not a size; write for example 8GiB or 500MB")
    number, unit, binary, byte = match.groups()
    power = "bkmgt".index(unit.lower() or "b")
    nbytes = int(float(number) * (1024 if binary else 1000) ** power)
    least = least_bare if isinstance(value, str) else min(least_bare, _LEAST_NUMBER)
    if 0 < nbytes < least and not (unit or byte):
        meant = f"{number}GiB" if nbytes < 1024 else f"{number}KiB"
        raise ConfigError(
            f"{name}: {value!r} has no unit, which makes it {nbytes} bytes; write {meant}, or "
            f"{number}B if you mean bytes"
        )
    return nbytes


_AGE = re.compile(r"(\d+(?:\.\d+)?)\s*([smhd]?)")
_AGE_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def parse_age(value: object, name: str) -> float:
    """Seconds of ``90m``, ``12h``, ``30d`` or a plain number. ConfigError naming ``name``."""
    match = _AGE.fullmatch(str(value).strip().lower())
    if match is None or float(match[1]) <= 0:
        raise ConfigError(f"{name}: {value!r} is not an age; write for example 90m, 12h or 7d")
    return float(match[1]) * _AGE_UNITS[match[2]]


def format_size(nbytes: float) -> str:
    """Bytes in binary units with three digits, as in all tables: ``12.3 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(nbytes) < 1023.5 or unit == "TiB":
            break
        nbytes /= 1024
    return f"{nbytes:,.0f} {unit}" if abs(nbytes) >= 99.95 else f"{nbytes:.3g} {unit}"


def setting_of(nbytes: int) -> str | int:
    """A size as written in a setting; a number if no unit divides it."""
    units = (("TiB", 1 << 40), ("GiB", 1 << 30), ("TB", 10**12), ("GB", 10**9), ("MiB", 1 << 20))
    found = (f"{nbytes // size}{unit}" for unit, size in units if nbytes and nbytes % size == 0)
    return next(found, nbytes)


def format_count(number: int) -> str:
    """A number of at most seven characters: ``999,999``, ``12.3M``, ``4.56G``."""
    if abs(number) < 1_000_000:
        return f"{number:,}"
    amount = float(number)
    for unit in "MGT":
        amount /= 1000 if unit != "M" else 1_000_000
        if abs(amount) < 999.5:
            break
    return f"{amount:.3g}{unit}"


def parse_tenant(text: str, name: str) -> Tenant:
    """A tenant as ``pool ls`` prints it, or ``salt:`` and the requests' ``cache_salt``."""
    if text.startswith("salt:") and len(text) > 5:
        return tenant_of(text[5:])
    if not is_tenant(text):
        raise ConfigError(
            f"{name}: {text!r} is not a tenant; write 16 hex digits as in `kvrecall pool ls --by "
            "tenant`, salt:SALT, or - for requests without a salt"
        )
    return Tenant(text)


@dataclass(frozen=True, slots=True)
class Watermarks:
    """Shares of a capacity: an action begins above ``high`` and stops at ``low``."""

    high: float
    low: float


@dataclass(frozen=True, slots=True)
class Amount:
    """A number of bytes, or a share of a tier's capacity."""

    nbytes: int = 0
    share: float = 0.0

    def of(self, capacity_bytes: int) -> int:
        return self.nbytes or int(self.share * capacity_bytes)


@dataclass(frozen=True, slots=True)
class TenantTerms:
    """Limits of a tenant; None: no limit. ``ttl_s``: seconds without use until its blocks are
    dropped."""

    host: Amount | None = None
    disk: Amount | None = None
    ttl_s: float | None = None


@dataclass(frozen=True, slots=True)
class TenantRules:
    """Limits by tenant. ``named`` has all limits of its tenants, ``default`` those of all
    others."""

    default: TenantTerms = TenantTerms()
    named: Mapping[Tenant, TenantTerms] = field(default_factory=dict)

    def of(self, tenant: Tenant) -> TenantTerms:
        return self.named.get(tenant, self.default)

    @property
    def all(self) -> tuple[TenantTerms, ...]:
        return (self.default, *self.named.values())


@dataclass(frozen=True, slots=True)
class DiskConfig:
    """Settings of the disk tier."""

    path: Path
    capacity_bytes: int
    high_watermark: float = 0.95  # share of the capacity at which eviction starts
    low_watermark: float = 0.90  # share at which it stops
    direct_io: bool = True  # O_DIRECT where the file system allows
    max_queued_bytes: int = 512 << 20  # queued writes; further ones are shed
    readers: int = 4  # threads
    compression: Compression = "none"


@dataclass(frozen=True, slots=True)
class PoolTerms:
    """Limits of tenants and pins, and the write policy of a pool."""

    write_policy: str = "through"
    remote_write: str = "through"
    tenants: TenantRules = TenantRules()
    pin_limit: float = 0.5  # share of a tier that pinned blocks may take
    host_marks: Watermarks = Watermarks(1.0, 1.0)  # eviction ahead of need; 1: none
    unwritten_marks: Watermarks = Watermarks(0.5, 0.4)  # of the host, with write_policy back
    read_only: bool = False  # engines save nothing, and clear nothing
    read_only_namespaces: tuple[str, ...] = ()  # the same in these: first hex digits of digests

    @property
    def spares_some(self) -> bool:
        return self.read_only or bool(self.read_only_namespaces)

    def spares(self, namespace: bytes) -> bool:
        """Whether engines save nothing in the namespace of this digest, and clear nothing."""
        return self.read_only or namespace.hex().startswith(self.read_only_namespaces)


@dataclass(frozen=True, slots=True)
class RemoteConfig:
    """Settings of the remote tier: the kind of its store, that kind's own ``options``, and its
    use."""

    kind: str
    options: Mapping[str, object] = field(default_factory=dict)
    writes: bool = True  # False: blocks are only read
    max_queued_bytes: int = 256 << 20  # queued blocks; further ones are shed
    call_deadline_s: float = 5.0  # after a longer call of the store the tier pauses
    threads: int = 2  # for each direction
    compression: Compression = "none"


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """Settings of an embedded pool."""

    host_bytes: int
    disk: DiskConfig | None = None
    policy: str = DEFAULT_POLICY
    load_deadline_s: float = 10.0
    terms: PoolTerms = PoolTerms()
    encryption_key_file: Path | None = None  # encrypts what is written to disk or remote stores
    remote: RemoteConfig | None = None
    lookup_deadline_s: float = 0.05  # of a request, for the remote tier's answer
    host_most_bytes: int = 0  # maximum size of the host at run time; 0 = ``host_bytes``


@dataclass(frozen=True, slots=True)
class ServiceConfig:
    """Where an engine finds the node's pool service."""

    socket: Path
    call_timeout_s: float = 0.1  # maximum wait of a call for the service


@dataclass(frozen=True, slots=True)
class RecallSettings:
    """The settings of a pool, from a connector's ``kv_connector_extra_config``, a pool.json or
    options. ``Settings`` has the names and defaults."""

    pool: PoolConfig
    backend: str = "embedded"
    access: Access = "both"
    async_write: bool = True
    appraise_loads: bool = True
    handover_deadline_s: float = 2.0
    admin_socket: Path | None = None
    service: ServiceConfig | None = None  # with backend "service", which then owns ``pool``
    audit_every: int | None = DEFAULT_AUDIT_EVERY  # hits; 0: only first ones; None: no audits
    match_unit: MatchUnit = "auto"  # tokens
    explain_misses: ExplainMisses = "tokens"

    @classmethod
    def from_mapping(
        cls, raw: Mapping[str, object], source: str | Callable[[str], str] = "settings"
    ) -> RecallSettings:
        """Checks the settings in ``raw``. Errors begin with ``source``, which may also give the
        place of a setting: ``file:line:column``, or its option (``option_of``). Raises ConfigError
        for the first one that is unknown or wrong."""
        return _settings(Settings.read(raw, source))


class Owner(StrEnum):
    """The process that a setting is for."""

    ENGINE = "every engine"
    POOL = "the process that owns the pool"
    CLIENT = "an engine that uses a pool service"


class SettingWords(NamedTuple):
    """Of a setting: ``shown``, its default in words, empty if there is none; ``kind``, the kind of
    its value, empty if its type says it."""

    owner: Owner
    shown: str
    kind: str


def _setting(
    owner: Owner, text: str, default: Any, shown: str = "", kind: str = "", **bounds: Any
) -> Any:
    """A field of ``Settings``, with its ``SettingWords``."""
    words = SettingWords(owner, shown or _shown(default), kind)
    return Field(default, description=text, json_schema_extra=words._asdict(), **bounds)


_of_pool = partial(_setting, Owner.POOL)
_of_engine = partial(_setting, Owner.ENGINE)
_of_client = partial(_setting, Owner.CLIENT)


def _shown(default: object) -> str:
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, Watermarks):
        return f"[{default.high:g}, {default.low:g}]"
    return "" if default is None else f"{default:g}" if isinstance(default, float) else f"{default}"


def _parsed(parse: Callable[[Any, str], Any]) -> BeforeValidator:
    """Reads a value by ``parse``, which gets a name of the setting for its errors."""

    def validated(value: Any, info: ValidationInfo) -> Any:
        assert info.context is not None
        assert info.field_name is not None
        return parse(value, _named(info.context["place"](info.field_name), info.field_name))

    return BeforeValidator(validated)


def _named(place: str, key: str) -> str:
    """A setting for errors: the option it was given by, or its place and its name."""
    return place if place.startswith("--") else f"{place}: {key}"


def _wrong(name: str, value: object, allowed: str) -> ConfigError:
    return ConfigError(f"{name} is {value!r}; {allowed}")


def _size(value: Any, name: str) -> int:
    nbytes = parse_size(value, name)
    if nbytes <= 0:
        raise _wrong(name, value, "it must be more than 0")
    return nbytes


def _path(value: Any, name: str) -> Path:
    if not isinstance(value, str | Path) or not str(value):
        raise _wrong(name, value, "it must be a string, the path of a file or folder")
    return Path(value).expanduser()


def _watermarks(value: Any, name: str) -> Watermarks:
    numbers = value if isinstance(value, list) else []
    right = len(numbers) == 2 and all(type(number) in (int, float) for number in numbers)
    if not (right and 0 < numbers[1] <= numbers[0] <= 1):
        raise _wrong(name, value, "it must be [high, low] with 0 < low <= high <= 1")
    return Watermarks(float(numbers[0]), float(numbers[1]))


def _amount(value: Any, name: str) -> Amount | None:
    """``25%`` of a tier, or a size."""
    if value is None:
        return None
    text = str(value).strip()
    if not text.endswith("%"):
        return Amount(_size(value, name))
    share = float(text[:-1]) / 100 if re.fullmatch(r"\d+(\.\d+)?%", text) else math.nan
    if not 0 < share <= 1:
        raise _wrong(name, value, "a share must be above 0% and at most 100%")
    return Amount(share=share)


def _age(value: Any, name: str) -> float | None:
    return None if value in (None, "") else parse_age(value, name)


def _terms(raw: Mapping[str, Any], name: str, *known: str) -> TenantTerms:
    for key in raw:
        if key not in known:
            raise _wrong(f"{name}.{key}", raw[key], f"known here: {', '.join(known)}")
    return TenantTerms(
        _amount(raw.get("host"), f"{name}.host"),
        _amount(raw.get("disk"), f"{name}.disk"),
        _age(raw.get("ttl"), f"{name}.ttl"),
    )


def _quota(value: Any, name: str) -> TenantTerms:
    both = value if isinstance(value, dict) else {"host": value, "disk": value}
    return _terms(both, name, "host", "disk")


def _tenants(value: Any, name: str) -> dict[Tenant, TenantTerms]:
    if not isinstance(value, dict):
        raise _wrong(name, value, "it must be an object: {TENANT: {...}}")
    terms = {}
    for tenant, what in value.items():
        if not isinstance(what, dict):
            raise _wrong(f"{name}.{tenant}", what, 'it must be {"host": .., "disk": ..}')
        key = parse_tenant(str(tenant), name)
        terms[key] = _terms(what, f"{name}.{tenant}", "host", "disk", "ttl")
    return terms


def _digests(value: Any, name: str) -> tuple[str, ...]:
    digests = value if isinstance(value, list | tuple) else [value]
    for each in digests:
        if not (isinstance(each, str) and re.fullmatch("[0-9a-f]{8,32}", each)):
            raise _wrong(name, each, "write 8 to 32 hex digits as in `kvrecall pool ls`")
    return tuple(digests)


def _remote(value: Any, name: str) -> Mapping[str, object] | None:
    if value is None:
        return None
    if not (isinstance(value, Mapping) and isinstance(value.get("kind"), str)):
        raise ConfigError(f'{name} must be an object such as {{"kind": "mooncake"}}')
    refuse_open(value, name, MOONCAKE if value["kind"] == "mooncake" else TO_A_FILE)
    return value


def _match_unit(value: Any, name: str) -> MatchUnit:
    if value not in ("auto", "off") and (type(value) is not int or value < 1):
        raise _wrong(name, value, 'it must be a number of tokens, "auto" or "off"')
    unit: MatchUnit = value
    return unit


def _audit(value: Any, name: str) -> int | None:
    if value == "off":
        return None
    if type(value) is not int or value < 0:
        raise _wrong(name, value, 'it must be a number of hits, 0 or "off"')
    return value


Size = Annotated[int, _parsed(_size)]
File = Annotated[Path, _parsed(_path)]
Marks = Annotated[Watermarks, _parsed(_watermarks)]


class Settings(BaseModel):
    """Every setting of the pool, in its external form."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, arbitrary_types_allowed=True
    )

    backend: Literal["embedded", "service"] = _of_engine(
        "`embedded`: the pool is in the engine's process; `service`: the engine uses the node's "
        "pool service (`kvrecall pool serve`)",
        "embedded",
    )
    host_size: Size = _of_pool("host memory for blocks, a hard limit", 4 << 30, "4GiB")
    host_max_size: Size | None = _of_pool(
        "upper bound for `kvrecall pool resize --host`; the part above host_size takes "
        "only address space until then, but a GPU's driver pins all of it at the start",
        None,
        "host_size",
    )
    disk_path: File | None = _of_pool("folder of the disk tier, which is off without it", None)
    disk_size: Size | None = _of_pool(
        "hard limit of the disk tier, index included; required with disk_path", None
    )
    disk_compression: Compression = _of_pool(
        "lossless compression of blocks on disk: `none`, `lz4`, `zstd`, or `auto`: `zstd` if "
        "measured reads from this disk are faster with it",
        "none",
    )
    direct_io: bool = _of_pool(
        "bypass the page cache (O_DIRECT) where the file system allows it", True
    )
    policy: str = _of_pool("eviction policy: `lru`, `s3fifo`, `hazard`", DEFAULT_POLICY)
    host_watermarks: Marks = _of_pool(
        "[high, low], shares of the host tier: background eviction starts above high and stops "
        "at low; 1: no background eviction",
        Watermarks(1.0, 1.0),
    )
    disk_watermarks: Marks = _of_pool(
        "[high, low], shares of the disk tier, as host_watermarks", Watermarks(0.95, 0.9)
    )
    write_policy: Literal["through", "back", "selective"] = _of_pool(
        "when a block is written to disk. `through`: at once; `back`: before it leaves host "
        "memory; `selective`: on its second use",
        "through",
    )
    encryption_key_file: File | None = _of_pool(
        "file with the key that encrypts blocks below the host (AES-256-GCM), created by "
        "`kvrecall pool key`; without it blocks are not encrypted",
        None,
    )
    ttl: Annotated[float | None, _parsed(_age)] = _of_pool(
        "drop blocks that were not used for this long, e.g. 12h, 30d", None, "never", kind="age"
    )
    tenant_quota: Annotated[TenantTerms, _parsed(_quota)] = _of_pool(
        'share of each tier that one tenant (`cache_salt`) may hold: 25%, 4GiB, or {"host": .., '
        '"disk": ..}',
        TenantTerms(),
        "no limit",
        kind="share, size or object",
    )
    tenants: Annotated[dict[Tenant, TenantTerms], _parsed(_tenants)] = _of_pool(
        '{TENANT: {"host": .., "disk": .., "ttl": ..}}: limits of single tenants, instead of '
        "tenant_quota and ttl; omitted limits are unlimited",
        {},
        "none",
    )
    pin_limit: float = _of_pool(
        "share of a tier that pinned blocks may take", 0.5, kind="share", gt=0, le=1
    )
    read_only_namespaces: Annotated[tuple[str, ...], _parsed(_digests)] = _of_pool(
        "namespaces in which no engine saves or clears anything: a list of digests, or of their "
        "first digits (8 at least), as `kvrecall pool ls` prints them",
        (),
        "none",
        kind="list",
    )
    remote: Annotated[Mapping[str, object] | None, _parsed(_remote)] = _of_pool(
        "the store beyond this host: an object with its `kind` (`mooncake`, `objects` or "
        "`package.module:Factory`), the options of that kind, and `allow_plaintext`: true lets a "
        "store that others can read have blocks that are not encrypted",
        None,
        "none",
    )
    remote_write: Literal["through", "back", "off"] = _of_pool(
        "when a block is written to the remote store. `through`: when it is committed; `back`: "
        "before it leaves host memory, and when the pool closes; `off`: never, only read",
        "through",
    )
    remote_compression: Compression = _of_pool(
        "lossless compression of blocks in the remote store: `none`, `lz4`, `zstd`, or `auto`: "
        "`zstd` if measured reads from this store are faster with it",
        "none",
    )
    admin_socket: File | None = _of_pool(
        "socket at which an embedded pool answers `kvrecall pool stat` and `kvrecall pool ls`",
        None,
        "none; under `kvrecall serve` serve-PORT.sock in the folder of the default `socket`",
    )
    lookup_deadline: float = _of_engine(
        "seconds that a request waits for the remote store's answer to a lookup, or 8 % of the "
        "computing it may save, if longer",
        0.05,
        kind="seconds",
        gt=0,
        le=60,
    )
    load_deadline: float = _of_engine(
        "maximum seconds that a request waits for blocks from lower tiers; then it computes them",
        10.0,
        kind="seconds",
        gt=0,
        le=3600,
    )
    load_or_compute: Literal["auto", "load"] = _of_engine(
        "`auto`: load only the part of a prefix that is expected to load faster than it "
        "computes; `load`: load everything that is found",
        "auto",
    )
    access: Access = _of_engine(
        "`read`: saves nothing (a service's: no engine does); `write`: recalls nothing; "
        "`private`: shares no blocks",
        "both",
    )
    async_write: bool = _of_engine(
        "save blocks off the critical path and shed load under pressure; false: a reply ends "
        "once its blocks are durable in the pool",
        True,
    )
    handover_deadline: float = _of_engine(
        "maximum seconds that a decode instance waits for blocks promised by a prefill instance; "
        "then it computes them",
        2.0,
        kind="seconds",
        gt=0,
        le=600,
    )
    audit: Annotated[int | None, _parsed(_audit)] = _of_engine(
        "one of this many hits is computed and compared with the pool's blocks, besides the first "
        'hit on each writer\'s blocks; 0: only first hits; "off": none',
        DEFAULT_AUDIT_EVERY,
        kind='integer or "off"',
    )
    explain_misses: ExplainMisses = _of_engine(
        "detail in the reported reason of a miss. `tokens`: includes the token at which the prompt "
        "leaves the nearest known one of its tenant; `blocks`: omits it, so that clients without "
        "salts cannot guess each other's prompts token by token; `off`: reports no reasons",
        "tokens",
    )
    match_unit: Annotated[MatchUnit, _parsed(_match_unit)] = _of_engine(
        "hits are multiples of this many tokens, and may end inside a block. `auto`: 16 for models "
        "with recurrent layers and full attention, as on the device; whole blocks for others. A "
        "number: also for models with one group of full attention, which then recall more than the "
        "device does. `off`: vLLM's `--prefix-match-unit` applies",
        "auto",
        kind='integer, "auto" or "off"',
    )
    socket: File | None = _of_client(
        "socket of the pool service, at which `kvrecall pool serve` listens",
        None,
        "/run/user/UID/kvrecall/pool.sock, without such a folder /tmp/kvrecall-UID/pool.sock",
    )
    call_timeout: float = _of_client(
        "maximum seconds that a call waits for the pool service", 0.1, kind="seconds", gt=0, le=60
    )

    @classmethod
    def read(
        cls,
        raw: Mapping[str, object],
        source: str | Callable[[str], str],
        of_service: bool = False,
    ) -> Settings:
        """See RecallSettings.from_mapping; ``of_service``: service_settings."""
        place = source if callable(source) else lambda _: source
        for key in raw:
            if key not in cls.model_fields:
                close = difflib.get_close_matches(key, list(cls.model_fields), 1)
                known = f"known: {', '.join(sorted(cls.model_fields))}"
                hint = f"did you mean {close[0]!r}?" if close else known
                raise ConfigError(f"{place(key)}: unknown setting {key!r}; {hint}")
        try:
            read = cls.model_validate(dict(raw), context={"place": place})
        except ValidationError as error:
            detail = error.errors(include_url=False)[0]
            key = str(detail["loc"][0])
            allowed = allowed_by(detail, cls.model_fields[key])
            raise _wrong(_named(place(key), key), raw[key], allowed) from error
        if not of_service:
            foreign = Owner.POOL if read.backend == "service" else Owner.CLIENT
            for key in raw:
                if words_of(key).owner is foreign:
                    allowed = f"it has no effect with backend {read.backend!r}"
                    raise _wrong(_named(place(key), key), raw[key], allowed)
        elif raw.get("backend", "service") != "service":
            name = _named(place("backend"), "backend")
            raise _wrong(name, read.backend, "allowed here: service")
        read._check_together(place)
        return read

    def _check_together(self, place: Callable[[str], str]) -> None:
        """Raises ConfigError for settings that do not go together."""
        needs = {"disk_size": "disk_path", "disk_compression": "disk_path"}
        needs |= {"remote_write": "remote", "remote_compression": "remote"}
        for name, needed in needs.items():
            if name in self.model_fields_set and getattr(self, needed) is None:
                raise ConfigError(f"{place(name)}: {name} is set but {needed} is not")
        if self.disk_path is not None and self.disk_size is None:
            raise ConfigError(
                f"{place('disk_path')}: disk_path is set but disk_size is not; the disk tier needs "
                "a hard limit, for example disk_size=100GiB"
            )
        if self.host_max_size is not None and self.host_max_size < self.host_size:
            name = _named(place("host_max_size"), "host_max_size")
            raise _wrong(name, self.host_max_size, "it must not be below host_size")


def _settings(given: Settings) -> RecallSettings:
    """``given`` as what runs takes it."""
    disk = remote = service = None
    if given.disk_path is not None:
        assert given.disk_size is not None
        marks = given.disk_watermarks
        disk = DiskConfig(
            given.disk_path,
            given.disk_size,
            marks.high,
            marks.low,
            given.direct_io,
            compression=given.disk_compression,
        )
    if given.remote is not None:
        options = {name: option for name, option in given.remote.items() if name != "kind"}
        remote = RemoteConfig(
            str(given.remote["kind"]),
            options,
            given.remote_write != "off",
            compression=given.remote_compression,
        )
    if given.backend == "service":
        service = ServiceConfig(given.socket or default_socket(), given.call_timeout)
    every = TenantTerms(given.tenant_quota.host, given.tenant_quota.disk, given.ttl)
    return RecallSettings(
        pool=PoolConfig(
            host_bytes=given.host_size,
            host_most_bytes=given.host_max_size or given.host_size,
            disk=disk,
            policy=given.policy,
            load_deadline_s=given.load_deadline,
            terms=PoolTerms(
                write_policy=given.write_policy,
                remote_write=given.remote_write,
                tenants=TenantRules(every, given.tenants),
                pin_limit=given.pin_limit,
                host_marks=given.host_watermarks,
                read_only=given.access == "read",
                read_only_namespaces=given.read_only_namespaces,
            ),
            encryption_key_file=given.encryption_key_file,
            remote=remote,
            lookup_deadline_s=given.lookup_deadline,
        ),
        backend=given.backend,
        access=given.access,
        async_write=given.async_write,
        appraise_loads=given.load_or_compute == "auto",
        handover_deadline_s=given.handover_deadline,
        admin_socket=given.admin_socket,
        service=service,
        audit_every=given.audit,
        match_unit=given.match_unit,
        explain_misses=given.explain_misses,
    )


def option_of(key: str) -> str:
    """The option of a setting on a command line."""
    return {"backend": "--pool-service"}.get(key, f"--{key.replace('_', '-')}")


def default_socket(runtime: Path = Path("/run/user")) -> Path:
    """The default socket of a user's pool service, the same for all processes of the user: below
    /run/user/UID if there is such a folder (of a login session, or of a user who lingers), because
    no program cleans that; otherwise below /tmp."""
    user = os.getuid()
    folder = runtime / str(user)
    try:
        status = folder.lstat()
    except OSError:
        status = None
    if status is not None and status.st_uid == user and status.st_mode & 0o777 == 0o700:
        return folder / "kvrecall" / "pool.sock"
    return Path(f"/tmp/kvrecall-{user}/pool.sock")


def service_settings(
    raw: Mapping[str, object], source: str | Callable[[str], str]
) -> tuple[PoolConfig, Path]:
    """The pool and the socket of a pool service. ``raw`` may also be its engines' settings. Raises
    ConfigError as RecallSettings.from_mapping."""
    given = Settings.read(raw, source, of_service=True)
    return _settings(given).pool, given.socket or default_socket()


def split_for_service(raw: Mapping[str, object]) -> tuple[dict[str, object], dict[str, object]]:
    """Splits the settings of an embedded pool for several engines: into those of a service with the
    pool, at ``admin_socket``, and those of the engines."""
    socket = str(RecallSettings.from_mapping(raw).admin_socket or default_socket())
    pool = {key: value for key, value in raw.items() if words_of(key).owner is Owner.POOL}
    pool |= {key: raw[key] for key in ("load_deadline", "lookup_deadline") if key in raw}
    pool.pop("admin_socket", None)
    engines = {key: value for key, value in raw.items() if words_of(key).owner is Owner.ENGINE}
    return pool | {"socket": socket}, engines | {"backend": "service", "socket": socket}


# Words: of errors, of --help, of the reference


_TYPES = {
    "string_type": "must be a string",
    "int_type": "must be a whole number",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "list_type": "must be a list",
    "dict_type": "must be an object",
    "mapping_type": "must be an object",
    "model_type": "must be an object",
    "model_attributes_type": "must be an object",
}


def allowed_by(detail: Mapping[str, Any], declared: FieldInfo | None) -> str:
    """The allowed values of a field that pydantic refused (``detail``), in words. ``declared``: the
    field, None if unknown."""
    kind, context = detail["type"], detail.get("ctx", {})
    if kind == "value_error":
        return str(context["error"]).replace("\n", " ")
    if kind.replace("_parsing", "_type") in _TYPES:  # of an option's text
        return _TYPES[kind.replace("_parsing", "_type")]
    if kind == "literal_error":
        choices = context["expected"].replace("'", "").replace(" or ", ", ")
        choices = choices.replace("False, True", "false, true")  # as JSON has them
        return f"allowed: {choices}"
    if kind in ("greater_than", "greater_than_equal", "less_than_equal", "finite_number"):
        bounds = [*(declared.metadata if declared else ()), SimpleNamespace(**context)]
        return f"allowed: {bounds_of(bounds) or 'a finite number'}"
    if kind in ("string_too_short", "too_short"):
        return "must not be empty"
    if kind in ("string_too_long", "too_long"):
        return f"must have at most {context['max_length']} characters or items"
    return str(detail["msg"])


def bounds_of(metadata: list[Any]) -> str:
    """The bounds of a number, in words; empty if there are none."""
    found = {
        name: getattr(bound, name)
        for bound in metadata
        for name in ("gt", "ge", "le")
        if hasattr(bound, name)
    }
    if "ge" in found and "le" in found:
        return f"{found['ge']} to {found['le']}"
    words = {"gt": "above", "ge": "at least", "le": "at most"}
    return ", ".join(f"{words[name]} {found[name]:g}" for name in words if name in found)


def words_of(key: str) -> SettingWords:
    extra: Any = Settings.model_fields[key].json_schema_extra
    return SettingWords(**extra)


def help_of(key: str) -> str:
    """The text of a setting for ``--help``, with its default."""
    text = (Settings.model_fields[key].description or "").replace("`", "")
    default = words_of(key).shown
    return text[0].upper() + text[1:] + "." + (f" Default: {default}." if default else "")


def is_loopback(host: str) -> bool:
    """Whether ``host``, a name or an address, is this machine's loopback interface."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def split_address(text: str) -> tuple[str, int] | None:
    """``host:port`` as a pair; None if the text has another form."""
    host, colon, port = text.rpartition(":")
    if not (colon and host and port.isdigit() and 0 < int(port) < 65536):
        return None
    return host.strip("[]"), int(port)


def factory_of(
    setting: str,
    name: str,
    known: Mapping[str, str],
    allowed: Sequence[str] = (),
    extras: Mapping[str, str] | None = None,
) -> Callable[..., Any]:
    """Imports what makes the thing called ``name``. Raises ConfigError.

    ``known``: the ``module:Factory`` behind each name; ``allowed``: names that the caller knows
    beside them; ``extras``: the optional part of kvrecall that brings what a name needs, for the
    cure in the error.
    """
    module_name, colon, attribute = known.get(name, name).partition(":")
    if not (colon and module_name and attribute):
        names = ", ".join((*allowed, *known))
        raise ConfigError(f"{setting} is {name!r}; allowed: {names}, or package.module:Factory")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        extra = (extras or {}).get(name)
        cure = f" (pip install 'kvrecall[{extra}]')" if extra else ""
        raise ConfigError(
            f"{setting} is {name!r}: cannot import {module_name}: {error}{cure}"
        ) from error
    factory = getattr(module, attribute, None)
    if not callable(factory):
        raise ConfigError(f"{setting} is {name!r}: {module_name} has no {attribute}")
    return factory  # type: ignore[no-any-return]
