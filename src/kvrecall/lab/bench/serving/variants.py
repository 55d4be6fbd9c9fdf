"""The servers a workload is played against: no pool, each kind of pool, and LMCache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvrecall.errors import EngineError
from kvrecall.lab.bench.serving.field import Servers, servers
from kvrecall.lab.bench.serving.stores import on_a_service, on_lmcache, on_mooncake


@dataclass(frozen=True, slots=True)
class Variant:
    """A way to serve: its name, what it is, and how its servers are started."""

    name: str
    story: str
    servers: Servers


HOST: dict[str, object] = {"host_size": 0}
DISK: dict[str, object] = {"host_size": 0, "disk_path": "", "disk_size": 0}

VARIANTS = (
    Variant(
        "none",
        "no pool, vLLM's prefix cache off",
        servers(arguments=("--no-pool", "--", "--no-enable-prefix-caching")),
    ),
    Variant(
        "device", "no pool, vLLM's prefix cache on the device", servers(arguments=("--no-pool",))
    ),
    Variant("host", "host memory below the device", servers(pool=HOST)),
    Variant("disk", "host memory and disk below the device", servers(pool=DISK)),
    Variant("mooncake", "host memory and a Mooncake Store on this host", on_mooncake),
    Variant("lmcache", "LMCache's multi-process connector, with the host's memory", on_lmcache),
    Variant("two", "two engines, a pool with half the memory each", servers(2, pool=HOST)),
    Variant("service", "two engines on one pool service", on_a_service),
)
"""In the order they are played. The last two have two engines on the same cores."""


def named(names: Sequence[str]) -> list[Variant]:
    """Variants by name. Raises EngineError for a name there is none of."""
    known = {variant.name: variant for variant in VARIANTS}
    for name in names:
        if name not in known:
            raise EngineError(f"there is no variant {name!r}; there are: {', '.join(known)}")
    return [known[name] for name in names]
