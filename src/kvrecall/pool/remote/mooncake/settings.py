"""Mooncake's own configuration (mooncake.json), and what its installed package can do of it."""

from __future__ import annotations

import importlib.util
import mmap
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvrecall.config import is_loopback, split_address
from kvrecall.errors import ConfigError
from kvrecall.jsonfile import read_json
from kvrecall.secret import MOONCAKE, refuse_open


@dataclass(frozen=True, slots=True)
class Option:
    """``text``: what it does; ``shown``: its default, in words."""

    text: str
    shown: str = ""


_REQUIRED = ("local_hostname", "metadata_server", "master_server_address")
_SIZES = {"global_segment_size": 3355443200, "local_buffer_size": 64 << 20}
_TEXTS = ("protocol", "device_name")
OPTIONS = {
    "config": Option("path of a mooncake.json; settings given with it take precedence"),
    "local_hostname": Option("address at which Mooncake reaches this host", "required"),
    "metadata_server": Option("Mooncake's metadata service, `P2PHANDSHAKE` for none", "required"),
    "master_server_address": Option("HOST:PORT of Mooncake's master", "required"),
    "protocol": Option("`tcp`, `rdma` or another of Mooncake's", "tcp"),
    "device_name": Option("RDMA devices, comma-separated"),
    "global_segment_size": Option(
        "memory this host lends to the cluster, bytes or a size (units are powers of 1024)",
        "3355443200",
    ),
    "local_buffer_size": Option(
        "memory for Mooncake's own transfers, in the same form", "67108864"
    ),
}
"""What kvrecall knows of mooncake.json, and its own ``config``."""
_TRANSPORTS = {
    "tcp": ("TcpTransport",),
    "rdma": ("RdmaTransport",),
    "rdma_twosided": ("RdmaTwoSidedTransport",),
    "ascend": ("AscendDirectTransport", "HcclTransport", "HeterogeneousRdmaTransport"),
    "ub": ("UbTransport",),
    "ubshmem": ("UBShmemTransport",),
    "barex": ("BarexTransport",),
    "cxi": ("CxiTransport",),
    "cxl": ("CxlTransport",),
    "efa": ("EfaTransport",),
    "hip": ("HipTransport",),
    "maca": ("MacaTransport",),
    "musa": ("MusaTransport",),
    "nvlink": ("NvlinkTransport",),
    "nvlink_intra": ("IntraNodeNvlinkTransport",),
    "sunrise_link": ("SunriseLinkTransport",),
}
"""The classes of Mooncake's that carry each protocol (multi_transport.cpp). Which of them a build
contains is decided when it is compiled; their names are in its binary."""

_WITHOUT_ENGINE = "rpc_only"  # of Mooncake's store, not of its engine
_LOOPBACK = "lo"
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)i?b?", re.IGNORECASE)
_SET_UP_AS = {"device_name": "rdma_devices", "master_server_address": "master_server_addr"}


