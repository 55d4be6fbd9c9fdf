"""How vLLM's engine and worker processes wait for each other on a CPU, and end.

For a second after each message they poll, and yield the processor by ``sched_yield`` in between.
With few cores that takes the processor from threads that compute. If one process is alone on its
core with it, some kernels (Linux 6.18 here) schedule wrongly: other runnable threads did not run
for up to 78 s (archive/log.md). A sleep of a microsecond costs a step some 0.1 ms and leaves the
processor to the others.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Mapping, MutableMapping

from kvrecall.engines.vllm.compat import patches
from kvrecall.engines.vllm.compat.processes import end_with_parent
from kvrecall.engines.vllm.compat.versions import is_refused
from kvrecall.environment import WAITS, WITH_PARENT
from kvrecall.errors import ConfigError

_SLEEP_S = 1e-6


def register() -> None:
    """The ``vllm.general_plugins`` entry point: sleeps if enabled by name; an engine core ends with
    the server that asked for it."""
    name = multiprocessing.current_process().name
    if os.environ.get(WITH_PARENT) == "1" and name.startswith("EngineCore"):
        end_with_parent()
    if _choice(os.environ) == "sleep" and not is_refused():
        _sleep_on_cpus()


def install() -> None:
    """Makes this process of an engine with the connector sleep, unless spinning is configured."""
    if _choice(os.environ) != "spin":
        _sleep_on_cpus()


def ask(environ: MutableMapping[str, str]) -> None:
    """Enables sleeping in processes started later, unless configured otherwise."""
    environ.setdefault(WAITS, "sleep")


def _choice(environ: Mapping[str, str]) -> str:
    choice = environ.get(WAITS, "")
    if choice not in ("", "sleep", "spin"):
        raise ConfigError(f"{WAITS} is {choice!r}; it must be sleep or spin")
    return choice


def _sleep_on_cpus() -> None:
    from kvrecall.engines.vllm.compat.config import is_on_cpu  # pulls the pool in

    if is_on_cpu():
        patches.install("sleep", lambda plain: _sleep)


def _sleep() -> None:
    time.sleep(_SLEEP_S)
