"""The ``vllm.general_plugins`` entry point, called by vLLM in every one of its processes.

vLLM calls the plug-ins of all installed packages while ``VLLM_PLUGINS`` is unset, so this one acts
only if it is named there.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from kvrecall.errors import EngineError
from kvrecall.retrieval.settings import RetrievalSettings

NAME = "retrieval"

_BACKEND = "kvrecall.engines.vllm.retrieval.backend.RetrievalBackend"
_REFUSAL = "kvrecall.engines.vllm.retrieval.checks.LatentAttentionRefused"
_active: list[RetrievalSettings] = []


def register() -> None:
    """Puts retrieval attention in place of vLLM's CPU attention, if it was asked for."""
    if not asked_for(os.environ):
        return
    from kvrecall.engines.vllm import compat

    _active[:] = [RetrievalSettings.from_environ(os.environ)]
    compat.require_cpu_attention()
    compat.override_cpu_attention(_BACKEND, _REFUSAL)


def asked_for(environ: Mapping[str, str]) -> bool:
    """Whether ``VLLM_PLUGINS`` names this plug-in."""
    return NAME in [name.strip() for name in environ.get("VLLM_PLUGINS", "").split(",")]


def active_settings() -> RetrievalSettings:
    """The settings read when the plug-in was switched on in this process."""
    if not _active:
        raise EngineError(
            f"retrieval attention is not on in this process; name {NAME!r} in "
            "VLLM_PLUGINS before vLLM starts"
        )
    return _active[0]