@dataclass(frozen=True, slots=True)
class MooncakeSettings:
    """The setup of Mooncake's client. ``setup``: keys and values as
    ``MooncakeDistributedStore.setup`` takes them; keys unknown to kvrecall pass through unchanged.
    ``master``: host and port of the master. ``device``: the network interface that the client's
    ports are for: loopback, if ``local_hostname`` is; otherwise "", all."""

    setup: Mapping[str, str]
    master: tuple[str, int]
    device: str

    @property
    def doubt(self) -> str:
        """Why the installed client cannot do what is set up, with the cure; "" if it can."""
        why = why_unfit(self.setup["protocol"])
        return f"remote: protocol is {self.setup['protocol']!r}; {why}" if why else ""

    @classmethod
    def of(cls, options: Mapping[str, object]) -> MooncakeSettings:
        """Reads ``options["config"]``, a mooncake.json, and the other options, which override it.

        Raises ConfigError: also where a key is missing or of a wrong type.
        """
        values = dict(options)
        values.pop("allow_plaintext", None)  # every store's
        source, file = "remote", values.pop("config", None)
        if file is not None:
            if not isinstance(file, str):
                raise ConfigError(f"remote: config is {file!r}; it must be the path of a file")
            source, values = file, {**_read(Path(file)), **values}
        refuse_open(values, source, MOONCAKE)  # which would print it, and has it in argv
        for name in _REQUIRED:
            value = values.get(name)
            if not isinstance(value, str) or not value.strip():
                raise ConfigError(
                    f"{source}: {name} is {value!r}; it must be a string, as in Mooncake"
                )
        for name, value in values.items():
            if name in _TEXTS and not isinstance(value, str):
                raise ConfigError(f"{source}: {name} is {value!r}; it must be a string")
            if not isinstance(value, str | int | float | bool):
                raise ConfigError(f"{source}: {name} is {value!r}; it must be a string or a number")
        text = str(values["master_server_address"])
        master = split_address(text)
        if master is None:
            raise ConfigError(
                f"{source}: master_server_address is {text!r}; write host:port, e.g. "
                "127.0.0.1:50051"
            )
        host = str(values["local_hostname"])  # which may carry a port
        if host.count(":") == 1 and (parts := split_address(host)) is not None:
            host = parts[0]
        return cls(_as_setup(values, source), master, _LOOPBACK if is_loopback(host) else "")


def _read(path: Path) -> dict[str, object]:
    if not path.is_file():
        raise ConfigError(f"remote: config: there is no file {path}")
    document = read_json(path)
    if not isinstance(document.value, dict):
        raise ConfigError(f"{document.where(())}: must hold an object, Mooncake's mooncake.json")
    return document.value


def _as_setup(values: Mapping[str, object], source: str) -> dict[str, str]:
    setup = {"protocol": "tcp", "device_name": ""}
    for name, value in values.items():
        setup[name] = str(value).lower() if isinstance(value, bool) else str(value)
    for name, default in _SIZES.items():
        setup[name] = str(_bytes(values.get(name, default), f"{source}: {name}"))
    return {_SET_UP_AS.get(name, name): value for name, value in setup.items()}


def _bytes(value: object, name: str) -> int:
    """A size as Mooncake reads it: a number of bytes, or a string with units that are powers of
    1024."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        raise ConfigError(f"{name} is {value!r}; write bytes (268435456) or a size (4GB)")
    number, unit = match.groups()
    return int(float(number) * 1024 ** "_kmgt".index(unit.lower() or "_"))


def package_folder() -> Path | None:
    """Where Mooncake's package is installed; None if it is not."""
    spec = importlib.util.find_spec("mooncake")
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(spec.submodule_search_locations[0])


def built_protocols(binary: Path) -> list[str]:
    """The protocols that ``binary``, Mooncake's client, contains. Raises OSError."""
    with binary.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as code:
        return [
            protocol
            for protocol, classes in _TRANSPORTS.items()
            # with the length of its name before it, as C++ writes the name of a type
            if any(code.find(f"{len(name)}{name}E".encode()) >= 0 for name in classes)
        ]


def why_unfit(protocol: str) -> str:
    """Why the installed client cannot use ``protocol``, with the cure; "" if it can, or if that is
    unknown: several protocols at once, no package."""
    folder = package_folder()
    if folder is None or "," in protocol or protocol == _WITHOUT_ENGINE:
        return ""
    if protocol not in _TRANSPORTS:
        return f"kvrecall knows no such protocol of Mooncake; known: {', '.join(_TRANSPORTS)}"
    try:
        built = built_protocols(folder / "store.so")
    except (OSError, ValueError):  # another layout; an empty file
        return ""
    if not built or protocol in built:
        return ""
    return (
        f"the Mooncake client installed here is built for {', '.join(built)} and not for "
        f"{protocol}: the remote tier stays off. Install a build of Mooncake with {protocol}, or "
        "set protocol to one of these"
    )
