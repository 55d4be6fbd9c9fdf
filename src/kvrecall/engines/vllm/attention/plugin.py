"""The ``vllm.general_plugins`` entry point, which vLLM calls in every one of its processes.

vLLM calls the plug-ins of all installed packages while ``VLLM_PLUGINS`` is unset, so this one acts
only if that variable names it, or under ``kvrecall serve --retrieval``.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING

from kvrecall.attention import PREFIX
from kvrecall.engines.vllm.compat.processes import name_plugins
from kvrecall.environment import PLUGINS, RETRIEVAL
from kvrecall.errors import EngineError

if TYPE_CHECKING:
    from kvrecall.attention.settings import RetrievalSettings

NAME = "retrieval"
logger = logging.getLogger("vllm.kvrecall")


def register() -> None:
    """Puts retrieval attention in place of vLLM's attention, if it was asked for."""
    from kvrecall.engines.vllm.identity import weights

    weights.register()  # VLLM_PLUGINS may name this plug-in and not that one
    if not is_requested(os.environ):
        _tell_unused(os.environ)
        return
    from kvrecall.attention.settings import RetrievalSettings
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
            "VLLM_PLUGINS (with any others), or unset them",
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


def active_settings() -> RetrievalSettings:
    """This engine's settings. Raises EngineError if retrieval is not on in this process,
    ConfigError for wrong settings."""
    from kvrecall.attention.settings import RetrievalSettings
    from kvrecall.engines.vllm.attention import checks
    from kvrecall.engines.vllm.compat.attention import overrides_attention

    if not overrides_attention(checks.backends()):
        raise EngineError(
            f"retrieval attention is not on in this process; name {NAME!r} in "
            "VLLM_PLUGINS before vLLM starts"
        )
    return RetrievalSettings.from_environ(os.environ)
