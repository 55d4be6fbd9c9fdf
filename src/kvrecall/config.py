"""Typed settings of the pool. Parsed once at the edge; nothing below reads files or environment."""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kvrecall.block import Tenant, is_tenant, tenant_of
from kvrecall.errors import ConfigError

DEFAULT_POLICY = "hazard"  # of eviction
DEFAULT_AUDIT_EVERY = 4096  # hits
_UNITS = {"": 1, "b": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)(b?)\s*", re.IGNORECASE)


def parse_size(value: str | int | float, name: str) -> int:
    """Bytes of ``8GiB``, ``"4GB"``, ``1.5g`` or a plain number of bytes.

    ``KiB, MiB, GiB, TiB`` are powers of 1024; ``KB, MB, GB, TB`` and the bare letters are powers
    of 1000. Raises ConfigError naming the setting ``name``.
    """
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ConfigError(f"{name}: {value!r} is not a size; write for example 8GiB or 8589934592")
    match = _SIZE.fullmatch(str(value))
    if match is None:
        raise ConfigError(f"{name}: {value!r} is not a size; write for example 8GiB or 500MB")
    number, unit, binary, _ = match.groups()
    power = "bkmgt".index(unit.lower() or "b")
    return int(float(number) * (1024**power if binary else _UNITS[unit.lower()]))


_AGE = re.compile(r"(\d+(?:\.\d+)?)\s*([smhd]?)")
_AGE_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def parse_age(value: object, name: str) -> float:
    """Seconds of ``90m``, ``12h``, ``30d`` or a plain number. ConfigError naming ``name``."""
    text = str(value) if isinstance(value, str | int | float) and value is not True else ""
    match = _AGE.fullmatch(text.strip().lower())
    if match is None or float(match[1]) <= 0:
        raise ConfigError(f"{name}: {value!r} is no age; write for example 90m, 12h or 7d")
    return float(match[1]) * _AGE_UNITS[match[2]]


def parse_tenant(text: str, name: str) -> Tenant:
    """A tenant as ``pool ls`` prints it, or ``salt:`` and the requests' ``cache_salt``."""
    if text.startswith("salt:") and len(text) > 5:
        return tenant_of(text[5:])
    if not is_tenant(text):
        raise ConfigError(
            f"{name}: {text!r} is no tenant; write 16 hex digits as in `kvrecall pool ls --by "
            "tenant`, salt:SALT, or - for requests without a salt"
        )
    return Tenant(text)


@dataclass(frozen=True, slots=True)
class Watermarks:
    """Shares of the room: something begins above ``high`` and stops at ``low``."""

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
    """What one tenant may have; None: no limit. ``ttl_s``: seconds without use until its blocks
    are dropped."""

    host: Amount | None = None
    disk: Amount | None = None
    ttl_s: float | None = None


@dataclass(frozen=True, slots=True)
class TenantRules:
    """Terms by tenant. ``named`` stands for all of a tenant's terms, ``default`` for all others."""

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
    max_queued_bytes: int = 512 << 20  # writes waiting; beyond it stores are shed
    readers: int = 4  # threads


@dataclass(frozen=True, slots=True)
class PoolTerms:
    """Who may keep what in a pool, and what is written when."""

    write_policy: str = "through"
    remote_write: str = "through"
    tenants: TenantRules = TenantRules()
    pin_limit: float = 0.5  # share of a tier that pinned blocks may take
    host_marks: Watermarks = Watermarks(1.0, 1.0)  # eviction ahead of need; 1: none
    unwritten_marks: Watermarks = Watermarks(0.5, 0.4)  # of the host, with write_policy back


@dataclass(frozen=True, slots=True)
class RemoteConfig:
    """Settings of the remote tier: the kind of its store, whose own ``options`` only that kind
    understands, and how it is used."""

    kind: str
    options: Mapping[str, object] = field(default_factory=dict)
    writes: bool = True  # False: blocks are only read
    max_queued_bytes: int = 256 << 20  # blocks waiting to be stored; beyond it they are shed
    call_deadline_s: float = 5.0  # a call of the store that takes longer makes the tier pause
    threads: int = 2  # for each direction


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """Settings of an embedded pool."""

    host_bytes: int
    disk: DiskConfig | None = None
    policy: str = DEFAULT_POLICY
    load_deadline_s: float = 10.0
    terms: PoolTerms = PoolTerms()
    encryption_key_file: Path | None = None  # seals what lies on disk or leaves the host
    remote: RemoteConfig | None = None
    lookup_deadline_s: float = 0.05  # the longest a request waits for the remote tier's answer
    host_most_bytes: int = 0  # what the host may be resized to while running; 0 = ``host_bytes``


