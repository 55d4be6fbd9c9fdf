"""``VLLM_PLUGINS``: while it is set, vLLM loads only the plug-ins it names, of kvrecall's too."""

from __future__ import annotations

import logging
from collections.abc import Iterable, MutableMapping
from importlib.metadata import entry_points

from kvrecall.environment import PLUGINS

log = logging.getLogger("kvrecall.server")

_ON_DEMAND = "retrieval"
"""The plug-in whose name switches something on."""


def name_plugins(environ: MutableMapping[str, str], names: Iterable[str]) -> list[str]:
    """Has vLLM load the plug-ins ``names``, too, if it does not load all; those that were not named
    before."""
    given = environ.get(PLUGINS)
    if given is None:
        return []
    named = given.split(",") if given else []
    missing = [name for name in names if name not in named]
    environ[PLUGINS] = ",".join([*named, *missing])
    return missing


def name_own_plugins(environ: MutableMapping[str, str]) -> None:
    """Has vLLM load kvrecall's plug-ins that guard an engine, whatever ``VLLM_PLUGINS`` names."""
    given = environ.get(PLUGINS)
    own = (
        each.name
        for each in entry_points(group="vllm.general_plugins")
        if each.value.startswith("kvrecall.") and each.name != _ON_DEMAND
    )
    if added := name_plugins(environ, sorted(set(own))):
        log.info(
            "%s is %r: kvrecall serve adds its own plug-ins %s", PLUGINS, given, ", ".join(added)
        )
