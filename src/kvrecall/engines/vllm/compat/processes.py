"""What kvrecall sets in the processes of an engine: the plug-ins that vLLM loads there
(``VLLM_PLUGINS``: while it is set, only those it names, of kvrecall's too), and its log lines."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterable, MutableMapping
from importlib.metadata import entry_points

from kvrecall.environment import PLUGINS

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
    own = {
        each.name
        for each in entry_points(group="vllm.general_plugins")
        if each.value.startswith("kvrecall.") and each.name != _ON_DEMAND
    }
    if added := name_plugins(environ, sorted(own)):
        logging.getLogger("kvrecall.server").info(
            "%s is %r: kvrecall serve adds its own plug-ins %s", PLUGINS, given, ", ".join(added)
        )


def show_pool_lines() -> None:
    """Sends the lines of kvrecall's own loggers where vLLM's go, from its level on. vLLM configures
    only the logger ``vllm``, and without a handler Python shows warnings alone. No effect where a
    handler takes these lines already, or vLLM has none (``VLLM_CONFIGURE_LOGGING=0``)."""
    ours, theirs = logging.getLogger("kvrecall"), logging.getLogger("vllm")
    if not ours.hasHandlers() and theirs.handlers:
        ours.handlers += theirs.handlers
        ours.setLevel(theirs.level)
        ours.propagate = False


def end_with_parent() -> None:
    """Kills this process when its parent process ends. No effect without a parent process of
    ``multiprocessing``.

    Blocks that the pool has committed survive a kill, so nothing is lost.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        parent.join()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="kvrecall-parent-watch", daemon=True).start()