@dataclass(frozen=True, slots=True)
class ServiceConfig:
    """Where an engine finds the node's pool service."""

    socket: Path
    call_timeout_s: float = 0.1  # the longest a call waits for the service


_GIB = 1024**3
WRITE_POLICIES = ("through", "back", "selective")
REMOTE_WRITES = ("through", "back", "off")


@dataclass(frozen=True, slots=True)
class RecallSettings:
    """What a person sets: the connector's ``kv_connector_extra_config``, a pool.json, or options.

    See ``from_mapping`` for the names and defaults.
    """

    pool: PoolConfig
    backend: str = "embedded"
    async_write: bool = True
    appraise_loads: bool = True
    handover_deadline_s: float = 2.0
    admin_socket: Path | None = None
    service: ServiceConfig | None = None  # with backend "service", which then owns ``pool``
    retrieval: Mapping[str, object] | None = None  # RetrievalSettings', as given
    audit_every: int | None = DEFAULT_AUDIT_EVERY  # hits; 0: only first ones; None: no audits

    @classmethod
    def from_mapping(cls, raw: Mapping[str, object], source: str = "settings") -> RecallSettings:
        """Parses and checks a flat mapping. Unknown keys and wrong values raise ConfigError.

        backend       embedded (default): a pool in the engine's process; service: the node's
        socket        path of the service's socket, default /tmp/kvrecall-UID/pool.sock
        call_timeout  seconds an engine waits for an answer of the service, default 0.1
        admin_socket  where an embedded pool can be asked what is in it (kvrecall pool stat, ls);
                      absent = nowhere
        host_size     size of the host arena, default 4GiB
        host_max_size how far ``pool resize`` may let it grow while running, default host_size.
                      What is above host_size is address space until then; a GPU's driver, which
                      pins the arena, takes all of it at the start
        disk_path     folder of the disk tier; absent = no disk tier
        disk_size     hard limit of the disk tier, required with disk_path
        direct_io     bool, default true
        async_write   bool, default true: saves leave the critical path and are shed under
                      pressure; false: a reply ends only when its blocks are durable in the pool
        policy        eviction policy, default hazard
        write_policy  through (default): every block is written to disk at once; back: when it is
                      about to leave the host; selective: when it was asked for a second time
        ttl           12h, 30d: drop blocks not used for so long; default never
        tenant_quota  how much of each tier one tenant (cache_salt) may hold: "25%", "4GiB", or
                      {"host": ..., "disk": ...}; default no limit
        tenants       {TENANT: {"host": .., "disk": .., "ttl": ..}}: own terms of some tenants, in
                      place of tenant_quota and ttl; what is left out is unlimited
        pin_limit     share of a tier that may be pinned, default 0.5
        host_watermarks, disk_watermarks  [high, low], shares of the tier: eviction begins above
                      high and stops at low; default [1, 1] and [0.95, 0.9]
        unwritten_watermarks  [high, low], shares of the host: with write_policy back, blocks are
                      written when more than high is unwritten, until low is; default [0.5, 0.4]
        encryption_key_file  file with the key that blocks below the host are sealed with
                      (AES-256-GCM); absent = blocks lie there as they are
        load_or_compute  auto (default): of a prefix, only what is expected to load faster than it
                      computes is loaded; load: whatever is found is loaded
        load_deadline seconds a request waits for blocks from below the host, default 10
        handover_deadline  seconds a decode instance waits for blocks that a prefill instance has
                      promised, before it computes them itself, default 2
        remote        the store beyond this host: an object with its ``kind`` (mooncake, objects or
                      package.module:Factory) and the options of that kind; absent = none
        remote_write  through (default): blocks are stored there as they come; back: when they
                      are about to leave the host's memory, and when the pool closes; off: only read
        lookup_deadline  seconds a request waits to hear what the remote store has, default 0.05
        audit         one hit in so many is computed and compared with the pool's blocks, default
                      4096, beside the first hit on blocks of every writer that this engine has
                      not proved yet; 0 = only these; off = none: blocks are believed unseen
        retrieval     mapping: settings of retrieval attention, instead of VLLM_RETRIEVAL_*

        With backend=service the memory, the disk and the remote store are settings of the service
        (``pool serve``), and errors here; without it ``socket`` and ``call_timeout`` are.
        """
        return _SettingsReader(raw, source).read()


