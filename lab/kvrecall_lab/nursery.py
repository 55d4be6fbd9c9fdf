"""``python -m kvrecall_lab.nursery``: runs tests in children of a process that has imported what
they need besides kvrecall, which takes most of their time.

Each line of its input is JSON: ``source``, which comes first on the path, ``arguments`` of pytest,
``log``, and the child's ``most_cpu_s``. Each line of its output is JSON, too: ``status`` and
processor seconds ``cpu_s``. It must not import kvrecall itself.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import resource
import runpy
import sys
from typing import Any

_PRELOADED = "hypothesis numpy pytest torch xxhash msgspec fastapi httpx".split()
_ENGINE = "vllm vllm.v1.engine.core vllm.v1.worker.cpu_model_runner vllm.v1.core.sched.scheduler"


def main() -> None:
    runpy.run_path("conftest.py")  # its environment, before anything is imported
    for name in _PRELOADED:
        importlib.import_module(name)
    ready = False
    for line in sys.stdin:
        order = json.loads(line)
        if order.pop("engine") and not ready:
            ready = True
            for name in _ENGINE.split():
                with contextlib.suppress(ImportError):
                    importlib.import_module(name)
        print(json.dumps(_ran(**order)), flush=True)


def _ran(most_cpu_s: int, source: str, arguments: list[str], log: str) -> dict[str, Any]:
    child = os.fork()
    if not child:
        resource.setrlimit(resource.RLIMIT_CPU, (most_cpu_s, most_cpu_s + 1))
        _run(source, arguments, log)
    _, status, used = os.wait4(child, 0)
    return {"status": os.waitstatus_to_exitcode(status), "cpu_s": used.ru_utime + used.ru_stime}


def _run(source: str, arguments: list[str], log: str) -> None:
    """In the child; never returns."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for fd, to in ((os.open(os.devnull, os.O_RDONLY), 0), (output, 1), (output, 2)):
        os.dup2(fd, to)
    sys.path.insert(0, source)
    paths = [source, os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    status = 3
    try:
        import pytest

        status = int(pytest.main(arguments))
    finally:
        sys.stdout.flush()
        os._exit(status)  # threads of what was tested do not keep it


if __name__ == "__main__":
    main()
