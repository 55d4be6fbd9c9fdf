"""The installed package of Mooncake: where it is, and which protocols its client is built for."""

from __future__ import annotations

import importlib.util
import mmap
from pathlib import Path

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