class _SettingsReader:
    """Takes known keys out of a mapping one by one; what is left over is an error."""

    def __init__(self, raw: Mapping[str, object], source: str) -> None:
        self._left = dict(raw)
        self._source = source

    def read(self) -> RecallSettings:
        known = sorted(_KNOWN_SETTINGS)
        for key in self._left:
            if key not in _KNOWN_SETTINGS:
                close = difflib.get_close_matches(key, known, 1)
                hint = f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(known)}"
                raise ConfigError(f"{self._source}: unknown setting {key!r}{hint}")
        backend = self._choice("backend", "embedded", ("embedded", "service"))
        for key in _EMBEDDED_ONLY if backend == "service" else _SERVICE_ONLY:
            if key in self._left:
                raise self._fail(key, self._left[key], f"it has no effect with backend {backend!r}")
        host_bytes = self._size("host_size", 4 * _GIB)
        return RecallSettings(
            pool=PoolConfig(
                host_bytes=host_bytes,
                host_most_bytes=self._host_most(host_bytes),
                disk=self._disk(),
                policy=self._text("policy", DEFAULT_POLICY),
                load_deadline_s=self._number("load_deadline", 10.0, 0.0, 3600.0),
                terms=self._pool_terms(),
                encryption_key_file=self._path("encryption_key_file"),
                remote=self._remote(),
                lookup_deadline_s=self._number("lookup_deadline", 0.05, 0.0, 60.0),
            ),
            backend=backend,
            async_write=self._flag("async_write", True),
            appraise_loads=self._choice("load_or_compute", "auto", ("auto", "load")) == "auto",
            handover_deadline_s=self._number("handover_deadline", 2.0, 0.0, 600.0),
            admin_socket=self._path("admin_socket"),
            service=self._service() if backend == "service" else None,
            retrieval=self._mapping("retrieval"),
            audit_every=self._audit(),
        )

    def _audit(self) -> int | None:
        value = self._left.get("audit", DEFAULT_AUDIT_EVERY)
        if value == "off":
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self._fail("audit", value, 'it must be a number of hits, 0 or "off"')
        return value

    def _host_most(self, host_bytes: int) -> int:
        most = self._size("host_max_size", host_bytes)
        if most < host_bytes:
            raise self._fail(
                "host_max_size", self._left["host_max_size"], "it must not be below host_size"
            )
        return most

    def _service(self) -> ServiceConfig:
        return ServiceConfig(
            socket=Path(self._text("socket", str(default_socket()))),
            call_timeout_s=self._number("call_timeout", 0.1, 0.0, 60.0),
        )

    def _disk(self) -> DiskConfig | None:
        path = self._text("disk_path", "")
        if not path:
            if "disk_size" in self._left:
                raise ConfigError(f"{self._source}: disk_size is set but disk_path is not")
            return None
        if "disk_size" not in self._left:
            raise ConfigError(
                f"{self._source}: disk_path is set but disk_size is not; the disk tier needs a "
                "hard limit, for example disk_size=100GiB"
            )
        marks = self._marks("disk_watermarks", Watermarks(0.95, 0.90))
        return DiskConfig(
            path=Path(path),
            capacity_bytes=self._size("disk_size", 0),
            high_watermark=marks.high,
            low_watermark=marks.low,
            direct_io=self._flag("direct_io", True),
        )

    def _pool_terms(self) -> PoolTerms:
        return PoolTerms(
            write_policy=self._choice("write_policy", "through", WRITE_POLICIES),
            remote_write=self._choice("remote_write", "through", REMOTE_WRITES),
            tenants=self._tenants(),
            pin_limit=self._number("pin_limit", 0.5, 0.0, 1.0),
            host_marks=self._marks("host_watermarks", Watermarks(1.0, 1.0)),
            unwritten_marks=self._marks("unwritten_watermarks", Watermarks(0.5, 0.4)),
        )

    def _tenants(self) -> TenantRules:
        ttl = self._left.get("ttl")
        ttl_s = None if ttl in (None, "") else parse_age(ttl, f"{self._source}: ttl")
        quota = self._left.get("tenant_quota")
        if not isinstance(quota, dict):
            quota = {} if quota is None else {"host": quota, "disk": quota}
        default = self._terms("tenant_quota", quota, ("host", "disk"))
        named = self._left.get("tenants", {})
        if not isinstance(named, dict):
            raise self._fail("tenants", named, "it must be an object: {TENANT: {...}}")
        terms = {}
        for name, what in named.items():
            tenant = parse_tenant(str(name), f"{self._source}: tenants")
            if not isinstance(what, dict):
                raise self._fail(f"tenants.{name}", what, 'it must be {"host": .., "disk": ..}')
            terms[tenant] = self._terms(f"tenants.{name}", what, ("host", "disk", "ttl"))
        return TenantRules(TenantTerms(default.host, default.disk, ttl_s), terms)

    def _terms(self, name: str, raw: Mapping[str, object], known: tuple[str, ...]) -> TenantTerms:
        for key in raw:
            if key not in known:
                raise self._fail(f"{name}.{key}", raw[key], f"known here: {', '.join(known)}")
        source = f"{self._source}: {name}"
        ttl = raw.get("ttl")
        return TenantTerms(
            _amount(raw.get("host"), f"{source}: host"),
            _amount(raw.get("disk"), f"{source}: disk"),
            None if ttl is None else parse_age(ttl, f"{source}: ttl"),
        )

    def _marks(self, key: str, default: Watermarks) -> Watermarks:
        value = self._left.get(key)
        if value is None:
            return default
        right = (
            isinstance(value, list)
            and len(value) == 2
            and all(isinstance(x, int | float) and not isinstance(x, bool) for x in value)
            and 0 < value[1] <= value[0] <= 1
        )
        if not right:
            raise self._fail(key, value, "it must be [high, low] with 0 < low <= high <= 1")
        assert isinstance(value, list)
        return Watermarks(float(value[0]), float(value[1]))

    def _remote(self) -> RemoteConfig | None:
        value = self._left.get("remote")
        if value is None:
            if "remote_write" in self._left:
                raise ConfigError(f"{self._source}: remote_write is set but remote is not")
            return None
        if not isinstance(value, Mapping) or not isinstance(value.get("kind"), str):
            raise self._fail("remote", value, 'it must be an object such as {"kind": "mooncake"}')
        options = {name: option for name, option in value.items() if name != "kind"}
        writes = self._choice("remote_write", "through", REMOTE_WRITES) != "off"
        return RemoteConfig(str(value["kind"]), options, writes)

    def _fail(self, key: str, value: object, allowed: str) -> ConfigError:
        return ConfigError(f"{self._source}: {key} is {value!r}; {allowed}")

    def _size(self, key: str, default: int) -> int:
        value = self._left.get(key, default)
        nbytes = parse_size(value, f"{self._source}: {key}")  # type: ignore[arg-type]
        if nbytes <= 0:
            raise self._fail(key, value, "it must be more than 0")
        return nbytes

    def _flag(self, key: str, default: bool) -> bool:
        value = self._left.get(key, default)
        if not isinstance(value, bool):
            raise self._fail(key, value, "allowed: true, false")
        return value

    def _text(self, key: str, default: str) -> str:
        value = self._left.get(key, default)
        if not isinstance(value, str):
            raise self._fail(key, value, "it must be a string")
        return value

    def _mapping(self, key: str) -> Mapping[str, object] | None:
        value = self._left.get(key)
        if value is not None and not isinstance(value, Mapping):
            raise self._fail(key, value, "it must be a mapping of settings, {} for the defaults")
        return value

    def _path(self, key: str) -> Path | None:
        if key not in self._left:
            return None
        text = self._text(key, "")
        if not text:
            raise self._fail(key, text, "it must be the path of a file")
        return Path(text).expanduser()

    def _choice(self, key: str, default: str, allowed: tuple[str, ...]) -> str:
        value = self._text(key, default)
        if value not in allowed:
            raise self._fail(key, value, f"allowed: {', '.join(allowed)}")
        return value

    def _number(self, key: str, default: float, low: float, high: float) -> float:
        value = self._left.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._fail(key, value, "it must be a number")
        if not low < value <= high:
            raise self._fail(key, value, f"allowed: above {low:g}, at most {high:g}")
        return float(value)


