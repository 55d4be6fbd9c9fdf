"""The ``vllm.general_plugins`` entry point, which vLLM calls in every one of its processes.

vLLM calls the plug-ins of all installed packages while ``VLLM_PLUGINS`` is unset, so this one acts
only if that variable names it, or under ``kvrecall serve --retrieval``.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
from collections.abc import Mapping, MutableMapping
from typing import Any

from kvrecall.attention.settings import PREFIX, RetrievalSettings
from kvrecall.engines.vllm.compat.processes import name_plugins
from kvrecall.environment import PLUGINS, RETRIEVAL
from kvrecall.errors import ConfigError, EngineError

NAME = "retrieval"
logger = logging.getLogger("vllm.kvrecall")


def register() -> None:
    """Puts retrieval attention in place of vLLM's attention, if it was asked for."""
    from kvrecall.engines.vllm.identity import weights

    weights.register()  # VLLM_PLUGINS may name this plug-in and not that one
    if not is_requested(os.environ):
        _tell_unused(os.environ)
        return
    from kvrecall.engines.vllm.attention import checks
    from kvrecall.engines.vllm.compat import attention, scheduler
    from kvrecall.engines.vllm.wire import StepReport

    RetrievalSettings.from_environ(os.environ)  # raises ConfigError before the engine starts
    attention.require_attention()
    attention.override_attention(checks.backends())
    attention.override_kv_cache_spec(checks.require_retrieval)
    scheduler.reschedule_lost(StepReport)


def _tell_unused(environ: Mapping[str, str]) -> None:
    """Logs in an engine's first process that settings of retrieval are without effect."""
    unused = sorted(name for name in environ if name.startswith(PREFIX))
    if unused and multiprocessing.parent_process() is None:
        logger.warning(
            "kvrecall: retrieval attention is off, so settings have no effect: %s; name `%s` in "
            "VLLM_PLUGINS (beside any others), or unset them",
            ", ".join(unused),
            NAME,
        )


def is_requested(environ: Mapping[str, str]) -> bool:
    """Whether retrieval attention is to be on."""
    named = NAME in [name.strip() for name in environ.get(PLUGINS, "").split(",")]
    return named or environ.get(RETRIEVAL) == "1"


def ask(environ: MutableMapping[str, str]) -> None:
    """Asks for retrieval attention in processes yet to be started with this environment."""
    environ[RETRIEVAL] = "1"
    name_plugins(environ, [NAME])


def active_settings(vllm_config: Any) -> RetrievalSettings:
    """This engine's settings: of the connector's extra config, else of the environment.

    Raises EngineError if retrieval is not on in this process, ConfigError for wrong settings.
    """
    from kvrecall.engines.vllm.attention import checks
    from kvrecall.engines.vllm.compat.attention import overrides_attention

    if not overrides_attention(checks.backends()):
        raise EngineError(
            f"retrieval attention is not on in this process; name {NAME!r} in "
            "VLLM_PLUGINS before vLLM starts"
        )
    return settings_of(vllm_config, os.environ)


def settings_of(vllm_config: Any, environ: Mapping[str, str]) -> RetrievalSettings:
    """As ``active_settings``, whether it is on or not."""
    transfer = vllm_config.kv_transfer_config
    extra = (transfer.kv_connector_extra_config or {}) if transfer is not None else {}
    raw = extra.get("retrieval")
    if raw is not None and not isinstance(raw, Mapping):
        raise ConfigError(f"kv_connector_extra_config.retrieval is {raw!r}; it must be a mapping")
    if not raw:
        return RetrievalSettings.from_environ(environ)
    both = sorted(name for name in environ if name.startswith(PREFIX))
    if both:
        raise ConfigError(
            f"retrieval is set both in kv_connector_extra_config and by {', '.join(both)}; "
            "use one of the two"
        )
    return RetrievalSettings.from_mapping(raw, "kv_connector_extra_config.retrieval")


def require_on(vllm_config: Any, environ: Mapping[str, str]) -> None:
    """Raises ConfigError if the extra config has retrieval's settings, and it is not on."""
    extra = vllm_config.kv_transfer_config.kv_connector_extra_config or {}
    if extra.get("retrieval") is not None and not is_requested(environ):
        raise ConfigError(
            "kv_connector_extra_config.retrieval has settings of retrieval attention, but it is "
            f"not on: set VLLM_PLUGINS={NAME} (beside any others), or remove them"
        )
