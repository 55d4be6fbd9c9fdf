"""A node: a pool service with Mooncake below it, and the settings of engines on them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvrecall.processes.service import Master, ServiceProcess

_ENGINE = {
    "async_write": False,  # what is answered is in the lower tier
    "load_or_compute": "load",
    "lookup_deadline": 5,  # a busy machine is no reason to compute
}
POOL: Mapping[str, Any] = {"host_size": "256MiB", **_ENGINE}
"""Settings of an engine with a pool of its own."""

_HOST_BYTES = 256 << 20
_LENT_BYTES = 128 << 20
_CALL_S = 10


@dataclass(frozen=True, slots=True)
class Node:
    """``service``: holds the memory that Mooncake has. ``master``: None without Mooncake."""

    service: ServiceProcess
    master: Master | None

    @property
    def joined(self) -> dict[str, Any]:
        """Settings of an engine on the service."""
        socket = str(self.service.socket)
        return {**_ENGINE, "backend": "service", "socket": socket, "call_timeout": _CALL_S}

    @property
    def apart(self) -> dict[str, Any]:
        """Settings of an engine with a pool of its own on the same Mooncake, to which it lends no
        memory."""
        assert self.master is not None
        return {**POOL, "remote": _mooncake(self.master, 0)}


@contextmanager
def node(folder: Path, mooncake: bool) -> Iterator[Node]:
    """Starts it; ``mooncake``: with a master of its own. Raises TierError."""
    folder.mkdir(parents=True)
    with ExitStack() as stack:
        master, below = None, {}
        if mooncake:
            master = Master(folder / "master.log")
            stack.callback(master.stop)
            master.start()
            below = {"remote": _mooncake(master, _LENT_BYTES)}
        service = ServiceProcess(folder / "service", _HOST_BYTES, more=below)
        yield Node(stack.enter_context(service), master)


def _mooncake(master: Master, lent: int) -> dict[str, object]:
    return {"kind": "mooncake", **master.options(lent)}