def _amount(value: object, name: str) -> Amount | None:
    """``25%`` of a tier, or a size."""
    if value is None:
        return None
    text = str(value).strip()
    if text.endswith("%"):
        try:
            share = float(text[:-1]) / 100
        except ValueError:
            share = math.nan
        if not 0 < share <= 1:
            raise ConfigError(f"{name}: {value!r}; a share must be above 0% and at most 100%")
        return Amount(share=share)
    nbytes = parse_size(value, name)  # type: ignore[arg-type]
    if nbytes <= 0:
        raise ConfigError(f"{name}: {value!r}; it must be more than 0")
    return Amount(nbytes)


def default_socket() -> Path:
    """Where a user's pool service listens if nothing else is said."""
    return Path(f"/tmp/kvrecall-{os.getuid()}/pool.sock")


_SERVICE_ONLY = frozenset("socket call_timeout".split())
_EMBEDDED_ONLY = frozenset(
    (
        "host_size host_max_size disk_path disk_size direct_io policy encryption_key_file remote "
        "remote_write write_policy ttl tenant_quota tenants pin_limit host_watermarks "
        "disk_watermarks unwritten_watermarks admin_socket"
    ).split()
)
_KNOWN_SETTINGS = (
    _EMBEDDED_ONLY
    | _SERVICE_ONLY
    | frozenset(
        (
            "backend async_write load_deadline load_or_compute lookup_deadline retrieval "
            "handover_deadline audit"
        ).split()
    )
)
