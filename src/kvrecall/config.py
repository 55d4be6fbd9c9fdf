"""Typed settings of the pool. Parsed once at the edge; nothing below reads files or environment."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvrecall.errors import ConfigError

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
class PoolConfig:
    """Settings of an embedded pool."""

    host_bytes: int
    disk: DiskConfig | None = None
    policy: str = "lru"
    load_deadline_s: float = 10.0


@dataclass(frozen=True, slots=True)
class ServiceConfig:
    """Where an engine finds the node's pool service."""

    socket: Path
    call_timeout_s: float = 0.1  # the longest a call waits for the service


_GIB = 1024**3


@dataclass(frozen=True, slots=True)
class RecallSettings:
    """What a person sets: the connector's ``kv_connector_extra_config``, a pool.json, or options.

    See ``from_mapping`` for the names and defaults.
    """

    pool: PoolConfig
    backend: str = "embedded"
    async_write: bool = True
    appraise_loads: bool = True
    service: ServiceConfig | None = None  # with backend "service", which then owns ``pool``

    @classmethod
    def from_mapping(cls, raw: Mapping[str, object], source: str = "settings") -> RecallSettings:
        """Parses and checks a flat mapping. Unknown keys and wrong values raise ConfigError.

        backend       embedded (default): a pool in the engine's process; service: the node's
        socket        path of the service's socket, default /tmp/kvrecall-UID/pool.sock
        call_timeout  seconds an engine waits for an answer of the service, default 0.1
        host_size     size of the host arena, default 4GiB
        disk_path     folder of the disk tier; absent = no disk tier
        disk_size     hard limit of the disk tier, required with disk_path
        direct_io     bool, default true
        async_write   bool, default true: saves leave the critical path and are shed under
                      pressure; false: a reply ends only when its blocks are durable in the pool
        policy        eviction policy, default lru
        load_or_compute  auto (default): of a prefix, only what is expected to load faster than it
                      computes is loaded; load: whatever is found is loaded
        load_deadline seconds a request waits for blocks from below the host, default 10

        With backend=service the memory and the disk are settings of the service (``pool serve``),
        and errors here; without it ``socket`` and ``call_timeout`` are.
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
        return RecallSettings(
            pool=PoolConfig(
                host_bytes=self._size("host_size", 4 * _GIB),
                disk=self._disk(),
                policy=self._text("policy", "lru"),
                load_deadline_s=self._number("load_deadline", 10.0, 0.0, 3600.0),
            ),
            backend=backend,
            async_write=self._flag("async_write", True),
            appraise_loads=self._choice("load_or_compute", "auto", ("auto", "load")) == "auto",
            service=self._service() if backend == "service" else None,
        )

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
        return DiskConfig(
            path=Path(path),
            capacity_bytes=self._size("disk_size", 0),
            direct_io=self._flag("direct_io", True),
        )

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


def default_socket() -> Path:
    """Where a user's pool service listens if nothing else is said."""
    return Path(f"/tmp/kvrecall-{os.getuid()}/pool.sock")


_SERVICE_ONLY = frozenset("socket call_timeout".split())
_EMBEDDED_ONLY = frozenset("host_size disk_path disk_size direct_io policy".split())
_KNOWN_SETTINGS = frozenset(
    (
        "backend socket call_timeout host_size disk_path disk_size direct_io async_write policy "
        "load_deadline load_or_compute"
    ).split()
)
